"""Choose the attention layers that keep softmax in a hybrid model, by sensitivity.

Two choices are compared by held-out loss: the layers whose mixer alone raises the loss most, and as many evenly spaced
layers. A layer's sensitivity is measured on the loss of the whole model, because the layer's own output error predicts
it badly.

All contenders run through the model in one pass: the samples to fit once, unchanged, and the held-out samples once more
for each contender, with mixers in that contender's layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from surgery.calibration.attention_samples import AttentionSamples, all_attention_replaced
from surgery.calibration.layer_runner import LayerCall, Phase, run_phases
from surgery.conversion.context import ConversionContext, RowGroups, rows_of
from surgery.conversion.mixer_init.base import InitializedMixer, build_mixer, select_init
from surgery.conversion.replacement import broadcast_mixer
from surgery.conversion.score import HeldOutScore, held_out_score
from surgery.mixers import Mixer
from surgery.planning.attention_recipe import HybridRecipe
from surgery.planning.plan import Plan

TRIAL_STEPS_SHARE = 0.25  # share of the recipe's local training steps that a mixer gets in a trial


class MixerTrial:
    """Score sets of layers whose attention is replaced by mixers, on the held-out samples.

    `mixers`, by layer, are initialized on the original model's inputs when a trial first needs them, and reused in
    later trials.
    """

    def __init__(self, ctx: ConversionContext):
        self.ctx, self.plan, self.dist = ctx, ctx.plan, ctx.dist
        self.runner = ctx.runner.single_process()
        self.mixers: dict[str, Mixer] = {}
        self.contenders: dict[str, set[str]] = {}
        self.groups = RowGroups.for_trial(ctx.samples, 0)
        self.done: Callable[[], None] = lambda: None

    def run_distributed(self, contenders: dict[str, set[str]], done: Callable[[], None]) -> dict[str, HeldOutScore]:
        """Call `run` with the contenders dealt out to the processes; returns all scores in all processes."""
        own = {name: contenders[name] for name in list(contenders)[self.dist.index :: self.dist.count]}
        gathered = self.dist.gather(self.dist.together_or_raise(lambda: self.run(own, done) if own else {}))
        return {name: scores[name] for name in contenders for scores in gathered if name in scores}

    @torch.no_grad()
    def run(self, contenders: dict[str, set[str]], done: Callable[[], None]) -> dict[str, HeldOutScore]:
        """Return each contender's score. contenders: name -> layers with mixers. done: called after each layer."""
        self.contenders, self.done = contenders, done
        self.groups = groups = RowGroups.for_trial(self.ctx.samples, len(contenders))
        final_BTD = self.runner.run(groups.inputs(self.ctx.samples), self._visit)
        held_BTD = rows_of(final_BTD, groups.held_out)
        return {
            name: held_out_score(self.ctx, held_BTD, rows_of(final_BTD, rows))
            for name, rows in zip(contenders, groups.converted)
        }

    def _visit(self, call: LayerCall) -> Any:
        """Run all rows through one layer: the original rows unchanged, each contender's with its mixer, if it has one."""
        call.hidden_BTD = self.runner.writable_buffer(call.hidden_BTD)
        attention_target = self.plan.attention_targets.get(call.path)
        replaced: dict[str, Mixer] = {}
        if attention_target is not None and any(call.path in layers for layers in self.contenders.values()):
            if call.path not in self.mixers:
                self.mixers[call.path] = init_trial_mixer(self.ctx, call, self.groups)
            replaced = {attention_target.path: self.mixers[call.path]}
        phases: list[Phase] = [(self.groups.original.start, self.groups.original.stop, nullcontext())]
        for layers, rows in zip(self.contenders.values(), self.groups.converted):
            mixers = replaced if call.path in layers else {}
            phases.append((rows.start, rows.stop, all_attention_replaced(self.ctx.model, mixers)))
        out = run_phases(call, phases, self.runner)
        self.done()
        return out

    def broadcast_mixers(self, layers: list[str]) -> None:
        """Give every mixer to all processes, after `run_distributed` with one contender for each layer."""
        for i, layer in enumerate(layers if self.dist.count > 1 else ()):
            attention_target, owner = self.plan.attention_targets[layer], i % self.dist.count
            read = lambda at=layer: InitializedMixer(self.mixers[at], {})  # noqa: E731
            initialized = broadcast_mixer(self.dist, owner, attention_target, read, self.runner.device)
            self.mixers[layer] = initialized.mixer.eval().requires_grad_(False)


def init_trial_mixer(ctx: ConversionContext, call: LayerCall, groups: RowGroups) -> Mixer:
    """Return the mixer of a layer, initialized on the original's inputs with TRIAL_STEPS_SHARE of the recipe's local steps."""
    attention_target, settings = ctx.plan.attention_targets[call.path], ctx.recipe.attention
    assert settings is not None
    rotated = build_mixer(attention_target, torch.device("meta")).rotated
    fit, held = (
        AttentionSamples(ctx.model, call, attention_target, rows, converted_offset=0, rotated=rotated)
        for rows in (groups.fit, groups.held_out)
    )
    few = settings.model_copy(update={"steps": round(TRIAL_STEPS_SHARE * settings.steps)})
    initialized = select_init(attention_target.config, few).init(attention_target, few, fit, held)
    return initialized.mixer.eval().requires_grad_(False)


def evenly_spaced(plan: Plan, hybrid: HybridRecipe) -> set[str]:
    """Return as many evenly spaced layers as the recipe keeps with softmax."""
    indices = hybrid.model_copy(update={"by": "every"}).fixed_layers(list(plan.attention_targets.values()))
    return {layer for layer, target in plan.attention_targets.items() if target.index in indices}


def choose_hybrid(ctx: ConversionContext, hybrid: HybridRecipe) -> dict[str, Any]:
    """Return the report's "hybrid" entry; its "softmax" lists the layers that keep softmax attention."""
    plan, progress = ctx.plan, ctx.progress
    trial, layers = MixerTrial(ctx), list(plan.attention_targets)
    count = hybrid.softmax_count(len(layers))
    with progress.bar("measuring the loss of each mixer", len(plan.layout.layers)) as tick:
        alone = trial.run_distributed({layer: {layer} for layer in layers}, tick)
    trial.broadcast_mixers(layers)
    by_sensitivity = set(sorted(layers, key=lambda layer: -alone[layer].converted)[:count])
    kept = {"sensitivity": by_sensitivity, "every": evenly_spaced(plan, hybrid)}
    with progress.bar("comparing choices of softmax layers", len(plan.layout.layers)) as tick:
        scores = trial.run_distributed({name: set(layers) - softmax for name, softmax in kept.items()}, tick)
    best = min(scores, key=lambda name: scores[name].converted)
    choice: dict[str, Any] = {"kept": best, "softmax": [layer for layer in layers if layer in kept[best]]}
    choice["alone"] = {layer: result.to_dict() for layer, result in alone.items()}
    choice.update({name: {"softmax": sorted(kept[name]), **result.to_dict()} for name, result in scores.items()})
    return choice
