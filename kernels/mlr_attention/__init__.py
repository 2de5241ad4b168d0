"""MLR attention and sliding-window softmax: kernels that replace `attend` of surgery/mixers/common/softmax.py.

Prefill and training read one tensor of keys with the levels side by side; levels that do not lie so in memory are
copied together first. A few queries against a cache go to kernels/mlr_attention/decode.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.core.dispatch import register_kernel
from surgery.kernels.custom_op import CustomOp
from surgery.kernels.mlr_attention.backward import mlr_keys, mlr_queries
from surgery.kernels.mlr_attention.decode import MAX_LEVELS, launch_decode
from surgery.kernels.mlr_attention.forward import mlr_forward
from surgery.kernels.mlr_attention.plan import (
    AttentionInputs,
    AttentionTiles,
    MLRPlan,
    ZoneWidths,
    backward_tiles,
    forward_tiles,
)
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

HAS_NAMED_TUPLES = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 4)  # as arguments in kernels
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DECODE_ROWS = 64  # queries of a step times heads that share keys
MAX_DIMS = 256  # of keys and of values
FIXED_MAX_SLOTS = 2048  # least slots at which zones keep the maximum found before them (see forward.py)
LANES = 65535  # rows times heads of a launch: the limit of the second axis of a CUDA grid


def launch_forward(
    inputs: AttentionInputs,
    tiles: AttentionTiles | None = None,
    walks: tuple[ZoneWidths, ZoneWidths] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out_BHTV, lse_BHT), the base-2 log-sum-exp. tiles, walks: the plan's own if None."""
    q, v, plan = inputs.q, inputs.v, inputs.plan
    B, H, T, R = q.shape
    S, V = v.shape[2:]
    if B > 1 and B * H > LANES:
        parts = [launch_forward(inputs.part(rows), tiles, walks) for rows in row_slices(B, H)]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    tiles = tiles or forward_tiles(q.dtype, max(R, V), plan)
    new = torch.zeros if plan.holes else torch.empty  # no program writes the rows of padding
    out = new(B, H, T, V, dtype=v.dtype, device=q.device)
    lse = new(B, H, T, dtype=torch.float32, device=q.device)
    far, near = walks or plan.walks()
    grid = triton.cdiv(T, tiles.M) + plan.holes, B * H
    fixed = S >= FIXED_MAX_SLOTS and q.dtype != torch.float16  # float16 has too few exponents
    again = torch.empty(grid[::-1], dtype=torch.int32, device=q.device) if fixed else None
    for redo in (False, True)[: 1 + fixed]:
        mlr_forward[grid](
            q, inputs.k, v, out, again, lse, inputs.ends, inputs.biases, *inputs.scalars(), *inputs.strides(),
            A1=far.A, B1=far.B, L1=far.last_zone, A2=near.A, B2=near.B,
            MIN_RUN=tiles.run, HOLD=tiles.hold and len(plan.ranks) > 1,
            FIXED=fixed and not redo, REDO=redo, **inputs.options(tiles),
        )  # fmt: skip
    return out, lse


def launch_backward(
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    tiles: tuple[AttentionTiles, AttentionTiles] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and biases.

    Those of keys and values are computed per query head, then summed over the heads of a group. tiles: of queries and
    of keys; the plan's own if None.
    """
    q, v, biases, plan = inputs.q, inputs.v, inputs.biases, inputs.plan
    B, H, T, R = q.shape
    G, S, V = v.shape[1:]
    if B > 1 and B * H > LANES:
        parts = [
            launch_backward(inputs.part(rows), out[rows], lse[rows], dout[rows], tiles) for rows in row_slices(B, H)
        ]
        *grads, bias_parts = zip(*parts)
        dq, dk, dv = (torch.cat(x) for x in grads)
        return dq, dk, dv, None if biases is None else sum(bias_parts[1:], bias_parts[0])
    tiles_q, tiles_k = tiles or backward_tiles(q.dtype, max(R, V), plan)
    new = torch.zeros if plan.holes else torch.empty
    dq, delta = new(B, H, T, R, dtype=q.dtype, device=q.device), torch.empty_like(lse)
    gathered = q.dtype if H == G else torch.float32
    dk = new(B, H, S, R, dtype=gathered, device=q.device)
    dv = new(B, H, S, V, dtype=gathered, device=q.device)
    programs = triton.cdiv(T, tiles_q.M) + plan.holes
    dbiases = None if biases is None else biases.new_zeros(B, H, programs, biases.shape[1])
    masses = None if biases is None else biases.new_zeros(B, H, biases.shape[1], T)
    width = plan.halves()
    numbers = (*inputs.scalars(), *inputs.strides(dout))
    mlr_queries[programs, B * H](
        q, inputs.k, v, out, dout, lse, delta, dq, inputs.ends, biases, dbiases, masses, *numbers,
        A=width.A, B=width.B, L1=width.last_zone, DBIAS=biases is not None, **inputs.options(tiles_q),
    )  # fmt: skip
    mlr_keys[triton.cdiv(S, tiles_k.N) + plan.holes, B * H](
        q, inputs.k, v, dout, lse, delta, dk, dv, inputs.ends, biases, *numbers,
        A=width.A, B=width.B, L1=width.last_zone, **inputs.options(tiles_k),
    )  # fmt: skip
    if H > G:
        dk, dv = (x.unflatten(1, (G, -1)).sum(2).to(q.dtype) for x in (dk, dv))
    return dq, dk, dv, None if dbiases is None else dbiases.sum((0, 2)) * plan.scaling


def row_slices(rows: int, heads: int) -> list[slice]:
    """Return the rows of each launch, where one launch cannot take all of them."""
    step = max(1, LANES // heads)
    return [slice(first, first + step) for first in range(0, rows, step)]


class MLRAttentionFunction(torch.autograd.Function):
    """Attention by the kernels, with gradients. parts: q_BHTR of every level, then k_BGSR of every level; the plan may
    have merged some levels."""

    @staticmethod
    def forward(ctx: Any, plan: MLRPlan, ends: Tensor, biases: Tensor | None, v: Tensor, *parts: Tensor) -> Tensor:
        """Return out_BHTV."""
        levels = len(parts) // 2
        q, k = align_rows(join_levels(parts[:levels])), align_rows(join_levels(parts[levels:]))
        values, v = v.shape[-1], align_rows(v)
        # A bias of all scores does not change a softmax: its gradient is zero.
        ctx.constant_bias = biases if len(plan.ranks) == 1 and plan.softcap is None else None
        biases = biases if ctx.constant_bias is None else None
        out, lse = launch_forward(AttentionInputs(q, k, v, biases, ends, plan))
        ctx.plan, ctx.values, ctx.parts = plan, values, [keys.shape[2:] for keys in parts[levels:]]
        ctx.save_for_backward(q, k, v, biases, ends, out, lse)
        return out[..., :values]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        """Return the gradients of biases, v and the parts."""
        q, k, v, biases, ends, out, lse = ctx.saved_tensors
        inputs = AttentionInputs(q, k, v, biases, ends, ctx.plan)
        dq, dk, dv, dbiases = launch_backward(inputs, out, lse, align_rows(dout))
        dbiases = dbiases if ctx.constant_bias is None else torch.zeros_like(ctx.constant_bias)
        (slots, ranks), dims = zip(*ctx.parts), sum(ctx.plan.ranks)
        dks = [dkey[:, :, dkey.shape[2] - n :] for dkey, n in zip(dk[..., :dims].split(ranks, -1), slots)]
        return None, None, dbiases, dv[..., : ctx.values], *dq[..., :dims].split(ranks, -1), *dks


def join_levels(parts: tuple[Tensor, ...]) -> Tensor:
    """Return the levels concatenated along their dimensions: a view where they are neighbours in memory, else a copy,
    with zeros in the slots that a level does not hold."""
    first = parts[0]
    offset, neighbours = first.storage_offset(), True
    for level_keys in parts:
        same = level_keys.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        neighbours &= same and level_keys.stride() == first.stride() and level_keys.storage_offset() == offset
        offset += level_keys.shape[-1]
    if neighbours and first.stride(-1) == 1:
        size = (*first.shape[:-1], sum(level_keys.shape[-1] for level_keys in parts))
        return first.as_strided(size, first.stride(), first.storage_offset())
    return pad_levels(parts)


def pad_levels(parts: Sequence[Tensor]) -> Tensor:
    """Return the levels concatenated along their dimensions, with zeros in the slots that a level does not hold."""
    slots = parts[0].shape[2]
    return torch.cat([F.pad(keys, (0, 0, slots - keys.shape[2], 0)) for keys in parts], -1)


def align_rows(x: Tensor) -> Tensor:
    """Return x with rows of whole 16-byte units, which asynchronous copies to shared memory need, and close enough that
    the rows of a tile, 128 at most, span less than 2^31 elements."""
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
    """Return whether the kernels compute this call: causal, no mask and no dropout, sizes and dtypes that fit tiles,
    and levels of which each reaches no farther than the one before it."""
    first, extents = terms[0], [term.extent for term in terms[1:]]
    tensors = [v_BGSV, *(x for term in terms for x in (term.q_BGJTR, term.k_BGSR))]
    ranks = [term.q_BGJTR.shape[-1] for term in terms]
    return (
        HAS_NAMED_TUPLES
        and mask is None
        and p == 0.0
        and shape.causal
        and shape.scaling > 0
        and v_BGSV.dtype in DTYPES
        and all(x.dtype == v_BGSV.dtype for x in tensors)
        and all(term.k_BGSR.shape[1] == v_BGSV.shape[1] for term in terms)  # keys have a group axis of their own
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
    """Return whether the keys near in each level are near in the level before it."""
    if any(extent is None for extent in extents):
        return False
    sizes = [int(extent or 1) for extent in extents]
    pairs = list(itertools.pairwise(sizes))
    return all(b <= a and (form != "nested" or a % b == 0) for a, b in pairs)


def tuning_query(terms: list[ScoreTerm], v_BGSV: Tensor, layout: KVLayout, *_: Any, **__: Any) -> TuningQuery:
    """Return the sizes of the call under which kernels/tuning.json lists its timings."""
    first, levels = terms[0].q_BGJTR, len(terms)
    lanes = len(v_BGSV) * first.shape[1] * first.shape[2]
    if is_decode_step(terms, v_BGSV, layout):
        return TuningQuery(step_pass(v_BGSV), named_sizes(lanes=lanes, context=layout.slots, levels=levels), v_BGSV)
    parts = (x for term in terms for x in (term.q_BGJTR, term.k_BGSR))
    return TuningQuery(
        training_pass(v_BGSV, *parts), named_sizes(lanes=lanes, tokens=layout.queries, levels=levels), v_BGSV
    )


def tuning_key(terms: list[ScoreTerm], v_BGSV: Tensor, layout: KVLayout, *_: Any, **__: Any) -> Hashable:
    """Return the key under which the choice for a call is remembered; a growing context is looked up again at each
    doubling.
    """
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
    """Return out_BHTV; arguments as in `attend`."""
    levels, is_compiling = len(terms), torch.compiler.is_compiling()
    ranks = tuple(term.q_BGJTR.shape[-1] for term in terms)
    extents = tuple(int(term.extent or 1) for term in terms[1:])
    nested = levels > 1 and terms[1].form == "nested"
    plan = MLRPlan(ranks, extents, nested, shape.window, shape.softcap, shape.scaling, layout.holes)
    if is_decode_step(terms, v_BGSV, layout):
        keys = [term.k_BGSR for term in terms]
        if is_compiling:
            q_BGJTR = torch.cat([term.q_BGJTR for term in terms], -1)
            return MLR_DECODE_OP(q_BGJTR, keys, v_BGSV, stack_biases(terms), layout.end_B, *plan_arguments(plan))[0]
        q_BGJTR = join_levels(tuple(term.q_BGJTR for term in terms))
        return launch_decode(q_BGJTR, keys, v_BGSV, stack_biases(terms), layout.end_B, plan)
    parts, biases = [term.q_BGJTR.flatten(1, 2) for term in terms], cumulative_biases(terms)
    plan, merged = plan.merge_levels(layout.slots)
    biases = None if biases is None else biases[:, merged:].contiguous()
    if is_compiling:
        q, k = torch.cat(parts, -1), pad_levels([term.k_BGSR for term in terms])
        return MLR_OP(q, k, v_BGSV, biases, layout.end_B, *plan_arguments(plan))[0]
    return MLRAttentionFunction.apply(plan, layout.end_B, biases, v_BGSV, *parts, *(term.k_BGSR for term in terms))


def is_decode_step(terms: list[ScoreTerm], v_BGSV: Tensor, layout: KVLayout) -> bool:
    """Return whether the call is a decoding step: a few queries, a cache, and no gradients."""
    tensors = [v_BGSV, *(x for term in terms for x in term if isinstance(x, Tensor))]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    few = layout.queries * terms[0].q_BGJTR.shape[2] <= MAX_DECODE_ROWS and layout.queries < layout.slots
    return few and not needs_grad and len(terms) <= MAX_LEVELS


def stack_biases(terms: list[ScoreTerm]) -> Tensor | None:
    """Return biases_HZ of levels 2 ..

    L, or None if no level has a bias: a view if the biases are the columns of one matrix.
    """
    biases = [term.bias_GJ for term in terms[1:]]
    if not biases or all(bias is None for bias in biases):
        return None
    first = next(bias for bias in biases if bias is not None)
    groups, heads = first.shape
    columns = not torch.compiler.is_compiling() and all(  # traced tensors have no storage
        bias is not None
        and bias.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and bias.stride() == (heads * len(biases), len(biases))
        and bias.storage_offset() == first.storage_offset() + level
        for level, bias in enumerate(biases)
    )
    if columns:
        return first.as_strided((groups * heads, len(biases)), (len(biases), 1))
    zero = torch.zeros_like(first)
    return torch.stack([zero if bias is None else bias for bias in biases], -1).flatten(0, 1).contiguous()


def cumulative_biases(terms: list[ScoreTerm]) -> Tensor | None:
    """Return biases_HZ, the sum of the biases of the levels below z, z = 0 .. L; None if no level has a bias."""
    first = next((term.bias_GJ for term in terms if term.bias_GJ is not None), None)
    if first is None:
        return None
    zero = torch.zeros_like(first)
    biases = [zero, *(zero if term.bias_GJ is None else term.bias_GJ for term in terms)]
    return torch.stack(biases, -1).flatten(0, 1).float().cumsum(-1)


# -- torch.compile -----------------------------------------------------------------------------------------------------
PLAN_SCHEMA = "int[] ranks, int[] extents, bool nested, int? window, float? softcap, float scaling, bool holes"


def plan_arguments(plan: MLRPlan) -> tuple[Any, ...]:
    """Return a plan as arguments of an operator; `_plan` is its inverse."""
    return list(plan.ranks), list(plan.extents), *plan[2:]


def _plan(arguments: Sequence[Any]) -> MLRPlan:
    ranks, extents, *rest = arguments
    return MLRPlan(tuple(ranks), tuple(extents), *rest)


def _op_inputs(
    q: Tensor, k: Tensor, v: Tensor, biases: Tensor | None, ends: Tensor, plan: MLRPlan
) -> tuple[AttentionInputs, bool]:
    """Return the inputs of the kernels, and whether the biases are one number for all scores of a row, which changes no
    softmax.
    """
    constant = biases is not None and len(plan.ranks) == 1 and plan.softcap is None
    inputs = AttentionInputs(align_rows(q), align_rows(k), align_rows(v), None if constant else biases, ends, plan)
    return inputs, constant


def _op_forward(
    q: Tensor, k: Tensor, v: Tensor, biases: Tensor | None, ends: Tensor, *plan: Any
) -> tuple[Tensor, Tensor]:
    inputs, _ = _op_inputs(q, k, v, biases, ends, _plan(plan))
    out, lse = launch_forward(inputs)
    return out[..., : v.shape[-1]].contiguous(), lse


def _op_backward(dout: Tensor, _: Tensor, *operands: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v and biases; the forward's result is computed again.

    operands: the operator's inputs.
    """
    q, k, v, biases, ends, *plan = operands
    inputs, constant = _op_inputs(q, k, v, biases, ends, _plan(plan))
    out, lse = launch_forward(inputs)
    dq, dk, dv, dbiases = launch_backward(inputs, out, lse, align_rows(dout))
    if constant and biases is not None:
        dbiases = torch.zeros_like(biases)
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]], dbiases


def _op_fake(q: Tensor, k: Tensor, v: Tensor, biases: Tensor | None, ends: Tensor, *plan: Any) -> tuple[Tensor, Tensor]:
    B, H, T, _ = q.shape
    return v.new_empty(B, H, T, v.shape[-1]), v.new_empty(B, H, T, dtype=torch.float32)


def _decode_op(
    q: Tensor, keys: list[Tensor], v: Tensor, biases: Tensor | None, ends: Tensor, *plan: Any
) -> tuple[Tensor, Tensor]:
    return launch_decode(q, keys, v, biases, ends, _plan(plan)), v.new_empty(0)


def _decode_fake(
    q: Tensor, keys: list[Tensor], v: Tensor, biases: Tensor | None, ends: Tensor, *plan: Any
) -> tuple[Tensor, Tensor]:
    B, G, J, T, _ = q.shape
    return v.new_empty(B, G * J, T, v.shape[-1]), v.new_empty(0)


def _no_gradient(*_: Any) -> Any:
    raise RuntimeError("decoding steps have no gradients: kernels of calls with gradients are those of prefill")


MLR_OP = CustomOp(
    "mlr",
    f"Tensor q, Tensor k, Tensor v, Tensor? biases, Tensor ends, {PLAN_SCHEMA}",
    _op_forward,
    _op_backward,
    _op_fake,
)
MLR_DECODE_OP = CustomOp(
    "mlr_decode", f"Tensor q, Tensor[] keys, Tensor v, Tensor? biases, Tensor ends, {PLAN_SCHEMA}",
    _decode_op, _no_gradient, _decode_fake,
)  # fmt: skip
