"""Llama."""

from surgery.architectures.base import Architecture, OutlineSpec

OUTLINE = OutlineSpec(
    model_type="llama",
    model_class="LlamaForCausalLM",
    norms=("input_layernorm", "post_attention_layernorm"),
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    optional=("attention_bias", "mlp_bias", "head_dim", "pretraining_tp", "rope_theta", "rope_scaling"),
)
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
    outline=OUTLINE,
)
