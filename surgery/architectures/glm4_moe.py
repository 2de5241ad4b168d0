"""GLM-4-MoE: experts and shared experts, after some layers with an ordinary MLP."""

from dataclasses import replace

from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(
    LLAMA,
    model_types=("glm4_moe",),
    mlp=("mlp", "mlp.shared_experts"),
    residual_mlp=("post_attention_layernorm", ""),
    outline=None,
)
