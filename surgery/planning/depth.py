"""The plan of `depth`: the layers of a model that are removed, and the model without them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from surgery.architectures.linears import ModelLayout
from surgery.checkpoint.fewer_layers import LayerStack, check_layers, find_stack, with_layers
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.outline import ModelDescription, describe_checkpoint
from surgery.checkpoint.safetensors_io import TensorInfo
from surgery.planning.depth_recipe import DepthRecipe


@dataclass(frozen=True)
class DepthPlan:
    """What `depth` does to a model.

    stack: the list of layers, with all of them. kept: the numbers of the layers that stay; until they are measured, an
    assumption, with which a plan counts. layout: of the model with all layers. params: its parameters. is_chosen:
    whether `kept` is final.
    """

    stack: LayerStack
    kept: tuple[int, ...]
    layout: ModelLayout
    params: int
    is_chosen: bool

    @property
    def removed(self) -> list[int]:
        """The numbers of the layers that are removed."""
        return [index for index in range(self.stack.count) if index not in self.kept]

    @property
    def macs(self) -> int:
        """Multiply-accumulates per token of the linears in the removed layers; of routed experts those that compute
        it.
        """
        removed = {self.stack.layer(index) for index in self.removed}
        return round(sum(n.out * n.in_ * n.active for n in self.layout.linears if n.layer in removed))

    def note(self) -> str:
        """Return a sentence for the user."""
        removed, count = self.removed, self.stack.count
        if not self.is_chosen:
            return (
                f"depth: {len(removed)} of {count} layers are removed, chosen by measurements on the calibration text"
            )
        return f"depth: {len(removed)} of {count} layers are removed: {number_ranges(removed)} (counted from 0)"

    def with_kept(self, kept: tuple[int, ...]) -> DepthPlan:
        """Return the plan with the layers that were chosen."""
        return replace(self, kept=kept, is_chosen=True)


def number_ranges(numbers: list[int]) -> str:
    """Return ascending numbers in words, such as "3, 18 to 25"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def block_without(first: int, dropped: int, count: int) -> tuple[int, ...]:
    """Return the layers that stay of `count` without the `dropped` ones from `first` on."""
    return tuple(index for index in range(count) if not first <= index < first + dropped)


def plan_depth(recipe: DepthRecipe, described: ModelDescription, layout: ModelLayout) -> DepthPlan:
    """Return the plan of the recipe. layout: of the model, with the layers of the towers that are converted.

    Layers that will be measured are assumed to be those before the last one.
    """
    stack = find_stack(described.model, layout)
    dropped = recipe.dropped(stack.count)
    if recipe.remove is not None:
        removed = set(recipe.removed(stack.count))
        kept = tuple(index for index in range(stack.count) if index not in removed)
    else:
        kept = block_without(stack.count - 1 - dropped, dropped, stack.count)
    return DepthPlan(stack, kept, layout, count_parameters(described), is_chosen=not recipe.is_measured)


def count_parameters(described: ModelDescription) -> int:
    """Return the parameters of a model, a tied pair counted once."""
    return sum(
        parameter.numel()
        for name, parameter in described.model.named_parameters(remove_duplicate=False)
        if name not in described.tied
    )


def shortened(
    described: ModelDescription, depth: DepthPlan, replaced: Mapping[str, TensorInfo] | None = None
) -> ModelDescription:
    """Return the model with the layers that stay. replaced: other tensors for some of its parameters.

    Raises SurgeryError if config.json cannot say what these layers are.
    """
    trusted = isinstance(described, MetaModel) and described.trust_remote_code
    source = with_layers(described.source, described.model, described.keys, depth.stack, depth.kept, replaced)
    if not isinstance(described, MetaModel):
        return describe_checkpoint(source, trusted)
    model = MetaModel(source, trusted)
    check_layers(described.model, model.model, depth.stack, depth.kept)
    return model
