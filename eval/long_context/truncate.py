"""Truncate prompts too long for a model: remove the middle, or what is far from the answer. Shape: T tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from surgery.eval.long_context.ruler.prompt import Count

MAX_TRIES = 8


def truncate_middle(prompt: str, tokenizer: Any, count: Count, most: int) -> str:
    """Return the first and last half of `most` tokens, as LongBench truncates: instruction and question are at the ends."""
    if count(prompt) <= most:
        return prompt
    ids_T = tokenizer(prompt, truncation=False).input_ids

    def build(room: int) -> str:
        half = max(1, room // 2)
        return _decode(tokenizer, ids_T[:half]) + _decode(tokenizer, ids_T[-half:])

    return _shrink_to_fit(build, count, most)


def truncate_around(context: str, tail: str, answers: Sequence[str], tokenizer: Any, count: Count, most: int) -> str:
    """Return context + tail in at most `most` tokens, keeping the context around the first occurrence of an answer.

    Half of the kept tokens precede the answer, as in Just Read Twice (Arora et al. 2024, arXiv:2407.05483). Without an occurrence
    the beginning of the context is kept.
    """
    if count(context + tail) <= most:
        return context + tail
    ids_T = tokenizer(context, add_special_tokens=False).input_ids
    places = [
        found.start()
        for answer in answers
        if answer and (found := re.search(re.escape(answer), context, re.IGNORECASE))
    ]
    here = len(tokenizer(context[: min(places)], add_special_tokens=False).input_ids) if places else 0

    def build(room: int) -> str:
        kept = max(1, room - count(tail))
        start = max(0, min(here - kept // 2, len(ids_T) - kept))
        return _decode(tokenizer, ids_T[start : start + kept]) + tail

    return _shrink_to_fit(build, count, most)


def _shrink_to_fit(build: Callable[[int], str], count: Count, most: int) -> str:
    """Reduce the room until the result fits: decoded text may tokenize to a few more tokens."""
    room = most
    for _ in range(MAX_TRIES):
        text = build(room)
        over = count(text) - most
        if over <= 0:
            return text
        room -= max(over, 1)
    return text


def _decode(tokenizer: Any, ids_T: Sequence[int]) -> str:
    return str(tokenizer.decode(ids_T, skip_special_tokens=True))
