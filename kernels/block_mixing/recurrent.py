"""One token of Toeplitz block mixing: R states are read once, decayed where a block begins, updated, and read out.

S_r = e^(-lambda_r [a block begins]) S_r + k v^T        o_j = q_j sum_r a_rj S_r
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.block_mixing.scan import count_tiles, next_power_of_2
from surgery.kernels.tuning import STEP_READER, is_fastest
from surgery.mixers.masks.toeplitz_block_mixing import toeplitz_step

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_FEATURES = 512  # a program holds BV whole columns of a state
MIN_PROGRAMS = 512  # with fewer programs, each takes fewer columns


@triton.jit
def step_states(
    q, k, v, rate, weight, state, out, after, start, count, G, q_b, q_g, q_j, k_b, k_g, v_b, v_g,
    R: tl.constexpr, J: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Compute out (B, G, J, V) and the next state, after (B, R, G, F, V).

    Grid: (B * G, tiles of V); a program computes BV values of one row and group. start_B: position of the token;
    count_B: whether the row has one; BLOCK: tokens of a block.
    """
    bg = tl.program_id(0).to(tl.int64)
    b, g = bg // G, bg % G
    f, column = tl.arange(0, BF), tl.program_id(1) * BV + tl.arange(0, BV)
    inside = (f < F)[:, None] & (column < V)[None, :]
    enters = (tl.load(start + b) % BLOCK == 0) & (tl.load(count + b) > 0)
    key = tl.load(k + b * k_b + g * k_g + f, mask=f < F, other=0.0).to(tl.float32)
    value = tl.load(v + b * v_b + g * v_g + column, mask=column < V, other=0.0).to(tl.float32)
    written = key[:, None] * value[None, :]
    at = f[:, None] * V + column[None, :]
    for j in tl.static_range(J):  # from the second head on, loads of states hit the cache
        query = tl.load(q + b * q_b + g * q_g + (b * 0 + j) * q_j + f, mask=f < F, other=0.0).to(tl.float32)
        mixed = tl.zeros((BF, BV), tl.float32)
        for r in tl.static_range(R):
            here = ((b * R + r) * G + g) * F * V
            gate = tl.where(enters, tl.exp(-tl.load(rate + r * G + g)), 1.0)
            one = gate * tl.load(state + here + at, mask=inside, other=0.0) + written
            if j == 0:
                tl.store(after + here + at, one, mask=inside)
            mixed += tl.load(weight + (r * G + g) * J + j) * one
        row = tl.sum(query[:, None] * mixed, 0)
        tl.store(out + (bg * J + j) * V + column, row, mask=column < V)


def accepts(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, weight: Tensor, *, sum_BRGFV: Tensor, **_: Any) -> bool:
    """Return whether the kernel computes this call: no gradients, float32 states, and sizes that fit a program."""
    dtypes_fit = all(x.dtype in FLOAT_DTYPES for x in (q, k, v)) and sum_BRGFV.dtype == torch.float32
    fits = dtypes_fit and k.shape[-1] <= MAX_FEATURES
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, rate, weight, sum_BRGFV))
    return fits and not needs_grad and len(rate) <= 16


@register_kernel(toeplitz_step, accepts, is_faster=is_fastest("toeplitz_blocks", STEP_READER))
def toeplitz_step_triton(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    rate_RG: Tensor,
    weight_RGJ: Tensor,
    *,
    sum_BRGFV: Tensor,
    start_B: Tensor,
    count_B: Tensor,
    block: int,
) -> tuple[Tensor, Tensor]:
    """Return (out_BGJTV of the token, next states); arguments as in `toeplitz_step`."""
    batch, components, groups, features, values = sum_BRGFV.shape
    per_group, state = weight_RGJ.shape[2], sum_BRGFV.contiguous()
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BGJTF, k_BGTF, v_BGTV))
    out = torch.empty(batch, groups, per_group, 1, values, dtype=torch.float32, device=q.device)
    after = torch.empty_like(state)
    width = 64 if batch * groups * count_tiles(values, 64) >= MIN_PROGRAMS else 16
    step_states[(batch * groups, count_tiles(values, width))](
        q, k, v, rate_RG.float().contiguous(), weight_RGJ.float().contiguous(), state, out, after, start_B, count_B,
        groups, *q.stride()[:3], *k.stride()[:2], *v.stride()[:2],
        R=components, J=per_group, F=features, V=values, BLOCK=block,
        BF=next_power_of_2(features), BV=width, num_warps=4,
    )  # fmt: skip
    return out, after
