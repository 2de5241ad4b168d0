"""The gated delta rule in chunks on a GPU: gated masks with the delta rule's scores (`semiseparable` with beta).

    S_t = e^(g_t) (I - beta_t k_t k_t^T) S_t-1 + beta_t k_t v_t^T      o_t = q_t S_t

Yang et al. 2025, "Gated Delta Networks", eq. 10 and section 3.3. Chunks are brought into WY form
(kernels/gated_delta/wy.py), states pass from chunk to chunk (kernels/gated_delta/states.py), then every chunk computes
its outputs (kernels/gated_delta/output.py). The backward recomputes the states; only the inputs are saved. Where another
package's kernel is installed, correct and faster, it runs instead (kernels/packages/contest.py).

Shapes: q (B, G, J, T, K), k (B, G, T, K), v (B, G, T, V), beta and log-gates (B, G, T), states (R, G, K, V). B rows of
the batch, G groups of J query heads, T tokens, K features of queries and keys, V values, R rows with a state of their
own.

One H200, bf16, B = 2, 48 heads, V = 64, K = 128, keys shared by the heads (2026-11-21), ms forward / with its backward:
0.47 / 2.2 for 4,096 tokens, 0.87 / 4.2 for 8,192, 3.5 / 17 for 32,768, 6.9 / 34 for 65,536. The reference takes 13
times as long at 1,024, so the kernel is used wherever it accepts the arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.chunked_op import ChunkedFunctions, ChunkedOp
from surgery.kernels.gated_delta.layout import (
    DEFAULT_CHUNK,
    DeltaPlan,
    DeltaSizes,
    fits_kernels,
    make_sizes,
    packed_sizes,
)
from surgery.kernels.gated_delta.output import launch_output, launch_output_backward
from surgery.kernels.gated_delta.states import launch_pass_backward, launch_pass_forward
from surgery.kernels.gated_delta.wy import WYOutputGradients, launch_wy_backward, launch_wy_forward
from surgery.kernels.kernel_tensors import empty_out, unit_last_stride
from surgery.kernels.packages.adapters import GATED_DELTA_KERNELS
from surgery.kernels.packages.chunked import with_packages
from surgery.kernels.packages.heads_last import RowTensors
from surgery.kernels.tuning import TOKENS_READER, is_fastest
from surgery.mixers.common.packed_pieces import PackedPieces, borders_of
from surgery.mixers.masks.semiseparable import semiseparable, semiseparable_packed


def _make_sizes(tensors: tuple[Any, ...], ends: Tensor | PackedPieces | None, chunk: int) -> DeltaSizes:
    if isinstance(ends, PackedPieces):
        return packed_sizes(tensors[0], tensors[2], chunk, ends, resumes=False)
    return make_sizes(tensors[0], tensors[2], chunk, None, ends)


def _forward(tensors: tuple[Any, ...], sizes: DeltaSizes) -> tuple[Tensor, Tensor]:
    """Return (out_BGJTV, last_RGKV) of q, k, v, beta, gates and the first state or None."""
    q, k, v, beta, gates, first = tensors
    plan = DeltaPlan(q, k, v, beta, gates, sizes)
    terms = launch_wy_forward(plan)
    states, last = launch_pass_forward(plan, terms, first)
    return launch_output(plan, terms, states), last


def _backward(
    tensors: tuple[Any, ...], sizes: DeltaSizes, d_out: Tensor, d_last: Tensor
) -> tuple[Tensor | None, ...]:  # fmt: skip
    q, k, v, beta, gates, first = tensors
    plan, d_out = DeltaPlan(q, k, v, beta, gates, sizes), unit_last_stride(d_out)
    terms = launch_wy_forward(plan)
    states, _ = launch_pass_forward(plan, terms, first)
    dstates, dfirst = launch_pass_backward(plan, terms, d_out, d_last.contiguous())
    dq, dk, dw, dc = launch_output_backward(plan, terms, d_out, states, dstates)
    return dq, *launch_wy_backward(plan, terms, WYOutputGradients(dw, dstates.x, dk, dc)), dfirst


def _fake_outputs(tensors: tuple[Any, ...], ends: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    q, k, v, *_ = tensors
    rows = len(q) if ends is None else len(ends) - 1
    last = v.new_empty(rows, v.shape[1], k.shape[-1], v.shape[-1], dtype=torch.float32)
    return empty_out(q, v), last


GATED_DELTA_OP = ChunkedOp(
    "gated_delta",
    "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor gates, Tensor? first",
    "Tensor? ends, int chunk",
    with_packages(
        "gated delta rule",
        ChunkedFunctions(_make_sizes, _forward, _backward, _fake_outputs),
        GATED_DELTA_KERNELS,
        rows_of=lambda tensors: RowTensors(*tensors),
        borders_of=lambda ends, chunk: borders_of(ends),
    ),
)


def gated_delta(
    q_BGJTK: Tensor,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor,
    gates_BGT: Tensor,
    first_RGKV: Tensor | None = None,
    *,
    cu_seqlens: Tensor | PackedPieces | None = None,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return (out_BGJTV in v's dtype, last_RGKV: the state behind each row's last token in float32).

    first: states before the first tokens, None for zeros. cu_seqlens: borders (R + 1,) of R sequences packed into one
    row (B = 1), or the pieces, each with a state of its own; without it R = B.
    """
    first = None if first_RGKV is None else first_RGKV.float().contiguous()
    gates = gates_BGT.expand(v_BGTV.shape[:3])
    tokens = unit_last_stride(q_BGJTK), unit_last_stride(k_BGTK), unit_last_stride(v_BGTV)
    return GATED_DELTA_OP((*tokens, beta_BGT, gates, first), (cu_seqlens, chunk))


def _accepts(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, *_: Any, **__: Any) -> bool:
    return fits_kernels(q, k, v, beta)


@register_kernel(semiseparable, accepts=_accepts, is_faster=is_fastest("gates delta", TOKENS_READER))
def semiseparable_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gates: Tensor,
    weight: Tensor | None,
    *,
    first_BRGFV: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """`semiseparable` with beta."""
    return _mix_components((q, k, v, beta, gates, weight), first_BRGFV, None, chunk)


@register_kernel(semiseparable_packed, accepts=_accepts, is_faster=is_fastest("gates delta", TOKENS_READER))
def semiseparable_packed_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gates: Tensor,
    weight: Tensor | None,
    *,
    first_SRGFV: Tensor,
    pieces: PackedPieces,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """`semiseparable_packed` with beta."""
    return _mix_components((q, k, v, beta, gates, weight), first_SRGFV, pieces, chunk)


def _mix_components(
    tokens: tuple[Any, ...], first_BRGFV: Tensor | None, cu_seqlens: Tensor | PackedPieces | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return (out, last) of one component after the other: components have separate states."""
    q, k, v, beta, gates, weight = tokens
    outs, lasts = [], []
    gates = gates if weight is None else gates.expand(-1, len(weight), -1, -1)
    for r, gates_BGT in enumerate(gates.unbind(1)):
        first_BGFV = None if first_BRGFV is None else first_BRGFV[:, r]
        out, last = gated_delta(
            q, k, v, beta, gates_BGT, first_BGFV, cu_seqlens=cu_seqlens, chunk=min(chunk, DEFAULT_CHUNK)
        )  # fmt: skip
        outs.append(out if weight is None else out * weight[r, :, :, None, None].to(out.dtype))
        lasts.append(last)
    return sum(outs[1:], outs[0]), lasts[0].unsqueeze(1) if len(lasts) == 1 else torch.stack(lasts, 1)
