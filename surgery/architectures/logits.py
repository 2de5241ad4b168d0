"""What a model does with the product of its output head: the soft cap of Gemma, the factors of Granite, Cohere and
Falcon-H1.

It is read from the config and compared with what the model's forward does to a ramp of numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgery.core.logit_rows import LogitTransform

# Config entries or attributes: softcap c of c tanh(z / c), and factors, which models multiply by or divide by.
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
FACTORS = {"logits_scaling": -1, "logit_scale": 1, "lm_head_multiplier": 1, "output_multiplier": 1}  # usual power
RAMP = 50.0  # the numbers that a model's transform is compared on are up to this


def logit_candidates(model: Any) -> Iterator[LogitTransform]:
    """Yield transforms that the model's config names, the likeliest first."""
    places = [model.config.get_text_config(), model.config, model, getattr(model, "base_model", None)]

    def numbers(name: str) -> list[float]:
        values = [getattr(place, name, None) for place in places]
        return [float(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0]

    softcaps = [*dict.fromkeys(value for name in SOFTCAPS for value in numbers(name)), 0.0]
    scales = [
        value**exponent for name, power in FACTORS.items() for value in numbers(name) for exponent in (power, -power)
    ]
    for softcap, scale in itertools.product(softcaps, dict.fromkeys([*scales, 1.0])):
        yield LogitTransform(scale, softcap)


def is_transform(transform: LogitTransform, ramp_V: Tensor, logits_BTV: Tensor) -> bool:
    """Return whether the transform turns the ramp into the model's logits."""
    expected_V, found_V = transform.apply(ramp_V), logits_BTV[0, -1].cpu()
    if found_V.shape != expected_V.shape:
        return False
    tolerance = max(1e-4, 4 * torch.finfo(found_V.dtype).eps)
    return torch.allclose(found_V.float(), expected_V, rtol=tolerance, atol=tolerance * float(expected_V.abs().max()))


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of one module instance; its hooks run as always."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


class _Hidden:
    """The output of a base model: hidden states (1, 1, D), and None for everything else."""

    def __init__(self, hidden_BTD: Tensor):
        self.last_hidden_state = hidden_BTD

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


@torch.no_grad()
def find_logit_transform(model: Any) -> LogitTransform | None:
    """Return what a model does with its logits, from one call in which the layers are left out and the head gives a
    ramp: its weights may be on the meta device. None if the model does not run that way, or does something else.
    """
    base, head = getattr(model, "base_model", None), model.get_output_embeddings()
    config = model.config.get_text_config()
    width, size = getattr(config, "hidden_size", None), getattr(config, "vocab_size", None)
    if base is None or base is model or not isinstance(head, nn.Module) or width is None or size is None:
        return None
    hidden, ramp_V = _Hidden(torch.zeros(1, 1, width)), torch.linspace(-RAMP, RAMP, size)
    with replaced_forward(base, lambda *_, **__: hidden), replaced_forward(head, lambda *_, **__: ramp_V[None, None]):
        try:
            logits_BTV = model(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits
        except Exception:  # code of any family
            return None
    return next((one for one in logit_candidates(model) if is_transform(one, ramp_V, logits_BTV)), None)
