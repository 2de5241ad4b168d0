"""Low-rank linears that read the same input, computed in one call: q, k and v of an attention, gate and up of an MLP.

At a few tokens the launches of small kernels take longer than reading the factors. Three linears need six launches; together they need
two: one multiplies the input with all right factors, one their results with all left factors.

    group_linears([attention.q_proj, attention.k_proj, attention.v_proj])

The first linear that is called computes the outputs of all, and the others return theirs if they are called with the same tensor. The
modules, their parameters and their names stay as they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from surgery.core.dispatch import dispatched_by
from surgery.structures.base import is_exporting
from surgery.structures.low_rank import LowRankLinear, low_rank_call_key, low_rank_linear

Tensors = tuple[Tensor, ...]
Biases = tuple[Tensor | None, ...]


def _group_call_key(x: Tensor, rights: Tensors, lefts: Tensors, biases: Biases) -> Hashable | None:
    keys = tuple(low_rank_call_key(x, *factors) for factors in zip(rights, lefts, biases))
    return None if None in keys else keys


@dispatched_by(_group_call_key)
def low_rank_group(x: Tensor, rights: Tensors, lefts: Tensors, biases: Biases) -> Tensors:
    """Return left_m (right_m x) + bias_m (..., O_m) of every linear m, for x (..., I).

    rights: (R_m, I). lefts: (1, O_m, R_m). On a GPU one kernel computes all for a few tokens.
    """
    return tuple(low_rank_linear(x, *factors) for factors in zip(rights, lefts, biases))


class LinearGroup:
    """Low-rank linears that read the same input.

    Between the calls of its linears it keeps the outputs that were computed and not yet taken. A linear takes its output once, for the
    same tensor, if neither it nor a factor was written in between. A group whose outputs are not taken dissolves: its linears do not
    read the same input.
    """

    def __init__(self, linears: Sequence[LowRankLinear]):
        self.linears = tuple(linears)
        self.outputs: dict[int, Tensor] = {}
        self.read: Tensors = ()  # what they were computed from: x, then the factors
        self.version = 0

    def output(self, place: int, x: Tensor) -> Tensor:
        """Return the output (..., O) of the linear at this place for x (..., I), a few tokens, without gradients."""
        outputs, read, traced = self.outputs, self.read, torch.compiler.is_compiling()
        if place in outputs and read[0] is x and (traced or _version(read) == self.version):
            y = outputs.pop(place)
            if not outputs:
                self.read = ()
            return y
        rights, lefts, biases = self._factors()
        read = (x, *rights, *lefts, *(bias for bias in biases if bias is not None))
        if outputs and not traced:
            self._dissolve()
        elif not is_exporting() if traced else _can_keep(read):
            return self._compute(place, read, rights, lefts, biases)
        alone: Tensor = low_rank_linear(x, rights[place], lefts[place], biases[place])
        return alone

    def _compute(self, place: int, read: Tensors, rights: Tensors, lefts: Tensors, biases: Biases) -> Tensor:
        ys = low_rank_group(read[0], rights, lefts, biases)
        self.outputs = {at: y for at, y in enumerate(ys) if at != place}
        self.read, self.version = read, 0 if torch.compiler.is_compiling() else _version(read)
        return ys[place]

    def _factors(self) -> tuple[Tensors, Tensors, Biases]:
        factors = [(*linear.right_and_left(), linear.bias) for linear in self.linears]
        rights, lefts, biases = zip(*factors)
        return rights, lefts, biases

    def _dissolve(self) -> None:
        self.outputs, self.read = {}, ()
        for linear in self.linears:
            linear.group = None


def _version(tensors: Tensors) -> int:
    """Return a number that grows whenever one of the tensors is written in place."""
    return sum([t._version for t in tensors])


def _can_keep(tensors: Tensors) -> bool:
    """Return whether the tensors lie on one device (accelerate brings offloaded ones there for a single call) and tell whether they are
    written (those of inference mode do not)."""
    device = tensors[0].get_device()
    return not any(t.is_inference() or t.is_meta or t.get_device() != device for t in tensors)


def group_linears(linears: Sequence[LowRankLinear]) -> None:
    """Compute these linears together for a few tokens without gradients. They read the same input, and all have biases or none has.

    Raises ValueError for fewer than two linears, or linears of different input widths or with and without biases.
    """
    kinds = {(linear.in_features, linear.bias is None) for linear in linears}
    if len(linears) < 2 or len(kinds) > 1:
        raise ValueError(
            f"a group has at least two linears, of one input width, all with or all without biases; got {list(linears)}"
        )
    group = LinearGroup(linears)
    for place, linear in enumerate(linears):
        linear.group = group, place
