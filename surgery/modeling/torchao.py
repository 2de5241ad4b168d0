"""torchao's `quantize_` on converted models: weight-only int8 and int4 store the linears as `surgery quantize` does.

`quantize_` looks for nn.Linear and would skip structured linears without a word. Its default filter is replaced by one
that also accepts a whole converted model, and the handlers of its configs, in torchao's registry, by ones that know
such a model. Everything else is passed on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from surgery.core.errors import SurgeryError
from surgery.modeling.modules import REPLACED

SUPPORTED = "Int8WeightOnlyConfig (per row or per group) and Int4WeightOnlyConfig"


def has_replaced_linears(module: nn.Module) -> bool:
    """Return whether a module is or contains a linear that this package replaced."""
    return any(isinstance(submodule, REPLACED) for submodule in module.modules())


def storage_options(config: Any) -> dict[str, Any]:
    """Return {"bits", "group"} of a torchao config.

    Raises SurgeryError if structured linears cannot be stored as it says.
    """
    kind, granularity = type(config).__name__, getattr(config, "granularity", None)
    if kind == "Int8WeightOnlyConfig" and type(granularity).__name__ in ("PerRow", "PerGroup"):
        return {"bits": 8, "group": getattr(granularity, "group_size", None)}
    if kind == "Int4WeightOnlyConfig" and getattr(config.int4_choose_qparams_algorithm, "name", "") == "TINYGEMM":
        return {"bits": 4, "group": config.group_size}
    raise SurgeryError(f"structured linears can be quantized with {SUPPORTED} (got {str(config)[:200]})")


def register_handlers() -> None:
    """Make `quantize_` quantize converted models. Calling it again does nothing."""
    import torchao.quantization.quant_api as quant_api
    from torchao.quantization.transform_module import _QUANTIZE_CONFIG_HANDLER

    accepts: Callable[..., bool] = quant_api._is_linear
    defaults = quant_api.quantize_.__defaults__ or ()
    if getattr(accepts, "surgery", False) or accepts not in defaults:
        return  # done, or another torchao: `surgery.quantize` needs none

    @functools.wraps(accepts)
    def accepts_converted(module: Any, *names: Any) -> bool:
        if type(module) is not nn.Linear and not isinstance(module, nn.Linear) and has_replaced_linears(module):
            return True
        return accepts(module, *names)

    accepts_converted.surgery = True  # type: ignore[attr-defined]
    quant_api._is_linear = accepts_converted
    quant_api.quantize_.__defaults__ = tuple(accepts_converted if value is accepts else value for value in defaults)
    for config_type, handler in list(_QUANTIZE_CONFIG_HANDLER.items()):
        _QUANTIZE_CONFIG_HANDLER[config_type] = _with_converted_models(handler)


def _with_converted_models(handler: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @functools.wraps(handler)
    def handle(module: nn.Module, config: Any, *rest: Any, **options: Any) -> nn.Module:
        if not has_replaced_linears(module):
            return handler(module, config, *rest, **options)
        from surgery.modeling.quantize import quantize_live  # imports transformers, which may be importing torchao now

        quantize_live(module, **storage_options(config))
        return module

    handle.__signature__ = inspect.signature(handler)  # type: ignore[attr-defined]
    return handle


register_handlers()
