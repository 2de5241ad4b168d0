"""Queries or keys of both branches of a linear mixer in one pass: replaces `linear_features`.

    u = x | [x, RoPE(x)]      y = sqrt(scaling) W u      features = [softmax(y), softmax(-y)], or sqrt(scaling) u

with unit L2 norm for the delta rule, in the dtype and layout that the kernels of the masks read, and RoPE(x) for the
softmax branch. The backward keeps x, cos, sin and W, and computes the rest again. Products with W in bfloat16 split it
into two matrices, as `split_linear` (surgery/mixers/projections.py); gradients of W are float32 sums over spans of tokens,
added in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.core.dispatch import register_kernel
from surgery.kernels.custom_op import CustomOp
from surgery.kernels.kernel_tensors import needs_gradients, unit_last_stride
from surgery.kernels.launch import open_launch
from surgery.kernels.linear_features.kernels import (
    features_backward,
    features_forward,
    mapped_features_forward,
    weight_gradient,
)
from surgery.kernels.local_attention.plan import pow2
from surgery.mixers.common.linear_features import FeaturePlan, Rotation, linear_features
from surgery.mixers.features.base import FeatureMap
from surgery.mixers.features.hedgehog import HedgehogMap
from surgery.mixers.features.simple import IdentityMap
from surgery.mixers.projections import is_hooked

DTYPES = (torch.bfloat16, torch.float32)
MAX_COLUMNS = {torch.bfloat16: 512, torch.float32: 256}  # of u
# Elements of a tile of y, M x U. Compiled for Hopper, these tiles spill next to no registers.
FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 16384, 8192
MAX_ROWS = 64  # tokens of a tile
MAPPED_ELEMENTS = 32768  # of W, twice 16 bits, in shared memory
# Tokens of a tile, warps, most tiles of a program. 8,192 queries of 32 heads of 64 and their keys took, on an H200, 195 us so,
# 205 with 64 tokens, 280 with 64 tokens and 8 warps, 355 with 128 tokens; 500 where each tile loads W again.
MAPPED_TOKENS, MAPPED_WARPS, MAPPED_TILES = 32, 4, 4
MAPPED_PROGRAMS = 264  # wanted before a program takes several tiles: two on each multiprocessor of an H100
SPAN = 1024  # tokens whose gradient of W one program sums


@dataclass(frozen=True)
class FeatureCall:
    """Tensors and sizes of a call. x (B, T, H, K) has a unit last stride; cos and sin (B, T, R) or None; w (H, U, U) or
    None. turned: whether x after RoPE is an output. both: whether u has both forms. known: x after RoPE with the strides of
    x, if u has it without a rotation."""

    x: Tensor
    cos: Tensor | None
    sin: Tensor | None
    w: Tensor | None
    root: float
    first: int
    last: int
    both: bool
    turned: bool
    norm: bool
    dtype: torch.dtype
    known: Tensor | None = None

    @classmethod
    def make(
        cls, x: Tensor, cos: Tensor | None, sin: Tensor | None, w: Tensor | None, *, root: float, first: int, last: int,
        both: bool, turned: bool, norm: bool, dtype: torch.dtype, known: Tensor | None = None,
    ) -> FeatureCall:  # fmt: skip
        """Return the call with the strides that the kernels need."""
        if cos is not None and sin is not None:
            cos, sin = (unit_last_stride(t) for t in (cos, sin))
            sin = sin if sin.stride() == cos.stride() else sin.contiguous()
            cos = cos if sin.stride() == cos.stride() else cos.contiguous()
        w = None if w is None else w.contiguous()
        x = unit_last_stride(x)
        if known is not None and (known.stride() != x.stride() or known.dtype != x.dtype):
            x, known = x.contiguous(), known.to(x.dtype).contiguous()
        return cls(x, cos, sin, w, root, first, last, both, turned, norm, dtype, known)

    @property
    def columns(self) -> int:
        """Columns of u."""
        return self.x.shape[-1] * (2 if self.both else 1)

    @property
    def features(self) -> int:
        """Features of a token."""
        return self.columns * (1 if self.w is None else 2)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return x, cos, sin and W as kernel arguments; x stands for those that the call does not read, and x after RoPE
        in place of cos if it is known."""
        if self.known is not None:
            return self.x, self.known, self.x, self.x if self.w is None else self.w
        return self.x, *(self.x if t is None else t for t in (self.cos, self.sin, self.w))

    def sizes(self) -> tuple[int, ...]:
        """Return H and the strides of x and cos."""
        cos = (0, 0) if self.cos is None else self.cos.stride()[:2]
        return self.x.shape[2], *self.x.stride()[:3], *cos

    def shape_options(self) -> dict[str, Any]:
        """Return the compile-time constants of all kernels."""
        rotated = 0 if self.cos is None else self.cos.shape[-1]
        precision = None if self.x.dtype == torch.bfloat16 else "tf32x3"
        shape = {"K": self.x.shape[-1], "U": self.columns, "R": rotated, "BOTH": self.both if self.known is None else 2}
        return {**shape, "PRECISION": precision}

    @property
    def is_mapped(self) -> bool:
        """Whether W, as two matrices of 16 bits, fits into a program's shared memory beside a tile."""
        size = 2 * pow2(self.columns) * pow2(self.x.shape[-1]) * (2 if self.both else 1)
        return self.w is not None and self.x.dtype == torch.bfloat16 and size <= MAPPED_ELEMENTS

    def mapped_options(self) -> tuple[int, int, dict[str, Any]]:
        """Return (tokens of a tile, tiles of a program, constants and options) of `mapped_features_forward`."""
        B, T, H, K = self.x.shape
        M = MAPPED_TOKENS
        tiles = max(1, min(MAPPED_TILES, -(-T // M) * B * H // MAPPED_PROGRAMS))
        shape = self.shape_options()
        del shape["PRECISION"]
        options = {"TURNED": self.turned, "NORM": self.norm, "M": M, "BF": pow2(self.columns), "BK": pow2(K)}
        return M, tiles, {**shape, **options, "num_warps": MAPPED_WARPS, "num_stages": 1}

    def tile_options(self, elements: int) -> dict[str, Any]:
        """Return the compile-time constants of kernels with tiles of whole rows of y."""
        wide, halves = pow2(self.columns), self.x.dtype == torch.bfloat16
        return {
            **self.shape_options(),
            "TURNED": self.turned,
            "MAP": self.w is not None,
            "NORM": self.norm,
            "M": min(MAX_ROWS, elements // wide) if halves or wide <= 128 else 16,
            "BF": wide,
            "N": min(32, pow2(self.x.shape[-1])),
            "SPLIT": halves,
            "num_warps": 4 if wide < 128 else 8,
            "num_stages": 1,
        }


def launch_forward(call: FeatureCall) -> tuple[Tensor, Tensor]:
    """Return (features (B, H, L, F), x after RoPE (B, T, H, K), an empty tensor if that is no output)."""
    B, T, H, K = call.x.shape
    out = torch.empty(B, H, call.last - call.first, call.features, device=call.x.device, dtype=call.dtype)
    turned = torch.empty((B, T, H, K) if call.turned else 0, device=call.x.device, dtype=call.x.dtype)
    if call.is_mapped:
        M, spans, options = call.mapped_options()
        open_launch(mapped_features_forward, options)(
            (-(-T // (M * spans)) * B * H,),
            *call.tensors(), out, turned, call.root, T, call.first, call.last, *call.sizes(), spans,
        )  # fmt: skip
        return out, turned
    options = call.tile_options(FORWARD_ELEMENTS)
    open_launch(features_forward, options)(
        (-(-T // options["M"]) * B * H,),
        *call.tensors(), out, turned, call.root, T, call.first, call.last, *call.sizes(),
    )  # fmt: skip
    return out, turned


def launch_backward(call: FeatureCall, d_out: Tensor, d_turned: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of W."""
    (B, T, H, K), U, length = call.x.shape, call.columns, call.last - call.first
    device = call.x.device
    d_out, d_turned = unit_last_stride(d_out), unit_last_stride(d_turned)
    dx = torch.empty(B, T, H, K, device=device, dtype=call.x.dtype)
    dy = torch.empty((B, H, length, U) if call.w is not None else 0, device=device, dtype=call.x.dtype)
    options = call.tile_options(BACKWARD_ELEMENTS)
    strides = d_turned.stride()[:3] if call.turned else (0, 0, 0)
    features_backward[(triton.cdiv(T, options["M"]) * B * H,)](
        *call.tensors(), d_out, d_turned, dx, dy, call.root, T, call.first, call.last, *call.sizes(),
        *d_out.stride()[:3], *strides, **options,
    )  # fmt: skip
    if call.w is None:
        return dx, None
    span = SPAN if U <= 128 else 2 * SPAN
    size, spans = min(64, pow2(U)), triton.cdiv(B * length, span)
    sums = torch.empty(spans, H, U, U, device=device, dtype=torch.float32)
    weight_gradient[(spans, H, triton.cdiv(U, size) ** 2)](
        *call.tensors()[:3], dy, sums, call.root, B * length, length, call.first, *call.sizes(),
        **call.shape_options(), M=64, D=size, SPAN=span, num_warps=4,
        num_stages=2 if call.x.dtype == torch.bfloat16 else 1,
    )  # fmt: skip
    return dx, sums.sum(0).to(call.w.dtype)


class FeaturesFunction(torch.autograd.Function):
    """`launch_forward` with gradients of x and W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor | None, cos: Any, sin: Any, options: dict[str, Any]) -> Any:
        """Return (features, x after RoPE)."""
        call = FeatureCall.make(x, cos, sin, w, **options)
        ctx.options = options
        ctx.save_for_backward(call.x, call.cos, call.sin, call.w)
        return launch_forward(call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of x and W."""
        return *launch_backward(FeatureCall(*ctx.saved_tensors, **ctx.options), *grads), None, None, None


# -- as a node of a compiled graph ---------------------------------------------------------------------
OPTIONS = ("root", "first", "last", "both", "turned", "norm", "dtype")


def _node_call(inputs: tuple[Any, ...]) -> FeatureCall:
    return FeatureCall.make(*inputs[:4], **dict(zip(OPTIONS, inputs[4:])))


def _node_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    return launch_forward(_node_call(inputs))


def _node_backward(d_out: Tensor, d_turned: Tensor, *inputs: Any) -> tuple[Tensor | None, ...]:
    dx, dw = launch_backward(_node_call(inputs), d_out, d_turned)
    return dx, None, None, dw, *[None] * (len(inputs) - 4)


def _node_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    x, _cos, _sin, w, _root, first, last, both, turned, _norm, dtype = inputs
    B, T, H, K = x.shape
    features = K * (2 if both else 1) * (1 if w is None else 2)
    return x.new_empty(B, H, last - first, features, dtype=dtype), x.new_empty((B, T, H, K) if turned else 0)


FEATURES_OP = CustomOp(
    "linear_features",
    "Tensor x, Tensor? cos, Tensor? sin, Tensor? w, float root, SymInt first, SymInt last, bool both, bool turned, "
    "bool norm, ScalarType dtype",
    _node_forward,
    _node_backward,
    _node_fake,
)


# -- registration ------------------------------------------------------------------------------------
def accepts(
    x_BTHK: Tensor,
    rotation: Rotation | None,
    feature_map: FeatureMap,
    position_BT: Tensor,
    plan: FeaturePlan,
    known_BTHK: Tensor | None = None,
) -> bool:
    """Return whether the kernels compute this call: Hedgehog or identity features of as many heads as x has."""
    columns = x_BTHK.shape[-1] * (2 if plan.form == "both" else 1)
    return (
        type(feature_map) in (HedgehogMap, IdentityMap)
        and not is_hooked(feature_map)
        and x_BTHK.dtype in DTYPES
        and plan.dtype in DTYPES
        and plan.copies == 1
        and (rotation is None or not any(t.requires_grad for t in rotation))
        and columns <= MAX_COLUMNS[x_BTHK.dtype]
        and plan.last > plan.first
    )


@register_kernel(linear_features, accepts=accepts)
def linear_features_triton(
    x_BTHK: Tensor,
    rotation: Rotation | None,
    feature_map: FeatureMap,
    position_BT: Tensor,
    plan: FeaturePlan,
    known_BTHK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (features in the plan's dtype, x of the softmax branch); arguments as in `linear_features`."""
    w = None
    if isinstance(feature_map, HedgehogMap):
        w = feature_map.query_HKK if plan.side == "queries" else feature_map.key_GKK
    cos, sin = (None, None) if rotation is None else rotation
    near_BTHK = x_BTHK if known_BTHK is None else known_BTHK
    is_recorded = torch.compiler.is_compiling() or needs_gradients(x_BTHK, w, known_BTHK)
    if is_recorded and known_BTHK is not None:  # the backward pass knows one tensor
        x_BTHK, plan, known_BTHK = torch.cat([x_BTHK, known_BTHK], dim=-1), replace(plan, form="given"), None
    options: dict[str, Any] = {
        "root": plan.root,
        "first": plan.first,
        "last": plan.last,
        "both": plan.form == "both",
        "turned": plan.rotated,
        "norm": plan.unit_norm,
        "dtype": plan.dtype,
    }
    if torch.compiler.is_compiling():
        features, turned = FEATURES_OP(x_BTHK, cos, sin, w, *options.values())
    elif not is_recorded:
        features, turned = launch_forward(FeatureCall.make(x_BTHK, cos, sin, w, **options, known=known_BTHK))
    else:
        features, turned = FeaturesFunction.apply(x_BTHK, w, cos, sin, options)
    return features, turned if plan.rotated else near_BTHK
