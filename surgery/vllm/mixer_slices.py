"""Heads of a mixer for one process of several (tensor parallelism). Needs no vLLM.

    shape = slice_shape(whole_shape, count, "model.layers.0.self_attn")
    slices = MixerSlices(config, whole_shape, rank, count)
    slices.copy("mask.rate.weight", parameter, loaded)     this process's part of a tensor of the checkpoint

Process r of n has the r-th n-th of the query heads and of the key/value heads, as in attention. Mixers do not mix heads:
each process runs the mixer of its heads on all hidden states, and the output projection sums over processes. Tensors
have heads, or key/value heads, along one axis, the outer part of it where an axis has several things for a head. The
short convolution has the channels of queries, keys and values one after another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, AttentionShape
from surgery.mixers.linear_config import LinearAttention

CONVOLUTION = "convolution.weight"


def slice_shape(shape: AttentionShape, count: int, path: str) -> AttentionShape:
    """Return the shape of one process's heads. Raises SurgeryError if the processes do not divide the heads."""
    if shape.groups % count or shape.heads % count:
        raise SurgeryError(
            f"{path}: {count} processes must divide the {shape.groups} key/value heads and the {shape.heads} query heads "
            "of a layer with a mixer. Use another --tensor-parallel-size"
        )
    return replace(shape, heads=shape.heads // count, groups=shape.groups // count)


class MixerSlices:
    """Where the tensors of a mixer are cut. shape: of all heads.

    axes: name -> the axis along which heads lie, None for tensors that all heads share. whole: name -> shape in the
    checkpoint.
    """

    def __init__(self, config: LinearAttention, shape: AttentionShape, rank: int, count: int):
        self.rank, self.count = rank, count
        whole, local = (_tensors(config, s) for s in (shape, slice_shape(shape, count, config.name)))
        self.whole = {name: tuple(t.shape) for name, t in whole.items()}
        self.axes = {name: _head_axis(name, self.whole[name], tuple(t.shape), count) for name, t in local.items()}
        self.channels = [shape.heads * shape.key, shape.groups * shape.key, shape.groups * shape.value]

    def cut(self, name: str, loaded: Tensor) -> Tensor:
        """Return this process's part of a tensor of the checkpoint. Raises SurgeryError if its shape is not the mixer's."""
        if tuple(loaded.shape) != self.whole[name]:
            raise SurgeryError(
                f"tensor {name!r} of a mixer has shape {list(loaded.shape)} in the checkpoint, and {list(self.whole[name])} "
                "by its table: config.json and weights do not belong together. Download or convert the checkpoint again"
            )
        axis = self.axes[name]
        if axis is None or self.count == 1:
            return loaded
        parts = loaded.split(self.channels, axis) if name == CONVOLUTION else (loaded,)
        return torch.cat([part.chunk(self.count, axis)[self.rank] for part in parts], axis)

    def copy(self, name: str, parameter: Tensor, loaded: Tensor) -> None:
        """Copy this process's part of a tensor of the checkpoint into the mixer's."""
        parameter.data.copy_(self.cut(name, loaded))


def _tensors(config: LinearAttention, shape: AttentionShape) -> dict[str, Tensor]:
    with torch.device("cpu"):
        mixer: Any = MIXERS[config](config, shape)
    tensors: dict[str, Tensor] = mixer.state_dict()
    return tensors


def _head_axis(name: str, whole: tuple[int, ...], local: tuple[int, ...], count: int) -> int | None:
    """Return the axis along which a tensor has fewer entries for fewer heads, None without one."""
    axes = [axis for axis, (a, b) in enumerate(zip(whole, local, strict=True)) if a != b]
    if not axes:
        return None
    if len(axes) > 1 or whole[axes[0]] != count * local[axes[0]]:
        raise SurgeryError(
            f"tensor {name!r} of a mixer, of shape {list(whole)}, is not cut into {count} slices of heads. Use "
            "--tensor-parallel-size 1"
        )
    return axes[0]
