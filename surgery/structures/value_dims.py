"""Fewer value dims in every head of attention: values in a basis of their own, and the output projection fitted to it.

    v_g = V_g x, y = sum_h O_h a_h   ->   v_g = U_g^T V_g x in R^r, y = sum_h B_h (the same mean of these v)

a_h: mean of the values of the key/value head g of query head h, weighted by attention, which U_g^T passes. U_g C_g^(1/2)
has the r leading eigenvectors of C_g^(1/2) (sum_h O_h^T G O_h) C_g^(1/2), with C_g the mean of E[a_h a_h^T] over the
query heads of g: the optimum for one head, or for heads of equal and uncorrelated outputs (Lin et al. 2024, MoDeGPT,
"type III", with C_g and G for its moments). B is the least-squares optimum for these bases, in the metric (C, G).

Both linears keep their numbers of outputs and inputs: values have zeros in their other dims, which the output projection
does not read. Attention runs unchanged, and its cache keeps its size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.structures import linalg
from surgery.structures.base import STRUCTURES, MuP, StructureConfig, StructuredLinear, min_keep
from surgery.structures.metric import Metric, symmetric_roots
from surgery.structures.pruned import errors_left, refit_columns

SIDES = ("both", "values", "output")
MULTIPLE = 8  # of which numbers of value dims are multiples


@dataclass(frozen=True)
class ValueDims(StructureConfig):
    """Config of attention with fewer value dims.

    width: columns of the output projection that stay, `unit` of them for a value dim; None or "uniform": by the budget,
    see `Pruned`. multiple: widths that the budget chooses are multiples of it. unit: query heads. groups: key/value
    heads. side: of the two linears of a model, "values" or "output"; "both" for the fit, a linear of all value dims.
    """

    name: ClassVar[str] = "value_dims"
    of_mlp: ClassVar[bool] = True
    width: int | Literal["uniform"] | None = None
    multiple: int = MULTIPLE
    unit: int = 1
    groups: int = 1
    side: Literal["both", "values", "output"] = "both"

    @property
    def is_free(self) -> bool:
        """Whether the budget chooses the width."""
        return not isinstance(self.width, int)

    @property
    def dims(self) -> int:
        """Value dims of a head that stay."""
        assert isinstance(self.width, int)
        return self.width // self.unit


class Bases(NamedTuple):
    """U_g^T (G, K, K) and its inverse (G, K, K) for each key/value head, the value dim that matters most first."""

    down_GKK: Tensor
    up_GKK: Tensor


def value_bases(weight_OI: Tensor, config: ValueDims, metric: Metric) -> Bases:
    """Return the bases of an output projection (see the module)."""
    groups, in_ = config.groups, weight_OI.shape[1]
    size, shared = in_ // config.unit, config.unit // groups
    weighed_OI = metric.apply_output_root(weight_OI)
    weighed_GNK = weighed_OI.unflatten(1, (groups, shared, size)).permute(1, 2, 0, 3).flatten(1, 2)
    if metric.c_II is None:
        c_GKK = torch.eye(size, dtype=weight_OI.dtype, device=weight_OI.device).expand(groups, size, size)
    else:
        heads = torch.arange(config.unit, device=weight_OI.device)
        blocks_HKK = metric.c_II.view(config.unit, size, config.unit, size)[heads, :, heads]
        c_GKK = blocks_HKK.unflatten(0, (groups, shared)).mean(1)
    root_GKK, inverse_GKK = symmetric_roots(c_GKK)
    read_GNK = weighed_GNK @ root_GKK
    leading_GKK = linalg.eigh(read_GNK.mT @ read_GNK)[1].flip(-1)
    return Bases(leading_GKK.mT @ inverse_GKK, root_GKK @ leading_GKK)


def in_bases(weight_OI: Tensor, bases: Bases, config: ValueDims, metric: Metric) -> tuple[Tensor, Metric]:
    """Return (O U^-T, the metric of U^T a), with the columns of one dim of all heads beside one another (K, H)."""
    unit, shared = config.unit, config.unit // config.groups
    size = weight_OI.shape[1] // unit
    down_HKK, up_HKK = (basis.repeat_interleave(shared, 0) for basis in bases)
    turned_OHK = torch.einsum("ohk,hkr->ohr", weight_OI.unflatten(1, (unit, size)), up_HKK)
    turned_OI = turned_OHK.mT.flatten(1)
    if metric.c_II is None:
        down_II = torch.block_diag(*down_HKK)
        c_II = down_II @ down_II.mT
    else:
        c_II = metric.c_II
        c_HKI = down_HKK @ c_II.unflatten(0, (unit, size))
        c_II = (c_HKI.flatten(0, 1).unflatten(1, (unit, size)).movedim(1, 0) @ down_HKK.mT).movedim(0, 1).flatten(1)
    c_II = c_II.view(unit, size, unit, size).permute(1, 0, 3, 2).reshape(unit * size, unit * size)
    return turned_OI, Metric(c_II, metric.g_OO)


@STRUCTURES.register(ValueDims)
class ValueDimsLinear(StructuredLinear):
    """The output projection as a linear of all value dims, y = sum_h B_h U_g^T a_h; or one of the two linears of a model:
    a projection of values that computes r of K dims of each head, the others zero, or an output projection that reads
    r of K dims of each head.

    Core: `weight`, stored as (1, O, H r), or (1, G r, I) of the values. Buffer `down` (G, r, K) of side "both": U_g^T.
    """

    weight: Tensor
    down: Tensor

    def __init__(self, in_features: int, out_features: int, config: Any, bias: bool = True, **factory: Any):
        super().__init__(in_features, out_features, config, bias, **factory)
        if config.side == "both":
            size = in_features // config.unit
            self.register_buffer("down", torch.empty(config.groups, config.dims, size, device=factory.get("device")))
            if not self.down.is_meta:
                self.down.copy_(torch.eye(config.dims, size))

    @classmethod
    def resolve(cls, config: Any, out: int, in_: int) -> Any:
        """Return the config. SurgeryError if the heads do not divide the linear."""
        features, parts = (out, config.groups) if config.side == "values" else (in_, config.unit)
        sizes = (config.multiple, config.unit, config.groups)
        if min(sizes) < 1 or features % parts or config.unit % config.groups or config.side not in SIDES:
            raise SurgeryError(f"{config} does not divide the heads of a {out} x {in_} matrix")
        if not config.is_free and (config.width % config.unit or not 1 <= config.dims <= features // parts):
            raise SurgeryError(
                f"width must be from 1 to the {features // parts} value dims of a head (got {config.width / config.unit:g})"
            )
        return config

    @classmethod
    def shapes(cls, config: Any, out: int, in_: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every core (layout in the class docstring)."""
        cls.resolve(config, out, in_)
        is_values = config.side == "values"
        return {"weight": (1, config.groups * config.dims, in_) if is_values else (1, out, config.width)}

    @classmethod
    def full_rank(cls, config: Any, out: int, in_: int) -> int:
        """Return the number of columns, or of the values' rows."""
        return out if config.side == "values" else in_

    @classmethod
    def fit(cls, config: Any, out: int, in_: int, budget: float) -> Any:
        """Return the config with the largest width within `budget` elements of the output projection.

        SurgeryError if none fits, or if the config has more value dims than a head.
        """
        config = cls.resolve(config, out, in_)
        if not config.is_free:
            return config
        most, size = int(budget / out / config.unit), in_ // config.unit
        dims = size if most >= size else most // (config.multiple // config.unit) * (config.multiple // config.unit)
        if dims:
            return replace(config, width=dims * config.unit)
        least = config.multiple // config.unit
        raise SurgeryError(
            f"value dims are multiples of {least}, and the budget covers {most} of the {size} of a head. Raise keep to "
            f"{min_keep(least, size, 1)} or more, or set multiple to {max(1, most)} or less"
        )

    @classmethod
    def project(cls, weight_OI: Tensor, config: Any, metric: Metric | None = None) -> StructuredLinear:
        """Return the linear with the bases of the module's docstring, and the optimal B for these."""
        metric, in_ = metric or Metric(), weight_OI.shape[1]
        size, dims = in_ // config.unit, config.dims
        if dims == size:
            down_GKK = torch.eye(size, dtype=weight_OI.dtype, device=weight_OI.device).repeat(config.groups, 1, 1)
            b_OK = weight_OI.clone()
        else:
            bases = value_bases(weight_OI, config, metric)
            down_GKK = bases.down_GKK
            turned_OI, turned = in_bases(weight_OI, bases, config, metric)
            columns_K = torch.arange(config.width, device=weight_OI.device)
            b_OK = refit_columns(turned_OI, columns_K, turned).unflatten(1, (dims, config.unit)).mT.flatten(1)
        linear = cls.from_cores(config, weight_OI.shape, {"weight": b_OK.contiguous()[None]})
        linear.register_buffer("down", down_GKK[:, :dims].contiguous())
        return linear

    @classmethod
    def rank_error_curve(
        cls, weight_OI: Tensor, config: Any, metric: Metric, steps: int = 64
    ) -> list[tuple[Any, float]]:
        """Return (config, squared error in the metric) at the widths that a budget may choose and at the full one.

        The errors are exact: the leading dims are also those of larger widths, see `PrunedLinear.rank_error_curve`.
        """
        turned_OI, turned = in_bases(weight_OI, value_bases(weight_OI, config, metric), config, metric)
        in_ = weight_OI.shape[1]
        left = errors_left(turned_OI, torch.arange(in_, device=weight_OI.device), turned)
        widths = range(config.multiple, in_, config.multiple)
        return [*((replace(config, width=width), left[width]) for width in widths), (replace(config, width=in_), 0.0)]

    def turn_values(self, rows_VI: Tensor) -> Tensor:
        """Return U_g^T V_g (G r, I) of the rows (G K, I) of the values' projection. Of side "both"."""
        turned_GrI: Tensor = self.down.to(rows_VI.dtype) @ rows_VI.unflatten(0, (self.config.groups, -1))
        return turned_GrI.flatten(0, 1)

    def padded_values(self, rows_VI: Tensor) -> Tensor:
        """Return rows (G r, I) with zeros for the dims that were removed (G K, I)."""
        size = (self.out_features // self.config.groups) if self.config.side == "values" else self.down.shape[2]
        return _padded(rows_VI.unflatten(0, (self.config.groups, -1)).mT, size).mT.flatten(0, 1)

    def core_names(self) -> list[str]:
        """Return the names of the stored tensors."""
        return ["weight", "down"] if self.config.side == "both" else ["weight"]

    def product(self, x: Tensor) -> Tensor:
        """Return the outputs (..., O) without the bias, for x (..., I)."""
        config, weight = self.config, self.weight[0]
        if config.side == "both":
            heads = x.unflatten(-1, (config.groups, -1, self.down.shape[2]))
            return F.linear((heads @ self.down.mT.to(x.dtype)).flatten(-3), weight)
        if config.side == "output":
            return F.linear(x.unflatten(-1, (config.unit, -1))[..., : config.dims].flatten(-2), weight)
        missing = self.out_features // config.groups - config.dims
        return F.pad(F.linear(x, weight).unflatten(-1, (config.groups, config.dims)), (0, missing)).flatten(-2)

    def dense(self) -> Tensor:
        """Return the matrix (O, I); of a linear of a model with zeros for the dims that were removed."""
        config, weight = self.config, self.weight[0]
        if config.side == "both":
            shared = config.unit // config.groups
            parts_OGJr = weight.unflatten(1, (config.groups, shared, config.dims))
            return torch.einsum("ogjr,grk->ogjk", parts_OGJr, self.down.to(weight.dtype)).flatten(1)
        if config.side == "output":
            return _padded(weight.unflatten(1, (config.unit, config.dims)), self.in_features // config.unit).flatten(1)
        return self.padded_values(weight)

    def macs(self) -> int:
        """Return multiply-accumulates per token."""
        return self.weight.numel()

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of the core."""
        return {"weight": MuP(self.weight.shape[2], self.weight.shape[1])}


def _padded(x: Tensor, size: int) -> Tensor:
    return F.pad(x, (0, size - x.shape[-1]))
