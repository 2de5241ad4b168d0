"""Location of a model's linears: their layers and roles, by the architecture of a known family, otherwise by path
alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from surgery.architectures import Architecture, FusedLinear
from surgery.architectures.experts import (
    MergedExperts,
    RoutedExperts,
    describe_merged_experts,
    experts_per_token,
    merged_experts,
)
from surgery.architectures.towers import architecture_at, is_repeated_layer, text_architecture, tower_name
from surgery.core.errors import SurgeryError


@dataclass(frozen=True)
class LinearInfo:
    """One linear of a model. layer: path of its layer, "" outside the layers; index, count: number of its layer, and of
    layers in that list.

    experts, expert: of a routed expert's linear the path of its RoutedExperts and its index there; "" and 0 of other
    linears. active: fraction of the tokens that the linear computes, k / E for one of E experts, otherwise 1. router:
    whether the linear decides on experts or scales their outputs; it is replaced only by a rule that names it.
    """

    path: str
    roles: tuple[str, ...]
    layer: str
    index: int | None
    count: int
    out: int
    in_: int
    bias: bool
    transposed: bool  # Conv1D stores (in, out)
    fused: FusedLinear | None = None
    residual: str = ""  # module of the layer whose input is the residual stream this output is added to
    known: bool = False  # whether an architecture lists the linears of its layer
    tower: str = ""  # see surgery.architectures.towers
    experts: str = ""
    expert: int = 0
    active: float = 1.0
    router: bool = False


@dataclass(frozen=True)
class ModelLayout:
    """All linears of a model. layers: paths in order of execution; head: path of the output projection, or "".

    architecture: of the text tower, if the model has towers. towers: the tower of each layer, also of those that a plan
    leaves out of `layers`; "" in a model without towers. merged: modules with merged experts, whose matrices are not
    among the linears and stay dense. held: path -> why this linear of a layer is not among them either and stays dense.
    """

    architecture: Architecture | None
    layers: tuple[str, ...]
    linears: tuple[LinearInfo, ...]
    head: str
    towers: Mapping[str, str] = field(default_factory=dict)
    merged: tuple[MergedExperts, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)

    def tower(self, path: str) -> str:
        """Return the tower of a layer, or of the layer that contains a module."""
        return self.towers.get(path) or next((t for p, t in self.towers.items() if path.startswith(f"{p}.")), "")


def find_linears(model: Any) -> ModelLayout:
    """Return the layout of a transformers model. Its parameters may be on meta."""
    lists = _layer_lists(model)
    if not lists:
        raise SurgeryError(
            f"{type(model).__name__} has no ModuleList of layers that contain linears, which surgery needs"
        )
    text = text_architecture(model)
    architecture = text if text is not None and any(known is text for *_, known in lists) else None
    head = _head_path(model, architecture)
    towers: dict[str, str] = {}
    linears: list[LinearInfo] = []
    for path, stack, known in lists:
        tower = tower_name(model, path)
        for i, layer in enumerate(stack):
            towers[f"{path}.{i}"] = tower
            layer_linears = _layer_linears(layer, f"{path}.{i}", i, len(stack), known)
            layer_linears = [replace(linear, known=known is not None, tower=tower) for linear in layer_linears]
            linears += _with_routing(layer, f"{path}.{i}", layer_linears, experts_per_token(model.config))
    for path, module in model.named_modules():
        if is_linear(module) and not any(path.startswith(layer + ".") for layer in towers):
            linear = _linear_info(module, path, ("head",) if path == head else (), "", None, 0)
            linears.append(replace(linear, known=architecture is not None))
    merged, held = tuple(describe_merged_experts(model)), _held_linears(model, linears)
    free = tuple(linear for linear in linears if linear.path not in held)
    return ModelLayout(architecture, tuple(towers), free, head, towers, merged, held)


def _held_linears(model: Any, linears: list[LinearInfo]) -> dict[str, str]:
    """Return path -> reason of the linears of layers that must keep a weight: those that a forward reads without calling
    the linear (dt_proj of Mamba), and those that are tied to a linear of another layer (the shared blocks of Zamba2).
    """
    inside = {linear.path for linear in linears if linear.layer}
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    held: dict[str, str] = {}
    for names in tied.items():
        twins = [name.removesuffix(".weight") for name in names]
        if set(twins) <= inside:
            held |= dict.fromkeys(twins, "layers share them")
    for path in sorted(inside - held.keys()):
        parent, _, name = path.rpartition(".")
        kind: Any = type(model.get_submodule(parent))
        if _reads_weight(kind, name):
            held[path] = f"{kind.__name__} reads their weights without calling them"
    return held


@cache
def _reads_weight(kind: Any, name: str) -> bool:
    """Return whether a class of transformers computes with `self.NAME.weight` itself."""
    if not kind.__module__.startswith("transformers.models."):
        return False
    weight = rf"self\.{re.escape(name)}\.weight"
    product = rf"{weight}(\.T|\.t\(\))?\s*@|@\s*{weight}|linear\([^()]*{weight}"
    return (
        re.search(rf"{product}|{weight}\.(unsqueeze|chunk|reshape|view|t|type)\(", inspect.getsource(kind)) is not None
    )


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is an nn.Linear, a subclass of it in transformers with the same forward, or transformers'
    Conv1D.

    Other subclasses, such as those of quantization and of LoRA, compute something else with their weights.
    """
    kind: Any = type(module)
    return kind is nn.Linear or kind.__name__ == "Conv1D" or (issubclass(kind, nn.Linear) and _computes_a_linear(kind))


@cache
def _computes_a_linear(kind: Any) -> bool:
    """Return whether a subclass of nn.Linear in transformers (FalconLinear, for example) returns x W^T + b, judged by
    one product.
    """
    if not kind.__module__.startswith("transformers.models."):
        return False
    module = kind.__new__(kind)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        nn.Linear.__init__(module, 3, 2, dtype=torch.float64)
        x = torch.randn(4, 3, dtype=torch.float64)
        try:
            return bool(torch.allclose(module(x), nn.functional.linear(x, module.weight, module.bias)))
        except Exception:  # code of any family, which may read other parameters or return a tuple
            return False


def _linear_info(
    module: Any, path: str, roles: tuple[str, ...], layer: str, index: int | None, count: int
) -> LinearInfo:
    transposed = not isinstance(module, nn.Linear)
    out, in_ = reversed(module.weight.shape) if transposed else module.weight.shape
    return LinearInfo(path, roles, layer, index, count, out, in_, module.bias is not None, transposed)


def _layer_linears(
    layer: nn.Module, prefix: str, index: int, count: int, architecture: Architecture | None
) -> list[LinearInfo]:
    known: dict[str, tuple[tuple[str, ...], FusedLinear | None, str]] = {}
    for path, roles, fused, residual in architecture.linears() if architecture else ():
        known.setdefault(path, (roles, fused, residual))
    linears = []
    for path, module in layer.named_modules():
        if not is_linear(module):
            continue
        roles, fused, residual = known.get(path, ((), None, ""))
        base = _linear_info(module, f"{prefix}.{path}", roles, prefix, index, count)
        linears.append(LinearInfo(**{**base.__dict__, "fused": fused, "residual": residual}))
    return linears


def _with_routing(layer: nn.Module, prefix: str, linears: list[LinearInfo], selected: int | None) -> list[LinearInfo]:
    """Return a layer's linears with the roles of experts and with routers marked. selected: experts of a token, if
    known.
    """
    routed = {path: m for path, m in layer.named_modules() if isinstance(m, RoutedExperts)}
    blocks = {path.rpartition(".")[0] for path in routed} | {
        path.rpartition(".")[0] for path, _ in merged_experts(layer)
    }
    adjusted = []
    for linear in linears:
        path = linear.path[len(prefix) + 1 :]
        parent, _, name = path.rpartition(".")
        experts, _, index = parent.rpartition(".")
        if experts in routed:
            module = routed[experts]
            role = module.names.roles()[name]
            active = min(1.0, (selected or module.num_experts) / module.num_experts)
            linear = replace(
                linear, roles=(role,), experts=f"{prefix}.{experts}", expert=int(index), active=active, residual=""
            )
        elif parent in blocks:  # beside the experts: a router, or the gate of a shared expert
            linear = replace(linear, roles=(), fused=None, residual="", router=True)
        adjusted.append(linear)
    return adjusted


def _known_layer_lists(model: nn.Module, architecture: Architecture) -> list[tuple[str, nn.ModuleList]]:
    """Return the ModuleLists at the architecture's paths, one of whose layers has the output projection of an attention."""
    lists = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        if not any(path == end or path.endswith(f".{end}") for end in architecture.layers):
            continue
        inside = {name for layer in module for name, m in layer.named_modules() if is_linear(m)}
        needed = [p for p, roles, _, _ in architecture.linears() if {"attention.output", "linear.output"} & set(roles)]
        if inside & set(needed):
            lists.append((path, module))
    return lists


def _layer_lists(model: Any) -> list[tuple[str, nn.ModuleList, Architecture | None]]:
    """Return (path, list of layers, its architecture or None) of every stack, in the order of the modules."""
    towers: dict[Architecture | None, None] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            towers.setdefault(architecture_at(model, path))
    known: dict[str, tuple[nn.ModuleList, Architecture | None]] = {}
    for architecture in towers:
        for path, stack in _known_layer_lists(model, architecture) if architecture else ():
            if architecture_at(model, path) is architecture:
                known[path] = (stack, architecture)
    for path, stack in _guess_layer_lists(model):
        owned = architecture_at(model, path)
        if owned is None or not any(architecture is owned for _, architecture in known.values()):
            known.setdefault(path, (stack, None))
    order = [path for path, _ in model.named_modules() if path in known]
    return [(path, *known[path]) for path in order]


def _guess_layer_lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return the outermost ModuleLists that contain linears and whose layers have one class, or are layers of
    transformers.

    If some are layers of transformers (GradientCheckpointingLayer), the other lists of their tower are parts of another
    kind, for example projections between towers, and are left out.
    """
    lists: list[tuple[str, nn.ModuleList]] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(p + ".") for p, _ in lists):
            continue
        alike = len({type(layer) for layer in module}) == 1 or all(map(is_repeated_layer, module))
        if len(module) and alike and any(is_linear(m) for m in module.modules()):
            lists.append((path, module))
    repeated = {tower_name(model, path) for path, stack in lists if all(map(is_repeated_layer, stack))}
    return [
        (path, stack)
        for path, stack in lists
        if tower_name(model, path) not in repeated or all(map(is_repeated_layer, stack))
    ]


def _head_path(model: Any, architecture: Architecture | None) -> str:
    paths = dict(model.named_modules())
    for candidate in architecture.head.split("|") if architecture else ():
        if is_linear(paths.get(candidate, nn.Identity())):
            return candidate
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or not is_linear(head):
        return ""
    return next((path for path, module in paths.items() if module is head), "")
