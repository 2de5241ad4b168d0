"""PEFT LoRA on structured linears: y = B x + scaling * up(down(x)), with the structured weight B frozen.

The last of PEFT's dispatchers is wrapped, so that both get_peft_model and PeftModel.from_pretrained support structured
linears; a registration in one config would not survive saving. PEFT's list of `target_modules="all-linear"`, which
holds classes of torch, is extended by structured and split linears; linears inside mixers (gates) are not adapted.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import peft.tuners.lora.model as peft_lora
import peft.tuners.tuners_utils as peft_utils
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer

from surgery.mixers import Mixer
from surgery.modeling.joined import JoinedLinear
from surgery.modeling.modules import GuardedLinear, SplitLinear
from surgery.structures import StructuredLinear
from surgery.structures.quantized import QuantizedLinear
from surgery.structures.shared_basis import SharedBasis

LINEARS = (StructuredLinear, SplitLinear, JoinedLinear, QuantizedLinear)


class StructuredLora(Linear):
    """A LoRA layer over a structured or split linear."""

    def __init__(self, base_layer: Any, adapter_name: str, config: Any, **kwargs: Any):
        _check_lora_config(config, "which a structured linear does not hold")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Unsupported layer type")
            super().__init__(base_layer, adapter_name, config=config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raise ValueError: the sum of a structured matrix and an update does not have the structure."""
        base = type(self.get_base_layer()).__name__
        raise ValueError(
            f"a LoRA update cannot be merged into a {base}: the sum is no longer that structure. Keep the adapter, or "
            "undo "
            "the structure first: surgery densify OUT --out DIR"
        )


def _check_lora_config(config: Any, reason: str) -> None:
    """Raise ValueError for options that need the dense weight of the base layer as a matrix. reason: why it has none,
    as a clause about the dense weight.
    """
    if getattr(config, "use_dora", False):
        raise ValueError(f"use_dora needs the dense weight, {reason}; use plain LoRA")
    if config.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r} factors the dense weight, {reason}; use True, 'gaussian' "
            "or 'orthogonal'"
        )


def register_lora() -> None:
    """Make PEFT's LoRA support structured linears. Calling it again does nothing."""
    before = peft_lora.dispatch_default
    if getattr(before, "surgery", False):
        return

    @functools.wraps(before)
    def dispatch(target: Any, adapter_name: str, config: Any, parameter_name: str | None = None, **kwargs: Any) -> Any:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, SharedBasis):
            raise ValueError("the basis that experts share takes no adapter; adapt their linears (target_modules)")
        if parameter_name is None and isinstance(base, LINEARS):
            return StructuredLora(target, adapter_name, config=config, **kwargs)
        if parameter_name is None and isinstance(base, GuardedLinear):  # DoRA would take the norms of the wrong axis
            _check_lora_config(
                config, "which the output projection of a mixer stores as (1, out, in), not as the matrix (out, in)"
            )
        return before(target, adapter_name, config=config, parameter_name=parameter_name, **kwargs)

    dispatch.surgery = True  # type: ignore[attr-defined]
    peft_lora.dispatch_default = dispatch
    include = peft_utils._maybe_include_all_linear_layers

    @functools.wraps(include)
    def include_structured(peft_config: Any, model: Any) -> Any:
        target_modules = getattr(peft_config, "target_modules", None)
        adapter_config: Any = include(peft_config, model)
        if isinstance(target_modules, str) and target_modules.lower() == peft_utils.INCLUDE_LINEAR_LAYERS_SHORTHAND:
            adapter_config.target_modules = all_linears(model, adapter_config.target_modules)
        return adapter_config

    peft_utils._maybe_include_all_linear_layers = include_structured


def all_linears(model: Any, dense: set[str]) -> set[str]:
    """Return the linears that "all-linear" adapts: PEFT's choice of dense ones, structured and split ones, and none
    inside a mixer.

    A structured head is left out, as PEFT leaves out a dense one.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    names = set(dense)
    inside: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, (Mixer, SplitLinear, JoinedLinear, BaseTunerLayer)):
            inside.append(f"{name}.")
        base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        if isinstance(base, LINEARS) and not isinstance(base, SharedBasis) and base is not head:
            names.add(name)
    return {name for name in names if not name.startswith(tuple(inside))}


register_lora()
