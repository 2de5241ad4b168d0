"""Rows of a padded batch, packed: real tokens to the front in their order, padding behind them.

    unpadder = Packing.from_mask(valid_BT, batch, length, device)
    x_BTD = unpadder.unpad(x_BTD, dim=1)          zeros behind the real tokens
    y_BTD = unpadder.pad(y_BTD, dim=1)        back where they were, zeros where padding is

Left padding, right padding and holes are all the same afterwards. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def expand_index(index_BT: Tensor, tensor: Tensor, dim: int) -> Tensor:
    """index_BT shaped to broadcast against `tensor`, whose axes 0 and `dim` are B and T."""
    shape = [1] * tensor.dim()
    shape[0], shape[dim] = index_BT.shape
    return index_BT.view(shape)


def gather_rowwise(tensor: Tensor, index_BT: Tensor, dim: int) -> Tensor:
    """Of each row its own entries along `dim`."""
    size = list(tensor.shape)
    size[dim] = index_BT.shape[1]
    return tensor.gather(dim, expand_index(index_BT, tensor, dim).expand(size))


def zero_outside(tensor: Tensor, keep_BT: Tensor, dim: int) -> Tensor:
    """Zeros where not to be kept, whatever stands there (NaN too)."""
    return tensor.masked_fill(~expand_index(keep_BT, tensor, dim), 0)


def shift_rows(tensor: Tensor, offset_B: Tensor, dim: int) -> Tensor:
    """Entry i of a row is its entry i + offset; zeros where that is outside."""
    length = tensor.shape[dim]
    index_BT = torch.arange(length, device=tensor.device) + offset_B.unsqueeze(1)
    inside_BT = (index_BT >= 0) & (index_BT < length)
    return zero_outside(gather_rowwise(tensor, index_BT.clamp(0, max(length - 1, 0)), dim), inside_BT, dim)


@dataclass
class Unpadder:
    """count_B real tokens a row, the first ones once packed (real_BT). index: where packed token i was, slot: where
    token t has gone; both None where nothing is padding."""

    count_B: Tensor
    real_BT: Tensor
    index_BT: Tensor | None = None
    slot_BT: Tensor | None = None
    valid_BT: Tensor | None = None

    @classmethod
    def from_mask(cls, valid_BT: Tensor | None, batch: int, length: int, device: torch.device) -> Unpadder:
        if valid_BT is None:
            count_B = torch.full((batch,), length, device=device)
            return cls(count_B, torch.ones(batch, length, dtype=torch.bool, device=device))
        valid_BT = valid_BT.to(device=device, dtype=torch.bool)
        count_B = valid_BT.sum(1)
        index_BT = torch.argsort(valid_BT.logical_not().to(torch.uint8), dim=1, stable=True)
        slot_BT = (valid_BT.cumsum(1) - 1).clamp_min(0)
        return cls(count_B, torch.arange(length, device=device) < count_B.unsqueeze(1), index_BT, slot_BT, valid_BT)

    def unpad(self, tensor: Tensor, dim: int) -> Tensor:
        return (
            tensor
            if self.index_BT is None
            else zero_outside(gather_rowwise(tensor, self.index_BT, dim), self.real_BT, dim)
        )

    def pad(self, tensor: Tensor, dim: int) -> Tensor:
        if self.slot_BT is None or self.valid_BT is None:
            return tensor
        return zero_outside(gather_rowwise(tensor, self.slot_BT, dim), self.valid_BT, dim)

    def latest(self, tensor: Tensor, kept: int, dim: int) -> Tensor:
        """The last `kept` entries of [remembered, packed tokens], where `kept` are remembered: entries count_B .. of
        each row, so that the last one is the latest real token."""
        index_BW = self.count_B.unsqueeze(1) + torch.arange(kept, device=tensor.device)
        return gather_rowwise(tensor, index_BW, dim)

    def reverse(self, tensor: Tensor, dim: int) -> Tensor:
        """Each row's packed tokens the other way round."""
        length = tensor.shape[dim]
        index_BT = self.count_B.unsqueeze(1) - 1 - torch.arange(length, device=tensor.device)
        return zero_outside(gather_rowwise(tensor, index_BT.clamp_min(0), dim), self.real_BT, dim)
