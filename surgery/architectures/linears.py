"""Location of a model's linears: their layers and roles, by the architecture of a known family, otherwise by path alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from surgery.architectures import Architecture, FusedLinear, get_architecture
from surgery.core.errors import SurgeryError


@dataclass(frozen=True)
class LinearInfo:
    """One linear of a model. layer: path of its layer, "" outside the layers; index, count: number of its layer, and of layers in that list."""

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


@dataclass(frozen=True)
class ModelLayout:
    """All linears of a model. layers: paths in order of execution; head: path of the output projection, or ""."""

    architecture: Architecture | None
    layers: tuple[str, ...]
    linears: tuple[LinearInfo, ...]
    head: str


def find_linears(model: Any) -> ModelLayout:
    """Return the layout of a transformers model. Its parameters may be on meta."""
    architecture = get_architecture(model.config.model_type)
    lists = _known_layer_lists(model, architecture) if architecture else []
    if not lists:
        architecture, lists = None, _guess_layer_lists(model)
    if not lists:
        raise SurgeryError(
            f"{type(model).__name__} has no ModuleList of layers that contain linears, which surgery needs"
        )
    head = _head_path(model, architecture)
    layers: list[str] = []
    linears: list[LinearInfo] = []
    for path, stack in lists:
        for i, layer in enumerate(stack):
            layers.append(f"{path}.{i}")
            linears += _layer_linears(layer, f"{path}.{i}", i, len(stack), architecture)
    for path, module in model.named_modules():
        if is_linear(module) and not any(path.startswith(layer + ".") for layer in layers):
            linears.append(_linear_info(module, path, ("head",) if path == head else (), "", None, 0))
    return ModelLayout(architecture, tuple(layers), tuple(linears), head)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is an nn.Linear (no subclass) or transformers' Conv1D."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _linear_info(
    module: Any, path: str, roles: tuple[str, ...], layer: str, index: int | None, count: int
) -> LinearInfo:
    transposed = type(module) is not nn.Linear
    out, in_ = reversed(module.weight.shape) if transposed else module.weight.shape
    return LinearInfo(path, roles, layer, index, count, out, in_, module.bias is not None, transposed)


def _layer_linears(
    layer: nn.Module, prefix: str, index: int, count: int, architecture: Architecture | None
) -> list[LinearInfo]:
    known: dict[str, tuple[tuple[str, ...], FusedLinear | None, str]] = {}
    for path, roles, fused, residual in architecture.linears() if architecture else ():
        known.setdefault(path, (roles, fused, residual))
    found = []
    for path, module in layer.named_modules():
        if not is_linear(module):
            continue
        roles, fused, residual = known.get(path, ((), None, ""))
        base = _linear_info(module, f"{prefix}.{path}", roles, prefix, index, count)
        found.append(LinearInfo(**{**base.__dict__, "fused": fused, "residual": residual}))
    return found


def _known_layer_lists(model: nn.Module, architecture: Architecture) -> list[tuple[str, nn.ModuleList]]:
    """Return the ModuleLists at the architecture's paths whose first layer has an attention output projection."""
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        if not any(path == end or path.endswith(f".{end}") for end in architecture.layers):
            continue
        inside = {name for name, m in module[0].named_modules() if is_linear(m)}
        needed = [p for p, roles, _, _ in architecture.linears() if "attention.output" in roles]
        if inside & set(needed):
            found.append((path, module))
    return found


def _guess_layer_lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return the outermost ModuleLists that contain linears and whose layers have one class."""
    found: list[tuple[str, nn.ModuleList]] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(p + ".") for p, _ in found):
            continue
        if len({type(layer) for layer in module}) == 1 and any(is_linear(m) for m in module.modules()):
            found.append((path, module))
    return found


def _head_path(model: Any, architecture: Architecture | None) -> str:
    paths = dict(model.named_modules())
    for candidate in architecture.head.split("|") if architecture else ():
        if is_linear(paths.get(candidate, nn.Identity())):
            return candidate
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or not is_linear(head):
        return ""
    return next((path for path, module in paths.items() if module is head), "")
