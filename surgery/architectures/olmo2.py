"""OLMo 2."""

from dataclasses import replace

from surgery.architectures.base import OutlineSpec
from surgery.architectures.llama import ARCHITECTURE as LLAMA

OUTLINE = OutlineSpec(
    model_type="olmo2",
    model_class="Olmo2ForCausalLM",
    norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    head_norms="heads",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    required=("attention_bias",),
    optional=("rope_theta", "rope_scaling"),
)
# Norms follow the sublayers, so no sublayer output is added to the residual stream unchanged.
ARCHITECTURE = replace(
    LLAMA, model_types=("olmo2",), residual_attention=(), residual_mlp=(), qk_norm=True, outline=OUTLINE
)
