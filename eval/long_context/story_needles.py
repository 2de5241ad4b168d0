"""Task niah_story: needles in a story, in the form that the embedded checkpoint was trained on
(eval/stories/__init__.py).

A story states "The code of the red lantern is 7 3." and ends with a question for that code. Other models can be asked
as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from surgery.eval.long_context.ruler.base import LengthTooShortError, RulerQuestion, TaskContext
from surgery.eval.stories import needle_question


@dataclass(frozen=True)
class StoryNeedles:
    """Story questions filled up to the last whole sentence."""

    name: str = "niah_story"
    answer_tokens: int = 8
    needs: str | None = None

    def make_questions(self, ctx: TaskContext, samples: int, depths: tuple[float, ...]) -> Iterator[RulerQuestion]:
        """Yield questions: at each depth, or with an empty `depths` at random depths.

        Raises LengthTooShortError if a question does not fit.
        """
        special = ctx.count("")
        for depth in depths or (None,):
            for index in range(samples):
                rng = ctx.rng(self.name, index, depth)
                needle_depth = rng.random() if depth is None else depth
                goal = ctx.length - self.answer_tokens
                asked = needle_question(
                    rng,
                    goal - special,
                    needle_depth,
                    counts=lambda texts: [ctx.count(text) - special for text in texts],
                )
                tokens = ctx.count(asked.prompt) + self.answer_tokens
                if tokens > ctx.length:
                    raise LengthTooShortError(f"needs {tokens:,} tokens with this tokenizer")
                yield RulerQuestion(
                    f"{self.name} {ctx.length} {depth} {index}", asked.prompt, "", (asked.answer.strip(),), ctx.length, tokens,
                    depth=depth,
                )  # fmt: skip
