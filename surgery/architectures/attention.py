"""Attention modules of a model, and their shapes, read from the modules, the config and the architecture."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn

from surgery.architectures import Architecture, get_architecture
from surgery.architectures.base import known_families
from surgery.architectures.outline import AttentionOutline
from surgery.core.errors import SurgeryError, suggestion
from surgery.mixers import AttentionShape


def uses_attention_interface(module: nn.Module) -> bool:
    """Return whether the forward looks its attention function up in transformers' table, where a mixer can be inserted."""
    if isinstance(module, AttentionOutline):
        return True
    forwards = [inspect.unwrap(vars(cls)["forward"]) for cls in type(module).__mro__ if "forward" in vars(cls)]
    return any("ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names for forward in forwards)


def require_architecture(model: Any) -> Architecture:
    """Return the architecture of a model whose attention can be replaced. Raise SurgeryError, with the reason, for others."""
    kind = model.config.model_type
    architecture = get_architecture(kind)
    if architecture is not None and architecture.unmixable:
        raise SurgeryError(f"{type(model).__name__} cannot be given mixers: {architecture.unmixable}")
    if not any(uses_attention_interface(module) for module in model.modules()):
        raise SurgeryError(
            f"{type(model).__name__} computes attention in its own forward, without transformers' attention functions, so "
            "mixers cannot replace it. Supported families: llama, qwen2, qwen3, mistral, gemma2, gpt2, .."
        )
    if architecture is None:
        raise SurgeryError(
            f"no architecture of {kind!r}, so it is not known how its attention is scaled, rotated and masked"
            f"{suggestion(kind, known_families())}; to add one, write a small file like surgery/architectures/llama.py"
        )
    return architecture


def _parent_layer(architecture: Architecture, path: str) -> str | None:
    """Return the path of the layer whose attention is at `path`, or None if the architecture has no attention there."""
    core = f".{architecture.core}" if architecture.core else ""
    lists = "|".join(re.escape(end) for end in architecture.layers)
    found = re.fullmatch(rf"((?:.*\.)?(?:{lists})\.\d+)\.{re.escape(architecture.attention[0] + core)}", path)
    return found[1] if found else None


def attention_paths(model: Any) -> list[str]:
    """Return the paths of the self-attention modules that mixers can replace."""
    architecture = require_architecture(model)
    return [
        n
        for n, m in model.named_modules()
        if _parent_layer(architecture, n) is not None and uses_attention_interface(m)
    ]


def output_path(model: Any, path: str) -> str:
    """Return the path of the output projection of the attention at `path`."""
    architecture = require_architecture(model)
    place = f"{_parent_layer(architecture, path)}.{architecture.attention[0]}"
    modules = dict(model.named_modules())
    return next(p for p in (f"{place}.{end}" for end in architecture.output.split("|")) if p in modules)


def attention_shape(model: Any, path: str) -> AttentionShape:
    """Return the shape of the attention at `path`: sizes, scaling, masking and rotation, as a mixer needs them."""
    architecture, layer = require_architecture(model), None
    module = dict(model.named_modules()).get(path)
    if module is not None:
        layer = _parent_layer(architecture, path)
    if module is None or layer is None:
        raise SurgeryError(f"{type(model).__name__} has no attention at {path!r} to replace by a mixer")
    config = getattr(module, "host", module.config)
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    key = getattr(module, architecture.head_dim)
    value_out = _value_width(model, architecture, f"{layer}.{architecture.attention[0]}", (heads, groups, key))
    return AttentionShape(
        dim=config.hidden_size,
        heads=heads,
        groups=groups,
        key=key,
        value=value_out // groups,
        scaling=float(module.scaling),
        causal=bool(module.is_causal),
        window=_window(module, config),
        softcap=getattr(config, architecture.score_softcap, None) if architecture.score_softcap else None,
        rotary=_rotary_dims(module, config, architecture, key),
        interleaved=architecture.rotary == "pairs",
        norm=architecture.qk_norm,
    )


def _value_width(model: Any, architecture: Architecture, place: str, sizes: tuple[int, int, int]) -> int:
    """Return the output size of the value projection. Raise SurgeryError if the projections do not match the heads."""
    heads, groups, key = sizes
    modules = dict(model.named_modules())
    for fused in architecture.fused:
        if (linear := modules.get(f"{place}.{fused.path}")) is not None and fused.roles[-1] == "attention.value":
            return _out_features(linear) - (heads + groups) * key
    found = [
        next(_out_features(modules[f"{place}.{end}"]) for end in role.split("|") if f"{place}.{end}" in modules)
        for role in (architecture.query, architecture.key, architecture.value)
    ]
    if found[0] != heads * key or found[1] != groups * key or found[2] % groups:
        raise SurgeryError(
            f"{place}: projections with {found} outputs do not match {heads} query heads and {groups} key and value "
            f"heads of {key} dimensions"
        )
    return found[2]


def _out_features(linear: Any) -> int:
    features: int = linear.out_features if hasattr(linear, "out_features") else linear.nf
    return features


def _window(module: Any, config: Any) -> int | None:
    """Return the sliding window of the module if it defines one (Qwen, Gemma: None on full layers), else of the config (Mistral, Phi-3)."""
    return getattr(module, "sliding_window", getattr(config, "sliding_window", None))


def _rotary_dims(module: Any, config: Any, architecture: Architecture, key: int) -> int:
    if architecture.rotary == "none":
        return 0
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get(getattr(module, "layer_type", None), rope)
    return int(key * (rope.get("partial_rotary_factor") or 1.0))
