"""A question of RULER, and what its generators share.

Prompts, budgets and one-shot examples are those of RULER (Hsieh et al. 2024, arXiv:2404.06654; NVIDIA, Apache-2.0). What
differs: prompts are filled to the token, every sample has its own seed, and one-shot examples shrink, then go, where
they leave no room (below 4096 tokens, where RULER does not go).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any, Protocol, TypeVar

from surgery.eval.long_context.ruler.prompt import (
    Build,
    Count,
    DifferenceEstimate,
    FilledPrompt,
    SentenceEstimate,
    fill_prompt,
)

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class RulerQuestion:
    """prompt and prefix, one after the other, are what the model reads; tokens: of both and of the room for the answer.
    rule all: scored by the share of `answers` that are said; any: by whether one of them is. note: what is not as in RULER."""

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
        return {**asdict(self), "answers": list(self.answers)}


class LengthTooShortError(Exception):
    """The task does not fit into so few tokens; says what it needs."""


@dataclass(frozen=True)
class TaskContext:
    """Where questions are made: how tokens are counted, a nominal length, the seed, and texts from the mirror."""

    count: Count
    length: int
    seed: int
    texts: Mapping[str, Any]
    sentences: dict[str, int] = field(default_factory=dict)  # counted before; of many samples of a task

    def rng(self, task: str, *parts: Any) -> Random:
        """Of this task, length and sample alone."""
        return Random(" ".join(map(str, ("ruler", self.seed, task, self.length, *parts))))

    def fill_prompt(
        self, build: Build, answer_tokens: int, least: int, most: int, probe: int, filler: str = "", mixed: bool = False
    ) -> FilledPrompt:
        """mixed: the units are in another order for every number of them."""
        estimate = DifferenceEstimate(self.count) if mixed else SentenceEstimate(self.count, self.sentences)
        found = fill_prompt(build, self.count, self.length - answer_tokens, least, most, probe, filler, estimate)
        if found is None:
            needed = self.count(build(least, "")) + answer_tokens
            raise LengthTooShortError(
                f"needs {needed:,} tokens with this tokenizer, {answer_tokens} of them for the answer"
            )
        return found


def parallel_map(make: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """make(item), in order, some ahead of what is asked for: counting tokens is most of the work and needs one core each."""
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
    @property
    def name(self) -> str: ...
    @property
    def answer_tokens(self) -> int: ...
    @property
    def needs(self) -> str | None:
        """Which of the context's texts: essays, squad, hotpot."""

    def make_questions(self, ctx: TaskContext, samples: int, depths: tuple[float, ...]) -> Iterator[RulerQuestion]:
        """Raises Unfit. depths: only where a single thing is hidden; nothing: anywhere."""
