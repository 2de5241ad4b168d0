"""Qwen2."""

from dataclasses import replace

from surgery.architectures.base import OutlineSpec
from surgery.architectures.llama import ARCHITECTURE as LLAMA

OUTLINE = OutlineSpec(
    model_type="qwen2",
    model_class="Qwen2ForCausalLM",
    norms=("input_layernorm", "post_attention_layernorm"),
    qkv_bias="always",
    window="layers",
    required=("use_sliding_window", "sliding_window"),
    optional=("head_dim", "layer_types", "max_window_layers", "rope_theta", "rope_scaling"),
)
ARCHITECTURE = replace(LLAMA, model_types=("qwen2",), outline=OUTLINE)
