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
from surgery.calibration.layer_runner import LayerCall, LayerRunner, Phase, StopForward, run_phases
from surgery.calibration.moments import InputMoments
from surgery.calibration.partition import MAX_SHARDS, Round
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import TensorSource
from surgery.conversion.fit import FitContext, FitResult, fit_linear
from surgery.conversion.mixer_init.base import build_mixer, select_init
from surgery.conversion.replacement import (
    LayerReplacement,
    add_linear,
    add_mixer,
    broadcast_fits,
    broadcast_mixer,
    densify_module,
    fold_output,
    stored_dtype,
    swapped_modules,
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
    """One conversion of everything, along a stream. `finished(path)` gives the replacement of a layer done before an
    interruption, or None; `write(path, replacement, seconds)` makes a layer's replacement durable; `validate`: whether
    every matrix is checked on held-out rows (a trial is judged as a whole)."""

    def __init__(
        self,
        meta_model: MetaModel,
        plan: Plan,
        recipe: ConversionRecipe,
        budgets: dict[str, float],
        runner: LayerRunner,
        grams: Path,
        batch: CalibrationSet,
        finished: Callable[[str], LayerReplacement | None],
        write: Callable[[str, LayerReplacement, float], None],
        validate: bool = True,
    ):
        self.meta_model, self.plan, self.recipe, self.budgets = meta_model, plan, recipe, budgets
        self.runner, self.grams, self.batch = runner, grams, batch
        self.n_fit, self.rows, self.mask_BT = batch.n_fit, batch.rows, batch.mask()
        self.finished, self.write, self.validate = finished, write, validate
        self.diverged = False

    @torch.no_grad()
    def run(self) -> tuple[HeldOutScore, LayerReplacement]:
        """Every layer, then the head: the held-out score of the whole, and the head's replacement."""
        segments = [(0, self.n_fit, MAX_SHARDS), (self.n_fit, self.rows, 1)]
        final_BTD = self.runner.gather_rows(
            self.runner.run(self.batch.doubled_inputs(), self.convert_layer, segments, self.rows)
        )
        target_budgets, device = self.budgets, self.runner.device
        head = convert_head(
            self.meta_model, self.plan, self.recipe, target_budgets, self.batch, final_BTD, self.grams, device
        )
        linear = next(iter(head.modules.values()), None)
        return held_out_score(self.meta_model, self.plan, self.batch, final_BTD, linear, device), head

    def convert_layer(self, call: LayerCall) -> Any:
        began = time.perf_counter()
        call.hidden_BTD = self.runner.writable_buffer(call.hidden_BTD)
        replacement = self.finished(call.path)
        if replacement is not None:
            replacement.modules = {path: densify_module(module) for path, module in replacement.modules.items()}
        else:
            replacement = self._convert(call)
            self.write(call.path, replacement, time.perf_counter() - began)
        self.diverged = self.diverged or bool(replacement.modules) or bool(replacement.mixers)
        # While the streams are one the second half is still run: its extra outputs may be wanted further on.
        phases: list[Phase] = []
        for first, last in ((0, self.n_fit), (self.n_fit, self.rows)):
            phases.append((first, last, nullcontext()))
            phases.append((first + self.rows, last + self.rows, self._replaced_modules(call, replacement)))
        return run_phases(call, phases, self.runner)

    @contextmanager
    def _replaced_modules(self, call: LayerCall, replacement: LayerReplacement) -> Iterator[None]:
        with (
            swapped_modules(call.layer, call.path, replacement.modules),
            all_attention_replaced(self.meta_model, replacement.mixers),
        ):
            yield

    def _convert(self, call: LayerCall) -> LayerReplacement:
        replacement, targets = LayerReplacement(), self.plan.targets_in_layer(call.path)
        attention_target = self.plan.attention_targets.get(call.path)
        if attention_target is not None:
            self._init_mixer(call, attention_target, replacement)
        if targets:
            self._fit_stages(call, targets, replacement)
        if attention_target is not None:
            fold_output(self.meta_model, self.plan, attention_target, call.device, replacement)
        return replacement

    def _init_mixer(self, call: LayerCall, attention_target: AttentionTarget, replacement: LayerReplacement) -> None:
        """The mixer first: the linears of the layer are fitted to what it gives them."""
        settings = self.recipe.attention
        assert settings is not None
        rotated = build_mixer(attention_target, torch.device("meta")).rotated
        behind = self.rows if self.recipe.calibrate == "sequential" and self.diverged else 0
        fit, held = (
            AttentionSamples(self.meta_model, call, attention_target, first, last, behind, rotated)
            for first, last in ((0, self.n_fit), (self.n_fit, self.rows))
        )
        self.runner.gather_rows(call.hidden_BTD)  # a start looks at all windows, one after the other
        initialized = broadcast_mixer(
            self.runner.ranks,
            attention_target.index % self.runner.ranks.count,
            attention_target,
            lambda: select_init(attention_target.config, settings).init(attention_target, settings, fit, held),
            call.device,
        )
        add_mixer(self.meta_model, attention_target, initialized, replacement)

    def _fit_stages(
        self, call: LayerCall, targets: dict[str, tuple[LinearTarget, ...]], replacement: LayerReplacement
    ) -> None:
        grams = load_grams(self.grams / f"{call.path}.safetensors", self.runner.device)
        if self.runner.ranks.broadcast_object(len(grams)) != len(grams):
            raise SurgeryError(
                f"{self.grams}: not all processes see what the first one wrote there; --out must lie where all do"
            )
        for stage in find_stages(self.meta_model, self.plan, call):
            weights = {
                target.name: (
                    target_weight(self.meta_model, target, call.device),
                    bool(stage.residual) and target.part is None,
                )
                for path in stage.paths
                for target in targets[path]
            }
            gather = partial(self._moments, call, stage, weights, replacement)
            fit = gather(0, self.n_fit)
            # Gathered when first asked for: by then the factor of a wide input's C is gone again.
            held = cache(partial(gather, self.n_fit, self.rows, besides=fit)) if self.validate else None
            if held is not None and self.runner.ranks.count > 1:
                held()  # by all together, not by whoever fits
            fit_context = FitContext(fit, held, damping=self.recipe.damping, sweeps=self.recipe.sweeps)
            fits = {
                target.name: (target, partial(self._fit, target, weights[target.name][0], fit_context, grams))
                for path in stage.paths
                for target in targets[path]
            }
            fitted = broadcast_fits(self.runner.ranks, fits, call.device)
            for path in stage.paths:
                found = [fitted[target.name] for target in targets[path]]
                add_linear(self.meta_model, list(targets[path]), found, call.device, replacement)
                replacement.modules[path] = densify_module(replacement.modules[path])
            del fit, held, fit_context  # before the next stage's are gathered

    def _fit(
        self, target: LinearTarget, weight_OI: Tensor, fit_context: FitContext, grams: dict[str, Tensor]
    ) -> FitResult:
        fit_context.gram, fit_context.stored_dtype = grams.get(target.name), stored_dtype(self.meta_model, target)
        return fit_linear(target, self.budgets[target.name], weight_OI, fit_context)

    def _moments(
        self,
        call: LayerCall,
        stage: LinearStage,
        weights: dict[str, tuple[Tensor, bool]],
        replacement: LayerReplacement,
        first: int,
        last: int,
        besides: InputMoments | None = None,
    ) -> InputMoments:
        """Of rows first:last, to fit to or held out."""
        step = self.runner.chunk_rows(call.hidden_BTD.shape[1])

        def add(moments: InputMoments, round_: Round) -> None:
            for start, stop in round_.chunks(step):
                x0, r0 = self._inputs(call, stage, start, stop, LayerReplacement())
                x, r = x0, r0
                if self.recipe.calibrate == "sequential" and (
                    self.diverged or replacement.modules or replacement.mixers
                ):
                    x, r = self._inputs(call, stage, start + self.rows, stop + self.rows, replacement)
                gap = r0 - r if r0 is not None and r is not None and r is not r0 else None
                moments.add(x, x0, gap)
            self.runner.record_moment_bytes(moments.tensors() + (besides.tensors() if besides else []))

        return accumulate_moments(weights, self.runner.rounds(first, last), self.runner.ranks, add).means()

    def _inputs(
        self, call: LayerCall, stage: LinearStage, start: int, stop: int, replacement: LayerReplacement
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

        with self._replaced_modules(call, replacement):
            handles = []
            if stage.residual:
                reader = call.layer.get_submodule(stage.residual)
                handles.append(reader.register_forward_pre_hook(keep("residual", False), with_kwargs=True))
            first = self.meta_model.module(stage.paths[0])
            handles.append(first.register_forward_pre_hook(keep("input", True), with_kwargs=True))
            try:
                call.apply(start, stop)
            except StopForward:
                pass
            finally:
                for handle in handles:
                    handle.remove()
        return tuple(self._unpadded(caught.get(name), start, stop) for name in ("input", "residual"))  # type: ignore[return-value]

    def _unpadded(self, x: Tensor | None, start: int, stop: int) -> Tensor | None:
        """Rows of real tokens, (N, X)."""
        if x is None:
            return None
        first = start % self.rows  # the converted stream's rows follow the original's
        return unpadded_rows(x, None if self.mask_BT is None else self.mask_BT[first : first + stop - start])


def accumulate_moments(
    weights: dict[str, tuple[Tensor, bool]],
    rounds: Sequence[Round],
    ranks: DistContext,
    add: Callable[[InputMoments, Round], None],
) -> InputMoments:
    """The moments of all rows: `add` puts in those of this process's part of a turn, and parts are added in order."""
    total = InputMoments(weights)
    for i, round_ in enumerate(rounds):
        part = InputMoments(weights) if i or ranks.count > 1 else total
        add(part, round_)
        if part is not total:
            total.ordered_reduce(part, round_, ranks, first=i == 0)
        del part
    if ranks.count > 1:
        for tensor in total.tensors():
            ranks.gather_rows_(tensor)
    return total


def find_stages(meta_model: MetaModel, plan: Plan, call: LayerCall) -> list[LinearStage]:
    """One window through the layer shows which linears read the same tensor, and in which order."""
    seen: list[tuple[Tensor, LinearStage]] = []
    handles = []
    residuals = {linear.path: linear.residual for linear in plan.layout.linears}

    def look(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            for x, stage in seen:
                if x.data_ptr() == args[0].data_ptr() and x.shape == args[0].shape:
                    stage.paths.append(path)
                    return
            seen.append((args[0], LinearStage([path], residuals[path])))

        return hook

    for path in plan.targets_in_layer(call.path):
        handles.append(meta_model.module(path).register_forward_pre_hook(look(path)))
    try:
        call.apply(0, 1)
    finally:
        for handle in handles:
            handle.remove()
    return [stage for _, stage in seen]


@torch.no_grad()
def convert_head(
    meta_model: MetaModel,
    plan: Plan,
    recipe: ConversionRecipe,
    budgets: dict[str, float],
    batch: CalibrationSet | None,
    final_BTD: Tensor | None,
    grams: Path,
    device: torch.device,
) -> LayerReplacement:
    """Grafts of the head, empty where it is not cut. final_BTD: original rows, then converted."""
    replacement = LayerReplacement()
    targets = plan.targets_in_layer("")
    for path, (target, *_) in targets.items():
        weight_OI = target_weight(meta_model, target, device)
        fit_context = FitContext(
            damping=recipe.damping, sweeps=recipe.sweeps, stored_dtype=stored_dtype(meta_model, target)
        )
        if batch is not None and final_BTD is not None:
            fit_context.fit = _head_moments(target.name, weight_OI, final_BTD, 0, batch.n_fit, batch, recipe)
            rows = batch.n_fit, batch.rows
            fit_context.held_out = partial(_head_moments, target.name, weight_OI, final_BTD, *rows, batch, recipe)
            fit_context.gram = load_grams(grams / f"{path}.safetensors", device).get(target.name)
        add_linear(
            meta_model,
            [target],
            [fit_linear(target, budgets[target.name], weight_OI, fit_context)],
            device,
            replacement,
        )
        replacement.entries += untied_entries(meta_model, path)
    return replacement


def _head_moments(
    name: str,
    weight_OI: Tensor,
    final_BTD: Tensor,
    first: int,
    last: int,
    batch: CalibrationSet,
    recipe: ConversionRecipe,
) -> InputMoments:
    moments, mask_BT = InputMoments({name: (weight_OI, False)}), batch.head_mask()
    for row in range(first, last):
        real = slice(None) if mask_BT is None else mask_BT[row].bool()
        x0, x = (final_BTD[i][real].to(weight_OI.device).flatten(0, -2) for i in (row, row + batch.rows))
        moments.add(x if recipe.calibrate == "sequential" else x0, x0)
    return moments.means()


def untied_entries(meta_model: MetaModel, head: str) -> list[TensorSource]:
    """What was stored once for a tied pair, the input embedding or a bias, under each name that no longer
    shares it; the head's own weight is replaced."""
    pairs = [pair for pair in meta_model.tied.items() if any(name.startswith(f"{head}.") for name in pair)]
    wanted = dict.fromkeys(name for pair in pairs for name in pair if name != f"{head}.weight")
    return [
        TensorSource.from_file(name, meta_model.tensor_info(name)) for name in wanted if name not in meta_model.keys
    ]
