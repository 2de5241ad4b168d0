"""Which linears the calibration inputs reach.

Those that no input reaches have no statistics: they stay dense and are listed.

Text alone does not reach the vision tower of a model of text and images, nor cross attention that reads images. A layer
whose output the model does not use is not reached either: LLaVA reads the features before the last layer of its vision
tower.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import LayerCall, LayerRunner
from surgery.core.errors import SurgeryError
from surgery.planning.targets import Plan

FORWARD_ERRORS = (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError)


def needs_probe(plan: Plan, model: Any) -> bool:
    """Return whether inputs may leave parts of the model out: towers, an encoder and a decoder, or layers of an unknown
    kind.
    """
    layout = plan.layout
    several = len(set(layout.towers.values())) > 1 or bool(getattr(model.config, "is_encoder_decoder", False))
    return several or any(not linear.known for linear in layout.linears if linear.layer in layout.layers)


def keep_reached(plan: Plan, runner: LayerRunner, data: CalibrationSet) -> tuple[Plan, LayerRunner]:
    """Run two rows of the calibration inputs; return the plan without what they do not reach, and a runner for it.

    Layers that are not called leave the layout and stay as they are. Raises SurgeryError if the model does not run on
    the inputs, or if no linear of the plan is left.
    """
    model = runner.meta_model.model
    if not needs_probe(plan, model):
        return plan, runner
    reached, called, used = _probe(plan, runner, {name: x[[0, -1]] for name, x in data.inputs.items()})
    layers = {path for path in plan.layout.layers if path in used}
    skip = tuple(path for path in plan.layout.towers if path not in called)
    reached = {
        path for path, (target, *_) in plan.targets.items() if path in reached and target.linear.layer in {*layers, ""}
    }
    lost = [
        target for path, slices in plan.targets.items() if path not in reached for target in slices if target.configs
    ]
    mixers = [target.path for layer, target in plan.attention_targets.items() if layer not in layers]
    if mixers:
        raise SurgeryError(
            f"the calibration inputs ({', '.join(data.inputs)}) do not reach {mixers[0]}, which attention replaces by "
            "a mixer. Give inputs "
            "that use it, or leave its layer out (attention.layers)"
        )
    layout = replace(plan.layout, layers=tuple(path for path in plan.layout.layers if path in layers))
    notes = (*plan.notes, *([unreached_note([target.name for target in lost])] if lost else []))
    reached_plan = plan.keep_targets(
        reached, layout=layout, notes=notes, unreached=tuple(target.name for target in lost)
    )
    if lost and not reached_plan.replaced_targets():
        raise SurgeryError(
            f"the calibration inputs ({', '.join(data.inputs)}) reach no linear of the plan ({lost[0].name}, ..). Give "
            "inputs that use "
            "them, for example images for a vision tower"
        )
    return reached_plan, runner.with_layers(layout.layers, skip)


def unreached_note(names: list[str]) -> str:
    """Return the note about linears that calibration does not reach."""
    more = f" and {len(names) - 6} more (see `unreached` in the report)" if len(names) > 6 else ""
    return f"left dense, because the calibration inputs do not reach them: {', '.join(names[:6])}{more}"


class _Linked(torch.autograd.Function):
    """Return a layer's output, whose gradient reaches the layer's inputs as zeros: autograd keeps nothing of the
    layer.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        ctx.likes = [(x.shape, x.dtype, x.device) for x in inputs]
        return out.detach().clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.likes)


def _probe(plan: Plan, runner: LayerRunner, inputs: dict[str, Tensor]) -> tuple[set[str], set[str], set[str]]:
    """Return the linears that ran, with the head; the layers of all towers that ran; and the runner's layers whose
    output is used.
    """
    model: Any = runner.meta_model
    layout = plan.layout
    reached, called = {layout.head}, set[str]()
    marks: dict[str, Tensor] = {}

    def record(visited: set[str], path: str) -> Callable[..., None]:
        return lambda *_: visited.add(path)

    def visit(call: LayerCall) -> Any:
        called.add(call.path)
        marks[call.path] = torch.zeros((), requires_grad=True)
        hooks = [
            model.module(path).register_forward_pre_hook(record(reached, path))
            for path in plan.targets_in_layer(call.path)
        ]
        try:
            with torch.no_grad():
                out = call.apply(0, len(call.hidden_BTD))
        finally:
            for hook in hooks:
                hook.remove()
        leaves = [x for x in tree_flatten((call.args, call.kwargs))[0] if isinstance(x, Tensor) and x.requires_grad]
        link: Any = _Linked
        hidden = link.apply(out if isinstance(out, Tensor) else out[0], marks[call.path], call.hidden_BTD, *leaves)
        return hidden if isinstance(out, Tensor) else type(out)([hidden, *out[1:]])

    paths = [path for path in layout.towers if path not in layout.layers]
    handles = [model.module(path).register_forward_pre_hook(record(called, path)) for path in paths]
    try:
        with torch.enable_grad():
            final = runner.single_process().run(inputs, visit)
            asked = list(marks.values()) if final.requires_grad else []
            grads = torch.autograd.grad(final.sum(), asked, allow_unused=True) if asked else ()
    except SurgeryError:
        raise
    except FORWARD_ERRORS as error:
        shapes = {name: list(x.shape) for name, x in inputs.items()}
        takes = [name for name in inspect.signature(model.model.forward).parameters if name != "kwargs"][:12]
        raise SurgeryError(
            f"{type(model.model).__name__} does not run on two rows of its calibration inputs {shapes} "
            f"({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}). Give a folder of images, or a .safetensors file with all inputs "
            "that its "
            f"forward needs; it takes {', '.join(takes)}"
        ) from None
    finally:
        for handle in handles:
            handle.remove()
    return reached, called, {path for path, grad in zip(marks, grads) if grad is not None}
