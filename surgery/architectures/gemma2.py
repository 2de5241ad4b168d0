"""Gemma 2."""

from dataclasses import replace

from surgery.architectures.base import OutlineSpec
from surgery.architectures.llama import ARCHITECTURE as LLAMA

OUTLINE = OutlineSpec(
    model_type="gemma2",
    model_class="Gemma2ForCausalLM",
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    activation="hidden_activation",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    scale="query_pre_attn_scalar",
    window="layers",
    required=(
        "attention_bias",
        "attn_logit_softcapping",
        "head_dim",
        "layer_types",
        "query_pre_attn_scalar",
        "sliding_window",
    ),
    optional=("final_logit_softcapping", "use_bidirectional_attention", "rope_theta", "rope_scaling"),
)
# A norm stands between each sublayer and the residual stream.
ARCHITECTURE = replace(
    LLAMA,
    model_types=("gemma2",),
    residual_attention=(),
    residual_mlp=(),
    softcap="final_logit_softcapping",
    score_softcap="attn_logit_softcapping",
    outline=OUTLINE,
)
