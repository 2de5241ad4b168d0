"""Plugin of vLLM that serves converted checkpoints: structured linears, and mixers whose state is bounded, sliding windows.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins` in pyproject.toml); the user passes
no option. This package imports without vLLM; the modules `linear`, `config_parser`, `mixer_layer` and `model` import
it.
"""

from __future__ import annotations

import logging


def register() -> None:
    """Register the table of replaced linears, the model class of checkpoints with mixers, and the config parser that
    chooses the class. Calling it again does nothing.

    With an untested version of vLLM it says so and registers nothing: ordinary checkpoints are served as without the
    plugin, and vLLM refuses converted ones (unknown quantization method).
    """
    from vllm import ModelRegistry
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from surgery.checkpoint.table import QUANT_METHOD
    from surgery.vllm.versions import installed_version, version_problem

    if QUANT_METHOD in QUANTIZATION_METHODS:
        return
    if (problem := version_problem(installed_version())) is not None:
        logging.getLogger("vllm.plugins.surgery").warning("the plugin surgery stays off: %s", problem)
        return
    from surgery.vllm.config_parser import register_parser
    from surgery.vllm.linear import SurgeryTable

    register_quantization_config(QUANT_METHOD)(SurgeryTable)
    register_parser()
    ModelRegistry.register_model(MIXER_CLASS, "surgery.vllm.model:SurgeryForCausalLM")
    ModelRegistry.register_model(WINDOW_CLASS, "surgery.vllm.model:SurgeryWindowForCausalLM")
    ModelRegistry.register_model(LOGITS_CLASS, "surgery.vllm.model:SurgeryLogitsForCausalLM")


# The model classes of checkpoints with mixers: with linear ones, whose states make vLLM's cache a hybrid one, and with
# windows only.
MIXER_CLASS, WINDOW_CLASS = "SurgeryForCausalLM", "SurgeryWindowForCausalLM"
LOGITS_CLASS = "SurgeryLogitsForCausalLM"  # of models without mixers that cap or scale their logits
