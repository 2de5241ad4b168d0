"""Gemma 3."""

from dataclasses import replace

from surgery.architectures.gemma2 import ARCHITECTURE as GEMMA2

ARCHITECTURE = replace(GEMMA2, model_types=("gemma3_text", "gemma3"), qk_norm=True)
