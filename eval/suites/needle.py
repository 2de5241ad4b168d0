"""Suite `needle`: retrieval of a code from the context, by length and depth, for small models.

needle         Questions of the story generator, which the embedded checkpoint was trained on: a code is stated once at some depth
               of a story among other codes, and asked for at the end. One forward pass over question and answer
               suffices: greedy decoding gives the answer exactly if every answer token is the argmax given the tokens
               before it.
needle-rank    For any tokenizer, without training: four keys and their values, each a single token, lie in the text, and the
               model's next-token likelihoods rank sixteen candidates, among them the four values:

    .. local text .. The code of k1 is v1. .. local text .. The code of k3 is v3. .. The code of k1 is

               Guessing scores 1/16 for `accuracy` and 4/16 for `any` (any value of the context). A model that copies
               the last value exceeds the first of these, but does not reach what retrieval reaches.

Shapes: B batch, T tokens, N positions scored, V vocabulary, C candidates.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import torch

from surgery.calibration.data import document_stream, special_tokens
from surgery.core.errors import SurgeryError
from surgery.eval.batching import score_in_batches
from surgery.eval.losses import check_lm_head
from surgery.eval.stories import NeedleQuestion, filler, needle_question
from surgery.eval.suite import (
    EvalMetric,
    EvalModel,
    EvalOptions,
    Sample,
    Suite,
    SuiteResult,
    register,
    select_tasks,
    stable_id,
)
from surgery.eval.suites.mqar import draw_without_replacement
from surgery.eval.text import Counts, counter, encoder, note_text, to_array

EncodedQuestion = tuple[np.ndarray, int]  # tokens of prompt and answer, number of prompt tokens

LENGTHS = (64, 128, 256, 512, 1024)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def share_error(right: float, number: int) -> float:
    """Return the standard error of a share of right answers, from (right + 1) / (number + 2)."""
    share = (right + 1) / (number + 2)
    return float((share * (1 - share) / (number + 2)) ** 0.5)


@dataclass(frozen=True)
class NeedleTable:
    """Shares of correct answers: `accuracy[i][j]` for lengths[i] (tokens) and depths[j] (0 start, 1 end)."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int
    accuracy: tuple[tuple[float, ...], ...]

    @property
    def errors(self) -> tuple[tuple[float, ...], ...]:
        """Standard errors, from (k + 1) / (n + 2) correct answers: positive even for a cell without a miss."""
        return tuple(tuple(share_error(share * self.samples, self.samples) for share in row) for row in self.accuracy)

    @property
    def worst(self) -> float:
        """Lowest accuracy of a cell."""
        return min(min(row) for row in self.accuracy)

    @property
    def mean(self) -> float:
        """Mean accuracy of all cells."""
        return sum(map(sum, self.accuracy)) / (len(self.lengths) * len(self.depths))

    def markdown(self) -> str:
        """Return a Markdown table in percent: one row per length, one column per depth."""
        lines = [
            ["length \\ depth", *(f"{depth:g}" for depth in self.depths)],
            ["---"] * (len(self.depths) + 1),
        ]
        for length, row in zip(self.lengths, self.accuracy):
            lines.append([str(length), *(f"{100 * share:.1f}" for share in row)])
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON data."""
        return asdict(self) | {"errors": self.errors, "worst": self.worst, "mean": self.mean}


def needle_accuracy(
    model: torch.nn.Module,
    tokenizer: Any,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    samples: int = 32,
    *,
    seed: int = 0,
    batch_size: int = 16,
    device: str | torch.device | None = None,
) -> NeedleTable:
    """Ask `samples` questions at each length and depth; a question depends only on seed, length, depth and index.

    Args:
        model: causal language model, `model(input_ids).logits` (B, T, V); left in eval mode.
        lengths: maximum tokens of question and answer; the story is filled up to the last whole sentence.
        device: device of the inputs; default: that of the model's first parameter.
    """
    model.eval()
    input_device = torch.device(device) if device is not None else next(model.parameters()).device
    accuracy = []
    for length in lengths:
        row = []
        for depth in depths:
            asked = [encode_question(tokenizer, q) for q in cell_questions(tokenizer, length, depth, samples, seed)]
            right = sum(sum(score_greedy(model, batch, input_device)) for batch in _batches(asked, batch_size))
            row.append(right / samples)
        accuracy.append(tuple(row))
    return NeedleTable(tuple(lengths), tuple(depths), samples, tuple(accuracy))


def cell_questions(tokenizer: Any, length: int, depth: float, samples: int, seed: int) -> Iterator[NeedleQuestion]:
    """Yield the questions of one length and depth, equal for all models with the same tokenizer, so that scores are
    paired.
    """
    for index in range(samples):
        yield make_question(tokenizer, length, depth, index, seed)


def make_question(
    tokenizer: Any, length: int, depth: float, index: int, seed: int, counts: Counts | None = None
) -> NeedleQuestion:
    """Return one question. counts: token counter of the tokenizer, if made already."""
    rng = Random(f"needle {seed} {length} {depth} {index}")
    room = length - tokenizer.num_special_tokens_to_add()
    return needle_question(rng, room, depth, counts=counts or counter(tokenizer, special=False))


def encode_question(tokenizer: Any, question: NeedleQuestion) -> EncodedQuestion:
    """Return (tokens of prompt and answer, number of prompt tokens)."""
    whole, size = question.prompt + question.answer, len(question.prompt)
    fast = getattr(getattr(tokenizer, "backend_tokenizer", None), "encode_batch", None)
    if fast is None:
        ids, prompt = encoder(tokenizer)([whole, question.prompt])
        same = min(len(ids), len(prompt))
        return ids, next((i for i in range(same) if ids[i] != prompt[i]), same)
    (encoding,) = fast([whole])
    start = encoding.char_to_token(size)  # the token of the answer's first character, if there is one
    if start is None:
        start = next((i for i, (_, end) in enumerate(encoding.offsets) if end > size), len(encoding))
    return to_array(encoding.ids), start


@torch.inference_mode()
def score_greedy(model: torch.nn.Module, batch: list[EncodedQuestion], device: torch.device) -> list[bool]:
    """Return for each (tokens, prompt length) whether every answer token is the argmax. Padded right, so no mask is
    needed.
    """
    longest = max(len(ids) for ids, _ in batch)
    ids_BT = pad_right(batch, longest).to(device)
    # Positions at which an answer of the batch is predicted; other logits are not computed.
    positions_N = torch.arange(min(start for _, start in batch) - 1, longest, device=device)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits_BNv = model(input_ids=ids_BT, use_cache=False, logits_to_keep=positions_N).logits
    else:
        logits_BNv = model(input_ids=ids_BT).logits[:, positions_N]
    guess_BN = logits_BNv.argmax(-1).tolist()
    first = min(start for _, start in batch) - 1  # computed on the CPU: reading positions_N would synchronize
    return [
        guess[start - 1 - first : len(ids) - 1 - first] == ids[start:].tolist()
        for guess, (ids, start) in zip(guess_BN, batch)
    ]


def pad_right(batch: list[EncodedQuestion], longest: int) -> torch.Tensor:
    """Return (B, longest) ids, each row padded on the right with its last token."""
    ids_BT = np.empty((len(batch), longest), dtype=np.int64)
    for row, (ids, _) in zip(ids_BT, batch):
        row[: len(ids)], row[len(ids) :] = ids, ids[-1]
    return torch.from_numpy(ids_BT)


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


NUM_CANDIDATES, NUM_KEYS = 16, 4
MIN_LENGTH = 96
STORY_LENGTH = 256  # from this length on a question of `needle` fits in any tokenizer of pieces of words


@dataclass(frozen=True)
class RankingQuestion:
    """A question with ranked candidates.

    Attributes:
        ids: the prompt; the value should follow.
        candidates: sixteen tokens; candidates[answer] is correct.
        context_values: indices of the candidates that appear in the context.
    """

    ids: tuple[int, ...]
    candidates: tuple[int, ...]
    answer: int
    context_values: tuple[int, ...]


class Vocabulary:
    """Tokens to use as keys and values: single-token words such as " lamp", or any ordinary tokens if there are too
    few.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.before, _ = special_tokens(tokenizer)
        self.encode = encoder(tokenizer, special=False)
        special = set(tokenizer.all_special_ids)
        ordinary = [i for i in range(len(tokenizer)) if i not in special]
        texts = tokenizer.batch_decode([[i] for i in ordinary], clean_up_tokenization_spaces=False)
        words = [i for i, text in zip(ordinary, texts) if text[:1] == " " and text[1:].isalpha()]
        if len(words) < 2 * NUM_CANDIDATES:  # tokenizers that mark word starts differently
            words = [i for i, text in zip(ordinary, texts) if text.isalpha()]
        self.words = words if len(words) >= 2 * NUM_CANDIDATES else ordinary
        if len(self.words) < NUM_CANDIDATES + NUM_KEYS:
            raise SurgeryError(f"the tokenizer has {len(self.words)} tokens; {NUM_CANDIDATES + NUM_KEYS} are needed")

    def ids(self, text: str) -> list[int]:
        """Tokenize without special tokens."""
        return self.encode([text])[0].tolist()


def make_ranking_question(
    vocabulary: Vocabulary, length: int, depth: float, rng: Random, text: Sequence[int] | None
) -> RankingQuestion:
    """Return a question of exactly `length` tokens. text: tokens around the codes; None: generated stories."""
    chosen = draw_without_replacement(rng, vocabulary.words, NUM_KEYS + NUM_CANDIDATES)
    keys, candidates = chosen[:NUM_KEYS], chosen[NUM_KEYS:]
    lead, verb = vocabulary.ids(" The code of"), vocabulary.ids(" is")
    facts = [[*lead, k, *verb, v, *vocabulary.ids(".")] for k, v in zip(keys, candidates)]
    asked = [*lead, keys[0], *verb]
    room = length - len(vocabulary.before) - sum(map(len, facts)) - len(asked)
    if room < NUM_KEYS:
        raise SurgeryError(f"needle: length {length} leaves no text around the codes; use {MIN_LENGTH} or more")
    hay = _haystack(vocabulary, room, rng, text)
    places = [round(depth * room), *sorted(int(rng.random() * (room + 1)) for _ in range(NUM_KEYS - 1))]
    ids, last = list(vocabulary.before), 0
    for i in sorted(range(NUM_KEYS), key=lambda i: places[i]):
        ids += [*hay[last : places[i]], *facts[i]]
        last = places[i]
    order = sorted(range(NUM_CANDIDATES), key=lambda i: candidates[i])
    rank = {i: n for n, i in enumerate(order)}
    return RankingQuestion(
        (*ids, *hay[last:], *asked),
        tuple(candidates[i] for i in order),
        rank[0],
        tuple(sorted(rank[i] for i in range(NUM_KEYS))),
    )


def _haystack(vocabulary: Vocabulary, room: int, rng: Random, text: Sequence[int] | None) -> list[int]:
    """Return `room` tokens of the text from a random start, or of generated stories."""
    if text is not None:
        if len(text) < room:
            raise SurgeryError(
                f"needle: the text has {len(text):,} tokens, and a question needs {room:,}. Give a longer --text."
            )
        start = int(rng.random() * (len(text) - room + 1))
        return list(text[start : start + room])
    ids: list[int] = []
    while len(ids) < room:
        ids += vocabulary.ids("".join(filler(rng, room)))
    return ids[:room]


@torch.inference_mode()
def score_rankings(model: Any, batch: list[RankingQuestion]) -> list[dict[str, float]]:
    """Return accuracy, any, reciprocal_rank and nll (nats, among the candidates) of each question."""
    longest = max(len(q.ids) for q in batch)
    ids_BT = torch.tensor([[*q.ids, *[q.ids[-1]] * (longest - len(q.ids))] for q in batch], device=model.device)
    if all(len(q.ids) == longest for q in batch):
        logits_BV = last_logits(model, ids_BT)
    else:
        ends_B = torch.tensor([len(q.ids) - 1 for q in batch], device=model.device)
        logits_BV = model(input_ids=ids_BT, use_cache=False).logits[torch.arange(len(batch)), ends_B]
    candidates_BC = torch.tensor([q.candidates for q in batch], device=model.device)
    scores_BC = logits_BV.gather(1, candidates_BC).float().log_softmax(-1).cpu()
    return [_score_ranking(question, scores_C) for question, scores_C in zip(batch, scores_BC.tolist())]


def last_logits(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Return the logits of the last position, (B, V)."""
    import inspect

    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return model(input_ids=ids_BT, use_cache=False, logits_to_keep=1).logits[:, -1]
    return model(input_ids=ids_BT, use_cache=False).logits[:, -1]


def _score_ranking(question: RankingQuestion, scores: list[float]) -> dict[str, float]:
    right = scores[question.answer]
    rank = 1 + sum(s > right for i, s in enumerate(scores) if i != question.answer)
    best = max(range(len(scores)), key=lambda i: scores[i])
    return {
        "accuracy": float(best == question.answer),
        "any": float(best in question.context_values),
        "reciprocal_rank": 1 / rank,
        "nll": -right if math.isfinite(right) else 1e9,
    }


TASKS = ("needle", "needle-rank")
SAMPLES = 32
ACCURACY = EvalMetric("accuracy", "accuracy", scale=100, unit="%")
METRICS = {
    "accuracy": ACCURACY,
    "any": EvalMetric("any", "accuracy", scale=100, unit="%", title="any value of the context"),
    "reciprocal_rank": EvalMetric("reciprocal_rank", "mean", top=1, title="reciprocal rank"),
    "nll": EvalMetric("nll", "mean", higher_is_better=False, unit="nats"),
}
FLOORS = {
    "needle": {"accuracy": 0.01},  # two digits
    "needle-rank": {"accuracy": 1 / NUM_CANDIDATES, "any": NUM_KEYS / NUM_CANDIDATES},
}


@dataclass(frozen=True)
class NeedleCell:
    """Index of a question, which is generated when it is needed."""

    task: str
    length: int
    depth: float
    index: int

    def sample(self, metrics: dict[str, float], shown: dict[str, Any]) -> Sample:
        """Return the sample of this question."""
        name = stable_id(self.task, self.index, shown)
        return Sample(self.task, name, metrics, {"length": self.length, "depth": self.depth}, shown=shown)


def needle_tasks(options: EvalOptions) -> tuple[str, ...]:
    """Return the tasks that are run."""
    return select_tasks("needle", options, TASKS, TASKS)


def run(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
    """Run the tasks `needle` and `needle-rank` (or --tasks) at each length and depth."""
    check_lm_head(eval_model.model)
    tasks = needle_tasks(options)
    lengths = options.lengths or tuple(n for n in LENGTHS if n <= (eval_model.longest or n))
    depths, count = options.depths or DEPTHS, options.limit or SAMPLES
    small = () if options.lengths else _too_short(eval_model.tokenizer, lengths, depths, count, options.seed)
    samples: list[Sample] = []
    for task in tasks:
        cells = [NeedleCell(task, n, depth, i) for n in lengths for depth in depths for i in range(count)]
        if task == "needle":
            samples += _run_story_questions(eval_model, options, [cell for cell in cells if cell.length not in small])
        else:
            samples += _run_rankings(eval_model, options, [cell for cell in cells if cell.length >= MIN_LENGTH])
    result = SuiteResult(samples, METRICS, floors={task: FLOORS[task] for task in tasks})
    if beyond := [n for n in lengths if eval_model.longest and n > eval_model.longest]:
        lengths_text = ", ".join(f"{n:,}" for n in beyond)
        result.notes.append(
            f"lengths beyond the model's context length of {eval_model.longest:,} tokens: {lengths_text}"
        )
    if small and "needle" in tasks:
        result.notes.append(
            f"needle was not asked at {', '.join(f'{n:,}' for n in small)} tokens: its sentences are longer than that "
            "in this tokenizer"
        )
    if short := [n for n in lengths if n < MIN_LENGTH and "needle-rank" in tasks]:
        lengths_text = ", ".join(f"{n:,}" for n in short)
        result.notes.append(
            f"needle-rank was not asked at {lengths_text} tokens: a question needs at least {MIN_LENGTH}"
        )
    if not samples:
        raise SurgeryError(f"needle: nothing fits; {'; '.join(result.notes)}. Give --lengths {MIN_LENGTH} or more")
    return result


def _too_short(
    tokenizer: Any, lengths: Sequence[int], depths: Sequence[float], count: int, seed: int
) -> tuple[int, ...]:
    """Return the lengths below STORY_LENGTH at which a question of `needle` is longer than that in this tokenizer."""
    counts = counter(tokenizer, special=False)

    def fits(length: int) -> bool:
        try:
            for depth in depths:
                for index in range(count):
                    make_question(tokenizer, length, depth, index, seed, counts)
        except ValueError:
            return False
        return True

    return tuple(length for length in lengths if length < STORY_LENGTH and not fits(length))


def _run_story_questions(eval_model: EvalModel, options: EvalOptions, cells: list[NeedleCell]) -> list[Sample]:
    counts = counter(eval_model.tokenizer, special=False)

    def write(cell: NeedleCell) -> tuple[NeedleCell, Any, Any]:
        try:
            question = make_question(eval_model.tokenizer, cell.length, cell.depth, cell.index, options.seed, counts)
        except ValueError as error:  # too short for its facts
            raise SurgeryError(f"needle: {error}") from None
        return cell, question, encode_question(eval_model.tokenizer, question)

    def score(batch: list[tuple[NeedleCell, Any, Any]]) -> list[Sample]:
        right = score_greedy(eval_model.model, [encoded for _, _, encoded in batch], eval_model.model.device)
        shown = [{"prompt": q.prompt[-200:], "target": q.answer} for _, q, _ in batch]
        return [cell.sample({"accuracy": float(r)}, s) for (cell, _, _), r, s in zip(batch, right, shown)]

    return score_in_batches(
        eval_model, options, cells, score, lambda cell: cell.length, f"needles of {eval_model.name}", prepare=write
    )


def _run_rankings(eval_model: EvalModel, options: EvalOptions, cells: list[NeedleCell]) -> list[Sample]:
    vocabulary = Vocabulary(eval_model.tokenizer)
    text = _text_ids(vocabulary, options, 16 * max((cell.length for cell in cells), default=0))

    def write(cell: NeedleCell) -> tuple[NeedleCell, RankingQuestion]:
        rng = Random(f"needle-rank {options.seed} {cell.length} {cell.depth} {cell.index}")
        return cell, make_ranking_question(vocabulary, cell.length, cell.depth, rng, text)

    def score(batch: list[tuple[NeedleCell, RankingQuestion]]) -> list[Sample]:
        every = score_rankings(eval_model.model, [question for _, question in batch])
        targets = [eval_model.tokenizer.decode([q.candidates[q.answer]]) for _, q in batch]
        return [cell.sample(m, {"target": target}) for (cell, _), m, target in zip(batch, every, targets)]

    return score_in_batches(
        eval_model, options, cells, score, lambda cell: cell.length, f"rankings of {eval_model.name}", prepare=write
    )


def _text_ids(vocabulary: Vocabulary, options: EvalOptions, count: int) -> list[int] | None:
    """Return the first `count` tokens of --text; None without it."""
    if options.text is None:
        return None
    note_text(options.text, options)
    ids: list[int] = []
    for document in islice(document_stream(options.text), 1000):
        ids += vocabulary.ids(document[: 8 * count])
        if len(ids) >= count:
            break
    return ids[:count]


register(
    Suite("needle", "retrieval of codes from texts for small models, by length and depth", run, tasks=needle_tasks)
)
