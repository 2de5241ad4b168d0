"""Trying spreads of a budget: what each costs in held-out loss.

`QuickTrial`: all of them on one stream. The windows to fit go through the original layers once and give E[x x^T]
of every linear's input; the held-out windows go through the original layers and through each contender's.
Matrices are fitted to the original's inputs alone, which neither follows the errors of the layers below nor
makes up for them. `sequential_trial`: one of them, as it would be converted, in three times the time.

How the budget is spread: measured, tried against the even spread, the better one kept, both reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.calibration.data import CalibrationSet, unpadded_rows
from surgery.calibration.fisher import FisherPass, load_grams
from surgery.calibration.layer_runner import LayerCall, Phase, LayerRunner, run_phases
from surgery.calibration.partition import MAX_SHARDS, Round
from surgery.checkpoint.meta_model import MetaModel
from surgery.conversion.fit import FitResult, candidate_configs, quick_fit
from surgery.conversion.replacement import LayerReplacement, add_linear, swapped_modules, densify_module, broadcast_fits
from surgery.conversion.score import HeldOutScore, held_out_score
from surgery.conversion.sequential import SequentialConverter, convert_head, find_stages
from surgery.core.distributed import DistContext
from surgery.core.progress import Progress
from surgery.planning.allocate import CostPoint, allocate_budget
from surgery.planning.plan import LinearTarget, Plan
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.weights import target_weight
from surgery.structures import Metric
from surgery.structures.metric import add_moment_, damp_, damp_output_gram


def sequential_trial(
    skeleton: MetaModel,
    plan: Plan,
    recipe: ConversionRecipe,
    given: dict[str, float],
    batch: CalibrationSet,
    stream: LayerRunner,
    grams: Path,
    done: Callable[[], None],
) -> HeldOutScore:
    """The held-out score of a conversion that is thrown away."""
    quick, plan = limit_sweeps(recipe), replace(plan, seats={})  # attention as it was: mixers take time to start
    layers = SequentialConverter(
        skeleton, plan, quick, given, stream, grams, batch, lambda _: None, lambda *_: done(), judged=False
    )
    return layers.run()[0]


def limit_sweeps(recipe: ConversionRecipe, **other: Any) -> ConversionRecipe:
    return recipe.model_copy(update={"sweeps": min(recipe.sweeps, 1), **other})


@dataclass
class _StageGram:
    """E[x x^T] of a stage's input, while rows pass."""

    paths: list[str]
    size: int
    part_II: Tensor | None = None  # of this process's part of a turn
    sum_II: Tensor | None = None
    rows: tuple[int, int] = (0, 0)  # in the part, in the sum
    of_c: dict[Any, Any] = field(default_factory=dict)

    def fold(self, ranks: DistContext, turn: Round, like: Tensor) -> None:
        part_II = like.new_zeros(self.size, self.size) if self.part_II is None else self.part_II
        self.sum_II = ranks.added(self.sum_II, part_II, turn.holders)
        said = ranks.gather(self.rows[0])
        self.rows, self.part_II = (0, self.rows[1] + sum(said[holder] for holder in turn.holders)), None


class QuickTrial:
    """contenders: name -> (cut name -> numbers); run() gives each one's score on the batch's held-out windows."""

    def __init__(
        self,
        skeleton: MetaModel,
        plan: Plan,
        recipe: ConversionRecipe,
        contenders: dict[str, dict[str, float]],
        batch: CalibrationSet,
        stream: LayerRunner,
        grams: Path,
        done: Callable[[], None],
    ):
        self.skeleton, self.plan, self.contenders, self.batch = skeleton, plan, contenders, batch
        self.stream, self.grams, self.done = stream, grams, done
        self.recipe = limit_sweeps(recipe, calibrate="independent")

    @torch.no_grad()
    def run(self) -> dict[str, HeldOutScore]:
        batch, many = self.batch, len(self.contenders)
        inputs = {k: torch.cat([v, *[v[batch.fit_rows :]] * many]) for k, v in batch.inputs.items()}
        held = [(first, first + batch.rows - batch.fit_rows, MAX_SHARDS) for first in self._held()]
        final_BTD = self.stream.complete(self.stream.run(inputs, self._visit, [(0, batch.fit_rows, MAX_SHARDS), *held]))
        scores = {}
        for name, rows in zip(self.contenders, final_BTD[batch.rows :].chunk(many)):
            # The contender's fitted windows were not run: the head, too, is fitted to the original's.
            both_BTD = torch.cat([final_BTD[: batch.rows], final_BTD[: batch.fit_rows], rows])
            given, device = self.contenders[name], self.stream.device
            head = convert_head(self.skeleton, self.plan, self.recipe, given, batch, both_BTD, self.grams, device)
            linear = next(iter(head.modules.values()), None)
            scores[name] = held_out_score(self.skeleton, self.plan, batch, both_BTD, linear, device)
        return scores

    def _held(self) -> list[int]:
        """Where the held-out windows begin: the original's, then each contender's."""
        batch, many = self.batch, len(self.contenders)
        return [batch.fit_rows + i * (batch.rows - batch.fit_rows) for i in range(many + 1)]

    def _visit(self, call: LayerCall) -> Any:
        call.hidden_BTD = self.stream.own(call.hidden_BTD)
        fit, rows = self.batch.fit_rows, self.batch.rows
        stages = []
        if self.plan.of_layer(call.path):
            found = find_stages(self.skeleton, self.plan, call)
            stages = [_StageGram(stage.paths, self.plan.cuts[stage.paths[0]][0].in_) for stage in found]
        modules: list[dict[str, nn.Module]] = [{} for _ in self.contenders]
        phases: list[Phase] = [(0, fit, self._gathering(call, stages, modules)), (fit, rows, nullcontext())]
        for first, mine in zip(self._held()[1:], modules):
            # `swapped_modules` looks at `mine` only when its phase begins, after the fits.
            phases.append((first, first + rows - fit, swapped_modules(call.layer, call.path, mine)))
        out = run_phases(call, phases, self.stream)
        self.done()
        return out

    @contextmanager
    def _gathering(
        self, call: LayerCall, stages: list[_StageGram], modules: list[dict[str, nn.Module]]
    ) -> Iterator[Callable[[Round], None]]:
        """Moments of the rows that run inside, and at its end every contender's stand-ins."""
        ranks = self.stream.ranks

        def after(turn: Round) -> None:
            for stage in stages:
                stage.fold(ranks, turn, call.hidden_BTD.new_zeros(0, device=call.device))

        handles = [
            self.skeleton.module(stage.paths[0]).register_forward_pre_hook(self._adding(stage)) for stage in stages
        ]
        try:
            yield after
        finally:
            for handle in handles:
                handle.remove()
        for stage in stages if ranks.count > 1 else ():
            assert stage.sum_II is not None
            ranks.complete_(stage.sum_II)
        self.stream.count_moments(stage.sum_II for stage in stages)
        grams = load_grams(self.grams / f"{call.path}.safetensors", call.device)
        while stages:
            self._fit(call, stages.pop(0), grams, modules)

    def _adding(self, stage: _StageGram) -> Callable[..., None]:
        mask_BT = self.batch.mask()

        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            x, first = args[0], self.stream.row
            real_NI = unpadded_rows(x, None if mask_BT is None else mask_BT[first : first + len(x)])
            if stage.part_II is None:
                stage.part_II = real_NI.new_zeros(stage.size, stage.size)
            add_moment_(stage.part_II, real_NI)
            stage.rows = stage.rows[0] + len(real_NI), stage.rows[1]

        return hook

    def _fit(
        self, call: LayerCall, stage: _StageGram, grams: dict[str, Tensor], modules: list[dict[str, nn.Module]]
    ) -> None:
        if stage.sum_II is None:
            return
        moment_II = stage.sum_II.div_(stage.rows[1])
        damp_(moment_II, self.recipe.damping)
        cuts = [cut for path in stage.paths for cut in self.plan.cuts[path]]
        metrics = {cut.name: Metric(moment_II, damp_output_gram(grams.get(cut.name)), stage.of_c) for cut in cuts}

        def fit(cut: LinearTarget, configs: list[Any]) -> FitResult:
            weight_OI = target_weight(self.skeleton, cut, call.device)
            return quick_fit(cut, configs, weight_OI, metrics[cut.name], self.recipe.sweeps)

        wanted = [{cut.name: candidate_configs(cut, given[cut.name]) for cut in cuts} for given in self.contenders.values()]
        # Contenders often agree.
        jobs = {
            (cut.name, str(mine[cut.name])): (cut, partial(fit, cut, mine[cut.name])) for cut in cuts for mine in wanted
        }
        fitted = broadcast_fits(self.stream.ranks, jobs, call.device)
        for put, mine in zip(modules, wanted):
            for path in stage.paths:
                grafts, whole = LayerReplacement(), list(self.plan.cuts[path])
                found = [fitted[cut.name, str(mine[cut.name])] for cut in whole]
                add_linear(self.skeleton, whole, found, call.device, grafts)
                put[path] = densify_module(grafts.modules[path])


TRIAL_SHARE = 0.25  # of the windows to fit
MIN_LOSS_RISE = 0.02  # a rise of the held-out loss (a relative output error) below which either spread will do


def uniform_budgets(plan: Plan) -> dict[str, float]:
    return {cut.name: cut.budget() for cuts in plan.cuts.values() for cut in cuts}


def choose_budgets(
    skeleton: MetaModel,
    plan: Plan,
    recipe: ConversionRecipe,
    batch: CalibrationSet | None,
    stream: LayerRunner,
    folder: Path,
    progress: Progress,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Numbers for each cut by name, and what the report says of the choice."""
    even = uniform_budgets(plan)
    if batch is None:
        return even, {"kept": "uniform", "why": "no calibration text"}
    if not plan.replaced():
        return even, {"kept": "uniform", "why": "no linear is replaced"}
    free = [cut for cut in plan.replaced() if not cut.explicit]
    if recipe.curvature == "none" and (recipe.allocate == "uniform" or not free):
        return even, {"kept": "uniform", "why": "recipe"}
    options = measure_rank_errors(skeleton, plan, recipe, batch, stream, folder, progress)
    if recipe.allocate == "uniform" or not free:
        return even, {"kept": "uniform", "why": "recipe" if free else "every rank is given"}
    given = allocate_budget({cut.name: options[cut.name] for cut in free}, sum(cut.budget() for cut in free))
    by_gain = {**even, **given}
    if recipe.allocate == "spread":
        return by_gain, {"kept": "spread", "why": "recipe"}
    contenders = {"uniform": even, "spread": by_gain}
    return choose_allocation(contenders, skeleton, plan, recipe, batch, stream, folder, progress)


def measure_rank_errors(
    skeleton: MetaModel, plan: Plan, recipe: ConversionRecipe, batch: CalibrationSet, stream: LayerRunner, folder: Path, progress: Progress
) -> dict[str, list[CostPoint]]:
    with progress.bar("measuring what each rank buys", len(plan.body.layers)) as tick:
        return FisherPass(skeleton, plan, recipe, stream, folder, tick).run(batch)


def choose_allocation(
    contenders: dict[str, dict[str, float]],
    skeleton: MetaModel,
    plan: Plan,
    recipe: ConversionRecipe,
    batch: CalibrationSet,
    stream: LayerRunner,
    folder: Path,
    progress: Progress,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Tried on a quarter of the text, judged on all held-out text. A quick trial that prefers the even spread
    contradicts the survey; where it is about more than the noise of a loss, sequential trials then decide, which
    also see how layers make up for the errors below them (docs/quality.md)."""
    few, layers, how = batch.fewer(TRIAL_SHARE), len(plan.body.layers), "quick trials"
    with progress.bar("trying spreads of ranks", layers) as tick:
        scores = QuickTrial(skeleton, plan, recipe, contenders, few, stream, folder, tick).run()
    contradicts = scores["uniform"].converted < scores["spread"].converted
    if contradicts and scores["spread"].rise > MIN_LOSS_RISE and recipe.calibrate == "sequential":
        how = "sequential trials"
        with progress.bar("trying them layer after layer", layers * len(contenders)) as tick:
            for name, given in contenders.items():
                scores[name] = sequential_trial(skeleton, plan, recipe, given, few, stream, folder, tick)
    kept = min(scores, key=lambda name: scores[name].converted)
    allocation: dict[str, Any] = {"kept": kept, "why": f"held-out loss of {how} on {few.tokens():,} tokens"}
    allocation.update({name: result.to_dict() for name, result in scores.items()})
    return contenders[kept], allocation
