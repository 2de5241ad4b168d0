"""Qwen2-MoE: experts, and a shared expert whose output is multiplied by a gate."""

from dataclasses import replace

from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(
    LLAMA,
    model_types=("qwen2_moe",),
    mlp=("mlp", "mlp.shared_expert"),
    residual_mlp=("post_attention_layernorm", ""),
    outline=None,
)
