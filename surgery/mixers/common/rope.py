"""Rotary embedding of queries and keys, for mixers that are given the form before RoPE and read the other one too."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers.base import AttentionShape, MixerInputs


def apply_rope(x_BTHK: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """Return x rotated, in its dtype: the first R dims of each head in the half-split form of transformers.

    The rotation is computed in the wider of both dtypes: under autocast x is in bfloat16 and cos and sin in float32.
    """
    cos, sin = cos_BTR.unsqueeze(2), sin_BTR.unsqueeze(2)
    x, rest = x_BTHK.split([cos.shape[-1], x_BTHK.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    rotated = x * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


def rotate_inputs(inputs: MixerInputs, shape: AttentionShape, name: str) -> MixerInputs:
    """Return inputs whose q and k are before RoPE with q and k after it. Attention without RoPE has one form only.

    Raises SurgeryError if the module passes no rotation. name: of the mixer, for the message.
    """
    if not shape.rotary:
        return inputs
    if inputs.rope is None:
        raise SurgeryError(
            f"{name}: one part reads queries and keys after RoPE and the other before it, and this attention gets no "
            "position_embeddings to rotate them with. Use the same rope in both parts"
        )
    q, k = (apply_rope(x.transpose(1, 2), *inputs.rope).transpose(1, 2) for x in (inputs.q_BHTK, inputs.k_BGTK))
    return replace(inputs, q_BHTK=q, k_BGTK=k)
