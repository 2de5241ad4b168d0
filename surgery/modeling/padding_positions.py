"""Positions of left-padded rows, for models called with an attention mask and no position_ids.

transformers then counts positions from the first padding token. Softmax attention with RoPE depends only on distances,
so its outputs do not change; features of a rotated query (Hedgehog, Toeplitz exponentials) depend on the position
itself. Generation passes positions that begin at the first real token; here every other call gets the same. Calibration
moves real tokens to the start of their rows (surgery.calibration.data.align_left), so that they have these positions
too. Models with learned positions (GPT-2, BERT) are left alone: there a call without positions means other inputs to
the original as well. See LlamaModel.forward, and GenerationMixin._prepare_position_ids_for_generation, in
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/models/llama/modeling_llama.py
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/generation/utils.py
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

NEEDED = {"attention_mask", "position_ids"}


@cache
def argument_names(cls: type) -> tuple[str, ...]:
    """Return the names of the arguments of a class's forward, without self."""
    return tuple(inspect.signature(cls.forward).parameters)[1:]  # type: ignore[attr-defined]


def mask_positions(mask_BS: Tensor, tokens: int) -> Tensor:
    """Return the positions of the last `tokens` tokens, (B, T), counted from each row's first real token; 0 for those
    before it.

    Padding elsewhere in a row keeps its place, as it does without this.
    """
    left_B1 = mask_BS.ne(0).long().cumsum(-1).eq(0).sum(-1, keepdim=True)
    place_S = torch.arange(mask_BS.shape[1], device=mask_BS.device)
    return (place_S - left_B1).clamp(min=0)[:, -tokens:]


def add_positions(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook: pass position_ids that follow from a 2-D attention mask, unless the caller gives some."""
    cls: Any = type(module)
    arguments = {**dict(zip(argument_names(cls), args)), **kwargs}
    mask_BS = arguments.get("attention_mask")
    inputs = arguments.get("input_ids") if arguments.get("input_ids") is not None else arguments.get("inputs_embeds")
    if (
        arguments.get("position_ids") is not None
        or not isinstance(mask_BS, Tensor)
        or mask_BS.dim() != 2
        or inputs is None
    ):
        return None
    if mask_BS.shape[1] < inputs.shape[1]:  # transformers explains what is wrong with it
        return None
    arguments["position_ids"] = mask_positions(mask_BS, inputs.shape[1]).to(inputs.device)
    return (), arguments


def derive_positions(model: Any, path: str, causal: bool) -> None:
    """Add the hook to the innermost transformers model around the attention at `path` that takes a mask and positions.

    causal: whether the attention is. For other attention only the innermost model counts: around a vision tower lie
    models whose positions are those of text.
    """
    parts = path.split(".")
    for end in range(len(parts) - 1, -1, -1):
        module = model.get_submodule(".".join(parts[:end]))
        cls: Any = type(module)
        if not isinstance(module, PreTrainedModel):
            continue
        if set(argument_names(cls)) >= NEEDED:
            if add_positions not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(add_positions, with_kwargs=True)
            return
        if not causal:
            return
