"""Truncate prompts too long for a model: remove the middle, or what is far from the answer. Shape: T tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from surgery.eval.long_context.ruler.prompt import Count

MAX_TRIES = 8


def truncate_middle(prompt: str, tokenizer: Any, count: Count, most: int) -> str:
    """Return the first and last half of `most` tokens, as LongBench truncates: instruction and question are at the
    ends.
    """
    if count(prompt) <= most:
        return prompt
    ids_T = tokenizer(prompt, truncation=False).input_ids

    def build(room: int) -> str:
        half = max(1, room // 2)
        return _decode(tokenizer, ids_T[:half]) + _decode(tokenizer, ids_T[-half:])

    return _shrink_to_fit(build, count, most)


def truncate_around(context: str, tail: str, answers: Sequence[str], tokenizer: Any, count: Count, most: int) -> str:
    """Return context + tail in at most `most` tokens, keeping the context around the first occurrence of an answer.

    Half of the kept tokens precede the answer, as in Just Read Twice (Arora et al. 2024, arXiv:2407.05483). Without an
    occurrence the beginning of the context is kept.
    """
    if count(context + tail) <= most:
        return context + tail
    ids_T = tokenizer(context, add_special_tokens=False).input_ids
    places = [
        match.start()
        for answer in answers
        if answer and (match := re.search(re.escape(answer), context, re.IGNORECASE))
    ]
    here = len(tokenizer(context[: min(places)], add_special_tokens=False).input_ids) if places else 0

    def build(room: int) -> str:
        window = max(1, room - count(tail))
        start = max(0, min(here - window // 2, len(ids_T) - window))
        return _decode(tokenizer, ids_T[start : start + window]) + tail

    return _shrink_to_fit(build, count, most)


def cut_window(
    context: str,
    searched: Sequence[str],
    alternatives: Sequence[str],
    tokenizer: Any,
    length: int,
    token: int | None = None,
) -> str:
    """Return `length` tokens of a stripped context around its first occurrence of one of `searched`, as Just Read Twice
    cuts them.

    The rule is `Task.truncate_context` in the lm-eval-harness of HazyResearch/prefix-linear-attention at commit
    7490f22: as many as length // 2 tokens before the occurrence, the rest from it on. If none of `searched` occurs, the
    first of `alternatives` that does; then position `token` if it is known; then the last character. Special tokens
    count, and none is in the result. The result may tokenize to another number of tokens, and what is behind the window
    is lost, also the end of the context.
    """
    context = context.strip()
    ids_T = tokenizer(context, truncation=False).input_ids
    places = [position for word in searched if (position := _find(word, context)) >= 0]
    places = places or [position for word in alternatives if (position := _find(word, context)) >= 0][:1]
    first = min(places, default=-1)
    here = len(tokenizer(context[:first], truncation=False).input_ids)
    if first < 0 and token is not None and here > length:
        here = token
    start = max(0, here - length // 2)
    end = min(len(ids_T), start + length)
    return _decode(tokenizer, ids_T[start:end])


def _find(word: str, text: str) -> int:
    match = re.search(re.escape(word), text, re.IGNORECASE)
    return match.start() if match else -1


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
