"""Outline of a decoder: its linears, its layers and the shapes of its parameters on the meta device, from config.json
alone.

Importing a model class of transformers, or only its config class, imports torch._dynamo and takes longer than importing
torch. The outline has everything that a plan reads of the model: the same module paths in the same order, nn.Linear
modules, and the attributes of the attention modules. Only families whose Architecture has an OutlineSpec have outlines,
and only if every key of config.json is known here and has an ordinary value. With any other config, transformers' class
may have other modules or raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from surgery.architectures.base import OutlineSpec, get_architecture

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
DTYPES = ("float32", "float16", "bfloat16")
LAYER_TYPES = ("full_attention", "sliding_attention")
MAX_SIZE = 2**27  # of one axis of a weight, so that the number of elements fits int64
MAX_NUMBER = 2.0**53
LLAMA3_KEYS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < MAX_SIZE


def _is_optional_count(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_token(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0)


def _is_tokens(value: Any) -> bool:
    return _is_token(value) or (isinstance(value, list) and all(type(token) is int and token >= 0 for token in value))


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < MAX_NUMBER


def _is_positive_float(value: Any) -> bool:
    return type(value) is float and _is_positive(value)


def _is_cap(value: Any) -> bool:
    return value is None or _is_positive_float(value)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_layer_types(value: Any) -> bool:
    return isinstance(value, list) and all(kind in LAYER_TYPES for kind in value)


def _is_rope(value: Any) -> bool:
    """Return whether a table of RoPE parameters has type "default" or "llama3", which rotate all dimensions of a
    head.
    """
    if not isinstance(value, dict):
        return False
    scaling = {key: number for key, number in value.items() if key not in ("rope_type", "rope_theta")}
    if value.get("rope_type") not in ("default", "llama3") or not _is_positive(value.get("rope_theta", 1.0)):
        return False
    if value["rope_type"] == "default":
        return not scaling
    return (
        scaling.keys() == LLAMA3_KEYS
        and all(_is_positive(number) for number in scaling.values())
        and type(scaling["original_max_position_embeddings"]) is int
        and scaling["factor"] >= 1
        and scaling["low_freq_factor"] < scaling["high_freq_factor"]
    )


REQUIRED: dict[str, Callable[[Any], bool]] = {
    "architectures": lambda value: isinstance(value, list) and len(value) == 1,
    "model_type": _is_text,
    "vocab_size": _is_count,
    "hidden_size": _is_count,
    "intermediate_size": _is_count,
    "num_hidden_layers": _is_count,
    "num_attention_heads": _is_count,
    "num_key_value_heads": _is_count,
    "max_position_embeddings": _is_count,
    "rms_norm_eps": _is_positive_float,
    "tie_word_embeddings": _is_flag,
}
OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "_name_or_path": _is_text,
    "transformers_version": _is_text,
    "dtype": lambda value: value in DTYPES,
    "torch_dtype": lambda value: value in DTYPES,
    "use_cache": _is_flag,
    "initializer_range": lambda value: _is_positive_float(value) and value <= 1,
    "attention_dropout": lambda value: type(value) in (int, float) and 0 <= value <= 1,
    "bos_token_id": _is_token,
    "eos_token_id": _is_tokens,
    "pad_token_id": _is_token,
    "rope_parameters": _is_rope,
}
# Keys that an OutlineSpec names as required or optional in its family.
FAMILY_KEYS: dict[str, Callable[[Any], bool]] = {
    "hidden_act": lambda value: value in ACTIVATIONS,
    "hidden_activation": lambda value: value in ACTIVATIONS,
    "head_dim": _is_count,
    "attention_bias": _is_flag,
    "mlp_bias": _is_flag,
    "pretraining_tp": _is_count,
    "rope_theta": _is_positive,
    "rope_scaling": lambda value: value is None or _is_rope(value),
    "sliding_window": _is_optional_count,
    "use_sliding_window": _is_flag,
    "max_window_layers": lambda value: type(value) is int and value >= 0,
    "layer_types": _is_layer_types,
    "query_pre_attn_scalar": _is_count,
    "attn_logit_softcapping": _is_cap,
    "final_logit_softcapping": _is_cap,
    "use_bidirectional_attention": lambda value: value is None or value is False,
    "_sliding_window_pattern": _is_count,
}


class AttentionOutline(nn.Module):
    """A self-attention module with the attributes that `attention_shape` reads, and without a forward.

    It stands for a module of transformers that looks its attention function up in transformers' table.
    """

    def __init__(self, config: Any, scaling: float):
        super().__init__()
        self.config, self.head_dim, self.scaling, self.is_causal = config, config.head_dim, scaling, True


class WeightOutline(nn.Module):
    """A norm or an embedding: a weight on the meta device."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


def build_outline(config: Mapping[str, Any]) -> Any | None:
    """Return the outline of a model, or None if its modules are only known to transformers' class.

    The outline is an nn.Module whose class has the name of transformers' class. Its `config` has the keys of
    config.json, without those of RoPE, as attributes; `all_tied_weights_keys` maps a tied parameter to its twin, as in
    transformers.

    Args:
        config: config.json as a dictionary.
    """
    kind = config.get("model_type")
    architecture = get_architecture(kind) if isinstance(kind, str) else None
    if architecture is None or architecture.outline is None:
        return None
    values = _read_config(config, architecture.outline)
    return None if values is None else _build_model(architecture.outline, values)


def _read_config(config: Mapping[str, Any], spec: OutlineSpec) -> Any | None:
    """Return the config's values as attributes of one object, or None if a key is missing or unknown, or a value is
    unusual.
    """
    checks = dict(REQUIRED)
    checks |= {key: FAMILY_KEYS[key] for key in (spec.activation, *spec.required)}
    if checks.keys() - config.keys():
        return None
    checks |= {**OPTIONAL, **{key: FAMILY_KEYS[key] for key in spec.optional}}
    if spec.nested_rope:
        checks["rope_parameters"] = _is_nested_rope
    if config.keys() - checks.keys() or not all(checks[key](value) for key, value in config.items()):
        return None
    if config["model_type"] != spec.model_type or config["architectures"] != [spec.model_class]:
        return None
    values = SimpleNamespace(**{key: value for key, value in config.items() if not key.startswith("rope_")})
    values.head_dim = config.get("head_dim", values.hidden_size // values.num_attention_heads)
    if not config.get("use_sliding_window", True):
        values.sliding_window = None
    consistent = (
        values.hidden_size % values.num_attention_heads == 0
        and values.num_attention_heads % values.num_key_value_heads == 0
        and values.head_dim % 2 == 0
        and values.num_attention_heads * values.head_dim < MAX_SIZE
        and (config.get("pad_token_id") or 0) < values.vocab_size
        and len(config.get("layer_types", range(values.num_hidden_layers))) == values.num_hidden_layers
        # Without layer_types, transformers chooses the layers with a window.
        and (spec.window != "layers" or "layer_types" in config or values.sliding_window is None)
    )
    return values if consistent else None


def _is_nested_rope(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == set(LAYER_TYPES) and all(map(_is_rope, value.values()))


def _build_model(spec: OutlineSpec, config: Any) -> Any:
    model: Any = type(spec.model_class, (nn.Module,), {})()
    model.config = config
    model.model = nn.Module()
    model.model.embed_tokens = WeightOutline(config.vocab_size, config.hidden_size)
    model.model.layers = nn.ModuleList([_build_layer(spec, config, index) for index in range(config.num_hidden_layers)])
    model.model.norm = WeightOutline(config.hidden_size)
    model.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    model.all_tied_weights_keys = tied if config.tie_word_embeddings else {}
    model.requires_grad_(False)
    return model.eval()


def _build_layer(spec: OutlineSpec, config: Any, index: int) -> nn.Module:
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head

    def linear(in_features: int, out_features: int, bias: str) -> nn.Linear:
        has_bias = bias == "always" or bool(getattr(config, bias, False))
        return nn.Linear(in_features, out_features, bias=has_bias, device="meta")

    attention: Any = AttentionOutline(config, (getattr(config, spec.scale) if spec.scale else head) ** -0.5)
    if spec.window == "layers":
        kind = config.layer_types[index] if hasattr(config, "layer_types") else "full_attention"
        attention.layer_type = kind
        attention.sliding_window = config.sliding_window if kind == "sliding_attention" else None
    attention.q_proj = linear(hidden, queries, spec.qkv_bias)
    attention.k_proj = linear(hidden, keys, spec.qkv_bias)
    attention.v_proj = linear(hidden, keys, spec.qkv_bias)
    attention.o_proj = linear(queries, hidden, spec.output_bias)
    if spec.head_norms:
        attention.q_norm = WeightOutline(head if spec.head_norms == "head" else queries)
        attention.k_norm = WeightOutline(head if spec.head_norms == "head" else keys)
    mlp = nn.Module()
    mlp.gate_proj = linear(hidden, inner, spec.mlp_bias)
    mlp.up_proj = linear(hidden, inner, spec.mlp_bias)
    mlp.down_proj = linear(inner, hidden, spec.mlp_bias)
    layer = nn.Module()
    layer.self_attn, layer.mlp = attention, mlp
    for norm in spec.norms:
        layer.add_module(norm, WeightOutline(hidden))
    return layer
