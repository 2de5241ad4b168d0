"""Attention modules of a model, and their shapes, read from the modules, the config and the architecture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from surgery.architectures import Architecture, get_architecture
from surgery.architectures.base import known_families
from surgery.architectures.dry_run import ObservedAttention, library_class, observe_attention, own_attention_reason
from surgery.architectures.dry_run import uses_attention_interface as _looks_up_attention
from surgery.architectures.outline import AttentionOutline
from surgery.architectures.towers import architecture_at, text_config
from surgery.core.errors import SurgeryError, suggestion
from surgery.mixers import AttentionShape, MixerConfig


def uses_attention_interface(module: nn.Module) -> bool:
    """Return whether a mixer can be inserted into the module, because it looks its attention function up in
    transformers' table.
    """
    return isinstance(module, AttentionOutline) or _looks_up_attention(module)


def require_architecture(model: Any) -> Architecture:
    """Return the architecture of a model whose attention can be replaced.

    Raise SurgeryError, with the reason, for others.
    """
    architecture = _known_architecture(model)
    if architecture is None:
        kind = text_config(model).model_type
        if get_architecture(kind) is not None:
            raise SurgeryError(
                f"the architecture of {kind!r} leaves its attention to a dry run, so it is not known which linear "
                "computes its values"
            )
        raise SurgeryError(
            f"no architecture of {kind!r}, so it is not known which linear computes its values"
            f"{suggestion(kind, known_families())}; to add one, write a small file like surgery/architectures/llama.py"
        )
    return architecture


def _known_architecture(model: Any) -> Architecture | None:
    """Return the architecture that describes a model's attention, or None if a dry run has to find it.

    Raise SurgeryError if its attention cannot be replaced.
    """
    architecture = get_architecture(text_config(model).model_type)
    if architecture is not None and architecture.unmixable:
        raise SurgeryError(f"{type(model).__name__} cannot be given mixers: {architecture.unmixable}")
    if not any(uses_attention_interface(module) for module in model.modules()):
        raise SurgeryError(f"{type(model).__name__} cannot be given mixers: {own_attention_reason(model)}")
    return None if architecture is not None and architecture.observed_attention else architecture


def _observed(model: Any) -> dict[str, ObservedAttention]:
    """Return the self-attention modules that a dry run of a model finds.

    Raise SurgeryError if none of them can be replaced.
    """
    attentions = observe_attention(model)
    if not attentions:
        raise SurgeryError(f"{type(model).__name__} cannot be given mixers: its forward ran no self-attention")
    if all(attention.refusal for attention in attentions.values()):
        path, first = next(iter(attentions.items()))
        raise SurgeryError(f"{type(model).__name__} cannot be given mixers: {path}: {first.refusal}")
    return attentions


def _parent_layer(architecture: Architecture, path: str) -> str | None:
    """Return the path of the layer whose attention is at `path`, or None if the architecture has no attention there."""
    core = f".{architecture.core}" if architecture.core else ""
    lists = "|".join(re.escape(end) for end in architecture.layers)
    match = re.fullmatch(rf"((?:.*\.)?(?:{lists})\.\d+)\.{re.escape(architecture.attention[0] + core)}", path)
    return match[1] if match else None


def attention_paths(model: Any) -> list[str]:
    """Return the paths of the self-attention modules, in order.

    Mixers can replace all of them in a family with an Architecture. In others, a dry run decides: `attention_shape`
    raises SurgeryError for a module that cannot be replaced, and here one is raised if no module can.
    """
    architecture = _known_architecture(model)
    if architecture is None:
        return list(_observed(model))
    return [
        n
        for n, m in model.named_modules()
        if _parent_layer(architecture, n) is not None
        and uses_attention_interface(m)
        and architecture_at(model, n) is architecture
    ]


def output_path(model: Any, path: str) -> str:
    """Return the path of the output projection of the attention at `path`: the first linear that reads the heads'
    outputs.
    """
    architecture = _known_architecture(model)
    if architecture is None:
        return _observed(model)[path].output
    sublayer = f"{_parent_layer(architecture, path)}.{architecture.attention[0]}"
    modules = dict(model.named_modules())
    return next(p for p in (f"{sublayer}.{end}" for end in architecture.output.split("|")) if p in modules)


def key_value_heads(config: Any, architecture: Architecture | None) -> int:
    """Return the number of key/value heads: that of query heads where the config names none, or the family does not
    read the name.
    """
    shared = architecture is None or architecture.grouped_heads
    return int((getattr(config, "num_key_value_heads", None) if shared else None) or config.num_attention_heads)


def attention_shape(model: Any, path: str) -> AttentionShape:
    """Return the shape of the attention at `path`: sizes, scaling, masking and rotation, as a mixer needs them.

    Raises SurgeryError, with the property that forbids it, if a mixer cannot replace the module.
    """
    architecture, layer = _known_architecture(model), None
    if architecture is None:
        return _observed_shape(model, path)
    module = dict(model.named_modules()).get(path)
    if module is not None:
        layer = _parent_layer(architecture, path)
    if module is None or layer is None:
        raise SurgeryError(f"{type(model).__name__} has no attention at {path!r} to replace by a mixer")
    config = getattr(module, "host", module.config)
    heads, groups = config.num_attention_heads, key_value_heads(config, architecture)
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


def _observed_shape(model: Any, path: str) -> AttentionShape:
    attention = _observed(model).get(path)
    if attention is None:
        raise SurgeryError(f"{library_class(model).__name__} has no attention at {path!r} to replace by a mixer")
    if attention.shape is None:
        raise SurgeryError(
            f"{path} cannot be given a mixer: {attention.refusal}. Leave its layer out with attention.layers"
        )
    return attention.shape


def _value_width(model: Any, architecture: Architecture, sublayer: str, sizes: tuple[int, int, int]) -> int:
    """Return the output size of the value projection. Raise SurgeryError if the projections do not match the heads."""
    heads, groups, key = sizes
    modules = dict(model.named_modules())
    for fused in architecture.fused:
        if (linear := modules.get(f"{sublayer}.{fused.path}")) is not None and fused.roles[-1] == "attention.value":
            return _out_features(linear) - (heads + groups) * key
    outputs = [
        next(_out_features(modules[f"{sublayer}.{end}"]) for end in role.split("|") if f"{sublayer}.{end}" in modules)
        for role in (architecture.query, architecture.key, architecture.value)
    ]
    if outputs[0] != heads * key or outputs[1] != groups * key or outputs[2] % groups:
        raise SurgeryError(
            f"{sublayer}: projections with {outputs} outputs do not match {heads} query heads and {groups} key and "
            "value "
            f"heads of {key} dimensions"
        )
    return outputs[2]


def _out_features(linear: Any) -> int:
    features: int = linear.out_features if hasattr(linear, "out_features") else linear.nf
    return features


def _window(module: Any, config: Any) -> int | None:
    """Return the sliding window of the module if it defines one (Qwen, Gemma: None on full layers), else of the config
    (Mistral, Phi-3).

    Qwen2-MoE sets the attribute on layers with a window only, and the config's window to 0 if there is none.
    """
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if not hasattr(module, "sliding_window") and kinds and index is not None and kinds[index] != "sliding_attention":
        return None
    return getattr(module, "sliding_window", getattr(config, "sliding_window", None)) or None


def _rotary_dims(module: Any, config: Any, architecture: Architecture, key: int) -> int:
    if architecture.rotary == "none":
        return 0
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get(getattr(module, "layer_type", None), rope)
    return int(key * (rope.get("partial_rotary_factor") or 1.0))


def mixer_shape(model: Any, path: str, config: MixerConfig) -> AttentionShape:
    """Return the shape of the module at `path` that a mixer with this config belongs to."""
    if config.replaces_attention:
        return attention_shape(model, path)
    # Imported with models that have level weights.
    from surgery.architectures.native import native_shape

    return native_shape(model, path)


def shapes_without_mixer(model: Any, mixers: Mapping[str, MixerConfig]) -> dict[str, AttentionShape]:
    """Return the shapes of the softmax attention modules that have no mixer, by path, in order.

    A model whose only mixers are level weights may have no softmax attention, or attention that cannot be observed:
    there are then none.
    """
    try:
        return {path: attention_shape(model, path) for path in attention_paths(model) if path not in mixers}
    except SurgeryError:
        if any(config.replaces_attention for config in mixers.values()):
            raise
        return {}
