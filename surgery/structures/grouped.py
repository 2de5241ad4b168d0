"""Low-rank linears that read the same input, computed in one call: q, k and v of an attention, gate and up of an MLP.

At a few tokens the launches of small kernels take longer than reading the factors. Three linears need six launches;
together they need two: one multiplies the input with all right factors, one their results with all left factors.

    group_linears([attention.q_proj, attention.k_proj, attention.v_proj])

The first linear that is called computes the outputs of all, and the others return theirs if they are called with the
same tensor. In a model they do so during a call of the module that holds them (`surgery.structures.call_scope`). The
modules, their parameters and their names stay as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.dispatch import dispatched, dispatched_by
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


@dispatched
def low_rank_stack(x: Tensor, right_RI: Tensor, lefts: Tensors) -> Tensor:
    """Return left_m (right_m x) of every linear m side by side, (.., sum of O_m), for x (.., I). Without gradients.

    right_RI: the factors right_m one after another, so one product computes the first half of all. lefts: (1, O_m, R_m);
    each product writes its columns of the output. On a GPU a kernel computes all for a few tokens.
    """
    z_NR = F.linear(x.reshape(-1, x.shape[-1]), right_RI)
    if len(lefts) == 1:
        y_NO = F.linear(z_NR, lefts[0][0])
    else:
        y_NO = z_NR.new_empty(len(z_NR), sum(left.shape[1] for left in lefts))
        parts, columns = z_NR.split([left.shape[2] for left in lefts], 1), [left.shape[1] for left in lefts]
        for part_NR, left_1OR, out_NO in zip(parts, lefts, y_NO.split(columns, 1)):
            torch.mm(part_NR, left_1OR[0].T, out=out_NO)
    return y_NO.view(*x.shape[:-1], y_NO.shape[1])


class _Kept(threading.local):
    """What a thread keeps. outputs: those that were not taken yet, by place. read: x and the factors that they were
    computed from. version: of these tensors. calling: whether the module that holds the linears is being called."""

    def __init__(self) -> None:
        self.outputs: dict[int, Tensor] = {}
        self.read: Tensors = ()
        self.version, self.calling = 0, False


class LinearGroup:
    """Low-rank linears that read the same input.

    Between the calls of its linears it keeps the outputs that were computed and not yet taken. A linear takes its
    output once, for the same tensor, if neither it nor a factor was written in between. A group whose outputs are not
    taken dissolves: its linears do not read the same input.

    is_held: whether a module begins and ends its calls (`hold_groups`). Linears without one must not be written between
    their calls.
    """

    def __init__(self, linears: Sequence[LowRankLinear], is_held: bool = False):
        self.linears, self.is_held, self.kept = tuple(linears), is_held, _Kept()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a copy gets: nothing that is kept."""
        return {"linears": self.linears, "is_held": self.is_held}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, kept=_Kept())

    def begin_call(self) -> None:
        """Forget the outputs, and keep them from now on, in this thread."""
        self.kept.outputs, self.kept.read, self.kept.calling = {}, (), True

    def end_call(self, finished: bool) -> None:
        """Forget the outputs, and keep none any more, in this thread.

        A group of which some are left after a whole call dissolves.
        """
        remains = bool(self.kept.outputs)
        self.kept.outputs, self.kept.read, self.kept.calling = {}, (), False
        if remains and finished and not torch.compiler.is_compiling():
            self._dissolve()

    def output(self, position: int, x: Tensor) -> Tensor:
        """Return the output (..., O) of the linear at this position for x (..., I), a few tokens, without gradients."""
        held, traced = self.kept, torch.compiler.is_compiling()
        if position in held.outputs and held.read[0] is x and (traced or _version(held.read) == held.version):
            y = held.outputs.pop(position)
            if not held.outputs:
                held.read = ()
            return y
        rights, lefts, biases = self._factors()
        read = (x, *rights, *lefts, *(bias for bias in biases if bias is not None))
        if held.outputs and not traced:
            self._dissolve()
        elif (held.calling or not self.is_held) and (not is_exporting() if traced else _can_keep(read)):
            ys = low_rank_group(x, rights, lefts, biases)
            held.outputs = {at: y for at, y in enumerate(ys) if at != position}
            held.read, held.version = read, 0 if traced else _version(read)
            return ys[position]
        alone: Tensor = low_rank_linear(x, rights[position], lefts[position], biases[position])
        return alone

    def _factors(self) -> tuple[Tensors, Tensors, Biases]:
        factors = [(*linear.right_and_left(), linear.bias) for linear in self.linears]
        rights, lefts, biases = zip(*factors)
        return rights, lefts, biases

    def _dissolve(self) -> None:
        self.kept.outputs, self.kept.read = {}, ()
        for linear in self.linears:
            linear.group = None


def _version(tensors: Tensors) -> int:
    """Return a number that grows whenever one of the tensors is written in place."""
    return sum([t._version for t in tensors])


def _can_keep(tensors: Tensors) -> bool:
    """Return whether the tensors lie on one device (accelerate brings offloaded ones there for a single call) and tell
    whether they are written (those of inference mode do not)."""
    device = tensors[0].get_device()
    return not any(t.is_inference() or t.is_meta or t.get_device() != device for t in tensors)


def group_linears(linears: Sequence[LowRankLinear], is_held: bool = False) -> None:
    """Compute these linears together for a few tokens without gradients.

    They read the same input, and all have biases or none has.

    is_held: see LinearGroup. Raises ValueError for fewer than two linears, or linears of different input widths or with
    and without biases.
    """
    kinds = {(linear.in_features, linear.bias is None) for linear in linears}
    if len(linears) < 2 or len(kinds) > 1:
        raise ValueError(
            f"a group has at least two linears, of one input width, all with or all without biases; got {list(linears)}"
        )
    group = LinearGroup(linears, is_held)
    for position, linear in enumerate(linears):
        linear.group = group, position
