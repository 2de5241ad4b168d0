"""Linears of one input that one matrix replaces: q, k and v of an attention, gate and up of an MLP (`share: input`).

    W = [W_q; W_k; W_v] ~ B (sum of O, I),  q(x) = rows of B x,  k(x) = the next rows, ..

The first linear of a group holds B; the others refer to it. A model calls them one after another with one tensor, so B
x is computed for the first that is called and kept until the others have taken their rows (of low rank, right x), at
most for the time of one call of the module that holds them: see `surgery.structures.call_scope`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from operator import is_ as _is
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.core.errors import SurgeryError
from surgery.structures.base import is_exporting
from surgery.structures.low_rank import FEW_TOKENS, LowRankLinear

MAX_MISSES = 8
DAMAGED = "the surgery table in config.json is damaged"


class JoinedLinear(nn.Module):
    """One linear of a group that one matrix B replaces, y = B[start : start + O] x + bias.

    Args:
        in_features, out_features: I and O, of this linear alone.
        start: its first row in B.
        joined: B, in the first linear of the group; None in the others, which need `connect_joined`.
        first: name of the first linear beside this one, "" in the first itself.

    `weight` is an empty 3-D buffer: see StructuredLinear.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        start: int,
        joined: nn.Module | None,
        first: str = "",
        bias: bool = True,
        **factory: Any,
    ):
        super().__init__()
        self.in_features, self.out_features, self.start, self.first = in_features, out_features, start, first
        self.members: tuple[str, ...] = ()  # in the first linear: names of the group, sorted by rows
        self.register_buffer("weight", torch.zeros(1, 1, 1, **factory))
        self.bias = nn.Parameter(torch.zeros(out_features, **factory)) if bias else None
        self._group: tuple[_Group, ...] = ()  # in a tuple, whose modules nn.Module does not register
        if joined is not None:
            self.joined = joined

    def connect(self, group: _Group) -> None:
        """Make this linear one of a group."""
        self._group = (group,)

    @property
    def call_group(self) -> _Group | None:
        """The group, for `hold_groups`; None before `connect_joined`."""
        return self._group[0] if self._group else None

    @property
    def matrix(self) -> Any:
        """The module of B, with the rows of all linears of the group. Raises SurgeryError before `connect_joined`."""
        if "joined" in self._modules:
            return self._modules["joined"]
        return self._connected().first.matrix

    def _connected(self) -> _Group:
        if not self._group:
            raise SurgeryError("a linear that is joined with others was built without them; load the whole checkpoint")
        return self._group[0]

    def rows(self) -> slice:
        """Return the rows of this linear in B."""
        return slice(self.start, self.start + self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Return B[rows] x + bias (..., O) for x (..., I)."""
        group = self._connected()
        y = group.output_of_replica(self, x) if "_is_replica" in self.__dict__ else group.output(self, x)
        return y if self.bias is None else y + self.bias

    def dense(self) -> Tensor:
        """Return the weight (O, I)."""
        dense: Tensor = self.matrix.dense()[self.rows()].clone()  # a view would keep the rows of all linears in memory
        return dense

    def extra_repr(self) -> str:
        """Return the sizes, for printing the module."""
        return f"in={self.in_features}, out={self.out_features}, rows from {self.start}"


class _Kept(threading.local):
    """What a thread keeps of the last output of a group. calling: whether the module that holds the linears is being
    called. read: x and the tensors of the matrix. parts: those not taken yet, by first row. misses: outputs in a row of
    which parts were left.
    """

    def __init__(self) -> None:
        self.read: tuple[Tensor, ...] = ()
        self.parts: dict[int, _Part] = {}
        self.version, self.mode, self.misses, self.calling = 0, (False, False), 0, False


class _Group:
    """The linears of one matrix, and the parts of its last output that were not taken yet, for each thread.

    Parts are kept during a call of the module that holds the linears. A part is taken for the same tensor only, in the
    same mode of autograd and autocast, if neither it nor the matrix was written in between. If parts are left again and
    again, the linears do not read one tensor, and nothing is kept any more. Nor is anything in inference mode, whose
    tensors do not tell whether they were written.
    """

    def __init__(self, linears: list[JoinedLinear]):
        self.first = linears[0]
        self.sizes = {linear.start: linear.out_features for linear in linears}
        self.kept = _Kept()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a copy gets: nothing that is kept."""
        return {"first": self.first, "sizes": self.sizes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, kept=_Kept())

    def begin_call(self) -> None:
        """Forget the parts, and keep them from now on, in this thread."""
        self.kept.parts, self.kept.read, self.kept.calling = {}, (), True

    def end_call(self, finished: bool) -> None:
        """Forget the parts, and keep none any more, in this thread."""
        if self.kept.parts and finished and not torch.compiler.is_compiling():
            self.kept.misses += 1
        self.kept.parts, self.kept.read, self.kept.calling = {}, (), False

    def output(self, linear: JoinedLinear, x: Tensor) -> Tensor:
        """Return the rows of a linear in B x, (..., O), for x (..., I)."""
        matrix, held, traced = self.first.matrix, self.kept, torch.compiler.is_compiling()
        mode = torch.is_grad_enabled(), not traced and torch.is_autocast_enabled(x.device.type)
        if held.parts:
            fresh = held.read[0] is x and held.mode == mode and linear.start in held.parts
            if fresh and (traced or _is_unwritten(held, _tensors(matrix, x))):
                rows = held.parts.pop(linear.start)
                if not held.parts:
                    held.read, held.misses = (), 0
                return rows.rows()
            held.misses += not traced
        parts = dict(zip(self.sizes, _compute(matrix, x, list(self.sizes.values()), traced)))
        mine, held.parts, held.read = parts.pop(linear.start), {}, ()
        if held.calling and held.misses < MAX_MISSES and not is_exporting() and (traced or not x.is_inference()):
            held.parts, held.mode, held.read = parts, mode, (x,) if traced else _tensors(matrix, x)
            held.version = 0 if traced else _version(held.read)
        return mine.rows()

    def output_of_replica(self, linear: JoinedLinear, x: Tensor) -> Tensor:
        """Return the rows of a linear that nn.DataParallel copied to another device, by a copy of the matrix there."""
        matrix = linear._modules.get("joined")
        if matrix is None:
            matrix = self.first.matrix
            tensors = {n: t.to(x.device) for n, t in [*matrix.named_parameters(), *matrix.named_buffers()]}
            return torch.func.functional_call(matrix, tensors, (x,))[..., linear.rows()]
        y: Tensor = matrix(x)[..., linear.rows()]
        return y


def _is_unwritten(held: _Kept, now: tuple[Tensor, ...]) -> bool:
    return len(now) == len(held.read) and all(map(_is, now, held.read)) and _version(now) == held.version


class _Part(NamedTuple):
    """The rows of one linear: y (..., O); or of low rank z = right x and its rows of left (O, R), which are multiplied
    when they are taken.
    """

    y: Tensor
    left: Tensor | None = None

    def rows(self) -> Tensor:
        """Return the output (..., O)."""
        return self.y if self.left is None else F.linear(self.y, self.left)


def _compute(matrix: Any, x: Tensor, sizes: list[int], traced: bool) -> list[_Part]:
    """Return the parts of B x for linears of these numbers of outputs.

    Low rank of many tokens keeps z instead of the outputs, which are then contiguous and need no memory before they are
    taken. Modules with hooks are called as a whole: accelerate brings the weights of offloaded ones for a call.
    """
    hooked = matrix._forward_pre_hooks or matrix._forward_hooks or hasattr(matrix, "_hf_hook")
    plain = type(matrix) is LowRankLinear and not (hooked or traced or is_exporting())
    if plain and x.numel() > FEW_TOKENS * x.shape[-1]:  # an exported graph has no branch on the number of tokens
        right, left = matrix.right_and_left()
        z = F.linear(x, right)
        return [_Part(z, rows) for rows in left[0].split(sizes)]
    y = matrix(x)
    # No views of each other, so that one may be written in place.
    parts = y.split(sizes, dim=-1) if traced or is_exporting() else torch.unsafe_split_with_sizes(y, sizes, dim=-1)
    return [_Part(outputs) for outputs in parts]


def _tensors(matrix: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    stored = [*matrix._parameters.values(), *matrix._buffers.values()]
    return (x, *[t for t in stored if t is not None])


def _version(tensors: tuple[Tensor, ...]) -> int:
    """Return a number that grows whenever one of the tensors is written in place; tensors of inference mode do not
    tell.
    """
    return sum([t._version for t in tensors if not t.is_inference()])


def connect_joined(modules: Mapping[str, nn.Module]) -> None:
    """Connect the JoinedLinears among modules, by path, with those of their group.

    The model needs `hold_groups`, or computes B x for each.

    Raises SurgeryError if one lacks its first linear, or if the rows of a group do not cover its matrix.
    """
    groups: dict[str, list[tuple[str, JoinedLinear]]] = {}
    for path, module in modules.items():
        if isinstance(module, JoinedLinear):
            groups.setdefault(sibling(path, module.first) if module.first else path, []).append((path, module))
    for head, paths_and_linears in groups.items():
        paths_and_linears.sort(key=lambda item: item[1].start)
        names, members = (
            [path.rpartition(".")[2] for path, _ in paths_and_linears],
            [module for _, module in paths_and_linears],
        )
        starts, ends = [m.start for m in members], [m.start + m.out_features for m in members]
        first = members[0]
        whole = modules.get(head) is first and "joined" in first._modules and starts == [0, *ends[:-1]]
        if (
            not whole
            or ends[-1] != first.matrix.out_features
            or first.members not in ((), tuple(names))
            or any(m.in_features != first.in_features for m in members)
        ):
            places = ", ".join(
                f"{path} (rows {m.start} to {m.start + m.out_features})" for path, m in paths_and_linears
            )
            raise SurgeryError(f"{DAMAGED}: {places} do not cover the rows of one matrix at {head}, in its order")
        group = _Group(members)
        for module in members:
            module.connect(group)


def group_entries(in_features: int, outs: Mapping[str, int], config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the table entries of a group without biases, by name. outs: outputs by name, in the order of rows. config:
    of the matrix.
    """
    sizes = {"structure": "joined", "in_features": in_features, "bias": False}
    first, start, entries = next(iter(outs)), 0, {}
    for name, out in outs.items():
        entries[name] = {**sizes, "out_features": out, "first": first, "start": start}
        start += out
    matrix = {**config, "in_features": in_features, "out_features": start, "bias": False}
    entries[first] = {**sizes, "out_features": outs[first], "matrix": matrix, "members": list(outs)}
    return entries


def sibling(path: str, leaf: str) -> str:
    """Return the path of a module beside the one at `path`."""
    parent, dot, _ = path.rpartition(".")
    return f"{parent}{dot}{leaf}"


def record_paths(name: str) -> list[str]:
    """Return the paths of the linears of a record: one, those that a matrix joins (a.q_proj+k_proj+v_proj), or those of
    a pruned MLP.
    """
    first, *others = name.partition(":")[0].split("+")
    return [first, *(other if "." in other else sibling(first, other) for other in others)]
