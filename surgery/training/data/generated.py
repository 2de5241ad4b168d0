"""Training examples that are computed instead of read.

    task = MQARTask(task="mqar", vocabulary=8192, pairs=(4, 8))
    batch = task.batch(seed=0, first=0, rows=128, length=256, device="cuda")      rows 0 .. 127, tensors (B, ..)

Row n of a task is a pure function of (seed, n): every random number is a hash of (seed, row, column), the same on every
device. Rows therefore never repeat, need no state to resume, and are the same for all models that are compared.

B rows, T tokens, P labelled positions of a row (the largest number).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from surgery.core.errors import SurgeryError

IGNORE_INDEX = -100
BLOCK = 64  # rows that GeneratedData computes at once
VALIDATION_SEED = 2**40  # added to the seed of validation rows, which no training row has
MAX_TOKENS = 2**20  # of a vocabulary or a row
_MULTIPLIERS = (
    -4658895280553007687,
    -7723592293110705685,
)  # splitmix64 (Steele, Lea and Flood 2014), as signed integers
_GOLDEN = -7046029254386353131

Example = dict[str, Tensor]


def random_bits(seed: int, row_B: Tensor, stream: int, columns: int) -> Tensor:
    """Return 53 random bits (B, columns), int64, of each (seed, row, stream, column): splitmix64 of a counter."""
    column = torch.arange(columns, device=row_B.device)
    key = (seed * 1_000_003 + stream + 2**63) % 2**64 - 2**63
    start = _mix(_mix(torch.tensor(key, device=row_B.device)) + row_B * _GOLDEN)
    return _shift(_mix(start.unsqueeze(1) + (column + 1) * _GOLDEN), 11)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seed: int, row_B: Tensor, stream: int, columns: int) -> Tensor:
    """Return uniform numbers in (0, 1), (B, columns), float64."""
    return (random_bits(seed, row_B, stream, columns).double() + 0.5) / 2.0**53


def normal(seed: int, row_B: Tensor, stream: int, columns: int) -> Tensor:
    """Return standard normal numbers (B, columns), float32, by the inverse distribution function."""
    return (torch.erfinv(2 * uniform(seed, row_B, stream, columns) - 1) * math.sqrt(2)).float()


def integers(seed: int, row_B: Tensor, stream: int, columns: int, below: int) -> Tensor:
    """Return integers 0 .. below - 1, (B, columns)."""
    return (uniform(seed, row_B, stream, columns) * below).long().clamp_max(below - 1)


class Task(BaseModel):
    """Base class of tasks, which have their name as the default of a field `task`. inputs: what the rows hold, token
    `ids` or continuous `values`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    inputs: Literal["ids", "values"] = "ids"

    @property
    def name(self) -> str:
        """The task's name in recipes."""
        return str(type(self).model_fields["task"].default)

    def batch(self, seed: int, first: int, rows: int, length: int, device: torch.device | str = "cpu") -> Example:
        """Return rows first .. first + rows - 1 as tensors (B, ..)."""
        raise NotImplementedError

    def check_length(self, length: int) -> None:
        """Raise SurgeryError unless rows of `length` tokens can be made."""


TASKS: dict[str, type[Task]] = {}


def register_task(task_type: type[Task]) -> type[Task]:
    """Make a task known to recipes (decorator)."""
    TASKS[task_type.model_fields["task"].default] = task_type
    return task_type


@register_task
class MQARTask(Task):
    """Multi-query associative recall (Arora et al. 2023, "Zoology", section 4.1): keys, their values, and keys again.

    vocabulary: number of tokens. pairs: numbers of key-value pairs; each row draws one of them. layout:
        pairs_first  the pairs, then random tokens among which every key appears once more, at even distances drawn with weight
                     s^(power - 1). Keys are from the lower half of the vocabulary, values from the upper one
        scattered    the pairs at random even positions among distractors, then every key once more, each followed by its value.
                     Keys, values and distractors are from the first quarter, the second quarter and the other half of the vocabulary
    """

    task: Literal["mqar"] = "mqar"
    vocabulary: Annotated[int, Field(ge=8, le=MAX_TOKENS)] = 8192
    pairs: tuple[Annotated[int, Field(ge=1, le=MAX_TOKENS)], ...] = (4, 8, 16, 32)
    layout: Literal["pairs_first", "scattered"] = "pairs_first"
    power: Annotated[float, Field(gt=0, le=1)] = 0.01

    @model_validator(mode="after")
    def _check(self) -> MQARTask:
        kinds = 2 if self.layout == "pairs_first" else 4
        if not self.pairs or max(self.pairs) >= self.vocabulary // kinds:
            raise SurgeryError(
                f"data.generated: pairs must be one or more numbers below {self.vocabulary // kinds}, the number of "
                "keys in a "
                f"vocabulary of {self.vocabulary} (got {list(self.pairs)})"
            )
        return self

    def check_length(self, length: int) -> None:
        """Raise SurgeryError unless the row has an even number of tokens and room for the pairs and their queries."""
        if length % 2 or 4 * max(self.pairs) > length:
            raise SurgeryError(
                f"data.generated: mqar: {max(self.pairs)} pairs need an even length of {4 * max(self.pairs)} tokens or "
                "more "
                f"(got {length})"
            )

    def batch(self, seed: int, first: int, rows: int, length: int, device: torch.device | str = "cpu") -> Example:
        """Return input_ids, labels (B, T) and, for P labelled positions, `query` (the position of the key), `target`
        (its value or -100), `gap` (tokens between both occurrences of the key), (B, P), and `pairs` (B,)."""
        self.check_length(length)
        row_B = torch.arange(first, first + rows, device=device)
        most = max(self.pairs)
        kinds = torch.tensor(self.pairs, device=device)
        pairs_B1 = kinds[integers(seed, row_B, 0, 1, len(self.pairs))]
        used_BP = torch.arange(most, device=device) < pairs_B1
        half = self.vocabulary // 2
        keys = half if self.layout == "pairs_first" else half // 2
        key_BP = 1 + uniform(seed, row_B, 1, keys - 1).topk(most).indices  # token 0 is never a key, as in Zoology
        value_BP = keys + uniform(seed, row_B, 2, keys).topk(most).indices
        make = self._pairs_first if self.layout == "pairs_first" else self._scattered
        ids_BT, place_BP, query_BP = make(
            seed, row_B, length, pairs_B1=pairs_B1, used_BP=used_BP, key_BP=key_BP, value_BP=value_BP
        )
        target_BP = torch.where(used_BP, value_BP, IGNORE_INDEX)
        labels_BT = torch.full_like(ids_BT, IGNORE_INDEX)
        labels_BT = _scatter(labels_BT, query_BP + 1, target_BP, used_BP)
        query_BP = torch.where(used_BP, query_BP, 0)
        return {
            "input_ids": ids_BT,
            "labels": labels_BT,
            "query": query_BP,
            "target": target_BP,
            "gap": query_BP - place_BP,
            "pairs": pairs_B1[:, 0],
        }

    def _pairs_first(
        self,
        seed: int,
        row_B: Tensor,
        length: int,
        *,
        pairs_B1: Tensor,
        used_BP: Tensor,
        key_BP: Tensor,
        value_BP: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (ids (B, T), positions of the keys (B, P), positions of the queries (B, P))."""
        most = key_BP.shape[1]
        ids_BT = integers(seed, row_B, 3, length, self.vocabulary)
        place_BP = (2 * torch.arange(most, device=row_B.device)).expand_as(key_BP)
        spaces = length // 2 - 1
        at_S = torch.arange(spaces, device=row_B.device)
        # The largest of log(u) / weight: drawn without replacement (Efraimidis and Spirakis 2006).
        score_BS = uniform(seed, row_B, 4, spaces).log() * (at_S + 1).double() ** (1 - self.power)
        score_BS = score_BS.masked_fill(at_S >= length // 2 - pairs_B1, -math.inf)
        query_BP = 2 * pairs_B1 + 2 * score_BS.topk(most).indices
        for position_BP, token_BP in ((place_BP, key_BP), (place_BP + 1, value_BP), (query_BP, key_BP)):
            ids_BT = _scatter(ids_BT, position_BP, token_BP, used_BP)
        return ids_BT, place_BP, query_BP

    def _scattered(
        self,
        seed: int,
        row_B: Tensor,
        length: int,
        *,
        pairs_B1: Tensor,
        used_BP: Tensor,
        key_BP: Tensor,
        value_BP: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (ids (B, T), positions of the keys (B, P), positions of the queries (B, P))."""
        most, half = key_BP.shape[1], self.vocabulary // 2
        ids_BT = half + integers(seed, row_B, 3, length, self.vocabulary - half)
        at_S = torch.arange(length // 2, device=row_B.device)
        score_BS = uniform(seed, row_B, 4, length // 2).masked_fill(at_S >= length // 2 - pairs_B1, -1.0)
        place_BP = 2 * score_BS.topk(most).indices
        order_BP = uniform(seed, row_B, 5, most).masked_fill(~used_BP, 2.0).argsort(1).argsort(1)
        query_BP = length - 2 * pairs_B1 + 2 * order_BP
        for shift, position_BP in ((0, place_BP), (0, query_BP)):
            ids_BT = _scatter(ids_BT, position_BP + shift, key_BP, used_BP)
            ids_BT = _scatter(ids_BT, position_BP + shift + 1, value_BP, used_BP)
        return ids_BT, place_BP, query_BP


def _scatter(ids_BT: Tensor, position_BP: Tensor, token_BP: Tensor, used_BP: Tensor) -> Tensor:
    """Return ids with the used tokens at their positions."""
    length = ids_BT.shape[1]
    wide = torch.cat([ids_BT, ids_BT[:, :1]], 1)  # the last column takes what is not used
    return wide.scatter(1, torch.where(used_BP, position_BP, length), token_BP)[:, :length]


class GeneratedData:
    """Examples of a task with the interface of TrainingData. config: the recipe's DataConfig, which names the task."""

    def __init__(self, config: Any, length: int, seed: int):
        self.config, self.task, self.length, self.seed = config, config.generated, length, seed
        self.tokens: Any = None  # shared tokenized text, which generated rows do not have
        self.taken = 0
        self.task.check_length(length)

    def examples(self, start: int | None = None) -> Iterator[Example]:
        """Iterate over rows from number `start` on, without end; None: from the current state."""
        self.taken = self.taken if start is None else start
        while True:
            first = self.taken - self.taken % BLOCK
            rows = split_rows(self.task.batch(self.seed, first, BLOCK, self.length))
            for row in rows[self.taken - first :]:
                self.taken += 1
                yield row

    def state(self) -> dict[str, Any]:
        """Return the position of the next row as JSON data."""
        return {"taken": self.taken}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` returned."""
        if not isinstance(state.get("taken"), int):
            raise SurgeryError("data: the saved state is not one of generated rows. Resume with the original recipe.")
        self.taken = state["taken"]

    def count_tokens(self, examples: Example) -> int:
        """Return the number of training targets of an example, or of stacked examples."""
        return int((examples["labels"] != IGNORE_INDEX).sum())

    def validation(self) -> list[Example]:
        """Return `validation_examples` rows that are not training rows; none if data.validation is 0."""
        if not self.config.validation:
            return []
        count = self.config.validation_examples
        return split_rows(self.task.batch(self.seed + VALIDATION_SEED, 0, count, self.length))

    def fingerprint(self) -> str:
        """Return the task, length and seed as text, which determine every row."""
        return f"{self.task.model_dump_json()} {self.length} {self.seed}"


def split_rows(batch: Example) -> list[Example]:
    """Return the rows of a batch as training examples: what the stages read, and `valid`."""
    names = [n for n in ("input_ids", "values", "targets", "labels") if n in batch]
    valid_T = torch.ones(batch["labels"].shape[1], dtype=torch.bool)
    return [{**{n: batch[n][i] for n in names}, "valid": valid_T} for i in range(len(batch["labels"]))]
