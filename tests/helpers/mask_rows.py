"""Masks with perturbed parameters, random packed rows, and the dense definition that implementations are compared
with.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
import torch.nn.functional as F

from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS, Mask, MaskInputs
from surgery.mixers.masks.delta_rule import dense_scores

SHAPE = AttentionShape(dim=6, heads=4, groups=2, key=5, value=3, scaling=1.0)


def make_mask(config, shape: AttentionShape = SHAPE, dtype: torch.dtype = torch.float64) -> Mask:
    """Return a mask whose parameters differ from their initial values."""
    torch.manual_seed(3)
    mask = MASKS[config](config, shape).to(dtype)
    with torch.no_grad():
        for parameter in mask.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return mask


def random_rows(
    mask: Mask, scores: str, length: int, start: list[int], count: list[int], features=5, values=3
) -> MaskInputs:
    """Return packed rows; entries after each row's `count` tokens are zero."""
    torch.manual_seed(length)
    shape, batch, dtype = mask.shape, len(start), torch.float64
    groups = shape.groups
    q = torch.randn(batch, groups, shape.heads // groups, length, features, dtype=dtype)
    k, v = (torch.randn(batch, groups, length, n, dtype=dtype) for n in (features, values))
    beta = torch.rand(batch, groups, length, dtype=dtype) if scores == "delta" else None
    k = F.normalize(k, dim=-1) if beta is not None else k
    real_BT = torch.arange(length) < torch.tensor(count).unsqueeze(1)
    signals = mask.signals(torch.randn(batch, length, shape.dim, dtype=dtype))
    for name in mask.written_signals:
        signals[name] = signals[name] * real_BT.view(batch, length, *[1] * (signals[name].dim() - 2))
    k, v = (x * real_BT[:, None, :, None] for x in (k, v))
    beta = None if beta is None else beta * real_BT[:, None]
    return MaskInputs(q, k, v, beta, torch.tensor(start), torch.tensor(count), signals)


def to_dtype(rows: MaskInputs, dtype: torch.dtype) -> MaskInputs:
    """Convert all floating-point inputs."""
    parts = {
        name: None if x is None else x.to(dtype) for name, x in vars(rows).items() if name.endswith(("F", "V", "BGT"))
    }
    return replace(rows, **parts, signals={name: x.to(dtype) for name, x in rows.signals.items()})


def slice_rows(rows: MaskInputs, a: int, b: int) -> MaskInputs:
    """Return tokens a .. b of every row."""
    return MaskInputs(
        rows.q_BGJTF[:, :, :, a:b],
        rows.k_BGTF[:, :, a:b],
        rows.v_BGTV[:, :, a:b],
        None if rows.beta_BGT is None else rows.beta_BGT[:, :, a:b],
        rows.start_B + rows.count_B.clamp_max(a),
        (rows.count_B - a).clamp(0, b - a),
        {name: x[:, a:b] for name, x in rows.signals.items()},
    )


def dense_output(mask: Mask, rows: MaskInputs) -> torch.Tensor:
    """Return the definition, (A . M) V."""
    scores = dense_scores(rows.q_BGJTF, rows.k_BGTF, rows.beta_BGT)
    return (scores * mask.dense(rows.start_B, rows.v_BGTV.shape[2], rows.signals)) @ rows.v_BGTV.unsqueeze(2)


def run_in_pieces(mask: Mask, rows: MaskInputs, cuts: list[int], chunk: int, state=None) -> tuple[torch.Tensor, dict]:
    """Run in pieces that end at `cuts`. chunk 0: one token at a time."""
    batch, features, values = len(rows.start_B), rows.k_BGTF.shape[-1], rows.v_BGTV.shape[-1]
    state, outs = state or mask.empty_state(batch, features, values, "cpu"), []
    for a, b in itertools.pairwise(cuts):
        out, state = (
            mask.chunked(slice_rows(rows, a, b), state, chunk) if chunk else mask.step(slice_rows(rows, a, b), state)
        )
        outs.append(out)
    return torch.cat(outs, 3), state


def relative_error(out: torch.Tensor, expected: torch.Tensor, rows: MaskInputs) -> float:
    """Return the relative error over real tokens."""
    real = (torch.arange(out.shape[3]) < rows.count_B.unsqueeze(1))[:, None, None, :, None]
    return float(((out - expected) * real).norm() / (expected * real).norm().clamp_min(1e-30))
