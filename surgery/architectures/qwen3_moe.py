"""Qwen3-MoE: experts, without a shared one; queries and keys are normalized."""

from dataclasses import replace

from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(LLAMA, model_types=("qwen3_moe",), qk_norm=True, outline=None)
