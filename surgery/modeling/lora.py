"""PEFT LoRA on structured linears: y = B x + scaling * up(down(x)), with the structured weight B frozen.

The last of PEFT's dispatchers is wrapped, so that both get_peft_model and PeftModel.from_pretrained support structured
linears; a registration in one config would not survive saving.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import peft.tuners.lora.model as peft_lora
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer

from surgery.modeling.modules import SplitLinear
from surgery.structures import StructuredLinear


class StructuredLora(Linear):
    """A LoRA layer over a structured or split linear."""

    def __init__(self, base_layer: Any, adapter_name: str, config: Any, **kwargs: Any):
        _check_lora_config(config)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Unsupported layer type")
            super().__init__(base_layer, adapter_name, config=config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raise ValueError: the sum of a structured matrix and an update does not have the structure."""
        base = type(self.get_base_layer()).__name__
        raise ValueError(
            f"a LoRA update cannot be merged into a {base}: the sum is no longer that structure. Keep the adapter, or undo "
            "the structure first: surgery densify OUT --out DIR"
        )


def _check_lora_config(config: Any) -> None:
    """Raise ValueError for options that need the dense weight of the base layer."""
    if getattr(config, "use_dora", False):
        raise ValueError("use_dora needs the dense weight, which a structured linear does not hold; use plain LoRA")
    if config.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r} factors the dense weight, which a structured linear does not hold; "
            "use True, 'gaussian' or 'orthogonal'"
        )


def register_lora() -> None:
    """Make PEFT's LoRA support structured linears. Calling it again does nothing."""
    before = peft_lora.dispatch_default
    if getattr(before, "surgery", False):
        return

    @functools.wraps(before)
    def dispatch(target: Any, adapter_name: str, config: Any, parameter_name: str | None = None, **kwargs: Any) -> Any:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if parameter_name is None and isinstance(base, (StructuredLinear, SplitLinear)):
            return StructuredLora(target, adapter_name, config=config, **kwargs)
        return before(target, adapter_name, config=config, parameter_name=parameter_name, **kwargs)

    dispatch.surgery = True  # type: ignore[attr-defined]
    peft_lora.dispatch_default = dispatch


register_lora()
