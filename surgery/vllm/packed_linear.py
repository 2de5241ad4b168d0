"""Several linears of one input, such as q, k and v, whose outputs lie side by side: what a fused linear of vLLM holds.

    packed = PackedLinear([spec_q, spec_k, None], in_features=64, out_features=(64, 32, 32), dtype=torch.float32)
    packed.tensors                                  name -> (number of elements, dtype) of the tensors to allocate
    packed.copy_part(flat, "right", 1, tensor)      tensor `right` of part 1, from the checkpoint, into the flat tensor `right`
    packed.check_complete("model.layers.0.self_attn.qkv_proj", {"weight": .., "right": ..})
    packed({"weight": .., "right": ..}, x)          (.., in) -> (.., sum of out)

Every part is a structure with a rank of its own, or dense. Tensors of all parts that have the same name lie one after
another in one flat tensor, because vLLM's loaders address a tensor by the name of the fused linear and a part's number.
This module does not import vLLM.

Low-rank parts that follow one another are computed together: their factors `right` lie one after another in the flat
tensor, so one product computes the first half of all.

Parts stored as integers of 8 or 4 bits stay so in memory. Each call multiplies them out, one part at a time. Parts
stored in FP8 compute as in transformers: each product rounds its inputs. Where tensors of one name have several dtypes,
the flat tensor is one of bytes.

With tensor parallelism each process computes the slice of its outputs ("out", column parallel) or the part of the sum
from its inputs ("in", row parallel). Low rank, BTT, Monarch and dense parts are cut, so that a process holds and
multiplies a slice (`slice_spec`). Of other structures, of matrices stored as integers, and where the blocks do not
divide, each process holds the whole matrix: column parallel it keeps its outputs, row parallel it puts its inputs
between zeros. Both are exact, and save neither memory nor time. Parts in FP8 are not computed row parallel: a process
would round its inputs by the largest of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from surgery.checkpoint.table import is_pruned, is_quantized
from surgery.core.errors import SurgeryError
from surgery.modeling.modules import build_module, fewer_features, float_entry, is_joined
from surgery.structures import StructuredLinear
from surgery.structures.fp8 import E4M3
from surgery.structures.grouped import low_rank_stack
from surgery.structures.low_rank import LowRankLinear
from surgery.structures.quantized import QuantizedLinear

Side = Literal["out", "in"]
ALIGNMENT = 16  # bytes, of a tensor that lies in one of bytes


@dataclass(frozen=True)
class Shard:
    """The slice of a linear that one process of `count` computes. side: "out" (column parallel) or "in" (row parallel).

    segments: outputs of the whole linear, each cut by itself, if a part has several, such as q, k and v in one matrix.
    """

    rank: int = 0
    count: int = 1
    side: Side = "out"
    segments: tuple[int, ...] = ()

    def inputs(self, x: Tensor) -> Tensor:
        """Return the whole input (.., in), with zeros for the inputs of other processes, of this process's (.., in / count)."""
        size = x.shape[-1]
        return F.pad(x, (self.rank * size, (self.count - 1 - self.rank) * size)) if self.side == "in" else x

    def outputs(self, y: Tensor, segments: Sequence[int] = ()) -> Tensor:
        """Return this process's slice of the whole output (.., out). segments: each is cut by itself; () for one."""
        if self.side == "in" or self.count == 1:
            return y
        parts = y.split(list(segments), -1) if segments else (y,)
        slices = [part.chunk(self.count, -1)[self.rank] for part in parts]
        return slices[0].contiguous() if len(slices) == 1 else torch.cat(slices, -1)


class Place(NamedTuple):
    """Where a tensor of a part lies in the flat tensor of its name: elements start .. stop - 1, or bytes if the flat
    tensor is one of bytes."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, flat: Tensor) -> Tensor:
        """Return the tensor, as a view."""
        part = flat[self.start : self.stop]
        return (part if part.dtype == self.dtype else part.view(self.dtype)).view(self.shape)


class PackedLinear:
    """Parts side by side; see the module's docstring.

    specs: table entries of the parts, None for a dense part. in_features, out_features: sizes of the whole linear, one
    of out_features for each part; those of a pruned MLP are smaller, and vLLM's MLP takes the outputs as they are.
    Raises SurgeryError if an entry has other sizes, or sizes that `shard.count` does not divide.
    """

    def __init__(
        self,
        specs: list[dict[str, Any] | None],
        in_features: int,
        out_features: tuple[int, ...],
        dtype: torch.dtype,
        shard: Shard | None = None,
    ):
        self.shard = shard or Shard()
        self.modules: list[nn.Module] = []  # of each part: its stored tensors
        self.computed: list[nn.Module] = []  # of each part: its product, in floating point or FP8
        self.cuts: list[dict[str, tuple[int, int]]] = []  # of each part: tensor -> (axis, slices), for sliced tensors
        self.shapes: list[dict[str, tuple[int, ...]]] = []  # of each part: tensor -> shape in the checkpoint
        self.is_whole: list[bool] = []  # of each part: whether this process holds all of it, and computes a slice
        self.out_features = out_features
        self.joined = _find_joined(specs, out_features)
        # the linear beside this one that holds the matrix, if it is in a layer of its own
        self.follows = str((specs[0] or {}).get("first", "")) if self.joined and len(specs) == 1 else ""
        for spec, out in zip(specs, out_features, strict=True):
            entry = {"structure": "dense"} if spec is None else dict(spec)
            entry = {"in_features": in_features, "out_features": out, **entry}
            sizes = entry["in_features"], entry["out_features"]
            suits = sizes == (in_features, out) or (is_pruned(entry) and fewer_features(entry, in_features, out))
            if entry["structure"] != "split" and not suits:
                raise SurgeryError(
                    f"the table in config.json maps {sizes[0]} features to {sizes[1]}, where the model has a linear "
                    f"from {in_features} "
                    f"to {out}. Its config and its table do not belong together; download or convert the checkpoint "
                    "again"
                )
            whole = build_module(without_bias(entry), "meta", dtype)
            self.shapes.append({name: tuple(t.shape) for name, t in whole.state_dict().items()})
            local, cuts = slice_spec(entry, self.shard)
            self.is_whole.append(self.shard.count > 1 and not cuts)
            self.modules.append(build_module(without_bias(local), "meta", dtype))
            self.computed.append(
                self.modules[-1]
                if rounds_inputs(local)
                else build_module(without_bias(float_entry(local)), "meta", dtype)
            )
            self.cuts.append(cuts)
        self.places: list[dict[str, Place]] = [{} for _ in self.modules]
        self.tensors: dict[str, tuple[int, torch.dtype]] = {}
        stored: dict[str, set[torch.dtype]] = {}
        for module in self.modules:
            for name, t in module.state_dict().items():
                stored.setdefault(name, set()).add(t.dtype)
        self.mixed = {name for name, dtypes in stored.items() if len(dtypes) > 1}
        for slots, module in zip(self.places, self.modules):
            for name, t in module.state_dict().items():
                start, dtype = self.tensors.get(name, (0, torch.uint8 if name in self.mixed else t.dtype))
                size = t.numel()
                if name in self.mixed:
                    start, size = -(-start // ALIGNMENT) * ALIGNMENT, t.nbytes
                slots[name] = Place(start, start + size, tuple(t.shape), t.dtype)
                self.tensors[name] = (start + size, dtype)
        self.stacks = self._find_stacks()
        self.has_biases = any(name.rpartition(".")[2] == "bias" for name in self.tensors)
        self.missing = {(part, name) for part, slots in enumerate(self.places) for name in slots}

    def copy_part(self, flat: Tensor, name: str, part: int, loaded: Tensor) -> None:
        """Copy a tensor of the checkpoint, or this process's slice of it, into the flat tensor `name`.

        Raises SurgeryError if the part has no such tensor, or one of another shape, or got it before.
        """
        if not 0 <= part < len(self.places) or name not in self.places[part]:
            raise SurgeryError(
                f"the checkpoint has a tensor {name!r} for part {part}, which its table does not describe"
            )
        if tuple(loaded.shape) != self.shapes[part][name]:
            raise SurgeryError(
                f"tensor {name!r} of part {part} has shape {list(loaded.shape)} in the checkpoint, and "
                f"{list(self.shapes[part][name])} by its table: config.json and weights do not belong together"
            )
        place = self.places[part][name]
        converts = all(dtype.is_floating_point and dtype != E4M3 for dtype in (loaded.dtype, place.dtype))
        if loaded.dtype != place.dtype and not converts:
            raise SurgeryError(
                f"tensor {name!r} of part {part} is {loaded.dtype} in the checkpoint, and {place.dtype} by its table: "
                "config.json and weights do not belong together"
            )
        if (part, name) not in self.missing:
            raise SurgeryError(f"the checkpoint has tensor {name!r} of part {part} twice")
        if name in self.cuts[part]:
            axis, count = self.cuts[part][name]
            loaded = loaded.chunk(count, dim=axis)[self.shard.rank]
        place.of(flat.data).copy_(loaded)
        self.missing.discard((part, name))

    def check_complete(self, path: str, flats: dict[str, Tensor]) -> None:
        """Raise SurgeryError if a tensor was not loaded or is invalid, such as an index table that is no
        permutation.
        """
        if self.missing:
            part, name = min(self.missing)
            raise SurgeryError(
                f"{path}: the checkpoint lacks {len(self.missing)} of its tensors, such as {name!r} of part {part}. "
                "Download or convert it "
                "again"
            )
        for module, tensors in zip(self.modules, self._parts(flats)):
            filled = copy.deepcopy(module)
            filled.load_state_dict(tensors, assign=True)
            for linear in filled.modules():
                if isinstance(linear, (StructuredLinear, QuantizedLinear)):
                    linear.check_loaded()

    def _parts(self, flats: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the stored tensors of each part."""
        return [{name: place.of(flats[name]) for name, place in slots.items()} for slots in self.places]

    def _float_tensors(self, part: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a part as its product takes them: integers multiplied out, the others as they are."""
        if self.computed[part] is self.modules[part]:
            return tensors
        tensors = dict(tensors)
        for path, linear in self.modules[part].named_modules():
            if isinstance(linear, QuantizedLinear):
                prefix, stored = f"{path}." if path else "", {}
                for core in linear.shapes:
                    for name in (core, f"{core}_scale"):
                        stored[name] = tensors.pop(f"{prefix}{name}")
                for core, values in linear.float_cores(stored).items():
                    tensors[f"{prefix}{core}"] = values
        return tensors

    def __call__(self, flats: dict[str, Tensor], x: Tensor) -> Tensor:
        """Return the parts' outputs side by side, (.., sum of out), for x (.., in)."""
        if self.joined and len(self.modules) == 1:  # one of joined linears, alone in its layer
            return self.local_rows(self.whole(flats, x))
        parts, outs, part = self._parts(flats), [], 0
        while part < len(parts):
            if part in self.joined:
                sizes = [self.out_features[part] for part in self.joined]
                outs.append(self.shard.outputs(self.whole(flats, x), sizes))
                part = self.joined[-1] + 1
            elif part in self.stacks:
                outs.append(self._stack(flats, x, self.stacks[part]))
                part = self.stacks[part][-1] + 1
            else:
                whole = self.is_whole[part]
                inputs = (self.shard.inputs(x) if whole else x,)
                y = functional_call(self.computed[part], self._float_tensors(part, parts[part]), inputs)
                outs.append(self.shard.outputs(y, self.shard.segments) if whole else y)
                part += 1
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)

    def _find_stacks(self) -> dict[int, range]:
        """Return first part -> parts of each run of low-rank linears whose factors `right` lie one after another."""
        stacks: dict[int, range] = {}
        part = len(self.modules) if {"right", "weight"} & self.mixed else 0
        while part < len(self.modules):
            stop = part
            while stop < len(self.modules) and type(self.modules[stop]) is LowRankLinear and not self.is_whole[stop]:
                stop += 1
            if stop > part:
                stacks[part] = range(part, stop)
            part = max(stop, part + 1)
        return stacks

    def _stack(self, flats: dict[str, Tensor], x: Tensor, parts: range) -> Tensor:
        """Return the outputs of a run of low-rank linears, side by side."""
        places = [self.places[part] for part in parts]
        first, last = places[0]["right"], places[-1]["right"]
        lefts = [place["weight"].of(flats["weight"]) for place in places]
        right_RI = flats["right"][first.start : last.stop].view(-1, first.shape[1])
        if torch.compiler.is_compiling():
            y: Tensor = STACK_OP(x, right_RI, lefts)
            return y
        return low_rank_stack(x, right_RI, tuple(lefts))

    def whole(self, flats: dict[str, Tensor], x: Tensor) -> Tensor:
        """Return the output of the matrix of joined linears, with the rows of all, (.., sum of out)."""
        part = self.joined[0]
        holder: Any = self.computed[part]
        whole = self._float_tensors(part, self._parts(flats)[part])
        tensors = {name.partition(".")[2]: t for name, t in whole.items() if "." in name}
        y: Tensor = functional_call(holder.matrix, tensors, (x,))
        return y

    def local_rows(self, y: Tensor) -> Tensor:
        """Return the outputs of the first part, or this process's slice of them, of those of the matrix of joined linears."""
        first: Any = self.modules[0]
        return self.shard.outputs(y[..., first.rows()])


# vLLM traces a model once for all numbers of tokens, at the largest. Inside the operator, each call chooses for its own.
def _stack_forward(x: Tensor, right_RI: Tensor, lefts: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return low_rank_stack(x, right_RI, tuple(lefts))


STACK_OP: Any = torch.library.custom_op(
    "surgery::low_rank_stack",
    _stack_forward,
    mutates_args=(),
    schema="(Tensor x, Tensor right_RI, Tensor[] lefts) -> Tensor",
)
STACK_OP.register_fake(lambda x, right_RI, lefts: x.new_empty(*x.shape[:-1], sum(left.shape[1] for left in lefts)))


def _find_joined(specs: list[dict[str, Any] | None], out_features: tuple[int, ...]) -> range:
    """Return which parts are joined linears, whose rows one matrix computes.

    A layer may have a single one. Raises SurgeryError if joined linears are not neighbors, sorted by their rows, with the
    linear that holds the matrix first.
    """
    positions = [i for i, spec in enumerate(specs) if spec is not None and is_joined(spec)]
    if len(positions) == 0 or len(specs) == 1:
        return range(len(positions))
    parts = range(positions[0], positions[-1] + 1)
    starts = [(specs[i] or {}).get("start", 0) for i in positions]
    holds = ["matrix" in (specs[i] or {}) for i in positions]
    expected = [sum(out_features[parts.start : i]) for i in positions]
    if (
        positions != list(parts)
        or len(positions) == 1
        or starts != expected
        or holds != [True] + [False] * (len(positions) - 1)
    ):
        raise SurgeryError(
            "the table in config.json joins linears (share: input) in another order than vLLM's model computes them. "
            "Use `transformers "
            "serve`, or convert with share: none"
        )
    return parts


def without_bias(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the table entry without its bias: vLLM's linears make and add their own.

    The parts of a split entry keep theirs.
    """
    return spec if spec.get("structure") == "split" else {**spec, "bias": False}


def rounds_inputs(spec: dict[str, Any]) -> bool:
    """Return whether an entry, a part of a split one, or the matrix of a joined one is stored in FP8."""
    inner = [*spec.get("parts", {}).values(), *([spec["matrix"]] if "matrix" in spec else [])]
    return spec.get("format") == "fp8" or any(map(rounds_inputs, inner))


def slice_spec(spec: dict[str, Any], shard: Shard) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """Return (the table entry of one process's slice, tensor -> (axis, slices) of the tensors that are cut; others are
    copies).

    Column parallel slices own rows of the matrix (outputs), row parallel slices own columns (inputs, whose products are
    summed over the processes). Low rank W = left right: `out` cuts left and copies right, `in` cuts right and copies
    left. BTT and Monarch: `out` cuts the b block rows of both cores, `in` the c block columns.

    No cuts mean that each process holds the whole matrix: other structures; integers; a matrix of several segments; a
    rank above the features of a slice; blocks that the number of processes does not divide, that do not tile the features,
    or, for `out`, in strided order, whose outputs do not follow one another. Raises SurgeryError where features do not
    divide, for `in` of parts with biases, which would be added once in each process, and for `in` of FP8.
    """
    structure, count, out = spec["structure"], shard.count, shard.side == "out"
    if count == 1:
        return spec, {}
    size = "out_features" if out else "in_features"
    features = shard.segments if out and shard.segments else (spec.get(size, 0),)
    if uneven := [n for n in features if n % count]:
        raise SurgeryError(
            f"{count} processes must divide the {uneven[0]} {size.replace('_', ' ')} of a {structure} matrix. Use "
            "another --tensor-parallel-size"
        )
    if structure == "split" and not out:
        raise SurgeryError(
            "a linear replaced in parts (fused: split) is not cut along its inputs: each process would add its biases. "
            "Use --tensor-parallel-size 1"
        )
    if rounds_inputs(spec) and not out:
        raise SurgeryError(
            f"a {structure} matrix stored in fp8 is not cut along its inputs: all inputs of a token are rounded by one "
            f"scale, and each of {count} processes would take its own. Use --tensor-parallel-size 1, or quantize to 8 bits "
            "(surgery quantize --bits 8)"
        )
    if is_quantized({"": spec}) or len(features) > 1:
        return spec, {}
    local = {**spec, size: features[0] // count}
    if structure == "low_rank":
        if spec["rank"] > min(local["in_features"], local["out_features"]):
            return spec, {}
        return local, {"weight": (1, count)} if out else {"right": (1, count)}
    if structure in ("dense", "folded"):
        axis = (0 if out else 1) + (structure == "folded")
        return local, {"weight": (axis, count)}
    if structure not in ("btt", "monarch"):
        return spec, {}
    grid = list(build_module(without_bias(spec)).state_dict()["weight"].shape[:2])
    which = 0 if out else 1
    if grid[which] % count or spec[size] % grid[which] or (out and spec.get("order") == "strided"):
        return spec, {}
    grid[which] //= count
    rank = build_module(without_bias(spec)).state_dict()["weight"].shape[2]
    local = {key: local[key] for key in ("in_features", "out_features", "bias")}
    local |= {"structure": "btt", "blocks": grid, "rank": rank, "order": spec.get("order", "contiguous")}
    return local, {"weight": (0, count), "right": (2, count)} if out else {"weight": (1, count), "right": (0, count)}
