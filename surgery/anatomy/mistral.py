from dataclasses import replace

from surgery.anatomy.llama import ANATOMY as LLAMA

ANATOMY = replace(LLAMA, model_types=("mistral",))
