"""OLMo-hybrid: gated delta networks in most layers, softmax attention in the others."""

from dataclasses import replace

from surgery.architectures.base import LinearSublayer
from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(
    LLAMA,
    model_types=("olmo_hybrid",),
    linear=LinearSublayer("linear_attn", qkv="q_proj|k_proj|v_proj", gate="g_proj", output="o_proj"),
    residual_attention=(),
    residual_mlp=(),
    qk_norm=True,
    observed_attention=True,
    outline=None,
)
