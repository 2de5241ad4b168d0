"""Registration with transformers and peft, which makes converted checkpoints native Hugging Face checkpoints.

The table of replaced modules is the config's `quantization_config`. A registered quantizer replaces the modules on the
meta device before transformers loads the weights. After loading, only the table remains of it, so half(), float(),
Trainer, save_pretrained and deepcopy treat the model as an ordinary one. See HfQuantizer in
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/quantizers/base.py
"""

from __future__ import annotations

from surgery.core.import_hooks import run_after_import


def register() -> None:
    """Register this package's classes with transformers, peft and torchao, now or on their import."""
    run_after_import("transformers.quantizers.auto", _register_with_transformers)
    run_after_import("peft.tuners.lora.model", _register_with_peft)
    run_after_import("torchao.quantization.quant_api", _register_with_torchao)


# Each of these modules registers its classes at its end. Whoever imports it first imports transformers, peft or torchao
# with it, so the callback may find it half imported: importing it once more then does nothing.
def _register_with_transformers() -> None:
    import surgery.modeling.quantizer  # noqa: F401


def _register_with_peft() -> None:
    import surgery.modeling.lora  # noqa: F401


def _register_with_torchao() -> None:
    import surgery.modeling.torchao  # noqa: F401
