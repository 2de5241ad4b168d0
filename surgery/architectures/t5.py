"""T5 v1.0 and v1.1."""

from surgery.architectures.base import Architecture

# Encoder blocks: self-attention, MLP. Decoder blocks: self-attention, cross-attention, MLP.
ARCHITECTURE = Architecture(
    model_types=("t5",),
    layers=("encoder.block", "decoder.block"),
    attention=("layer.0.SelfAttention", "layer.1.EncDecAttention"),
    mlp=("layer.1.DenseReluDense", "layer.2.DenseReluDense"),
    query="q",
    key="k",
    value="v",
    output="o",
    gate="wi_0",
    up="wi|wi_1",
    down="wo",
    residual_attention=("layer.0.layer_norm", "layer.1.layer_norm"),
    residual_mlp=("layer.1.layer_norm", "layer.2.layer_norm"),
    mlp_width="d_ff",
    rotary="none",
    unmixable="T5 adds a learned position bias to its scores, which mixers do not support",
    grouped_heads=False,
)
