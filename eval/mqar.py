"""Multi-query associative recall (MQAR; Arora et al. 2023, "Zoology", section 4.1; zoology/data/multiquery_ar.py).

    k1 v1 k2 v2 .. | x x k2 x x x k1 x ..

P pairs of a key and a value, then every key once more among random tokens; where it stands again, the next token should be its value.
Where it stands is drawn from a power law: the s-th place after the pairs has weight s^(a - 1), a = 0.01, so that most recalls are
near, as in text. Keys come from one half of the vocabulary, values from the other; a pair's places are drawn without
replacement, two tokens apart, as there. There models are trained on it; here a pretrained one is asked, in context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from surgery.errors import SurgeryError
from surgery.eval.draws import drawn

POWER = 0.01


@dataclass(frozen=True)
class Recall:
    """ids[queries[i]] is a key, and targets[i] should follow it; gaps[i]: tokens since it stood there with its value."""

    ids: tuple[int, ...]
    queries: tuple[int, ...]
    targets: tuple[int, ...]
    gaps: tuple[int, ...]


def recall(vocabulary: Sequence[int], length: int, pairs: int, rng: Random, power: float = POWER) -> Recall:
    """One sequence of `length` tokens of the vocabulary (its first is never a key, as in Zoology)."""
    if length % 2 or 4 * pairs > length or len(vocabulary) <= length:
        raise SurgeryError(
            f"mqar: {pairs} pairs in {length} tokens of a vocabulary of {len(vocabulary)}: the length must be even, at least "
            "4 times the pairs, and below the vocabulary's size"
        )
    half = len(vocabulary) // 2
    keys = drawn(rng, vocabulary[1:half], pairs)
    values = drawn(rng, vocabulary[half:], pairs)
    ids = [token for pair in zip(keys, values) for token in pair]
    ids += [vocabulary[int(rng.random() * len(vocabulary))] for _ in range(length - 2 * pairs)]
    places = _power_law(rng, (length - 2 * pairs) // 2, pairs, power)
    queries = [2 * pairs + 2 * place for place in places]
    for key, query in zip(keys, queries):
        ids[query] = key
    order = sorted(range(pairs), key=lambda i: queries[i])
    return Recall(
        tuple(ids),
        tuple(queries[i] for i in order),
        tuple(values[i] for i in order),
        tuple(queries[i] - 2 * i for i in order),
    )


def _power_law(rng: Random, space: int, count: int, power: float) -> list[int]:
    """`count` of 0 .. space - 1, drawn one after the other without replacement, the s-th (from 1) of weight s^(power - 1): the
    largest of u^(1 / weight) (Efraimidis and Spirakis 2006)."""
    scores = [(rng.random() ** ((s + 1) ** (1 - power)), s) for s in range(space)]
    return [s for _, s in sorted(scores, reverse=True)[:count]]
