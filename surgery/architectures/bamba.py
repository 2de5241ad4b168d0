"""Bamba: Mamba-2 in most layers, softmax attention in the others."""

from dataclasses import replace

from surgery.architectures.base import LinearSublayer
from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(
    LLAMA,
    model_types=("bamba",),
    linear=LinearSublayer("mamba", qkv="in_proj"),
    mlp=("feed_forward",),
    residual_mlp=("pre_ff_layernorm",),
    observed_attention=True,
    outline=None,
)
