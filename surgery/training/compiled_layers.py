"""torch.compile of a model's layers, one by one: layers of equal shapes share one compilation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from surgery.architectures.towers import is_repeated_layer


def compile_layers(model: Any) -> None:
    """Let torch.compile compile every layer of a transformers model, for static shapes."""
    for layer in filter(is_repeated_layer, model.modules()):
        layer.compile(dynamic=False)


def restore_layers(model: Any) -> None:
    """Run all layers without compilation again."""
    for layer in filter(is_repeated_layer, model.modules()):
        layer._compiled_call_impl = None


def try_compiled(models: list[Any], run: Callable[[], None]) -> bool:
    """Compile the layers of `models` and run them once. If that fails, warn, and leave the layers uncompiled.

    Return whether they are compiled. Raises torch.OutOfMemoryError: the compilation is not the cause of it.
    """
    for model in models:
        compile_layers(model)
    try:
        run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the compiler raises exceptions of many types
        for model in models:
            restore_layers(model)
        reason = " ".join(str(error).split())[:200]
        warnings.warn(
            f"the layers cannot be compiled, so they run without compilation: {type(error).__name__}: {reason}",
            stacklevel=2,
        )
        return False
    return True
