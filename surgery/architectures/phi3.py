from dataclasses import replace

from surgery.architectures.base import Fused
from surgery.architectures.llama import ANATOMY as LLAMA

ANATOMY = replace(
    LLAMA,
    model_types=("phi3",),
    query="",
    key="",
    value="",
    gate="",
    up="",
    fused=(
        Fused("qkv_proj", ("attention.query", "attention.key", "attention.value")),
        Fused("gate_up_proj", ("mlp.gate", "mlp.up")),
    ),
)
