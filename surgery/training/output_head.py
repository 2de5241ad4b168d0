"""Run a causal language model without computing its logits: the caller takes the place of the output head.

    sums = model_loss(run, inputs, targets, weights)             run: possibly wrapped by DDP, FSDP2 or DeepSpeed
    logits = model_logits(call, teacher, shape)                  to be computed some tokens at a time

Losses are computed within the model's forward pass, where wrappers have gathered the head's weight. The model goes on
with a small tensor instead of logits. What models do with logits afterwards (softcap of Gemma, scale of Granite and
Cohere) is read from their config and compared with what they do to a ramp of numbers, at the first call.

B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from surgery.architectures.logits import RAMP, is_transform, logit_candidates, replaced_forward
from surgery.core.errors import SurgeryError
from surgery.core.logit_rows import UNCHANGED, LogitTransform
from surgery.training.linear_loss import (
    DenseHead,
    Head,
    Logits,
    LossSums,
    LossWeights,
    ModuleHead,
    NoHead,
    Targets,
    linear_loss,
)
from surgery.training.sharded_tensors import full_tensor

_transforms: weakref.WeakKeyDictionary[nn.Module, LogitTransform | None] = weakref.WeakKeyDictionary()


def bare_model(run: Any) -> Any:
    """Return the model inside of a wrapper, or None for a callable without one."""
    while run is not None and not hasattr(run, "get_output_embeddings"):
        run = getattr(run, "module", None)
    return run


# -- losses ----------------------------------------------------------------------------------------
def model_loss(run: Any, inputs: dict[str, Any], targets: Targets, weights: LossWeights) -> LossSums:
    """Run a model and return its loss, from hidden states where possible. targets: of its B x T tokens.

    run: the model, or its wrapper.
    """
    model = bare_model(run)
    sums: list[LossSums] = []

    def use(hidden_BTD: Tensor, head: Head, transform: LogitTransform) -> Tensor:
        sums[:] = [linear_loss(hidden_BTD.flatten(0, 1), head, _on(targets, hidden_BTD), weights, transform)]
        return sums[0].total

    output, in_place = run_with_head(lambda: run(**inputs), model, inputs["input_ids"].shape, use)
    if in_place:  # wrappers watch the model's output for the beginning of the backward pass
        return sums[0]._replace(total=_After.apply(sums[0].total, output.logits))
    logits_NV = output.logits.flatten(0, 1)
    return linear_loss(logits_NV, NoHead(), _on(targets, logits_NV), weights, UNCHANGED)


def model_logits(call: Callable[[], Any], model: Any, shape: Sequence[int]) -> Logits:
    """Run a model without gradients; return its logits as hidden states and a head, or whole where that is not possible.

    call: runs the model. shape: (B, T) of its tokens.
    """
    found: list[tuple[Tensor, LogitTransform]] = []

    def use(hidden_BTD: Tensor, head: Head, transform: LogitTransform) -> Tensor:
        found[:] = [(hidden_BTD, transform)]
        return hidden_BTD.new_zeros(())

    with torch.no_grad():
        output, in_place = run_with_head(call, model, shape, use)
    if not in_place:
        return Logits(output.logits.flatten(0, 1), None, UNCHANGED)
    ((hidden_BTD, transform),) = found
    return Logits(hidden_BTD.flatten(0, 1), head_product(model.get_output_embeddings()), transform)


def _on(targets: Targets, like: Tensor) -> Targets:
    """Return the targets on the device of a tensor."""
    top = None if targets.top is None else type(targets.top)(*(t.to(like.device) for t in targets.top))
    labels_N = None if targets.labels_N is None else targets.labels_N.to(like.device)
    return Targets(targets.weight_N.to(like.device), labels_N, targets.teacher, top, targets.k)


class _After(torch.autograd.Function):
    """`value`, whose backward pass begins at `output` with a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, output: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (output,) = ctx.saved_tensors
        return grad, torch.zeros_like(output)


class _Instead(torch.autograd.Function):
    """`output`, as if it were computed from `value`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, value: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.new_zeros(())


# -- in the head's place ---------------------------------------------------------------------------
Use = Callable[[Tensor, Head, LogitTransform], Tensor]  # hidden_BTD, head, transform -> a scalar


def run_with_head(call: Callable[[], Any], model: Any, shape: Sequence[int], use: Use) -> tuple[Any, bool]:
    """Run a model with `use` in the place of its output head. Return (its output, whether `use` was called).

    The output holds a small tensor instead of logits, whose gradient reaches the scalar of `use`; or the logits, where
    the model does not call a head once with all hidden states, or changes logits in an unknown way. shape: (B, T).
    """
    module = None if model is None else model.get_output_embeddings()
    if not isinstance(module, nn.Module):
        return call(), False
    if module in _transforms:
        transform = _transforms[module]
        return (call(), False) if transform is None else (_call_in_place(call, module, shape, use, transform)[0], True)
    size = getattr(module, "out_features", None) or model.config.get_text_config().vocab_size
    ramp_V = torch.linspace(-RAMP, RAMP, size)
    candidates = list(logit_candidates(model))
    transform = candidates[0]
    for _ in range(2):
        output, problem = _call_in_place(call, module, shape, use, transform, ramp_V)
        matching = [] if problem else [c for c in candidates if is_transform(c, ramp_V, output.logits)]
        if transform in matching:
            _transforms[module] = transform
            return output, True
        if not matching:
            break
        transform = matching[0]
    _transforms[module] = None
    problem = problem or "they are not the product of its head, scaled and softcapped as its config says"
    warnings.warn(
        f"losses of {type(model).__name__} are computed from whole logits, which takes more memory and time: {problem}",
        stacklevel=4,
    )
    return call(), False


def _call_in_place(
    call: Callable[[], Any], module: nn.Module, shape: Sequence[int], use: Use, transform: LogitTransform,
    ramp_V: Tensor | None = None,
) -> tuple[Any, str]:  # fmt: skip
    """Return (the output of `call` with `use` in the head's place, or None; what went wrong, or "").

    ramp_V: given at the first call, becomes the model's logits; errors of the model's code after the head are returned.
    """
    forward = module.forward
    calls: list[bool] = []

    def in_place(hidden_BTD: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or hidden_BTD.shape[:-1] != shape:
            calls.append(False)
            return forward(hidden_BTD, *args, **kwargs)
        value = use(hidden_BTD, make_head(module, forward), transform)
        calls.append(True)
        if ramp_V is None:
            shown = hidden_BTD.new_zeros((len(hidden_BTD), 1, 1))
        else:
            shown = ramp_V.to(hidden_BTD.device).expand(len(hidden_BTD), 1, -1)
        return _Instead.apply(shown, value)

    with replaced_forward(module, in_place):
        try:
            output = call()
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            if ramp_V is None or not any(calls) or isinstance(error, torch.OutOfMemoryError):
                raise
            return None, str(error).splitlines()[0] if str(error) else type(error).__name__
    if calls == [True]:
        return output, ""
    if ramp_V is None:
        raise SurgeryError(
            f"{type(module).__name__}, the output head, was called {len(calls)} times in one forward pass, before that "
            "once. Losses need a model that calls it once with all hidden states."
        )
    return None, "the model does not call its head once with all hidden states"


def make_head(module: nn.Module, forward: Callable[..., Tensor]) -> Head:
    """Return the products of an output head. forward: the module's own."""
    if is_dense(module, forward):
        return DenseHead(module.weight, module.bias)  # type: ignore[arg-type]
    return ModuleHead(module, forward)


def is_dense(module: nn.Module, forward: Callable[..., Tensor]) -> bool:
    """Return whether the module computes x W^T + b with a plain weight, which is not quantized."""
    weight: Any = getattr(module, "weight", None)
    return (
        getattr(forward, "__func__", None) is nn.Linear.forward
        and type(weight) in (nn.Parameter, Tensor)
        and weight.is_floating_point()
    )


def head_product(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function from hidden states to the logits of a head, for calls without gradients outside of the
    model's forward pass.
    """
    if not (getattr(module.forward, "__func__", None) is nn.Linear.forward and hasattr(module.weight, "full_tensor")):
        return module.forward
    weight_VD, bias_V = (None if p is None else full_tensor(p) for p in (module.weight, module.bias))
    assert weight_VD is not None
    return lambda x_ND: nn.functional.linear(x_ND.to(weight_VD.dtype), weight_VD, bias_V)
