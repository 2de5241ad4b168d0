"""BERT."""

from surgery.architectures.base import Architecture

# Post-norm: the norm follows the residual sum, so sublayer outputs are added unchanged.
ARCHITECTURE = Architecture(
    model_types=("bert",),
    layers=("encoder.layer",),
    attention=("attention", "crossattention"),
    mlp=("",),
    query="self.query",
    key="self.key",
    value="self.value",
    output="output.dense",
    up="intermediate.dense",
    down="output.dense",
    residual_attention=("attention.self.query", "crossattention.self.query"),
    residual_mlp=("intermediate.dense",),
    head="cls.predictions.decoder",
    core="self",
    head_dim="attention_head_size",
    rotary="none",
    grouped_heads=False,
)
