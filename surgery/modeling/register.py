"""Registration with transformers and peft, which makes converted checkpoints native Hugging Face checkpoints.

The table of replaced modules is the config's `quantization_config`. A registered quantizer replaces the modules on the meta
device before transformers loads the weights. After loading, only the table remains of it, so half(), float(), Trainer,
save_pretrained and deepcopy treat the model as an ordinary one.
"""

from __future__ import annotations

from surgery.checkpoint.table import QUANT_METHOD
from surgery.core.import_hooks import run_after_import


def register() -> None:
    """Register this package's classes with transformers and peft, now or on their import."""
    run_after_import("transformers.quantizers.auto", _register_quantizer)
    run_after_import("peft.tuners.lora.model", _register_lora)


def _register_lora() -> None:
    from surgery.modeling.lora import register_lora

    register_lora()


def _register_quantizer() -> None:
    import transformers.quantizers.auto as auto

    if QUANT_METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return
    from surgery.modeling.quantization_config import SurgeryConfig
    from surgery.modeling.quantizer import SurgeryQuantizer

    auto.register_quantization_config(QUANT_METHOD)(SurgeryConfig)
    auto.register_quantizer(QUANT_METHOD)(SurgeryQuantizer)
