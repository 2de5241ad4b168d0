"""The config of a checkpoint whose pruned MLPs or routed experts all have one width, or whose pruned attention has one
number of heads: transformers' own keys for it, and no table entries.

A checkpoint of which nothing else was replaced is then an ordinary one, which every program of the family loads. MLPs
of several widths, attention of several numbers of heads, and families whose config does not say the number keep their
table entries.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from surgery.architectures.base import Architecture
from surgery.architectures.experts import split_experts
from surgery.architectures.linears import LinearInfo, find_linears
from surgery.architectures.towers import text_architecture
from surgery.checkpoint.meta_model import MetaModel, config_object
from surgery.checkpoint.model_classes import build_on_meta, model_class
from surgery.core.errors import SurgeryError

SHARED_WIDTH = "shared_expert_intermediate_size"  # of shared experts (Qwen2-MoE, Qwen3-Next)
EXPERT_WIDTHS = ("moe_intermediate_size", "intermediate_size")  # of routed experts, and of shared ones in some families
LAST_ROLES = {"mlp": "mlp.down", "attention": "attention.output", "expert": "expert.down"}
Config = dict[str, Any]
Table = dict[str, dict[str, Any]]
Shapes = dict[str, tuple[int, ...]]


def with_pruned_sizes(config: Config, table: Table, meta_model: MetaModel) -> tuple[Config, Table]:
    """Return (config, table): with the width of the pruned MLPs and experts and the heads of the pruned attention in the
    config and without their entries, if all have one width or number of heads; otherwise unchanged.

    The config is used only if the model that transformers builds from it has the shapes of the result.
    """
    pruned = {path: spec for path, spec in table.items() if spec["structure"] == "pruned"}
    architecture = text_architecture(meta_model.model)
    if not pruned or meta_model.trust_remote_code:
        return config, table
    linears = {linear.path: linear for linear in find_linears(meta_model.model).linears}
    shapes = _shapes(meta_model.model)
    for kind, entries in _groups(pruned, linears):
        ends = [
            (linears[path].in_, spec["in_features"])
            for path, spec in entries.items()
            if LAST_ROLES[kind] in linears[path].roles
        ]
        if len(set(ends)) != 1 or not entries.keys() <= table.keys():
            continue
        expected = shapes | _entry_shapes(entries)
        for candidate in _candidates(config, kind, *ends[0], architecture):
            if _model_shapes(candidate, meta_model) == expected:
                config, shapes = candidate, expected
                table = {path: spec for path, spec in table.items() if path not in entries}
                break
    return config, table


def _groups(pruned: Table, linears: dict[str, LinearInfo]) -> Iterator[tuple[str, Table]]:
    """Yield (kind, entries) of what may have one size: all MLPs, those beside routed experts and the others, attention,
    the experts, and these with the MLPs beside them.
    """
    blocks = {linear.experts.rpartition(".")[0] for linear in linears.values() if linear.experts}
    of_kind: dict[str, Table] = {kind: {} for kind in LAST_ROLES}
    for path, spec in pruned.items():
        of_kind[linears[path].roles[0].partition(".")[0]][path] = spec
    mlps, experts = of_kind["mlp"], of_kind["expert"]
    beside = {path: spec for path, spec in mlps.items() if any(path.startswith(f"{block}.") for block in blocks)}
    others = {path: spec for path, spec in mlps.items() if path not in beside}
    yield from (("mlp", entries) for entries in (mlps, beside, others))
    yield "attention", of_kind["attention"]
    yield from (("expert", entries) for entries in (experts, {**experts, **beside}))


def _entry_shapes(entries: Table) -> Shapes:
    shapes: Shapes = {}
    for path, spec in entries.items():
        sizes = (spec["out_features"], spec["in_features"])
        shapes[f"{path}.weight"] = sizes[::-1] if spec.get("transposed") else sizes
        if spec["bias"]:
            shapes[f"{path}.bias"] = sizes[:1]
    return shapes


def _candidates(
    config: Config, kind: str, before: int, after: int, architecture: Architecture | None
) -> Iterator[Config]:
    """Yield the config with other sizes: in the config itself, and in each part that has the keys. before, after:
    columns of `down` or of the output projection.
    """
    mlp_keys = (architecture.mlp_width, SHARED_WIDTH) if architecture is not None else ()
    keys = {"mlp": mlp_keys, "expert": EXPERT_WIDTHS, "attention": ("num_attention_heads",)}
    for key in keys[kind]:
        for part in ("", *(name for name, value in config.items() if isinstance(value, dict) and key in value)):
            candidate = copy.deepcopy(config)
            sizes: Config = candidate[part] if part else candidate
            changed = _with_heads(sizes, Fraction(after, before), before) if kind == "attention" else {key: after}
            if changed and (kind != "expert" or sizes.get(key) == before):
                sizes.update(changed)
                yield candidate


def _with_heads(sizes: Config, share: Fraction, width: int) -> Config:
    """Return the keys of a config with a share of the heads, the head dimension written out; {} if the config lacks the
    number of heads. width: of the outputs of all heads.
    """
    heads = sizes.get("num_attention_heads")
    if type(heads) is not int or heads < 1:
        return {}
    keys = [name for name in ("num_attention_heads", "num_key_value_heads") if type(sizes.get(name)) is int]
    counts = {name: sizes[name] * share for name in keys}
    if any(count.denominator > 1 for count in counts.values()):
        return {}
    return {**{name: int(count) for name, count in counts.items()}, "head_dim": width // heads}


def _model_shapes(config: Config, meta_model: MetaModel) -> Shapes | None:
    """Return the shapes of the model of a config, None if it cannot be built: the keys have another meaning there."""
    try:
        settings = config_object(type(meta_model.config), config)
        model = build_on_meta(model_class(settings), settings, meta_model.source.name)
    except SurgeryError:
        return None
    split_experts(model)
    return _shapes(model)


def _shapes(model: Any) -> Shapes:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
