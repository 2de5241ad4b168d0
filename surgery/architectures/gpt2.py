"""GPT-2."""

from surgery.architectures.base import Architecture, FusedLinear

ARCHITECTURE = Architecture(
    model_types=("gpt2",),
    layers=("h",),
    attention=("attn",),
    mlp=("mlp",),
    output="c_proj",
    up="c_fc",
    down="c_proj",
    fused=(FusedLinear("c_attn", ("attention.query", "attention.key", "attention.value")),),
    residual_attention=("ln_1",),
    residual_mlp=("ln_2",),
    mlp_width="n_inner",
    rotary="none",
    grouped_heads=False,
)
