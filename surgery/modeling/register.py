"""A native Hugging Face checkpoint: the table of stand-ins is the config's `quantization_config`, and a
registered quantizer puts them in place on the meta device, before transformers loads the weights.

After loading nothing of a quantised model is left but the table, so that half(), float(), Trainer,
save_pretrained and deepcopy treat the model as the ordinary one it is.
"""

from __future__ import annotations

from surgery.checkpoint.table import QUANT_METHOD
from surgery.core.import_hooks import run_after_import


def register() -> None:
    """Make transformers and peft know us, now or when they are imported."""
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
