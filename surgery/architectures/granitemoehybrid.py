"""Granite 4: Mamba-2 in most layers; merged experts and a shared MLP; residuals are multiplied by a constant."""

from dataclasses import replace

from surgery.architectures.base import FusedLinear, LinearSublayer
from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(
    LLAMA,
    model_types=("granitemoehybrid",),
    linear=LinearSublayer("mamba", qkv="in_proj"),
    mlp=("shared_mlp",),
    gate="",
    up="",
    down="output_linear",
    fused=(FusedLinear("input_linear", ("mlp.gate", "mlp.up")),),
    residual_attention=(),
    residual_mlp=(),
    observed_attention=True,
    outline=None,
)
