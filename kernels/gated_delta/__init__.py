"""Gated delta rule in chunks on a GPU: masks of gates with the delta rule's scores (`semiseparable` with beta).

    S_t = e^(g_t) (I - beta_t k_t k_t^T) S_t-1 + beta_t k_t v_t^T      o_t = q_t S_t

Yang et al. 2025, "Gated Delta Networks", eq. 10 and section 3.3. Inside chunks WY form (kernels/gated_delta/wy.py), states pass
from chunk to chunk (kernels/gated_delta/states.py), then every chunk reads its own (kernels/gated_delta/output.py). Backwards the
states are computed once more: saved are the inputs alone.

One H200, bf16, B = 2, 48 heads, V = 64, K = 128, keys shared by the heads (2026-11-21), ms forward / with its backward:
0.47 / 2.2 for 4,096 tokens, 0.87 / 4.2 for 8,192, 3.5 / 17 for 32,768, 6.9 / 34 for 65,536. The reference takes 13 times
as long at 1,024: where the kernel is right it wins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.custom_op import CustomOp
from surgery.kernels.gated_delta import output as chunks
from surgery.kernels.gated_delta import states, wy
from surgery.kernels.gated_delta.layout import MOST_HEADS, DeltaSizes, make_sizes
from surgery.kernels.tuning import TOKENS_READER, is_fastest
from surgery.mixers.masks.semiseparable import semiseparable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_FEATURES, DEFAULT_CHUNK = 256, 64


def unit_last_stride(x: Tensor) -> Tensor:
    """With its last axis packed; others as they lie, groups that share their keys too."""
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gates: Tensor, first: Tensor | None, s: DeltaSizes
) -> tuple[Tensor, Tensor]:
    """(out_BGJTV, last_RGKV) of q_BGJTK, k_BGTK, v_BGTV, beta_BGT, gates_BGT, first_RGKV or None."""
    c, _, w, u = wy.forward(k, v, beta, gates, s)
    before, x, last = states.forward(k, c, w, u, first, s)
    return chunks.forward(q, k, c, before, x, s), last


def backward(
    do: Tensor,
    dlast: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gates: Tensor,
    first: Tensor | None,
    s: DeltaSizes,
) -> tuple[Tensor | None, ...]:
    do, dlast = unit_last_stride(do), dlast.contiguous()
    c, y, w, u = wy.forward(k, v, beta, gates, s)
    before, x, _ = states.forward(k, c, w, u, first, s)
    dstates, dx, dfirst = states.backward(q, k, do, c, w, dlast, s)
    dq, dk, dw, dc = chunks.backward(q, k, do, c, before, x, dstates, dx, s)
    dk, dv, dbeta, dgates = wy.backward(k, v, beta, c, y, dw, dx, None, dk, dc, None, s)
    return dq, dk, dv, dbeta.to(beta.dtype), dgates.to(gates.dtype), None if first is None else dfirst


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        *tensors, ctx.sizes = args
        ctx.save_for_backward(*tensors)
        return forward(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *backward(*grads, *ctx.saved_tensors, ctx.sizes), None


def _fake_outputs(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows = len(q) if rest[3] is None else len(rest[3]) - 1
    last = v.new_empty(rows, v.shape[1], k.shape[-1], v.shape[-1], dtype=torch.float32)
    return v.new_empty(*q.shape[:4], v.shape[-1]), last


GATED_DELTA_OP = CustomOp(
    "gated_delta",
    "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor gates, Tensor? first, Tensor? ends, int chunk",
    lambda *given: forward(*given[:6], make_sizes(given[0], given[2], given[7], None, given[6])),
    lambda do, dlast, *given: (
        *backward(do, dlast, *given[:6], make_sizes(given[0], given[2], given[7], None, given[6])),
        None,
        None,
    ),
    _fake_outputs,
)


def gated_delta(
    q_BGJTK: Tensor,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor,
    gates_BGT: Tensor,
    first_RGKV: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[Tensor, Tensor]:
    """(out_BGJTV in v's dtype, last_RGKV in float32). With cu_seqlens (R + 1 borders, B = 1) each of the R packed
    sequences has its own state; else R = B."""
    first = None if first_RGKV is None else first_RGKV.float().contiguous()
    gates = gates_BGT.expand(v_BGTV.shape[:3])
    given = unit_last_stride(q_BGJTK), unit_last_stride(k_BGTK), unit_last_stride(v_BGTV), beta_BGT, gates, first
    if torch.compiler.is_compiling():
        return GATED_DELTA_OP(*given, cu_seqlens, chunk)
    return _GatedDelta.apply(*given, make_sizes(q_BGJTK, v_BGTV, chunk, None, cu_seqlens))


def accepts(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, gates: Tensor, weight: Tensor | None, first: Tensor | None,
    chunk: int,
) -> bool:  # fmt: skip
    alike = q.dtype == k.dtype == v.dtype and v.dtype in DTYPES
    return (
        beta is not None
        and alike
        and q.shape[-1] <= MAX_FEATURES
        and v.numel() > 0
        and v.shape[1] * q.shape[2] < MOST_HEADS
    )


@register_kernel(semiseparable, accepts=accepts, is_faster=is_fastest("gates delta", TOKENS_READER))
def semiseparable_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gates: Tensor,
    weight: Tensor | None,
    first: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """A component at a time: they share no state."""
    outs, lasts = [], []
    gates = gates if weight is None else gates.expand(-1, len(weight), -1, -1)
    for r, gates_BGT in enumerate(gates.unbind(1)):
        first_BGFV = None if first is None else first[:, r]
        out, last = gated_delta(q, k, v, beta, gates_BGT, first_BGFV, chunk=min(chunk, DEFAULT_CHUNK))
        outs.append(out if weight is None else out * weight[r, :, :, None, None].to(out.dtype))
        lasts.append(last)
    return sum(outs[1:], outs[0]), torch.stack(lasts, 1)
