"""MLR attention under a budget of key cache: what every layer's score dims are worth at every distance, gathered on the
way back through the unconverted model, and the ranks, extents and orders that follow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.attention_samples import attention_replaced
from surgery.calibration.data import CalibrationSet
from surgery.calibration.fisher import FisherPass
from surgery.calibration.layer_runner import LayerCall, LayerRunner
from surgery.calibration.partition import Round
from surgery.checkpoint.meta_model import MetaModel
from surgery.conversion.mixer_init.mlr_ranks import (
    UNLIMITED,
    ScoreSensitivity,
    allocate_ranks,
    balanced_basis,
    candidate_extents,
)
from surgery.core.progress import Progress
from surgery.mixers import AttentionShape, MixerInputs, MixerState
from surgery.mixers.base import mixer_config
from surgery.mixers.mlr import MLR, MLRAttention
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.plan import Plan
from surgery.planning.recipe import ConversionRecipe


class QueryKeyMoments:
    """Second moments of a head's queries and keys, for the basis of heads without RoPE."""

    def __init__(self, shape: AttentionShape, device: torch.device):
        self.query_GKK = torch.zeros(shape.groups, shape.key, shape.key, device=device)
        self.key_GKK = torch.zeros_like(self.query_GKK)

    @torch.no_grad()
    def add(self, inputs: MixerInputs) -> None:
        groups = self.query_GKK.shape[0]
        q_BTHK, k_BTGK = inputs.q_BHTK.float().transpose(1, 2), inputs.k_BGTK.float().transpose(1, 2)
        real = slice(None) if inputs.valid_BT is None else inputs.valid_BT
        q_GNK = q_BTHK[real].unflatten(-2, (groups, -1)).movedim(-3, 0).flatten(1, -2)
        k_GNK = k_BTGK[real].movedim(-2, 0).flatten(1, -2)
        self.query_GKK += q_GNK.mT @ q_GNK
        self.key_GKK += k_GNK.mT @ k_GNK

    def bases(self) -> tuple[Tensor, Tensor]:
        """A, B (G, K, K) with q A . k B = q . k, the dims worth most first."""
        return tuple(basis.float() for basis in balanced_basis(self.query_GKK, self.key_GKK))  # type: ignore[return-value]


class RecordingAttention(MLRAttention):
    """The library's attention, looked at: on the way there by `sizes`, on the way back, with the gradient at its
    output, by `sensitivity`."""

    def __init__(self, shape: AttentionShape, sizes: QueryKeyMoments | None, sensitivity: ScoreSensitivity | None):
        super().__init__(MLR((shape.key,)), shape)
        self.sizes, self.sensitivity = sizes, sensitivity
        self.bases = sizes.bases() if sizes is not None and sensitivity is not None else None

    def mix(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        out_BHTV, _ = super().mix(inputs)
        sensitivity = self.sensitivity
        if sensitivity is None and self.sizes is not None:
            self.sizes.add(inputs)
        elif sensitivity is not None and out_BHTV.requires_grad:
            out_BHTV.register_hook(lambda grad_BHTV: sensitivity.add(self._rotate(inputs), grad_BHTV))
        return out_BHTV, None

    def _rotate(self, inputs: MixerInputs) -> MixerInputs:
        if self.bases is None:
            return inputs
        query_GKK, key_GKK = self.bases
        q_BGJTK = inputs.q_BHTK.detach().float().unflatten(1, (self.shape.groups, -1)) @ query_GKK[:, None]
        return replace(inputs, q_BHTK=q_BGJTK.flatten(1, 2), k_BGTK=inputs.k_BGTK.detach().float() @ key_GKK)


class ScoreRecorder:
    """Around one layer, on the way there or (`back`) on the way back."""

    def __init__(self, fisher_pass: ScoreFisherPass, call: LayerCall, back: bool):
        self.fisher_pass, self.target, self.back, self.stack = (
            fisher_pass,
            fisher_pass.plan.attention_targets.get(call.path),
            back,
            ExitStack(),
        )

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
            self.fisher_pass.sizes[target.layer] = QueryKeyMoments(target.shape, device)
        else:
            return
        recorder = RecordingAttention(target.shape, self.fisher_pass.sizes.get(target.layer), sensitivity).to(device)
        self.stack.enter_context(attention_replaced(self.fisher_pass.meta_model.module(target.path), recorder))

    def __exit__(self, *_: Any) -> None:
        self.stack.close()

    def reduce_round(self, round_: Round) -> None:
        """The forms are added to as windows go by; one process sees them all."""

    def store_results(self) -> None:
        """Nothing is written: the forms are small, and what follows from them goes into the journal."""


class ScoreFisherPass(FisherPass):
    """sensitivities: layer -> its quadratic form; sizes: of layers without RoPE."""

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
        self.sizes: dict[str, QueryKeyMoments] = {}

    def forward_context(self, call: LayerCall) -> Any:
        return ScoreRecorder(self, call, back=False)

    def backward_context(self, call: LayerCall) -> Any:
        return ScoreRecorder(self, call, back=True)


def allocate_score_dims(
    meta_model: MetaModel,
    plan: Plan,
    recipe: ConversionRecipe,
    batch: CalibrationSet,
    runner: LayerRunner,
    folder: Path,
    progress: Progress,
) -> dict[str, dict[str, Any]]:
    """layer -> {"config", "fixed": {"order", "near"}, "rise"}: see surgery.conversion.mixer_init.mlr_ranks.allocate_ranks."""
    settings = recipe.attention
    assert settings is not None and settings.cache is not None
    length = next(iter(batch.inputs.values())).shape[1]
    with progress.bar("measuring what score dims are worth", len(plan.layout.layers)) as tick:
        fisher_pass = ScoreFisherPass(meta_model, plan, recipe, runner, folder, tick)
        given = settings.ladder
        fisher_pass.extents = candidate_extents(length) if given is None else (0, *sorted(given), UNLIMITED)
        fisher_pass.run(batch)
    by_shape: dict[Any, list[str]] = {}
    for layer, target in plan.attention_targets.items():
        by_shape.setdefault(target.shape, []).append(layer)
    chosen: dict[str, dict[str, Any]] = {}
    for layers in by_shape.values():
        sensitivities = [fisher_pass.sensitivities[layer] for layer in layers]
        for layer, found in zip(layers, allocate_ranks(sensitivities, settings.cache, settings.context or length)):
            fixed = {"order": found.order_GK.tolist()}
            if found.near_HL.shape[1]:
                fixed["near"] = found.near_HL.tolist()
            config = replace(found.config, form=plan.attention_targets[layer].config.form)  # type: ignore[attr-defined]
            if layer in fisher_pass.sizes and config.ranks != (plan.attention_targets[layer].shape.key,):
                config = replace(config, basis="turned")
                query_GKK, key_GKK = fisher_pass.sizes[layer].bases()
                fixed |= {"query_basis": query_GKK.tolist(), "key_basis": key_GKK.tolist()}
            chosen[layer] = {"config": config.to_dict(), "fixed": fixed, "rise": found.rise}
    return chosen


def allocated_targets(plan: Plan, chosen: dict[str, dict[str, Any]]) -> dict[str, AttentionTarget]:
    """The plan's targets with what `allocate_score_dims` found."""
    return {
        layer: replace(target, config=mixer_config(chosen[layer]["config"]), fixed=chosen[layer]["fixed"])
        for layer, target in plan.attention_targets.items()
    }
