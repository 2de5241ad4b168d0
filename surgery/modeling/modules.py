"""The modules that replace linears, built from the entries of a checkpoint's table.

Loading a converted checkpoint needs only this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.architectures.experts import RoutedExperts
from surgery.checkpoint.table import is_pruned
from surgery.core.errors import SurgeryError, UnknownNameError
from surgery.modeling.joined import DAMAGED as DAMAGED_TABLE
from surgery.modeling.joined import JoinedLinear, sibling
from surgery.structures import STRUCTURES, StructuredLinear
from surgery.structures.base import config_from_dict
from surgery.structures.quantized import QuantizedLinear, Storage
from surgery.structures.shared_basis import SharedBasis, SharedLowRankLinear, basis_path


class GuardedLinear(nn.Linear):
    """A dense linear whose weight is stored as (1, out, in).

    Checkpoints store the output projection of a mixer this way. A library that does not know this package then fails
    with a shape mismatch instead of running softmax attention on these weights.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **factory: Any):
        super().__init__(in_features, out_features, bias, **factory)
        self.weight = nn.Parameter(self.weight.detach()[None])

    @classmethod
    def from_weight(cls, weight_OI: Tensor, bias_O: Tensor | None) -> GuardedLinear:
        """Return a linear that shares the memory of a weight (out, in) and a bias (out,)."""
        linear = cls(weight_OI.shape[1], weight_OI.shape[0], bias_O is not None, device="meta")
        linear.weight = nn.Parameter(weight_OI.detach()[None], requires_grad=weight_OI.requires_grad)
        if bias_O is not None:
            linear.bias = nn.Parameter(bias_O.detach(), requires_grad=bias_O.requires_grad)
        return linear

    def forward(self, x: Tensor) -> Tensor:
        """Return the linear map of x: (.., in) -> (.., out)."""
        return F.linear(x, self.weight[0], self.bias)

    def product_by_cores(
        self, x: Tensor, multiply: Callable[[str, Tensor], Tensor], tables: Mapping[str, Any]
    ) -> Tensor:
        """Return the linear map of x without the bias. multiply(name, x): the product of the weight with x (.., in).
        tables: of indices, of which there are none."""
        return multiply("weight", x)

    def dense(self) -> Tensor:
        """Return the weight (out, in)."""
        return self.weight[0]


class SplitLinear(nn.Module):
    """A fused linear whose roles are computed by separate linears; outputs are in the fused order.

    `weight` is an empty 3-D buffer: see StructuredLinear.
    """

    def __init__(self, in_features: int, parts: dict[str, nn.Module], sizes: tuple[int, ...], heads: int = 0):
        super().__init__()
        self.in_features, self.out_features = in_features, sum(sizes)
        self.sizes, self.heads = sizes, heads
        self.parts = nn.ModuleDict(parts)
        device = next(iter(next(iter(parts.values())).state_dict(keep_vars=True).values())).device
        self.register_buffer("weight", torch.zeros(1, 1, 1, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all parts in the fused order: (.., in) -> (.., out)."""
        ys = [linear(x) for linear in self.parts.values()]
        if self.heads:
            ys = [y.unflatten(-1, (self.heads, -1)) for y in ys]
        y = torch.cat(ys, dim=-1)
        return y.flatten(-2) if self.heads else y

    def _fuse(self, rows: list[Tensor]) -> Tensor:
        if not self.heads:
            return torch.cat(rows)
        return torch.cat([r.unflatten(0, (self.heads, -1)) for r in rows], dim=1).flatten(0, 1)

    def dense(self) -> Tensor:
        """Return the weight (out, in), with rows in the fused order."""
        has_cores = (StructuredLinear, QuantizedLinear)
        return self._fuse([p.dense() if isinstance(p, has_cores) else p.weight for p in self.parts.values()])  # type: ignore[misc]

    def fused_bias(self) -> Tensor | None:
        """Return the bias (out,) in the fused order, or None."""
        biases = [linear.bias for linear in self.parts.values()]
        return None if any(b is None for b in biases) else self._fuse(biases)  # type: ignore[arg-type]


def build_module(
    spec: dict[str, Any], device: str | torch.device = "meta", dtype: torch.dtype | None = None
) -> nn.Module:
    """Build the module of a table entry.

    The entry is {"structure": .., "in_features": .., "out_features": .., "bias": ..}, where the structure may be
    "dense" or "folded" (GuardedLinear), "pruned" (a linear of a pruned MLP), or {"structure": "split", "parts": {role: entry}, "order": [role, ..], "heads":
    ..}. The order of the parts is a list because transformers sorts the keys of config.json
    (PreTrainedConfig.to_json_string in
    https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/configuration_utils.py). With `bits`, and
    `group` if scales have groups, the weights are stored as integers, or with `format`: "fp8" as e4m3: QuantizedLinear; `scales`: "inputs" tells tensor
    trains from older ones, see `Storage`. With `share`: "experts", it is a SharedLowRankLinear, which needs
    `connect_bases` or `connect`. The structure "joined" is a JoinedLinear, which needs `connect_joined`. The first
    linear of a group has {"structure": "joined", sizes, "matrix": entry of B, "members": names of the group, sorted by
    their rows in B}; each other linear has {"structure": "joined", sizes, "first": name of the first, "start": its first
    row in B}.
    Raises SurgeryError if the entry is invalid.
    """
    transposed = bool(spec.get("transposed"))
    spec = {k: v for k, v in spec.items() if k not in ("file_name", "transposed")}
    if "bits" in spec or "group" in spec:
        return _build_quantized(spec, device, dtype)
    if spec.get("structure") == "split":
        _check_split_entry(spec)
        entries = {name: spec["parts"][name] for name in spec.get("order", spec["parts"])}
        parts = {name: build_module(entry, device, dtype) for name, entry in entries.items()}
        sizes = tuple(entry["out_features"] for entry in entries.values())
        return SplitLinear(next(iter(entries.values()))["in_features"], parts, sizes, spec.get("heads", 0))
    _check_entry(spec)
    if spec["structure"] == "joined":
        return _build_joined(spec, device, dtype)
    in_, out, bias = spec.pop("in_features"), spec.pop("out_features"), spec.pop("bias")
    factory: dict[str, Any] = {"device": device, "dtype": dtype}
    share = spec.pop("share", None)
    if share is not None and (share != "experts" or spec["structure"] != "low_rank"):
        raise SurgeryError(f"{DAMAGED_TABLE}: share: {str(share)[:50]!r} of structure {spec['structure'][:50]!r}")
    if spec["structure"] == "dense":
        return nn.Linear(in_, out, bias=bias, **factory)
    if spec["structure"] == "folded":
        return GuardedLinear(in_, out, bias=bias, **factory)
    if is_pruned(spec):
        if unknown := spec.keys() - {"structure"}:
            raise SurgeryError(f"{DAMAGED_TABLE}: {min(unknown)[:50]!r} of structure pruned")
        return _build_pruned(in_, out, bias, transposed, factory)
    config = config_from_dict(spec)
    structure: Any = SharedLowRankLinear if share else STRUCTURES[config]
    if isinstance(getattr(config, "blocks", None), str):
        raise SurgeryError(f"{DAMAGED_TABLE}: {config} of an {out} x {in_} matrix; its blocks must be numbers")
    levels = getattr(config, "levels", None)
    if isinstance(levels, tuple) and any(isinstance(level, str) for level in levels):
        raise SurgeryError(f"{DAMAGED_TABLE}: {config} of an {out} x {in_} matrix; its levels must be numbers")
    resolved = structure.resolve(config, out, in_)
    if getattr(resolved, "blocks", None) != getattr(config, "blocks", None):  # "sqrt" is allowed in recipes only
        raise SurgeryError(f"{DAMAGED_TABLE}: {config} of an {out} x {in_} matrix; its blocks must be numbers")
    rank, full = getattr(config, "rank", 1), structure.full_rank(resolved, out, in_)
    if rank is None or rank == "full" or not min(1, full) <= rank <= full:
        raise SurgeryError(
            f"{DAMAGED_TABLE}: {config} of an {out} x {in_} matrix; its rank must be a number from 1 to {full}"
        )
    module: nn.Module = structure(in_, out, config, bias=bias, **factory)
    return module


def _build_joined(spec: dict[str, Any], device: str | torch.device, dtype: torch.dtype | None) -> JoinedLinear:
    in_, out, first, matrix = spec["in_features"], spec["out_features"], spec.get("first", ""), spec.get("matrix")
    start = spec.get("start", 0)
    is_first = not first and isinstance(matrix, dict) and matrix.get("structure") not in UNJOINED
    is_other = isinstance(first, str) and first.isidentifier() and matrix is None
    if not (is_first or is_other) or type(start) is not int or not 0 <= start <= MAX_FEATURES or (is_first and start):
        raise SurgeryError(f"{DAMAGED_TABLE}: a joined entry reads {str(spec)[:200]}")
    joined: Any = None
    members = spec.get("members")
    if is_first != (isinstance(members, list) and len(members) > 1 and all(isinstance(name, str) for name in members)):
        raise SurgeryError(f"{DAMAGED_TABLE}: a joined entry reads {str(spec)[:200]}")
    if is_first:
        assert isinstance(matrix, dict)
        joined = build_module({**matrix, "in_features": in_, "bias": False}, device, dtype)
        if shares_basis(matrix) or joined.out_features <= out:
            raise SurgeryError(f"{DAMAGED_TABLE}: a joined entry reads {str(spec)[:200]}")
    made = JoinedLinear(in_, out, start, joined, first, spec["bias"], device=device, dtype=dtype)
    made.members = tuple(members or ())
    return made


def _build_pruned(in_: int, out: int, bias: bool, transposed: bool, factory: dict[str, Any]) -> nn.Module:
    """Return a linear of a pruned MLP: of the kind that it replaces, with fewer inputs or outputs."""
    if not transposed:
        return nn.Linear(in_, out, bias=bias, **factory)
    from transformers.pytorch_utils import Conv1D

    conv1d: Any = Conv1D
    with torch.device(factory["device"]):
        linear: nn.Module = conv1d(out, in_)
    if not bias:
        linear.bias = None  # type: ignore[assignment]
    return linear.to(dtype=factory["dtype"])


def mark_pruned(linear: nn.Module) -> None:
    """Mark an ordinary linear as one of a pruned MLP, so that training counts it as new."""
    linear.of_pruned_mlp = True  # type: ignore[assignment]


def is_new(module: nn.Module) -> bool:
    """Return whether a module was put in place of a linear by a conversion, or is of a pruned MLP."""
    return isinstance(module, (StructuredLinear, SplitLinear, JoinedLinear)) or hasattr(module, "of_pruned_mlp")


def fewer_features(spec: dict[str, Any], in_: int, out: int) -> bool:
    """Return whether an entry of a pruned MLP suits a linear (out, in): it has fewer inputs, or fewer outputs, or all."""
    sizes = (spec["in_features"], in_), (spec["out_features"], out)
    return all(stored <= whole for stored, whole in sizes) and any(stored == whole for stored, whole in sizes)


def is_joined(spec: dict[str, Any]) -> bool:
    """Return whether a table entry is that of one of several linears that one matrix replaces."""
    return spec.get("structure") == "joined"


def joined_paths(table: Mapping[str, dict[str, Any]], head: str) -> list[str]:
    """Return the paths of a group of joined linears, sorted by their rows. head: path of the first linear."""
    return [sibling(head, name) for name in table[head]["members"]]


def shares_basis(spec: dict[str, Any]) -> bool:
    """Return whether a table entry is that of an expert whose basis is stored once for all experts of its layer."""
    return "share" in spec


def connect_bases(model: nn.Module, paths: Iterable[str], bases: Mapping[str, SharedBasis] | None = None) -> None:
    """Give the experts at these paths, which are SharedLowRankLinears, the bases of their layers, which become modules
    of the model.

    bases: by path; new ones on the meta device if None. Raises SurgeryError if the experts of a layer differ in rank or
    inputs.
    """
    for path in paths:
        linear: Any = model.get_submodule(path)
        parent, _, leaf = basis_path(path).rpartition(".")
        experts = model.get_submodule(parent)
        if not isinstance(experts, RoutedExperts):
            raise SurgeryError(f"{DAMAGED_TABLE}: {path} shares a basis, and {parent} holds no experts")
        if leaf not in experts._modules:
            made = None if bases is None else bases[basis_path(path)]
            experts.add_module(leaf, made or SharedBasis(linear.in_features, linear.config.rank, device="meta"))
        try:
            linear.connect(experts.get_submodule(leaf))
        except SurgeryError as error:
            raise SurgeryError(f"{DAMAGED_TABLE}: {path}: {error}") from None


def _build_quantized(spec: dict[str, Any], device: str | torch.device, dtype: torch.dtype | None) -> QuantizedLinear:
    """Build the module of an entry with `bits`.

    A dense weight is stored as (1, out, in), as GuardedLinear stores it.
    """
    if shares_basis(spec):
        raise SurgeryError(f"{DAMAGED_TABLE}: a linear whose basis is shared by experts is not stored as integers")
    plain = float_entry({"bits": 0, **spec})
    try:
        storage = Storage(spec.get("bits", 0), spec.get("group"), format=spec.get("format", "int"))
        if plain.get("structure") in ("split", "joined"):
            raise SurgeryError("the parts of a split entry, and the matrix of a joined one, have bits of their own")
        linear = build_module(plain, device, dtype)
        named = getattr(linear, "scales_named", False)
        if "scales" in spec and (spec["scales"] != "inputs" or not named):
            raise SurgeryError(
                f"scales: {str(spec['scales'])[:50]!r} of structure {str(plain.get('structure'))[:50]!r}"
            )
        return QuantizedLinear(linear, replace(storage, last_axis=named and "scales" not in spec))
    except UnknownNameError:  # a structure of the user's, whose plugin is missing: the table is whole
        raise
    except SurgeryError as error:
        text = str(error)
        raise SurgeryError(text if text.startswith(DAMAGED_TABLE) else f"{DAMAGED_TABLE}: {text}") from None


STORAGE_KEYS = ("bits", "group", "scales", "format")  # of a stored linear's entry


def quantized_entry(entry: dict[str, Any], storage: Storage) -> dict[str, Any]:
    """Return the table entry of a linear, structured or dense, with its storage."""
    entry = {**entry, "bits": storage.bits, **({"group": storage.group} if storage.group is not None else {})}
    entry |= {"format": storage.format} if storage.format != "int" else {}
    if entry["structure"] not in ("dense", "folded", "pruned"):
        structure: Any = STRUCTURES[STRUCTURES.config_type(entry["structure"])]
        entry |= {"scales": "inputs"} if structure.scales_named else {}
    return entry


def float_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the table entry of the linear that a stored one is computed as: without the storage, also of the parts of a
    split entry and of the matrix of a joined one. A dense weight is (1, out, in), as in GuardedLinear.
    """
    if "bits" in entry:
        entry = {k: v for k, v in entry.items() if k not in STORAGE_KEYS}
        return {**entry, "structure": "folded"} if entry.get("structure") in ("dense", "pruned") else entry
    if isinstance(parts := entry.get("parts"), dict):
        return {**entry, "parts": {name: float_entry(part) for name, part in parts.items()}}
    return {**entry, "matrix": float_entry(entry["matrix"])} if isinstance(entry.get("matrix"), dict) else entry


REPLACED = (
    StructuredLinear,
    SplitLinear,
    JoinedLinear,
    GuardedLinear,
    QuantizedLinear,
)  # what replaces a linear in a converted model
UNJOINED = ("split", "joined", "dense", "folded", "pruned")  # what cannot be the matrix of joined linears
MAX_FEATURES = 2**26  # more features than any model has


def _check_entry(spec: dict[str, Any]) -> None:
    sizes = [spec.get("in_features"), spec.get("out_features")]
    whole = all(type(n) is int and 1 <= n <= MAX_FEATURES for n in sizes)
    if not whole or type(spec.get("bias")) is not bool or not isinstance(spec.get("structure"), str):
        raise SurgeryError(f"{DAMAGED_TABLE}: an entry reads {str(spec)[:100]}")


def _check_split_entry(spec: dict[str, Any]) -> None:
    stored_parts, heads = spec.get("parts"), spec.get("heads", 0)
    parts: dict[str, Any] = stored_parts if isinstance(stored_parts, dict) else {}
    whole = bool(parts) and all(isinstance(entry, dict) for entry in parts.values())
    if not whole or any(
        e.get("structure") in ("split", "joined") or shares_basis(e) or not name.isidentifier()
        for name, e in parts.items()
    ):
        raise SurgeryError(f"{DAMAGED_TABLE}: a split entry reads {str(spec)[:100]}")
    order = spec.get("order", list(parts))
    if not isinstance(order, list) or not all(isinstance(n, str) for n in order) or sorted(order) != sorted(parts):
        raise SurgeryError(
            f"{DAMAGED_TABLE}: the order {str(order)[:100]} of a split entry must list its parts {sorted(parts)}"
        )
    outs = [entry.get("out_features") for entry in parts.values()]
    if type(heads) is not int or heads < 0 or any(type(n) is not int or (heads and n % heads) for n in outs):
        raise SurgeryError(f"{DAMAGED_TABLE}: {heads} heads must divide the parts' outputs {outs}")
