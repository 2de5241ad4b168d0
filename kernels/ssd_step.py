"""One token of masks of gates and of log-linear attention: states read once and written once.

S <- e^g (I - beta k k^T) S + beta k v^T      o = q S           beta = 1 and no carry for kernel scores
log-linear: every bucket so, o = sum_l lambda^(l) q S_l; those below the lowest zero bit of the position then fall
into that bit's, with the token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.ssd_launch import power_of_two
from surgery.mixers.masks.hierarchical import levels_after, log_linear_step
from surgery.mixers.masks.semiseparable import semiseparable_step
from surgery.op import kernel_for


@triton.jit(do_not_specialize=["before", "after"])
def step(
    q, k, v, beta, gate, level, buckets, out, left, start_B, count_B, before, after, G, sqb, sqg, sqj, skb, skg, svb,
    svg, sbb, sbg, sgb, sgg, slb, slg, slj, sll, sub, sul, sug, F: tl.constexpr, V: tl.constexpr, J: tl.constexpr,
    LAST: tl.constexpr, DELTA: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """buckets: `before` of them, left (B, after, G, F, V). LAST: the last level that has a lambda of its own; -1: one
    state, no levels."""
    b = (tl.program_id(0) // G).to(tl.int64)
    g = (tl.program_id(0) % G).to(tl.int64)
    kk_K = tl.arange(0, BK)
    vv_V = tl.program_id(1) * BV + tl.arange(0, BV)
    tile_KV = kk_K[:, None] * V + vv_V[None, :]
    inside_KV = (kk_K < F)[:, None] & (vv_V < V)[None, :]
    k_K = tl.load(k + b * skb + g * skg + kk_K, mask=kk_K < F, other=0.0).to(tl.float32)
    v_V = tl.load(v + b * svb + g * svg + vv_V, mask=vv_V < V, other=0.0).to(tl.float32)
    fade = tl.exp(tl.load(gate + b * sgb + g * sgg).to(tl.float32))
    write_K = k_K
    if DELTA:
        write_K = k_K * tl.load(beta + b * sbb + g * sbg).to(tl.float32)
    token_KV = write_K[:, None] * v_V[None, :]
    j_J = tl.arange(0, BJ)
    out_JV = tl.zeros([BJ, BV], tl.float32)
    if LAST >= 0:
        at = tl.load(start_B + b)
        turned = at ^ (at + tl.load(count_B + b))  # ones up to the lowest zero bit of the position; 0: no token
        into = -1
        while (turned >> (into + 1)) > 0:
            into += 1
    total_KV = token_KV
    for i in range(-1 if LAST >= 0 else 0, before):
        s_KV = token_KV
        if i >= 0:
            from_KV = buckets + b * sub + i * sul + g * sug + tile_KV
            s_KV = tl.load(from_KV, mask=inside_KV, other=0.0).to(tl.float32)
            if DELTA:
                s_KV -= write_K[:, None] * tl.sum(k_K[:, None] * s_KV, 0)[None, :]
            s_KV *= fade
            if LAST < 0:
                s_KV += token_KV
        for j in tl.static_range(J):
            q_K = tl.load(q + b * sqb + g * sqg + j * sqj + kk_K, mask=kk_K < F, other=0.0).to(tl.float32)
            seen_V = tl.sum(q_K[:, None] * s_KV, 0)
            if LAST >= 0:
                weight = tl.load(level + b * slb + g * slg + j * slj + tl.minimum(i + 1, LAST) * sll)
                seen_V *= weight.to(tl.float32)
            out_JV += tl.where((j_J == j)[:, None], seen_V[None, :], 0.0)
        if i >= 0:
            to_KV = left + ((b * after + i) * G + g) * F * V + tile_KV
            if LAST >= 0:
                total_KV += tl.where(i < into, s_KV, 0.0)
                s_KV = tl.where(i < into, 0.0, tl.where(i == into, total_KV, s_KV))
            tl.store(to_KV, s_KV, mask=inside_KV)
    if LAST >= 0:
        for i in range(before, after):
            to_KV = left + ((b * after + i) * G + g) * F * V + tile_KV
            tl.store(to_KV, tl.where(i == into, total_KV, 0.0), mask=inside_KV)
    to_JV = out + ((b * G + g) * J + j_J[:, None]) * V + vv_V[None, :]
    tl.store(to_JV, out_JV, mask=(j_J < J)[:, None] & (vv_V < V)[None, :])


def stepped(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, gate: Tensor, level: Tensor | None, buckets: Tensor,
    after: int, place: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out_BGJV, buckets_BLGFV), float32."""
    (batch, groups, per_group, features), values = q.shape, v.shape[-1]
    gate = gate.expand(batch, groups)
    out = torch.empty(batch, groups, per_group, values, dtype=torch.float32, device=v.device)
    left = torch.empty(batch, after, groups, features, values, dtype=torch.float32, device=v.device)
    betas, levels = gate if beta is None else beta, (0, 0, 0, 0) if level is None else level.stride()
    start_B, count_B = (gate, gate) if place is None else place
    block = min(power_of_two(values), 32)
    step[(batch * groups, triton.cdiv(values, block))](
        q, k, v, betas, gate, gate if level is None else level, buckets, out, left, start_B, count_B, buckets.shape[1],
        after, groups, *q.stride()[:3], *k.stride()[:2], *v.stride()[:2], *betas.stride(), *gate.stride(), *levels,
        *buckets.stride()[:3], F=features, V=values, J=per_group, LAST=-1 if level is None else level.shape[-1] - 1,
        DELTA=beta is not None, BK=power_of_two(features), BV=block, BJ=triton.next_power_of_2(per_group), num_warps=4,
    )  # fmt: skip
    return out, left


def _accepts(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> bool:
    """No gradients: of a state that lives on through steps nobody asks them."""
    tensors = [x for x in (q, k, v, *others) if isinstance(x, Tensor)]
    states = tensors[-1]
    return (
        not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        and all(x.dtype != torch.float64 for x in tensors)
        and all(x.stride(-1) == 1 for x in (q, k, v, states))
        and states.stride(-2) == v.shape[-1]
        and k.shape[-1] <= 256
        and q.shape[2] <= 16
    )


def _one_component(*args: Any) -> bool:
    return args[6].shape[1] == 1 and _accepts(*args)


@kernel_for(semiseparable_step, accepts=_one_component)
def semiseparable_step_triton(
    q_BGJF: Tensor,
    k_BGF: Tensor,
    v_BGV: Tensor,
    beta_BG: Tensor | None,
    gates_BRG: Tensor,
    weight_RGJ: Tensor | None,
    sum_BRGFV: Tensor,
) -> tuple[Tensor, Tensor]:
    out, after = stepped(q_BGJF, k_BGF, v_BGV, beta_BG, gates_BRG[:, 0], None, sum_BRGFV, 1, None)
    return (out if weight_RGJ is None else weight_RGJ[0, :, :, None] * out), after


@kernel_for(log_linear_step, accepts=_accepts)
def log_linear_step_triton(
    q_BGJF: Tensor,
    k_BGF: Tensor,
    v_BGV: Tensor,
    beta_BG: Tensor | None,
    gate_BG: Tensor,
    level_BGJL: Tensor,
    start_B: Tensor,
    count_B: Tensor,
    buckets_BLGFV: Tensor,
) -> tuple[Tensor, Tensor]:
    after = levels_after(buckets_BLGFV, start_B, count_B)
    token = q_BGJF, k_BGF, v_BGV, beta_BG, gate_BG, level_BGJL
    return stepped(*token, buckets_BLGFV, after, (start_B, count_B))
