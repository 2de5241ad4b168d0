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
from surgery.calibration.layer_runner import LayerCall, LayerRunner, Phase, run_phases
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
    """contenders: name -> layers with mixers; run() gives each one's score on the batch's held-out windows. `mixers`,
    by layer, are initialized on the original's inputs when first met, and kept from trial to trial."""

    def __init__(
        self, meta_model: MetaModel, plan: Plan, recipe: ConversionRecipe, batch: CalibrationSet, runner: LayerRunner
    ):
        self.meta_model, self.plan, self.recipe, self.batch = meta_model, plan, recipe, batch
        self.runner, self.ranks = runner.single_process(), runner.ranks
        self.mixers: dict[str, Mixer] = {}
        self.contenders: dict[str, set[str]] = {}
        self.done: Callable[[], None] = lambda: None

    def run_distributed(self, contenders: dict[str, set[str]], done: Callable[[], None]) -> dict[str, HeldOutScore]:
        """`run`, every process with contenders of its own: none waits for another's mixers."""
        own = {name: contenders[name] for name in list(contenders)[self.ranks.index :: self.ranks.count]}
        found = self.ranks.gather(self.ranks.together_or_raise(lambda: self.run(own, done) if own else {}))
        return {name: scores[name] for name in contenders for scores in found if name in scores}

    @torch.no_grad()
    def run(self, contenders: dict[str, set[str]], done: Callable[[], None]) -> dict[str, HeldOutScore]:
        self.contenders, self.done = contenders, done
        batch, many = self.batch, len(contenders)
        inputs = {k: torch.cat([v, *[v[batch.n_fit :]] * many]) for k, v in batch.inputs.items()}
        final_BTD = self.runner.run(inputs, self._visit)
        scores = {}
        for name, rows in zip(contenders, final_BTD[batch.rows :].chunk(many)):
            both_BTD = torch.cat([final_BTD[: batch.rows], final_BTD[: batch.n_fit], rows])
            scores[name] = held_out_score(self.meta_model, self.plan, batch, both_BTD, None, self.runner.device)
        return scores

    def _visit(self, call: LayerCall) -> Any:
        call.hidden_BTD = self.runner.writable_buffer(call.hidden_BTD)
        batch, attention_target = self.batch, self.plan.attention_targets.get(call.path)
        wanted = any(call.path in layers for layers in self.contenders.values())
        if attention_target is not None and wanted and call.path not in self.mixers:
            self.mixers[call.path] = self._init_mixer(call)
        held = batch.rows - batch.n_fit
        phases: list[Phase] = [(0, batch.rows, nullcontext())]
        here = {attention_target.path: self.mixers[call.path]} if attention_target is not None and wanted else {}
        for i, layers in enumerate(self.contenders.values()):
            mixers = here if call.path in layers else {}
            first = batch.rows + i * held
            phases.append((first, first + held, all_attention_replaced(self.meta_model, mixers)))
        out = run_phases(call, phases, self.runner)
        self.done()
        return out

    def broadcast_mixers(self, layers: list[str]) -> None:
        """After `run_distributed` with one layer a contender: everybody has every mixer."""
        for i, layer in enumerate(layers if self.ranks.count > 1 else ()):
            attention_target, owner, device = (
                self.plan.attention_targets[layer],
                i % self.ranks.count,
                self.runner.device,
            )
            read = lambda at=layer: InitializedMixer(self.mixers[at], {})  # noqa: E731
            initialized = broadcast_mixer(self.ranks, owner, attention_target, read, device)
            self.mixers[layer] = initialized.mixer.eval().requires_grad_(False)

    def _init_mixer(self, call: LayerCall) -> Mixer:
        attention_target, settings = self.plan.attention_targets[call.path], self.recipe.attention
        assert settings is not None
        rotated = build_mixer(attention_target, torch.device("meta")).rotated
        fit, held = (
            AttentionSamples(self.meta_model, call, attention_target, first, last, 0, rotated)
            for first, last in ((0, self.batch.n_fit), (self.batch.n_fit, self.batch.rows))
        )
        few = settings.model_copy(update={"steps": round(TRIAL_STEPS_SHARE * settings.steps)})
        return (
            select_init(attention_target.config, few)
            .init(attention_target, few, fit, held)
            .mixer.eval()
            .requires_grad_(False)
        )


def choose_hybrid(
    meta_model: MetaModel,
    plan: Plan,
    recipe: ConversionRecipe,
    hybrid: HybridRecipe,
    batch: CalibrationSet,
    runner: LayerRunner,
    progress: Progress,
) -> dict[str, Any]:
    """What the report says of the choice; "softmax": the layers that keep theirs."""
    trial, layers = MixerTrial(meta_model, plan, recipe, batch, runner), list(plan.attention_targets)
    count = hybrid.softmax_count(len(layers))
    with progress.bar("measuring what each mixer costs", len(plan.layout.layers)) as tick:
        alone = trial.run_distributed({layer: {layer} for layer in layers}, tick)
    trial.broadcast_mixers(layers)
    by_damage = set(sorted(layers, key=lambda layer: -alone[layer].converted)[:count])
    numbers = hybrid.model_copy(update={"by": "every"}).fixed_layers(list(plan.attention_targets.values()))
    evenly = {layer for layer, attention_target in plan.attention_targets.items() if attention_target.index in numbers}
    kept = {"sensitivity": by_damage, "every": evenly}
    with progress.bar("trying which layers keep softmax", len(plan.layout.layers)) as tick:
        scores = trial.run_distributed({name: set(layers) - layers_kept for name, layers_kept in kept.items()}, tick)
    best = min(scores, key=lambda name: scores[name].converted)
    choice: dict[str, Any] = {"kept": best, "softmax": [layer for layer in layers if layer in kept[best]]}
    choice["alone"] = {layer: result.to_dict() for layer, result in alone.items()}
    choice.update({name: {"softmax": sorted(kept[name]), **result.to_dict()} for name, result in scores.items()})
    return choice
