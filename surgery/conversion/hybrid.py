"""Choose the key/value heads that keep softmax in a hybrid model, by sensitivity; layers are chosen by
surgery.conversion.gated or surgery.conversion.restored.

Two choices are compared by held-out loss: the heads that are most sensitive, and as many evenly spaced ones. The
sensitivity of a head is the relative change of its layer's output, the residual stream y behind the layer, if this head
alone gets the mixer:

    e_g = sqrt(mean_t |y_t(g) - y_t|^2 / |y_t|^2)      t: real tokens of the held-out samples

All heads of all layers are ranked together, so layers may keep different numbers of them.

All contenders run through the model in one pass: the samples to fit once, unchanged, and the held-out samples once more
for each contender, with mixers in that contender's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from surgery.calibration.attention_samples import AttentionSamples, all_attention_replaced
from surgery.calibration.data import unpadded_rows
from surgery.calibration.layer_runner import LayerCall
from surgery.conversion.blended import BlendedAttention, gates_of
from surgery.conversion.context import ConversionContext
from surgery.conversion.mixer_init.base import ERROR_CAP, InitializedMixer, build_mixer, select_init
from surgery.conversion.replacement import broadcast_mixer
from surgery.conversion.score import HeldOutScore, held_out_score
from surgery.conversion.streams import Contexts, Layer, Streams, rows_of
from surgery.mixers import Mixer
from surgery.planning.attention_recipe import HybridRecipe
from surgery.planning.targets import Plan

TRIAL_STEPS_SHARE = 0.25  # share of the recipe's local training steps that a mixer gets in a trial


Unit = tuple[str, int]  # a layer and one of its key/value heads
Contender = Mapping[str, Sequence[int]]  # layers with mixers -> their key/value heads that keep softmax


class MixerTrial:
    """Score sets of layers whose attention is replaced by mixers, in all heads or in some, on the held-out samples.

    `mixers`, by layer, are initialized on the original model's inputs when a trial first needs them, and reused in
    later trials.
    """

    def __init__(self, ctx: ConversionContext):
        self.ctx, self.plan, self.dist = ctx, ctx.plan, ctx.dist
        self.runner = ctx.runner.single_process()
        self.mixers: dict[str, Mixer] = {}
        self.contenders: Mapping[str, Contender] = {}

    def run_distributed(self, contenders: Mapping[str, Contender], done: Callable[[], None]) -> dict[str, HeldOutScore]:
        """Call `run` with the contenders dealt out to the processes; returns all scores in all processes."""
        local_contenders = {name: contenders[name] for name in list(contenders)[self.dist.index :: self.dist.count]}
        gathered = self.dist.gather(
            self.dist.together_or_raise(lambda: self.run(local_contenders, done) if local_contenders else {})
        )
        return {name: scores[name] for name in contenders for scores in gathered if name in scores}

    def run(self, contenders: Mapping[str, Contender], done: Callable[[], None]) -> dict[str, HeldOutScore]:
        """Return each contender's score, by its name. done: called after each layer."""
        self.contenders, samples = contenders, self.ctx.samples
        final = Streams.of_trial(self.runner, samples, contenders).run(self, done)
        held_BTD = rows_of(final["original"], samples.held_out)
        return {name: held_out_score(self.ctx, held_BTD, final[name]) for name in contenders}

    def visit(self, layer: Layer) -> Contexts:
        """Run the original rows unchanged, and each contender's with the layer's mixer, if it has one there."""
        path, target = layer.path, self.plan.attention_targets.get(layer.path)
        is_used = target is not None and any(path in layers for layers in self.contenders.values())
        if is_used and path not in self.mixers:
            self.mixers[path] = init_trial_mixer(self.ctx, layer.call)
        contexts: dict[str, AbstractContextManager[Any]] = {"original": nullcontext()}
        for name, layers in self.contenders.items():
            mixers = {}
            if target is not None and path in layers:
                mixers = {target.path: partly_replaced(self.mixers[path], layers[path])}
            contexts[name] = all_attention_replaced(self.ctx.model, mixers)
        return contexts

    def broadcast_mixers(self, layers: list[str]) -> None:
        """Give every mixer to all processes, after `run_distributed` with one contender for each layer."""
        for i, layer in enumerate(layers if self.dist.count > 1 else ()):
            attention_target, owner = self.plan.attention_targets[layer], i % self.dist.count
            read = lambda at=layer: InitializedMixer(self.mixers[at], {})  # noqa: E731
            initialized = broadcast_mixer(self.dist, owner, attention_target, read, self.runner.device)
            self.mixers[layer] = initialized.mixer.eval().requires_grad_(False)


def partly_replaced(mixer: Mixer, heads: Sequence[int]) -> Mixer:
    """Return the attention with softmax in these key/value heads and the mixer, which has all heads, in the
    others.
    """
    device = next((tensor.device for tensor in mixer.state_dict().values()), torch.device("cpu"))
    return BlendedAttention(mixer, gates_of(heads, mixer.shape, device)) if heads else mixer


def init_trial_mixer(ctx: ConversionContext, call: LayerCall) -> Mixer:
    """Return the mixer of a layer, initialized on the original's inputs with TRIAL_STEPS_SHARE of the recipe's local
    steps.

    call: with all calibration samples in its first rows, as they leave the original layers below.
    """
    attention_target, settings = ctx.plan.attention_targets[call.path], ctx.recipe.attention
    assert settings is not None
    rotated = build_mixer(attention_target, torch.device("meta")).rotated
    fit, held = (
        AttentionSamples(ctx.model, call, attention_target, rows, converted_offset=0, rotated=rotated)
        for rows in (ctx.samples.fit, ctx.samples.held_out)
    )
    few = settings.model_copy(update={"steps": round(TRIAL_STEPS_SHARE * settings.steps)})
    initialized = select_init(attention_target.config, few).init(attention_target, few, fit, held)
    return initialized.mixer.eval().requires_grad_(False)


def evenly_spaced(plan: Plan, hybrid: HybridRecipe) -> set[str]:
    """Return as many evenly spaced layers as the recipe keeps with softmax."""
    indices = hybrid.model_copy(update={"choose_by": "every"}).fixed_layers(list(plan.attention_targets.values()))
    return {layer for layer, target in plan.attention_targets.items() if target.index in indices}


# -- by heads --------------------------------------------------------------------------------------
class HeadErrors:
    """A pass that measures how much each head changes the output of its layer when it alone gets the mixer.

    layers: those that it measures. mixers, errors: layer -> its mixer, and e_g of its key/value heads.
    """

    def __init__(self, ctx: ConversionContext, layers: Sequence[str]):
        self.ctx, self.plan, self.runner = ctx, ctx.plan, ctx.runner.single_process()
        self.layers = set(layers)
        self.mixers: dict[str, Mixer] = {}
        self.errors: dict[str, list[float]] = {}

    def run(self, done: Callable[[], None]) -> dict[str, list[float]]:
        """Return the errors by layer. done: called after each layer."""
        if self.layers:
            Streams.of_trial(self.runner, self.ctx.samples).run(self, done)
        return self.errors

    def visit(self, layer: Layer) -> Contexts:
        """Initialize the layer's mixer and measure its heads; the original goes on unchanged."""
        if layer.path in self.layers:
            self.mixers[layer.path] = init_trial_mixer(self.ctx, layer.call)
            self.errors[layer.path] = self._head_errors(layer.call, self.mixers[layer.path])
        return {"original": nullcontext()}

    def _head_errors(self, call: LayerCall, mixer: Mixer) -> list[float]:
        """Return e_g of each key/value head of a layer."""
        target = self.plan.attention_targets[call.path]
        held, groups = self.ctx.samples.held_out, target.shape.groups
        step, masks_BT = self.runner.chunk_rows(call.hidden_BTD.shape[1]), self._token_masks(call)
        total_G, tokens = torch.zeros(groups, dtype=torch.float64), 0
        for first in range(held.start, held.stop, step):
            last = min(first + step, held.stop)
            real = [mask_BT[first:last] for mask_BT in masks_BT]
            output_ND = unpadded_rows(first_output(call.apply(first, last)), *real).double()
            energy_N = output_ND.square().sum(-1).clamp_min(1e-30)
            tokens += len(output_ND)
            for group in range(groups):
                blended = partly_replaced(mixer, [other for other in range(groups) if other != group])
                with all_attention_replaced(self.ctx.model, {target.path: blended}):
                    blended_ND = unpadded_rows(first_output(call.apply(first, last)), *real).double()
                total_G[group] += ((blended_ND - output_ND).square().sum(-1) / energy_N).sum().cpu()
        return [min(x, ERROR_CAP) if x == x else ERROR_CAP for x in (total_G / max(tokens, 1)).sqrt().tolist()]

    def _token_masks(self, call: LayerCall) -> list[torch.Tensor]:
        return list(self.ctx.samples.token_masks(self.plan.layout.tower(call.path)))


def first_output(out: Any) -> torch.Tensor:
    """Return the hidden states that a layer returns, (B, T, D)."""
    hidden: torch.Tensor = out if isinstance(out, torch.Tensor) else out[0]
    return hidden


def measure_heads(trial: MixerTrial, done: Callable[[], None]) -> dict[str, list[float]]:
    """Return the errors of all heads by layer, in all processes, which share the layers.

    Gives the trial its mixers. done: called after each layer.
    """
    layers, dist = list(trial.plan.attention_targets), trial.dist
    measured = HeadErrors(trial.ctx, layers[dist.index :: dist.count])
    errors_of_processes = dist.gather(dist.together_or_raise(lambda: measured.run(done)))
    trial.mixers = measured.mixers
    trial.broadcast_mixers(layers)
    return {layer: errors[layer] for layer in layers for errors in errors_of_processes if layer in errors}


def choose_heads(ctx: ConversionContext, hybrid: HybridRecipe) -> dict[str, Any]:
    """Return the report's "hybrid" entry; its "heads" lists the key/value heads of each layer that keep softmax
    attention.
    """
    plan, progress, trial = ctx.plan, ctx.progress, MixerTrial(ctx)
    with progress.bar("measuring the error of each head", len(plan.layout.layers)) as tick:
        errors = measure_heads(trial, tick)
    ranked = sorted(
        ((layer, head) for layer, head_errors in errors.items() for head in range(len(head_errors))),
        key=lambda unit: -errors[unit[0]][unit[1]],
    )
    choices = {
        "measured": heads_by_layer(plan, ranked[: hybrid.softmax_count(len(ranked))]),
        "every": evenly_spaced_heads(plan, hybrid),
    }
    with progress.bar("comparing choices of softmax heads", len(plan.layout.layers)) as tick:
        scores = trial.run_distributed(dict(choices), tick)
    best = min(scores, key=lambda name: scores[name].converted)
    chosen = choices[best]
    softmax = [layer for layer, target in plan.attention_targets.items() if len(chosen[layer]) == target.shape.groups]
    return {
        "kept": best,
        "softmax": softmax,
        "heads": chosen,
        "head_errors": errors,
        **{name: {"heads": choices[name], **scores[name].to_dict()} for name in choices},
    }


def heads_by_layer(plan: Plan, units: Sequence[Unit]) -> dict[str, list[int]]:
    """Return the key/value heads of each layer with mixers among `units` (layer, head), in order."""
    return {layer: sorted(head for at, head in units if at == layer) for layer in plan.attention_targets}


def evenly_spaced_heads(plan: Plan, hybrid: HybridRecipe) -> dict[str, list[int]]:
    """Return as many evenly spaced heads as the recipe keeps with softmax, by layer."""
    heads = hybrid.model_copy(update={"choose_by": "every"}).fixed_heads(list(plan.attention_targets.values()))
    return {layer: list(heads[target.index]) for layer, target in plan.attention_targets.items()}
