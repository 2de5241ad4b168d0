"""What the way back through a layer gives: hooks on its linears, sums over the parts of the windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surgery.batch import real_rows
from surgery.parts import Turn
from surgery.stream import LayerCall
from surgery.structures.metric import add_moment_

if TYPE_CHECKING:
    from surgery.curvature import Survey


class Gather:
    """Hooks on the layer's linears to be cut: input moments (one for linears that share an input) and the
    outputs' gradients."""

    def __init__(self, survey: Survey, call: LayerCall):
        self.survey, self.path = survey, call.path
        self.paths = list(survey.plan.of_layer(call.path))
        self.moments: dict[str, Tensor] = {}  # of the part of a turn that is going back, then of all
        self.grams: dict[str, Tensor] = {}
        self.sums: list[dict[str, Tensor]] = [{}, {}]  # of the parts so far
        self.counts: dict[str, int] = {}
        self.same: dict[str, str] = {}  # linear -> the linear whose input it shares
        self.rows: dict[str, int] = {}
        self._seen: list[tuple[Tensor, str]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for path in self.paths:
            module = self.survey.skeleton.module(path)
            self._handles.append(module.register_forward_hook(self._hook(path)))

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._seen.clear()

    def _hook(self, path: str) -> Callable[..., None]:
        survey = self.survey

        def real(x: Tensor) -> Tensor:
            return real_rows(x, None if survey.mask_BT is None else survey.mask_BT[survey.rows])

        def hook(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            x = args[0].detach()
            first = next((p for t, p in self._seen if t.data_ptr() == x.data_ptr() and t.shape == x.shape), None)
            self.same[path] = first or path
            if first is None:
                self._seen = [(t, p) for t, p in self._seen if p != path] + [(x, path)]
                add_outer(self.moments, path, real(x), full=True)
            self.rows[path] = self.rows.get(path, 0) + len(real(x[..., :1]))
            out.register_hook(lambda grad: add_outer(self.grams, path, real(grad), self._full(path)))

        return hook

    def _full(self, path: str) -> bool:
        rule, out = self.survey.recipe.curvature, self.survey.plan.cuts[path][0].linear.out
        return rule == "full" or (rule == "auto" and 4 * out <= self.survey.tokens)

    def fold(self, turn: Turn) -> None:
        """A turn is over: its parts' sums are added, in order."""
        ranks, parts = self.survey.stream.ranks, (self.moments, self.grams)
        # A process without a part has seen no linear: which there are, and of what size, the first holder knows.
        own = [{path: tuple(t.shape) for path, t in part.items()} for part in parts], self.same, self.rows
        said = ranks.gather(own)
        shapes, self.same, _ = said[turn.holders[0]]
        for holder in turn.holders:
            for path, rows in said[holder][2].items():
                self.counts[path] = self.counts.get(path, 0) + rows
        for part, total, sizes in zip(parts, self.sums, shapes):
            for path, size in sizes.items():
                mine = part.pop(path) if path in part else torch.zeros(size, device=self.survey.stream.device)
                total[path] = ranks.added(total.get(path), mine, turn.holders)
        self.rows = {}

    def record(self) -> None:
        if not self.paths:
            return
        (self.moments, self.grams), self.rows = self.sums, self.counts
        for tensor in [*self.moments.values(), *self.grams.values()] if self.survey.stream.ranks.count > 1 else ():
            self.survey.stream.ranks.complete_(tensor)
        self.survey.stream.count_moments([*self.moments.values(), *self.grams.values()])
        seen = [path for path in self.paths if path in self.grams]
        shared = {path: self.survey.metric(self.moments[path].div_(self.rows[path])) for path in self.moments}
        metrics = {path: shared[self.same[path]] for path in seen}
        self.survey.store(self.path, metrics, {path: self.grams[path].div_(self.rows[path]) for path in seen})


@torch.no_grad()
def add_outer(sums: dict[str, Tensor], key: str, rows_NX: Tensor, full: bool) -> None:
    """sums[key] += rows^T rows, or its diagonal."""
    if full:
        add_moment_(sums.setdefault(key, rows_NX.new_zeros(rows_NX.shape[1], rows_NX.shape[1])), rows_NX)
    else:
        sums[key] = sums.get(key, 0) + rows_NX.square().sum(0)
