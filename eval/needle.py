"""How often a model finds a needle: greedy exact match, by length and depth.

The questions come from the story generator: a code said once at some depth of a story, other codes
around it, and the question at the end. One forward over the question with its answer is enough: greedy
decoding gives the answer exactly when every answer token is the argmax given the ones before it.
B batch, T tokens, N positions looked at.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import numpy as np
import torch

from surgery.eval.encoding import Counts, as_array, counter, encoder
from surgery.recipes.papers.stories import Question, needle_question

Encoded = tuple[np.ndarray, int]  # the tokens of prompt and answer, and how many are the prompt's

LENGTHS = (64, 128, 256, 512, 1024)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class NeedleTable:
    """Shares of right answers: `accuracy[i][j]` is for lengths[i] (tokens) and depths[j] (0 start, 1 end)."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int
    accuracy: tuple[tuple[float, ...], ...]

    @property
    def errors(self) -> tuple[tuple[float, ...], ...]:
        """Standard errors, from (k + 1) / (n + 2) right answers: not zero for a cell without a miss."""
        n = self.samples
        shares = [[(p * n + 1) / (n + 2) for p in row] for row in self.accuracy]
        return tuple(tuple((p * (1 - p) / (n + 2)) ** 0.5 for p in row) for row in shares)

    @property
    def worst(self) -> float:
        return min(min(row) for row in self.accuracy)

    @property
    def mean(self) -> float:
        return sum(map(sum, self.accuracy)) / (len(self.lengths) * len(self.depths))

    def markdown(self) -> str:
        """A table in percent: one row for each length, one column for each depth."""
        lines = [
            ["length \\ depth", *(f"{depth:g}" for depth in self.depths)],
            ["---"] * (len(self.depths) + 1),
        ]
        for length, row in zip(self.lengths, self.accuracy):
            lines.append([str(length), *(f"{100 * share:.1f}" for share in row)])
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"errors": self.errors, "worst": self.worst, "mean": self.mean}


def needle_accuracy(
    model: torch.nn.Module,
    tokenizer: Any,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    samples: int = 32,
    seed: int = 0,
    batch_size: int = 16,
    device: str | torch.device | None = None,
) -> NeedleTable:
    """Asks `samples` questions at each length and depth; a question depends on seed, cell and number only.

    model: any causal language model, `model(input_ids).logits` [B, T, vocabulary]; left in eval mode.
    lengths: tokens of the question with its answer, at most (filled up to the last whole sentence).
    device: where the questions go; by default where the model's first parameter is.
    """
    model.eval()
    place = torch.device(device) if device is not None else next(model.parameters()).device
    accuracy = []
    for length in lengths:
        row = []
        for depth in depths:
            asked = [encode(tokenizer, q) for q in questions(tokenizer, length, depth, samples, seed)]
            right = sum(sum(score(model, batch, place)) for batch in _batches(asked, batch_size))
            row.append(right / samples)
        accuracy.append(tuple(row))
    return NeedleTable(tuple(lengths), tuple(depths), samples, tuple(accuracy))


def questions(tokenizer: Any, length: int, depth: float, samples: int, seed: int) -> Iterator[Question]:
    """The questions of one cell: the same for every model that shares the tokenizer, so scores are paired."""
    for index in range(samples):
        yield numbered_question(tokenizer, length, depth, index, seed)


def numbered_question(
    tokenizer: Any, length: int, depth: float, index: int, seed: int, counts: Counts | None = None
) -> Question:
    """counts: the tokenizer's, made once for many questions."""
    rng = Random(f"needle {seed} {length} {depth} {index}")
    room = length - tokenizer.num_special_tokens_to_add()
    return needle_question(rng, room, depth, counts=counts or counter(tokenizer, special=False))


def encode(tokenizer: Any, question: Question) -> Encoded:
    """The tokens of prompt and answer, and how many of them are the prompt's: those that end in it."""
    whole, size = question.prompt + question.answer, len(question.prompt)
    fast = getattr(getattr(tokenizer, "backend_tokenizer", None), "encode_batch", None)
    if fast is None:
        ids, prompt = encoder(tokenizer)([whole, question.prompt])
        same = min(len(ids), len(prompt))
        return ids, next((i for i in range(same) if ids[i] != prompt[i]), same)
    (found,) = fast([whole])
    start = found.char_to_token(size)  # the first token beyond the prompt has the answer's first character, if any has
    if start is None:
        start = next((i for i, (_, end) in enumerate(found.offsets) if end > size), len(found))
    return as_array(found.ids), start


@torch.inference_mode()
def score(model: torch.nn.Module, batch: list[Encoded], device: torch.device) -> list[bool]:
    """For each (tokens, prompt length): is every answer token the argmax? Padded right, so without a mask."""
    longest = max(len(ids) for ids, _ in batch)
    ids_BT = padded(batch, longest).to(device)
    # Where answers are predicted, over the whole batch: the logits of other positions are not needed.
    positions_N = torch.arange(min(start for _, start in batch) - 1, longest, device=device)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits_BNv = model(input_ids=ids_BT, use_cache=False, logits_to_keep=positions_N).logits
    else:
        logits_BNv = model(input_ids=ids_BT).logits[:, positions_N]
    guess_BN = logits_BNv.argmax(-1).tolist()
    first = min(start for _, start in batch) - 1  # known here: asking positions_N would wait for the device
    return [
        guess[start - 1 - first : len(ids) - 1 - first] == ids[start:].tolist()
        for guess, (ids, start) in zip(guess_BN, batch)
    ]


def padded(batch: list[Encoded], longest: int) -> torch.Tensor:
    """On the right, with each row's last token."""
    ids_BT = np.empty((len(batch), longest), dtype=np.int64)
    for row, (ids, _) in zip(ids_BT, batch):
        row[: len(ids)], row[len(ids) :] = ids, ids[-1]
    return torch.from_numpy(ids_BT)


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
