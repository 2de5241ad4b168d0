"""Which attention layers keep their softmax: those whose mixer alone raises the held-out loss most, against as many
evenly spaced ones, the better of the two (field notes: a layer's sensitivity needs the loss, not only its own error).

All contenders go through the model on one stream: the windows to fit as they are, and the held-out ones once more for
each contender, with mixers in that contender's layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from surgery.calibration.attention_samples import AttentionSamples, all_attention_replaced
from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import LayerCall, Phase, LayerRunner, run_phases
from surgery.checkpoint.meta_model import MetaModel
from surgery.conversion.mixer_init.base import InitializedMixer, build_mixer, select_init
from surgery.conversion.replacement import broadcast_mixer
from surgery.conversion.score import HeldOutScore, held_out_score
from surgery.core.progress import Progress
from surgery.mixers import Mixer
from surgery.planning.attention_recipe import HybridRecipe
from surgery.planning.plan import Plan
from surgery.planning.recipe import ConversionRecipe

TRIAL_STEPS_SHARE = 0.25  # of the local steps a start takes when it is kept


class MixerTrial:
    """contenders: name -> layers with mixers; run() gives each one's score on the batch's held-out windows. `mixer_choices`,
    by layer, are started on the original's inputs when first met, and kept from trial to trial."""

    def __init__(self, skeleton: MetaModel, plan: Plan, recipe: ConversionRecipe, batch: CalibrationSet, stream: LayerRunner):
        self.skeleton, self.plan, self.recipe, self.batch = skeleton, plan, recipe, batch
        self.stream, self.ranks = stream.alone(), stream.ranks
        self.mixers: dict[str, Mixer] = {}
        self.contenders: dict[str, set[str]] = {}
        self.done: Callable[[], None] = lambda: None

    def shared(self, contenders: dict[str, set[str]], done: Callable[[], None]) -> dict[str, HeldOutScore]:
        """`run`, every process with contenders of its own: none waits for another's mixers."""
        own = {name: contenders[name] for name in list(contenders)[self.ranks.index :: self.ranks.count]}
        found = self.ranks.gather(self.ranks.all_or_none(lambda: self.run(own, done) if own else {}))
        return {name: scores[name] for name in contenders for scores in found if name in scores}

    @torch.no_grad()
    def run(self, contenders: dict[str, set[str]], done: Callable[[], None]) -> dict[str, HeldOutScore]:
        self.contenders, self.done = contenders, done
        batch, many = self.batch, len(contenders)
        inputs = {k: torch.cat([v, *[v[batch.fit_rows :]] * many]) for k, v in batch.inputs.items()}
        final_BTD = self.stream.run(inputs, self._visit)
        scores = {}
        for name, rows in zip(contenders, final_BTD[batch.rows :].chunk(many)):
            both_BTD = torch.cat([final_BTD[: batch.rows], final_BTD[: batch.fit_rows], rows])
            scores[name] = held_out_score(self.skeleton, self.plan, batch, both_BTD, None, self.stream.device)
        return scores

    def _visit(self, call: LayerCall) -> Any:
        call.hidden_BTD = self.stream.own(call.hidden_BTD)
        batch, seat = self.batch, self.plan.seats.get(call.path)
        wanted = any(call.path in layers for layers in self.contenders.values())
        if seat is not None and wanted and call.path not in self.mixers:
            self.mixers[call.path] = self._started(call)
        held = batch.rows - batch.fit_rows
        phases: list[Phase] = [(0, batch.rows, nullcontext())]
        here = {seat.path: self.mixers[call.path]} if seat is not None and wanted else {}
        for i, layers in enumerate(self.contenders.values()):
            mixers = here if call.path in layers else {}
            first = batch.rows + i * held
            phases.append((first, first + held, all_attention_replaced(self.skeleton, mixers)))
        out = run_phases(call, phases, self.stream)
        self.done()
        return out

    def exchange(self, layers: list[str]) -> None:
        """After `busiest_work` with one layer a contender: everybody has every mixer."""
        for i, layer in enumerate(layers if self.ranks.count > 1 else ()):
            seat, owner, device = self.plan.seats[layer], i % self.ranks.count, self.stream.device
            started = broadcast_mixer(self.ranks, owner, seat, lambda at=layer: InitializedMixer(self.mixers[at], {}), device)  # type: ignore[misc]
            self.mixers[layer] = started.mixer.eval().requires_grad_(False)

    def _started(self, call: LayerCall) -> Mixer:
        seat, settings = self.plan.seats[call.path], self.recipe.attention
        assert settings is not None
        rotated = build_mixer(seat, torch.device("meta")).rotated
        fit, held = (
            AttentionSamples(self.skeleton, call, seat, first, last, 0, rotated)
            for first, last in ((0, self.batch.fit_rows), (self.batch.fit_rows, self.batch.rows))
        )
        few = settings.model_copy(update={"steps": round(TRIAL_STEPS_SHARE * settings.steps)})
        return select_init(seat.config, few).start(seat, few, fit, held).mixer.eval().requires_grad_(False)


def choose_hybrid(
    skeleton: MetaModel, plan: Plan, recipe: ConversionRecipe, hybrid: HybridRecipe, batch: CalibrationSet, stream: LayerRunner, progress: Progress
) -> dict[str, Any]:
    """What the report says of the choice; "softmax": the layers that keep theirs."""
    trial, layers = MixerTrial(skeleton, plan, recipe, batch, stream), list(plan.seats)
    count = hybrid.count(len(layers))
    with progress.bar("measuring what each mixer costs", len(plan.body.layers)) as tick:
        alone = trial.shared({layer: {layer} for layer in layers}, tick)
    trial.exchange(layers)
    by_damage = set(sorted(layers, key=lambda layer: -alone[layer].converted)[:count])
    numbers = hybrid.model_copy(update={"by": "every"}).fixed(list(plan.seats.values()))
    evenly = {layer for layer, seat in plan.seats.items() if seat.index in numbers}
    kept = {"sensitivity": by_damage, "every": evenly}
    with progress.bar("trying which layers keep softmax", len(plan.body.layers)) as tick:
        scores = trial.shared({name: set(layers) - layers_kept for name, layers_kept in kept.items()}, tick)
    best = min(scores, key=lambda name: scores[name].converted)
    told: dict[str, Any] = {"kept": best, "softmax": [layer for layer in layers if layer in kept[best]]}
    told["alone"] = {layer: result.to_dict() for layer, result in alone.items()}
    told.update({name: {"softmax": sorted(kept[name]), **result.to_dict()} for name, result in scores.items()})
    return told
