"""The config of a checkpoint whose pruned MLPs all have one width: transformers' own key for it, and no table entries.

A checkpoint of which nothing else was replaced is then an ordinary one, which every program of the family loads. MLPs
of several widths, and families whose config does not say the width, keep their table entries.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from surgery.architectures.experts import split_experts
from surgery.architectures.towers import text_architecture
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.model_classes import build_on_meta, model_class
from surgery.core.errors import SurgeryError

SHARED_WIDTH = "shared_expert_intermediate_size"  # of shared experts (Qwen2-MoE, Qwen3-Next)
Table = dict[str, dict[str, Any]]
Shapes = dict[str, tuple[int, ...]]


def with_mlp_width(config: dict[str, Any], table: Table, meta_model: MetaModel) -> tuple[dict[str, Any], Table]:
    """Return (config, table): with the width of the pruned MLPs in the config and without their entries, if all have
    one; otherwise both unchanged.

    The config is used only if the model that transformers builds from it has the shapes of the result.
    """
    pruned = {path: spec for path, spec in table.items() if spec["structure"] == "pruned"}
    widths = {spec["in_features"] for path, spec in pruned.items() if _is_narrowed(meta_model.module(path), spec)}
    if len(widths) != 1 or meta_model.trust_remote_code:
        return config, table
    expected = _shapes(meta_model.model)
    for path, spec in pruned.items():
        sizes = (spec["out_features"], spec["in_features"])
        expected[f"{path}.weight"] = sizes[::-1] if spec.get("transposed") else sizes
        if spec["bias"]:
            expected[f"{path}.bias"] = sizes[:1]
    for candidate in _configs_with_width(config, widths.pop(), meta_model):
        settings = type(meta_model.config).from_dict(copy.deepcopy(candidate))
        try:
            model = build_on_meta(model_class(settings), settings, meta_model.source.name)
        except SurgeryError:  # the key has another meaning in this part of the config
            continue
        split_experts(model)
        if _shapes(model) == expected:
            return candidate, {path: spec for path, spec in table.items() if path not in pruned}
    return config, table


def _is_narrowed(linear: nn.Module, spec: dict[str, Any]) -> bool:
    """Return whether an entry has fewer inputs than the linear, as `down` of a pruned MLP has."""
    weight: Any = linear.weight
    in_: int = weight.shape[0 if spec.get("transposed") else 1]
    return bool(spec["in_features"] < in_)


def _configs_with_width(config: dict[str, Any], width: int, meta_model: MetaModel) -> Iterator[dict[str, Any]]:
    """Yield the config with another width of the MLPs, or of shared experts: in the config itself, and in each part that
    has the key.
    """
    architecture = text_architecture(meta_model.model)
    if architecture is None:
        return
    for key in (architecture.mlp_width, SHARED_WIDTH):
        parts = [name for name, value in config.items() if isinstance(value, dict) and key in value]
        for part in ("", *parts):
            candidate = copy.deepcopy(config)
            (candidate[part] if part else candidate)[key] = width
            yield candidate


def _shapes(model: Any) -> Shapes:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
