"""A module that is no transformers model, as a model of one layer: its linears are matched by path.

LayerRunner passes hidden states (B, T, D) from layer to layer. The only layer here ignores its hidden states, which
have the shape of the module's output, and runs the whole module on the model's inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surgery.core.errors import SurgeryError

PREFIX = "layers.0.module."  # of the paths of the module's submodules


class PlainConfig:
    """What a conversion reads of a config. model_type: the name of the module's class, which has no architecture."""

    is_encoder_decoder = False

    def __init__(self, model_type: str):
        self.model_type = model_type

    def get_text_config(self) -> PlainConfig:
        """Return this config."""
        return self


class WholeModule(nn.Module):
    """A layer that runs `module` on the inputs given as keywords. flat: names of inputs that were (B,) and are passed
    as (B, 1).
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.flat: frozenset[str] = frozenset()

    def forward(self, hidden_states: Tensor, **inputs: Tensor) -> Tensor:
        """Return the module's output, (B, T, D). hidden_states: zeros of that shape; gradients reach them with weight
        zero.
        """
        inputs = {name: x[:, 0] if name in self.flat else x for name, x in inputs.items()}
        if not hidden_states.requires_grad:
            return output_rows(self.module(**inputs), inputs)
        zero = 0.0 * hidden_states.sum()
        handles = [m.register_forward_pre_hook(_attach(zero)) for m in self.module.modules() if hasattr(m, "weight")]
        try:
            return output_rows(self.module(**inputs), inputs) + 0.0 * hidden_states
        finally:
            for handle in handles:
                handle.remove()


def _attach(zero: Tensor) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """Return a hook that adds `zero` to an input without a gradient, so that the output's gradient can be observed."""

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0] if args else None
        if not isinstance(x, Tensor) or x.requires_grad or not x.is_floating_point():
            return args
        return (x + zero.to(x), *args[1:])

    return hook


def output_rows(out: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the first floating-point tensor of a module's output as (B, T, D).

    An output (B, D) becomes (B, 1, D), or (B, D, 1) if an input is an image or larger, so that fewer rows run at a
    time.
    """
    values = list(out.values()) if isinstance(out, Mapping) else list(out) if isinstance(out, (tuple, list)) else [out]
    output = next((x for x in values if isinstance(x, Tensor) and x.is_floating_point()), None)
    rows = len(next(iter(inputs.values())))
    if output is None or output.dim() < 1 or output.shape[0] != rows:
        shape = None if output is None else list(output.shape)
        raise SurgeryError(
            f"calibration: the module must return a floating-point tensor with the batch of {rows} rows as its first "
            "axis (got "
            f"{type(out).__name__}, shape {shape}). Wrap it in a module that does"
        )
    if output.dim() > 2:
        return output.flatten(2)
    if output.dim() == 1:
        return output[:, None, None]
    return output[:, :, None] if any(x.dim() > 2 for x in inputs.values()) else output[:, None]


class PlainModel(nn.Module):
    """The model of one WholeModule. `forward` has the signature of the module's forward.

    shape: (T, D) of the output, see `output_rows`; set by the first call of `probe`.
    """

    def __init__(self, module: nn.Module, config: PlainConfig):
        super().__init__()
        self.config, self.layers = config, nn.ModuleList([WholeModule(module)])
        self.shape: tuple[int, ...] | None = None
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in forward_parameters(module)]

        def forward(**inputs: Tensor) -> tuple[Tensor]:
            if "use_cache" in inputs:
                raise TypeError("the module takes no use_cache")
            return (self._run(inputs),)

        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward

    def _run(self, inputs: dict[str, Tensor]) -> Tensor:
        assert self.shape is not None
        first = next(iter(inputs.values()))
        layer: Any = self.layers[0]
        layer.flat = frozenset(name for name, x in inputs.items() if x.dim() == 1)
        whole = {name: x[:, None] if x.dim() == 1 else x for name, x in inputs.items()}
        out: Tensor = layer(torch.zeros(len(first), *self.shape, device=first.device), **whole)
        return out

    def get_input_embeddings(self) -> None:
        """Return None: the module's embedding is not known."""

    @torch.no_grad()
    def probe(self, inputs: dict[str, Tensor]) -> set[str]:
        """Run two rows, set `shape`, and return the paths of the modules that ran. The weights must be loaded."""
        reached: set[str] = set()
        handles = [
            module.register_forward_pre_hook(lambda *_, path=path: reached.add(path))
            for path, module in self.named_modules()
        ]
        whole: Any = self.layers[0]
        try:
            few = {name: x[:2] for name, x in inputs.items()}
            self.shape = tuple(output_rows(whole.module(**few), few).shape[1:])
        finally:
            for handle in handles:
                handle.remove()
        return reached


def forward_parameters(module: nn.Module) -> list[inspect.Parameter]:
    """Return the parameters of the module's forward that can be passed by name."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p for p in inspect.signature(module.forward).parameters.values() if p.kind in named]
