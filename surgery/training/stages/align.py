"""Attention and MLP modules drawn to the teacher's, each on the teacher's own inputs.

    loss = mean over modules of |f(x*) - y*|^2 / |y*|^2        x*, y*: what the teacher's module reads and writes

The student runs once, and every module of interest is given the teacher's input and hands on the teacher's output: no
module sees another's errors, and no gradient leaves one, so that they train independently of each other though all at
once. The scale |y*|^2 is that of the first rows of the data, one number a module. MOHAWK's second stage, LoLCATs'
attention transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.training.sharding import sharded
from surgery.training.stages.base import (
    STAGES,
    Batch,
    Models,
    Roles,
    Stage,
    StageConfig,
    inputs_of,
    valid_BT1,
    without_head,
)

ENDS = {"attention": "attention.output", "mlp": "mlp.down"}  # roles of the linears that end the modules


class Align(StageConfig):
    """of: the modules that are aligned, where they hold something that trains."""

    name: ClassVar[str] = "align"
    of: tuple[Literal["attention", "mlp"], ...] = ("attention", "mlp")


def modules_of(kinds: tuple[str, ...], roles: Roles) -> list[str]:
    """Paths of the attention and MLP modules, in the order of the layers."""
    wanted = {ENDS[kind] for kind in kinds}
    return [path.rpartition(".")[0] for path, played in roles.items() if wanted & set(played)]


@STAGES.register(Align)
class AlignStage(Stage):
    config: Align
    places: list[str]

    def __init__(self, config: Any):
        super().__init__(config)
        self.scales: dict[str, Tensor] = {}
        self.spread = False

    @property
    def needs_teacher(self) -> Literal["model"]:
        return "model"

    def prepare(self, models: Models, roles: Roles) -> None:
        if self.config.memory == "checkpoint":
            raise SurgeryError(
                "stage align: memory: checkpoint has nothing to save, no gradient passes from layer to layer; keep"
            )
        trained = self.trains(models, roles)
        self.places = [p for p in modules_of(self.config.of, roles) if any(n.startswith(f"{p}.") for n in trained)]
        theirs = {name for name, _ in models.teacher.named_modules()}
        if lost := [place for place in self.places if place not in theirs]:
            raise SurgeryError(
                f"stage align: the teacher has no {lost[0]}; give the checkpoint the student was made of"
            )

    def trains(self, models: Models, roles: Roles) -> set[str]:
        inside = tuple(f"{place}." for place in modules_of(self.config.of, roles))
        names = super().trains(models, roles)
        able = {name for name in names if name.startswith(inside)}
        if not able:
            raise SurgeryError(
                f"stage align: trains {', '.join(self.config.trains)} selects nothing inside {' or '.join(self.config.of)} "
                "modules, which are all that it reaches; try trains: [new], or [attention]"
            )
        return able

    def counted(self, example: Batch) -> int:
        return int(example["valid"].sum())

    @torch.no_grad()
    def measure(self, models: Models, batch: Batch) -> None:
        valid = valid_BT1(batch)
        for place, (_, y_BTD) in self._taught(models, batch).items():
            squares = y_BTD.float().square() * valid.to(y_BTD.device)
            self.scales[place] = (squares.sum() / (valid.sum() * y_BTD.shape[-1])).clamp_min(1e-12)

    def losses(self, models: Models, batch: Batch) -> dict[str, Tensor]:
        self.spread = sharded(models.student.parameters())
        known, valid = self._taught(models, batch), valid_BT1(batch)
        place_of_run = batch["input_ids"].device
        found: dict[str, Tensor] = {}
        with ExitStack() as stack:
            for place in self.places:
                x, y = (t.to(place_of_run) for t in known[place])
                stack.enter_context(self._forced(models.student.get_submodule(place), place, x, y, valid, found))
            answer = models.run(**inputs_of(batch), **without_head(models.student))
        parts: dict[str, list[Tensor]] = {}
        for place, loss in found.items():
            parts.setdefault(place.rpartition(".")[2], []).append(loss)
        total = torch.stack(list(found.values())).mean()
        if self.spread:
            total = total + answer.logits.sum() * 0
        return {"total": total, **{name: torch.stack(some).mean().detach() for name, some in parts.items()}}

    def _taught(self, models: Models, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Module -> what the teacher's reads and writes."""
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def noting(place: str) -> Any:
            def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                seen[place] = (args[0] if args else kwargs["hidden_states"], _first(output))

            return hook

        with ExitStack() as stack:
            for place in self.places:
                handle = models.teacher.get_submodule(place).register_forward_hook(noting(place), with_kwargs=True)
                stack.callback(handle.remove)
            models.taught(batch, **without_head(models.teacher))
        return seen

    @contextmanager
    def _forced(
        self, module: Any, place: str, x: Tensor, y: Tensor, valid: Tensor, found: dict[str, Tensor]
    ) -> Iterator[None]:
        """The module given x, its loss against y noted, y handed on."""
        scale = self.scales[place].to(x.device)

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            like = args[0] if args else kwargs["hidden_states"]
            given = self._instead(x, like)
            return ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": given})

        def after(_: Any, args: Any, output: Any) -> Any:
            out = _first(output)
            found[place] = ((out.float() - y.float()).square() * valid).mean(-1).sum() / scale
            target = self._instead(y, out)
            return (target, *output[1:]) if isinstance(output, tuple) else target

        handles = (module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _instead(self, value: Tensor, own: Tensor) -> Tensor:
        """The teacher's in place of the student's own. FSDP2 gathers a layer's weights for the way back when a gradient
        reaches its output, so there one goes through, and is zero."""
        value = value.to(own.dtype)
        return value + (own - own.detach()) * 0 if self.spread else value


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
