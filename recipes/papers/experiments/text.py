"""Character-level language models of the experiments: rows of Python source, and held-out loss by position.

    rows = CodeRows("packages", 20_000_000, device)
    batch = rows.batch(seed=0, first=0, rows=16, length=256)      {"ids": (16, 257)}

Row n of training is a pure function of (seed, n): a random place of the text. The last 5% of the text are held out. A
character is one of 97 tokens: printable ASCII, the line end, and one token for all others.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from recipes.papers.experiments.models import make_decoder
from recipes.papers.experiments.sweep import Cell, Row, Setting, finite_or_none
from recipes.papers.experiments.training import seeds_of, train_stack
from recipes.papers.healing.text import code_documents
from recipes.papers.training.compute import count_compute, state_size
from recipes.papers.training.stacked import Batch, StackedTraining, causal_mask
from surgery.core import errors
from surgery.core.errors import SurgeryError
from surgery.training.data.generated import integers

VOCABULARY = 97  # 0: other characters, 1 to 95: printable ASCII, 96: line end
HELD_OUT = 0.05  # share of the text

Source = Literal["packages", "surgery"]


@lru_cache(maxsize=2)
def code_tokens(source: Source, characters: int) -> Tensor:
    """Return tokens (N,), uint8, of Python files in random order: of the installed packages, or of this one.

    Raises SurgeryError for fewer than `characters` characters.
    """
    own = Path(errors.__file__).parents[1]
    folder = own if source == "surgery" else Path(torch.__file__).parents[1]
    parts, size = [], 0
    for text in code_documents(folder, [], seed=0):
        parts.append(text)
        size += len(text) + 1
        if size >= characters:
            break
    if size < characters:
        raise SurgeryError(
            f"the Python files in {folder} have {size:,} characters, and {characters:,} are needed. Install more "
            "packages."
        )
    text = re.sub("[^\n -~]", "\0", "\0".join(parts)[:characters])
    return token_table()[torch.frombuffer(bytearray(text.encode("ascii")), dtype=torch.uint8).long()]


def token_table() -> Tensor:
    """Return the token of each byte, (256,), uint8."""
    table = torch.zeros(256, dtype=torch.uint8)
    table[32:127] = torch.arange(1, 96, dtype=torch.uint8)
    table[ord("\n")] = 96
    return table


class CodeRows:
    """Rows of training and of held-out text on a device."""

    def __init__(self, source: Source, characters: int, device: torch.device):
        tokens_N = code_tokens(source, characters).to(device)
        count = round(len(tokens_N) * (1 - HELD_OUT))
        self.training_N, self.held_out_N = tokens_N[:count], tokens_N[count:]

    def batch(self, seed: int, first: int, rows: int, length: int) -> Batch:
        """Return ids (B, T + 1) of random places."""
        row_B = torch.arange(first, first + rows, device=self.training_N.device)
        start_B1 = integers(seed, row_B, 0, 1, len(self.training_N) - length)
        return {"ids": self.training_N[start_B1 + torch.arange(length + 1, device=row_B.device)].long()}

    def held_out(self, length: int, most: int) -> Tensor:
        """Return at most `most` consecutive rows (N, T + 1) of the held-out text."""
        count = min(most, (len(self.held_out_N) - 1) // length)
        start_N1 = length * torch.arange(count, device=self.held_out_N.device)[:, None]
        return self.held_out_N[start_N1 + torch.arange(length + 1, device=start_N1.device)].long()


def position_losses(call: Any, batch: Batch) -> Tensor:
    """Return the mean loss at each position, (T,), in nats."""
    ids_BT, next_BT = batch["ids"][:, :-1], batch["ids"][:, 1:]
    mask = causal_mask(ids_BT.shape[1], ids_BT.device)
    logits_BTV = call(ids_BT, attention_mask=mask, use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits_BTV.transpose(1, 2), next_BT, reduction="none").mean(0)


def text_loss(call: Any, batch: Batch) -> Tensor:
    """Return the mean loss in nats per character."""
    return position_losses(call, batch).mean()


def make_text_model(setting: Setting, cell: Cell, attention: dict[str, Any] | None, heads: int, seed: int) -> Any:
    """Return the decoder of a method. attention: keys of a recipe, None: softmax with RoPE."""
    return make_decoder(
        attention, width=cell.width, layers=setting.layers, heads=heads, length=setting.length, vocabulary=VOCABULARY, seed=seed,
        mlp=setting.options.get("mlp", 4) * cell.width, convolution=setting.options.get("convolution", 0), embedding_std=0.5,
    )  # fmt: skip


def train_text(
    setting: Setting,
    cell: Cell,
    runs: list[tuple[float, int]],
    device: torch.device,
    attention: dict[str, Any] | None,
    heads: int,
) -> list[Row]:
    """Train runs (rate, seed) of one cell at once and return their rows."""
    rows = CodeRows(setting.options["text"], setting.options["characters"], device)
    models = {seed: make_text_model(setting, cell, attention, heads, seed) for seed in seeds_of(runs)}
    first = models[runs[0][1]]
    stack = train_stack(
        setting, runs, models, lambda seed, start, count: rows.batch(seed, start, count, setting.length), device,
        loss=text_loss, row_numbers=setting.length,
    )  # fmt: skip
    compute, state = count_compute(first, setting.length), state_size(first, setting.length)
    shared = {"parameters": sum(stack.sizes), "macs": compute.body, "macs_with_head": compute.total, "state": state}
    keys = {"setting": setting.name, "method": cell.method, "width": cell.width}
    found = score_text(stack, setting, rows, len(runs))
    return [{**keys, "rate": rate, "seed": seed, **own, **shared} for (rate, seed), own in zip(runs, found)]


def score_text(stack: StackedTraining, setting: Setting, rows: CodeRows, runs: int) -> list[dict[str, Any]]:
    """Return the held-out loss of each run in nats per character: of all positions, and by octave of positions."""
    ids_NT = rows.held_out(setting.length, setting.options["held_out"])
    if not len(ids_NT):
        raise SurgeryError(
            f"the held-out text is shorter than a row of {setting.length} characters. Use a longer text."
        )
    total_MT = torch.zeros(runs, setting.length, device=ids_NT.device)
    for part_BT in ids_NT.split(setting.rows):
        total_MT += len(part_BT) * stack.map(position_losses, {"ids": part_BT.expand(runs, *part_BT.shape)})
    loss_MT = (total_MT / len(ids_NT)).double().cpu()
    tops = octaves(setting.length)
    return [
        {
            "loss": finite_or_none(float(loss_T.mean())),
            "by_position": {str(t): finite_or_none(float(loss_T[b:t].mean())) for b, t in zip([0, *tops], tops)},
            "held_out_characters": ids_NT.shape[0] * setting.length,
        }
        for loss_T in loss_MT
    ]


def octaves(length: int) -> list[int]:
    """Return the ends of the octaves of positions: length, length / 2, .. down to 16, ascending."""
    tops = [length]
    while tops[0] >= 32 and tops[0] % 2 == 0:
        tops.insert(0, tops[0] // 2)
    return tops


def perplexity(loss: float) -> float:
    """Return the perplexity per character."""
    return math.exp(min(loss, 50.0))
