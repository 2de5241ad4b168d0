"""Other packages' kernels inside an op over chunks (kernels/chunked_op.py): forward and backward choose separately.

The choice is made inside the op, not by `register_kernel`: a compiled model keeps the op as one node of its graph and
makes the choice when the graph runs, and packed sequences call the op directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from surgery.kernels.chunked_op import ChunkedFunctions, OptionalTensors
from surgery.kernels.packages.adapters import PackageKernel
from surgery.kernels.packages.contest import PackageCall, candidates, choose, run_backward, run_forward
from surgery.kernels.packages.heads_last import RowTensors


class _LazyPlan:
    """Our plan of a call, made when our kernels run first; it holds no tensors of the call before."""

    def __init__(self, make_plan: Callable[..., Any], geometry: tuple[Any, ...]):
        self.make_plan, self.geometry, self.made = make_plan, geometry, None

    def of(self, tensors: OptionalTensors) -> Any:
        """Return the plan of the call with these tensors."""
        if self.made is None:
            self.made = self.make_plan(tensors, *self.geometry)
        return self.made


def with_packages(
    op: str,
    functions: ChunkedFunctions,
    kernels: tuple[PackageKernel, ...],
    rows_of: Callable[[OptionalTensors], RowTensors],
    borders_of: Callable[..., Tensor | None],
) -> ChunkedFunctions:
    """Return the functions of an op that run a package's kernel where it was chosen, else `functions`.

    rows_of(tensors), borders_of(*geometry): the op's inputs, and borders of packed sequences or None. Gradients that
    `rows_of` has no tensor for are left out.
    """

    def make_plan(tensors: OptionalTensors, *geometry: Any) -> _LazyPlan:
        return _LazyPlan(functions.make_plan, geometry)

    def forward(tensors: OptionalTensors, plan: _LazyPlan) -> tuple[Tensor, Tensor]:
        rows = rows_of(tensors)
        ours = lambda: functions.forward(tensors, plan.of(tensors))  # noqa: E731
        if not (entrants := candidates(kernels, rows.v)):
            return ours()
        ends = borders_of(*plan.geometry)
        chosen = choose(entrants, PackageCall(op, rows, ends, ours))
        return ours() if chosen is None else run_forward(chosen, rows, ends)

    def backward(tensors: OptionalTensors, plan: _LazyPlan, d_out: Tensor, d_last: Tensor) -> OptionalTensors:
        rows = rows_of(tensors)
        ours = lambda: functions.backward(tensors, plan.of(tensors), d_out, d_last)  # noqa: E731
        if not (entrants := candidates(kernels, rows.v)):
            return ours()
        ends = borders_of(*plan.geometry)
        by_row = lambda: _complete(rows, ours())  # noqa: E731
        chosen = choose(entrants, PackageCall(op, rows, ends, by_row, (d_out, d_last)))
        if chosen is None:
            return ours()
        grads = run_backward(chosen, rows, ends, d_out, d_last)
        return tuple(d for d, name in zip(grads, RowTensors._fields) if name != "beta" or rows.beta is not None)

    return ChunkedFunctions(make_plan, forward, backward, functions.fake)


def _complete(rows: RowTensors, grads: OptionalTensors) -> OptionalTensors:
    """Return our gradients with None in the place of beta where the op has none."""
    return grads if rows.beta is not None else (*grads[:3], None, *grads[3:])
