"""Pairs of texts for encoder-decoders: the encoder reads the input, the decoder predicts the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.data import IGNORED_LABEL, decode_text
from surgery.core.errors import SurgeryError

# Keys of a pair in a JSON line.
PAIR_KEYS = (
    *(("input", "target"), ("source", "target"), ("prompt", "completion"), ("question", "answer")),
    *(("document", "summary"), ("text", "summary")),
)


def read_pairs(path: Path, notes: list[str] | None = None) -> list[tuple[str, str]] | None:
    """Return the pairs of a .jsonl file, or None if its first line has none of PAIR_KEYS.

    notes: list to which a note about the encoding is appended. Raises SurgeryError for a line that is not a pair like
    the first one.
    """
    text, note = decode_text(path)
    if note and notes is not None:
        notes.append(note)
    keys: tuple[str, str] | None = None
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if keys is None:
                return None  # the reader of texts names the defect
            raise SurgeryError(f"{path}, line {number} is not JSON. Write one JSON object a line") from None
        row = row if isinstance(row, dict) else {}
        keys = keys or next((k for k in PAIR_KEYS if all(isinstance(row.get(key), str) for key in k)), None)
        if keys is None:
            return None
        if not all(isinstance(row.get(key), str) and row[key] for key in keys):
            raise SurgeryError(
                f"{path}, line {number} needs texts under {keys[0]!r} and {keys[1]!r}, as the first line has"
            )
        # Tokenizers take no lone surrogates.
        source, target = (row[key].encode("utf-8", "replace").decode() for key in keys)
        pairs.append((source, target))
    return pairs or None


def pair_inputs(
    pairs: list[tuple[str, str]], tokenizer: Any, tokens: int, length: int, where: str
) -> dict[str, Tensor]:
    """Return input_ids, attention_mask and labels (rows, T) of pairs, padded at the end; labels are -100 there.

    As many pairs are used as have `tokens` tokens; a text longer than `length` tokens loses its end. where: names the
    pairs in messages.
    """
    inputs: list[list[int]] = []
    targets: list[list[int]] = []
    count = 0
    for source, target in pairs:
        options = {"truncation": True, "max_length": length, "verbose": False}
        inputs.append(tokenizer(source, **options)["input_ids"])
        targets.append(tokenizer(text_target=target, **options)["input_ids"])
        count += len(inputs[-1]) + len(targets[-1])
        if count >= tokens:
            break
    if len(inputs) < 2 or not all(map(len, inputs)) or not all(map(len, targets)):
        raise SurgeryError(
            f"{where}: at least two pairs of texts are needed, each with a token of input and of target (got "
            f"{len(inputs)} pairs)"
        )
    pad = tokenizer.pad_token_id if getattr(tokenizer, "pad_token_id", None) is not None else 0
    inputs_and_labels = {"input_ids": _pad(inputs, pad), "labels": _pad(targets, IGNORED_LABEL)}
    if len(set(map(len, inputs))) > 1:
        inputs_and_labels["attention_mask"] = _pad([[1] * len(row) for row in inputs], 0)
    return inputs_and_labels


def _pad(rows: list[list[int]], value: int) -> Tensor:
    """Return rows (N, T) padded at the end with `value`."""
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows], dtype=torch.int64)
