"""Qwen3."""

from dataclasses import replace

from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(LLAMA, model_types=("qwen3",), qk_norm=True)
