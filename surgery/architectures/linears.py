"""Finding the linears of a model: which layer each is in, which roles it plays. Anatomy where the family is
known, paths alone where it is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from surgery.architectures import Anatomy, Fused, anatomy_of
from surgery.core.errors import SurgeryError


@dataclass(frozen=True)
class Linear:
    """A linear of the model. layer: path of its layer, "" outside; index: the layer's place of `count`."""

    path: str
    roles: tuple[str, ...]
    layer: str
    index: int | None
    count: int
    out: int
    in_: int
    bias: bool
    transposed: bool  # Conv1D keeps (in, out)
    fused: Fused | None = None
    residual: str = ""  # module of the layer whose input is the residual stream this output is added to


@dataclass(frozen=True)
class Body:
    """What the walk found: the layers in order of execution, all linears, the head's path or ""."""

    anatomy: Anatomy | None
    layers: tuple[str, ...]
    linears: tuple[Linear, ...]
    head: str


def walk(model: Any) -> Body:
    """Every linear of a transformers model (parameters may be on meta)."""
    anatomy = anatomy_of(model.config.model_type)
    lists = _known_lists(model, anatomy) if anatomy else []
    if not lists:
        anatomy, lists = None, _guessed_lists(model)
    if not lists:
        raise SurgeryError(
            f"{type(model).__name__} has no list of layers with linears in them; surgery walks transformer layers"
        )
    head = _head_path(model, anatomy)
    layers: list[str] = []
    linears: list[Linear] = []
    for path, stack in lists:
        for i, layer in enumerate(stack):
            layers.append(f"{path}.{i}")
            linears += _of_layer(layer, f"{path}.{i}", i, len(stack), anatomy)
    for path, module in model.named_modules():
        if is_linear(module) and not any(path.startswith(layer + ".") for layer in layers):
            linears.append(_linear(module, path, ("head",) if path == head else (), "", None, 0))
    return Body(anatomy, tuple(layers), tuple(linears), head)


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _linear(module: Any, path: str, roles: tuple[str, ...], layer: str, index: int | None, count: int) -> Linear:
    transposed = type(module) is not nn.Linear
    out, in_ = reversed(module.weight.shape) if transposed else module.weight.shape
    return Linear(path, roles, layer, index, count, out, in_, module.bias is not None, transposed)


def _of_layer(layer: nn.Module, prefix: str, index: int, count: int, anatomy: Anatomy | None) -> list[Linear]:
    known: dict[str, tuple[tuple[str, ...], Fused | None, str]] = {}
    for path, roles, fused, residual in anatomy.linears() if anatomy else ():
        known.setdefault(path, (roles, fused, residual))
    found = []
    for path, module in layer.named_modules():
        if not is_linear(module):
            continue
        roles, fused, residual = known.get(path, ((), None, ""))
        base = _linear(module, f"{prefix}.{path}", roles, prefix, index, count)
        found.append(Linear(**{**base.__dict__, "fused": fused, "residual": residual}))
    return found


def _known_lists(model: nn.Module, anatomy: Anatomy) -> list[tuple[str, nn.ModuleList]]:
    """ModuleLists at the end of the anatomy's paths whose first layer has a linear the anatomy names."""
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        if not any(path == end or path.endswith(f".{end}") for end in anatomy.layers):
            continue
        inside = {name for name, m in module[0].named_modules() if is_linear(m)}
        needed = [p for p, roles, _, _ in anatomy.linears() if "attention.output" in roles]
        if inside & set(needed):
            found.append((path, module))
    return found


def _guessed_lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Outermost ModuleLists of one class of layer with linears inside."""
    found: list[tuple[str, nn.ModuleList]] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(p + ".") for p, _ in found):
            continue
        if len({type(layer) for layer in module}) == 1 and any(is_linear(m) for m in module.modules()):
            found.append((path, module))
    return found


def _head_path(model: Any, anatomy: Anatomy | None) -> str:
    paths = dict(model.named_modules())
    for candidate in anatomy.head.split("|") if anatomy else ():
        if is_linear(paths.get(candidate, nn.Identity())):
            return candidate
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or not is_linear(head):
        return ""
    return next((path for path, module in paths.items() if module is head), "")
