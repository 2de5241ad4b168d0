"""Protocol of structured linear layers: B, a structured approximation of a dense weight W (out = O, in = I).

    config = STRUCTURES[BTT].fit(BTT(blocks=(4, 4)), out, in_, budget=params)     a rank under a budget
    linear = STRUCTURES[config].project(weight_OI, config, metric)                closed form
    linear.sweep(weight_OI, metric)                                              one sweep of descent, in place
    linear(x), linear.dense(), linear.cost(), linear.mup()

`project` minimizes the norm of W - B in the metric if a closed form exists. Otherwise its docstring says what it
minimizes. Arithmetic is float32 on the weight's device.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from surgery.core.errors import SurgeryError, suggestion
from surgery.core.registry import Registry, validate_config
from surgery.structures.coordinates import Coordinates
from surgery.structures.metric import Metric

Rank = int | Literal["full"] | None


class Cost(NamedTuple):
    """Cost of a structured linear layer.

    params: stored elements, index tables included, bias excluded. macs: multiply-accumulates per token.
    """

    params: int
    macs: int


class MuP(NamedTuple):
    """Fan-in and fan-out of a core, seen as a block-diagonal dense layer.

    Initial standard deviation sqrt(min(1, out/in) / in) (the spectral condition); Adam's learning rate
    (training/optim.py) scales as 1 / fan_in. Qiu et al. 2024, "Compute Better Spent", section 3.2 and Table 2.
    """

    fan_in: int
    fan_out: int

    @property
    def std(self) -> float:
        """Return the initial standard deviation."""
        return float((min(1.0, self.fan_out / self.fan_in) / self.fan_in) ** 0.5)


@dataclass(frozen=True)
class StructureConfig:
    """Base of all structure configs. `name` is the value of `structure` in recipes and checkpoints.

    rank None: the largest rank within the budget of the plan. of_mlp: whether it replaces the linears of an MLP or
    attention together, and not one matrix.
    """

    name: ClassVar[str]
    of_mlp: ClassVar[bool] = False

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain data, for recipes and checkpoints.

        An `order` of contiguous is left out, as readers assume it.
        """
        data = {"structure": self.name, **{k: _to_plain(v) for k, v in asdict(self).items()}}
        if data.get("order") == "contiguous":
            del data["order"]
        return data


def _to_plain(value: Any) -> Any:
    return [_to_plain(item) for item in value] if isinstance(value, tuple) else value


def config_from_dict(data: dict[str, Any]) -> StructureConfig:
    """Return the config of plain data: {"structure": "btt", "blocks": [4, 4], "rank": 8} -> BTT(..).

    Raises SurgeryError for unknown keys and invalid values.
    """
    data = dict(data)
    config_type: Any = STRUCTURES.config_type(str(data.pop("structure", "")))
    known = {f.name for f in fields(config_type)}
    for key in data:
        if key not in known:
            raise SurgeryError(f"structure {config_type.name!r} has no option {key!r}{suggestion(key, known)}")
    config: StructureConfig = validate_config(config_type, data)
    return config


class StructuredLinear(nn.Module):
    """A linear map y = B x + bias with B stored as small cores; `weight` is one of them, never 2-D.

    The shape of `weight` is deliberate. A library that loads the checkpoint without this package finds a mismatched
    shape and stops; a missing name would leave random values in its place.
    """

    config_type: ClassVar[type]
    REQUIRED = ("shapes", "full_rank", "project", "rank_error_curve", "mup", "macs", "product")
    contracted: ClassVar[
        dict[str, tuple[int, ...]]
    ] = {}  # core -> axes that its product sums over, if not the last one
    scales_named: ClassVar[bool] = (
        False  # whether files without the key `scales` have quantized cores along the last axis
    )

    def __init__(self, in_features: int, out_features: int, config: Any, bias: bool = True, **factory: Any):
        super().__init__()
        self.in_features, self.out_features, self.config = in_features, out_features, config
        for name, shape in self.shapes(config, out_features, in_features).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **factory)))
        self.bias = nn.Parameter(torch.empty(out_features, **factory)) if bias else None
        if "weight" not in self._parameters:
            raise SurgeryError(
                f"the structure {config.name!r} has the cores {', '.join(self._parameters)}; one of them must be named "
                "weight, "
                "by which checkpoints find it. Rename one"
            )
        if not self.weight.is_meta:
            self.reset_parameters()

    # -- methods that a structure defines ------------------------------------------------------------------
    @classmethod
    def shapes(cls, config: Any, out: int, in_: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every core of a resolved config."""
        raise NotImplementedError

    @classmethod
    def resolve(cls, config: Any, out: int, in_: int) -> Any:
        """Return the config with every 'sqrt' resolved to a number. SurgeryError if the dimensions do not allow it."""
        return config

    @classmethod
    def full_rank(cls, config: Any, out: int, in_: int) -> int:
        """Return the smallest rank that represents every (out, in) matrix exactly."""
        raise NotImplementedError

    @classmethod
    def project(cls, weight_OI: Tensor, config: Any, metric: Metric | None = None) -> StructuredLinear:
        """Return the linear module closest to `weight_OI` (O, I) in the metric."""
        raise NotImplementedError

    @classmethod
    def rank_error_curve(
        cls, weight_OI: Tensor, config: Any, metric: Metric, steps: int = 64
    ) -> list[tuple[Any, float]]:
        """Return (config, squared error in the metric) at about `steps` ranks, cheapest first.

        The errors are estimates from spectra alone, for allocating a budget over matrices. `project` followed by
        `sweep` does no worse.
        """
        raise NotImplementedError

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of each core."""
        raise NotImplementedError

    def macs(self) -> int:
        """Return multiply-accumulates per token."""
        raise NotImplementedError

    def step_coordinates(self) -> dict[str, Coordinates]:
        """Return, by core, the coordinates in which tuning trains it.

        Cores that it lacks are trained as they are stored.
        """
        return {}

    @classmethod
    def step_order(cls, config: Any, out: int, in_: int) -> int:
        """Return R of the two (R, R) matrices of `step_coordinates`, 0 if there are none."""
        return 0

    def sweep(self, weight_OI: Tensor, metric: Metric) -> float | None:
        """Run one sweep of descent in the metric, in place.

        Return the squared error that is left, or None if `project` is already optimal.
        """
        return None

    # -- methods that follow from them ----------------------------------------------------------------------
    @classmethod
    def params(cls, config: Any, out: int, in_: int) -> int:
        """Return the number of stored elements of a resolved config of known rank."""
        return sum(_size(shape) for shape in cls.shapes(config, out, in_).values())

    @classmethod
    def fit(cls, config: Any, out: int, in_: int, budget: float) -> Any:
        """Return the config with the largest rank within `budget` stored elements.

        SurgeryError if rank 1 exceeds it.
        """
        config = cls.resolve(config, out, in_)
        if config.rank == "full":
            return replace(config, rank=cls.full_rank(config, out, in_))
        if config.rank is not None:
            return replace(config, rank=min(config.rank, cls.full_rank(config, out, in_)))

        def size(rank: int) -> int:
            return cls.params(replace(config, rank=rank), out, in_)

        # The size grows with the rank, so the number of ranks that fit is the largest rank.
        rank = bisect.bisect_right(range(1, cls.full_rank(config, out, in_) + 1), budget, key=size)
        if rank < 1:
            raise SurgeryError(
                f"{config} cannot represent a {out} x {in_} matrix within {int(budget):,} parameters: "
                f"rank 1 already stores {size(1):,}. Raise keep to {min_keep(size(1), out, in_)} or more"
            )
        return replace(config, rank=rank)

    def cost(self) -> Cost:
        """Return stored elements and multiply-accumulates per token."""
        return Cost(sum(getattr(self, n).numel() for n in self.core_names()), self.macs())

    def check_loaded(self) -> None:
        """Raise SurgeryError if loaded values are invalid, for example indices out of range."""

    def core_names(self) -> list[str]:
        """Return the names of the stored tensors."""
        return list(self.shapes(self.config, self.out_features, self.in_features))

    def right_and_left(self) -> tuple[Tensor, Tensor]:
        """Return the cores `right` and `weight`.

        They are read where nn.Module keeps parameters, because an attribute that is a parameter takes several times as
        long to find. A library may have put something else in their place (a parametrization, say); then they are read
        as attributes.
        """
        parameters: Any = self._parameters
        if "right" in parameters and "weight" in parameters:
            return parameters["right"], parameters["weight"]
        right: Any = self.right
        left: Any = self.weight
        return right, left

    def output_cores(self) -> list[str]:
        """Return the names of the cores that the product applies last. If they are 0, so is the output."""
        return ["weight"]

    def reset_parameters(self) -> None:
        """Initialize cores and bias by muP, for training from scratch."""
        for name, scale in self.mup().items():
            nn.init.normal_(getattr(self, name), std=scale.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @classmethod
    @torch.no_grad()
    def from_cores(cls, config: Any, shape: Sequence[int], cores: dict[str, Tensor]) -> StructuredLinear:
        """Return a module without bias for a matrix of shape (out, in) that holds these cores."""
        out, in_ = shape
        linear = cls(in_, out, config, bias=False, device="meta")
        for name, core in cores.items():
            expected = getattr(linear, name).shape
            assert core.shape == expected, (config, name, tuple(core.shape), tuple(expected))
            linear._parameters[name] = nn.Parameter(core.contiguous(), requires_grad=core.is_floating_point())
        return linear

    def dense(self) -> Tensor:
        """Return B as a dense matrix (O, I)."""
        core: Any = self.weight
        eye_II = torch.eye(self.in_features, dtype=core.dtype, device=core.device)
        return self.product(eye_II).mT

    def product(self, x: Tensor) -> Tensor:
        """Return B x (..., O) without the bias, for x (..., I)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return B x + bias (..., O) for x (..., I)."""
        y = self.product(x)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Return the sizes and the config, for printing the module."""
        return f"in={self.in_features}, out={self.out_features}, {self.config}"


def is_exporting() -> bool:
    """Return whether torch.export is tracing the caller; False before PyTorch 2.7, which cannot tell.

    The flag is read itself where there is one: traced by torch.compile, `torch.compiler.is_exporting` returns True in
    PyTorch 2.11.
    """
    flag: Any = getattr(torch.compiler, "_is_exporting_flag", None)
    if flag is not None:
        return bool(flag)
    ask: Callable[[], bool] | None = getattr(torch.compiler, "is_exporting", None)
    return ask is not None and ask()


def min_keep(params: int, out: int, in_: int) -> float:
    """Return the smallest `keep` (share of the dense parameters) that covers `params`, rounded up to three decimals."""
    return -(-1000 * params // (out * in_)) / 1000


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def curve_ranks(full: int, steps: int) -> list[int]:
    """Return about `steps` evenly spaced ranks from 1 to full, both ends included."""
    stride = max(1, -(-full // steps))
    return sorted({1, full, *range(stride, full + 1, stride)})


def balance_factors(left_OR: Tensor, right_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Rescale column r of left and row r of right to about equal norms, for rounding and training.

    If one of the two is zero, the other gets a norm of about 1. The factors are powers of two, so no precision is lost.
    Norms are in float64, where no square of a float32 underflows: G^-1/2 of a matrix on which the loss hardly depends
    is large, 1e15 say.
    """
    left, right = (torch.linalg.vector_norm(m, dim=d, dtype=torch.float64) for m, d in ((left_OR, -2), (right_RI, -1)))
    log_left, log_right = (torch.where(norm > 0, norm, 1.0).log2() for norm in (left, right))
    share = torch.where((left > 0) & (right > 0), 0.5, 1.0)
    scale = ((log_right - log_left) * share).round().clamp(-126, 126).exp2().to(left_OR.dtype)
    return left_OR * scale.unsqueeze(-2), right_RI / scale.unsqueeze(-1)


def exact_factors(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return exact factors left_OR, right_RI of (a batch of) matrices, R = min(O, I): the identity and the matrix."""
    out, in_ = weight_OI.shape[-2:]
    eye = torch.eye(min(out, in_), dtype=weight_OI.dtype, device=weight_OI.device).expand(*weight_OI.shape[:-2], -1, -1)
    return balance_factors(*((eye, weight_OI) if out <= in_ else (weight_OI, eye)))


STRUCTURES: Registry[StructuredLinear] = Registry(
    "structure", "surgery.structures", {"block_tensor_train": "tensor_train"}
)
