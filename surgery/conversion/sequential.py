"""Converting layer after layer, each calibrated on what the converted layers below it give.

All rows travel twice through the model: the first half through the original layers, the second through the
converted ones. Inside a layer, linears that read one input form a stage; stages follow the order of
execution, so that the MLP already sees the converted attention.

Replacing the head: calibrated on what the converted layers finally give it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.calibration.attention_samples import AttentionSamples, all_attention_replaced
from surgery.calibration.data import CalibrationSet, unpadded_rows
from surgery.calibration.fisher import load_grams
from surgery.calibration.layer_runner import LayerCall, Phase, StopForward, LayerRunner, run_phases
from surgery.calibration.moments import InputMoments
from surgery.calibration.partition import MAX_SHARDS, Round
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import TensorSource
from surgery.conversion.fit import FitResult, FitContext, fit_linear
from surgery.conversion.mixer_init.base import build_mixer, select_init
from surgery.conversion.replacement import (
    LayerReplacement,
    fold_output,
    add_linear,
    swapped_modules,
    densify_module,
    add_mixer,
    broadcast_fits,
    broadcast_mixer,
    stored_dtype,
)
from surgery.conversion.score import HeldOutScore, held_out_score
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.plan import LinearTarget, Plan
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.weights import target_weight


@dataclass
class LinearStage:
    """Linears (by path) that read one input, and the module whose input is the residual stream, or ""."""

    paths: list[str]
    residual: str


class SequentialConverter:
    """One conversion of everything, along a stream. `finished(path)` gives the grafts of a layer done before an
    interruption, or None; `write(path, grafts, seconds)` makes a layer's grafts durable; `judged`: whether
    every matrix is checked on held-out rows (a trial is judged as a whole)."""

    def __init__(
        self,
        skeleton: MetaModel,
        plan: Plan,
        recipe: ConversionRecipe,
        budgets: dict[str, float],
        stream: LayerRunner,
        grams: Path,
        batch: CalibrationSet,
        finished: Callable[[str], LayerReplacement | None],
        write: Callable[[str, LayerReplacement, float], None],
        judged: bool = True,
    ):
        self.skeleton, self.plan, self.recipe, self.budgets = skeleton, plan, recipe, budgets
        self.stream, self.grams, self.batch = stream, grams, batch
        self.fit_rows, self.rows, self.mask_BT = batch.fit_rows, batch.rows, batch.mask()
        self.finished, self.write, self.judged = finished, write, judged
        self.diverged = False

    @torch.no_grad()
    def run(self) -> tuple[HeldOutScore, LayerReplacement]:
        """Every layer, then the head: the held-out score of the whole, and the head's grafts."""
        segments = [(0, self.fit_rows, MAX_SHARDS), (self.fit_rows, self.rows, 1)]
        final_BTD = self.stream.complete(self.stream.run(self.batch.twice(), self.visit, segments, self.rows))
        given, device = self.budgets, self.stream.device
        head = convert_head(self.skeleton, self.plan, self.recipe, given, self.batch, final_BTD, self.grams, device)
        linear = next(iter(head.modules.values()), None)
        return held_out_score(self.skeleton, self.plan, self.batch, final_BTD, linear, device), head

    def visit(self, call: LayerCall) -> Any:
        began = time.perf_counter()
        call.hidden_BTD = self.stream.own(call.hidden_BTD)
        grafts = self.finished(call.path)
        if grafts is not None:
            grafts.modules = {path: densify_module(module) for path, module in grafts.modules.items()}
        else:
            grafts = self._convert(call)
            self.write(call.path, grafts, time.perf_counter() - began)
        self.diverged = self.diverged or bool(grafts.modules) or bool(grafts.mixers)
        # While the streams are one the second half is still run: its extra outputs may be wanted further on.
        phases: list[Phase] = []
        for first, last in ((0, self.fit_rows), (self.fit_rows, self.rows)):
            phases.append((first, last, nullcontext()))
            phases.append((first + self.rows, last + self.rows, self._converted(call, grafts)))
        return run_phases(call, phases, self.stream)

    @contextmanager
    def _converted(self, call: LayerCall, grafts: LayerReplacement) -> Iterator[None]:
        with swapped_modules(call.layer, call.path, grafts.modules), all_attention_replaced(self.skeleton, grafts.mixers):
            yield

    def _convert(self, call: LayerCall) -> LayerReplacement:
        grafts, cuts = LayerReplacement(), self.plan.of_layer(call.path)
        seat = self.plan.seats.get(call.path)
        if seat is not None:
            self._seat(call, seat, grafts)
        if cuts:
            self._fit_stages(call, cuts, grafts)
        if seat is not None:
            fold_output(self.skeleton, self.plan, seat, call.device, grafts)
        return grafts

    def _seat(self, call: LayerCall, seat: AttentionTarget, grafts: LayerReplacement) -> None:
        """The mixer first: the linears of the layer are fitted to what it gives them."""
        settings = self.recipe.attention
        assert settings is not None
        rotated = build_mixer(seat, torch.device("meta")).rotated
        behind = self.rows if self.recipe.calibrate == "sequential" and self.diverged else 0
        fit, held = (
            AttentionSamples(self.skeleton, call, seat, first, last, behind, rotated)
            for first, last in ((0, self.fit_rows), (self.fit_rows, self.rows))
        )
        self.stream.complete(call.hidden_BTD)  # a start looks at all windows, one after the other
        started = broadcast_mixer(
            self.stream.ranks,
            seat.index % self.stream.ranks.count,
            seat,
            lambda: select_init(seat.config, settings).start(seat, settings, fit, held),
            call.device,
        )
        add_mixer(self.skeleton, seat, started, grafts)

    def _fit_stages(self, call: LayerCall, cuts: dict[str, tuple[LinearTarget, ...]], grafts: LayerReplacement) -> None:
        grams = load_grams(self.grams / f"{call.path}.safetensors", self.stream.device)
        if self.stream.ranks.agreed(len(grams)) != len(grams):
            raise SurgeryError(
                f"{self.grams}: not all processes see what the first one wrote there; --out must lie where all do"
            )
        for stage in find_stages(self.skeleton, self.plan, call):
            weights = {
                cut.name: (target_weight(self.skeleton, cut, call.device), bool(stage.residual) and cut.part is None)
                for path in stage.paths
                for cut in cuts[path]
            }
            gather = partial(self._moments, call, stage, weights, grafts)
            fit = gather(0, self.fit_rows)
            # Gathered when first asked for: by then the factor of a wide input's C is gone again.
            held = cache(partial(gather, self.fit_rows, self.rows, besides=fit)) if self.judged else None
            if held is not None and self.stream.ranks.count > 1:
                held()  # by all together, not by whoever fits
            judge = FitContext(fit, held, damping=self.recipe.damping, sweeps=self.recipe.sweeps)
            fits = {
                cut.name: (cut, partial(self._fit, cut, weights[cut.name][0], judge, grams))
                for path in stage.paths
                for cut in cuts[path]
            }
            fitted = broadcast_fits(self.stream.ranks, fits, call.device)
            for path in stage.paths:
                found = [fitted[cut.name] for cut in cuts[path]]
                add_linear(self.skeleton, list(cuts[path]), found, call.device, grafts)
                grafts.modules[path] = densify_module(grafts.modules[path])
            del fit, held, judge  # before the next stage's are gathered

    def _fit(self, cut: LinearTarget, weight_OI: Tensor, judge: FitContext, grams: dict[str, Tensor]) -> FitResult:
        judge.gram, judge.stored = grams.get(cut.name), stored_dtype(self.skeleton, cut)
        return fit_linear(cut, self.budgets[cut.name], weight_OI, judge)

    def _moments(
        self,
        call: LayerCall,
        stage: LinearStage,
        weights: dict[str, tuple[Tensor, bool]],
        grafts: LayerReplacement,
        first: int,
        last: int,
        besides: InputMoments | None = None,
    ) -> InputMoments:
        """Of rows first:last, to fit to or held out."""
        step = self.stream.chunk_rows(call.hidden_BTD.shape[1])

        def add(moments: InputMoments, turn: Round) -> None:
            for start, stop in turn.spans(step):
                x0, r0 = self._inputs(call, stage, start, stop, LayerReplacement())
                x, r = x0, r0
                if self.recipe.calibrate == "sequential" and (self.diverged or grafts.modules or grafts.mixers):
                    x, r = self._inputs(call, stage, start + self.rows, stop + self.rows, grafts)
                gap = r0 - r if r0 is not None and r is not None and r is not r0 else None
                moments.add(x, x0, gap)
            self.stream.count_moments(moments.held() + (besides.held() if besides else []))

        return accumulate_moments(weights, self.stream.turns(first, last), self.stream.ranks, add).means()

    def _inputs(
        self, call: LayerCall, stage: LinearStage, start: int, stop: int, grafts: LayerReplacement
    ) -> tuple[Tensor, Tensor | None]:
        """(input of the stage (N, I), residual stream (N, D) or None) of rows start:stop; the layer's forward
        is left as soon as the stage is reached."""
        caught: dict[str, Tensor] = {}

        def keep(name: str, leave: bool) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                caught[name] = args[0] if args else next(iter(kwargs.values()))
                if leave:
                    raise StopForward

            return hook

        with self._converted(call, grafts):
            handles = []
            if stage.residual:
                reader = call.layer.get_submodule(stage.residual)
                handles.append(reader.register_forward_pre_hook(keep("residual", False), with_kwargs=True))
            first = self.skeleton.module(stage.paths[0])
            handles.append(first.register_forward_pre_hook(keep("input", True), with_kwargs=True))
            try:
                call.apply(start, stop)
            except StopForward:
                pass
            finally:
                for handle in handles:
                    handle.remove()
        return tuple(self._valid(caught.get(name), start, stop) for name in ("input", "residual"))  # type: ignore[return-value]

    def _valid(self, x: Tensor | None, start: int, stop: int) -> Tensor | None:
        """Rows of real tokens, (N, X)."""
        if x is None:
            return None
        first = start % self.rows  # the converted stream's rows follow the original's
        return unpadded_rows(x, None if self.mask_BT is None else self.mask_BT[first : first + stop - start])


def accumulate_moments(
    weights: dict[str, tuple[Tensor, bool]],
    turns: Sequence[Round],
    ranks: DistContext,
    add: Callable[[InputMoments, Round], None],
) -> InputMoments:
    """The moments of all rows: `add` puts in those of this process's part of a turn, and parts are added in order."""
    total = InputMoments(weights)
    for i, turn in enumerate(turns):
        part = InputMoments(weights) if i or ranks.count > 1 else total
        add(part, turn)
        if part is not total:
            total.fold(part, turn, ranks, first=i == 0)
        del part
    if ranks.count > 1:
        for tensor in total.held():
            ranks.complete_(tensor)
    return total


def find_stages(skeleton: MetaModel, plan: Plan, call: LayerCall) -> list[LinearStage]:
    """One window through the layer shows which linears read the same tensor, and in which order."""
    seen: list[tuple[Tensor, LinearStage]] = []
    handles = []
    residuals = {linear.path: linear.residual for linear in plan.body.linears}

    def look(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            for x, stage in seen:
                if x.data_ptr() == args[0].data_ptr() and x.shape == args[0].shape:
                    stage.paths.append(path)
                    return
            seen.append((args[0], LinearStage([path], residuals[path])))

        return hook

    for path in plan.of_layer(call.path):
        handles.append(skeleton.module(path).register_forward_pre_hook(look(path)))
    try:
        call.apply(0, 1)
    finally:
        for handle in handles:
            handle.remove()
    return [stage for _, stage in seen]


@torch.no_grad()
def convert_head(
    skeleton: MetaModel,
    plan: Plan,
    recipe: ConversionRecipe,
    budgets: dict[str, float],
    batch: CalibrationSet | None,
    final_BTD: Tensor | None,
    grams: Path,
    device: torch.device,
) -> LayerReplacement:
    """Grafts of the head, empty where it is not cut. final_BTD: original rows, then converted."""
    grafts = LayerReplacement()
    cuts = plan.of_layer("")
    for path, (cut, *_) in cuts.items():
        weight_OI = target_weight(skeleton, cut, device)
        judge = FitContext(damping=recipe.damping, sweeps=recipe.sweeps, stored=stored_dtype(skeleton, cut))
        if batch is not None and final_BTD is not None:
            judge.fit = _head_moments(cut.name, weight_OI, final_BTD, 0, batch.fit_rows, batch, recipe)
            rows = batch.fit_rows, batch.rows
            judge.held = partial(_head_moments, cut.name, weight_OI, final_BTD, *rows, batch, recipe)
            judge.gram = load_grams(grams / f"{path}.safetensors", device).get(cut.name)
        add_linear(skeleton, [cut], [fit_linear(cut, budgets[cut.name], weight_OI, judge)], device, grafts)
        grafts.entries += untied_entries(skeleton, path)
    return grafts


def _head_moments(
    name: str, weight_OI: Tensor, final_BTD: Tensor, first: int, last: int, batch: CalibrationSet, recipe: ConversionRecipe
) -> InputMoments:
    moments, mask_BT = InputMoments({name: (weight_OI, False)}), batch.head_mask()
    for row in range(first, last):
        real = slice(None) if mask_BT is None else mask_BT[row].bool()
        x0, x = (final_BTD[i][real].to(weight_OI.device).flatten(0, -2) for i in (row, row + batch.rows))
        moments.add(x if recipe.calibrate == "sequential" else x0, x0)
    return moments.means()


def untied_entries(skeleton: MetaModel, head: str) -> list[TensorSource]:
    """What was stored once for a tied pair, the input embedding or a bias, under each name that no longer
    shares it; the head's own weight is replaced."""
    pairs = [pair for pair in skeleton.tied.items() if any(name.startswith(f"{head}.") for name in pair)]
    wanted = dict.fromkeys(name for pair in pairs for name in pair if name != f"{head}.weight")
    return [TensorSource.copy(name, skeleton.info(name)) for name in wanted if name not in skeleton.keys]
