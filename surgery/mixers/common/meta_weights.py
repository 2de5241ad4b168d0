"""Construction of a mixer for its sizes alone, without memory for its linears."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class EmptyOnMeta(TorchFunctionMode):
    """Context in which `torch.empty`, which allocates the weights of linears, returns tensors on the meta device.

    Other small tensors are computed on the CPU. Under `torch.device("meta")`, functions such as `torch.logspace` and
    `torch.log` import sympy and torch._dynamo, which takes seconds.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty and options.get("device") is None:
            options["device"] = "meta"
        return func(*args, **options)
