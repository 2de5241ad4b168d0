"""A pruned MLP or attention: some of its neurons or heads stay, and the linear that reads them is fitted again.

    y = down h, h = act(gate x) * up x   ->   y = B h[columns],  B (O, K) = down C[:, columns] C[columns, columns]^-1

C (I, I): second moment of the hidden activations h, I the neurons of the MLP, K those that stay. B is the least-squares
optimum for its columns, in the metric (C, G) for every G (Lin et al. 2024, MoDeGPT, which calls it a Nystrom
approximation of the MLP). Neurons are ranked by G-weighted energy, C[j, j] w_j^T G w_j with w_j column j of down: the
energy of what neuron j alone adds to the output.

In attention h are the outputs of the heads, and `down` is the output projection. Whole units of `unit` columns stay or
go: a key/value head with its query heads. There are few units, so they are not ranked by energy: each step removes the
unit whose removal raises the error of the refitted projection least (`leading_units`).

The linear of this module reads all neurons. In a model the rows of `gate` and `up` of the other neurons are removed,
and `down` becomes an ordinary linear of K inputs (`surgery.conversion.replacement.add_linear`); in attention likewise
the rows of the queries, keys and values, and the output projection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.structures import linalg
from surgery.structures.base import STRUCTURES, MuP, StructureConfig, StructuredLinear, min_keep
from surgery.structures.metric import Metric, spd_factor, spd_inverse

MULTIPLE = 64  # of which widths are multiples: tiles of matrix products on GPUs


@dataclass(frozen=True)
class Pruned(StructureConfig):
    """Config of a pruned MLP or attention.

    width: neurons that stay, in attention outputs of its heads; None: by the budget, in each layer; "uniform": by the
    budget, one width for all layers. multiple: widths that the budget chooses are multiples of it. unit: columns that
    stay or go together, 1 in an MLP.
    """

    name: ClassVar[str] = "pruned"
    of_mlp: ClassVar[bool] = True
    width: int | Literal["uniform"] | None = None
    multiple: int = MULTIPLE
    unit: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain data, without the unit of an MLP."""
        data = super().to_dict()
        return data if self.unit > 1 else {key: value for key, value in data.items() if key != "unit"}

    @property
    def is_free(self) -> bool:
        """Whether the budget chooses the width."""
        return not isinstance(self.width, int)


def possible_widths(config: Pruned, neurons: int) -> list[int]:
    """Return the widths below `neurons` that a budget may choose, smallest first."""
    return list(range(config.multiple, neurons, config.multiple))


def neuron_scores(weight_OI: Tensor, metric: Metric) -> Tensor:
    """Return the G-weighted energy of each neuron's output, C[j, j] w_j^T G w_j (I,)."""
    weighed_OI = metric.apply_output_root(weight_OI)
    energy_I: Tensor = torch.linalg.vecdot(weighed_OI, weighed_OI, dim=0)
    return energy_I if metric.c_II is None else energy_I * metric.c_II.diagonal()


def ordered(values: Tensor, order: Callable[[Tensor], Tensor]) -> Tensor:
    """Return order(values), integers; of values on the meta device, where estimates count, any integers: sorting there
    imports sympy.
    """
    return torch.zeros(len(values), dtype=torch.int64, device="meta") if values.is_meta else order(values)


def leading_columns(weight_OI: Tensor, metric: Metric, unit: int) -> Tensor:
    """Return the indices (I,) of all columns, those that stay longest first; of equal scores the first one."""
    if unit == 1:
        scores_I = neuron_scores(weight_OI, metric)
        return ordered(scores_I, lambda scores: scores.argsort(descending=True, stable=True))
    units_N = leading_units(weight_OI, metric, unit)
    return (units_N[:, None] * unit + torch.arange(unit, device=weight_OI.device)).flatten()


def leading_units(weight_OI: Tensor, metric: Metric, unit: int) -> Tensor:
    """Return the indices (N,) of all units of columns, the last one that is removed first.

    Each step removes the unit u that raises the error of the refit least, by tr(B_u^T G B_u (P_uu)^-1): B is the refit
    to the units that are left, and P the inverse of their moment (the block form of Hassibi & Stork 1993, "Second order
    derivatives for network pruning", eq. 5). B and P of the next step follow by a block of elimination.
    """
    out, in_ = weight_OI.shape
    count, device = in_ // unit, weight_OI.device
    if weight_OI.is_meta:  # an estimate counts the fit; see `ordered`
        return torch.zeros(count, dtype=torch.int64, device=device)
    c_II = torch.eye(in_, device=device) if metric.c_II is None else metric.c_II
    refit_OI = metric.apply_output_root(weight_OI).double()
    inverse_II = spd_inverse(c_II.double())
    blocks = torch.arange(count, device=device)
    removed: list[int] = []
    eye_uu = torch.eye(unit, dtype=torch.float64, device=device)
    while len(removed) < count - 1:
        diagonal_Nuu = inverse_II.view(count, unit, count, unit)[blocks, :, blocks].clone()
        diagonal_Nuu[removed] = eye_uu
        factor_Nuu, _ = linalg.cholesky_ex(diagonal_Nuu)
        refit_NuO = refit_OI.mT.reshape(count, unit, out)
        rises_N = linalg.solve_triangular(factor_Nuu, refit_NuO, upper=False).square().sum((1, 2))
        rises_N[removed] = float("inf")
        least = int(rises_N.argmin())
        columns = slice(least * unit, (least + 1) * unit)
        solved_uI = linalg.cholesky_solve(inverse_II[columns], factor_Nuu[least])
        refit_OI = refit_OI - refit_OI[:, columns] @ solved_uI
        inverse_II = inverse_II - inverse_II[:, columns] @ solved_uI
        removed.append(least)
    last = next(n for n in range(count) if n not in removed)
    return torch.tensor([last, *reversed(removed)], device=device)


def refit_columns(weight_OI: Tensor, columns_K: Tensor, metric: Metric) -> Tensor:
    """Return B (O, K), with which the outputs of all columns are estimated best from these columns."""
    if metric.c_II is None:
        return weight_OI.index_select(1, columns_K)
    cross_OK = metric.times_c(weight_OI).index_select(1, columns_K)
    moment_KK = metric.c_II.index_select(0, columns_K).index_select(1, columns_K)
    return linalg.cholesky_solve(cross_OK.mT, spd_factor(moment_KK)).mT.contiguous()


def errors_left(weight_OI: Tensor, order_I: Tensor, metric: Metric) -> list[float]:
    """Return the squared error of the refit to the first k columns of `order_I`, for every k below I.

    One Cholesky factor L of the sorted C has the factors of all of them, and column k of T W C L^-T is what column k
    adds.
    """
    weighed_OI = metric.apply_output_root(weight_OI)
    if metric.c_II is None:
        gains_I = torch.linalg.vecdot(weighed_OI, weighed_OI, dim=0).index_select(0, order_I)
    else:
        cross_OI = metric.apply_output_root(metric.times_c(weight_OI)).index_select(1, order_I)
        factor_II = spd_factor(metric.c_II.index_select(0, order_I).index_select(1, order_I))
        added_IO = linalg.solve_triangular(factor_II, cross_OI.mT, upper=False)
        gains_I = torch.linalg.vecdot(added_IO, added_IO)
    left: list[float] = gains_I.flip(0).cumsum(0).flip(0).tolist()
    return left


@STRUCTURES.register(Pruned)
class PrunedLinear(StructuredLinear):
    """`down` of a pruned MLP as a linear of all neurons, y = B h[columns], or the output projection of attention.

    Core: `weight` = B, stored as (1, O, K). Buffer `columns` (K,) int32: the columns that stay, in ascending order.
    """

    weight: Tensor
    columns: Tensor

    def __init__(self, in_features: int, out_features: int, config: Any, bias: bool = True, **factory: Any):
        super().__init__(in_features, out_features, config, bias, **factory)
        columns = torch.zeros(config.width, dtype=torch.int32, device=factory.get("device"))
        if not columns.is_meta:
            columns.copy_(torch.arange(config.width))
        self.register_buffer("columns", columns)

    def check_loaded(self) -> None:
        """Raise SurgeryError if `columns` are not different neurons in ascending order."""
        columns = self.columns
        if not columns.is_meta and not (
            bool((columns.diff() > 0).all()) and int(columns[0]) >= 0 and int(columns[-1]) < self.in_features
        ):
            raise SurgeryError(
                f"columns of a pruned MLP must be different numbers below {self.in_features} in ascending order: the "
                "checkpoint is damaged. Download or convert it again"
            )

    @classmethod
    def shapes(cls, config: Any, out: int, in_: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every core (layout in the class docstring)."""
        return {"weight": (1, out, config.width)}

    @classmethod
    def full_rank(cls, config: Any, out: int, in_: int) -> int:
        """Return the number of all neurons."""
        return in_

    @classmethod
    def fit(cls, config: Any, out: int, in_: int, budget: float) -> Any:
        """Return the config with the largest width within `budget` elements of `down`, a multiple of
        `config.multiple`.

        SurgeryError if none fits, or if the config has more neurons than the MLP.
        """
        if config.unit > 1:
            return cls._fit_units(config, in_ // config.unit, budget / out / config.unit)
        if not config.is_free:
            if not 1 <= config.width <= in_:
                raise SurgeryError(f"width must be from 1 to the {in_} neurons of the MLP (got {config.width})")
            return config
        most = int(budget // out)
        width = in_ if most >= in_ else most // config.multiple * config.multiple
        if width:
            return replace(config, width=width)
        ways = [f"raise keep to {min_keep(config.multiple, in_, 1)} or more"] if config.multiple < in_ else []
        ways += [f"set multiple to {most} or less"] if most else []
        advice = ", or ".join(ways) or f"set multiple below {in_} and raise keep to {min_keep(1, in_, 1)} or more"
        raise SurgeryError(
            f"widths of a pruned MLP are multiples of {config.multiple}, and its budget covers {most} of {in_} "
            f"neurons. {advice[0].upper()}{advice[1:]}"
        )

    @classmethod
    def _fit_units(cls, config: Any, count: int, most: float) -> Any:
        """Return the config with the largest number of units up to `most` of `count`."""
        if not config.is_free:
            if not config.unit <= config.width <= count * config.unit:
                raise SurgeryError(
                    f"groups must be from 1 to the {count} key/value heads (got {config.width // config.unit})"
                )
            return config
        if most >= 1:
            return replace(config, width=min(int(most), count) * config.unit)
        raise SurgeryError(
            f"attention is pruned by whole key/value heads with their query heads, of which it has {count}, and its "
            f"budget covers {most:.2f}. Raise keep to {min_keep(1, count, 1)} or more"
        )

    @classmethod
    def project(cls, weight_OI: Tensor, config: Any, metric: Metric | None = None) -> StructuredLinear:
        """Return the linear of the neurons with the highest scores, with the optimal B for these."""
        metric = metric or Metric()
        leading_K = leading_columns(weight_OI, metric, config.unit)[: config.width]
        columns_K = ordered(leading_K, lambda leading: leading.sort().values)
        is_whole = config.width == weight_OI.shape[1]
        b_OK = weight_OI.clone() if is_whole else refit_columns(weight_OI, columns_K, metric)
        linear = cls.from_cores(config, weight_OI.shape, {"weight": b_OK[None]})
        linear.register_buffer("columns", columns_K.to(torch.int32))
        return linear

    @classmethod
    def rank_error_curve(
        cls, weight_OI: Tensor, config: Any, metric: Metric, steps: int = 64
    ) -> list[tuple[Any, float]]:
        """Return (config, squared error in the metric) at the widths that a budget may choose and at the full one.

        The errors are exact: the neurons that stay at one width also stay at larger ones, see `errors_left`.
        """
        order_I = leading_columns(weight_OI, metric, config.unit)
        left_I = errors_left(weight_OI, order_I, metric)
        widths = possible_widths(config, len(order_I))
        return [
            *((replace(config, width=width), left_I[width]) for width in widths),
            (replace(config, width=len(order_I)), 0.0),
        ]

    def core_names(self) -> list[str]:
        """Return the names of the stored tensors."""
        return ["weight", "columns"]

    def product(self, x: Tensor) -> Tensor:
        """Return B x[columns] (..., O) without the bias, for x (..., I)."""
        return F.linear(x.index_select(-1, self.columns), self.weight[0])

    def dense(self) -> Tensor:
        """Return the matrix (O, I), with zeros in the columns of neurons that were removed."""
        dense_OI = self.weight.new_zeros(self.out_features, self.in_features)
        if dense_OI.is_meta:  # an estimate counts the fit; see `ordered`
            return dense_OI
        return dense_OI.index_copy(1, self.columns.long(), self.weight[0])

    def macs(self) -> int:
        """Return multiply-accumulates per token."""
        return self.weight.numel()

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of the core."""
        return {"weight": MuP(self.config.width, self.out_features)}
