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
from surgery.calibration.layer_runner import LayerCall, LayerRunner, Phase, run_phases
from surgery.calibration.partition import MAX_SHARDS, Round
from surgery.checkpoint.meta_model import MetaModel
from surgery.conversion.fit import FitResult, candidate_configs, quick_fit
from surgery.conversion.replacement import LayerReplacement, add_linear, broadcast_fits, densify_module, swapped_modules
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
    meta_model: MetaModel,
    plan: Plan,
    recipe: ConversionRecipe,
    target_budgets: dict[str, float],
    batch: CalibrationSet,
    runner: LayerRunner,
    grams: Path,
    done: Callable[[], None],
) -> HeldOutScore:
    """The held-out score of a conversion that is thrown away."""
    quick, plan = (
        limit_sweeps(recipe),
        replace(plan, attention_targets={}),
    )  # attention as it was: mixers take time to start
    layers = SequentialConverter(
        meta_model, plan, quick, target_budgets, runner, grams, batch, lambda _: None, lambda *_: done(), validate=False
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

    def ordered_reduce(self, ranks: DistContext, round_: Round, like: Tensor) -> None:
        part_II = like.new_zeros(self.size, self.size) if self.part_II is None else self.part_II
        self.sum_II = ranks.ordered_sum(self.sum_II, part_II, round_.owners)
        per_rank = ranks.gather(self.rows[0])
        self.rows, self.part_II = (0, self.rows[1] + sum(per_rank[owner] for owner in round_.owners)), None


class QuickTrial:
    """contenders: name -> (target name -> numbers); run() gives each one's score on the batch's held-out windows."""

    def __init__(
        self,
        meta_model: MetaModel,
        plan: Plan,
        recipe: ConversionRecipe,
        contenders: dict[str, dict[str, float]],
        batch: CalibrationSet,
        runner: LayerRunner,
        grams: Path,
        done: Callable[[], None],
    ):
        self.meta_model, self.plan, self.contenders, self.batch = meta_model, plan, contenders, batch
        self.runner, self.grams, self.done = runner, grams, done
        self.recipe = limit_sweeps(recipe, calibrate="independent")

    @torch.no_grad()
    def run(self) -> dict[str, HeldOutScore]:
        batch, many = self.batch, len(self.contenders)
        inputs = {k: torch.cat([v, *[v[batch.n_fit :]] * many]) for k, v in batch.inputs.items()}
        held = [(first, first + batch.rows - batch.n_fit, MAX_SHARDS) for first in self._held_out_starts()]
        final_BTD = self.runner.gather_rows(self.runner.run(inputs, self._visit, [(0, batch.n_fit, MAX_SHARDS), *held]))
        scores = {}
        for name, rows in zip(self.contenders, final_BTD[batch.rows :].chunk(many)):
            # The contender's fitted windows were not run: the head, too, is fitted to the original's.
            both_BTD = torch.cat([final_BTD[: batch.rows], final_BTD[: batch.n_fit], rows])
            target_budgets, device = self.contenders[name], self.runner.device
            head = convert_head(
                self.meta_model, self.plan, self.recipe, target_budgets, batch, both_BTD, self.grams, device
            )
            linear = next(iter(head.modules.values()), None)
            scores[name] = held_out_score(self.meta_model, self.plan, batch, both_BTD, linear, device)
        return scores

    def _held_out_starts(self) -> list[int]:
        """Where the held-out windows begin: the original's, then each contender's."""
        batch, many = self.batch, len(self.contenders)
        return [batch.n_fit + i * (batch.rows - batch.n_fit) for i in range(many + 1)]

    def _visit(self, call: LayerCall) -> Any:
        call.hidden_BTD = self.runner.writable_buffer(call.hidden_BTD)
        fit, rows = self.batch.n_fit, self.batch.rows
        stages = []
        if self.plan.targets_in_layer(call.path):
            found = find_stages(self.meta_model, self.plan, call)
            stages = [_StageGram(stage.paths, self.plan.targets[stage.paths[0]][0].in_) for stage in found]
        modules: list[dict[str, nn.Module]] = [{} for _ in self.contenders]
        phases: list[Phase] = [(0, fit, self._gather_and_fit(call, stages, modules)), (fit, rows, nullcontext())]
        for first, mine in zip(self._held_out_starts()[1:], modules):
            # `swapped_modules` looks at `mine` only when its phase begins, after the fits.
            phases.append((first, first + rows - fit, swapped_modules(call.layer, call.path, mine)))
        out = run_phases(call, phases, self.runner)
        self.done()
        return out

    @contextmanager
    def _gather_and_fit(
        self, call: LayerCall, stages: list[_StageGram], modules: list[dict[str, nn.Module]]
    ) -> Iterator[Callable[[Round], None]]:
        """Moments of the rows that run inside, and at its end every contender's stand-ins."""
        ranks = self.runner.ranks

        def after(round_: Round) -> None:
            for stage in stages:
                stage.ordered_reduce(ranks, round_, call.hidden_BTD.new_zeros(0, device=call.device))

        handles = [
            self.meta_model.module(stage.paths[0]).register_forward_pre_hook(self._gram_hook(stage)) for stage in stages
        ]
        try:
            yield after
        finally:
            for handle in handles:
                handle.remove()
        for stage in stages if ranks.count > 1 else ():
            assert stage.sum_II is not None
            ranks.gather_rows_(stage.sum_II)
        self.runner.record_moment_bytes(stage.sum_II for stage in stages)
        grams = load_grams(self.grams / f"{call.path}.safetensors", call.device)
        while stages:
            self._fit(call, stages.pop(0), grams, modules)

    def _gram_hook(self, stage: _StageGram) -> Callable[..., None]:
        mask_BT = self.batch.mask()

        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            x, first = args[0], self.runner.row
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
        targets = [target for path in stage.paths for target in self.plan.targets[path]]
        metrics = {
            target.name: Metric(moment_II, damp_output_gram(grams.get(target.name)), stage.of_c) for target in targets
        }

        def fit(target: LinearTarget, configs: list[Any]) -> FitResult:
            weight_OI = target_weight(self.meta_model, target, call.device)
            return quick_fit(target, configs, weight_OI, metrics[target.name], self.recipe.sweeps)

        wanted = [
            {target.name: candidate_configs(target, target_budgets[target.name]) for target in targets}
            for target_budgets in self.contenders.values()
        ]
        # Contenders often agree.
        jobs = {
            (target.name, str(mine[target.name])): (target, partial(fit, target, mine[target.name]))
            for target in targets
            for mine in wanted
        }
        fitted = broadcast_fits(self.runner.ranks, jobs, call.device)
        for modules_by_path, mine in zip(modules, wanted):
            for path in stage.paths:
                replacement, whole = LayerReplacement(), list(self.plan.targets[path])
                found = [fitted[target.name, str(mine[target.name])] for target in whole]
                add_linear(self.meta_model, whole, found, call.device, replacement)
                modules_by_path[path] = densify_module(replacement.modules[path])


TRIAL_SHARE = 0.25  # of the windows to fit
MIN_LOSS_RISE = 0.02  # a rise of the held-out loss (a relative output error) below which either spread will do


def uniform_budgets(plan: Plan) -> dict[str, float]:
    return {target.name: target.uniform_budget() for targets in plan.targets.values() for target in targets}


def choose_budgets(
    meta_model: MetaModel,
    plan: Plan,
    recipe: ConversionRecipe,
    batch: CalibrationSet | None,
    runner: LayerRunner,
    folder: Path,
    progress: Progress,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Numbers for each target by name, and what the report says of the choice."""
    even = uniform_budgets(plan)
    if batch is None:
        return even, {"kept": "uniform", "why": "no calibration text"}
    if not plan.replaced_targets():
        return even, {"kept": "uniform", "why": "no linear is replaced"}
    free = [target for target in plan.replaced_targets() if not target.has_fixed_rank]
    if recipe.curvature == "none" and (recipe.allocate == "uniform" or not free):
        return even, {"kept": "uniform", "why": "recipe"}
    options = measure_rank_errors(meta_model, plan, recipe, batch, runner, folder, progress)
    if recipe.allocate == "uniform" or not free:
        return even, {"kept": "uniform", "why": "recipe" if free else "every rank is given"}
    target_budgets = allocate_budget(
        {target.name: options[target.name] for target in free}, sum(target.uniform_budget() for target in free)
    )
    by_gain = {**even, **target_budgets}
    if recipe.allocate == "spread":
        return by_gain, {"kept": "spread", "why": "recipe"}
    contenders = {"uniform": even, "spread": by_gain}
    return choose_allocation(contenders, meta_model, plan, recipe, batch, runner, folder, progress)


def measure_rank_errors(
    meta_model: MetaModel,
    plan: Plan,
    recipe: ConversionRecipe,
    batch: CalibrationSet,
    runner: LayerRunner,
    folder: Path,
    progress: Progress,
) -> dict[str, list[CostPoint]]:
    with progress.bar("measuring what each rank buys", len(plan.layout.layers)) as tick:
        return FisherPass(meta_model, plan, recipe, runner, folder, tick).run(batch)


def choose_allocation(
    contenders: dict[str, dict[str, float]],
    meta_model: MetaModel,
    plan: Plan,
    recipe: ConversionRecipe,
    batch: CalibrationSet,
    runner: LayerRunner,
    folder: Path,
    progress: Progress,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Tried on a quarter of the text, judged on all held-out text. A quick trial that prefers the even spread
    contradicts the survey; where it is about more than the noise of a loss, sequential trials then decide, which
    also see how layers make up for the errors below them (docs/quality.md)."""
    few, layers, how = batch.subset(TRIAL_SHARE), len(plan.layout.layers), "quick trials"
    with progress.bar("trying spreads of ranks", layers) as tick:
        scores = QuickTrial(meta_model, plan, recipe, contenders, few, runner, folder, tick).run()
    contradicts = scores["uniform"].converted < scores["spread"].converted
    if contradicts and scores["spread"].rise > MIN_LOSS_RISE and recipe.calibrate == "sequential":
        how = "sequential trials"
        with progress.bar("trying them layer after layer", layers * len(contenders)) as tick:
            for name, target_budgets in contenders.items():
                scores[name] = sequential_trial(meta_model, plan, recipe, target_budgets, few, runner, folder, tick)
    kept = min(scores, key=lambda name: scores[name].converted)
    allocation: dict[str, Any] = {"kept": kept, "why": f"held-out loss of {how} on {few.tokens():,} tokens"}
    allocation.update({name: result.to_dict() for name, result in scores.items()})
    return contenders[kept], allocation
