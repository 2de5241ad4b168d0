"""Config of the level weights of native linear layers (surgery/mixers/native.py), and what these layers cost without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from surgery.core.errors import SurgeryError
from surgery.mixers.base import AttentionShape, MixerConfig


@dataclass(frozen=True)
class Native(MixerConfig):
    """Config of the level weights of a native linear layer.

    levels: number of level weights per value head; higher levels share the last one. block: tokens per leaf of the
    tree, a power of two, which share the first level weight and one state (see `Hierarchical`). The first `levels`
    levels distinguish block x 2^(levels - 1) tokens.
    """

    name: ClassVar[str] = "native"
    replaces_attention: ClassVar[bool] = False
    levels: int = 12
    block: int = 64

    def __post_init__(self) -> None:
        if type(self.levels) is not int or self.levels < 2:
            raise SurgeryError(
                f"native: levels must be a whole number, 2 or more (got {self.levels!r}), as level 0 is the query's own "
                "block; for example 12"
            )
        if type(self.block) is not int or self.block < 1 or self.block & (self.block - 1):
            raise SurgeryError(f"native: block must be a power of two (got {self.block!r}); for example 64")


def native_state_bytes(shape: AttentionShape, dtype: torch.dtype) -> int:
    """Return the bytes of the recurrent state that a native layer has without level weights, of any length. dtype: of
    the model."""
    return shape.groups * shape.key * shape.value * max(4, dtype.itemsize)


def native_macs(shape: AttentionShape) -> int:
    """Return multiply-accumulates of the core of a native layer without level weights, for the next token."""
    return 4 * shape.groups * shape.key * shape.value
