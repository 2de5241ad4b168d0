"""Mamba-2: no layer with softmax attention."""

from dataclasses import replace

from surgery.architectures.base import LinearSublayer
from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(
    LLAMA,
    model_types=("mamba2",),
    attention=(),
    mlp=(),
    linear=LinearSublayer("mixer", qkv="in_proj"),
    residual_attention=(),
    residual_mlp=(),
    observed_attention=True,
    outline=None,
)
