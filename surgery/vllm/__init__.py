"""Plugin of vLLM that serves converted checkpoints: structured linears, and mixers whose state is bounded.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins` in pyproject.toml); the user passes
no option. This package imports without vLLM; the modules `linear`, `config_parser`, `mixer_layer` and `model` import
it.
"""

from __future__ import annotations


def register() -> None:
    """Register the table of replaced linears, the model class of checkpoints with mixers, and the config parser that
    chooses the class. Calling it again does nothing."""
    from vllm import ModelRegistry
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from surgery.checkpoint.table import QUANT_METHOD

    if QUANT_METHOD in QUANTIZATION_METHODS:
        return
    from surgery.vllm.config_parser import register_parser
    from surgery.vllm.linear import SurgeryTable

    register_quantization_config(QUANT_METHOD)(SurgeryTable)
    register_parser()
    ModelRegistry.register_model(MIXER_CLASS, "surgery.vllm.model:SurgeryForCausalLM")


MIXER_CLASS = "SurgeryForCausalLM"  # the model class of checkpoints with mixers
