"""GPT-NeoX and Pythia."""

from surgery.architectures.base import Architecture, FusedLinear

# Attention and MLP run in parallel on the same residual stream.
ARCHITECTURE = Architecture(
    model_types=("gpt_neox",),
    layers=("layers",),
    attention=("attention",),
    mlp=("mlp",),
    output="dense",
    up="dense_h_to_4h",
    down="dense_4h_to_h",
    fused=(FusedLinear("query_key_value", ("attention.query", "attention.key", "attention.value"), "per_head"),),
    head="embed_out|lm_head",
    head_dim="head_size",
    grouped_heads=False,
)
