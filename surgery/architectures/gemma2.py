"""Gemma 2."""

from dataclasses import replace

from surgery.architectures.llama import ARCHITECTURE as LLAMA

# A norm stands between each sublayer and the residual stream.
ARCHITECTURE = replace(
    LLAMA,
    model_types=("gemma2",),
    residual_attention=(),
    residual_mlp=(),
    softcap="final_logit_softcapping",
    score_softcap="attn_logit_softcapping",
)
