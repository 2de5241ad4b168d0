"""A model in memory: whether it is one of transformers, what was replaced in it, its adapters, the device of its
weights, and the hooks of its modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from surgery.checkpoint.table import QUANT_METHOD
from surgery.core.errors import SurgeryError
from surgery.modeling.attention import MixerAttention
from surgery.modeling.modules import GuardedLinear, SplitLinear
from surgery.structures import StructuredLinear
from surgery.structures.quantized import QuantizedLinear

HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)


def copy_hooks(before: Any, after: Any) -> None:
    """Give a module the forward and backward hooks of another: the same dicts, so that the handles of hooks keep
    working.
    """
    for name in HOOKS:
        setattr(after, name, getattr(before, name))


def has_adapter(model: Any) -> bool:
    """Return whether linears of the model have a PEFT adapter. Does not import PEFT."""
    return "BaseTunerLayer" in {cls.__name__ for module in model.modules() for cls in type(module).__mro__}


def is_converted(model: Any) -> bool:
    """Return whether modules of the model were replaced by structured ones or by mixers."""
    table = getattr(getattr(model, "config", None), "quantization_config", None)
    method = table.get("quant_method") if isinstance(table, dict) else getattr(table, "quant_method", None)
    replaced = (StructuredLinear, SplitLinear, GuardedLinear, QuantizedLinear, MixerAttention)
    return method == QUANT_METHOD or any(isinstance(module, replaced) for module in model.modules())


def is_library_model(model: Any) -> bool:
    """Return whether a module is a model of transformers."""
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def check_is_module(model: Any, function: str) -> None:
    """Raise SurgeryError unless `model` is a module. function: its caller, for the message."""
    if not isinstance(model, nn.Module):
        raise SurgeryError(
            f"surgery.{function} takes a model in memory (got a {type(model).__name__}: {str(model)[:80]!r}). Load it "
            "first, or "
            "use surgery.convert(source, recipe, out) on a checkpoint"
        )


def model_device(model: Any) -> torch.device:
    """Return the device of all weights.

    Raise SurgeryError if they are on meta, on several devices, or moved by accelerate.
    """
    kind = type(model).__name__
    places: dict[torch.device, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            places.setdefault(tensor.device, name)
    if not places:
        raise SurgeryError(f"{kind} has no parameters, so there is nothing to replace")
    if (meta := places.get(torch.device("meta"))) is not None:
        raise SurgeryError(
            f"{kind}: {meta} is on the meta device and holds no values (offloaded, or not loaded). Load the weights "
            "first; "
            "surgery.plan(model, recipe) needs none"
        )
    if len(places) > 1 or any("_hf_hook" in vars(module) for module in model.modules()):
        where = ", ".join(f"{name} on {device}" for device, name in list(places.items())[:3])
        raise SurgeryError(
            f"{kind} is dispatched over devices ({where}, hf_device_map {getattr(model, 'hf_device_map', None)}), and "
            "replaced "
            "modules would not be. Load it without device_map, apply surgery, then dispatch it "
            "(accelerate.dispatch_model)"
        )
    return next(iter(places))
