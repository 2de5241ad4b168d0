"""ViT."""

from surgery.architectures.base import Architecture

ARCHITECTURE = Architecture(
    model_types=("vit",),
    layers=("layers", "encoder.layer"),
    attention=("attention",),
    mlp=("mlp", ""),
    query="q_proj|attention.query",
    key="k_proj|attention.key",
    value="v_proj|attention.value",
    output="o_proj|output.dense",
    up="fc1|intermediate.dense",
    down="fc2|output.dense",
    residual_attention=("layernorm_before",),
    residual_mlp=("layernorm_after", "layernorm_after"),
    head="classifier",
    rotary="none",
    grouped_heads=False,
)
