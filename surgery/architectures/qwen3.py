from dataclasses import replace

from surgery.architectures.llama import ANATOMY as LLAMA

ANATOMY = replace(LLAMA, model_types=("qwen3",), qk_norm=True)
