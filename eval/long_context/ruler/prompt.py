"""Fill prompts to an exact number of tokens.

    fill_prompt(build, count, goal, ..): the longest build(n, rest) with count(build(n, rest)) <= goal

A haystack is n units (characters, words, documents) followed by `rest`, a beginning of the filler, if one more unit
would be too long. n and the length of rest are found by bracketed secant steps. Tokenizing dominates the cost, so the
search uses estimates: the sum over sentences, each tokenized once, or, where the order of units depends on n, the
difference to the previous text. The result is tokenized in full. It depends on the arguments only, not on earlier
calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from surgery.eval import text as encoding

Build = Callable[[int, str], str]
Count = Callable[[str], int]

TOLERANCE_DIVISOR = 1000  # accept 1/1000 below the goal if no prompt has that length or estimates fail
MAX_SEARCH_STEPS = 48
MAX_ROUNDS = 4
MARGIN_CHARACTERS = 256  # characters kept on either side of a difference


@dataclass(frozen=True)
class FilledPrompt:
    """A prompt, its number of units, and its number of tokens."""

    text: str
    units: int
    tokens: int


@dataclass(frozen=True)
class WholeUnits:
    """How the original of RULER fills a task's prompts: with whole units, as many in every prompt of a task and length.

    Source: the generators in scripts/data/synthetic of NVIDIA/RULER at commit c3f5e3b. The number of units is searched
    on one prompt, by bisection or, from `start`, step by step. A prompt that is too long with it loses `step` units
    until it fits.

    Attributes:
        step: smallest number of units, and what a prompt that is too long loses.
        size: number of units -> n of `build`.
        sample: units of the prompt from which the upper end of the bisection is estimated; None: `step`.
        slack: upper end of the bisection, in multiples of the estimate.
        start: first number of a search step by step; None: bisection.
        most: largest number of units; None: unlimited.
    """

    step: int
    size: Callable[[int], int] = lambda units: units
    sample: int | None = None
    slack: int = 3
    start: int | None = None
    most: int | None = None

    def search(self, count: Count, build: Build, length: int, goal: int) -> int:
        """Return the number of units for prompts of `goal` tokens. length: tokens of prompt and answer."""

        def tokens(units: int) -> int:
            return count(build(self.size(units), ""))

        if self.start is not None:
            units = self.start
            while tokens(units) < goal:
                units += self.step
            return units - self.step
        sample = self.sample or self.step
        low, high = self.step, max(int(length * sample / tokens(sample) * self.slack), 2 * self.step)
        high = high if self.most is None else min(high, self.most)
        largest = self.step
        while low <= high:
            middle = (low + high) // 2
            if tokens(middle) <= goal:
                largest, low = middle, middle + 1
            else:
                high = middle - 1
        return largest

    def fill(self, count: Count, build: Build, goal: int, units: int) -> FilledPrompt | None:
        """Return the prompt of at most `units` units that fits; None if `step` units are too many."""
        while True:
            text = build(self.size(units), "")
            tokens = count(text)
            if tokens <= goal:
                return FilledPrompt(text, self.size(units), tokens)
            if units <= self.step:
                return None
            units = max(units - self.step, 1)


def prompt_counter(tokenizer: Any) -> Count:
    """Return a function prompt -> tokens as the model receives it, special tokens included."""
    counts = encoding.counter(tokenizer)
    return lambda text: counts([text])[0]


class SentenceEstimate:
    """Estimate of count(text) as the sum over its sentences, each counted after a sentence end, plus a known
    correction.
    """

    def __init__(self, count: Count, known: dict[str, int]):
        self.count, self.known, self.correction = count, known, 0
        self.end = count(".")

    def __call__(self, text: str) -> int:
        """Return the estimate."""
        parts, known = text.replace(". ", ".\0 ").replace(".\n", ".\0\n").split(".\0"), self.known
        for word in {*parts}.difference(known):
            known[word] = self.count(f".{word}.") - self.end
        return sum(map(known.__getitem__, parts)) + self.correction

    def count_exactly(self, text: str, estimate: int) -> int:
        """Count in full and update the correction."""
        tokens = self.count(text)
        self.correction += tokens - estimate
        return tokens


class DifferenceEstimate:
    """Estimate of count(text) from the difference to the text that was counted last."""

    def __init__(self, count: Count):
        self.count, self.text, self.tokens = count, "", 0

    def __call__(self, text: str) -> int:
        """Return the estimate; a full count if the texts differ too much."""
        start, end = _common_ends(self.text, text)
        old, new = self.text[start : len(self.text) - end], text[start : len(text) - end]
        if len(old) + len(new) > len(text):
            return self.count_exactly(text, 0)
        return self.tokens + self.count(new) - self.count(old)

    def count_exactly(self, text: str, estimate: int) -> int:
        """Count in full and remember the text."""
        if text != self.text:
            self.text, self.tokens = text, self.count(text)
        return self.tokens


def _common_ends(a: str, b: str) -> tuple[int, int]:
    """Return the lengths of the common prefix and suffix, less MARGIN_CHARACTERS."""
    most = min(len(a), len(b))
    start = _largest_true(lambda n: a[:n] == b[:n], most)
    end = _largest_true(lambda n: a[len(a) - n :] == b[len(b) - n :], most - start)
    return max(0, start - MARGIN_CHARACTERS), max(0, end - MARGIN_CHARACTERS)


def _largest_true(same: Callable[[int], bool], most: int) -> int:
    """Return the largest n <= most with same(n), which is true up to some n and false beyond."""
    low, high = 0, most
    while low < high:
        n = (low + high + 1) // 2
        low, high = (n, high) if same(n) else (low, n - 1)
    return low


def fill_prompt(
    build: Build,
    count: Count,
    goal: int,
    least: int,
    most: int,
    probe: int,
    *,
    filler: str = "",
    estimate: SentenceEstimate | DifferenceEstimate | None = None,
) -> FilledPrompt | None:
    """Return the longest prompt of at most `goal` tokens; None if build(least, "") exceeds it.

    Args:
        build: (units, rest) -> prompt.
        count: prompt -> tokens.
        least, most: range of units.
        probe: units that make about an eighth of the goal.
        filler: text longer than a unit; empty if a unit is a character.
        estimate: token estimate that the search uses.
    """
    shortest = build(least, "")
    estimate = estimate or DifferenceEstimate(count)
    if estimate.count_exactly(shortest, estimate(shortest)) > goal:
        return None
    for turn in range(MAX_ROUNDS):
        filled = _search_fill(build, estimate, goal, least, most, probe, filler=filler, slack=0)
        tokens = estimate.count_exactly(filled.text, filled.tokens)
        if tokens == filled.tokens or (turn and 0 <= goal - tokens <= goal // TOLERANCE_DIVISOR):
            return FilledPrompt(filled.text, filled.units, tokens)
    return _search_fill(build, count, goal, least, most, probe, filler=filler, slack=goal // TOLERANCE_DIVISOR)


def _search_fill(
    build: Build, size: Count, goal: int, least: int, most: int, probe: int, *, filler: str, slack: int
) -> FilledPrompt:
    units, tokens = search_largest(
        lambda n: size(build(n, "")), goal, least, most, least + probe, at_low=None, slack=slack, rough=bool(filler)
    )
    rest, missing = "", goal - tokens
    if missing > slack and filler:
        guess = round(missing * len(filler) / max(1, size(filler)))
        characters, tokens = search_largest(
            lambda n: size(build(units, filler[:n])),
            goal,
            0,
            len(filler),
            guess,
            at_low=tokens,
            slack=slack,
            rough=False,
        )
        rest = filler[:characters]
    return FilledPrompt(build(units, rest), units, tokens)


def search_largest(
    size: Callable[[int], int],
    goal: int,
    low: int,
    high: int,
    guess: int,
    *,
    at_low: int | None,
    slack: int,
    rough: bool,
) -> tuple[int, int]:
    """Return (n, size(n)) for about the largest n in [low, high] with size(n) <= goal.

    The search ends within `slack` of the goal, and with `rough` also within one step. size is nearly monotone, as
    tokenizers are.
    """
    best, best_size = low, size(low) if at_low is None else at_low
    above, above_size = high + 1, None
    step, n = 0.0, guess
    for turn in range(MAX_SEARCH_STEPS):
        near = max(slack, step) if rough else slack
        if above - best <= 1 or goal - best_size <= near:
            break
        n = min(max(n, best + 1), above - 1)
        tokens = size(n)
        if tokens <= goal:
            step = max(0.0, (tokens - best_size) / (n - best))
            best, best_size = n, tokens
        else:
            above, above_size = n, tokens
        slope = step if above_size is None else (above_size - best_size) / (above - best)
        # Aim at the middle of the slack: an estimate just above the goal costs another step.
        n = best + int((goal - slack // 2 - best_size) / slope) if slope > 0 else high
        if turn % 4 == 3 and above_size is not None:  # a bracket that shrinks from one side alone
            n = (best + above) // 2
    return best, best_size
