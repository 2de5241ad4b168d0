"""Sum of the two branches of a linear mixer and its output gate in one pass: replaces `join_and_gate`.

    out = (near * near_H + far * far_H) * 2 sigmoid(gate)

The backward recomputes the sum. Gradients of the weights are sums per program, added in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.core.dispatch import register_kernel
from surgery.kernels.custom_op import CustomOp
from surgery.kernels.kernel_tensors import needs_gradients, unit_last_stride
from surgery.kernels.launch import open_launch
from surgery.kernels.local_attention.plan import pow2
from surgery.mixers.common.window_hybrid import join_and_gate

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_VALUES = 1024
ELEMENTS = 2048  # of a tile


@triton.jit
def _load_branches(
    near, far, near_H, far_H, gate, b, h, at, T, L, near_b, near_h, near_t, far_b, far_h, far_t, gate_b, gate_t, gate_h,
    V: tl.constexpr, GATES: tl.constexpr, M: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Return (near, far (M, V), weights, the gate's sigmoid (M, V), t_M, v_V, mask) in float32."""
    t_M = at + tl.arange(0, M)
    v_V = tl.arange(0, BV)
    ok = (t_M < T)[:, None] & (v_V < V)[None, :]
    t_64 = t_M.to(tl.int64)
    near_MV = tl.load(near + b * near_b + h * near_h + t_64[:, None] * near_t + v_V[None, :], mask=ok, other=0.0)
    late = t_64 - (T - L)
    is_far = ok & (late >= 0)[:, None]
    far_MV = tl.load(far + b * far_b + h * far_h + late[:, None] * far_t + v_V[None, :], mask=is_far, other=0.0)
    gate_M = gate + b * gate_b + t_64 * gate_t + h * gate_h
    if GATES == 0:
        sigmoid_MV = tl.full([M, BV], 0.5, tl.float32)
    elif GATES == 1:
        sigmoid_MV = tl.sigmoid(tl.load(gate_M, mask=t_M < T, other=0.0).to(tl.float32))[:, None] + tl.zeros(
            [M, BV], tl.float32
        )
    else:
        sigmoid_MV = tl.sigmoid(tl.load(gate_M[:, None] + v_V[None, :], mask=ok, other=0.0).to(tl.float32))
    near_weight, far_weight = tl.load(near_H + h).to(tl.float32), tl.load(far_H + h).to(tl.float32)
    return near_MV.to(tl.float32), far_MV.to(tl.float32), near_weight, far_weight, sigmoid_MV, t_64, v_V, ok, is_far


@triton.jit(do_not_specialize=["T", "L"])
def join_forward(
    near, far, near_H, far_H, gate, out, T, L, H, near_b, near_h, near_t, far_b, far_h, far_t, gate_b, gate_t, gate_h,
    V: tl.constexpr, GATES: tl.constexpr, M: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Compute out_BTHV. GATES: 0 none, 1 per head, 2 per value. Grid: B * H times tiles of M tokens, on one axis, as the
    second has 65,535 programs at most."""
    tiles = tl.cdiv(T, M)
    lane, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    b, h = lane // H, lane % H
    near_MV, far_MV, near_weight, far_weight, sigmoid_MV, t_M, v_V, ok, _is_far = _load_branches(
        near, far, near_H, far_H, gate, b, h, tile * M, T, L, near_b, near_h, near_t, far_b, far_h, far_t,
        gate_b, gate_t, gate_h, V, GATES, M, BV,
    )  # fmt: skip
    y_MV = (near_MV * near_weight + far_MV * far_weight) * (2 * sigmoid_MV)
    tl.store(out + ((b * T + t_M) * H + h)[:, None] * V + v_V[None, :], y_MV.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["T", "L"])
def join_backward(
    near, far, near_H, far_H, gate, d_out, d_near, d_far, d_gate, sums, T, L, H,
    near_b, near_h, near_t, far_b, far_h, far_t, gate_b, gate_t, gate_h, d_b, d_t, d_h,
    V: tl.constexpr, GATES: tl.constexpr, M: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Compute d_near_BHTV, d_far_BHLV, d_gate_BTHV, and sums (2, B * H, tiles) of the weights' gradients."""
    tiles = tl.cdiv(T, M)
    lane, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    b, h = lane // H, lane % H
    near_MV, far_MV, near_weight, far_weight, sigmoid_MV, t_M, v_V, ok, is_far = _load_branches(
        near, far, near_H, far_H, gate, b, h, tile * M, T, L, near_b, near_h, near_t, far_b, far_h, far_t,
        gate_b, gate_t, gate_h, V, GATES, M, BV,
    )  # fmt: skip
    at = d_out + b * d_b + t_M[:, None] * d_t + h * d_h + v_V[None, :]
    grad_MV = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    dy_MV = grad_MV * (2 * sigmoid_MV)
    element = d_near.dtype.element_ty
    tl.store(d_near + (lane * T + t_M)[:, None] * V + v_V[None, :], (dy_MV * near_weight).to(element), mask=ok)
    at = d_far + (lane * L + t_M - (T - L))[:, None] * V + v_V[None, :]
    tl.store(at, (dy_MV * far_weight).to(d_far.dtype.element_ty), mask=is_far)
    if GATES > 0:
        y_MV = near_MV * near_weight + far_MV * far_weight
        dz_MV = dy_MV * y_MV * (1 - sigmoid_MV)
        row_M = (b * T + t_M) * H + h
        if GATES == 1:
            tl.store(d_gate + row_M, tl.sum(dz_MV, 1).to(d_gate.dtype.element_ty), mask=t_M < T)
        else:
            tl.store(d_gate + row_M[:, None] * V + v_V[None, :], dz_MV.to(d_gate.dtype.element_ty), mask=ok)
    tl.store(sums + lane * tiles + tile, tl.sum(tl.sum(dy_MV * near_MV, 1), 0))
    tl.store(sums + (tl.num_programs(0) // tiles + lane) * tiles + tile, tl.sum(tl.sum(dy_MV * far_MV, 1), 0))


class JoinInputs(NamedTuple):
    """Tensors of a call, with unit strides along the last axes."""

    near: Tensor
    far: Tensor
    near_H: Tensor
    far_H: Tensor
    gate: Tensor | None

    @classmethod
    def from_tensors(cls, near: Tensor, far: Tensor, near_H: Tensor, far_H: Tensor, gate: Tensor | None) -> JoinInputs:
        """Take the tensors; those with another stride along the last axis are copied."""
        gate = None if gate is None else unit_last_stride(gate)
        return cls(unit_last_stride(near), unit_last_stride(far), near_H.contiguous(), far_H.contiguous(), gate)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors as kernel arguments; without a gate any pointer takes its place."""
        return self.near, self.far, self.near_H, self.far_H, self.near if self.gate is None else self.gate

    def sizes(self) -> tuple[int, ...]:
        """Return T, L, H and the strides."""
        gate = (0, 0, 0) if self.gate is None else self.gate.stride()[:3]
        return *self.near.shape[2:0:-1], *self.near.stride()[:3], *self.far.stride()[:3], *gate

    def call_sizes(self) -> tuple[int, ...]:
        """Return T, L, H and the strides in the kernels' order."""
        T, H, *strides = self.sizes()
        return T, self.far.shape[2], H, *strides

    def options(self) -> dict[str, Any]:
        """Return the compile-time constants."""
        V = self.near.shape[-1]
        gates = 0 if self.gate is None else (1 if self.gate.shape[-1] == 1 else 2)
        return {"V": V, "GATES": gates, "M": max(1, ELEMENTS // pow2(V)), "BV": pow2(V), "num_warps": 4}

    @property
    def tiles(self) -> int:
        """Tiles of tokens of a row."""
        return int(triton.cdiv(self.near.shape[2], self.options()["M"]))

    def grid(self) -> tuple[int]:
        """Return (B * H times tiles of tokens,)."""
        B, H = self.near.shape[:2]
        return (B * H * self.tiles,)


def launch_forward(inputs: JoinInputs, dtype: torch.dtype) -> Tensor:
    """Return out_BTHV."""
    B, H, T, V = inputs.near.shape
    out = torch.empty(B, T, H, V, device=inputs.near.device, dtype=dtype)
    open_launch(join_forward, inputs.options())(inputs.grid(), *inputs.tensors(), out, *inputs.call_sizes())
    return out


def launch_backward(inputs: JoinInputs, d_out: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of near, far, their weights and the gate."""
    near, far, gate = inputs.near, inputs.far, inputs.gate
    (B, H), grid, d_out = near.shape[:2], inputs.grid(), unit_last_stride(d_out)
    d_near, d_far = (torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (near, far))
    d_gate = near.new_empty(0) if gate is None else torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)
    sums = torch.empty(2, B, H, inputs.tiles, device=near.device, dtype=torch.float32)
    join_backward[grid](
        *inputs.tensors(), d_out, d_near, d_far, d_gate, sums, *inputs.call_sizes(), *d_out.stride()[:3],
        **inputs.options(),
    )  # fmt: skip
    weights = (part.sum((0, 2)).to(weight.dtype) for part, weight in zip(sums, (inputs.near_H, inputs.far_H)))
    return d_near, d_far, *weights, None if gate is None else d_gate


class JoinFunction(torch.autograd.Function):
    """out_BTHV with gradients, see `join_and_gate`."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Any) -> Tensor:
        """Return out_BTHV."""
        inputs = JoinInputs.from_tensors(*tensors)
        ctx.save_for_backward(*inputs)
        return launch_forward(inputs, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of the tensors."""
        return None, *launch_backward(JoinInputs(*ctx.saved_tensors), grads[0])


# -- as a node of a compiled graph ---------------------------------------------------------------------
def _node_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    *tensors, dtype = inputs
    out = launch_forward(JoinInputs.from_tensors(*tensors), dtype)
    return out, out.new_empty(0)


def _node_backward(d_out: Tensor, _: Tensor, *inputs: Any) -> tuple[Tensor | None, ...]:
    return *launch_backward(JoinInputs.from_tensors(*inputs[:-1]), d_out), None


def _node_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    B, H, T, V = inputs[0].shape
    out = inputs[0].new_empty(B, T, H, V, dtype=inputs[-1])
    return out, out.new_empty(0)


JOIN_OP = CustomOp(
    "join_and_gate",
    "Tensor near, Tensor far, Tensor near_H, Tensor far_H, Tensor? gate, ScalarType dtype",
    _node_forward,
    _node_backward,
    _node_fake,
)


# -- registration ------------------------------------------------------------------------------------
def accepts(
    near_BHTV: Tensor, far_BHLV: Tensor, near_H: Tensor, far_H: Tensor, gate_BTHV: Tensor | None, dtype: torch.dtype
) -> bool:
    """Return whether the kernels compute this call."""
    tensors = [near_BHTV, far_BHLV, near_H, far_H, *([] if gate_BTHV is None else [gate_BTHV])]
    T, V = near_BHTV.shape[2:]
    return (
        all(x.dtype in DTYPES for x in tensors)
        and dtype in DTYPES
        and V <= MAX_VALUES
        and far_BHLV.numel() > 0
        and T < 2**30
    )


def is_faster(near_BHTV: Tensor, *_: Any) -> bool:
    """Return whether there are enough tokens: decoding steps have kernels of their own."""
    return near_BHTV.shape[2] > 1


@register_kernel(join_and_gate, accepts=accepts, is_faster=is_faster)
def join_and_gate_triton(
    near_BHTV: Tensor, far_BHLV: Tensor, near_H: Tensor, far_H: Tensor, gate_BTHV: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return out_BTHV in `dtype`; arguments as in `join_and_gate`."""
    tensors = near_BHTV, far_BHLV, near_H, far_H, gate_BTHV
    if torch.compiler.is_compiling():
        return JOIN_OP(*tensors, dtype)[0]
    if not needs_gradients(*tensors):
        return launch_forward(JoinInputs.from_tensors(*tensors), dtype)
    out: Tensor = JoinFunction.apply(dtype, *tensors)
    return out
