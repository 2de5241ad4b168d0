"""Outputs that linears of one input keep for each other, for the time of one call of the module that holds them.

    q(x)     computes the outputs of q, k and v, and keeps two of them
    k(x)     takes its own

Nothing tells whether a tensor was written through `.data` or a NumPy view, so an output that outlives the call of the
attention or MLP that holds the linears may be stale. Hooks of that module begin and end its calls; `LinearGroup` and
joined linears keep nothing outside.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from surgery.structures.base import is_exporting

ATTRIBUTE = "_surgery_groups"  # of a module with such linears: their groups


class CallGroup(Protocol):
    """Linears that keep outputs for each other. A linear's attribute `call_group` is its group, or None."""

    def begin_call(self) -> None:
        """Forget what is kept, and keep outputs from now on, in this thread."""

    def end_call(self, finished: bool) -> None:
        """Forget what is kept, and keep nothing any more, in this thread. finished: whether the call raised no
        exception.
        """


def hold_groups(model: nn.Module) -> None:
    """Let each module inside `model` begin and end the calls of the groups of its linears: of those that it holds now,
    and no others.
    """
    for module in list(model.modules()):
        children = [
            getattr(child, "base_layer", child) for child in module.children()
        ]  # the linear under a PEFT adapter
        groups = tuple(dict.fromkeys(group for child in children if (group := getattr(child, "call_group", None))))
        if groups and ATTRIBUTE not in module.__dict__:
            module.register_forward_pre_hook(_begin, prepend=True)
            module.register_forward_hook(_end, always_call=True)
        if groups:
            setattr(module, ATTRIBUTE, groups)
        elif ATTRIBUTE in module.__dict__:
            delattr(module, ATTRIBUTE)
            for hooks, function in ((module._forward_pre_hooks, _begin), (module._forward_hooks, _end)):
                for key in [key for key, hook in hooks.items() if hook is function]:
                    del hooks[key]
                    module._forward_hooks_always_called.pop(key, None)


def _begin(module: Any, args: Any) -> None:
    if not is_exporting():
        for group in getattr(module, ATTRIBUTE, ()):
            group.begin_call()


def _end(module: Any, args: Any, output: Any) -> None:
    if not is_exporting():
        for group in getattr(module, ATTRIBUTE, ()):
            group.end_call(output is not None)
