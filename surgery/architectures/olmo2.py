"""OLMo 2."""

from dataclasses import replace

from surgery.architectures.llama import ARCHITECTURE as LLAMA

# Norms follow the sublayers, so no sublayer output is added to the residual stream unchanged.
ARCHITECTURE = replace(LLAMA, model_types=("olmo2",), residual_attention=(), residual_mlp=(), qk_norm=True)
