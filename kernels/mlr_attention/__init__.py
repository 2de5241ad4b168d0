"""MLR attention and sliding-window softmax, see surgery/mixers/common/softmax.py: terms of a score, each seen in its extent.

Prefill and training read keys whose levels lie side by side, as `levels` cuts them; where they do not they are copied
together once. Few queries against a cache go to kernels/mlr_attention/decode.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.mlr_attention.backward import mlr_keys, mlr_queries
from surgery.kernels.mlr_attention.decode import MAX_LEVELS, launch_decode
from surgery.kernels.mlr_attention.forward import mlr_forward
from surgery.kernels.mlr_attention.plan import AttentionTiles, MLRPlan, backward_tiles, forward_tiles
from surgery.kernels.tuning import (
    CallReader,
    TuningQuery,
    is_capturing,
    is_fastest,
    named_sizes,
    step_pass,
    training_pass,
)
from surgery.mixers.base import AttentionShape
from surgery.mixers.common.kv_layout import KVLayout
from surgery.mixers.common.softmax import ScoreTerm, attend

HAS_CONSTEXPR_TUPLES = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (
    3,
    4,
)  # kernels index constants
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DECODE_ROWS = 64  # queries and heads that share keys, of a step
MAX_DIMS = 256  # of keys and of values, at most
FIXED_MAX_SLOTS = 2048  # slots from which on far scores are not asked for their largest
LANES = 65535  # rows times heads of a launch: what the second axis of a CUDA grid holds


def kernel_options(plan: MLRPlan, q: Tensor, v: Tensor, biases: Tensor | None, tiles: AttentionTiles) -> dict[str, Any]:
    """What all three kernels are compiled for."""
    return {
        "EXTENTS": (0, *plan.extents),
        "CUTS": plan.cuts,
        "L": len(plan.ranks),
        "HOLES": plan.holes,
        "WINDOWED": plan.window is not None,
        "NESTED": plan.nested,
        "BIASED": biases is not None,
        "CAP": plan.softcap or 0.0,
        "CROSSING": plan.crossing(tiles.M, tiles.N),
        "R": q.shape[-1],
        "V": v.shape[-1],
        "M": tiles.M,
        "N": tiles.N,
        "DV": max(16, triton.next_power_of_2(v.shape[-1])),
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else None,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        **({} if tiles.registers is None else {"maxnreg": tiles.registers}),
    }


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    biases: Tensor | None,
    ends: Tensor,
    plan: MLRPlan,
    tiles: Any = None,
    walks: Any = None,
) -> tuple[Tensor, Tensor]:
    """(out_BHTV, lse_BHT) of q_BHTR, k_BGSR, v_BGSV; biases_HZ: the sum over levels below z, z = 0 .. L."""
    B, H, T, R = q.shape
    G, S, V = v.shape[1:]
    if B > 1 and B * H > LANES:
        parts = [forward(q[b], k[b], v[b], biases, ends_of(ends, b), plan, tiles, walks) for b in launches(B, H)]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    tiles = tiles or forward_tiles(q.dtype, max(R, V), plan)
    new = torch.zeros if plan.holes else torch.empty
    out = new(B, H, T, V, dtype=v.dtype, device=q.device)
    lse = new(B, H, T, dtype=torch.float32, device=q.device)
    (a1, b1, zone), (a2, b2, _) = walks or plan.walks()
    grid = triton.cdiv(T, tiles.M) + plan.holes, B * H
    fixed = S >= FIXED_MAX_SLOTS and q.dtype != torch.float16  # whose exponents are too few
    again = torch.empty(grid[::-1], dtype=torch.int32, device=q.device) if fixed else None
    for redo in (False, True)[: 1 + fixed]:
        mlr_forward[grid](
            q, k, v, out, again, lse, ends, biases, plan.scaling, plan.window or 0, T, S, H, H // G,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], 0 if ends.shape[0] == 1 else 1,
            A1=a1, B1=b1, L1=zone, A2=a2, B2=b2,
            MIN_RUN=tiles.run, HOLD=tiles.hold and len(plan.ranks) > 1,
            FIXED=fixed and not redo, REDO=redo, **kernel_options(plan, q, v, biases, tiles),
        )  # fmt: skip
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, biases: Tensor | None, ends: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    plan: MLRPlan, tiles: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of q, k, v and biases. Those of keys are made for each query head and summed over the ones sharing."""
    B, H, T, R = q.shape
    G, S, V = v.shape[1:]
    if B > 1 and B * H > LANES:
        given = q, k, v, out, lse, dout
        parts = []
        for b in launches(B, H):
            q_b, k_b, v_b, *rest = (x[b] for x in given)
            parts.append(backward(q_b, k_b, v_b, biases, ends_of(ends, b), *rest, plan, tiles))
        *grads, dbiases = zip(*parts)
        dq, dk, dv = (torch.cat(x) for x in grads)
        return dq, dk, dv, None if biases is None else sum(dbiases[1:], dbiases[0])
    tiles_q, tiles_k = tiles or backward_tiles(q.dtype, max(R, V), plan)
    new = torch.zeros if plan.holes else torch.empty
    dq, delta = new(B, H, T, R, dtype=q.dtype, device=q.device), torch.empty_like(lse)
    gathered = q.dtype if H == G else torch.float32
    dk = new(B, H, S, R, dtype=gathered, device=q.device)
    dv = new(B, H, S, V, dtype=gathered, device=q.device)
    programs = triton.cdiv(T, tiles_q.M) + plan.holes
    dbiases = None if biases is None else biases.new_zeros(B, H, programs, biases.shape[1])
    masses = None if biases is None else biases.new_zeros(B, H, biases.shape[1], T)
    a, b, zone = plan.halves()
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3], 0 if ends.shape[0] == 1 else 1)
    scalars = (plan.scaling, plan.window or 0, T, S, H, H // G)
    mlr_queries[programs, B * H](
        q, k, v, out, dout, lse, delta, dq, ends, biases, dbiases, masses, *scalars, *strides,
        A=a, B=b, L1=zone, DBIAS=biases is not None, **kernel_options(plan, q, v, biases, tiles_q),
    )  # fmt: skip
    mlr_keys[triton.cdiv(S, tiles_k.N) + plan.holes, B * H](
        q, k, v, dout, lse, delta, dk, dv, ends, biases, *scalars, *strides,
        A=a, B=b, L1=zone, **kernel_options(plan, q, v, biases, tiles_k),
    )  # fmt: skip
    if H > G:
        dk, dv = (x.unflatten(1, (G, -1)).sum(2).to(q.dtype) for x in (dk, dv))
    return dq, dk, dv, None if dbiases is None else dbiases.sum((0, 2)) * plan.scaling


def launches(rows: int, heads: int) -> list[slice]:
    """The rows of each launch, where one cannot take all of them."""
    step = max(1, LANES // heads)
    return [slice(first, first + step) for first in range(0, rows, step)]


def ends_of(ends: Tensor, rows: slice) -> Tensor:
    return ends if len(ends) == 1 else ends[rows]


class MLRAttentionFunction(torch.autograd.Function):
    """parts: q_BHTR of every level, then k_BGSR of every level; plan may have some of them in one."""

    @staticmethod
    def forward(ctx: Any, plan: MLRPlan, ends: Tensor, biases: Tensor | None, v: Tensor, *parts: Tensor) -> Tensor:
        levels = len(parts) // 2
        q, k = align_rows(join_levels(parts[:levels])), align_rows(join_levels(parts[levels:]))
        values, v = v.shape[-1], align_rows(v)
        ctx.whole = biases if len(plan.ranks) == 1 and plan.softcap is None else None
        biases = biases if ctx.whole is None else None  # what all scores get more changes nothing
        out, lse = forward(q, k, v, biases, ends, plan)
        ctx.plan, ctx.values, ctx.parts = plan, values, [part.shape[2:] for part in parts[levels:]]
        ctx.save_for_backward(q, k, v, biases, ends, out, lse)
        return out[..., :values]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, biases, ends, out, lse = ctx.saved_tensors
        dq, dk, dv, dbiases = backward(q, k, v, biases, ends, out, lse, align_rows(dout), ctx.plan)
        dbiases = dbiases if ctx.whole is None else torch.zeros_like(ctx.whole)
        (slots, ranks), dims = zip(*ctx.parts), sum(ctx.plan.ranks)
        dks = [part[:, :, part.shape[2] - n :] for part, n in zip(dk[..., :dims].split(ranks, -1), slots)]
        return None, None, dbiases, dv[..., : ctx.values], *dq[..., :dims].split(ranks, -1), *dks


def join_levels(parts: tuple[Tensor, ...]) -> Tensor:
    """The levels side by side: a view where they are neighbours in memory; slots that a level has not are zeros."""
    first, slots = parts[0], parts[0].shape[2]
    offset, neighbours = first.storage_offset(), True
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        neighbours &= same and part.stride() == first.stride() and part.storage_offset() == offset
        offset += part.shape[-1]
    if neighbours and first.stride(-1) == 1:
        size = (*first.shape[:-1], sum(part.shape[-1] for part in parts))
        return first.as_strided(size, first.stride(), first.storage_offset())
    return torch.cat([F.pad(part, (0, 0, slots - part.shape[2], 0)) for part in parts], -1)


def align_rows(x: Tensor) -> Tensor:
    """Rows of whole 16-byte units, what copies to shared memory take; a tile's, 128 at most, within 2^31 numbers."""
    unit = 16 // x.element_size()
    odd = any(s % unit for s in x.stride()[:3]) or x.stride(-1) != 1 or x.data_ptr() % 16 or x.stride(2) >= 2**24
    x = F.pad(x, (0, -x.shape[-1] % 16)) if x.shape[-1] % 16 else x
    return x.contiguous() if odd else x


def accepts(
    terms: list[ScoreTerm],
    v_BGSV: Tensor,
    layout: KVLayout,
    shape: AttentionShape,
    mask: Tensor | None = None,
    p: float = 0.0,
) -> bool:
    """Causal, sizes and dtypes that tiles take; levels one in another."""
    first, extents = terms[0], [term.extent for term in terms[1:]]
    tensors = [v_BGSV, *(x for term in terms for x in (term.q_BGJTR, term.k_BGSR))]
    ranks = [term.q_BGJTR.shape[-1] for term in terms]
    return (
        HAS_CONSTEXPR_TUPLES
        and mask is None
        and p == 0.0
        and shape.causal
        and shape.scaling > 0
        and v_BGSV.dtype in DTYPES
        and all(x.dtype == v_BGSV.dtype for x in tensors)
        and all(term.k_BGSR.shape[1] == v_BGSV.shape[1] for term in terms)  # not keys that all groups share
        and all(term.scale_BGJS is None for term in terms)
        and first.extent is None
        and first.bias_GJ is None
        and first.k_BGSR.shape[2] == layout.slots
        and min(ranks) > 0
        and v_BGSV.shape[1] * first.q_BGJTR.shape[2] <= LANES
        and sum(ranks) <= MAX_DIMS
        and v_BGSV.shape[-1] <= MAX_DIMS
        and all(term.form == terms[-1].form for term in terms[1:])
        and is_nested(extents, terms[-1].form)
    )


def is_nested(extents: list[int | None], form: str) -> bool:
    """Whether each level's reach lies in that of the one before it."""
    if any(extent is None for extent in extents):
        return False
    sizes = [int(extent or 1) for extent in extents]
    pairs = list(itertools.pairwise(sizes))
    return all(b <= a and (form != "nested" or a % b == 0) for a, b in pairs)


def tuning_query(terms: list[ScoreTerm], v_BGSV: Tensor, layout: KVLayout, *_: Any, **__: Any) -> TuningQuery:
    """What kernels/tuning.json is asked for."""
    first, levels = terms[0].q_BGJTR, len(terms)
    lanes = len(v_BGSV) * first.shape[1] * first.shape[2]
    if is_decode_step(terms, v_BGSV, layout):
        return TuningQuery(step_pass(v_BGSV), named_sizes(lanes=lanes, context=layout.slots, levels=levels), v_BGSV)
    parts = (x for term in terms for x in (term.q_BGJTR, term.k_BGSR))
    return TuningQuery(
        training_pass(v_BGSV, *parts), named_sizes(lanes=lanes, tokens=layout.queries, levels=levels), v_BGSV
    )


def tuning_key(terms: list[ScoreTerm], v_BGSV: Tensor, layout: KVLayout, *_: Any, **__: Any) -> Hashable:
    """A context that grows asks anew at its doublings."""
    q, grad = terms[0].q_BGJTR, torch.is_grad_enabled() and any(t.q_BGJTR.requires_grad for t in terms)
    size = (q.shape, layout.slots.bit_length(), len(terms), v_BGSV.shape[-1], v_BGSV.dtype, v_BGSV.get_device())
    return *size, grad or v_BGSV.requires_grad, is_capturing(v_BGSV), torch.is_autocast_enabled()


@register_kernel(attend, accepts=accepts, is_faster=is_fastest("mlr", CallReader(tuning_query, tuning_key)))
def mlr_attend(
    terms: list[ScoreTerm],
    v_BGSV: Tensor,
    layout: KVLayout,
    shape: AttentionShape,
    mask: Tensor | None = None,
    p: float = 0.0,
) -> Tensor:
    """out_BHTV."""
    levels = len(terms)
    ranks = tuple(term.q_BGJTR.shape[-1] for term in terms)
    extents = tuple(int(term.extent or 1) for term in terms[1:])
    nested = levels > 1 and terms[1].form == "nested"
    plan = MLRPlan(ranks, extents, nested, shape.window, shape.softcap, shape.scaling, layout.holes)
    if is_decode_step(terms, v_BGSV, layout):
        q_BGJTR, keys = join_levels(tuple(term.q_BGJTR for term in terms)), [term.k_BGSR for term in terms]
        return launch_decode(q_BGJTR, keys, v_BGSV, stack_biases(terms), layout.end_B, plan)
    parts, biases = [term.q_BGJTR.flatten(1, 2) for term in terms], cumulative_biases(terms)
    plan, gone = plan.merge_levels(layout.slots)
    biases = None if biases is None else biases[:, gone:].contiguous()
    return MLRAttentionFunction.apply(plan, layout.end_B, biases, v_BGSV, *parts, *(term.k_BGSR for term in terms))


def is_decode_step(terms: list[ScoreTerm], v_BGSV: Tensor, layout: KVLayout) -> bool:
    """Whether these are a few queries against a cache, and nobody asks for gradients."""
    tensors = [v_BGSV, *(x for term in terms for x in term if isinstance(x, Tensor))]
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    few = layout.queries * terms[0].q_BGJTR.shape[2] <= MAX_DECODE_ROWS and layout.queries < layout.slots
    return few and not learns and len(terms) <= MAX_LEVELS


def stack_biases(terms: list[ScoreTerm]) -> Tensor | None:
    """biases_HZ of levels 2 .. L, where one lies: a view where each is a column of it; None where none has any."""
    given = [term.bias_GJ for term in terms[1:]]
    if not given or all(bias is None for bias in given):
        return None
    first = next(bias for bias in given if bias is not None)
    groups, each = first.shape
    columns = all(
        bias is not None
        and bias.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and bias.stride() == (each * len(given), len(given))
        and bias.storage_offset() == first.storage_offset() + level
        for level, bias in enumerate(given)
    )
    if columns:
        return first.as_strided((groups * each, len(given)), (len(given), 1))
    nothing = torch.zeros_like(first)
    return torch.stack([nothing if bias is None else bias for bias in given], -1).flatten(0, 1).contiguous()


def cumulative_biases(terms: list[ScoreTerm]) -> Tensor | None:
    """biases_HZ: what levels below z add to near scores, z = 0 .. L; None where none does."""
    given = next((term.bias_GJ for term in terms if term.bias_GJ is not None), None)
    if given is None:
        return None
    nothing = torch.zeros_like(given)
    each = [nothing, *(nothing if term.bias_GJ is None else term.bias_GJ for term in terms)]
    return torch.stack(each, -1).flatten(0, 1).float().cumsum(-1)
