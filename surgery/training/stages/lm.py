"""Language-model training: next-token cross-entropy, without a teacher.

Rows may be cut into shorter texts, of another length in each step, so that a model sees texts of all lengths. The loss
is over the same positions for every length: the last token of a text still predicts the first of the next one.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from surgery.core.config import Count
from surgery.training.linear_loss import LossWeights, Targets
from surgery.training.output_head import model_loss
from surgery.training.stages.base import (
    IGNORE_INDEX,
    STAGES,
    Batch,
    Stage,
    StageConfig,
    StageModels,
    model_inputs,
    next_token_targets,
)


def text_lengths(length: int, shortest: int | None) -> list[int]:
    """Return the lengths that rows of `length` tokens are cut into: halves of them, and of these, down to `shortest`.

    Raises ValueError if `shortest` is not one of them.
    """
    lengths = [length]
    while shortest is not None and lengths[-1] > shortest and lengths[-1] % 2 == 0:
        lengths.append(lengths[-1] // 2)
    if shortest is not None and lengths[-1] != shortest:
        raise ValueError(
            f"shortest must be length divided by a power of two (got {shortest} for a length of {length}), for example "
            f"{max(8, length // 8)}"
        )
    return lengths


def draw_length(lengths: list[int], step: int, seed: int) -> int:
    """Return the length of a step's texts: each once, in a random order, in every len(lengths) steps."""
    cycle, place = divmod(step, len(lengths))
    generator = torch.Generator().manual_seed((1_000_003 * seed + cycle) % 2**32)
    return lengths[int(torch.randperm(len(lengths), generator=generator)[place])]


def cut_rows(inputs: dict[str, Any], length: int) -> dict[str, Any]:
    """Return the arguments of a model's call with rows cut into texts of `length` tokens, whose positions begin at 0."""
    cut = {
        name: x.unflatten(1, (-1, length)).flatten(0, 1) if isinstance(x, Tensor) else x for name, x in inputs.items()
    }
    if "position_ids" in cut:
        positions_BT: Tensor = cut["position_ids"]
        cut["position_ids"] = positions_BT.minimum(torch.arange(length, device=positions_BT.device))
    return cut


class LMConfig(StageConfig):
    """Keys of an `lm` stage.

    shortest: cut rows into texts of another length in each step: `length`, half of it and so on, down to `shortest`
    tokens. None: whole rows.
    """

    name: ClassVar[str] = "lm"
    shortest: Annotated[Count, Field(ge=8)] | None = None

    @model_validator(mode="after")
    def _check_shortest(self) -> LMConfig:
        text_lengths(self.length, self.shortest)
        return self


def cross_entropy(logits_BTV: Tensor, next_BT: Tensor, weight_BT: Tensor | None = None) -> Tensor:
    """Return the sum of the cross-entropy over counted positions, in nats (a scalar). weight_BT: of the positions;
    None: 1.
    """
    logits_NV, next_N = logits_BTV.flatten(0, 1).float(), next_BT.flatten()
    if weight_BT is None:
        return nn.functional.cross_entropy(logits_NV, next_N, ignore_index=IGNORE_INDEX, reduction="sum")
    ce_N = nn.functional.cross_entropy(logits_NV, next_N, ignore_index=IGNORE_INDEX, reduction="none")
    return (ce_N * weight_BT.flatten()).sum()


def next_token_loss(run: Any, batch: Batch, length: int | None = None) -> Tensor:
    """Run a model; return the sum of its cross-entropy over counted positions, in nats (a scalar).

    length: of the texts that the rows are cut into; None: whole rows.
    """
    counts_BT, next_BT = next_token_targets(batch)
    targets = Targets(counts_BT.flatten().float(), next_BT.flatten().clamp_min(0))
    inputs = model_inputs(batch) if length is None else cut_rows(model_inputs(batch), length)
    return model_loss(run, inputs, targets, LossWeights(ce_weight=1.0)).total


@STAGES.register(LMConfig)
class LMStage(Stage):
    """Trains the student on the text itself."""

    config: LMConfig
    fits_new_models: ClassVar[bool] = True
    length: int | None = None  # of the texts of this step; None: whole rows

    @property
    def fits_cuda_graph(self) -> bool:
        """Whether all steps have texts of one length."""
        return self.config.shortest is None

    def begin_step(self, step: int, seed: int) -> None:
        """Draw the length of the step's texts."""
        lengths = text_lengths(self.config.length, self.config.shortest)
        self.length = draw_length(lengths, step, seed) if len(lengths) > 1 else None

    def losses(self, models: StageModels, batch: Batch) -> dict[str, Tensor]:
        """Return `total` and `ce`, the same cross-entropy in nats, summed over counted positions."""
        total = next_token_loss(models.run, batch, self.length)
        return {"total": total, "ce": total.detach()}
