from dataclasses import replace

from surgery.architectures.gemma2 import ANATOMY as GEMMA2

ANATOMY = replace(GEMMA2, model_types=("gemma3_text", "gemma3"), qk_norm=True)
