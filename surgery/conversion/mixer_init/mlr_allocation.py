"""Allocate a key-cache budget for MLR attention.

A forward and a backward pass of the unconverted model measure how sensitive the loss is to each score dimension of each
layer at each distance (ScoreFisherPass). From these sensitivities follow the ranks, the extents (distances up to which
a dimension is kept) and the order of the dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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
from surgery.mixers.common.softmax import group_heads
from surgery.mixers.mlr import MLR, MLRAttention, unrotated_dims
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.targets import Plan


class QueryKeyMoments:
    """Moments of queries and keys over the F dims that RoPE does not rotate, for the basis of each key/value group.

    query_GFF, key_GFF: sums of q q^T and k k^T. key_sum_GF: sum of k over `keys` tokens.
    """

    def __init__(self, shape: AttentionShape, device: torch.device):
        free = unrotated_dims(shape)
        self.shape, self.keys = shape, 0
        self.query_GFF = torch.zeros(shape.groups, free, free, dtype=torch.float64, device=device)
        self.key_GFF = torch.zeros_like(self.query_GFF)
        self.key_sum_GF = torch.zeros_like(self.query_GFF[..., 0])

    @torch.no_grad()
    def add(self, inputs: MixerInputs) -> None:
        """Accumulate the moments of a chunk of samples; padding is left out."""
        groups, free = self.query_GFF.shape[:2]
        q_BTHF, k_BTGF = (x[..., -free:].float().transpose(1, 2) for x in (inputs.q_BHTK, inputs.k_BGTK))
        real = slice(None) if inputs.valid_BT is None else inputs.valid_BT
        q_GNF = q_BTHF[real].unflatten(-2, (groups, -1)).movedim(-3, 0).flatten(1, -2)
        k_GNF = k_BTGF[real].movedim(-2, 0).flatten(1, -2)
        self.query_GFF += (q_GNF.mT @ q_GNF).double()
        self.key_GFF += (k_GNF.mT @ k_GNF).double()
        self.key_sum_GF += k_GNF.sum(1)
        self.keys += k_GNF.shape[1]

    def basis(self) -> ScoreBasis:
        """Return the basis whose first n dims have the least squared error of all rank-n scores, for every n.

        Keys are centered, as the softmax cancels what is the same for all keys of a query; with a softcap it does not.
        """
        center_GF, key_GFF = None, self.key_GFF
        if self.shape.softcap is None:
            center_GF = self.key_sum_GF / max(1, self.keys)
            key_GFF = key_GFF - self.keys * center_GF.unsqueeze(-1) * center_GF.unsqueeze(-2)
        query_basis_GFF, key_basis_GFF = balanced_basis(self.query_GFF, key_GFF)
        return ScoreBasis(
            query_basis_GFF.float(), key_basis_GFF.float(), None if center_GF is None else center_GF.float()
        )


class ScoreBasis(NamedTuple):
    """q . k = q A . k B for the dims that RoPE does not rotate: A, B (G, F, F), and the center (G, F) of the keys, or
    None.
    """

    query_GFF: Tensor
    key_GFF: Tensor
    center_GF: Tensor | None

    def apply_to(self, config: MLR) -> tuple[MLR, dict[str, Any]]:
        """Return the config with this basis, and the mixer's tensors by name."""
        tensors = {"query_basis": self.query_GFF.tolist(), "key_basis": self.key_GFF.tolist()}
        if self.center_GF is None:
            return replace(config, basis="turned"), tensors
        return replace(config, basis="centered"), tensors | {"key_center": self.center_GF.tolist()}


class RecordingAttention(MLRAttention):
    """Full-rank attention that records statistics: `moments` in the forward pass, or `sensitivity` in the backward
    pass, from the gradient at the attention's output."""

    def __init__(self, shape: AttentionShape, moments: QueryKeyMoments | None, sensitivity: ScoreSensitivity | None):
        config = MLR((shape.key,))
        tensors: dict[str, Any] = {}
        if moments is not None and sensitivity is not None:
            config, tensors = moments.basis().apply_to(config)
        super().__init__(config, shape)
        for name, value in tensors.items():
            self.state_dict()[name].copy_(torch.tensor(value))
        self.moments, self.sensitivity = moments, sensitivity

    def mix(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        """Return the attention output (B, H, T, V) unchanged; record the inputs or register the gradient hook."""
        out_BHTV, _ = super().mix(inputs)
        sensitivity = self.sensitivity
        if sensitivity is None and self.moments is not None:
            self.moments.add(inputs)
        elif sensitivity is not None and out_BHTV.requires_grad:
            out_BHTV.register_hook(lambda grad_BHTV: sensitivity.add(self._turned(inputs), grad_BHTV))
        return out_BHTV, None

    def _turned(self, inputs: MixerInputs) -> MixerInputs:
        """Return the inputs with queries and keys in the basis, if there is one."""
        if self.config.basis == "own":
            return inputs
        q_BGJTK = self.turn(group_heads(inputs.q_BHTK.detach().float(), self.shape.groups))
        return replace(inputs, q_BHTK=q_BGJTK.flatten(1, 2), k_BGTK=self.turn(inputs.k_BGTK.detach().float()))


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
        elif unrotated_dims(target.shape) > 1:
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
    query and key moments, for layers with dims that RoPE does not rotate."""

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


class MeasuredScoreDims:
    """Sensitivities of the score dimensions of all attention targets, measured in one pass by one process.

    context: tokens of the sequence whose cache is allocated.
    """

    def __init__(self, ctx: ConversionContext):
        settings = ctx.recipe.attention
        assert settings is not None
        length = next(iter(ctx.samples.inputs.values())).shape[1]
        self.plan, self.context = ctx.plan, settings.context or length
        with ctx.progress.bar("measuring the score dimensions", len(ctx.plan.layout.layers)) as tick:
            self.fisher_pass = ScoreFisherPass(ctx.model, ctx.plan, ctx.recipe, ctx.runner, ctx.grams_dir, tick)
            ladder = settings.ladder
            self.fisher_pass.extents = candidate_extents(length) if ladder is None else (0, *sorted(ladder), UNLIMITED)
            self.fisher_pass.run(ctx.samples)

    def allocate(self, layers: Sequence[str], cache: float) -> dict[str, dict[str, Any]]:
        """Return layer -> {"config", "fixed", "rise"} for layers of one shape that share a budget; see
        `allocate_score_dims`.
        """
        sensitivities = [self.fisher_pass.sensitivities[layer] for layer in layers]
        chosen: dict[str, dict[str, Any]] = {}
        for layer, allocation in zip(layers, allocate_ranks(sensitivities, cache, self.context)):
            target = self.plan.attention_targets[layer]
            fixed = {"order": allocation.order_GK.tolist()}
            if allocation.near_HL.shape[1]:
                fixed["near"] = allocation.near_HL.tolist()
            config = replace(allocation.config, form=target.config.form)  # type: ignore[attr-defined]
            if layer in self.fisher_pass.query_key_moments and config.ranks != (target.shape.key,):
                config, tensors = self.fisher_pass.query_key_moments[layer].basis().apply_to(config)
                fixed |= tensors
            chosen[layer] = {"config": config.to_dict(), "fixed": fixed, "rise": allocation.rise}
        return chosen


def allocate_score_dims(ctx: ConversionContext) -> dict[str, dict[str, Any]]:
    """Allocate the key-cache budget of the recipe over layers, distances and score dimensions. With the recipe's
    `cache`, layers of one shape share the budget; with that of a rule, each layer has its own.

    Returns layer -> {"config", "fixed": mixer tensors ("order", "near", bases), "rise": expected rise of the loss, nats
    per token}; see surgery.conversion.mixer_init.mlr_ranks.allocate_ranks. One process runs all samples.
    """
    settings = ctx.recipe.attention
    assert settings is not None
    targets = {layer: target for layer, target in ctx.plan.attention_targets.items() if target.cache is not None}
    measured = MeasuredScoreDims(replace(ctx, plan=replace(ctx.plan, attention_targets=targets)))
    sharing: dict[Any, list[str]] = {}
    for layer, target in targets.items():
        sharing.setdefault(layer if settings.cache is None else target.shape, []).append(layer)
    chosen: dict[str, dict[str, Any]] = {}
    for layers in sharing.values():
        cache = targets[layers[0]].cache
        assert cache is not None
        chosen |= measured.allocate(layers, cache)
    return chosen


def allocated_targets(plan: Plan, chosen: dict[str, dict[str, Any]]) -> dict[str, AttentionTarget]:
    """Return the plan's attention targets by layer, with the configs and tensors from `allocate_score_dims`."""
    return {
        layer: replace(target, config=mixer_config(chosen[layer]["config"]), fixed=chosen[layer]["fixed"])
        if layer in chosen
        else target
        for layer, target in plan.attention_targets.items()
    }
