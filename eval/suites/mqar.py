"""Suite `mqar`: multi-query associative recall (Arora et al. 2023, "Zoology", section 4.1;
zoology/data/multiquery_ar.py).

    k1 v1 k2 v2 .. | x x k2 x x x k1 x ..

P key-value pairs are followed by random tokens among which every key appears once more; the next token should then be
its value. The s-th place after the pairs is drawn with weight s^(a - 1), a = 0.01, without replacement and at even
distances, so that most recalls are near, as in text. Keys come from one half of the vocabulary, values from the other.
Zoology trains models on the task; here a pretrained model is asked in context. Metrics: `accuracy`, whether the value
is likelier than all other values; `exact`, whether it is the likeliest token of the vocabulary; `nll` in nats.

All draws use random.Random.random() alone, whose sequence Python guarantees across releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from surgery.calibration.data import special_tokens
from surgery.core.errors import SurgeryError
from surgery.eval.batching import score_in_batches
from surgery.eval.losses import check_lm_head, max_batch_tokens
from surgery.eval.suite import (
    EvalMetric,
    EvalModel,
    EvalOptions,
    Sample,
    Suite,
    SuiteResult,
    no_tasks,
    register,
    stable_id,
)


def draw_without_replacement(rng: Random, items: Sequence[int], count: int) -> list[int]:
    """Return `count` of the items in random order."""
    pool = list(items)
    for i in range(count):
        j = i + int(rng.random() * (len(pool) - i))
        pool[i], pool[j] = pool[j], pool[i]
    return pool[:count]


POWER_LAW_EXPONENT = 0.01


@dataclass(frozen=True)
class RecallSequence:
    """A sequence of tokens with its queries.

    Attributes:
        ids: the tokens.
        queries: positions of the queried keys, ascending; the token after ids[queries[i]] should be targets[i].
        gaps: distance in tokens from each query to the key's first occurrence.
    """

    ids: tuple[int, ...]
    queries: tuple[int, ...]
    targets: tuple[int, ...]
    gaps: tuple[int, ...]


def make_recall_sequence(
    vocabulary: Sequence[int], length: int, pairs: int, rng: Random, power: float = POWER_LAW_EXPONENT
) -> RecallSequence:
    """Draw a sequence of `length` tokens with `pairs` key-value pairs; the vocabulary's first token is never a key, as
    in Zoology.

    Raises SurgeryError unless length is even, at least 4 * pairs, and below the size of the vocabulary.
    """
    if length % 2 or 4 * pairs > length or len(vocabulary) <= length:
        raise SurgeryError(
            f"mqar: {pairs} pairs in {length} tokens of a vocabulary of {len(vocabulary)}: the length must be even, at "
            "least "
            "4 times the pairs, and below the vocabulary's size"
        )
    half = len(vocabulary) // 2
    keys = draw_without_replacement(rng, vocabulary[1:half], pairs)
    values = draw_without_replacement(rng, vocabulary[half:], pairs)
    ids = [token for pair in zip(keys, values) for token in pair]
    ids += [vocabulary[int(rng.random() * len(vocabulary))] for _ in range(length - 2 * pairs)]
    places = _power_law(rng, (length - 2 * pairs) // 2, pairs, power)
    queries = [2 * pairs + 2 * position for position in places]
    for key, query in zip(keys, queries):
        ids[query] = key
    order = sorted(range(pairs), key=lambda i: queries[i])
    return RecallSequence(
        tuple(ids),
        tuple(queries[i] for i in order),
        tuple(values[i] for i in order),
        tuple(queries[i] - 2 * i for i in order),
    )


def _power_law(rng: Random, space: int, count: int, power: float) -> list[int]:
    """Draw `count` of 0 .. space - 1 without replacement, the s-th (from 1) with weight s^(power - 1).

    Takes the largest of u^(1 / weight) (Efraimidis and Spirakis 2006).
    """
    scores = [(rng.random() ** ((s + 1) ** (1 - power)), s) for s in range(space)]
    return [s for _, s in sorted(scores, reverse=True)[:count]]


LENGTHS = (64, 128, 256, 512)  # tokens; the lengths of Zoology's Figure 2
TOKENS_PER_PAIR = 16
# (tokens, pairs) of papers, for --pairs NAME; paths are those of HazyResearch/zoology at commit d88d6f5
# (eval/upstream.py).
#   zoology     Arora et al. 2023, arXiv:2312.04927, Figure 2: zoology/experiments/paper_configs/iclr24_zoology_figure2, whose entry
#               (512, 64) is a comment there
#   based       Arora et al. 2024, arXiv:2402.18668, Figure 2: the test configurations of arxiv24_based_figure2 beside it
#   log-linear  Guo et al. 2025, arXiv:2506.04761, section 4.1: "256-token sequences containing 4 to 64 key-value
#               pairs"; the powers of two between them are those of Based
PAPER_SETTINGS: dict[str, tuple[tuple[int, int], ...]] = {
    "zoology": ((64, 4), (128, 8), (256, 16), (512, 64)),
    "based": ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256)),
    "log-linear": ((256, 4), (256, 8), (256, 16), (256, 32), (256, 64)),
}
SEQUENCES, VOCABULARY_SIZE = 64, 8192
METRICS = {
    "accuracy": EvalMetric("accuracy", "accuracy", scale=100, unit="%"),
    "exact": EvalMetric("exact", "accuracy", scale=100, unit="%", title="exact, of the whole vocabulary"),
    "nll": EvalMetric("nll", "mean", higher_is_better=False, unit="nats"),
}


def sample_vocabulary(tokenizer: Any, seed: int) -> list[int]:
    """Return up to VOCABULARY_SIZE ordinary tokens in random order, so that keys and values are of every kind."""
    special = set(tokenizer.all_special_ids)
    ids = [i for i in range(len(tokenizer)) if i not in special]
    rng = Random(f"mqar vocabulary {seed}")
    for i in range(len(ids) - 1, 0, -1):
        j = int(rng.random() * (i + 1))
        ids[i], ids[j] = ids[j], ids[i]
    return sorted(ids[:VOCABULARY_SIZE], key=lambda i: rng.random())


def lengths_and_pairs(options: EvalOptions, room: int) -> list[tuple[int, int]]:
    """Return (tokens, pairs) of the sequences to draw, from --lengths and --pairs. room: most tokens that the model can
    read.

    Raises SurgeryError if no length fits, or if --lengths is combined with a paper's settings, which have their own.
    """
    if isinstance(options.pairs, str):
        if options.lengths:
            raise SurgeryError(
                f"--pairs {options.pairs} sets the lengths too. Leave out --lengths, or give --pairs as numbers."
            )
        settings = [(n, pairs) for n, pairs in PAPER_SETTINGS[options.pairs] if n <= room]
    else:
        lengths = tuple(dict.fromkeys(options.lengths)) or tuple(n for n in LENGTHS if n <= room)
        settings = [(n, pairs) for n in lengths for pairs in dict.fromkeys(options.pairs) or (n // TOKENS_PER_PAIR,)]
        if options.pairs and not options.lengths:  # with the default lengths, those in which the pairs fit
            settings = [(n, pairs) for n, pairs in settings if 4 * pairs <= n]
    if not settings:
        raise SurgeryError(
            f"mqar: no length fits inputs of {room} tokens and {options.pairs or 'the default'} pairs, which need 4 "
            "tokens each. "
            "Give --lengths, or fewer --pairs."
        )
    return settings


def task_name(length: int, pairs: int | None = None) -> str:
    """Return the task of a cell: mqar, or with --pairs mqar_ and the number of pairs."""
    return "mqar" if pairs is None else f"mqar_{pairs}"


def run(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
    """Ask the model SEQUENCES (or --limit) sequences for each length and number of pairs.

    With --pairs each number of pairs is a task, mqar_4 and so on, and the samples have the group `pairs`.
    """
    check_lm_head(eval_model.model)
    vocabulary, (before, _) = (
        sample_vocabulary(eval_model.tokenizer, options.seed),
        special_tokens(eval_model.tokenizer),
    )
    room = min(eval_model.longest or 2**30, len(vocabulary) - 1) - len(before)
    asked = []
    for length, pairs in lengths_and_pairs(options, room):
        cell = (length, pairs) if options.pairs else (length,)
        for i in range(options.limit or SEQUENCES):
            rng = Random(" ".join(map(str, ("mqar", options.seed, *cell, i))))
            asked.append((cell, i, make_recall_sequence(vocabulary, length, pairs, rng)))
    values_V = torch.tensor(vocabulary[len(vocabulary) // 2 :], device=eval_model.model.device)

    def score(batch: list[tuple[tuple[int, ...], int, RecallSequence]]) -> list[list[dict[str, float]]]:
        return _score_batch(eval_model.model, [one for _, _, one in batch], before, values_V)

    most = max_batch_tokens(eval_model.model)
    scores = score_in_batches(
        eval_model, options, asked, score, lambda q: q[0][0], f"mqar of {eval_model.name}", tokens=most
    )
    samples = [
        Sample(
            task_name(*cell),
            stable_id(*cell, i, k),
            metrics,
            dict(zip(("length", "pairs"), cell)),
            unit=" ".join(map(str, (*cell, i))),
            shown={"gap": one.gaps[k]},
        )
        for (cell, i, one), every in zip(asked, scores)
        for k, metrics in enumerate(every)
    ]
    return SuiteResult(samples, METRICS, floors={s.task: {"accuracy": 1 / len(values_V)} for s in samples})


@torch.inference_mode()
def _score_batch(
    model: Any, batch: list[RecallSequence], before: list[int], values_V: torch.Tensor
) -> list[list[dict[str, float]]]:
    """Return the metrics of every query of every sequence. Rows are padded on the right."""
    longest = max(len(one.ids) for one in batch)
    rows = [[*before, *one.ids, *[one.ids[-1]] * (longest - len(one.ids))] for one in batch]
    logits_BTV = model(input_ids=torch.tensor(rows, device=model.device), use_cache=False).logits
    scores = []
    for one, logits_TV in zip(batch, logits_BTV):
        at_Q = torch.tensor(one.queries, device=model.device) + len(before)
        targets_Q = torch.tensor(one.targets, device=model.device)
        scores_QV = logits_TV[at_Q].float().log_softmax(-1)
        guess_Q = values_V[scores_QV[:, values_V].argmax(-1)]
        nll_Q = -scores_QV.gather(1, targets_Q[:, None])[:, 0]
        parts = [(guess_Q == targets_Q), (scores_QV.argmax(-1) == targets_Q), nll_Q]
        table = torch.stack([values.float() for values in parts], dim=1).tolist()
        scores.append([dict(zip(METRICS, row)) for row in table])
    return scores


register(Suite("mqar", "multi-query associative recall (Zoology), asked in context", run, tasks=no_tasks))
