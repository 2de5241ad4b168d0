"""Linears whose cores are stored in 8 or 4 bits with scales: integers, or FP8 (surgery/structures/fp8.py).

    core[.., k] = scale[.., k // g] * integer[.., k]        k: the inputs that an output of the core sums over, in groups of g, the last
                                                            of which may be smaller

Rounding is to the nearest integer, without zero points. With 4 bits the scale of a group is the one of SCALES with the
least squared error, and the cores of low rank are rotated along the rank first (`LowRankLinear.cores_to_round`). This is weight-only quantization: it saves memory, and each call multiplies the integers out before
the product of the structure, except for a few tokens on a GPU: there a kernel unpacks the integers of dense, low rank,
pivoted low rank, BTT and Monarch linears inside the product (kernels/quantized).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.core.dispatch import dispatched
from surgery.core.errors import SurgeryError

Format = Literal["int", "fp8"]
BITS, GROUPS = (8, 4), (8, 16, 32, 64, 128, 256)
FEW_TOKENS = 16  # up to which products are computed core by core
# 4 bits: scales that are tried, as multiples of the one that maps the largest value to -8. 8/7 maps it to -7 or 7.
SCALES = (8 / 7, 1.0, 0.95, 0.9, 0.85, 0.8)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DAMAGED = "The checkpoint is damaged. Download or quantize it again"


@dataclass(frozen=True)
class Storage:
    """How cores are stored. bits: 8 or 4. group: inputs that share a scale; None: all inputs of an output. format: int,
    or fp8 for e4m3, which has 8 bits and one scale for each output, and rounds the inputs of each product too.

    last_axis: whether groups are along the last axis of every core, as in files with tensor trains that lack the key
    `scales`.
    """

    bits: int
    group: int | None = None
    last_axis: bool = False
    format: Format = "int"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in BITS:
            raise SurgeryError(f"bits must be 8 or 4 (got {self.bits!r})")
        if self.group is not None and (type(self.group) is not int or self.group not in GROUPS):
            raise SurgeryError(f"group must be one of {', '.join(map(str, GROUPS))}, or none (got {self.group!r})")
        if self.format not in get_args(Format):
            raise SurgeryError(f"format must be {' or '.join(get_args(Format))} (got {self.format!r})")
        if self.format == "fp8" and (self.bits != 8 or self.group is not None):
            raise SurgeryError(
                f"format fp8 has 8 bits and one scale for each output (got {self.bits} bits, group {self.group}). Leave "
                "out bits and group"
            )

    @property
    def label(self) -> str:
        """How cores are stored, for messages: `fp8` or `8 bits`."""
        return self.format if self.format == "fp8" else f"{self.bits} bits"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of stored cores."""
        if self.format == "fp8":
            return torch.float8_e4m3fn
        return torch.int8 if self.bits == 8 else torch.uint8

    def group_size(self, inputs: int) -> int:
        """Return the inputs that share a scale, of `inputs`. The last group has what is left."""
        return inputs if self.group is None else min(inputs, self.group)

    def groups(self, inputs: int) -> int:
        """Return the number of scales of an output with `inputs` inputs."""
        return -(-inputs // self.group_size(inputs))

    def axes(self, linear: Any, name: str) -> tuple[int, ...]:
        """Return the axes of a core of a linear along which the groups are: the inputs of each output."""
        return (-1,) if self.last_axis else contracted_axes(linear, name)


def quantize_rows(rows_XK: Tensor, storage: Storage) -> tuple[Tensor, Tensor]:
    """Return (integers (.., K) int8, or (.., ceil(K / 2)) uint8 with two of 4 bits in a byte, or e4m3 (.., K); scales
    (.., ceil(K / g)) in the dtype of the rows).
    """
    inputs = rows_XK.shape[-1]
    blocks = _in_groups(rows_XK.float(), storage)
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    if storage.format == "fp8":
        from surgery.structures.fp8 import LARGEST, to_e4m3

        scale = _rounded_scale(extreme.abs() / LARGEST, rows_XK.dtype, int(LARGEST))[..., 0]
        return to_e4m3(rows_XK, scale).contiguous(), scale.to(rows_XK.dtype)
    if storage.bits == 8:
        scale = _rounded_scale(extreme.abs() / 127, rows_XK.dtype, 127)
        whole = _to_integers(blocks, scale, 127).flatten(-2)[..., :inputs].to(torch.int8)
        return whole.contiguous(), scale[..., 0].to(rows_XK.dtype)
    scales = torch.stack([_rounded_scale(extreme * (-factor / 8), rows_XK.dtype, 8) for factor in SCALES])
    errors = torch.stack([(blocks - s * _to_integers(blocks, s, 8)).square().sum(-1, keepdim=True) for s in scales])
    scale = scales.gather(0, errors.argmin(0, keepdim=True))[0]
    integers = (_to_integers(blocks, scale, 8).flatten(-2)[..., :inputs] + 8).to(torch.uint8)
    low, high = F.pad(integers, (0, inputs % 2)).unflatten(-1, (-1, 2)).unbind(-1)
    packed: Tensor = low | high << 4
    return packed, scale[..., 0].to(rows_XK.dtype)


def dequantize_rows(integers: Tensor, scale: Tensor, inputs: int, storage: Storage) -> Tensor:
    """Return the rows (.., inputs) in the dtype of the scales."""
    if storage.bits == 4:
        integers = torch.stack([integers & 15, integers >> 4], -1).flatten(-2)[..., :inputs].to(torch.int8) - 8
    rows = (_in_groups(integers.to(scale.dtype), storage) * scale[..., None]).flatten(-2)
    return rows if rows.shape[-1] == inputs else rows[..., :inputs]


@dispatched
def quantized_product(x_NGK: Tensor, integers_GRX: Tensor, scale_GRS: Tensor, storage: Storage) -> Tensor:
    """Return out_NGR of G matrices (R, K) and vectors x: out[n, g] = W_g x[n, g]. integers, scale: of `quantize_rows`.

    On a GPU a kernel computes it for a few vectors.
    """
    rows_GRK = dequantize_rows(integers_GRX, scale_GRS, x_NGK.shape[-1], storage)
    if len(rows_GRK) == 1:
        return F.linear(x_NGK, rows_GRK[0])
    out_NGR: Tensor = torch.einsum("ngk,grk->ngr", x_NGK, rows_GRK)
    return out_NGR


def _in_groups(rows_XK: Tensor, storage: Storage) -> Tensor:
    """Return rows in groups (.., ceil(K / g), g); zeros fill the last one."""
    size = storage.group_size(rows_XK.shape[-1])
    blocks: Tensor = F.pad(rows_XK, (0, -rows_XK.shape[-1] % size)).unflatten(-1, (-1, size))
    return blocks


def _rounded_scale(scale: Tensor, dtype: torch.dtype, most: int) -> Tensor:
    """Return scales in float32 with values of `dtype`; 1 for groups of zeros and for scales too small for the dtype.

    Scales are at most the largest value of the dtype divided by `most`, the largest integer, so that no product
    overflows: rounded to the nearest, the scale of 65504 in 8 bits is 516 in float16, and 127 * 516 is infinite there.
    """
    info = torch.finfo(dtype)
    largest = float(torch.tensor(info.max / most * (1 - info.eps), dtype=torch.float32).to(dtype))
    stored = scale.to(dtype).float().clamp(-largest, largest)
    return torch.where(stored == 0, 1.0, stored)


def _to_integers(blocks: Tensor, scale: Tensor, most: int) -> Tensor:
    return (blocks / scale).round().clamp(-most, 7 if most == 8 else most)


def contracted_axes(linear: nn.Module, name: str) -> tuple[int, ...]:
    """Return the axes of a core that its product sums over: the inputs of each output."""
    axes: dict[str, tuple[int, ...]] = getattr(linear, "contracted", {})
    return axes.get(name, (-1,))


def core_rows(core: Tensor, axes: Sequence[int]) -> Tensor:
    """Return a core with the contracted axes as one last axis, (.., K)."""
    rows: Tensor = core.movedim(tuple(axes), tuple(range(-len(axes), 0))).flatten(-len(axes))
    return rows


def rows_to_core(rows: Tensor, shape: Sequence[int], axes: Sequence[int]) -> Tensor:
    """Return the core of `shape` whose `core_rows` are `rows`."""
    last = tuple(range(-len(axes), 0))
    core: Tensor = rows.unflatten(-1, [shape[axis] for axis in axes]).movedim(last, tuple(axes)).contiguous()
    return core


class QuantizedLinear(nn.Module):
    """A structured or dense linear with integer cores.

    Buffers: each core's integers under its own name, and `<name>_scale`.

    As in StructuredLinear, `weight` is never 2-D. The integers cannot be trained; a PEFT adapter over the linear can.

    Args:
        linear: a StructuredLinear, or a linear whose weight is (1, O, I). Its values are quantized, unless they are on
            meta.
        storage: bits and groups.

    Raises SurgeryError if values are not finite, and for fp8 if the structure's product is not one of its cores with one
    input after the other.
    """

    def __init__(self, linear: Any, storage: Storage):
        super().__init__()
        if storage.format == "fp8" and not hasattr(linear, "product_by_cores"):
            raise SurgeryError(
                f"{linear.config} has no product in fp8: dense, low_rank, pivoted_low_rank, btt and monarch have one. "
                "Use format int"
            )
        self.in_features, self.out_features, self.storage = linear.in_features, linear.out_features, storage
        self.config = getattr(linear, "config", None)
        self.shapes = {name: tuple(core.shape) for name, core in linear._parameters.items() if name != "bias"}
        cores = {name: getattr(linear, name).detach() for name in self.shapes}
        if storage.bits == 4 and hasattr(linear, "cores_to_round") and not any(c.is_meta for c in cores.values()):
            cores |= linear.cores_to_round()
        for name, core in cores.items():
            integers, scale = self._quantized(linear, name, core)
            self.register_buffer(name, integers)
            self.register_buffer(f"{name}_scale", scale)
        for name, table in linear._buffers.items():  # index tables
            self.register_buffer(name, table)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)
        # The linear without values, not a submodule: `float_linear` gives a copy of it the values.
        self._template = (_without_values(linear),)
        self.train(linear.training)

    def _quantized(self, linear: Any, name: str, core: Tensor) -> tuple[Tensor, Tensor]:
        rows = core_rows(core, self.storage.axes(linear, name))
        inputs, groups = rows.shape[-1], self.storage.groups(rows.shape[-1])
        if not rows.is_meta:
            if not bool(rows.isfinite().all()):
                where = f"core {name!r} of {linear.config if self.config else 'the weight'}"
                raise SurgeryError(f"{where} has values that are not finite. Use a checkpoint with finite weights")
            return quantize_rows(rows, self.storage)
        width = inputs if self.storage.bits == 8 else -(-inputs // 2)
        return rows.new_empty(*rows.shape[:-1], width, dtype=self.storage.dtype), rows.new_empty(
            *rows.shape[:-1], groups
        )

    def wrong_dtype(self, values: torch.dtype, scale: torch.dtype) -> str:
        """Say what is wrong with the dtypes of a core and its scales, "" if nothing is."""
        if values != self.storage.dtype:
            return f"is {values}, not {self.storage.dtype}"
        return "" if scale in SCALE_DTYPES else f"has scales in {scale}, which is no floating-point dtype"

    def check_loaded(self) -> None:
        """Raise SurgeryError if loaded values are invalid: no integers, values or scales that are not finite, scales of 8
        bits that are not positive, indices out of range.
        """
        for name in self.shapes:
            values, scale = self._buffers[name], self._buffers[f"{name}_scale"]
            assert values is not None and scale is not None
            wrong = self.wrong_dtype(values.dtype, scale.dtype)
            if not wrong and not scale.is_meta:
                if not bool(scale.isfinite().all()):
                    wrong = "has scales that are not finite"
                elif self.storage.bits == 8 and not bool((scale > 0).all()):
                    wrong = "has scales that are not positive"
                elif self.storage.format == "fp8" and not bool(values.float().isfinite().all()):
                    wrong = "has values that are not finite"
            if wrong:
                raise SurgeryError(f"a quantized linear ({self.config or 'dense'}): {name} {wrong}. {DAMAGED}")
        check = getattr(self._template[0], "check_loaded", None)
        if check is not None and not any(table.is_meta for table in self.buffers()):
            check.__func__(self.float_linear())

    def float_linear(self) -> Any:
        """Return the linear in floating point: the integers times their scales, the bias, and index tables."""
        stored = {name: getattr(self, name) for core in self.shapes for name in (core, f"{core}_scale")}
        return self._linear_with(self.float_cores(stored))

    def _linear_with(self, cores: Mapping[str, Tensor]) -> Any:
        (template,) = self._template
        linear = object.__new__(type(template))
        linear.__dict__.update(template.__dict__, training=self.training)
        linear.__dict__["_parameters"] = {**cores, "bias": self.bias}
        linear.__dict__["_buffers"] = {name: self._buffers[name] for name in template._buffers}
        return linear

    def float_cores(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the cores in floating point, by name, of integers and scales that are stored under these names."""
        (template,), cores = self._template, {}
        for name, shape in self.shapes.items():
            axes = self.storage.axes(template, name)
            inputs = prod([shape[axis] for axis in axes])
            rows = dequantize_rows(stored[name], stored[f"{name}_scale"], inputs, self.storage)
            cores[name] = rows_to_core(rows, shape, axes)
        return cores

    def forward(self, x: Tensor) -> Tensor:
        """Return B x + bias (..., O) for x (..., I)."""
        if self._takes_cores(x):
            made: Tensor = self._template[0].product_by_cores(x, self._multiply, self._buffers)
            return made if self.bias is None else made + self.bias
        y: Tensor = self.float_linear()(x)
        return y

    def _takes_cores(self, x: Tensor) -> bool:
        """Return whether a call multiplies by one core after the other, without gradients: always in fp8; else on few
        tokens, and outside of torch.compile, which fuses scales and product itself.
        """
        few = not torch.compiler.is_compiling() and 0 < x.numel() <= FEW_TOKENS * x.shape[-1]
        return (
            (self.storage.format == "fp8" or few)
            and not (torch.is_grad_enabled() and x.requires_grad)
            and hasattr(self._template[0], "product_by_cores")
            and not self.storage.last_axis
        )

    def _multiply(self, name: str, x: Tensor, groups: int = 1) -> Tensor:
        """Return the product of a core with x (.., groups * K), (.., groups * R). The first axes of the core are its
        groups, each a matrix (R, K)."""
        integers, scale = (getattr(self, at).flatten(0, -2) for at in (name, f"{name}_scale"))
        integers_GRX, scale_GRS = (t.unflatten(0, (groups, -1)) for t in (integers, scale))
        x_NGK = x.reshape(-1, groups, x.shape[-1] // groups)
        if self.storage.format == "fp8":
            from surgery.structures.fp8 import fp8_product

            triples = zip(x_NGK.unbind(1), integers_GRX.unbind(0), scale_GRS[..., 0].unbind(0))
            products = [fp8_product(*triple) for triple in triples]
            y_NX = products[0] if groups == 1 else torch.cat(products, 1)
            return y_NX.reshape(*x.shape[:-1], -1)
        out_NGR: Tensor = quantized_product(x_NGK, integers_GRX, scale_GRS, self.storage)
        return out_NGR.reshape(*x.shape[:-1], -1)

    def dense(self) -> Tensor:
        """Return B as a dense matrix (O, I)."""
        dense: Tensor = self.float_linear().dense()
        return dense

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedLinear:
        """Apply a function to all tensors (`to`, `half`); e4m3 stays e4m3, which loses nothing: 16 bits hold it."""
        parent: Any = super()
        parent._apply(fn, recurse)
        if self.storage.format == "fp8":
            for name in self.shapes:
                self._buffers[name] = getattr(self, name).to(self.storage.dtype)
        return self

    def extra_repr(self) -> str:
        """Return the sizes, the config and the storage, for printing the module."""
        return f"in={self.in_features}, out={self.out_features}, {self.config or 'dense'}, {self.storage}"


def _without_values(linear: Any) -> Any:
    """Return a shallow copy of a linear without parameters, hooks and values of its index tables."""
    copy = object.__new__(type(linear))
    copy.__dict__.update(linear.__dict__)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        copy.__dict__[name] = type(linear.__dict__[name])()
    copy.__dict__["_parameters"], copy.__dict__["_buffers"] = {}, dict.fromkeys(linear._buffers)
    return copy
