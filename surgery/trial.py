"""Trying spreads of a budget: what each costs in held-out loss.

`QuickTrial`: all of them on one stream. The windows to fit go through the original layers once and give E[x x^T]
of every linear's input; the held-out windows go through the original layers and through each contender's.
Matrices are fitted to the original's inputs alone, which neither follows the errors of the layers below nor
makes up for them. `sequential_trial`: one of them, as it would be converted, in three times the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.batch import Batch, real_rows
from surgery.curvature import load_grams
from surgery.fit import Fitted, damped_gram, fitting, quick_fit
from surgery.grafts import Grafts, graft, grafted, multiplied_out
from surgery.headcut import convert_head
from surgery.layerwise import Layerwise, stages_of
from surgery.planning import Plan
from surgery.recipe import Recipe
from surgery.score import Score, score
from surgery.skeleton import Skeleton
from surgery.stream import LayerCall, Phase, Stream, run_phases
from surgery.structures import Metric
from surgery.structures.metric import add_moment_, damp_
from surgery.weights import matrix_of


def sequential_trial(
    skeleton: Skeleton,
    plan: Plan,
    recipe: Recipe,
    given: dict[str, float],
    batch: Batch,
    stream: Stream,
    grams: Path,
    done: Callable[[], None],
) -> Score:
    """The held-out score of a conversion that is thrown away."""
    quick, plan = one_sweep(recipe), replace(plan, seats={})  # attention as it was: mixers take time to start
    layers = Layerwise(
        skeleton, plan, quick, given, stream, grams, batch, lambda _: None, lambda *_: done(), judged=False
    )
    return layers.run()[0]


def one_sweep(recipe: Recipe, **other: Any) -> Recipe:
    return recipe.model_copy(update={"sweeps": min(recipe.sweeps, 1), **other})


@dataclass
class _Inputs:
    """E[x x^T] of a stage's input, while rows pass."""

    paths: list[str]
    sum_II: Tensor | None = None
    count: int = 0
    windows: int = 0
    of_c: dict[Any, Any] = field(default_factory=dict)


class QuickTrial:
    """contenders: name -> (cut name -> numbers); run() gives each one's score on the batch's held-out windows."""

    def __init__(
        self,
        skeleton: Skeleton,
        plan: Plan,
        recipe: Recipe,
        contenders: dict[str, dict[str, float]],
        batch: Batch,
        stream: Stream,
        grams: Path,
        done: Callable[[], None],
    ):
        self.skeleton, self.plan, self.contenders, self.batch = skeleton, plan, contenders, batch
        self.stream, self.grams, self.done = stream, grams, done
        self.recipe = one_sweep(recipe, calibrate="independent")

    @torch.no_grad()
    def run(self) -> dict[str, Score]:
        batch, many = self.batch, len(self.contenders)
        inputs = {k: torch.cat([v, *[v[batch.fit_rows :]] * many]) for k, v in batch.inputs.items()}
        final_BTD = self.stream.run(inputs, self._visit)
        scores = {}
        for name, rows in zip(self.contenders, final_BTD[batch.rows :].chunk(many)):
            # The contender's fitted windows were not run: the head, too, is fitted to the original's.
            both_BTD = torch.cat([final_BTD[: batch.rows], final_BTD[: batch.fit_rows], rows])
            given, device = self.contenders[name], self.stream.device
            head = convert_head(self.skeleton, self.plan, self.recipe, given, batch, both_BTD, self.grams, device)
            linear = next(iter(head.modules.values()), None)
            scores[name] = score(self.skeleton, self.plan, batch, both_BTD, linear, device)
        return scores

    def _visit(self, call: LayerCall) -> Any:
        call.hidden_BTD = self.stream.own(call.hidden_BTD)
        fit, rows, held = self.batch.fit_rows, self.batch.rows, self.batch.rows - self.batch.fit_rows
        stages = []
        if self.plan.of_layer(call.path):
            stages = [_Inputs(stage.paths) for stage in stages_of(self.skeleton, self.plan, call)]
        modules: list[dict[str, nn.Module]] = [{} for _ in self.contenders]
        phases: list[Phase] = [(0, fit, self._gathering(call, stages, modules)), (fit, rows, nullcontext())]
        for i, mine in enumerate(modules):
            # `grafted` looks at `mine` only when its phase begins, after the fits.
            phases.append((rows + i * held, rows + (i + 1) * held, grafted(call.layer, call.path, mine)))
        out = run_phases(call, phases, self.stream.chunk_rows(call.hidden_BTD.shape[1]))
        self.done()
        return out

    @contextmanager
    def _gathering(self, call: LayerCall, stages: list[_Inputs], modules: list[dict[str, nn.Module]]) -> Iterator[None]:
        """Moments of the rows that run inside, and at its end every contender's stand-ins."""
        handles = [
            self.skeleton.module(stage.paths[0]).register_forward_pre_hook(self._adding(stage)) for stage in stages
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.stream.count_moments(stage.sum_II for stage in stages)
        grams = load_grams(self.grams / f"{call.path}.safetensors", call.device)
        while stages:
            self._fit(call, stages.pop(0), grams, modules)

    def _adding(self, stage: _Inputs) -> Callable[..., None]:
        mask_BT = self.batch.mask()

        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            x, first = args[0], stage.windows
            real_NI = real_rows(x, None if mask_BT is None else mask_BT[first : first + len(x)])
            if stage.sum_II is None:
                stage.sum_II = real_NI.new_zeros(x.shape[-1], x.shape[-1])
            add_moment_(stage.sum_II, real_NI)
            stage.count, stage.windows = stage.count + len(real_NI), first + len(x)

        return hook

    def _fit(
        self, call: LayerCall, stage: _Inputs, grams: dict[str, Tensor], modules: list[dict[str, nn.Module]]
    ) -> None:
        if stage.sum_II is None:
            return
        moment_II = stage.sum_II.div_(stage.count)
        damp_(moment_II, self.recipe.damping)
        for path in stage.paths:
            fits: list[list[Fitted]] = [[] for _ in self.contenders]
            cuts = list(self.plan.cuts[path])
            for cut in cuts:
                metric = Metric(moment_II, damped_gram(grams.get(cut.name)), stage.of_c)
                weight_OI = matrix_of(self.skeleton, cut, call.device)
                known: dict[tuple[Any, ...], Fitted] = {}  # contenders often agree
                for mine, given in zip(fits, self.contenders.values()):
                    configs = tuple(fitting(cut, given[cut.name]))
                    if configs not in known:
                        known[configs] = quick_fit(cut, list(configs), weight_OI, metric, self.recipe.sweeps)
                    mine.append(known[configs])
            for put, fitted in zip(modules, fits):
                grafts = Grafts()
                graft(self.skeleton, cuts, fitted, call.device, grafts)
                put[path] = multiplied_out(grafts.modules[path])
