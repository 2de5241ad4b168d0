"""Remove layers of the decoder (`depth`): choose them on the calibration text, and fit the linear before them again.

The direction of the residual stream changes slowly from layer to layer. The block of n layers is left out that changes
it least (Gromov et al. 2024, "The Unreasonable Ineffectiveness of the Deeper Layers", equation 6):

    d(l, n) = mean_t arccos(cos(x_l, x_{l+n})) / pi

x_l (D,): what enters layer l at token t. The blocks with the lowest d are candidates; the one whose model has the
lowest held-out loss is chosen. The first and the last layer stay.

What the block added is given back as far as one matrix can. The last linear before it, which adds W a to the residual
stream, becomes (W + dW) a with

    dW = argmin E|dW a - (x_{l+n} - x_l)|^2 + ridge |dW|^2

a (I,): its input. Shopkhoev et al. 2025 ("ReplaceMe", section 3) fit a (D, D) map of that output, which they multiply
into W; dW has no such form, and is as free as W. It is kept if the held-out loss falls, so that the result is an
ordinary checkpoint either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.calibration.data import unpadded_rows
from surgery.calibration.layer_runner import LayerRunner, StopForward
from surgery.calibration.moments import InputMoments
from surgery.checkpoint.safetensors_io import DTYPES, TensorInfo, TensorSource, read_header, read_tensor, write_shard
from surgery.conversion.context import DEPTH_NAME, ConversionContext
from surgery.conversion.removals import journaled_choice
from surgery.conversion.score import HeldOutScore, held_out_score
from surgery.conversion.streams import Contexts, FinalStates, Layer, Stream, Streams, Visitor
from surgery.core.journal import Journal
from surgery.planning.depth import DepthPlan, block_without
from surgery.structures import linalg
from surgery.structures.metric import damp_, spd_factor

CANDIDATES = 8  # blocks whose held-out loss is measured
ANGLE_TOKENS = 4096  # of which the angles are measured, spread over the samples
RIDGES = (0.01, 0.1, 1.0, 10.0, 100.0)  # relative to the mean of diag E[a a^T]; the best on held-out samples is taken


@dataclass(frozen=True)
class RemovedLayers:
    """The layers that were chosen. kept: numbers of those that stay. record: the report's entry. replaced: the tensors
    of the linear that was fitted again, by parameter of the model with all layers.
    """

    kept: tuple[int, ...]
    record: dict[str, Any]
    replaced: dict[str, TensorInfo]


def remove_layers(ctx: ConversionContext, journal: Journal) -> RemovedLayers:
    """Return the layers to remove, and the linear before them as it was fitted; those of an interrupted run are read
    from its files.

    ctx: of the model with all layers; its plan has `depth`. Process 0 computes.
    """
    file = ctx.work_dir / DEPTH_NAME
    entry = journaled_choice(ctx, journal, "depth", file, lambda: _choose(ctx, file))
    record, header = entry["record"], read_header(file) if entry["sha256"] else {}
    removed = set(record["removed"])
    kept = tuple(index for index in range(record["layers"]) if index not in removed)
    return RemovedLayers(kept, record, header)


def _choose(ctx: ConversionContext, file: Path) -> dict[str, Any]:
    """Return the journal's entry: the report's record, and the SHA-256 of the file with the fitted linear, "" without
    one.
    """
    depth, recipe = ctx.plan.depth, ctx.recipe.depth
    assert depth is not None and recipe is not None
    record: dict[str, Any] = {"layers": depth.stack.count, "removed": depth.removed}
    record["macs"] = depth.macs
    if ctx.data is None:
        return {"record": record, "sha256": ""}
    trial = DepthTrial(ctx, depth)
    if not depth.is_chosen:
        dropped = recipe.dropped(depth.stack.count)
        angles = trial.angles(dropped)
        first = sorted(angles, key=lambda start: angles[start])[:CANDIDATES]
        scores = trial.scores({str(start): block_without(start, dropped, depth.stack.count) for start in sorted(first)})
        best = min(scores, key=lambda start: scores[start].converted)
        kept = block_without(int(best), dropped, depth.stack.count)
        record |= {"removed": depth.with_kept(kept).removed, "macs": depth.with_kept(kept).macs}
        record["angle"] = round(angles[int(best)], 6)
        record["candidates"] = {start: score.converted for start, score in scores.items()}
        score = scores[best]
    else:
        score = trial.scores({"chosen": depth.kept})["chosen"]
    record["held_out"] = score.to_dict()
    if not recipe.refit:
        return {"record": record, "sha256": ""}
    fitted = trial.refit(record["removed"], score)
    if fitted is None:
        return {"record": record, "sha256": ""}
    path, refitted_score, tensors = fitted
    record |= {"refit": path, "without_refit": score.converted, "held_out": refitted_score.to_dict()}
    return {"record": record, "sha256": write_shard(file, tensors)}


class DepthTrial:
    """Measurements on the model with all layers. All of them run in one process."""

    def __init__(self, ctx: ConversionContext, depth: DepthPlan):
        self.ctx, self.depth = ctx, depth
        self.runner: LayerRunner = ctx.runner.single_process()
        self.number = {depth.stack.layer(index): index for index in range(depth.stack.count)}

    def angles(self, dropped: int) -> dict[int, float]:
        """Return the angle d(l, n) in [0, 1] of each block of `dropped` layers, by its first layer."""
        samples, boundaries = self.ctx.samples, list[Tensor]()
        step = max(1, samples.n_fit * samples.tokens() // samples.rows // ANGLE_TOKENS)

        def visit(layer: Layer) -> Contexts:
            if layer.path in self.number:
                rows_ND = self._real(layer.path, layer.hidden("original"), samples.fit)
                boundaries.append(rows_ND[::step].to("cpu", torch.float32, copy=True))
            return {"original": nullcontext()}

        self._run({"original": Stream(samples.fit)}, visit, "measuring angles between layers")
        return {
            first: angle(boundaries[first], boundaries[first + dropped])
            for first in range(1, self.depth.stack.count - dropped)
        }

    def scores(
        self,
        variants: Mapping[str, tuple[int, ...]],
        weights: Mapping[str, tuple[str, Tensor, Tensor | None]] | None = None,
    ) -> dict[str, HeldOutScore]:
        """Return the held-out score of the model with some layers, by name.

        variants: numbers of the layers that stay. weights: for some variants (path of a linear, its weight as stored,
        its bias), which replace the original's.
        """
        samples, weights = self.ctx.samples, weights or {}
        streams = {name: Stream(samples.held_out) for name in ("original", *variants)}

        def visit(layer: Layer) -> Contexts:
            number = self.number.get(layer.path)
            contexts: dict[str, Any] = {"original": nullcontext()}
            for name, kept in variants.items():
                if number is None or number in kept:
                    changed = weights.get(name)
                    inside = changed is not None and changed[0].startswith(f"{layer.path}.")
                    contexts[name] = self._with_weights(*changed) if changed and inside else nullcontext()
            return contexts

        final = self._run(streams, visit, "trying models without layers")
        return {name: held_out_score(self.ctx, final["original"], final[name]) for name in variants}

    def refit(self, removed: list[int], before: HeldOutScore) -> tuple[str, HeldOutScore, list[TensorSource]] | None:
        """Return (path of the linear before the removed layers, score with it, its tensors), None if no ridge lowers
        the held-out loss, or if the layers are not one block behind a linear that adds to the residual stream.
        """
        count = self.depth.stack.count
        is_block = removed == list(range(removed[0], removed[-1] + 1)) and removed[0] > 0 and removed[-1] < count - 1
        path = self._linear_before(removed[0]) if is_block else ""
        if not path:
            return None
        moments = self._moments(path, removed)
        kept = block_without(removed[0], len(removed), count)
        weights = {f"ridge {ridge:g}": (path, *self._solve(path, moments, ridge)) for ridge in RIDGES}
        scores = self.scores(dict.fromkeys(weights, kept), weights)
        best = min(scores, key=lambda name: scores[name].converted)
        if not scores[best].converted < before.converted:
            return None
        _, weight, bias = weights[best]
        tensors = {f"{path}.weight": weight, **({} if bias is None else {f"{path}.bias": bias})}
        stored = [
            TensorSource.from_tensor(name, tensor.to(self._dtype(name)).cpu()) for name, tensor in tensors.items()
        ]
        return path, scores[best], stored

    def _dtype(self, parameter: str) -> torch.dtype:
        return DTYPES[self.ctx.model.tensor_info(parameter).dtype]

    def _linear_before(self, first: int) -> str:
        """Return the path of the last linear of the layer before `first` if its output is added to the residual stream,
        "" otherwise.
        """
        layer = self.depth.stack.layer(first - 1)
        linears = [linear for linear in self.depth.layout.linears if linear.layer == layer]
        last = linears[-1] if linears else None
        return last.path if last is not None and last.residual and "mlp.down" in last.roles else ""

    def _moments(self, path: str, removed: list[int]) -> InputMoments:
        """Return the moments of the linear at `path`, whose output y* has what the removed layers add."""
        samples, (weight_OI, has_bias) = self.ctx.samples, self._linear(path)
        moments = InputMoments({path: (weight_OI, True)}, fits_bias=has_bias)
        stored: dict[str, Tensor] = {}
        chunks: list[tuple[int, int]] = []

        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            row = self.runner.row
            chunks.append((row, row + len(args[0])))
            stored["input"][row : row + len(args[0])] = args[0]

        def visit(layer: Layer) -> Contexts:
            number, hidden_BTD = self.number.get(layer.path), layer.hidden("original")
            if path.startswith(f"{layer.path}."):
                stored["input"] = self._buffer((*hidden_BTD.shape[:-1], weight_OI.shape[1]))
                return {"original": self._hooked(path, hook)}
            if number == removed[0]:
                stored["before"] = self.runner.copy_hidden(hidden_BTD, copies=2)
            if number == removed[-1] + 1:
                for start, stop in chunks:
                    x, after, before = (
                        self._real(layer.path, tensor[start:stop].to(weight_OI.device), range(start, stop))
                        for tensor in (stored["input"], hidden_BTD, stored["before"])
                    )
                    moments.add(x, x, after - before)
                self.runner.record_moment_bytes(moments.tensors())
                raise StopForward
            return {"original": nullcontext()}

        with suppress(StopForward):
            self._run({"original": Stream(samples.fit)}, visit, "fitting the linear before the removed layers")
        return moments.means()

    def _buffer(self, shape: tuple[int, ...]) -> Tensor:
        """Return an uninitialized tensor in float32, in a memory-mapped file if it is large."""
        if math.prod(shape) * 4 > self.runner.limit:
            return self.runner.file_tensor(shape)
        return torch.empty(shape, device=self.runner.buffer_device)

    def _solve(self, path: str, moments: InputMoments, damping: float) -> tuple[Tensor, Tensor | None]:
        """Return weight (as stored) and bias of the linear, fitted with a ridge."""
        weight_OI, has_bias = self._linear(path)
        c_II = moments.c_II.clone()
        gap_OI = moments.cross(path) - weight_OI @ c_II  # E[gap a^T]
        damp_(c_II, damping)
        fitted_OI = weight_OI + linalg.cholesky_solve(gap_OI.mT, spd_factor(c_II)).mT
        bias_O = None
        if has_bias:
            change_O = moments.bias_change(path, fitted_OI)
            bias_O = self._read(f"{path}.bias") + (0 if change_O is None else change_O)
        is_transposed = next(n.transposed for n in self.depth.layout.linears if n.path == path)
        return (fitted_OI.mT if is_transposed else fitted_OI).contiguous(), bias_O

    # -- parts ---------------------------------------------------------------------------------------
    def _linear(self, path: str) -> tuple[Tensor, bool]:
        """Return (weight (O, I) in float32, whether the linear has a bias)."""
        info = next(linear for linear in self.depth.layout.linears if linear.path == path)
        weight = self._read(f"{path}.weight")
        return weight.mT.contiguous() if info.transposed else weight, info.bias

    def _read(self, parameter: str) -> Tensor:
        return read_tensor(self.ctx.model.tensor_info(parameter), torch.float32, device=self.ctx.device)

    def _real(self, path: str, x_BTX: Tensor, rows: range) -> Tensor:
        """Return the rows of real tokens (N, X). rows: the samples in x."""
        masks = self.ctx.samples.token_masks(self.depth.layout.tower(path))
        return unpadded_rows(x_BTX, *(mask_BT[rows.start : rows.stop] for mask_BT in masks))

    def _run(self, streams: Mapping[str, Stream], visit: Callable[[Layer], Contexts], message: str) -> FinalStates:
        with self.ctx.progress.bar(message, len(self.depth.layout.layers)) as tick:
            return Streams(self.runner, self.ctx.samples, streams).run(Visitor(visit), tick)

    @contextmanager
    def _hooked(self, path: str, hook: Callable[..., None]) -> Iterator[None]:
        handle = self.ctx.model.module(path).register_forward_pre_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _with_weights(self, path: str, weight: Tensor, bias: Tensor | None) -> Iterator[None]:
        """Give a loaded linear other parameters inside the context."""
        module: Any = self.ctx.model.module(path)
        before = module.weight.data, None if bias is None else module.bias.data
        module.weight.data = weight.to(self._dtype(f"{path}.weight")).float()
        if bias is not None:
            module.bias.data = bias.to(self._dtype(f"{path}.bias")).float()
        try:
            yield
        finally:
            module.weight.data = before[0]
            if bias is not None:
                module.bias.data = before[1]


def angle(before_ND: Tensor, after_ND: Tensor) -> float:
    """Return the mean angle of the rows of two matrices, divided by pi."""
    cosine_N = torch.nn.functional.cosine_similarity(before_ND.double(), after_ND.double(), dim=-1)
    return float(cosine_N.clamp(-1, 1).arccos().mean()) / math.pi
