"""The plan of `experts`: how many routed experts of each layer stay, and the model with these alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from surgery.architectures.linears import ModelLayout
from surgery.checkpoint.fewer_experts import ExpertStack, Kept, find_experts, with_experts
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.outline import ModelDescription, describe_checkpoint
from surgery.checkpoint.safetensors_io import TensorInfo
from surgery.core.errors import SurgeryError
from surgery.planning.depth import count_parameters


@dataclass(frozen=True)
class ExpertsPlan:
    """What `experts` does to a model.

    stack: the experts, with all of them. number: how many stay in each layer. kept: which; until they are measured, an
    assumption, with which a plan counts. layout: of the model with all experts. params: its parameters.
    """

    stack: ExpertStack
    number: int
    kept: Kept
    layout: ModelLayout
    params: int

    @property
    def macs(self) -> int:
        """Multiply-accumulates per token that the routers lose; a token is routed to as many experts as before."""
        routers = [n for n in self.layout.linears if n.router and n.out == self.stack.count]
        return sum((n.out - self.number) * n.in_ for n in routers)

    def note(self) -> str:
        """Return a sentence for the user."""
        return (
            f"experts: {self.number} of {self.stack.count} stay in each of {len(self.stack.paths)} layers, those that add "
            "most to the calibration tokens that are routed to them"
        )

    def with_kept(self, kept: Kept) -> ExpertsPlan:
        """Return the plan with the experts that were chosen."""
        return replace(self, kept=kept)


def plan_experts(number: int, described: ModelDescription, layout: ModelLayout) -> ExpertsPlan:
    """Return the plan of a model of which `number` experts stay in each layer. layout: of the model, with the layers of
    the towers that are converted.

    Raises SurgeryError if the model has no such experts, or if so many cannot stay.
    """
    if isinstance(described, MetaModel) and described.trust_remote_code:
        raise SurgeryError(
            "experts: those of a model with its own code are not known. Leave experts out for this model"
        )
    stack = find_experts(described.model, layout)
    stack.check_number(number)
    first = stack.select([0.0] * stack.count, number)
    return ExpertsPlan(stack, number, dict.fromkeys(stack.paths, first), layout, count_parameters(described))


def with_fewer_experts(
    described: ModelDescription, experts: ExpertsPlan, replaced: Mapping[str, TensorInfo] | None = None
) -> ModelDescription:
    """Return the model with the experts that stay. replaced: tensors of the routers, see `with_experts`.

    Raises SurgeryError if config.json cannot say so.
    """
    source = with_experts(described.source, described.model, described.keys, experts.stack, experts.kept, replaced)
    return MetaModel(source) if isinstance(described, MetaModel) else describe_checkpoint(source)
