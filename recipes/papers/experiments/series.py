"""Time series of the experiments: the columns of ETTh1, series drawn from random kernels, and their tokens.

    series_NC = read_csv(path, rows=14_400)                       ETTh1.csv (Zhou et al. 2021, "Informer"): one row an hour, C = 7 columns
    bank_NT = kernel_bank(count=2000, length=256, seed=0)         KernelSynth (Ansari et al. 2024, "Chronos", appendix A), shortened
    ids_BT = tokens(values_BT, context=96, bins=254)              Chronos, section 3.1: divide by the mean |x| of the context, uniform bins

A series of KernelSynth is a draw from a Gaussian process whose kernel joins one to five random kernels by sums and
products.
"""

from __future__ import annotations

import csv
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.core.errors import SurgeryError
from surgery.modeling.cache import mixer_modules

COLUMNS = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")  # of ETTh1.csv behind the date; OT: oil temperature
MAX_BYTES = 64_000_000
MAX_VALUE = 1e6
PERIODS = (24.0, 48.0, 96.0, 168.0)  # hours
EDGE = 15.0  # tokens cover [-EDGE, EDGE]
CPU = torch.device("cpu")
AT_ONCE = 64  # series whose covariances are decomposed together


# -- a file of series -----------------------------------------------------------------------------------
def read_csv(path: Path, rows: int) -> Tensor:
    """Return the numbers (N, 7), float32, of a CSV file with the columns of ETTh1.csv.

    rows: the least number of rows. Raises SurgeryError for a missing, large or short file, another header, and cells
    that are no finite numbers below a million.
    """
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise SurgeryError(
            f"--data {path} must be a file of at most {MAX_BYTES:,} bytes. Give the path of ETTh1.csv from "
            "github.com/zhouhaoyi/ETDataset."
        )
    header = ["date", *COLUMNS]
    found: list[list[float]] = []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            if next(lines, None) != header:
                raise SurgeryError(
                    f"--data {path}: the first line must be {','.join(header)}. Give the path of ETTh1.csv."
                )
            found.extend(_numbers(cells, f"--data {path}, line {lines.line_num}") for cells in lines)
    except (UnicodeDecodeError, csv.Error) as error:
        raise SurgeryError(
            f"--data {path} is not a CSV file in UTF-8 ({error}). Give the path of ETTh1.csv."
        ) from error
    if len(found) < rows:
        raise SurgeryError(f"--data {path} has {len(found):,} rows, and {rows:,} are needed. Give the whole ETTh1.csv.")
    return torch.tensor(found)


def _numbers(cells: list[str], where: str) -> list[float]:
    try:
        values = [float(cell) for cell in cells[1:]]
    except ValueError:
        values = []
    if len(values) != len(COLUMNS) or not all(abs(value) < MAX_VALUE for value in values):
        raise SurgeryError(
            f"{where} must have a date and {len(COLUMNS)} finite numbers below {MAX_VALUE:,.0f}. Restore the file."
        )
    return values


def made_series(rows: int) -> Tensor:
    """Return series (rows, 7) of daily waves with noise, for runs that only show that the script works."""
    generator = torch.Generator().manual_seed(0)
    hour_N1 = torch.arange(rows)[:, None]
    phase_C = 6 * torch.rand(len(COLUMNS), generator=generator)
    return (hour_N1 * (2 * math.pi / 24) + phase_C).sin() + 0.3 * torch.randn(rows, len(COLUMNS), generator=generator)


# -- series of random kernels ---------------------------------------------------------------------------
@lru_cache(maxsize=2)
def kernel_bank(count: int, length: int, seed: int, device: torch.device = CPU) -> Tensor:
    """Return series (count, length), float32, of KernelSynth, computed on a device from random numbers of the CPU."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for first in range(0, count, AT_ONCE):
        some = min(AT_ONCE, count - first)
        covariance = torch.stack([random_covariance(length, generator, device) for _ in range(some)])
        noise = torch.randn(some, length, 1, generator=generator, dtype=torch.float64).to(device)
        parts.append((_square_root(covariance) @ noise)[..., 0].float())
    bank_NT = torch.cat(parts)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the cached series are read on other streams too
    return bank_NT


def random_covariance(length: int, generator: torch.Generator, device: torch.device = CPU) -> Tensor:
    """Return the covariance (T, T), float64, of one to five random kernels, with its largest variance scaled to 1."""
    number = 1 + int(torch.randint(5, (), generator=generator))
    total = random_kernel(length, generator, device)
    for _ in range(number - 1):
        other = random_kernel(length, generator, device)
        total = total + other if torch.rand((), generator=generator) < 0.5 else total * other
    return total / total.diagonal().max()


def random_kernel(length: int, generator: torch.Generator, device: torch.device = CPU) -> Tensor:
    """Return the covariance (T, T) of a linear, squared exponential, periodic, rational quadratic, or white noise
    kernel.
    """
    kind = int(torch.randint(5, (), generator=generator))
    choice = int(torch.randint(len(PERIODS), (), generator=generator))
    t_T = torch.arange(length, dtype=torch.float64, device=device)
    scale = (0.1, 1.0, 10.0, 100.0)[choice] * length / 100
    if kind == 0:
        return t_T[:, None] * t_T / length**2 + scale / length
    by_distance_T = {
        1: lambda: (-(t_T**2) / (2 * scale**2)).exp(),
        2: lambda: (-2 * (math.pi * t_T / PERIODS[choice]).sin() ** 2).exp(),
        3: lambda: 1 / (1 + t_T**2 / (2 * scale**2)),
        4: lambda: (t_T == 0).double(),
    }[kind]()
    return torch.cat([by_distance_T.flip(0), by_distance_T[1:]]).unfold(0, length, 1).flip(0)  # a Toeplitz matrix


def _square_root(covariance_BTT: Tensor) -> Tensor:
    """Return factors L (B, T, T) with L L^T = covariance + 1e-6."""
    jitter = 1e-6 * torch.eye(covariance_BTT.shape[-1], dtype=covariance_BTT.dtype, device=covariance_BTT.device)
    return torch.linalg.cholesky(covariance_BTT + jitter)


def tokens(values_BT: Tensor, context: int, bins: int) -> Tensor:
    """Return ids (B, T), 0 .. bins - 1, of uniform bins on [-15, 15]; larger values are in the outer bins.

    Each row is divided by the mean |x| of its first `context` values.
    """
    scale_B1 = values_BT[:, :context].abs().mean(1, keepdim=True).clamp_min(1e-9)
    place = (values_BT / scale_B1 + EDGE) * (bins / (2 * EDGE))
    return place.floor().long().clamp(0, bins - 1)


# -- what both experiments' models share ----------------------------------------------------------------
class NoRotation(nn.Module):
    """In the place of rotary embeddings: queries and keys stay as they are."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines of 1 and sines of 0, (B, T, size)."""
        ones = x.new_ones(*position_ids.shape, self.size)
        return ones, torch.zeros_like(ones)


class PositionedEmbedding(nn.Module):
    """Embeddings of tokens with learned positions added."""

    def __init__(self, embedding: nn.Embedding, positions: int, seed: int):
        super().__init__()
        self.embedding = embedding
        generator = torch.Generator().manual_seed(seed)
        std = float(embedding.weight.detach().std())
        self.position_TD = nn.Parameter(std * torch.randn(positions, embedding.embedding_dim, generator=generator))

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the embeddings (B, T, D)."""
        embedded: Tensor = self.embedding(ids_BT)
        return embedded + self.position_TD[: ids_BT.shape[1]]


def without_rotation(model: Any) -> Any:
    """Return the decoder, changed in place to have no rotary embeddings."""
    model.model.rotary_emb = NoRotation(model.config.hidden_size // model.config.num_attention_heads)
    return model


def unbiased_levels(model: nn.Module, factors: dict[str, float]) -> dict[str, float]:
    """Return the factors on the rates, 0 for the biases of levels of MLR attention: the paper has none, and they begin
    at 0.
    """
    own = {f"{path}.mixer.near" for path, _ in mixer_modules(model)}
    return {name: 0.0 if name in own else factor for name, factor in factors.items()}


def mlr_keys(ranks: tuple[int, ...], size: int, length: int) -> dict[str, Any]:
    """Return the recipe keys of nested MLR attention with blocks of T / 2^(l-1) tokens. ranks: for a head of sum(ranks)
    dims; they are scaled to a head of `size`, at least 1 each."""
    rest = [max(1, rank * size // sum(ranks)) for rank in ranks[1:]]
    extents = [max(1, length >> level) for level in range(1, len(ranks))]
    return {"mixer": "mlr", "form": "nested", "ranks": [size - sum(rest), *rest], "extents": extents}
