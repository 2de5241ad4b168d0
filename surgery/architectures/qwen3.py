"""Qwen3."""

from dataclasses import replace

from surgery.architectures.base import OutlineSpec
from surgery.architectures.llama import ARCHITECTURE as LLAMA

OUTLINE = OutlineSpec(
    model_type="qwen3",
    model_class="Qwen3ForCausalLM",
    norms=("input_layernorm", "post_attention_layernorm"),
    head_norms="head",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    window="layers",
    required=("attention_bias", "head_dim", "use_sliding_window", "sliding_window"),
    optional=("layer_types", "max_window_layers", "rope_theta", "rope_scaling"),
)
ARCHITECTURE = replace(LLAMA, model_types=("qwen3",), qk_norm=True, outline=OUTLINE)
