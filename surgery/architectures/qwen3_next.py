"""Qwen3-Next and Qwen3.5, dense and with experts: most layers have gated delta networks instead of softmax attention."""

from dataclasses import replace

from surgery.architectures.base import LinearSublayer
from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(
    LLAMA,
    model_types=("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    linear=LinearSublayer("linear_attn", qkv="in_proj_qkvz|in_proj_qkv", gate="in_proj_z"),
    mlp=("mlp", "mlp.shared_expert"),
    residual_mlp=("post_attention_layernorm", ""),
    qk_norm=True,
    # Most layers have no softmax attention, and its queries are computed together with a gate of the output
    observed_attention=True,
    outline=None,
)
