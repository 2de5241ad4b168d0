"""Falcon-H1: softmax attention and Mamba-2 side by side in every layer; outputs are multiplied by constants."""

from dataclasses import replace

from surgery.architectures.base import LinearSublayer
from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(
    LLAMA,
    model_types=("falcon_h1",),
    linear=LinearSublayer("mamba", qkv="in_proj"),
    mlp=("feed_forward",),
    residual_attention=(),
    residual_mlp=(),
    observed_attention=True,
    outline=None,
)
