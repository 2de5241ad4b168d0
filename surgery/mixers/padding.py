"""Unpadding of batches: moves the real tokens of each row to the front, in order, and padding behind them.

    unpadder = Unpadder.from_mask(valid_BT, batch, length, device)
    x_BTD = unpadder.unpad(x_BTD, dim=1)      zeros behind the real tokens
    y_BTD = unpadder.pad(y_BTD, dim=1)        the tokens at their old places, zeros at padding

Mixers then need no case for left padding, right padding or gaps. Nothing here synchronizes with the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def expand_index(index_BT: Tensor, tensor: Tensor, dim: int) -> Tensor:
    """Return index_BT, reshaped to broadcast against `tensor`, whose axes 0 and `dim` are B and T."""
    shape = [1] * tensor.dim()
    shape[0], shape[dim] = index_BT.shape
    return index_BT.view(shape)


def gather_rowwise(tensor: Tensor, index_BT: Tensor, dim: int) -> Tensor:
    """Return the entries index_BT of each row (axis 0) along `dim`."""
    size = list(tensor.shape)
    size[dim] = index_BT.shape[1]
    return tensor.gather(dim, expand_index(index_BT, tensor, dim).expand(size))


def zero_outside(tensor: Tensor, keep_BT: Tensor, dim: int) -> Tensor:
    """Return the tensor with zeros where keep_BT is False; also replaces NaN there."""
    return tensor.masked_fill(~expand_index(keep_BT, tensor, dim), 0)


def shift_rows(tensor: Tensor, offset_B: Tensor, dim: int) -> Tensor:
    """Return the tensor with entry i + offset_B of each row at place i, and zeros where that is out of range."""
    length = tensor.shape[dim]
    index_BT = torch.arange(length, device=tensor.device) + offset_B.unsqueeze(1)
    inside_BT = (index_BT >= 0) & (index_BT < length)
    return zero_outside(gather_rowwise(tensor, index_BT.clamp(0, max(length - 1, 0)), dim), inside_BT, dim)


@dataclass
class Unpadder:
    """Index tables that move real tokens to the front of their rows and back.

    count_B: real tokens per row. real_BT: True for the first count_B places. index_BT: old place of the token at place
    i; slot_BT: new place of the token that was at t; valid_BT: the mask. The last three are None without padding.
    """

    count_B: Tensor
    real_BT: Tensor
    index_BT: Tensor | None = None
    slot_BT: Tensor | None = None
    valid_BT: Tensor | None = None

    @classmethod
    def from_mask(cls, valid_BT: Tensor | None, batch: int, length: int, device: torch.device) -> Unpadder:
        """Return the unpadder of a mask that is False at padding; None: no padding."""
        if valid_BT is None:
            count_B = torch.full((batch,), length, device=device)
            return cls(count_B, torch.ones(batch, length, dtype=torch.bool, device=device))
        valid_BT = valid_BT.to(device=device, dtype=torch.bool)
        count_B = valid_BT.sum(1)
        index_BT = torch.argsort(valid_BT.logical_not().to(torch.uint8), dim=1, stable=True)
        slot_BT = (valid_BT.cumsum(1) - 1).clamp_min(0)
        return cls(count_B, torch.arange(length, device=device) < count_B.unsqueeze(1), index_BT, slot_BT, valid_BT)

    def unpad(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the tensor with the real tokens first along `dim`, and zeros behind them."""
        if self.index_BT is None:
            return tensor
        return zero_outside(gather_rowwise(tensor, self.index_BT, dim), self.real_BT, dim)

    def pad(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the tensor with the tokens at their original places along `dim`, and zeros at padding."""
        if self.slot_BT is None or self.valid_BT is None:
            return tensor
        return zero_outside(gather_rowwise(tensor, self.slot_BT, dim), self.valid_BT, dim)

    def latest(self, tensor: Tensor, size: int, dim: int) -> Tensor:
        """Return the last `size` real entries of each row.

        tensor: `size` entries from earlier calls, then the unpadded tokens of this one. The last entry returned is the
        row's latest real token.
        """
        index_BW = self.count_B.unsqueeze(1) + torch.arange(size, device=tensor.device)
        return gather_rowwise(tensor, index_BW, dim)

    def reverse(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the real tokens of each row in reverse order, and zeros behind them."""
        length = tensor.shape[dim]
        index_BT = self.count_B.unsqueeze(1) - 1 - torch.arange(length, device=tensor.device)
        return zero_outside(gather_rowwise(tensor, index_BT.clamp_min(0), dim), self.real_BT, dim)
