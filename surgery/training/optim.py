"""Optimization: learning-rate schedules, weight averaging, parameter groups with structure-aware rates, optimizers.

A core of a structured linear is a (block-diagonal) dense layer with its own fan-in and fan-out (muP). The rate of the
dense layer that it replaces would be too low for it. For a linear of shape out x in:

    adamw, sign    rate_core = rate * width / fan_in                      width: the linear's own in, or base_width
    sgd            rate_core = rate * (fan_out / fan_in) / (out / width)

(Qiu et al. 2024, "Compute Better Spent", section 3.2 and Table 2; for SGD and sign descent Yang et al. 2023, "A
spectral condition for feature learning".) With base_width the rate is that of a dense layer of that width, so that one
rate transfers across widths. Dense matrices then follow the same rule. Table 2 also divides each rate by the number of
cores (its delta_i = 1/k, to be tuned); here delta_i is 1, so that `rate` means the same for a core as for a dense
matrix. The matrices of attention's mixers follow the same rule: factors of bilinear scores by their own fan-in (Kuang
et al. 2025, eqs. 36 to 38; width: of the hidden states), linears by theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from surgery.architectures.experts import merged_experts
from surgery.architectures.linears import is_linear
from surgery.architectures.native import native_core
from surgery.core.config import Real, StrictModel
from surgery.core.errors import SurgeryError, suggestion
from surgery.core.project import install_command
from surgery.mixers import Mixer
from surgery.modeling.cache import mixer_modules
from surgery.modeling.joined import JoinedLinear, sibling
from surgery.modeling.modules import GuardedLinear, is_new
from surgery.planning.stock_classes import STOCK_CLASSES
from surgery.structures import StructuredLinear
from surgery.training.sharded_tensors import clone_sharded, local_shard

Fraction = Annotated[Real, Field(ge=0, le=1)]


class Schedule(StrictModel):
    """A learning-rate schedule: a pure function of the step, so that a resumed run needs no state.

    warmup: fraction of the steps with a linear rise from 0. cosine: decays to `floor` times the peak at the last step.
    constant: no decay. wsd (warm-up, stable, decay): linear decay to `floor` over the last fraction `decay` of the
    steps.
    """

    name: Literal["cosine", "constant", "wsd"] = "cosine"
    warmup: Fraction = 0.02
    floor: Fraction = 0.1
    decay: Fraction = 0.2

    def factor(self, step: int, steps: int) -> float:
        """Return the factor on the peak rate for step 0 .. steps - 1."""
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return (step + 1) / (rising + 1)
        done = (step - rising + 1) / max(1, steps - rising)
        if self.name == "cosine":
            return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2
        if self.name == "wsd" and self.decay and (left := (steps - step) / (self.decay * steps)) < 1:
            return self.floor + (1 - self.floor) * left
        return 1.0


class WeightEMA:
    """Exponential moving average of the weights: mean = d mean + (1 - d) weights, d = min(decay, (1 + step) / (10 +
    step)).
    """

    def __init__(self, parameters: dict[str, Tensor], decay: float):
        self.parameters, self.decay = parameters, decay
        self.means = {name: clone_sharded(p) for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the means after optimizer step number `step`."""
        decay = min(self.decay, (1 + step) / (10 + step))
        means, now = ([local_shard(t) for t in some.values()] for some in (self.means, self.parameters))
        torch._foreach_lerp_(means, now, 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and means in place."""
        for name, p in self.parameters.items():
            ours, mean = local_shard(p), local_shard(self.means[name])
            weights = ours.clone()
            ours.copy_(mean)
            mean.copy_(weights)


PARAMETER_KINDS = {
    "structured": "cores of structured linears",
    "mixers": "parameters of attention mixers: gates, decays, feature maps, factors of scores",
    "gates": "A_log and dt_bias of Gated DeltaNet, Mamba-2 and Kimi delta attention layers that the original has",
    "adapters": "LoRA",
    "dense": "matrices of ordinary linears",
    "embeddings": "token and position embeddings",
    "vectors": "norms and biases",
}
NATIVE_GATES = ("A_log", "dt_bias")  # of transformers' modules: log-gate = -exp(A_log) softplus(.. + dt_bias)
DECAYED_KINDS = ("structured", "adapters", "dense", "embeddings")


class OptimizerConfig(StrictModel):
    """Optimizer settings.

    rates: `mup` (structure-aware), `dense` (a core has the rate of the dense layer that it replaces) or `same` (one
    rate for all). base_width: width for which `rate` holds, None: each linear's own. momentum: of sgd and sign.
    """

    name: Literal["adamw", "adamw8bit", "sgd", "sign"] = "adamw"
    rates: Literal["mup", "dense", "same"] = "mup"
    base_width: Annotated[int, Field(ge=1)] | None = None
    betas: tuple[Annotated[Real, Field(ge=0, lt=1)], Annotated[Real, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Annotated[Real, Field(gt=0)] = 1e-8
    weight_decay: Annotated[Real, Field(ge=0)] = 0.0
    momentum: Annotated[Real, Field(ge=0, lt=1)] = 0.9

    @property
    def states(self) -> float:
        """Bytes of optimizer states per byte of a trained float32 parameter."""
        return {"adamw": 2.0, "adamw8bit": 0.52, "sgd": 1.0, "sign": 1.0}[self.name]


@dataclass(frozen=True)
class Fans:
    """Fan-in and fan-out of one matrix, and the shape out x in_ of the linear that contains it."""

    fan_in: int
    fan_out: int
    in_: int
    out: int


RATE_RULES: dict[str, Callable[[Fans, int], float]] = {
    "adamw": lambda f, width: width / f.fan_in,
    "adamw8bit": lambda f, width: width / f.fan_in,
    "sign": lambda f, width: width / f.fan_in,
    "sgd": lambda f, width: (f.fan_out / f.fan_in) * (width / f.out),
}


@dataclass
class ParameterGroup:
    """Parameters of one kind, learning rate and weight decay."""

    kind: str
    rate: float
    decay: float
    fans: tuple[int, int] | None
    parameters: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def num_parameters(self) -> int:
        """Number of scalar parameters in the group."""
        return sum(p.numel() for p in self.parameters)

    def row(self) -> dict[str, Any]:
        """Return the group's row of the table that is shown before training."""
        fans = {"fan_in": self.fans[0], "fan_out": self.fans[1]} if self.fans else {}
        counts = {"tensors": len(self.names), "parameters": self.num_parameters, "rate": self.rate, "decay": self.decay}
        return {"kind": self.kind, **counts, **fans, "example": self.names[0]}


@dataclass(frozen=True)
class ParameterInfo:
    """Kind and fans of a parameter, as determined by the module that owns it."""

    kind: str
    fans: Fans | None


def parameter_infos(model: nn.Module) -> dict[str, ParameterInfo]:
    """Return name -> info for every parameter; tied parameters appear once."""
    modules = dict(model.named_modules())
    return {name: _parameter_info(name, parameter, modules) for name, parameter in model.named_parameters()}


def _parameter_info(name: str, parameter: Tensor, modules: dict[str, nn.Module]) -> ParameterInfo:
    path, _, leaf = name.rpartition(".")
    if ".parametrizations." in f".{path}.":  # weight normalization: `<path>.parametrizations.<core>.original`
        path, _, core = path.partition(".parametrizations.")
        if leaf != "original":
            return ParameterInfo("vectors", None)
        leaf = core.split(".")[0]
    if ".lora_" in f".{name}" or ".modules_to_save." in name:
        return ParameterInfo("adapters", None)
    module: Any = modules[path]
    if _is_of_mixer(path, modules):
        return ParameterInfo("mixers", _mixer_fans(module, leaf, parameter))
    if leaf in NATIVE_GATES and any(native_core(m) for m in (module, modules.get(path.rpartition(".")[0]))):
        return ParameterInfo("gates", None)  # Kimi delta attention has them in a submodule
    if isinstance(module, StructuredLinear):
        mup = module.mup().get(leaf)
        fans = Fans(mup.fan_in, mup.fan_out, module.in_features, module.out_features) if mup else None
        return ParameterInfo("structured" if mup else "vectors", fans)
    if isinstance(module, nn.Embedding):
        return ParameterInfo("embeddings", None)
    if parameter.dim() >= 2 and (is_linear(module) or isinstance(module, (nn.Linear, GuardedLinear))):
        out, in_ = parameter.shape[-2:]
        if not isinstance(module, nn.Linear):  # Conv1D keeps (in, out)
            out, in_ = in_, out
        return ParameterInfo("dense", Fans(in_, out, in_, out))
    return ParameterInfo("vectors" if parameter.dim() < 2 else "dense", None)


def _is_of_mixer(path: str, modules: dict[str, nn.Module]) -> bool:
    """Return whether the module at `path` is a mixer or a part of one."""
    parts = path.split(".")
    return any(isinstance(modules.get(".".join(parts[:end])), Mixer) for end in range(1, len(parts) + 1))


def _mixer_fans(module: Any, leaf: str, parameter: Tensor) -> Fans | None:
    """Return the fans of a score factor (within its D x D score matrix) or of a linear on the hidden states.

    None for other parameters, whose size does not depend on the width.
    """
    if isinstance(module, Mixer):
        mup, width = module.mup().get(leaf), module.shape.dim
        return Fans(mup.fan_in, mup.fan_out, width, width) if mup else None
    if isinstance(module, nn.Linear) and leaf == "weight":
        out, in_ = parameter.shape
        return Fans(in_, out, in_, out)
    return None


def select_parameters(model: nn.Module, trains: Iterable[str], roles: dict[str, tuple[str, ...]]) -> set[str]:
    """Return the names of the parameters that the selectors in `trains` match.

    A selector is "all", "new" (added by the conversion), a kind of PARAMETER_KINDS, a role of a linear, or a path with
    * and ?. roles: path -> roles. Where a mixer has no parameters (a softmax window), "new" selects the projections of
    its attention. Raises SurgeryError for a selector that matches nothing, except "mixers" next to others where the
    mixers have no parameters.
    """
    known = parameter_infos(model)
    bare = tuple(
        f"{path}." for path, module in mixer_modules(model) if not any(True for _ in module.mixer.parameters())
    )
    new_places = tuple(f"{path}." for path, module in model.named_modules() if is_new(module))
    found: set[str] = set()
    trains = tuple(trains)
    for word in trains:
        if word == "all":
            hit = set(known)
        elif word == "new":
            hit = {
                n for n, k in known.items() if k.kind in ("mixers", "adapters") or n.startswith((*new_places, *bare))
            }
        elif word in PARAMETER_KINDS:
            hit = {n for n, k in known.items() if k.kind == word}
        else:
            hit = {n for n in known if fnmatchcase(n, word) or fnmatchcase(n.rpartition(".")[0], word)}
            places = [p for p, r in roles.items() if _role_matches(r, word)]
            places += [matrix for p in places if (matrix := _joined_matrix(model, p))]
            hit |= {n for n in known if n.startswith(tuple(f"{p}." for p in places))} if places else set()
        if not hit and not (word == "mixers" and bare and len(trains) > 1):
            raise SurgeryError(_no_match_message(word, model, {k.kind for k in known.values()}, roles, bool(bare)))
        found |= hit
    return found


def _joined_matrix(model: nn.Module, path: str) -> str:
    """Return the path of the matrix of which the linear at `path` takes rows, "" if it is not one of joined linears or
    holds the matrix.
    """
    try:
        linear = model.get_submodule(path)
    except AttributeError:
        return ""
    base: Any = linear
    if hasattr(base, "get_base_layer"):  # of a PEFT adapter
        base = base.get_base_layer()
    return f"{sibling(path, base.first)}.joined" if isinstance(base, JoinedLinear) and base.first else ""


def _no_match_message(
    word: str, model: nn.Module, there: set[str], roles: dict[str, tuple[str, ...]], bare: bool
) -> str:
    name = type(model).__name__
    message = f"trains: {word!r} selects no parameter of {name}"
    stock = (  # which a model of the class does not show
        f" If a recipe stock-* wrote this {name}, name its layers in trains, as the recipe in docs/stock.md does."
        if name in {stock_class.name for stock_class in STOCK_CLASSES.values()}
        else ""
    )
    if word == "mixers" and bare:
        return (
            f"{message}, whose mixers have no parameters of their own. Use trains: [new], which selects the "
            "projections of their "
            "attention (recipe new-modules)."
        )
    if word == "mixers" and "structured" in there:
        return (
            f"{message}, whose attention was not converted. Use --recipe linears or new-modules, which train its "
            "structured linears."
        )
    if word == "structured" and (bare or "mixers" in there):
        return (
            f"{message}, whose linears were not converted. Use --recipe attention or new-modules, which train its "
            "attention."
        )
    if word == "gates":
        return (
            f"{message}, which has no Gated DeltaNet, Mamba-2 or Kimi delta attention layers. Recipe lambda and the kind gates are for "
            "models with such layers, after surgery convert SRC --recipe upgrade-log-linear --out OUT."
        )
    if word == "mixers" and "gates" in there:
        return (
            f"{message}, whose linear layers have no level weights. Convert it first: surgery convert SRC --recipe "
            f"upgrade-log-linear --out OUT, then train OUT.{stock}"
        )
    if word in ("structured", "mixers", "new") and not (bare or there & {"structured", "mixers"}):
        return (
            f"{message}, which has no structured linears and no mixers: it is not a converted model"
            f"{', or a stock one' if stock else ''}. Convert it first: surgery convert SRC --recipe btt-half --out OUT, "
            f"then train OUT.{stock}"
        )
    if word in (*PARAMETER_KINDS, "new"):
        return f"{message}, which has {', '.join(sorted(there))}. `surgery inspect` shows whether it was converted."
    return message + suggestion(
        word, [*PARAMETER_KINDS, "all", "new", *sorted({r for rs in roles.values() for r in rs})]
    )


def _role_matches(roles: tuple[str, ...], word: str) -> bool:
    return any(role == word or fnmatchcase(role, word) or role.startswith(f"{word}.") for role in roles)


def check_parameter_kinds(rates: Iterable[str]) -> None:
    """Raise SurgeryError unless all keys of `rates` are in PARAMETER_KINDS."""
    for kind in rates:
        if kind not in PARAMETER_KINDS:
            raise SurgeryError(f"rates: {kind!r} is not a kind of parameters{suggestion(kind, PARAMETER_KINDS)}")


def make_groups(model: nn.Module, names: set[str], stage: Any) -> list[ParameterGroup]:
    """Group the parameters in `names` by kind, rate and decay; parameters of rate 0 are left out. stage: a
    StageConfig.
    """
    return group_parameters(model, names, stage.optimiser, stage.rate, stage.rates)


def group_parameters(
    model: nn.Module, names: Collection[str], settings: OptimizerConfig, rate: float, rates: Mapping[str, float]
) -> list[ParameterGroup]:
    """Group the parameters in `names` by kind, rate and decay; parameters of rate 0 are left out.

    rate: base learning rate. rates: base rates of some kinds of parameters instead of it.
    """
    check_parameter_kinds(rates)
    known, groups = parameter_infos(model), dict[Any, ParameterGroup]()
    for name, parameter in model.named_parameters():
        if name not in names:
            continue
        kind, fans = known[name].kind, known[name].fans
        own_rate = rates.get(kind, rate) * _rate_factor(settings, kind, fans)
        decay = settings.weight_decay if kind in DECAYED_KINDS else 0.0
        group_fans = (fans.fan_in, fans.fan_out) if fans and _is_core(kind, fans) else None
        key = (kind, own_rate, decay, group_fans)
        group = groups.setdefault(key, ParameterGroup(*key))
        group.parameters.append(parameter)
        group.names.append(name)
    order = list(PARAMETER_KINDS)
    return sorted((g for g in groups.values() if g.rate > 0), key=lambda g: (order.index(g.kind), -g.rate))


def trainable_groups(
    model: nn.Module, settings: OptimizerConfig, rate: float, rates: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return the parameters with requires_grad as groups for a torch optimizer; rate, rates: as for `group_parameters`.

    Raises SurgeryError for rates that are no numbers, if nothing is left to train, and for base_width where experts are
    merged.
    """
    for name, value, least in (("rate", rate, "above 0"), *((f"rates: {k}", v, "0 or more") for k, v in rates.items())):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (value == 0 and least == "above 0"):
            raise SurgeryError(f"{name} must be a finite number, {least} (got {value!r}). Give for example 1e-4")
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if settings.base_width is not None and (merged := merged_experts(model)):
        raise SurgeryError(
            f"{merged[0][0]} holds the matrices of its experts in one tensor, to which base_width does not apply. "
            "Leave base_width out"
        )
    groups = group_parameters(model, names, settings, rate, rates)
    if not groups:
        why = "rates has 0 for all of them" if names else "all its parameters have requires_grad=False"
        raise SurgeryError(
            f"{type(model).__name__} has no parameters to train: {why}. Call requires_grad_(True) on those that shall "
            "be trained, "
            "and give their kinds rates above 0"
        )
    return [
        {"params": g.parameters, "lr": g.rate, "weight_decay": g.decay, "kind": g.kind, "names": g.names}
        for g in groups
    ]


def _is_core(kind: str, fans: Fans) -> bool:
    """Return whether the fans belong to a core of a structured linear or a factor of a score matrix."""
    return kind == "structured" or (kind == "mixers" and (fans.fan_in, fans.fan_out) != (fans.in_, fans.out))


def _rate_factor(settings: OptimizerConfig, kind: str, fans: Fans | None) -> float:
    if settings.rates == "same" or fans is None:
        return 1.0
    if settings.base_width is None and (fans.fan_in, fans.fan_out) == (fans.in_, fans.out):
        return 1.0
    if settings.rates == "dense":
        fans = Fans(fans.in_, fans.out, fans.in_, fans.out)
    return RATE_RULES[settings.name](fans, settings.base_width or fans.in_)


def make_optimizer(groups: list[ParameterGroup], settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Create the optimizer. Fused variants skip steps with NaN or infinite gradients on the device (see guard.py)."""
    param_groups = [{"params": g.parameters, "lr": g.rate, "peak": g.rate, "weight_decay": g.decay} for g in groups]
    if settings.name == "adamw":
        return torch.optim.AdamW(param_groups, betas=settings.betas, eps=settings.eps, fused=True)
    if settings.name == "adamw8bit":
        eight_bit: torch.optim.Optimizer = adamw8bit_class()(param_groups, betas=settings.betas, eps=settings.eps)
        return eight_bit
    if settings.name == "sgd":
        return torch.optim.SGD(param_groups, lr=groups[0].rate, momentum=settings.momentum, fused=True)
    return SignSGD(param_groups, momentum=settings.momentum)


def adamw8bit_class() -> Any:
    """Return torchao's AdamW with states of 8 bits in blocks of 256 values (Dettmers et al. 2022, "8-bit Optimizers via
    Block-wise Quantization"). Raises SurgeryError without torchao.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise SurgeryError(
            f"optimiser.name adamw8bit needs the package torchao. Run {install_command('torchao')}, or use adamw."
        ) from error
    return AdamW8bit


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of an optimizer's parameter group; torchao's optimizers keep it in a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


class SignSGD(torch.optim.Optimizer):
    """Sign descent with momentum (Bernstein et al. 2018) and decoupled weight decay.

    p -= rate * sign(m), m: moving average of the gradients
    """

    found_inf: Tensor | None = None

    def __init__(self, params: Any, momentum: float):
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters with a gradient; `closure` is not used."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                step_scale: Any = 1.0 if self.found_inf is None else 1.0 - self.found_inf
                gradient = p.grad if self.found_inf is None else torch.where(self.found_inf > 0, mean, p.grad)
                mean.lerp_(gradient, 1 - group["momentum"])
                p.sub_((mean.sign() + group["weight_decay"] * p) * (group["lr"] * step_scale))
