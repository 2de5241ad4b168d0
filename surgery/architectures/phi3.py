"""Phi-3."""

from dataclasses import replace

from surgery.architectures.base import FusedLinear
from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(
    LLAMA,
    model_types=("phi3",),
    query="",
    key="",
    value="",
    gate="",
    up="",
    fused=(
        FusedLinear("qkv_proj", ("attention.query", "attention.key", "attention.value")),
        FusedLinear("gate_up_proj", ("mlp.gate", "mlp.up")),
    ),
    outline=None,
)
