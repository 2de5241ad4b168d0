"""Mixtral: each layer's MLP is a mixture of experts."""

from dataclasses import replace

from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(LLAMA, model_types=("mixtral",), outline=None)
