"""Count the operations and the memory of PyTorch code that runs on the meta device.

Inside `OperationCounter` the code of a conversion runs as it is, on tensors without data. Each operation is counted by
its shapes, and the bytes of all living tensors are summed, so that their peak is known. Where the code reads a number
out of a tensor (an error, a norm), it gets one that falls from read to read: sweeps and trials then go on as long as
the recipe allows.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from surgery.calibration.layer_runner import CHUNK_TOKENS
from surgery.calibration.lm_head import MAX_LOGITS
from surgery.conversion.estimation.result_shapes import result
from surgery.core.repeats import repeats
from surgery.structures.btt import SWEEP_ELEMENTS
from surgery.structures.metric import MOMENT_BLOCK


@dataclass(frozen=True)
class Work:
    """Counted operations.

    products: FLOP of matrix products. attention: FLOP of softmax attention. roots: sum of n^3 over symmetric
    eigenproblems and singular value decompositions. solves: FLOP of Cholesky factors and triangular solves. traffic:
    bytes read and written by all other operations. small_roots: number of eigenproblems of size 1024 or less. passed:
    bytes between processes. files: bytes read from and written to files.
    """

    products: float = 0.0
    attention: float = 0.0
    roots: float = 0.0
    solves: float = 0.0
    traffic: float = 0.0
    small_roots: float = 0.0
    passed: float = 0.0
    files: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)))

    def times(self, factor: float) -> Work:
        """Return this work `factor` times."""
        return Work(*(getattr(self, f.name) * factor for f in fields(Work)))

    def minus(self, other: Work) -> Work:
        """Return the difference of two counts."""
        return self + other.times(-1.0)


SMALL_ROOT = 1024  # eigenproblems up to this size take a GPU equally long (docs/measurements/performance.md)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "dot")
ROOTS = {"_linalg_eigh": 1.0, "_linalg_svd": 4.0, "linalg_qr": 0.5}  # in eigenproblems with vectors of the size n^3
EIGENVALUES = 0.5  # of the time with eigenvectors


class OperationCounter(TorchDispatchMode):
    """Counts the operations on meta tensors inside the context. work: counted so far. peak, held: bytes of living
    tensors.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Importing torch._dynamo takes four seconds, and nothing is compiled here."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held, self.peak, self._reads = 0, 0, 0
        self._counts = {field.name: 0.0 for field in fields(Work)}
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}  # bytes of each storage, and what sees it freed

    @property
    def work(self) -> Work:
        """The work counted so far."""
        return Work(**self._counts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:  # half of all operations: no work and no memory of their own
            out = func(*args, **kwargs)
            for tensor in _meta_tensors((out,)):
                self._hold(tensor)
            return out
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "is_nonzero") and args[0].is_meta:
            return self._read(args[0])
        if name == "equal":
            return True
        if name == "_to_copy" and _is_meta(args[0]) and torch.device(kwargs.get("device") or "meta").type == "cpu":
            dtype = kwargs.get("dtype") or args[0].dtype
            return torch.full(args[0].shape, self._next(), dtype=torch.float64).to(dtype)
        out = result(name, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
        outputs, inputs = _meta_tensors((out,)), _meta_tensors(args)
        if kwargs:
            inputs += _meta_tensors(kwargs.values())
        if not outputs and not inputs:
            return out
        for tensor in outputs:
            if tensor.dtype == torch.bool and tensor.dim() == 0:
                tensor.counted_from = name  # type: ignore[attr-defined]
        self._count(name, func, inputs, outputs)
        # Memory that nothing was written to yet is not counted: a module on meta is filled with other tensors later.
        for tensor in inputs if func._schema.is_mutable else () if name.startswith("empty") else outputs:
            self._hold(tensor)
        return out

    def mark(self) -> Work:
        """Return the work counted so far, to be subtracted from a later count."""
        return self.work

    # -- counting ----------------------------------------------------------------------------------
    def _count(self, name: str, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        bare = name.rstrip("_")
        if bare in PRODUCTS:
            a, b = [t for t in inputs if t.dim() >= 1][-2:]
            batch = a.shape[0] if bare in ("bmm", "baddbmm") else 1
            rows, inner = (a.shape[-2] if a.dim() > 1 else 1), a.shape[-1]
            self._add(products=2.0 * batch * rows * inner * (b.shape[-1] if b.dim() > 1 else 1))
        elif bare in ROOTS:
            n, batch = min(inputs[0].shape[-2:]), math.prod(inputs[0].shape[:-2])
            values_only = bare == "_linalg_eigh" and (len(outputs) < 2 or outputs[1].numel() == 0)
            size = ROOTS[bare] * (EIGENVALUES if values_only else 1.0) * batch
            long_side = max(inputs[0].shape[-2:])
            self._add(roots=size * n * n * long_side, small_roots=batch if n <= SMALL_ROOT else 0)
        elif bare in ("linalg_cholesky_ex", "linalg_lu_factor_ex", "linalg_inv_ex"):
            n, batch = inputs[0].shape[-1], math.prod(inputs[0].shape[:-2])
            self._add(solves={"linalg_cholesky_ex": 1 / 3}.get(bare, 2 / 3) * batch * n**3)
        elif bare in ("linalg_solve_triangular", "_cholesky_solve_helper", "cholesky_solve", "_linalg_solve_ex"):
            n = inputs[1].shape[-1] if "cholesky" in bare else inputs[0].shape[-1]
            self._add(solves=(1.0 if "triangular" in bare else 2.0) * n * outputs[0].numel())
        elif not bare.startswith(("empty", "_unsafe_view", "lift")):
            self._add(traffic=float(sum(map(_bytes, inputs)) + sum(map(_bytes, outputs))))

    def _add(self, **counts: float) -> None:
        times = repeats()
        for name, count in counts.items():
            self._counts[name] += count * times

    def _next(self) -> float:
        self._reads += 1
        return 0.9**self._reads + 1e-30

    def _read(self, tensor: Tensor) -> Any:
        if tensor.dtype == torch.bool:  # finite values and successful factorizations: `all` holds, `any` does not
            return getattr(tensor, "counted_from", "") in ("all", "mul", "logical_and")
        return self._next() if tensor.is_floating_point() else 0

    # -- memory ------------------------------------------------------------------------------------
    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = size, weakref.ref(storage, lambda _: self._release(key))
        self.held += size
        self.peak = max(self.peak, self.held)

    def _release(self, key: int) -> None:
        self.held -= self._known.pop(key)[0]


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _meta_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors on the meta device among arguments or results, and in lists of them."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            if value.is_meta:
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _meta_tensors(value)
    return found


LIMITS: tuple[dict[str, int], ...] = (CHUNK_TOKENS, MAX_LOGITS, SWEEP_ELEMENTS, MOMENT_BLOCK)


@contextmanager
def counted_as(device: str) -> Iterator[OperationCounter]:
    """Count operations with the block sizes that the conversion uses on a device of this type, `cpu` or `cuda`."""
    for limits in LIMITS:
        limits["meta"] = limits[device]
    try:
        with torch.no_grad(), OperationCounter() as counter:
            yield counter
    finally:
        for limits in LIMITS:
            limits.pop("meta", None)
