"""Nemotron-H: each layer is Mamba-2, softmax attention or an MLP without a gate, at the same path."""

from dataclasses import replace

from surgery.architectures.base import LinearSublayer
from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(
    LLAMA,
    model_types=("nemotron_h",),
    attention=("mixer",),
    linear=LinearSublayer("mixer", qkv="in_proj"),
    mlp=("mixer",),
    gate="",
    residual_attention=("norm",),
    residual_mlp=("norm",),
    observed_attention=True,
    outline=None,
)
