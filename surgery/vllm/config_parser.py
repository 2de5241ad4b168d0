"""The parser of config.json in vLLM: it checks the table of a converted checkpoint and chooses the class that serves
it.

vLLM chooses a model class by the `architectures` of a parsed config, before quantization configs are looked at. So the
parser of Hugging Face's format is replaced by this subclass of it, which leaves all other checkpoints as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.transformers_utils.config import get_config_parser, register_config_parser

from surgery.mixers.linear_config import LinearAttention
from surgery.vllm import LOGITS_CLASS, MIXER_CLASS, WINDOW_CLASS
from surgery.vllm.servable import TRANSFORMERS_CLASS, changes_logits, check_config, is_converted

HF_FORMAT = "hf"


def register_parser() -> None:
    """Replace vLLM's parser of config.json by one that knows converted checkpoints."""
    base: Any = type(get_config_parser(HF_FORMAT))

    class SurgeryConfigParser(base):
        """vLLM's parser; converted checkpoints get the class that serves their table."""

        def parse(self, model: str | Path, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
            """Return (config.json, the config). Raises SurgeryError for tables that are not served."""
            data, config = super().parse(model, *args, **kwargs)
            if is_converted(data):
                config.architectures = [choose_class(data, str(model))]
            return data, config

    register_config_parser(HF_FORMAT)(SurgeryConfigParser)


def choose_class(data: dict[str, Any], name: str) -> str:
    """Return the name of the model class in vLLM's registry that serves a converted checkpoint's config.json."""
    table = check_config(data, name)
    if table.mixers:
        has_states = any(isinstance(mixer, LinearAttention) for mixer in table.mixers.values())
        return MIXER_CLASS if has_states else WINDOW_CLASS
    return table.own_class(data) or (LOGITS_CLASS if changes_logits(data) else TRANSFORMERS_CLASS)
