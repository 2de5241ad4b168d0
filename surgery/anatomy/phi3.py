from dataclasses import replace

from surgery.anatomy.base import Fused
from surgery.anatomy.llama import ANATOMY as LLAMA

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
