"""Mistral."""

from dataclasses import replace

from surgery.architectures.base import OutlineSpec
from surgery.architectures.llama import ARCHITECTURE as LLAMA

OUTLINE = OutlineSpec(
    model_type="mistral",
    model_class="MistralForCausalLM",
    norms=("input_layernorm", "post_attention_layernorm"),
    window="model",
    required=("sliding_window",),
    optional=("head_dim", "rope_theta", "rope_scaling"),
)
ARCHITECTURE = replace(LLAMA, model_types=("mistral",), outline=OUTLINE)
