from dataclasses import replace

from surgery.architectures.llama import ANATOMY as LLAMA

# The norms follow the sublayers, so nothing is added to the residual stream unchanged.
ANATOMY = replace(LLAMA, model_types=("olmo2",), residual_attention=(), residual_mlp=(), qk_norm=True)
