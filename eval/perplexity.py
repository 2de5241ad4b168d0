"""Perplexity with its standard error, and beside it the original's on the same windows.

The text is cut into windows that do not overlap, each with the special tokens the tokenizer adds; every
token after the first of a window counts. Windows are the units of the standard error: tokens of one window
are not independent.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.calibrate import document_stream, text_windows
from surgery.errors import SurgeryError

LOGITS = 2**28  # numbers of logits a batch may have


@dataclass(frozen=True)
class Perplexity:
    """perplexity = exp(mean loss, nats); se: its standard error (delta method over windows)."""

    perplexity: float
    se: float | None
    loss: float
    loss_se: float | None
    tokens: int
    windows: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """Paired over windows: ratio = perplexity / original, low and high its 95% interval."""

    ratio: float
    low: float | None
    high: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def windows_of(text: str, tokenizer: Any, tokens: int, length: int, limit: int | None) -> Tensor:
    """(N, length) ids of a file or data set; `limit`: the model's longest input."""
    if not Path(text).suffix and not Path(text).is_file() and text.count("/") != 1:
        raise SurgeryError(f"--text {text!r} is not a file; give a text file, or a Hub data set as org/name")
    return text_windows(document_stream(text), tokenizer, tokens, min(length, limit or length), text)


@torch.inference_mode()
def window_losses(model: Any, windows_NT: Tensor, tick: Any = lambda steps=1: None) -> Tensor:
    """Mean loss of each window, nats per token, (N,) float64."""
    vocabulary = model.get_output_embeddings()
    if vocabulary is None:
        raise SurgeryError(
            f"{type(model).__name__} has no language-model head; perplexity needs one (try --suite cosine)"
        )
    size = model.config.get_text_config().vocab_size
    rows = max(1, LOGITS // (windows_NT.shape[1] * size))
    losses = []
    for ids_BT in windows_NT.split(rows):
        ids_BT = ids_BT.to(model.device)
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        each = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1).float(), ids_BT[:, 1:].flatten(), reduction="none"
        )
        losses.append(each.view(len(ids_BT), -1).double().mean(1).cpu())
        tick(len(ids_BT))
    return torch.cat(losses)


def perplexity(losses_N: Tensor, length: int) -> Perplexity:
    mean = float(losses_N.mean())
    se = float(losses_N.std() / math.sqrt(len(losses_N))) if len(losses_N) > 1 else None
    value = math.exp(mean) if mean < 700 else math.inf
    return Perplexity(value, None if se is None else value * se, mean, se, len(losses_N) * (length - 1), len(losses_N))


def compare(losses_N: Tensor, original_N: Tensor) -> Comparison:
    """Ratio of perplexities and its 95% interval from the paired differences."""
    difference_N = losses_N - original_N
    mean = float(difference_N.mean())
    if len(difference_N) < 2:
        return Comparison(math.exp(mean), None, None)
    half = 1.96 * float(difference_N.std()) / math.sqrt(len(difference_N))
    return Comparison(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
