"""torch.compile of a model's layers, one by one: layers of equal modules and shapes share one compilation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from surgery.architectures.towers import is_repeated_layer

AUTO_TOKENS = 4_000_000  # tokens of a stage from which a compilation of some 15 s is worth its time at 135M parameters
AUTO_KINDS = 8  # most kinds of layers that `compile: auto` compiles: each takes a few seconds
COMPILATIONS_OF_A_KIND = 4  # with and without gradients, in training and evaluation mode


def is_worth_compiling(models: Sequence[Any], tokens: int) -> bool:
    """Return whether compiled layers save more time than their compilation takes, in a stage of `tokens` tokens."""
    return tokens >= AUTO_TOKENS and count_layer_kinds(models) <= AUTO_KINDS


def count_layer_kinds(models: Sequence[Any]) -> int:
    """Return how many layers differ in the classes of their modules or the shapes of their tensors."""
    layers = [layer for model in models for layer in model.modules() if is_repeated_layer(layer)]
    return len(
        {
            (
                *((name, type(module)) for name, module in layer.named_modules()),
                *((name, t.shape, t.dtype) for name, t in layer.state_dict(keep_vars=True).items()),
            )
            for layer in layers
        }
    )


@contextmanager
def compilation_settings(models: Sequence[Any]) -> Iterator[None]:
    """Set what torch.compile compiles within the context.

    It keeps a compilation of every kind of layer; by default it gives up after the eighth. Inputs of matrix products that
    elementwise operations make of tensors that are kept anyway (normed hidden states, the gated product of an MLP) are
    computed again in the backward pass; by default torch.compile keeps them too, 5.4 of 18 KB a token in a Llama layer of
    width 576. Products, reductions and kernels are never computed twice.
    """
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    limit = max(dynamo.recompile_limit, COMPILATIONS_OF_A_KIND * count_layer_kinds(models))
    with dynamo.patch(recompile_limit=limit), functorch.patch(ban_recompute_materialized_backward=False):
        yield


@contextmanager
def without_compilation(models: Sequence[Any]) -> Iterator[None]:
    """Run the layers of the models without their compilations within the context."""
    calls = [(x, x._compiled_call_impl) for model in models for x in model.modules() if is_repeated_layer(x)]
    for layer, _ in calls:
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        for layer, call in calls:
            layer._compiled_call_impl = call


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
