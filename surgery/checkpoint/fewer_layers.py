"""A checkpoint with some of the layers of its decoder: config.json and the names of tensors are renumbered, and no
weight is read.

What a config says of single layers is renumbered too: lists with one value per layer (`layer_types`), lists of layer
numbers (`mlp_only_layers`), and numbers of first layers that differ from the others (`first_k_dense_replace`). The
result is used only if each layer that transformers builds from it is like the layer that it was: modules of the same
classes, parameters of the same shapes, and the same settings, such as the window of its attention.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from surgery.architectures.linears import ModelLayout
from surgery.architectures.towers import owner_config
from surgery.checkpoint.safetensors_io import TensorInfo
from surgery.checkpoint.source import CheckpointSource
from surgery.core.errors import SurgeryError

# Keys with the numbers of layers, and keys that say how many of the first layers differ from the others.
INDEX_KEYS = (
    "mlp_only_layers",
    "moe_layers",
    "cross_attention_layers",
    "full_attn_idxs",
    "attn_layer_indices",
    "hybrid_layer_ids",
)
FIRST_KEYS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers")
PERIOD_KEYS = ("decoder_sparse_step",)  # every n-th layer has experts
LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")  # attributes of modules
ADVICE = "Leave depth out for this model"


@dataclass(frozen=True)
class LayerStack:
    """The list of layers of a model. path: of the ModuleList. count: its length. part: the key of config.json below
    which its sizes are, "" at the top.
    """

    path: str
    count: int
    part: str

    def layer(self, index: int) -> str:
        """Return the path of a layer."""
        return f"{self.path}.{index}"


def find_stack(model: Any, layout: ModelLayout) -> LayerStack:
    """Return the one list of layers of a model that a conversion may shorten.

    Raises SurgeryError for a model with several, such as an encoder and a decoder.
    """
    lists = list(dict.fromkeys(path.rpartition(".")[0] for path in layout.layers))
    if len(lists) != 1:
        raise SurgeryError(
            f"depth: {type(model).__name__} has {len(lists)} lists of layers ({', '.join(lists)}), and depth removes "
            f"layers of one. Name its tower (towers), or leave depth out"
        )
    part = config_part(model, owner_config(model, lists[0]))
    if part is None:
        raise SurgeryError(
            f"depth: config.json of {type(model).__name__} does not say how many layers {lists[0]} has. {ADVICE}"
        )
    return LayerStack(lists[0], len(layout.layers), part)


def config_part(model: Any, owner: Any) -> str | None:
    """Return the key of config.json below which the sizes of a part of the model are, "" for the model's own config;
    None if there is no such key. owner: config of the part.
    """
    if owner is model.config:
        return ""
    parts = getattr(type(model.config), "sub_configs", None) or ()
    return next((key for key in parts if getattr(model.config, key, None) is owner), None)


def with_layers(
    source: CheckpointSource,
    model: Any,
    keys: Mapping[str, str],
    stack: LayerStack,
    kept: Sequence[int],
    replaced: Mapping[str, TensorInfo] | None = None,
) -> CheckpointSource:
    """Return the checkpoint with the layers `kept`, in ascending order.

    model: of the source, with all layers, parameters on meta. keys: name of the tensor of each of its parameters.
    replaced: other tensors for some of the parameters, by the parameter's name in `model`.
    """
    tensors = {**source.tensors, **{keys[name]: info for name, info in (replaced or {}).items()}}
    place = _name_place(keys, stack)
    numbers = {before: after for after, before in enumerate(kept)}
    renamed = {}
    for name, info in tensors.items():
        number = _layer_number(name, place)
        if number is None:
            renamed[name] = info
        elif number in numbers or number >= stack.count:  # layers behind the last one, such as those that draft tokens
            new = _with_number(name, place, numbers.get(number, number - stack.count + len(kept)))
            renamed[new] = replace(info, name=new)
    config = renumber_config(source.config, model, stack, kept)
    return replace(source, config=config, tensors=renamed, whole=source.original)


# -- names of tensors --------------------------------------------------------------------------------
Place = tuple[tuple[str, ...], ...]  # what names of tensors have before the number of the layer


def _name_place(keys: Mapping[str, str], stack: LayerStack) -> Place:
    """Return what the names of the layers' tensors have before the layer's number, from those of the parameters.

    Raises SurgeryError if a name has another number first.
    """
    places = set()
    for parameter, name in keys.items():
        if not parameter.startswith(f"{stack.path}."):
            continue
        index, parts = parameter[len(stack.path) + 1 :].partition(".")[0], name.split(".")
        first = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if first is None or parts[first] != index:
            raise SurgeryError(
                f"depth: tensor {name!r} of layer {index} does not have the layer's number first in its name, so that "
                f"it cannot be renumbered. {ADVICE}"
            )
        places.add(tuple(parts[:first]))
    return tuple(sorted(places))


def _layer_number(name: str, place: Place) -> int | None:
    parts = name.split(".")
    for before in place:
        if tuple(parts[: len(before)]) == before and len(parts) > len(before) and parts[len(before)].isdecimal():
            return int(parts[len(before)])
    return None


def _with_number(name: str, place: Place, number: int) -> str:
    parts = name.split(".")
    at = next(len(before) for before in place if tuple(parts[: len(before)]) == before)
    return ".".join([*parts[:at], str(number), *parts[at + 1 :]])


# -- config.json ---------------------------------------------------------------------------------------
def renumber_config(config: Mapping[str, Any], model: Any, stack: LayerStack, kept: Sequence[int]) -> dict[str, Any]:
    """Return config.json for the layers `kept`. model: with all layers."""
    renewed = copy.deepcopy(dict(config))
    part = renewed.setdefault(stack.part, {}) if stack.part else renewed
    owner = owner_config(model, stack.path)
    for key, value in part.items():
        part[key] = _renumber_value(key, value, stack.count, kept)
    types = getattr(owner, "layer_types", None)
    if isinstance(types, list) and len(types) == stack.count and len(set(types)) > 1:
        part["layer_types"] = [types[index] for index in kept]  # also if the config's class chose them
    for key in PERIOD_KEYS:
        period, listed = getattr(owner, key, None), getattr(owner, "mlp_only_layers", None)
        if type(period) is int and period > 1 and isinstance(listed, list):
            dense = [i for i in range(stack.count) if (i + 1) % period or i in listed]
            part |= {key: 1, "mlp_only_layers": [after for after, index in enumerate(kept) if index in dense]}
    part[_count_key(owner)] = len(kept)
    return renewed


def _count_key(owner: Any) -> str:
    key: str = getattr(type(owner), "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
    return key


def _renumber_value(key: str, value: Any, count: int, kept: Sequence[int]) -> Any:
    """Return the value of a key for the layers `kept` of `count`."""
    if key in INDEX_KEYS and isinstance(value, list):
        return [after for after, index in enumerate(kept) if index in value]
    if key in FIRST_KEYS and type(value) is int:
        return sum(index < value for index in kept) + max(0, value - count)
    if isinstance(value, list) and len(value) == count:
        return [value[index] for index in kept]
    return value


# -- check -----------------------------------------------------------------------------------------------
def check_layers(before: Any, after: Any, stack: LayerStack, kept: Sequence[int]) -> None:
    """Raise SurgeryError unless the layers of `after` are those of `before` in `kept`, and all else is alike.

    Both are models of transformers on meta.
    """
    for number, index in enumerate(kept):
        old, new = before.get_submodule(stack.layer(index)), after.get_submodule(stack.layer(number))
        if unlike := next(_differences(old, new), None):
            raise SurgeryError(
                f"depth: layer {index} would become layer {number}, where config.json gives it another {unlike}. "
                f"Remove other layers (depth: {{remove: ..}}), or leave depth out"
            )
    shapes = [
        {name: tuple(p.shape) for name, p in model.named_parameters() if not name.startswith(f"{stack.path}.")}
        for model in (before, after)
    ]
    if unlike := next((name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name)), ""):
        raise SurgeryError(f"depth: the shape of {unlike} depends on the number of layers. {ADVICE}")


def _differences(old: nn.Module, new: nn.Module) -> Iterator[str]:
    """Yield what differs between two layers: a class, a shape of a parameter, or a setting."""
    modules = [dict(layer.named_modules()) for layer in (old, new)]
    for name in {**modules[0], **modules[1]}:
        pair = [found.get(name) for found in modules]
        if type(pair[0]) is not type(pair[1]):
            yield f"class of {name or 'the layer'} ({' and '.join(type(module).__name__ for module in pair)})"
            continue
        settings = [_settings(module) for module in pair if module is not None]
        for key in {**settings[0], **settings[1]}:
            values = [found.get(key) for found in settings]
            if values[0] != values[1]:
                yield f"{f'{name}.{key}'.lstrip('.')} ({values[0]} and {values[1]})"


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the shapes of a module's own parameters, and its attributes that are plain values, without its number."""
    shapes: dict[str, Any] = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None}
    by_number = bool(getattr(module, "scale_attn_by_inverse_layer_idx", False))
    plain = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, (int, float, str, tuple, type(None))) and (by_number or key not in LAYER_NUMBERS)
    }
    return plain | shapes
