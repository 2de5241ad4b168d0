"""Qwen2."""

from dataclasses import replace

from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(LLAMA, model_types=("qwen2",))
