"""A needle test for any tokenizer and model, without training: which of sixteen tokens was said?

    .. local text .. The code of k1 is v1. .. local text .. The code of k3 is v3. .. The code of k1 is

Four keys and their values, every one a single token, lie in the text; the model's next-token likelihoods rank sixteen
candidates, the four values among them. Two floors: one in sixteen, and, for "any value of the context", four in sixteen. A model
that copies whatever was said last beats the first floor, not what retrieval gets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from surgery.calibrate import special_tokens
from surgery.errors import SurgeryError
from surgery.eval.draws import drawn
from surgery.eval.encoding import encoder
from surgery.recipes.papers.stories import filler

CANDIDATES, KEYS = 16, 4
SHORTEST = 96


@dataclass(frozen=True)
class Ranking:
    """ids end where the value should follow; candidates[answer] is right, said: indices of the values of the context."""

    ids: tuple[int, ...]
    candidates: tuple[int, ...]
    answer: int
    said: tuple[int, ...]


class Vocabulary:
    """Single tokens that are words for the tokenizer: " lamp"; any ordinary ones where it has too few of those."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.before, _ = special_tokens(tokenizer)
        self.encode = encoder(tokenizer, special=False)
        special = set(tokenizer.all_special_ids)
        ordinary = [i for i in range(len(tokenizer)) if i not in special]
        texts = tokenizer.batch_decode([[i] for i in ordinary], clean_up_tokenization_spaces=False)
        words = [i for i, text in zip(ordinary, texts) if text[:1] == " " and text[1:].isalpha()]
        if len(words) < 2 * CANDIDATES:  # of tokenizers that mark beginnings otherwise
            words = [i for i, text in zip(ordinary, texts) if text.isalpha()]
        self.words = words if len(words) >= 2 * CANDIDATES else ordinary
        if len(self.words) < CANDIDATES + KEYS:
            raise SurgeryError(f"the tokenizer has {len(self.words)} tokens; {CANDIDATES + KEYS} are needed")

    def ids(self, text: str) -> list[int]:
        return self.encode([text])[0].tolist()


def ranking(vocabulary: Vocabulary, length: int, depth: float, rng: Random, text: Sequence[int] | None) -> Ranking:
    """One question of exactly `length` tokens; text: what lies around the codes, None: invented stories."""
    chosen = drawn(rng, vocabulary.words, KEYS + CANDIDATES)
    keys, candidates = chosen[:KEYS], chosen[KEYS:]
    lead, verb = vocabulary.ids(" The code of"), vocabulary.ids(" is")
    facts = [[*lead, k, *verb, v, *vocabulary.ids(".")] for k, v in zip(keys, candidates)]
    asked = [*lead, keys[0], *verb]
    room = length - len(vocabulary.before) - sum(map(len, facts)) - len(asked)
    if room < KEYS:
        raise SurgeryError(f"needle: length {length} leaves no text around the codes; use {SHORTEST} or more")
    hay = _hay(vocabulary, room, rng, text)
    places = [round(depth * room), *sorted(int(rng.random() * (room + 1)) for _ in range(KEYS - 1))]
    ids, last = list(vocabulary.before), 0
    for i in sorted(range(KEYS), key=lambda i: places[i]):
        ids += [*hay[last : places[i]], *facts[i]]
        last = places[i]
    order = sorted(range(CANDIDATES), key=lambda i: candidates[i])
    place = {i: n for n, i in enumerate(order)}
    return Ranking(
        (*ids, *hay[last:], *asked),
        tuple(candidates[i] for i in order),
        place[0],
        tuple(sorted(place[i] for i in range(KEYS))),
    )


def _hay(vocabulary: Vocabulary, room: int, rng: Random, text: Sequence[int] | None) -> list[int]:
    if text is not None:
        if len(text) < room:
            raise SurgeryError(f"needle: the text has {len(text):,} tokens, a question needs {room:,}: a longer --text")
        start = int(rng.random() * (len(text) - room + 1))
        return list(text[start : start + room])
    ids: list[int] = []
    while len(ids) < room:
        ids += vocabulary.ids("".join(filler(rng, room)))
    return ids[:room]


@torch.inference_mode()
def rank(model: Any, batch: list[Ranking]) -> list[dict[str, float]]:
    """accuracy, any (of the values said), reciprocal_rank, nll among the candidates."""
    longest = max(len(q.ids) for q in batch)
    ids_BT = torch.tensor([[*q.ids, *[q.ids[-1]] * (longest - len(q.ids))] for q in batch], device=model.device)
    if all(len(q.ids) == longest for q in batch):
        logits_BV = last_logits(model, ids_BT)
    else:
        ends_B = torch.tensor([len(q.ids) - 1 for q in batch], device=model.device)
        logits_BV = model(input_ids=ids_BT, use_cache=False).logits[torch.arange(len(batch)), ends_B]
    candidates_BC = torch.tensor([q.candidates for q in batch], device=model.device)
    scores_BC = logits_BV.gather(1, candidates_BC).float().log_softmax(-1).cpu()
    return [_score(question, scores_C) for question, scores_C in zip(batch, scores_BC.tolist())]


def last_logits(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    import inspect

    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return model(input_ids=ids_BT, use_cache=False, logits_to_keep=1).logits[:, -1]
    return model(input_ids=ids_BT, use_cache=False).logits[:, -1]


def _score(question: Ranking, scores: list[float]) -> dict[str, float]:
    right = scores[question.answer]
    place = 1 + sum(s > right for i, s in enumerate(scores) if i != question.answer)
    best = max(range(len(scores)), key=lambda i: scores[i])
    return {
        "accuracy": float(best == question.answer),
        "any": float(best in question.said),
        "reciprocal_rank": 1 / place,
        "nll": -right if math.isfinite(right) else 1e9,
    }
