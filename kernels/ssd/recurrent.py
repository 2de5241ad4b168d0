"""One decoding step of gated and log-linear masks: one token, states read once and written once.

    S <- e^g (I - beta k k^T) S + beta k v^T      o = w q S      kernel scores: S <- e^g S + k v^T

Log-linear masks do this with the bucket S_l of each level and read o = w sum_l lambda^(l) q S_l (Guo et al. 2025,
"Log-Linear Attention", section 3.2). Then the buckets below the lowest zero bit of the position, and the token, merge
into the bucket of that bit.

Shapes: q (B, G, J, F), k (B, G, F), v (B, G, V), states (B, L, G, F, V), w (G, J): a weight of each query head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.ssd.layout import power_of_two
from surgery.kernels.tuning import is_fastest_mask_step
from surgery.mixers.masks.log_linear import levels_after, log_linear_step
from surgery.mixers.masks.semiseparable import semiseparable_step

# Features of a state, query heads of a group, and elements of a state that one program can hold.
MAX_FEATURES, MAX_HEADS, MAX_TILE = 1024, 16, 8192


@triton.jit
def advance_levels(
    q, level, buckets, left, k_K, write_K, v_V, vv_V, fade, at, count, before, after, sqj, slj, sll, sul, left_level,
    F: tl.constexpr, V: tl.constexpr, J: tl.constexpr, LAST: tl.constexpr, BITS: tl.constexpr, DELTA: tl.constexpr,
    MORE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Store the states of one row and group behind the token, and return what it reads of them: sum_l lambda^(l) q S_l
    of each head, (BJ, BV), and the same of the column of ones, (BJ,).

    q, level, buckets, left: pointers to the row and group; left may be buckets. write_K: the key, times beta for the
    delta rule. at, count: position of the token and whether there is one. left_level: numbers between levels of `left`.
    MORE: the states have a column V of sums of keys, which the program of the first tile stores. BITS: log2 of the
    mask's block. The first 2^BITS tokens of a tree's leaf share state 0 and the first lambda; state i >= 1 then is
    bucket BITS + i - 1. LAST, DELTA and strides as in `step`.
    """
    kk_K = tl.arange(0, BK)
    VS: tl.constexpr = V + 1 if MORE else V
    tile_KV = kk_K[:, None] * VS + vv_V[None, :]
    inside_KV = (kk_K < F)[:, None] & (vv_V < V)[None, :]
    stores_K = (kk_K < F) & (tl.min(vv_V, 0) == 0)
    token_KV = write_K[:, None] * v_V[None, :]
    j_J = tl.arange(0, BJ)
    out_JV = tl.zeros([BJ, BV], tl.float32)
    more_J = tl.zeros([BJ], tl.float32)
    if LAST >= 0:
        turned = at ^ (at + count)  # ones up to the lowest zero bit of the position; 0 without a token
        into = -1
        while (turned >> (into + 1)) > 0:
            into += 1
        if BITS > 0:
            into = tl.where(into < BITS, tl.minimum(into, 0), into - BITS + 1)
    total_KV = token_KV
    total_K = write_K
    for i in range(-1 if LAST >= 0 else 0, before):
        s_KV = token_KV
        s_K = write_K
        if i >= 0:
            from_KV = buckets + (at * 0 + i) * sul + tile_KV
            s_KV = tl.load(from_KV, mask=inside_KV, other=0.0).to(tl.float32)
            if DELTA:
                s_KV -= write_K[:, None] * tl.sum(k_K[:, None] * s_KV, 0)[None, :]
            s_KV *= fade
            if LAST < 0:
                s_KV += token_KV
            if MORE:
                s_K = fade * tl.load(buckets + (at * 0 + i) * sul + kk_K * VS + V, mask=kk_K < F, other=0.0).to(
                    tl.float32
                )
                if LAST < 0:
                    s_K += write_K
        for j in tl.static_range(J):
            q_K = tl.load(q + (at * 0 + j) * sqj + kk_K, mask=kk_K < F, other=0.0).to(tl.float32)
            seen_V = tl.sum(q_K[:, None] * s_KV, 0)
            of_level = 1.0
            if LAST >= 0:
                of_state = tl.maximum(i, 0) if BITS > 0 else i + 1
                at_level = (at * 0 + j) * slj + (at * 0 + tl.minimum(of_state, LAST)) * sll
                of_level = tl.load(level + at_level).to(tl.float32)
                seen_V *= of_level
            out_JV += tl.where((j_J == j)[:, None], seen_V[None, :], 0.0)
            if MORE:
                more_J += tl.where(j_J == j, of_level * tl.sum(q_K * s_K, 0), 0.0)
        if i >= 0:
            to_KV = left + (at * 0 + i) * left_level + tile_KV
            if LAST >= 0:
                # With a block, the shared state 0 also keeps what it holds when the token joins it; other buckets are
                # empty then.
                total_KV += tl.where((i < into) | ((i == into) & (BITS > 0)), s_KV, 0.0)
                s_KV = tl.where(i < into, 0.0, tl.where(i == into, total_KV, s_KV))
            tl.store(to_KV, s_KV, mask=inside_KV)
            if MORE:
                if LAST >= 0:
                    total_K += tl.where((i < into) | ((i == into) & (BITS > 0)), s_K, 0.0)
                    s_K = tl.where(i < into, 0.0, tl.where(i == into, total_K, s_K))
                tl.store(left + (at * 0 + i) * left_level + kk_K * VS + V, s_K, mask=stores_K)
    if LAST >= 0:
        for i in range(before, after):
            to_KV = left + (at * 0 + i) * left_level + tile_KV
            tl.store(to_KV, tl.where(i == into, total_KV, 0.0), mask=inside_KV)
            if MORE:
                to_K = left + (at * 0 + i) * left_level + kk_K * VS + V
                tl.store(to_K, tl.where(i == into, total_K, 0.0), mask=stores_K)
    return out_JV, more_J


@triton.jit(do_not_specialize=["before", "after"])
def step(
    q, k, v, beta, gate, level, buckets, out, left, start_B, count_B, weight, seen_B, root, before, after, G,
    sqb, sqg, sqj, skb, skg, svb, svg, sbb, sbg, sgb, sgg, slb, slg, slj, sll, sub, sul, sug, scb, swg, swj,
    F: tl.constexpr, V: tl.constexpr, J: tl.constexpr, LAST: tl.constexpr, BITS: tl.constexpr, DELTA: tl.constexpr,
    UNIT: tl.constexpr, COUNT: tl.constexpr, WEIGHT: tl.constexpr, SEEN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BJ: tl.constexpr,
):  # fmt: skip
    """Store out (B, G, J, V) and left (B, after, G, F, V), the states behind the token. Grid: (B x G, tiles of values).

    buckets (B, before, G, F, V): the states; start_B: position of the token; count_B: 0 in rows without a token; level
    (B, G, J, L): lambdas; weight (G, J). s and two letters is a stride: of q, k, v, beta (b), gate (g), level (l),
    buckets (u), count (c) or weight (w) along an axis. root: factor on q and k. LAST: the last level with a lambda of
    its own, -1 for one state without levels. BITS: log2 of the mask's block. DELTA: delta rule, else kernel scores.
    UNIT: q and k are normalized after the factor. COUNT: rows may have no token; their states stay. WEIGHT: the output
    is multiplied by the weight. SEEN: seen_B becomes start + count.

    The arguments are flat because torch.compile traces this launch, which it cannot do with tuples of arguments.
    """
    b = (tl.program_id(0) // G).to(tl.int64)
    g = (tl.program_id(0) % G).to(tl.int64)
    kk_K = tl.arange(0, BK)
    vv_V = tl.program_id(1) * BV + tl.arange(0, BV)
    count = tl.load(count_B + b * scb).to(tl.int64) if COUNT else 1
    there = count > 0
    k_K = root * tl.load(k + b * skb + g * skg + kk_K, mask=(kk_K < F) & there, other=0.0).to(tl.float32)
    v_V = tl.load(v + b * svb + g * svg + vv_V, mask=(vv_V < V) & there, other=0.0).to(tl.float32)
    fade = tl.where(there, tl.exp(tl.load(gate + b * sgb + g * sgg).to(tl.float32)), 1.0)
    if UNIT:
        k_K *= 1 / tl.sqrt(tl.sum(k_K * k_K, 0) + 1e-6)
    write_K = k_K
    if DELTA:
        write_K = k_K * tl.load(beta + b * sbb + g * sbg).to(tl.float32)
    at = tl.load(start_B + b) if LAST >= 0 else b * 0
    q += b * sqb + g * sqg
    level += b * slb + g * slg
    left += (b * after * G + g) * F * V
    out_JV, _ = advance_levels(
        q, level, buckets + b * sub + g * sug, left, k_K, write_K, v_V, vv_V, fade, at, count, before, after,
        sqj, slj, sll, sul, (b * 0 + G) * F * V, F, V, J, LAST, BITS, DELTA, False, BK, BV, BJ,
    )  # fmt: skip
    j_J = tl.arange(0, BJ)
    scale_J = tl.full([BJ], 1.0, tl.float32) * root
    if UNIT:
        at_JK = q + (b * 0 + j_J)[:, None] * sqj + kk_K[None, :]
        q_JK = root * tl.load(at_JK, mask=(j_J < J)[:, None] & (kk_K < F)[None, :], other=0.0).to(tl.float32)
        scale_J *= 1 / tl.sqrt(tl.sum(q_JK * q_JK, 1) + 1e-6)
    if WEIGHT:
        scale_J *= tl.load(weight + g * swg + j_J * swj, mask=j_J < J, other=0.0).to(tl.float32)
    to_JV = out + ((b * G + g) * J + j_J[:, None]) * V + vv_V[None, :]
    out_JV = (out_JV * scale_J[:, None]).to(out.dtype.element_ty)
    tl.store(to_JV, out_JV, mask=(j_J < J)[:, None] & (vv_V < V)[None, :])
    if SEEN:
        tl.store(seen_B + b, tl.load(start_B + b) + count, mask=(g == 0) & (tl.program_id(1) == 0))


@dataclass
class StepInputs:
    """Inputs of a step besides the states, and its launch plan.

    Attributes:
        beta_BG: writing strength of the delta rule, None for kernel scores.
        gate_BG: log-gates.
        level_BGJL: lambdas of a log-linear mask, None for one state without levels.
        start_B: position of the token, for log-linear masks or if `seen` is asked for.
        count_B: 0 in rows without a token, None if all rows have one.
        weight_GJ: weight of each head's output, None for 1.
        root: factor on q and k.
        bits: log2 of a log-linear mask's block.
        unit: whether q and k are normalized.
    """

    q_BGJF: Tensor
    k_BGF: Tensor
    v_BGV: Tensor
    beta_BG: Tensor | None
    gate_BG: Tensor
    level_BGJL: Tensor | None = None
    start_B: Tensor | None = None
    count_B: Tensor | None = None
    weight_GJ: Tensor | None = None
    root: float = 1.0
    bits: int = 0
    unit: bool = False

    def advance_states(self, buckets: Tensor, after: int, out_BGJV: Tensor, seen_B: Tensor | None = None) -> Tensor:
        """Return the states behind the token (B, after, G, F, V), float32.

        Fills `out`, and `seen` with start + count.
        """
        q, k, v, gate, level = self.q_BGJF, self.k_BGF, self.v_BGV, self.gate_BG, self.level_BGJL
        (batch, groups, per_group, features), values = q.shape, v.shape[-1]
        new_states = torch.empty(batch, after, groups, features, values, dtype=torch.float32, device=v.device)
        beta, weight, start, count, seen = (
            gate if x is None else x for x in (self.beta_BG, self.weight_GJ, self.start_B, self.count_B, seen_B)
        )
        strides = (0, 0, 0, 0) if level is None else level.stride()
        block = min(power_of_two(values), 32, MAX_TILE // power_of_two(features))
        step[(batch * groups, triton.cdiv(values, block))](
            q, k, v, beta, gate, gate if level is None else level, buckets, out_BGJV, new_states, start, count,
            weight, seen, self.root, buckets.shape[1], after, groups, *q.stride()[:3], *k.stride()[:2], *v.stride()[:2],
            *beta.stride()[:2], *gate.stride(), *strides, *buckets.stride()[:3], count.stride(0), *weight.stride()[-2:],
            F=features, V=values, J=per_group, LAST=-1 if level is None else level.shape[-1] - 1,
            BITS=self.bits, DELTA=self.beta_BG is not None, UNIT=self.unit, COUNT=self.count_B is not None,
            WEIGHT=self.weight_GJ is not None, SEEN=seen_B is not None, BK=power_of_two(features), BV=block,
            BJ=triton.next_power_of_2(per_group), num_warps=4,
        )  # fmt: skip
        return new_states

    def read(self, buckets: Tensor, after: int) -> tuple[Tensor, Tensor]:
        """Return (out_BGJV, the states behind the token (B, after, G, F, V)), both float32."""
        batch, groups, per_group, _ = self.q_BGJF.shape
        out = torch.empty(batch, groups, per_group, self.v_BGV.shape[-1], dtype=torch.float32, device=self.v_BGV.device)
        return out, self.advance_states(buckets, after, out)


def _fits_kernel(operands: tuple[Any, ...], states: Tensor) -> bool:
    """Return whether the kernel computes this step.

    It has no backward. operands: q, k, v and others, each a tensor or None.
    """
    q, k, v, *_ = operands
    tensors = [x for x in (*operands, states) if x is not None]
    return (
        not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        and all(x.dtype != torch.float64 for x in tensors)
        and all(x.stride(-1) == 1 for x in (q, k, v, states))
        and states.stride(-2) == v.shape[-1]
        and k.shape[-1] <= MAX_FEATURES
        and q.shape[2] <= MAX_HEADS
    )


def _accepts_gated(*operands: Tensor | None, sum_BRGFV: Tensor) -> bool:
    """Return whether the kernel computes a call of `semiseparable_step`: those with one component."""
    return sum_BRGFV.shape[1] == 1 and _fits_kernel(operands, sum_BRGFV)


def _accepts_log_linear(*operands: Tensor | None, buckets_BLGFV: Tensor, **_: Any) -> bool:
    """Return whether the kernel computes a call of `log_linear_step`."""
    return _fits_kernel(operands, buckets_BLGFV)


@register_kernel(semiseparable_step, accepts=_accepts_gated, is_faster=is_fastest_mask_step("gates"))
def semiseparable_step_triton(
    q_BGJF: Tensor,
    k_BGF: Tensor,
    v_BGV: Tensor,
    beta_BG: Tensor | None,
    gates_BRG: Tensor,
    weight_RGJ: Tensor | None,
    *,
    sum_BRGFV: Tensor,
) -> tuple[Tensor, Tensor]:
    """`semiseparable_step` with one component."""
    gate_BG = gates_BRG[:, 0].expand(k_BGF.shape[:2])
    out, after = StepInputs(q_BGJF, k_BGF, v_BGV, beta_BG, gate_BG).read(sum_BRGFV, 1)
    return (out if weight_RGJ is None else weight_RGJ[0, :, :, None] * out), after


@register_kernel(log_linear_step, accepts=_accepts_log_linear, is_faster=is_fastest_mask_step("hierarchical"))
def log_linear_step_triton(
    q_BGJF: Tensor,
    k_BGF: Tensor,
    v_BGV: Tensor,
    beta_BG: Tensor | None,
    gate_BG: Tensor,
    level_BGJL: Tensor,
    *,
    start_B: Tensor,
    count_B: Tensor,
    buckets_BLGFV: Tensor,
    levels: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`log_linear_step` in one launch."""
    after = levels_after(buckets_BLGFV, start_B, count_B) if levels is None else levels
    gate_BG = gate_BG.expand(k_BGF.shape[:2])
    token = StepInputs(q_BGJF, k_BGF, v_BGV, beta_BG, gate_BG, level_BGJL, start_B=start_B, count_B=count_B)
    return token.read(buckets_BLGFV, after)
