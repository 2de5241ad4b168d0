"""Llama."""

from surgery.architectures.base import Architecture

ARCHITECTURE = Architecture(
    model_types=("llama",),
    layers=("layers",),
    attention=("self_attn",),
    mlp=("mlp",),
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="o_proj",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    residual_attention=("input_layernorm",),
    residual_mlp=("post_attention_layernorm",),
)
