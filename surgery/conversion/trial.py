"""Choose how the parameter budget is allocated over the linears: measure the gain of each rank, and where the expected gain of the
resulting allocation is small, try it against the uniform one, keep the better one, and report both.

`QuickTrial` scores all contenders (candidate allocations) in one pass. The samples to fit run through the original layers
once and give E[x x^T] of every linear's input. The held-out samples run through the original layers and through each
contender's. Matrices are fitted to the original's inputs alone, which ignores the errors of the layers below.
`sequential_trial` converts with one contender as the real conversion would, in about three times the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from surgery.calibration.data import unpadded_rows
from surgery.calibration.fisher import FisherPass, load_grams
from surgery.calibration.layer_runner import LayerCall, Phase, run_phases
from surgery.calibration.partition import MAX_SHARDS, Round
from surgery.calibration.routing import RoutingRecord
from surgery.conversion.context import ConversionContext, RowGroups, rows_of
from surgery.conversion.fit import FitResult, candidate_configs, quick_fit
from surgery.conversion.replacement import LayerReplacement, add_linear, broadcast_fits, densify_module, swapped_modules
from surgery.conversion.score import HeldOutScore, held_out_score, predicts_next_token
from surgery.conversion.sequential import SequentialConverter, convert_head, find_stages
from surgery.core.distributed import DistContext
from surgery.planning.allocate import CostPoint, allocate_budget, expected_error
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.targets import LinearTarget, Plan
from surgery.planning.weights import target_weight
from surgery.structures import Metric, StructureConfig
from surgery.structures.metric import add_moment_, damp_, damp_output_gram

TRIAL_SHARE = 0.25  # fraction of the samples to fit that a trial uses
# Relative rise of the held-out loss (or relative output error) below which the quick trial decides.
MIN_LOSS_RISE = 0.02
# With `allocate: auto`, `spread` needs no trial where conversions of four decoders confirmed its gain (docs/measurements/quality.md): at
# most this expected rise of the loss, as a share of that with the uniform allocation; at least this share of each matrix kept; at least so
# many tokens to fit to for each input of a matrix; one of these structures for each. Elsewhere `spread` can be much worse.
CERTAIN_SHARE, CERTAIN_KEEP, CERTAIN_TOKENS = 0.9, 0.5, 4
CERTAIN_STRUCTURES = ("low_rank", "pivoted_low_rank", "btt")
# With fewer tokens to fit to for each input of the widest matrix, `auto` takes `uniform` without a trial in models that predict the next token: it was
# the better one in four of six conversions, and trials on a quarter of so short a text chose the worse one each time (docs/measurements/quality.md).
# An encoder is worse with it.
MIN_TRIAL_TOKENS = 1.5

TILT_SHARE = 0.5  # fraction of the samples to fit that a trial of a tilt over depth uses; a quarter misleads
TILT_STEP, MAX_TILT = 0.5, 1.5
MIN_TILT_GAIN = 0.01  # smallest decrease of the rise of the held-out loss for which the tilt moves on


def sequential_trial(ctx: ConversionContext, budgets: dict[str, float], done: Callable[[], None]) -> HeldOutScore:
    """Return the held-out score of a sequential conversion whose result is discarded. done: called after each layer.

    Attention is not replaced in the trial, because mixers take long to initialize.
    """
    trial = replace(ctx, recipe=limit_sweeps(ctx.recipe), plan=replace(ctx.plan, attention_targets={}))
    converter = SequentialConverter(trial, budgets, finished=lambda _: None, write=lambda *_: done(), validate=False)
    return converter.run()[0]


def limit_sweeps(recipe: ConversionRecipe, **other: Any) -> ConversionRecipe:
    """Return the recipe with at most one sweep and without refinement; other: further fields to change."""
    return recipe.model_copy(update={"sweeps": min(recipe.sweeps, 1), "refine": None, **other})


@dataclass
class _StageGram:
    """E[x x^T] of a stage's input, accumulated while rows run. rows: counts in (part, sum)."""

    paths: list[str]
    size: int
    part_II: Tensor | None = None  # of this process's rows in the current round
    sum_II: Tensor | None = None
    rows: tuple[int, int] = (0, 0)
    of_c: dict[Any, Any] = field(default_factory=dict)  # cache of C's factors, shared by the stage's linears

    def ordered_reduce(self, dist: DistContext, round_: Round, like: Tensor) -> None:
        """Add the parts of all processes to `sum_II`, in a fixed order. like: an empty tensor of the right dtype and device."""
        part_II = like.new_zeros(self.size, self.size) if self.part_II is None else self.part_II
        self.sum_II = dist.ordered_sum(self.sum_II, part_II, round_.owners)
        per_rank = dist.gather(self.rows[0])
        self.rows, self.part_II = (0, self.rows[1] + sum(per_rank[owner] for owner in round_.owners)), None


class QuickTrial:
    """Score several allocations in one pass over the samples.

    contenders: name -> (target name -> parameters). done: called after each layer. plans: the plans of contenders that do not have ctx's,
    by name; they replace the same matrices by other structures.
    """

    def __init__(
        self,
        ctx: ConversionContext,
        contenders: dict[str, dict[str, float]],
        done: Callable[[], None],
        plans: Mapping[str, Plan] | None = None,
    ):
        self.ctx = replace(ctx, recipe=limit_sweeps(ctx.recipe, calibrate="independent"))
        self.plans = {name: (plans or {}).get(name, ctx.plan) for name in contenders}
        self.plan, self.runner, self.recipe = ctx.plan, ctx.runner, self.ctx.recipe
        self.contenders, self.done = contenders, done
        self.groups = RowGroups.for_trial(ctx.samples, len(contenders))

    @torch.no_grad()
    def run(self) -> dict[str, HeldOutScore]:
        """Return each contender's score on the held-out samples."""
        groups = self.groups
        segments = [(rows.start, rows.stop, MAX_SHARDS) for rows in (groups.fit, groups.held_out, *groups.converted)]
        final_BTD = self.runner.gather_rows(self.runner.run(groups.inputs(self.ctx.samples), self._visit, segments))
        scores = {}
        for (name, budgets), rows in zip(self.contenders.items(), groups.converted):
            head = convert_head(replace(self.ctx, plan=self.plans[name]), budgets, rows_of(final_BTD, groups.original))
            module = next(iter(head.modules.values()), None)
            held_BTD = rows_of(final_BTD, groups.held_out)
            scores[name] = held_out_score(self.ctx, held_BTD, rows_of(final_BTD, rows), module)
        return scores

    def _visit(self, call: LayerCall) -> Any:
        """Run all rows through one layer, and fit every contender's linears before its rows run."""
        call.hidden_BTD = self.runner.writable_buffer(call.hidden_BTD)
        fit, held = self.groups.fit, self.groups.held_out
        stages = []
        if self.plan.targets_in_layer(call.path):
            together = find_stages(self.ctx.model, self.plan, call)
            found = [member for stage in together for member in stage.members or (stage,)]
            stages = [_StageGram(stage.paths, self.plan.targets[stage.paths[0]][0].in_) for stage in found]
        modules: list[dict[str, nn.Module]] = [{} for _ in self.contenders]
        phases: list[Phase] = [
            (fit.start, fit.stop, self._gather_and_fit(call, stages, modules)),
            (held.start, held.stop, nullcontext()),
        ]
        for rows, mine in zip(self.groups.converted, modules):
            # `swapped_modules` reads `mine` only when its phase begins, after the fits.
            phases.append((rows.start, rows.stop, swapped_modules(call.layer, call.path, mine)))
        out = run_phases(call, phases, self.runner)
        self.done()
        return out

    @contextmanager
    def _gather_and_fit(
        self, call: LayerCall, stages: list[_StageGram], modules: list[dict[str, nn.Module]]
    ) -> Iterator[Callable[[Round], None]]:
        """Accumulate the input moments of the rows that run inside; on exit fit every contender's modules."""
        dist = self.runner.ranks

        def after(round_: Round) -> None:
            for stage in stages:
                stage.ordered_reduce(dist, round_, call.hidden_BTD.new_zeros(0, device=call.device))

        linears = [self.plan.targets[path][0].linear for stage in stages for path in stage.paths]
        self.routing = RoutingRecord(call.layer, call.path, linears)
        handles = [
            self.ctx.model.module(stage.paths[0]).register_forward_pre_hook(self._gram_hook(stage)) for stage in stages
        ]
        try:
            with self.routing:
                yield after
        finally:
            for handle in handles:
                handle.remove()
        for stage in stages if dist.count > 1 else ():
            assert stage.sum_II is not None
            dist.gather_rows_(stage.sum_II)
        self.runner.record_moment_bytes(stage.sum_II for stage in stages)
        grams = load_grams(self.ctx.grams_dir / f"{call.path}.safetensors", call.device)
        while stages:
            self._fit(call, stages.pop(0), grams, modules)

    def _gram_hook(self, stage: _StageGram) -> Callable[..., None]:
        masks_BT = self.ctx.samples.token_masks(self.plan.layout.tower(stage.paths[0]))

        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            x, first = args[0], self.runner.row
            if self.routing.is_routed(stage.paths[0]):
                later_BT = masks_BT[0][first:] if masks_BT else None
                real_NI = self.routing.unpadded_expert_rows(stage.paths[0], x, later_BT)
            else:
                real_NI = unpadded_rows(x, *(mask_BT[first : first + len(x)] for mask_BT in masks_BT))
            if stage.part_II is None:
                stage.part_II = real_NI.new_zeros(stage.size, stage.size)
            add_moment_(stage.part_II, real_NI)
            stage.rows = stage.rows[0] + len(real_NI), stage.rows[1]

        return hook

    def _fit(
        self, call: LayerCall, stage: _StageGram, grams: dict[str, Tensor], modules: list[dict[str, nn.Module]]
    ) -> None:
        """Fit the stage's linears for every contender and add them to `modules`, one dictionary for each contender."""
        if stage.sum_II is None or not stage.rows[1]:  # an expert that no row reached stays dense in the trial
            return
        moment_II = stage.sum_II.div_(stage.rows[1])
        damp_(moment_II, self.recipe.damping)
        targets = [target for path in stage.paths for target in self.plan.targets[path]]
        metrics = {
            target.name: Metric(moment_II, damp_output_gram(grams.get(target.name)), stage.of_c) for target in targets
        }

        def fit(target: LinearTarget, configs: list[StructureConfig | None]) -> FitResult:
            weight_OI = target_weight(self.ctx.model, target, call.device)
            return quick_fit(target, configs, weight_OI, metrics[target.name], self.recipe.sweeps)

        wanted = [
            {
                target.name: candidate_configs(target, target_budgets[target.name])
                for path in stage.paths
                for target in self.plans[name].targets[path]
            }
            for name, target_budgets in self.contenders.items()
        ]
        # Contenders often share a config: each is fitted once.
        jobs = {
            (target.name, str(mine[target.name])): (target, partial(fit, target, mine[target.name]))
            for target in targets
            for mine in wanted
        }
        fitted = broadcast_fits(self.runner.ranks, jobs, call.device)
        for modules_by_path, mine in zip(modules, wanted):
            for path in stage.paths:
                replacement, slices = LayerReplacement(), list(self.plan.targets[path])
                found = [fitted[target.name, str(mine[target.name])] for target in slices]
                add_linear(self.ctx.model, slices, found, call.device, replacement)
                modules_by_path |= {name: densify_module(module) for name, module in replacement.modules.items()}


def uniform_budgets(plan: Plan) -> dict[str, float]:
    """Return the parameters of each target by name when every matrix keeps the recipe's share."""
    return {target.name: target.uniform_budget() for targets in plan.targets.values() for target in targets}


def choose_budgets(ctx: ConversionContext) -> tuple[dict[str, float], dict[str, Any]]:
    """Return (parameters for each target by name, the report's "allocation" entry)."""
    plan, recipe = ctx.plan, ctx.recipe
    uniform = uniform_budgets(plan)
    if ctx.data is None:
        return uniform, {"kept": "uniform", "why": "no calibration text"}
    if not plan.replaced_targets():
        return uniform, {"kept": "uniform", "why": "no linear is replaced"}
    free = [target for target in plan.replaced_targets() if not target.has_fixed_rank]
    if recipe.curvature == "none" and (recipe.allocate == "uniform" or not free):
        return uniform, {"kept": "uniform", "why": "recipe"}
    options = measure_rank_errors(ctx)
    if recipe.allocate == "uniform" or not free:
        return uniform, {"kept": "uniform", "why": "recipe" if free else "every rank is given"}
    if recipe.allocate == "depth":
        return choose_tilt(ctx, lambda tilt: {**uniform, **tilted_budgets(plan, options, free, tilt)})
    by_gain = {**uniform, **tilted_budgets(plan, options, free, 0.0)}
    if recipe.allocate == "spread":
        return by_gain, {"kept": "spread", "why": "recipe"}
    tokens = ctx.samples.fit_tokens()
    predicts_next = predicts_next_token(ctx.model)
    if recipe.allocate == "auto" and predicts_next and is_text_short(free, tokens):
        why = f"fewer than {MIN_TRIAL_TOKENS} tokens for each input of the widest matrix: no trial"
        return uniform, {"kept": "uniform", "why": why}
    expected = ctx.dist.broadcast_object(_expected_share(options, free, by_gain))
    reliable = is_expectation_reliable(recipe, free, tokens, predicts_next)
    if recipe.allocate == "auto" and expected <= CERTAIN_SHARE and reliable:
        why = f"expected rise of the loss at most {CERTAIN_SHARE} of that with the uniform allocation: no trial"
        return by_gain, {"kept": "spread", "why": why, "expected": expected}
    budgets, allocation = choose_allocation(ctx, {"uniform": uniform, "spread": by_gain})
    return budgets, {**allocation, "expected": expected}


def tilted_budgets(
    plan: Plan, options: dict[str, list[CostPoint]], free: list[LinearTarget], tilt: float
) -> dict[str, int]:
    """Return the parameters of each free target, with the errors of layer l of L weighted by exp(tilt (1 - 2 l / (L - 1))).

    A positive tilt gives more parameters to early layers. The LM head counts as the last layer.
    """
    layers = plan.layout.layers
    place = {path: 2 * index / max(1, len(layers) - 1) for index, path in enumerate(layers)}
    weighted = {}
    for target in free:
        weight = math.exp(tilt * (1 - place.get(target.linear.layer or "", 2.0)))
        weighted[target.name] = [CostPoint(params, weight * error) for params, error in options[target.name]]
    return allocate_budget(weighted, sum(target.uniform_budget() for target in free))


def is_text_short(free: list[LinearTarget], tokens: float) -> bool:
    """Return whether the text is too short for gains of ranks and for trials. tokens: to fit to."""
    return any(tokens < MIN_TRIAL_TOKENS * target.in_ for target in free)


def is_expectation_reliable(
    recipe: ConversionRecipe, free: list[LinearTarget], tokens: float, predicts_next: bool
) -> bool:
    """Return whether the expected gain of `spread` can decide without a trial: elsewhere, conversions with `spread` were sometimes worse.

    tokens: to fit to. predicts_next: whether the model predicts the next token. The Fisher pass must measure the loss of next tokens for each output, layers must be fitted to the outputs of the converted layers
    below them, and every matrix must have one of CERTAIN_STRUCTURES as a candidate, keep CERTAIN_KEEP of its parameters and read
    CERTAIN_TOKENS tokens for each of its inputs.
    """
    return (
        recipe.curvature != "none"
        and recipe.calibrate == "sequential"
        and predicts_next
        and all(t.keep >= CERTAIN_KEEP and tokens * t.linear.active >= CERTAIN_TOKENS * t.in_ for t in free)
        and all(any(config.name in CERTAIN_STRUCTURES for config in t.configs) for t in free)
    )


def _expected_share(options: dict[str, list[CostPoint]], free: list[LinearTarget], by_gain: dict[str, float]) -> float:
    """Return the expected rise of the loss with the budgets `by_gain`, as a share of that with uniform ones; 1 if neither has a rise."""
    uniform = sum(expected_error(options[target.name], target.uniform_budget()) for target in free)
    rise = sum(expected_error(options[target.name], by_gain[target.name]) for target in free)
    return max(rise, 0.0) / uniform if uniform > 0 else 1.0


def measure_rank_errors(ctx: ConversionContext) -> dict[str, list[CostPoint]]:
    """Return, for each target by name, the expected rise of the loss at each number of parameters."""
    with ctx.progress.bar("measuring the gain of each rank", len(ctx.plan.layout.layers)) as tick:
        return FisherPass(ctx.model, ctx.plan, ctx.recipe, ctx.runner, ctx.grams_dir, tick).run(ctx.samples)


def choose_allocation(
    ctx: ConversionContext, contenders: dict[str, dict[str, float]], plans: Mapping[str, Plan] | None = None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Try the contenders "uniform" and "spread" and return (the better one's budgets, the report's "allocation" entry).

    plans: see `QuickTrial`.

    Trials fit to a quarter of the samples and are scored on all held-out samples. If the quick trial prefers the
    uniform allocation, although the Fisher pass predicts otherwise, and the loss rises by more than MIN_LOSS_RISE,
    sequential trials decide: they also account for layers that compensate the errors below them (docs/quality.md).
    """
    few, layers, how = ctx.samples.subset(TRIAL_SHARE), len(ctx.plan.layout.layers), "quick trials"
    trial = replace(ctx, data=few)
    with ctx.progress.bar("trying rank allocations", layers) as tick:
        scores = QuickTrial(trial, contenders, tick, plans).run()
    contradicts = scores["uniform"].converted < scores["spread"].converted
    if contradicts and scores["spread"].rise > MIN_LOSS_RISE and ctx.recipe.calibrate == "sequential":
        how = "sequential trials"
        with ctx.progress.bar("trying rank allocations layer by layer", layers * len(contenders)) as tick:
            for name, budgets in contenders.items():
                plan = (plans or {}).get(name, trial.plan)
                scores[name] = sequential_trial(replace(trial, plan=plan), budgets, tick)
    kept = min(scores, key=lambda name: scores[name].converted)
    allocation: dict[str, Any] = {"kept": kept, "why": f"held-out loss of {how} on {few.tokens():,} tokens"}
    allocation.update({name: result.to_dict() for name, result in scores.items()})
    return contenders[kept], allocation


def choose_tilt(
    ctx: ConversionContext, allocate: Callable[[float], dict[str, float]]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return (the budgets of the best tilt over depth, the report's "allocation" entry). allocate(tilt): its budgets.

    The Fisher pass knows neither how errors of early layers grow in later ones, nor how much of them later layers
    compensate when they are fitted to the converted layers' outputs. Which of the two prevails depends on the model, and only
    sequential trials show it. From 0 the tilt moves in steps of TILT_STEP, first up, then down if that did not help, as
    long as a step lowers the rise of the held-out loss by MIN_TILT_GAIN.
    """
    few = ctx.samples.subset(TILT_SHARE)
    scores: dict[float, HeldOutScore] = {}

    def score(tilt: float) -> HeldOutScore:
        with ctx.progress.bar(f"trying a tilt of {tilt:+g} over depth", len(ctx.plan.layout.layers)) as tick:
            found = sequential_trial(replace(ctx, data=few), allocate(tilt), tick)
        scores[tilt] = ctx.dist.broadcast_object(found)
        return scores[tilt]

    best, least = 0.0, score(0.0)
    for step in (TILT_STEP, -TILT_STEP):
        while abs(best + step) <= MAX_TILT and _gains(found := score(best + step), least):
            best, least = best + step, found
        if best:
            break
    allocation: dict[str, Any] = {
        "kept": "depth",
        "why": f"held-out loss of sequential trials on {few.tokens():,} tokens",
        "tilt": best,
        "tilts": {f"{tilt:+g}": found.to_dict() for tilt, found in scores.items()},
    }
    return allocate(best), allocation


def _gains(score: HeldOutScore, before: HeldOutScore) -> bool:
    rise = max(before.converted - before.original, 0.0)
    return before.converted - score.converted > MIN_TILT_GAIN * rise
