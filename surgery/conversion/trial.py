"""Choose how the parameter budget is allocated over the linears: measure the gain of each rank, try the resulting
allocation against the uniform one, keep the better one, and report both.

`QuickTrial` scores all contenders (candidate allocations) in one pass. The samples to fit run through the original
layers once and give E[x x^T] of every linear's input. The held-out samples run through the original layers and through
each contender's. Matrices are fitted to the original's inputs alone, which ignores the errors of the layers below.
`sequential_trial` converts with one contender as the real conversion would, in about three times the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from surgery.calibration.data import unpadded_rows
from surgery.calibration.layer_runner import LayerCall
from surgery.calibration.partition import MAX_SHARDS, Round
from surgery.calibration.routing import RoutingRecord
from surgery.conversion.context import ConversionContext
from surgery.conversion.fisher import FisherPass, load_grams
from surgery.conversion.fit import FitResult, candidate_configs, quick_fit
from surgery.conversion.fit_shared import targets_by_basis
from surgery.conversion.replacement import (
    LayerReplacement,
    add_linear,
    broadcast_fits,
    dense_linear,
    densify_module,
    swapped_modules,
)
from surgery.conversion.score import HeldOutScore, held_out_score
from surgery.conversion.sequential import SequentialConverter, convert_head, find_stages
from surgery.conversion.streams import Contexts, Layer, Stream, Streams, waits_for
from surgery.core.distributed import DistContext
from surgery.planning.allocate import CostPoint, allocate_budget
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.targets import LinearTarget, Plan
from surgery.planning.weights import target_weight
from surgery.structures import Metric, StructureConfig
from surgery.structures.metric import add_moment_, damp_, damp_output_gram
from surgery.structures.shared_basis import shared_factors


def sequential_trial(ctx: ConversionContext, budgets: dict[str, float], done: Callable[[], None]) -> HeldOutScore:
    """Return the held-out score of a sequential conversion whose result is discarded. done: called after each layer.

    Attention is not replaced in the trial, because mixers take long to initialize.
    """
    trial = replace(ctx, recipe=limit_sweeps(ctx.recipe), plan=replace(ctx.plan, attention_targets={}))
    converter = SequentialConverter(trial, budgets, finished=lambda _: None, write=lambda *_: done(), validate=False)
    return converter.run()[0]


def limit_sweeps(recipe: ConversionRecipe, **other: Any) -> ConversionRecipe:
    """Return the recipe with at most one sweep and without tuning; other: further fields to change."""
    return recipe.model_copy(update={"sweeps": min(recipe.sweeps, 1), "tune": None, **other})


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
        """Add the parts of all processes to `sum_II`, in a fixed order. like: an empty tensor of the right dtype and
        device.
        """
        part_II = like.new_zeros(self.size, self.size) if self.part_II is None else self.part_II
        self.sum_II = dist.ordered_sum(self.sum_II, part_II, round_.owners)
        per_rank = dist.gather(self.rows[0])
        self.rows, self.part_II = (0, self.rows[1] + sum(per_rank[owner] for owner in round_.owners)), None


class QuickTrial:
    """Score several allocations in one pass over the samples.

    contenders: name -> (target name -> parameters). done: called after each layer. plans: the plans of contenders that
    do not have ctx's, by name; they replace the same matrices by other structures, or MLPs and experts by pruned ones.
    first: the layer at which a contender begins, by name; below it the contender equals the original, whose rows it goes
    on from.
    """

    def __init__(
        self,
        ctx: ConversionContext,
        contenders: dict[str, dict[str, float]],
        done: Callable[[], None],
        plans: Mapping[str, Plan] | None = None,
        first: Mapping[str, str] | None = None,
    ):
        self.first = first or {}
        self.ctx = replace(ctx, recipe=limit_sweeps(ctx.recipe, calibrate="independent"))
        self.plans = {name: (plans or {}).get(name, ctx.plan) for name in contenders}
        self.plan, self.runner, self.recipe = ctx.plan, ctx.runner, self.ctx.recipe
        self.contenders, self.done = contenders, done

    def streams(self) -> Streams:
        """Return the streams of the trial: "fit", "held out" and the held-out samples for each contender."""
        samples = self.ctx.samples
        rows = {"fit": samples.fit, "held out": samples.held_out}
        rows |= dict.fromkeys(self.contenders, samples.held_out)
        return Streams(self.runner, samples, {name: Stream(some, MAX_SHARDS) for name, some in rows.items()})

    def run(self) -> dict[str, HeldOutScore]:
        """Return each contender's score on the held-out samples."""
        final = self.streams().run(self, self.done)
        scores = {}
        original_BTD = final.through("fit", "held out")
        for name, budgets in self.contenders.items():
            head = convert_head(replace(self.ctx, plan=self.plans[name]), budgets, original_BTD)
            module = next(iter(head.modules.values()), None)
            scores[name] = held_out_score(self.ctx, final["held out"], final[name], module)
        return scores

    def visit(self, layer: Layer) -> Contexts:
        """Fit every contender's linears to the rows to fit, and run its held-out rows through them."""
        call, stages = layer.call, list[_StageGram]()
        if any(plan.targets_in_layer(call.path) for plan in self.plans.values()):
            together = find_stages(self.ctx.model, self.plan, call)
            separate = [member for stage in together for member in stage.members or (stage,)]
            stages = [_StageGram(stage.paths, self.plan.targets[stage.paths[0]][0].in_) for stage in separate]
        modules: list[dict[str, nn.Module]] = [{} for _ in self.contenders]
        # `swapped_modules` reads the modules only when its stream begins, after the fits.
        swapped = [swapped_modules(call.layer, call.path, fitted) for fitted in modules]
        contexts = dict(zip(self.contenders, swapped))
        for name, first in self.first.items():
            if first == call.path:
                layer.branch("held out", name)
            elif waits_for(self.plan.layout, call.path, first):
                del contexts[name]
        return {"fit": self._gather_and_fit(call, stages, modules), "held out": nullcontext(), **contexts}

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
        members: dict[str, tuple[LinearTarget, Metric, int]] = {}  # of shared bases, by name
        while stages:
            self._fit(call, stages.pop(0), grams, modules, members)
        self._fit_shared_bases(call, members, modules)

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
        self,
        call: LayerCall,
        stage: _StageGram,
        grams: dict[str, Tensor],
        modules: list[dict[str, nn.Module]],
        members: dict[str, tuple[LinearTarget, Metric, int]],
    ) -> None:
        """Fit the stage's linears for every contender and add them to `modules`, one dictionary for each contender.

        Those whose basis the experts of the layer share are added to `members`, with their metric and rows.
        """
        if stage.sum_II is None or not stage.rows[1]:  # an expert that no row reached stays dense in the trial
            return
        moment_II = stage.sum_II.div_(stage.rows[1])
        targets = [target for path in stage.paths for target in self.plan.tried_targets(path)]
        moments = {target.name: (moment_II, stage.of_c) for target in targets}
        for target in targets:
            if target.neurons and target.linear.experts and stage.rows[1] < stage.size:
                moments[target.name] = _add_white_rows(moment_II, stage.rows[1]), {}
        for some_II in {id(some_II): some_II for some_II, _ in moments.values()}.values():
            damp_(some_II, self.recipe.damping)
        metrics = {
            target.name: Metric(
                moments[target.name][0], damp_output_gram(grams.get(target.name)), moments[target.name][1]
            )
            for target in targets
        }

        def fit(target: LinearTarget, configs: list[StructureConfig | None]) -> FitResult:
            weight_OI = target_weight(self.ctx.model, target, call.device)
            return quick_fit(target, configs, weight_OI, metrics[target.name], self.recipe.sweeps)

        rows = stage.rows[1]
        members |= {
            target.name: (target, metrics[target.name], rows)
            for plan in self.plans.values()
            for path in stage.paths
            for target in plan.targets.get(path, ())
            if target.basis
        }
        contender_configs = [
            {
                target.name: candidate_configs(target, target_budgets[target.name])
                for path in stage.paths
                for target in self.plans[name].targets.get(path, ())
                if not target.basis
            }
            for name, target_budgets in self.contenders.items()
        ]
        # Contenders often share a config: each is fitted once.
        jobs = {
            (target.name, str(mine[target.name])): (target, partial(fit, target, mine[target.name]))
            for target in targets
            for mine in contender_configs
            if target.name in mine
        }
        fitted = broadcast_fits(self.runner.ranks, jobs, call.device)
        for modules_by_path, plan, mine in zip(modules, self.plans.values(), contender_configs):
            for path in stage.paths:
                replacement, slices = LayerReplacement(), [t for t in plan.targets.get(path, ()) if not t.basis]
                if (
                    not slices
                ):  # they share a basis, or they are of the neurons of a pruned MLP, which are removed with `down`
                    continue
                results = [fitted[target.name, str(mine[target.name])] for target in slices]
                add_linear(self.ctx.model, slices, results, call.device, replacement)
                modules_by_path |= {name: densify_module(module) for name, module in replacement.modules.items()}

    def _fit_shared_bases(
        self,
        call: LayerCall,
        members: Mapping[str, tuple[LinearTarget, Metric, int]],
        modules: list[dict[str, nn.Module]],
    ) -> None:
        """Fit the matrices of experts that share a basis, and add them to `modules`. members: target, metric and rows of
        each that a row reached; the others stay dense.
        """
        factors: dict[tuple[str, int], dict[str, Tensor]] = {}  # dense products by (basis, rank) and path
        weights = {name: target_weight(self.ctx.model, member[0], call.device) for name, member in members.items()}
        for modules_by_path, plan in zip(modules, self.plans.values()):
            sharing = [
                target for slices in plan.targets_in_layer(call.path).values() for target in slices if target.basis
            ]
            for group in targets_by_basis([target for target in sharing if target.name in members]).values():
                key = group[0].basis, group[0].basis_rank
                if key not in factors:
                    metrics, rows = zip(*(members[target.name][1:] for target in group))
                    of_group = [weights[target.name] for target in group]
                    *_, (lefts, right_RI) = shared_factors(of_group, metrics, rows, key[1], self.recipe.sweeps)
                    factors[key] = {t.linear.path: left_OR @ right_RI for t, left_OR in zip(group, lefts)}
                for path, dense_OI in factors[key].items():
                    linear: Any = self.ctx.model.module(path)
                    modules_by_path[path] = dense_linear(dense_OI, linear.bias)


def _add_white_rows(moment_II: Tensor, rows: int) -> Tensor:
    """Return the moment of `rows` rows and of white ones, up to the number of inputs: what the conversion fits a pruned
    expert with few rows to (`InputMoments.add_white`).
    """
    white_II = moment_II.new_zeros(moment_II.shape)
    white_II.diagonal().fill_(float(moment_II.diagonal().mean()))
    return white_II.lerp_(moment_II, rows / len(moment_II))


def uniform_budgets(plan: Plan) -> dict[str, float]:
    """Return the parameters of each target by name when every matrix keeps the recipe's share."""
    return {target.name: target.uniform_budget() for targets in plan.targets.values() for target in targets}


def choose_budgets(ctx: ConversionContext) -> tuple[dict[str, float], dict[str, Any]]:
    """Return (parameters for each target by name, the report's "allocation" entry).

    If the plan has pruned MLPs to compare, the names are those of the targets of the better plan.
    """
    plan, recipe = ctx.plan, ctx.recipe
    uniform = uniform_budgets(plan)
    if ctx.data is None:
        return uniform, {"kept": "uniform", "why": "no calibration text"}
    if not plan.fitted_targets():
        return uniform, {"kept": "uniform", "why": "no linear is replaced"}
    free = {name: [t for t in p.replaced_targets() if not t.has_fixed_rank] for name, p in plan.contenders().items()}
    is_measured = recipe.allocate == "measured" and any(free.values())
    why = "recipe" if any(free.values()) else "every rank is given"
    options = measure_rank_errors(ctx) if recipe.curvature != "none" or is_measured else {}
    budgets = {name: {"uniform": uniform_budgets(p)} for name, p in plan.contenders().items()}
    if is_measured:
        for name, allocations in budgets.items():
            allocations["measured"] = {**allocations["uniform"], **budgets_by_gain(options, free[name])}
    if plan.pruned_targets:
        return choose_mlps(ctx, budgets, why)
    allocations = budgets["linears"]
    return choose_allocation(ctx, allocations) if is_measured else (uniform, {"kept": "uniform", "why": why})


def choose_mlps(
    ctx: ConversionContext, budgets: Mapping[str, Mapping[str, dict[str, float]]], why: str
) -> tuple[dict[str, float], dict[str, Any]]:
    """Try pruned MLPs against structured linears, each with its allocations, in one quick trial, and return (the
    budgets of the better plan, the report's "allocation" entry).

    budgets: of each contender of the plan and each allocation, by target name. why: of an allocation that is not tried.
    """
    plans = ctx.plan.contenders()
    pairs = {f"{plan} {name}": (plan, name) for plan, allocations in budgets.items() for name in allocations}
    with ctx.progress.bar("trying pruned MLPs, and allocations of ranks", len(ctx.plan.layout.layers)) as tick:
        scores = QuickTrial(
            ctx,
            {key: budgets[plan][name] for key, (plan, name) in pairs.items()},
            tick,
            {key: plans[plan] for key, (plan, _) in pairs.items()},
        ).run()
    of_plan = {plan: {name: scores[f"{plan} {name}"] for name in allocations} for plan, allocations in budgets.items()}
    lowest = {plan: min(some.values(), key=lambda score: score.converted) for plan, some in of_plan.items()}
    best = min(lowest, key=lambda plan: lowest[plan].converted)
    chosen, allocation = budgets[best]["uniform"], {"kept": "uniform", "why": why}
    if len(budgets[best]) > 1:
        chosen_ctx = replace(ctx, plan=plans[best])
        chosen, allocation = choose_allocation(chosen_ctx, dict(budgets[best]), scores=of_plan[best])
    return chosen, {**allocation, "mlps": {"kept": best, **{plan: s.to_dict() for plan, s in lowest.items()}}}


def budgets_by_gain(options: Mapping[str, list[CostPoint]], free: list[LinearTarget]) -> dict[str, int]:
    """Return the parameters of each free target where they lower the expected loss most, in total those of the uniform
    allocation.

    MLPs with `width: uniform` are one module of the allocation, so that they get the same parameters; experts are
    another.
    """
    modules: dict[str, list[LinearTarget]] = {}
    for target in free:
        together = f"{target.numel} together{', experts' if target.linear.experts else ''}"
        modules.setdefault(together if target.has_uniform_width else target.name, []).append(target)
    errors = {
        name: [_sum_points(points) for points in zip(*(options[target.name] for target in targets), strict=True)]
        for name, targets in modules.items()
    }
    budgets = allocate_budget(errors, sum(target.uniform_budget() for target in free))
    return {target.name: budgets[name] // len(targets) for name, targets in modules.items() for target in targets}


def _sum_points(points: Sequence[CostPoint]) -> CostPoint:
    return CostPoint(sum(point.params for point in points), sum(point.error for point in points))


def measure_rank_errors(ctx: ConversionContext) -> dict[str, list[CostPoint]]:
    """Return, for each target by name, the expected rise of the loss at each number of parameters."""
    with ctx.progress.bar("measuring the loss at each rank", len(ctx.plan.layout.layers)) as tick:
        return FisherPass(ctx.model, ctx.plan, ctx.recipe, ctx.runner, ctx.grams_dir, tick).run(ctx.samples)


def choose_allocation(
    ctx: ConversionContext,
    contenders: dict[str, dict[str, float]],
    plans: Mapping[str, Plan] | None = None,
    scores: dict[str, HeldOutScore] | None = None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Try the contenders "uniform" and "measured" and return (the better one's budgets, the report's "allocation"
    entry).

    plans: see `QuickTrial`. scores: of a quick trial that was run already.

    Trials fit to all samples that the conversion fits to. Fitted to a part of them, matrices overfit it, and the trial
    can prefer the worse allocation (docs/measurements/quality.md). If the quick trial prefers the uniform allocation,
    although the Fisher pass predicts otherwise, sequential trials decide: they also account for layers that compensate
    the errors below them.
    """
    layers, how = len(ctx.plan.layout.layers), "quick trials"
    if scores is None:
        with ctx.progress.bar("trying allocations of ranks", layers) as tick:
            scores = QuickTrial(ctx, contenders, tick, plans).run()
    contradicts = scores["uniform"].converted < scores["measured"].converted
    if contradicts and ctx.recipe.calibrate == "sequential":
        how = "sequential trials"
        with ctx.progress.bar("trying allocations layer by layer", layers * len(contenders)) as tick:
            for name, budgets in contenders.items():
                plan = (plans or {}).get(name, ctx.plan)
                scores[name] = sequential_trial(replace(ctx, plan=plan), budgets, tick)
    best = min(scores, key=lambda name: scores[name].converted)
    allocation: dict[str, Any] = {"kept": best, "why": f"held-out loss of {how} on {ctx.samples.tokens():,} tokens"}
    allocation.update({name: result.to_dict() for name, result in scores.items()})
    return contenders[best], allocation
