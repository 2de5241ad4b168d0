"""Qwen3-Next and Qwen3.5-MoE: experts with a gated shared one; most layers have gated delta networks instead of softmax
attention.
"""

from dataclasses import replace

from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(
    LLAMA,
    model_types=("qwen3_next", "qwen3_5_moe_text"),
    attention=("self_attn", "linear_attn"),
    query="q_proj|in_proj_qkvz|in_proj_qkv",
    output="o_proj|out_proj",
    mlp=("mlp", "mlp.shared_expert"),
    residual_attention=("input_layernorm", "input_layernorm"),
    residual_mlp=("post_attention_layernorm", ""),
    qk_norm=True,
    # Most layers have no softmax attention, and its queries are computed together with a gate of the output
    observed_attention=True,
    outline=None,
)
