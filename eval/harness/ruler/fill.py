"""Prompts of exactly the tokens asked for.

    fill(build, count, goal, ..): the longest build(n, rest) with count(build(n, rest)) <= goal

A haystack is n units (characters, words, documents) and, where the next one would be too much, `rest`: a beginning of the
filler. Both are found by secant steps between brackets, some five counts where going up step by step takes hundreds.
What comes out depends on the arguments alone, never on what was filled before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Build = Callable[[int, str], str]
Count = Callable[[str], int]

EXACT = 1000  # within 1/1000 of the goal: to the token below 1000 tokens
TURNS = 48


@dataclass(frozen=True)
class Filled:
    text: str
    units: int
    tokens: int


def counter(tokenizer: Any) -> Count:
    """Tokens of a prompt as a model gets it, special tokens included. Fast tokenizers count without offsets, and let other
    threads run meanwhile."""
    tokenizer("x", truncation=False, padding=False)  # settings of earlier calls stay on a fast tokenizer
    fast = getattr(getattr(tokenizer, "backend_tokenizer", None), "encode_batch_fast", None)
    if fast is None:
        return lambda text: len(tokenizer(text).input_ids)
    return lambda text: len(fast([text])[0])


def fill(build: Build, count: Count, goal: int, least: int, most: int, probe: int, filler: str = "") -> Filled | None:
    """None: build(least, "") alone is too long. probe: units of about an eighth of the goal; filler: longer than a unit,
    or nothing where a unit is a character."""
    slack = goal // EXACT
    units, tokens = largest(lambda n: count(build(n, "")), goal, least, most, least + probe, None, slack, bool(filler))
    if tokens > goal:
        return None
    rest, missing = "", goal - tokens
    if missing > slack and filler:
        guess = round(missing * len(filler) / max(1, count(filler)))
        characters, tokens = largest(
            lambda n: count(build(units, filler[:n])), goal, 0, len(filler), guess, tokens, slack, False
        )
        rest = filler[:characters]
    return Filled(build(units, rest), units, tokens)


def largest(
    size: Callable[[int], int], goal: int, low: int, high: int, guess: int, at_low: int | None, slack: int, rough: bool
) -> tuple[int, int]:
    """(n, size(n)) for the largest n in [low, high] with size(n) <= goal, near enough: the search ends within `slack`, and
    if `rough` already less than a step away. size is nearly monotone, as tokenizers are."""
    best, best_size = low, size(low) if at_low is None else at_low
    above, above_size = high + 1, None
    step, n = 0.0, guess
    for turn in range(TURNS):
        near = max(slack, step) if rough else slack
        if above - best <= 1 or goal - best_size <= near:
            break
        n = min(max(n, best + 1), above - 1)
        found = size(n)
        if found <= goal:
            step = max(0.0, (found - best_size) / (n - best))
            best, best_size = n, found
        else:
            above, above_size = n, found
        slope = step if above_size is None else (above_size - best_size) / (above - best)
        # Aimed at the middle of the slack, for an estimate just above the goal costs another turn.
        n = best + int((goal - slack // 2 - best_size) / slope) if slope > 0 else high
        if turn % 4 == 3 and above_size is not None:  # a bracket that shrinks from one side alone
            n = (best + above) // 2
    return best, best_size
