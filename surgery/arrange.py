"""MLR attention under a budget of key cache: what every layer's score dims are worth at every distance, gathered on the
way back through the unconverted model, and the ranks, extents and orders that follow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from surgery.batch import Batch
from surgery.curvature import Survey
from surgery.mixers import Inputs, State
from surgery.mixers.base import mixer_config
from surgery.mixers.mlr import MLR, MLRAttention
from surgery.mlr_start import EVERYWHERE, Damage, allocate, ladder
from surgery.plan import Plan
from surgery.progress import Progress
from surgery.recipe import Recipe
from surgery.seats import Seat
from surgery.skeleton import Skeleton
from surgery.stream import LayerCall, Stream
from surgery.windows import seated


class Watched(MLRAttention):
    """The library's attention; `damage` is told of every call and of the gradient that comes back to it."""

    def __init__(self, seat: Seat, damage: Damage):
        super().__init__(MLR((seat.shape.key,)), seat.shape)
        self.damage = damage

    def mix(self, inputs: Inputs, state: State | None = None) -> tuple[Tensor, State | None]:
        out_BHTV, _ = super().mix(inputs)
        if out_BHTV.requires_grad:
            out_BHTV.register_hook(lambda grad_BHTV: self.damage.add(inputs, grad_BHTV))
        return out_BHTV, None


class Watching:
    """Around the way back through one layer."""

    def __init__(self, survey: ScoreSurvey, call: LayerCall):
        self.survey, self.seat, self.stack = survey, survey.plan.seats.get(call.path), ExitStack()

    def __enter__(self) -> None:
        if self.seat is not None:
            damage = Damage(self.seat.shape, self.survey.extents, self.survey.stream.device)
            self.survey.damages[self.seat.layer] = damage
            module = self.survey.skeleton.module(self.seat.path)
            self.stack.enter_context(seated(module, Watched(self.seat, damage).to(self.survey.stream.device)))

    def __exit__(self, *_: Any) -> None:
        self.stack.close()

    def record(self) -> None:
        """Nothing is written: the forms are small, and what follows from them goes into the journal."""


class ScoreSurvey(Survey):
    """damages: layer -> its quadratic form."""

    def __init__(
        self, skeleton: Skeleton, plan: Plan, recipe: Recipe, stream: Stream, folder: Path, done: Callable[[], None]
    ):
        super().__init__(skeleton, replace(plan, cuts={}), recipe, stream, folder, done)
        self.extents: tuple[int, ...] = ()
        self.damages: dict[str, Damage] = {}

    def gathering(self, call: LayerCall) -> Any:
        return Watching(self, call)


def arrange(
    skeleton: Skeleton, plan: Plan, recipe: Recipe, batch: Batch, stream: Stream, folder: Path, progress: Progress
) -> dict[str, dict[str, Any]]:
    """layer -> {"config", "fixed": {"order", "near"}, "rise"}: see surgery.mlr_start.allocate."""
    settings = recipe.attention
    assert settings is not None and settings.cache is not None
    length = next(iter(batch.inputs.values())).shape[1]
    with progress.bar("measuring what score dims are worth", len(plan.body.layers)) as tick:
        survey = ScoreSurvey(skeleton, plan, recipe, stream, folder, tick)
        given = settings.ladder
        survey.extents = ladder(length) if given is None else (0, *sorted(given), EVERYWHERE)
        survey.run(batch)
    by_shape: dict[Any, list[str]] = {}
    for layer, seat in plan.seats.items():
        by_shape.setdefault(seat.shape, []).append(layer)
    chosen: dict[str, dict[str, Any]] = {}
    for layers in by_shape.values():
        damages = [survey.damages[layer] for layer in layers]
        for layer, found in zip(layers, allocate(damages, settings.cache, settings.context or length)):
            fixed = {"order": found.order_GK.tolist()}
            if found.near_HL.shape[1]:
                fixed["near"] = found.near_HL.tolist()
            config = replace(found.config, form=plan.seats[layer].config.form)  # type: ignore[attr-defined]
            chosen[layer] = {"config": config.to_dict(), "fixed": fixed, "rise": found.rise}
    return chosen


def arranged_seats(plan: Plan, chosen: dict[str, dict[str, Any]]) -> dict[str, Seat]:
    """The plan's seats with what `arrange` found."""
    return {
        layer: replace(seat, config=mixer_config(chosen[layer]["config"]), fixed=chosen[layer]["fixed"])
        for layer, seat in plan.seats.items()
    }
