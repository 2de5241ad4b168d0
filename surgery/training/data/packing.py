"""Pack token sequences into rows of one length.

documents   several sequences per row by best fit, with position_ids that restart in each
stream      all joined and cut, with the rest carried over to the next block
none        one sequence per row
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.training.data.tokenize import TokenSequence

Example = dict[str, Tensor]  # input_ids, labels, position_ids int64 and valid bool, (T,) each
IGNORE_INDEX = -100  # as a label: not trained on


def split_windows(pieces: Iterable[TokenSequence], length: int) -> Iterator[TokenSequence]:
    """Cut sequences into windows of at most `length` tokens; drop windows without a training target.

    Indivisible ones are truncated.
    """
    for piece in pieces:
        last = length if piece.indivisible else len(piece)
        for start in range(0, last, length):
            tokens = slice(start, start + length)
            trained_T = None if piece.trained_T is None else piece.trained_T[tokens]
            window = TokenSequence(piece.ids_T[tokens], trained_T)
            if count_trained(window) > 0:
                yield window


def count_trained(piece: TokenSequence) -> int:
    """Return the number of training targets; the first token is never one."""
    if piece.trained_T is None:
        return max(0, len(piece) - 1)
    return int(piece.trained_T[1:].sum())


def make_row(pieces: list[TokenSequence], length: int, pad: int) -> Example:
    """Concatenate sequences into an example of `length` tokens, padded with `pad`."""
    lengths = [len(piece) for piece in pieces]
    at = sum(lengths)
    ids_T = torch.full((length,), pad, dtype=torch.int64)
    labels_T = torch.full((length,), IGNORE_INDEX, dtype=torch.int64)
    torch.cat([piece.ids_T for piece in pieces], out=ids_T[:at])
    if all(piece.trained_T is None for piece in pieces):
        labels_T[:at] = ids_T[:at]
    else:
        torch.cat([_labels(piece) for piece in pieces], out=labels_T[:at])
    begins = [0, *accumulate(lengths)]  # the last one the padding's
    labels_T[begins[:-1]] = IGNORE_INDEX
    position_T = torch.arange(length)
    for start, stop in zip(begins[1:], [*begins[2:], length]):
        position_T[start:stop] -= start
    return {"input_ids": ids_T, "labels": labels_T, "position_ids": position_T, "valid": torch.arange(length) < at}


def _labels(piece: TokenSequence) -> Tensor:
    return piece.ids_T if piece.trained_T is None else piece.ids_T.where(piece.trained_T, IGNORE_INDEX)


def pack_best_fit(pieces: list[TokenSequence], length: int) -> list[list[TokenSequence]]:
    """Pack by best fit decreasing."""
    rows: list[list[TokenSequence]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row), ascending
    for piece in sorted(pieces, key=len, reverse=True):
        position = bisect.bisect_left(open_rows, (len(piece), -1))
        if position < len(open_rows):
            room, number = open_rows.pop(position)
            rows[number].append(piece)
        else:
            room, number = length, len(rows)
            rows.append([piece])
        if room - len(piece) > 1:
            bisect.insort(open_rows, (room - len(piece), number))
    return rows


def pack_in_order(pieces: list[TokenSequence], length: int) -> list[list[TokenSequence]]:
    """Pack greedily, keeping the order of the sequences."""
    rows: list[list[TokenSequence]] = []
    room = 0
    for piece in pieces:
        if len(piece) > room:
            rows.append([])
            room = length
        rows[-1].append(piece)
        room -= len(piece)
    return rows


def pack_stream(
    tail: TokenSequence | None, pieces: list[TokenSequence], length: int
) -> tuple[list[list[TokenSequence]], TokenSequence | None]:
    """Return the full rows of the joined sequences, and the rest."""
    every = [*([tail] if tail is not None else []), *pieces]
    if not every:
        return [], None
    ids_N = torch.cat([piece.ids_T for piece in every])
    trained_N = torch.ones(len(ids_N), dtype=torch.bool)
    if any(piece.trained_T is not None for piece in every):
        marks = [torch.ones(len(p), dtype=torch.bool) if p.trained_T is None else p.trained_T for p in every]
        trained_N = torch.cat(marks)
    end = len(ids_N) - len(ids_N) % length
    rows = [[TokenSequence(ids_N[i : i + length], trained_N[i : i + length])] for i in range(0, end, length)]
    return rows, TokenSequence(ids_N[end:].clone(), trained_N[end:].clone())


def check_packed_attention(model: Any, packing: str, rows: int) -> None:
    """Raise SurgeryError if the model's attention implementation would let packed documents attend to each other."""
    implementation = str(model.config._attn_implementation)
    if packing == "documents" and rows > 1 and "flash" in implementation:
        raise SurgeryError(
            f"{implementation} separates packed documents in batches of one row only (got {rows} rows). Use rows: 1, "
            "or "
            "attention sdpa."
        )
