"""Needles in a story, as the embedded checkpoint was taught them (eval/stories/__init__.py): "The code of the red
lantern is 7 3." and at the end the question for it. A model that has never seen them can answer them as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from surgery.eval.long_context.ruler.base import RulerQuestion, TaskContext, LengthTooShortError
from surgery.eval.stories import needle_question


@dataclass(frozen=True)
class StoryNeedles:
    """Filled up to the last whole sentence."""

    name: str = "niah_story"
    answer_tokens: int = 8
    needs: str | None = None

    def ask(self, room: TaskContext, samples: int, depths: tuple[float, ...]) -> Iterator[RulerQuestion]:
        special = room.count("")
        for depth in depths or (None,):
            for index in range(samples):
                rng = room.rng(self.name, index, depth)
                place = rng.random() if depth is None else depth
                goal = room.length - self.answer_tokens
                asked = needle_question(
                    rng, goal - special, place, counts=lambda texts: [room.count(text) - special for text in texts]
                )
                tokens = room.count(asked.prompt) + self.answer_tokens
                if tokens > room.length:
                    raise LengthTooShortError(f"needs {tokens:,} tokens with this tokenizer")
                yield RulerQuestion(
                    f"{self.name} {room.length} {depth} {index}", asked.prompt, "", (asked.answer.strip(),), room.length, tokens,
                    depth=depth,
                )  # fmt: skip
