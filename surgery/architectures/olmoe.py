"""OLMoE: each layer's MLP is a mixture of experts; queries and keys are normalized."""

from dataclasses import replace

from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(LLAMA, model_types=("olmoe",), qk_norm=True, outline=None)
