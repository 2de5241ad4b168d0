"""The choices of a search: what each layer's attention, projections and MLP may become, and what each choice costs.

    part            choices
    attention       softmax as it is; a window; MLR attention at several shares of the key cache; log-linear attention;
                    dropped, with its projections
    projections     query, key, value and output projection: dense; low rank at several shares of the parameters
    mlp             dense; fewer neurons, low rank, BTT, at several shares of the parameters; dropped
    experts         routed experts: dense; fewer neurons, low rank with a basis each or one for all, at several shares
    all of these    the layer is removed
    all experts     fewer experts, the same number in each layer, which config.json says

A kind of choice is a fragment of a recipe, so that costs come from the plan of that recipe, and a conversion by the
fragments of several kinds has the sum of their costs. Costs are differences from the original: `parameters` and `bytes`
that the checkpoint stores, `cache` in bytes of one sequence after `at` tokens, `macs`, multiply-accumulates of the next
token, and with a device `decode` and `prefill` in nanoseconds (surgery/budget/times.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from surgery.architectures.attention import attention_paths, attention_shape
from surgery.architectures.experts import RoutedExperts
from surgery.architectures.linears import LinearInfo
from surgery.budget.times import PHASES, Device
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import DTYPES
from surgery.conversion.mixer_init.base import build_mixer
from surgery.core.errors import SurgeryError
from surgery.mixers import AttentionShape, MixerConfig
from surgery.mixers.cache_size import cache_bytes
from surgery.mixers.none import NoAttention
from surgery.modeling.modules import build_module, quantized_entry
from surgery.modeling.quantize import make_storage
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.depth import plan_depth
from surgery.planning.depth_recipe import DepthRecipe
from surgery.planning.fewer_experts import with_fewer_experts
from surgery.planning.plan import make_plan
from surgery.planning.recipe import ConversionRecipe, load_recipe, validate_recipe
from surgery.planning.targets import LinearTarget, Plan
from surgery.planning.weights import narrowed_entries, table_entry
from surgery.publish.summary import compare_costs, softmax_macs
from surgery.structures import STRUCTURES
from surgery.structures.dropped import Dropped
from surgery.structures.quantized import Storage

ATTENTION, PROJECTIONS, MLP, EXPERTS = "attention", "projections", "mlp", "experts"  # the parts of a layer
PATTERNS = {PROJECTIONS: "attention.*", MLP: "mlp.*", EXPERTS: "expert.*"}  # of the rules of parts made of linears
STORED_IN_BITS = (PROJECTIONS, MLP)  # parts that `surgery quantize` stores in fewer bits
AS_IS = "as it is"  # the choice that leaves a part unchanged
REMOVED = "removed"  # the choice that removes a layer
DROPPED = "dropped"  # the choice that drops the attention of a layer, or its MLP
COSTS = ("parameters", "bytes", "cache", "macs")
FULL_BITS = 16  # weights that keep their dtype


@dataclass(frozen=True)
class Counting:
    """What is counted. at: tokens of a sequence whose cache, multiply-accumulates and times count. device: whose times
    count too, None without.
    """

    at: int
    device: Device | None = None


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of choice. part: of a layer. family: kinds whose damage heals alike, such as low_rank. settings: of the
    rule of a recipe, without its layers.
    """

    name: str
    part: str
    family: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name with the part of a layer, such as "mlp pruned 50%", as `--only` reads it."""
        return f"{self.part} {self.name}"

    @property
    def number(self) -> int | None:
        """The number of experts that stay in each layer, None for other kinds."""
        return self.settings.get("experts")

    def fragment(self) -> dict[str, Any]:
        """Return the keys of a recipe that gives every layer this choice."""
        if self.number is not None:
            return {"structure": "dense", "experts": self.number}
        if self.part == ATTENTION and "cache" in self.settings:
            mixer = {"mixer": self.settings["mixer"], "rules": [{"layers": ":", **self.settings}]}
            return {"structure": "dense", "attention": mixer}
        if self.part == ATTENTION:
            return {"structure": "dense", "attention": dict(self.settings)}
        return {"structure": "dense", "rules": [{"match": PATTERNS[self.part], **self.settings}]}


def shipped_mixer(recipe: str) -> dict[str, Any]:
    """Return the mixer and its options of a shipped recipe."""
    attention = load_recipe(recipe).attention
    assert attention is not None
    return {"mixer": attention.mixer, **(attention.model_extra or {})}


def linear_kinds(part: str, structure: str, shares: Iterable[float]) -> list[Kind]:
    """Return the kinds of a structure at several shares of the parameters."""
    return [
        Kind(f"{structure} {share:.0%}", part, structure, {"structure": structure, "keep": share}) for share in shares
    ]


SHARES = (0.75, 0.5, 0.25)  # of the parameters of a part
CACHES = (0.6, 0.4)  # shares of the key cache of MLR attention


def default_kinds() -> list[Kind]:
    """Return all kinds of choices but the removal of layers."""
    return [
        Kind("window", ATTENTION, "window", shipped_mixer("sliding-window")),
        *(Kind(f"mlr {share:.0%}", ATTENTION, "mlr", {"mixer": "mlr", "cache": share}) for share in CACHES),
        Kind("log-linear", ATTENTION, "log_linear", shipped_mixer("log-linear")),
        Kind(DROPPED, ATTENTION, DROPPED, {"mixer": NoAttention.name}),
        *linear_kinds(PROJECTIONS, "low_rank", SHARES),
        *(kind for structure in ("pruned", "low_rank", "btt") for kind in linear_kinds(MLP, structure, SHARES)),
        Kind(DROPPED, MLP, DROPPED, {"structure": Dropped.name}),
    ]


def expert_kinds(model: MetaModel) -> list[Kind]:
    """Return the kinds of choices of routed experts, [] for a model without any."""
    counts = {module.num_experts for module in model.model.modules() if isinstance(module, RoutedExperts)}
    if len(counts) != 1:
        return []
    count = counts.pop()
    shared = {"structure": "low_rank", "share": "experts"}
    numbers = dict.fromkeys(round(share * count) for share in SHARES)
    return [
        *(kind for structure in ("pruned", "low_rank") for kind in linear_kinds(EXPERTS, structure, SHARES)),
        *(Kind(f"shared basis {s:.0%}", EXPERTS, "shared_basis", {**shared, "keep": s}) for s in SHARES),
        *(Kind(f"{number} of {count}", EXPERTS, "fewer_experts", {"experts": number}) for number in numbers),
    ]


@dataclass(frozen=True)
class Choice:
    """One choice of one layer, or of all layers that have experts. covers: names of the parts that it decides. kind: None for the removal of the layer and
    for a part that stays as it is. costs: by name, differences from the original.
    """

    layer: str
    covers: tuple[str, ...]
    name: str
    kind: Kind | None = None
    costs: Mapping[str, int] = field(default_factory=dict)
    bits: int = FULL_BITS

    @property
    def key(self) -> str:
        """The name of the choice in the table."""
        stored = "" if self.bits == FULL_BITS else f", {self.bits} bits"
        return f"{self.layer if self.name == REMOVED else self.covers[0]}: {self.name}{stored}"

    @property
    def part(self) -> str:
        """The part of the layer that it decides; "" for the removal of the layer."""
        return self.covers[0].removeprefix(f"{self.layer} ") if self.name != REMOVED else ""

    @property
    def rounding(self) -> str:
        """The key of the choice that stores the unchanged part in these bits, whose damage is added."""
        return f"{self.covers[0]}: {AS_IS}, {self.bits} bits"

    @property
    def is_measured(self) -> bool:
        """Whether the table has its damage; that of a changed part in fewer bits is a sum of two."""
        return self.is_change and (self.bits == FULL_BITS or self.name == AS_IS)

    @property
    def title(self) -> str:
        """The name of its kind with the part that it changes, such as "mlp pruned 50%", or "mlp in 4 bits"."""
        if self.name == AS_IS:
            return f"{self.part} in {self.bits} bits"
        stored = "" if self.bits == FULL_BITS else f", {self.bits} bits"
        return f"{self.part or 'layer'} {self.name}{stored}"

    @property
    def family(self) -> str:
        """The kinds of choices whose damage heals alike; "" for a part whose structure stays."""
        return self.kind.family if self.kind else (REMOVED if self.name == REMOVED else "")

    @property
    def families(self) -> frozenset[str]:
        """The families of its structure and of its bits."""
        stored = () if self.bits == FULL_BITS else (f"{self.bits} bits",)
        return frozenset((*((self.family,) if self.family else ()), *stored))

    @property
    def number(self) -> int | None:
        """The number of experts that stay in each layer, None for other choices."""
        return None if self.kind is None else self.kind.number

    @property
    def is_change(self) -> bool:
        """Whether the choice changes the model."""
        return self.name != AS_IS or self.bits != FULL_BITS


@dataclass
class Choices:
    """All choices of a model.

    plans: of each kind, by its name and part, with all layers. base: costs of the original. choices: in the order of
    layers. notes: kinds that are left out, and why. layers: the layers in order. numbers: of layers with linears or
    attention, as rules of recipes count them. removable: the layers of the decoder in order, as `depth` counts them; ()
    if layers cannot be removed.
    """

    kinds: list[Kind]
    plans: dict[tuple[str, str], Plan]
    base: dict[str, int]
    choices: list[Choice]
    notes: list[str]
    layers: tuple[str, ...]
    removable: tuple[str, ...]
    attention: tuple[str, ...]

    @property
    def plan(self) -> Plan:
        """A plan of the model with all its experts."""
        return next(plan for plan in self.plans.values() if plan.experts is None)


def part_name(layer: str, part: str) -> str:
    """Return the name of a part of a layer."""
    return f"{layer} {part}"


def find_choices(
    model: MetaModel,
    settings: Mapping[str, Any],
    kinds: Sequence[Kind],
    counting: Counting,
    is_wanted: Callable[[str], bool] = lambda title: True,
) -> Choices:
    """Return the choices of a model.

    settings: keys that all recipes have, such as the calibration text. is_wanted: whether `--only` selects a title. A kind
    that does not suit the model is left out, with a note if it is wanted. Raises SurgeryError if no kind is left.
    """
    plans: dict[tuple[str, str], Plan] = {}
    unsuitable, left_out = "", dict[str, list[str]]()  # reason -> titles
    for kind in kinds:
        try:
            plans[kind.part, kind.name] = make_plan(model, kind_recipe(kind, settings))
        except SurgeryError as error:
            unsuitable = f"{kind.title} is left out: {error}"
            if is_wanted(kind.title):
                left_out.setdefault(str(error), []).append(kind.title)
    notes = [
        f"{', '.join(titles)} {'is' if len(titles) == 1 else 'are'} left out: {reason}"
        for reason, titles in left_out.items()
    ]
    left = [kind for kind in kinds if (kind.part, kind.name) in plans]
    if all(kind.number is not None for kind in left):
        raise SurgeryError(f"search: no kind of choice suits this model. {unsuitable}")
    plan = next(plan for plan in plans.values() if plan.experts is None)
    fewer = [kind for kind in left if kind.number is not None]
    shapes = {path: attention_shape(model.model, path) for path in attention_paths(model.model)}
    layer_of = {path: next(n for n in plan.layout.layers if path.startswith(f"{n}.")) for path in shapes}
    counted = LayerCosts(model, plan.dtype, counting)
    at = counting.at
    base = {
        "parameters": sum(tensor.numel for tensor in model.source.tensors.values()),
        "bytes": model.source.nbytes,
        "cache": sum(cache_bytes(None, shape, at, plan.dtype) for shape in shapes.values()),
        "macs": sum(round(n.out * n.in_ * n.active) for n in plan.layout.linears)
        + sum(softmax_macs(shape, at) for shape in shapes.values()),
    }
    base |= counted.times_of(plan.layout.linears, shapes.values())
    choices: list[Choice] = []
    removable, note = removable_layers(model, plan)
    notes += [note] if note and is_wanted(f"layer {REMOVED}") else []
    attention_in = {layer: path for path, layer in layer_of.items()}
    for layer in plan.layout.layers:
        found: list[Choice] = []
        for kind in (kind for kind in left if kind.number is None):
            costs = counted.of_kind(plans[kind.part, kind.name], kind, layer)
            if costs is not None:
                covers = tuple(
                    part_name(layer, part) for part in covered_parts(plans[kind.part, kind.name], kind, layer)
                )
                found.append(Choice(layer, covers, kind.name, kind, costs))
        parts = list(dict.fromkeys(part for choice in found for part in choice.covers))
        if fewer and part_name(layer, EXPERTS) not in parts:  # fewer experts exclude the removal of any layer
            parts.append(part_name(layer, EXPERTS))
        choices += [Choice(layer, (part,), AS_IS) for part in parts]
        choices += found
        if parts and layer in removable[1:]:
            shape = shapes.get(attention_in.get(layer, ""))
            costs = counted.of_layer(plan, layer, shape)
            choices.append(Choice(layer, tuple(parts), REMOVED, None, costs))
    every = tuple(part_name(layer, EXPERTS) for layer in plan.layout.layers)
    for kind in fewer:
        costs = counted.of_fewer_experts(plans[kind.part, kind.name])
        choices.append(Choice(plan.layout.layers[0], every, kind.name, kind, costs))
    return Choices(left, plans, base, choices, notes, plan.layout.layers, removable, tuple(layer_of.values()))


def with_bits(choices: Choices, model: MetaModel, bits: Sequence[int], counting: Counting) -> list[Choice]:
    """Return the choices, and those of parts of linears once more for each number of bits."""
    plans = choices.plans
    targets: dict[tuple[str, str], list[LinearTarget]] = {}  # of the unchanged linears of a part
    for (part, _), plan in plans.items():
        for target in (target for slices in plan.targets.values() for target in slices if part in STORED_IN_BITS):
            known = targets.setdefault((target.linear.layer, part), [])
            paths = {one.linear.path for one in known}
            known += [LinearTarget(n, n.out, 1.0, ()) for n in target.all_linears if n.path not in paths]
    counted = LayerCosts(model, next(iter(plans.values())).dtype, counting)
    found: list[Choice] = []
    for choice in choices.choices:
        found.append(choice)
        if choice.part not in STORED_IN_BITS or (choice.layer, choice.part) not in targets or choice.name == DROPPED:
            continue
        unchanged = targets[choice.layer, choice.part]
        changed = [] if choice.kind is None else kind_targets(plans[choice.kind.part, choice.kind.name], choice.layer)
        inside = {linear.path for target in changed for linear in target.all_linears}
        both = [*changed, *(target for target in unchanged if target.linear.path not in inside)]
        for number in bits:
            costs = counted.of_linears(both, make_storage(number))
            found.append(replace(choice, costs={**costs, "macs": choice.costs.get("macs", 0)}, bits=number))
    return found


def covered_parts(plan: Plan, kind: Kind, layer: str) -> tuple[str, ...]:
    """Return the parts of a layer that a kind of choice decides: where attention is dropped, the projections too."""
    drops = kind.part == ATTENTION and bool(kind_targets(plan, layer))
    return (ATTENTION, PROJECTIONS) if drops else (kind.part,)


def kind_targets(plan: Plan, layer: str) -> list[LinearTarget]:
    """Return the targets of a plan in one layer that get a structure."""
    return [t for slices in plan.targets_in_layer(layer).values() for t in slices if t.preview is not None]


def kind_recipe(kind: Kind, settings: Mapping[str, Any]) -> ConversionRecipe:
    """Return the recipe that gives every layer a kind of choice."""
    return validate_recipe({**settings, **kind.fragment()}, f"of the search for {kind.name}")


def removable_layers(model: MetaModel, plan: Plan) -> tuple[tuple[str, ...], str]:
    """Return (the layers of the decoder in order, "") or ((), why none can be removed)."""
    try:
        depth = plan_depth(DepthRecipe(remove=(1,), refit=False), model, plan.layout)
    except SurgeryError as error:
        return (), f"the removal of layers is left out: {error}"
    return tuple(depth.stack.layer(index) for index in range(depth.stack.count)), ""


class LayerCosts:
    """Costs of the choices of a model. dtype: in which it loads."""

    def __init__(self, model: MetaModel, dtype: torch.dtype, counting: Counting):
        self.model, self.dtype, self.at, self.device = model, dtype, counting.at, counting.device

    def of_kind(self, plan: Plan, kind: Kind, layer: str) -> dict[str, int] | None:
        """Return the costs of a kind in one layer, None if the layer has no such part."""
        targets = kind_targets(plan, layer)
        if kind.part == ATTENTION:
            target = plan.attention_targets.get(layer)
            if target is None:
                return None
            of_projections, of_mixer = self.of_linears(targets), self.of_mixer(target)
            return {name: of_mixer[name] + cost for name, cost in of_projections.items()}
        return self.of_linears(targets) if targets else None

    def of_mixer(self, target: AttentionTarget) -> dict[str, int]:
        """Return the costs of a mixer in place of softmax attention."""
        state = build_mixer(target, torch.device("meta")).state_dict().values()
        stored = DTYPES[self.model.tensor_info(f"{target.output}.weight").dtype]
        costs = compare_costs(target.config, target.shape, self.at, self.dtype)
        cache, macs = (after - before for before, after in (costs["cache_bytes"], costs["macs"]))
        return {
            "parameters": sum(tensor.numel() for tensor in state),
            "bytes": sum(stored_bytes(tensor, stored) for tensor in state),
            "cache": cache,
            "macs": macs,
            **self.attention_times(target.config, target.shape),
        }

    def times_of(self, linears: Iterable[LinearInfo], shapes: Iterable[AttentionShape]) -> dict[str, int]:
        """Return the times of dense linears and softmax attention by phase, {} without a device."""
        times: dict[str, int] = {}
        linears, shapes = list(linears), list(shapes)
        for phase in PHASES if self.device is not None else ():
            assert self.device is not None
            times[phase] = sum(
                self.device.linear_ns(
                    phase, (n.out, n.in_), None, n.out * n.in_, last="head" in n.roles, active=n.active
                )
                for n in linears
            ) + sum(self.device.attention_ns(phase, None, shape, self.dtype) for shape in shapes)
        return times

    def attention_times(self, config: MixerConfig, shape: AttentionShape) -> dict[str, int]:
        """Return the differences of times of a mixer from softmax attention, {} without a device."""
        if self.device is None:
            return {}
        device = self.device
        return {
            phase: device.attention_ns(phase, config, shape, self.dtype)
            - device.attention_ns(phase, None, shape, self.dtype)
            for phase in PHASES
        }

    def structure_times(self, target: LinearTarget) -> dict[str, int]:
        """Return the differences of times of a target's structure from its dense linears, {} without a device."""
        config: Any = target.preview
        if self.device is None or config is None:
            return {}
        before, active = self.times_of(target.all_linears, ()), target.linear.active
        if target.neurons:
            narrow = narrowed_entries(target, config)
            sizes = [(entry["out_features"], entry["in_features"]) for entry in narrow.values()]
            after = {
                phase: sum(self.device.linear_ns(phase, size, None, math.prod(size), active=active) for size in sizes)
                for phase in PHASES
            }
        else:
            size, params = (target.out, target.in_), target.structure_params(config) + len(target.joined)
            if not params:  # a dropped matrix
                return {phase: -before[phase] for phase in PHASES}
            after = {
                phase: self.device.linear_ns(phase, size, config.to_dict(), params, active=active) for phase in PHASES
            }
        return {phase: after[phase] - before[phase] for phase in PHASES}

    def of_linears(self, targets: Sequence[LinearTarget], storage: Storage | None = None) -> dict[str, int]:
        """Return the costs of structures in place of linears; a target without a structure stays dense. storage: of the
        integers that they are stored as, None if they keep their dtype.
        """
        costs = dict.fromkeys((*COSTS, *(PHASES if self.device is not None else ())), 0)
        for target in targets:
            for phase, change in self.structure_times(target).items():
                costs[phase] += change
            config: Any = target.preview
            if target.stores_basis:
                basis = target.basis_params()
                stored = DTYPES[self.model.tensor_info(f"{target.linear.path}.weight").dtype]
                costs["parameters"] += basis
                costs["bytes"] += basis * stored.itemsize
            entries = narrowed_entries(target, config) if target.neurons else {}
            for linear in target.all_linears:
                entry = entries.get(linear.path) or table_entry(target, config)
                names = ["weight", *(["bias"] if linear.bias and target.neurons else [])]
                before = [self.model.tensor_info(f"{linear.path}.{name}") for name in names]
                stored = DTYPES[before[0].dtype]
                costs["parameters"] -= sum(info.numel for info in before)
                costs["bytes"] -= sum(info.nbytes for info in before)
                plain = weights_of(entry, bool(target.neurons))
                costs["parameters"] += sum(tensor.numel() for tensor in plain)
                kept = plain if storage is None else weights_of(quantized_entry(entry, storage), bool(target.neurons))
                costs["bytes"] += sum(stored_bytes(tensor, stored) for tensor in kept)
            if config is not None:
                structure = STRUCTURES[config](target.in_, target.out, config, bias=False, device="meta")
                costs["macs"] += round((target.macs(structure) - target.numel) * target.linear.active)
        return costs

    def of_fewer_experts(self, plan: Plan) -> dict[str, int]:
        """Return the costs of a plan with fewer experts in each layer; a token is routed to as many as before."""
        experts = plan.experts
        assert experts is not None
        fewer = with_fewer_experts(self.model, experts).source
        before = [n for n in experts.layout.linears if n.experts]
        after = [
            replace(n, active=n.active * experts.stack.count / experts.number)
            for n in before
            if n.expert < experts.number
        ]
        times = [self.times_of(linears, ()) for linears in (before, after)]
        return {
            "parameters": sum(t.numel for t in fewer.tensors.values())
            - sum(t.numel for t in self.model.source.tensors.values()),
            "bytes": fewer.nbytes - self.model.source.nbytes,
            "cache": 0,
            "macs": -experts.macs,
            **{phase: times[1][phase] - times[0][phase] for phase in times[0]},
        }

    def of_layer(self, plan: Plan, layer: str, shape: Any) -> dict[str, int]:
        """Return the costs of the removal of a layer. shape: of its attention, None without."""
        inside = [self.model.tensor_info(name) for name in self.model.keys if name.startswith(f"{layer}.")]
        linears = [linear for linear in plan.layout.linears if linear.layer == layer]
        macs = sum(round(n.out * n.in_ * n.active) for n in linears)
        times = self.times_of(linears, () if shape is None else (shape,))
        cache = 0 if shape is None else cache_bytes(None, shape, self.at, self.dtype)
        return {
            "parameters": -sum(info.numel for info in inside),
            "bytes": -sum(info.nbytes for info in inside),
            "cache": -cache,
            "macs": -macs - (0 if shape is None else softmax_macs(shape, self.at)),
            **{phase: -time for phase, time in times.items()},
        }


def weights_of(entry: dict[str, Any], with_bias: bool) -> list[torch.Tensor]:
    """Return the tensors of a table entry, on meta; with_bias: whether its bias is among them."""
    return [tensor for name, tensor in build_module(entry).state_dict().items() if with_bias or name != "bias"]


def stored_bytes(tensor: torch.Tensor, stored: torch.dtype) -> int:
    """Return the bytes of a tensor in a file whose floating-point numbers have the dtype `stored`."""
    return tensor.numel() * (stored.itemsize if tensor.is_floating_point() else tensor.itemsize)
