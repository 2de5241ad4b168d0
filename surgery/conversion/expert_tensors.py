"""The tensors of experts in the form that the original files had: merged, in families whose files hold 3-D tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from surgery.architectures.expert_layout import file_names
from surgery.architectures.experts import RoutedExperts
from surgery.checkpoint.meta_model import build_unconverted_model
from surgery.checkpoint.safetensors_io import TensorSource, read_tensor
from surgery.checkpoint.source import CheckpointSource
from surgery.checkpoint.table import has_shims

T = TypeVar("T")


@dataclass(frozen=True)
class ExpertTensor:
    """The place of an expert's tensor in a merged one.

    module: the experts. merged: the parameter. stored: its name in files. expert: index of the expert. name: of the
    expert's tensor.
    """

    module: RoutedExperts
    merged: str
    stored: str
    expert: int
    name: str


def merge_expert_tensors(source: CheckpointSource, entries: Iterable[TensorSource]) -> Iterator[TensorSource]:
    """Yield the entries, with the tensors of each expert merged if the original files hold merged ones.

    source: a converted checkpoint, whose files have a tensor for each matrix. Entries of a checkpoint whose model class
    is its own code are yielded as they are.
    """
    own_code = bool(source.config.get("auto_map")) and not has_shims(source.config)
    return iter(entries) if own_code else merge_entries(build_unconverted_model(source), entries)


def merge_entries(model: Any, entries: Iterable[TensorSource]) -> Iterator[TensorSource]:
    """Yield the entries, with the tensors of each expert merged if files of the family hold merged ones.

    model: with split experts, of any width. The tensors of a layer's experts are in memory together.
    """
    for name, entry in _merged(model, ((entry.name, entry) for entry in entries), _tensor_of):
        yield TensorSource.from_tensor(name, entry) if isinstance(entry, Tensor) else entry


def merged_shapes(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors by name, with those of each expert merged as `merge_entries` does."""
    merged = _merged(model, shapes.items(), lambda shape: torch.empty(shape, device="meta"))
    return {name: tuple(shape.shape) if isinstance(shape, Tensor) else shape for name, shape in merged}


def _merged(
    model: Any, items: Iterable[tuple[str, T]], tensor_of: Callable[[T], Tensor]
) -> Iterator[tuple[str, T | Tensor]]:
    """Yield the items by name, and merged tensors in place of those of experts."""
    places = _expert_tensors(model)
    by_parameter: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, item in items:
        place = places.get(name)
        if place is None:
            yield name, item
            continue
        tensors, layout = by_parameter.setdefault(place.stored, {}), place.module.layout
        tensors[place.expert, place.name] = tensor_of(item)
        names = [name for name, _ in layout.pieces(place.merged, 2)]
        if len(tensors) == place.module.num_experts * len(names):
            parts = [{name: tensors[index, name] for name in names} for index in range(place.module.num_experts)]
            yield place.stored, layout.merge(place.merged, parts)
            del by_parameter[place.stored]


def _tensor_of(entry: TensorSource) -> Tensor:
    if entry.tensor is not None:
        return entry.tensor
    assert entry.source is not None
    return read_tensor(entry.source)


def _expert_tensors(model: Any) -> dict[str, ExpertTensor]:
    """Return the place of each expert's tensor by its name in files, which may have the base model's prefix or lack
    it.
    """
    places: dict[str, ExpertTensor] = {}
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    for path, module in model.named_modules():
        if not isinstance(module, RoutedExperts) or not module.layout.stored_merged:
            continue
        for merged in module.layout.merged_names():
            stored = file_names(model, f"{path}.{merged}")[0]
            for cut in dict.fromkeys((prefix, "")):
                base, name_in_file = path.removeprefix(cut), stored.removeprefix(cut)
                for index in range(module.num_experts):
                    for name, _ in module.layout.pieces(merged, 2):
                        places[f"{base}.{index}.{name}"] = ExpertTensor(module, merged, name_in_file, index, name)
    return places
