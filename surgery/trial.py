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
from functools import partial
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
from surgery.parts import PARTS, Turn
from surgery.phases import Phase, run_phases
from surgery.planning import Cut, Plan
from surgery.ranks import Ranks
from surgery.recipe import Recipe
from surgery.score import Score, score
from surgery.sharing import shared_fits
from surgery.skeleton import Skeleton
from surgery.stream import LayerCall, Stream
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
    size: int
    part_II: Tensor | None = None  # of this process's part of a turn
    sum_II: Tensor | None = None
    rows: tuple[int, int] = (0, 0)  # in the part, in the sum
    of_c: dict[Any, Any] = field(default_factory=dict)

    def fold(self, ranks: Ranks, turn: Turn, like: Tensor) -> None:
        part_II = like.new_zeros(self.size, self.size) if self.part_II is None else self.part_II
        self.sum_II = ranks.added(self.sum_II, part_II, turn.holders)
        said = ranks.gather(self.rows[0])
        self.rows, self.part_II = (0, self.rows[1] + sum(said[holder] for holder in turn.holders)), None


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
        held = [(first, first + batch.rows - batch.fit_rows, PARTS) for first in self._held()]
        final_BTD = self.stream.complete(self.stream.run(inputs, self._visit, [(0, batch.fit_rows, PARTS), *held]))
        scores = {}
        for name, rows in zip(self.contenders, final_BTD[batch.rows :].chunk(many)):
            # The contender's fitted windows were not run: the head, too, is fitted to the original's.
            both_BTD = torch.cat([final_BTD[: batch.rows], final_BTD[: batch.fit_rows], rows])
            given, device = self.contenders[name], self.stream.device
            head = convert_head(self.skeleton, self.plan, self.recipe, given, batch, both_BTD, self.grams, device)
            linear = next(iter(head.modules.values()), None)
            scores[name] = score(self.skeleton, self.plan, batch, both_BTD, linear, device)
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
            found = stages_of(self.skeleton, self.plan, call)
            stages = [_Inputs(stage.paths, self.plan.cuts[stage.paths[0]][0].in_) for stage in found]
        modules: list[dict[str, nn.Module]] = [{} for _ in self.contenders]
        phases: list[Phase] = [(0, fit, self._gathering(call, stages, modules)), (fit, rows, nullcontext())]
        for first, mine in zip(self._held()[1:], modules):
            # `grafted` looks at `mine` only when its phase begins, after the fits.
            phases.append((first, first + rows - fit, grafted(call.layer, call.path, mine)))
        out = run_phases(call, phases, self.stream)
        self.done()
        return out

    @contextmanager
    def _gathering(
        self, call: LayerCall, stages: list[_Inputs], modules: list[dict[str, nn.Module]]
    ) -> Iterator[Callable[[Turn], None]]:
        """Moments of the rows that run inside, and at its end every contender's stand-ins."""
        ranks = self.stream.ranks

        def after(turn: Turn) -> None:
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

    def _adding(self, stage: _Inputs) -> Callable[..., None]:
        mask_BT = self.batch.mask()

        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            x, first = args[0], self.stream.row
            real_NI = real_rows(x, None if mask_BT is None else mask_BT[first : first + len(x)])
            if stage.part_II is None:
                stage.part_II = real_NI.new_zeros(stage.size, stage.size)
            add_moment_(stage.part_II, real_NI)
            stage.rows = stage.rows[0] + len(real_NI), stage.rows[1]

        return hook

    def _fit(
        self, call: LayerCall, stage: _Inputs, grams: dict[str, Tensor], modules: list[dict[str, nn.Module]]
    ) -> None:
        if stage.sum_II is None:
            return
        moment_II = stage.sum_II.div_(stage.rows[1])
        damp_(moment_II, self.recipe.damping)
        cuts = [cut for path in stage.paths for cut in self.plan.cuts[path]]
        metrics = {cut.name: Metric(moment_II, damped_gram(grams.get(cut.name)), stage.of_c) for cut in cuts}

        def fit(cut: Cut, configs: list[Any]) -> Fitted:
            weight_OI = matrix_of(self.skeleton, cut, call.device)
            return quick_fit(cut, configs, weight_OI, metrics[cut.name], self.recipe.sweeps)

        wanted = [{cut.name: fitting(cut, given[cut.name]) for cut in cuts} for given in self.contenders.values()]
        # Contenders often agree.
        jobs = {
            (cut.name, str(mine[cut.name])): (cut, partial(fit, cut, mine[cut.name])) for cut in cuts for mine in wanted
        }
        fitted = shared_fits(self.stream.ranks, jobs, call.device)
        for put, mine in zip(modules, wanted):
            for path in stage.paths:
                grafts, whole = Grafts(), list(self.plan.cuts[path])
                found = [fitted[cut.name, str(mine[cut.name])] for cut in whole]
                graft(self.skeleton, whole, found, call.device, grafts)
                put[path] = multiplied_out(grafts.modules[path])
