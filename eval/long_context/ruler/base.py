"""Question type and shared code of RULER's generators.

Prompts, budgets and one-shot examples are those of RULER (Hsieh et al. 2024, arXiv:2404.06654; NVIDIA, Apache-2.0).
There are three differences. Prompts are filled to the exact number of tokens (with `fill="ruler"` by whole units, as in
the original). Every sample has its own seed. One-shot examples that do not fit are shortened or left out, below 4096
tokens, where RULER is not defined.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from random import Random
from typing import Any, Protocol, TypeVar

from surgery.eval.long_context.ruler.prompt import (
    Build,
    Count,
    DifferenceEstimate,
    FilledPrompt,
    SentenceEstimate,
    WholeUnits,
    fill_prompt,
)

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class RulerQuestion:
    """A question of RULER.

    Attributes:
        prompt, prefix: what the model reads, in this order.
        tokens: tokens of both and of the room for the answer.
        rule: "all": score is the share of `answers` in the output; "any": 1 if one of them is.
        note: how the question differs from RULER's.
    """

    id: str
    prompt: str
    prefix: str
    answers: tuple[str, ...]
    length: int
    tokens: int
    rule: str = "all"
    depth: float | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the question as JSON data."""
        return {**asdict(self), "answers": list(self.answers)}


class LengthTooShortError(Exception):
    """The task does not fit in the requested tokens; the message says how many it needs."""


@dataclass(frozen=True)
class TaskContext:
    """What generators share: token counter, target length, seed, and texts from the mirror.

    fill: "exact" fills prompts to the exact number of tokens, "ruler" with whole units as the original. units: the
    number of units that was found for a kind of prompt.
    """

    count: Count
    length: int
    seed: int
    texts: Mapping[str, Any]
    sentences: dict[str, int] = field(default_factory=dict)  # token counts of sentences, shared by a task's samples
    fill: str = "exact"
    units: dict[str, int] = field(default_factory=dict)

    def rng(self, task: str, *parts: Any) -> Random:
        """Return a generator seeded by task, length and sample only."""
        return Random(" ".join(map(str, ("ruler", self.seed, task, self.length, *parts))))

    def fill_prompt(
        self,
        build: Build,
        answer_tokens: int,
        least: int,
        most: int,
        probe: int,
        *,
        original: WholeUnits,
        kind: str,
        filler: str = "",
        mixed: bool = False,
    ) -> FilledPrompt:
        """Fill a prompt to the target length.

        mixed: the order of the units depends on their number. original: the fill of the original, for prompts of this
        kind.
        """
        if self.fill == "ruler":
            return self._fill_whole_units(build, answer_tokens, original, kind)
        estimate = DifferenceEstimate(self.count) if mixed else SentenceEstimate(self.count, self.sentences)
        filled = fill_prompt(
            build, self.count, self.length - answer_tokens, least, most, probe, filler=filler, estimate=estimate
        )
        if filled is None:
            needed = self.count(build(least, "")) + answer_tokens
            raise LengthTooShortError(
                f"needs {needed:,} tokens with this tokenizer, {answer_tokens} of them for the answer"
            )
        return filled

    def _fill_whole_units(self, build: Build, answer_tokens: int, original: WholeUnits, kind: str) -> FilledPrompt:
        goal = self.length - answer_tokens
        if kind not in self.units:
            self.units[kind] = original.search(self.count, build, self.length, goal)
        filled = original.fill(self.count, build, goal, self.units[kind])
        if filled is None:
            needed = self.count(build(original.size(original.step), "")) + answer_tokens
            raise LengthTooShortError(
                f"needs {needed:,} tokens with this tokenizer for the {original.step} units that the original begins "
                "with"
            )
        return filled

    def step(self, units: int) -> int:
        """Return the original's step of a haystack: 5 below 4096 tokens, where it is not defined, otherwise `units`."""
        return units if self.length >= 4096 else 5

    def make_each(self, make: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield make(item) in order.

        With the original's fill the first, which finds the number of units, is made before the others.
        """
        rest = iter(items)
        if self.fill == "ruler":
            yield from map(make, islice(rest, 1))
        yield from parallel_map(make, rest)


def parallel_map(make: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield make(item) in order, computed ahead in threads: counting tokens dominates, and takes one core per item."""
    threads = min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[R]] = deque()
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class RulerTask(Protocol):
    """Interface of a RULER task."""

    @property
    def name(self) -> str:
        """Name of the task, as in RULER."""

    @property
    def answer_tokens(self) -> int:
        """Maximum tokens of an answer."""

    @property
    def needs(self) -> str | None:
        """Which of the context's texts the task needs: essays, squad, hotpot, or None."""

    def make_questions(self, ctx: TaskContext, samples: int, depths: tuple[float, ...]) -> Iterator[RulerQuestion]:
        """Yield questions. depths: positions of a single needle; empty: random.

        Raises LengthTooShortError if the task does not fit.
        """
