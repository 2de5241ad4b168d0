"""Allocate a key-cache budget for MLR attention.

A forward and a backward pass of the unconverted model measure how sensitive the loss is to each score dimension of each
layer at each distance (ScoreFisherPass). From these sensitivities follow the ranks, the extents (distances up to which
a dimension is kept) and the order of the dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.attention_samples import attention_replaced
from surgery.calibration.layer_runner import LayerCall, LayerRunner
from surgery.checkpoint.meta_model import MetaModel
from surgery.conversion.context import ConversionContext
from surgery.conversion.fisher import FisherPass
from surgery.conversion.gradients import LayerBackward
from surgery.conversion.mixer_init.mlr_ranks import (
    UNLIMITED,
    ScoreSensitivity,
    allocate_ranks,
    balanced_basis,
    candidate_extents,
)
from surgery.mixers import AttentionShape, MixerInputs, MixerState
from surgery.mixers.base import mixer_config
from surgery.mixers.mlr import MLR, MLRAttention
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.targets import Plan


class QueryKeyMoments:
    """Second moments of the queries and keys of each key/value group, (G, K, K), for the basis of heads without
    RoPE.
    """

    def __init__(self, shape: AttentionShape, device: torch.device):
        self.query_GKK = torch.zeros(shape.groups, shape.key, shape.key, device=device)
        self.key_GKK = torch.zeros_like(self.query_GKK)

    @torch.no_grad()
    def add(self, inputs: MixerInputs) -> None:
        """Accumulate the moments of a chunk of samples; padding is left out."""
        groups = self.query_GKK.shape[0]
        q_BTHK, k_BTGK = inputs.q_BHTK.float().transpose(1, 2), inputs.k_BGTK.float().transpose(1, 2)
        real = slice(None) if inputs.valid_BT is None else inputs.valid_BT
        q_GNK = q_BTHK[real].unflatten(-2, (groups, -1)).movedim(-3, 0).flatten(1, -2)
        k_GNK = k_BTGK[real].movedim(-2, 0).flatten(1, -2)
        self.query_GKK += q_GNK.mT @ q_GNK
        self.key_GKK += k_GNK.mT @ k_GNK

    def bases(self) -> tuple[Tensor, Tensor]:
        """Return A, B (G, K, K) with q A . k B = q . k, the most important dimensions first."""
        query_GKK, key_GKK = balanced_basis(self.query_GKK, self.key_GKK)
        return query_GKK.float(), key_GKK.float()


class RecordingAttention(MLRAttention):
    """Full-rank attention that records statistics: `moments` in the forward pass, or `sensitivity` in the backward
    pass, from the gradient at the attention's output."""

    def __init__(self, shape: AttentionShape, moments: QueryKeyMoments | None, sensitivity: ScoreSensitivity | None):
        super().__init__(MLR((shape.key,)), shape)
        self.moments, self.sensitivity = moments, sensitivity
        self.bases = moments.bases() if moments is not None and sensitivity is not None else None

    def mix(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        """Return the attention output (B, H, T, V) unchanged; record the inputs or register the gradient hook."""
        out_BHTV, _ = super().mix(inputs)
        sensitivity = self.sensitivity
        if sensitivity is None and self.moments is not None:
            self.moments.add(inputs)
        elif sensitivity is not None and out_BHTV.requires_grad:
            out_BHTV.register_hook(lambda grad_BHTV: sensitivity.add(self._rotate(inputs), grad_BHTV))
        return out_BHTV, None

    def _rotate(self, inputs: MixerInputs) -> MixerInputs:
        """Return the inputs with queries and keys in the balanced bases, if there are any."""
        if self.bases is None:
            return inputs
        query_GKK, key_GKK = self.bases
        q_BGJTK = inputs.q_BHTK.detach().float().unflatten(1, (self.shape.groups, -1)) @ query_GKK[:, None]
        return replace(inputs, q_BHTK=q_BGJTK.flatten(1, 2), k_BGTK=inputs.k_BGTK.detach().float() @ key_GKK)


class ScoreRecorder(LayerBackward):
    """Context that records one layer's attention in the forward pass, or in the backward pass (`back`)."""

    def __init__(self, fisher_pass: ScoreFisherPass, call: LayerCall, back: bool):
        super().__init__()
        self.fisher_pass, self.back, self.stack = fisher_pass, back, ExitStack()
        self.target = fisher_pass.plan.attention_targets.get(call.path)

    def __enter__(self) -> None:
        target, device = self.target, self.fisher_pass.runner.device
        if target is None:
            return
        sensitivity = None
        if self.back:
            sensitivity = self.fisher_pass.sensitivities[target.layer] = ScoreSensitivity(
                target.shape, self.fisher_pass.extents, device
            )
        elif not target.shape.rotary:
            self.fisher_pass.query_key_moments[target.layer] = QueryKeyMoments(target.shape, device)
        else:
            return
        recorder = RecordingAttention(
            target.shape, self.fisher_pass.query_key_moments.get(target.layer), sensitivity
        ).to(device)
        self.stack.enter_context(attention_replaced(self.fisher_pass.meta_model.module(target.path), recorder))

    def __exit__(self, *_: Any) -> None:
        self.stack.close()


class ScoreFisherPass(FisherPass):
    """Fisher pass over the attention scores. sensitivities: layer -> its quadratic form; query_key_moments: layer ->
    query and key moments, for layers without RoPE."""

    def __init__(
        self,
        meta_model: MetaModel,
        plan: Plan,
        recipe: ConversionRecipe,
        runner: LayerRunner,
        folder: Path,
        done: Callable[[], None],
    ):
        super().__init__(meta_model, replace(plan, targets={}), recipe, runner, folder, done)
        self.extents: tuple[int, ...] = ()
        self.sensitivities: dict[str, ScoreSensitivity] = {}
        self.query_key_moments: dict[str, QueryKeyMoments] = {}

    def forward_context(self, call: LayerCall) -> ScoreRecorder:
        """Return the recorder of the layer's forward pass."""
        return ScoreRecorder(self, call, back=False)

    def backward_context(self, call: LayerCall) -> ScoreRecorder:
        """Return the recorder of the layer's backward pass."""
        return ScoreRecorder(self, call, back=True)


def allocate_score_dims(ctx: ConversionContext) -> dict[str, dict[str, Any]]:
    """Allocate the key-cache budget of the recipe over layers, distances and score dimensions.

    Returns layer -> {"config", "fixed": mixer tensors ("order", "near", bases), "rise": expected rise of the loss, nats
    per token}; see surgery.conversion.mixer_init.mlr_ranks.allocate_ranks. One process runs all samples.
    """
    settings, plan = ctx.recipe.attention, ctx.plan
    assert settings is not None and settings.cache is not None
    length = next(iter(ctx.samples.inputs.values())).shape[1]
    with ctx.progress.bar("measuring the score dimensions", len(plan.layout.layers)) as tick:
        fisher_pass = ScoreFisherPass(ctx.model, plan, ctx.recipe, ctx.runner, ctx.grams_dir, tick)
        ladder = settings.ladder
        fisher_pass.extents = candidate_extents(length) if ladder is None else (0, *sorted(ladder), UNLIMITED)
        fisher_pass.run(ctx.samples)
    by_shape: dict[AttentionShape, list[str]] = {}
    for layer, target in plan.attention_targets.items():
        by_shape.setdefault(target.shape, []).append(layer)
    chosen: dict[str, dict[str, Any]] = {}
    for layers in by_shape.values():
        sensitivities = [fisher_pass.sensitivities[layer] for layer in layers]
        allocations = allocate_ranks(sensitivities, settings.cache, settings.context or length)
        for layer, allocation in zip(layers, allocations):
            fixed = {"order": allocation.order_GK.tolist()}
            if allocation.near_HL.shape[1]:
                fixed["near"] = allocation.near_HL.tolist()
            config = replace(allocation.config, form=plan.attention_targets[layer].config.form)  # type: ignore[attr-defined]
            if layer in fisher_pass.query_key_moments and config.ranks != (plan.attention_targets[layer].shape.key,):
                config = replace(config, basis="turned")
                query_GKK, key_GKK = fisher_pass.query_key_moments[layer].bases()
                fixed |= {"query_basis": query_GKK.tolist(), "key_basis": key_GKK.tolist()}
            chosen[layer] = {"config": config.to_dict(), "fixed": fixed, "rise": allocation.rise}
    return chosen


def allocated_targets(plan: Plan, chosen: dict[str, dict[str, Any]]) -> dict[str, AttentionTarget]:
    """Return the plan's attention targets by layer, with the configs and tensors from `allocate_score_dims`."""
    return {
        layer: replace(target, config=mixer_config(chosen[layer]["config"]), fixed=chosen[layer]["fixed"])
        for layer, target in plan.attention_targets.items()
    }
