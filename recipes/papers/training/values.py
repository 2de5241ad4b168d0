"""Train the body of a model on rows of continuous values, for tasks that are not language: stages `regress` and
`classify`, tasks `regression` and `teacher`. Importing this module registers them; `python -m
recipes.papers.training.pretrain` is `surgery pretrain` with them.

    h_BTD = body(values_BTI W_in^T)      y_BTO = h_BTD W_out^T + b      read at the same token, without the shift of a language model

    regress     sum over counted tokens of (y - target)^2
    classify    sum over counted tokens of the cross-entropy of the label, in nats

The linear read-in W_in takes the place of the embeddings, and the read-out that of the head. As in muP (Yang et al.
2022, "Tensor Programs V", Table 3), W_in has variance 1 / I and a learning rate that does not depend on the width, like
an embedding; W_out is 0 at first, and its rate falls with its fan-in. After the stage the read-in and the read-out are
in readout/readout.safetensors of the result, and the checkpoint holds the body.

B rows, T tokens, I input values of a token, D model width (stages) or input dimensions (tasks), O outputs, N points.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from surgery.checkpoint.safetensors_io import TensorSource, write_shard
from surgery.core.errors import SurgeryError
from surgery.training.data.generated import MAX_TOKENS, Example, Task, integers, normal, register_task, uniform
from surgery.training.stages.base import (
    IGNORE_INDEX,
    READOUT,
    STAGES,
    Batch,
    Roles,
    Stage,
    StageConfig,
    StageModels,
    skip_logits,
)


class ReadIn(nn.Module):
    """Linear map of continuous inputs (.., I) to hidden states (.., D). weight (D, I) ~ N(0, 1 / I)."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, inputs) * inputs**-0.5)

    def forward(self, values: Tensor) -> Tensor:
        """Return the hidden states (.., D)."""
        return values @ self.weight.mT


def make_read_out(width: int, outputs: int) -> nn.Linear:
    """Return the linear read-out (D to O), zero at first."""
    linear = nn.Linear(width, outputs)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def squared_error(y_BTO: Tensor, batch: Batch) -> Tensor:
    """Return the sum of squared errors over counted tokens (a scalar).

    `targets` (B, T); `labels` is -100 where not counted.
    """
    counted_BT = batch["labels"] != IGNORE_INDEX
    return torch.where(counted_BT, (y_BTO[..., 0].float() - batch["targets"]).square(), 0.0).sum()


def class_entropy(y_BTO: Tensor, batch: Batch) -> Tensor:
    """Return the sum of the cross-entropy over counted tokens, in nats (a scalar)."""
    return nn.functional.cross_entropy(
        y_BTO.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


class ValuesConfig(StageConfig):
    """Keys of both stages. inputs: values of a token (I)."""

    inputs: Annotated[int, Field(ge=1, le=2**16)]


class RegressConfig(ValuesConfig):
    """Keys of a `regress` stage: those of all stages and `inputs`."""

    name: ClassVar[str] = "regress"


class ClassifyConfig(ValuesConfig):
    """Keys of a `classify` stage. classes: number of labels (O)."""

    name: ClassVar[str] = "classify"
    classes: Annotated[int, Field(ge=2, le=2**20)]


class ValuesStage(Stage):
    """Base class of both stages: adds read-in and read-out, and removes them at the end."""

    config: Any
    reads: ClassVar[str] = "values"
    fits_new_models: ClassVar[bool] = True
    outputs = 1

    def prepare(self, models: StageModels, roles: Roles) -> None:
        """Add read-in and read-out. Raises SurgeryError for several processes or another number of input values."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise SurgeryError(
                f"stage {self.config.kind} runs in one process: its read-in and read-out are not shared between "
                "processes. "
                "Start it without accelerate launch."
            )
        student = models.student
        table = student.get_input_embeddings().weight
        student.read_in = ReadIn(self.config.inputs, table.shape[1]).to(table.device)
        student.read_out = make_read_out(table.shape[1], self.outputs).to(table.device)

    def trained_parameters(self, models: StageModels, roles: Roles) -> set[str]:
        """Return the selected parameters of the body, and the read-in and read-out."""
        student = models.student
        own = {name for name, _ in student.named_parameters() if name.startswith(("read_in.", "read_out."))}
        return self.changed_parameters(models, roles) | own

    def changed_parameters(self, models: StageModels, roles: Roles) -> set[str]:
        """Return the selected parameters of the body: without embeddings and head, which the loss does not depend
        on.
        """
        student = models.student
        unused = [
            id(m.weight) for m in (student.get_input_embeddings(), student.get_output_embeddings()) if m is not None
        ]
        known = dict(student.named_parameters())
        names = {n for n in super().trained_parameters(models, roles) if id(known[n]) not in unused}
        return {n for n in names if not n.startswith(("read_in.", "read_out."))}

    def outputs_of(self, models: StageModels, batch: Batch) -> Tensor:
        """Return y (B, T, O)."""
        student = models.student
        if batch["values"].shape[-1] != self.config.inputs:
            raise SurgeryError(
                f"stage {self.config.kind}: inputs must be {batch['values'].shape[-1]}, the values of a token of "
                "data.generated "
                f"(got {self.config.inputs})"
            )
        options = {**skip_logits(student), "use_cache": False, "output_hidden_states": True}
        h_BTD = models.run(inputs_embeds=student.read_in(batch["values"]), **options).hidden_states[-1]
        return student.read_out(h_BTD)

    def count_positions(self, examples: Batch) -> int:
        """Return the number of counted tokens."""
        return int((examples["labels"] != IGNORE_INDEX).sum())

    def finish(self, models: StageModels, roles: Roles, folder: Path | None) -> None:
        """Remove read-in and read-out; write them to folder/readout."""
        student = models.student
        if folder is not None:
            tensors = {n: p for n, p in student.named_parameters() if n.startswith(("read_in.", "read_out."))}
            (folder / READOUT).mkdir(exist_ok=True)
            sources = [TensorSource.from_tensor(n, p.detach().cpu()) for n, p in tensors.items()]
            write_shard(folder / READOUT / "readout.safetensors", sources)
        del student.read_in, student.read_out


@STAGES.register(RegressConfig)
class RegressStage(ValuesStage):
    """Trains the body to predict one number for each counted token."""

    def losses(self, models: StageModels, batch: Batch) -> dict[str, Tensor]:
        """Return `total` and `squared_error`, the same sum."""
        total = squared_error(self.outputs_of(models, batch), batch)
        return {"total": total, "squared_error": total.detach()}


@STAGES.register(ClassifyConfig)
class ClassifyStage(ValuesStage):
    """Trains the body to predict a class for each counted token."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.outputs = config.classes

    def losses(self, models: StageModels, batch: Batch) -> dict[str, Tensor]:
        """Return `total` (cross-entropy in nats) and `wrong`, the number of wrong classes."""
        y_BTO = self.outputs_of(models, batch)
        total = class_entropy(y_BTO, batch)
        wrong = ((y_BTO.argmax(-1) != batch["labels"]) & (batch["labels"] != IGNORE_INDEX)).sum()
        return {"total": total, "wrong": wrong.float()}


@register_task
class RegressionTask(Task):
    """In-context linear regression (Garg et al. 2022; Kuang et al. 2025, section 4): x_1, y_1, x_2, y_2, ..

    x ~ N(0, I / dims), w ~ N(0, I), y = w . x, padded with zeros to `dims`; a row of T tokens has T / 2 points. grow:
    number of rows over which the used dimensions and points rise from half to all.
    """

    task: Literal["regression"] = "regression"
    inputs: Literal["ids", "values"] = "values"
    dims: Annotated[int, Field(ge=1, le=4096)] = 8
    grow: Annotated[int, Field(ge=0)] = 0

    def check_length(self, length: int) -> None:
        """Raise SurgeryError for an odd number of tokens."""
        if length % 2:
            raise SurgeryError(f"data.generated: regression needs two tokens a point, so an even length (got {length})")

    def batch(self, seed: int, first: int, rows: int, length: int, device: torch.device | str = "cpu") -> Example:
        """Return values (B, T, D), targets (B, T) and labels (B, T): 0 at the x tokens, where the target is y, and -100
        elsewhere.
        """
        self.check_length(length)
        row_B, points = torch.arange(first, first + rows, device=device), length // 2
        share_B = (
            (0.5 + 0.5 * row_B / self.grow).clamp_max(1.0) if self.grow else torch.ones_like(row_B, dtype=torch.float)
        )
        dims_B1 = (share_B * self.dims).ceil().long()[:, None]
        w_BD = normal(seed, row_B, 0, self.dims) * (torch.arange(self.dims, device=device) < dims_B1)
        x_BND = normal(seed, row_B, 1, points * self.dims).view(rows, points, self.dims) / math.sqrt(self.dims)
        x_BND = x_BND * (torch.arange(self.dims, device=device) < dims_B1)[:, None]
        y_BN = torch.einsum("bnd,bd->bn", x_BND, w_BD)
        values_BTD = torch.stack([x_BND, torch.nn.functional.pad(y_BN.unsqueeze(-1), (0, self.dims - 1))], 2).flatten(
            1, 2
        )
        targets_BT = torch.stack([y_BN, torch.zeros_like(y_BN)], 2).flatten(1)
        used_BN = torch.arange(points, device=device) < (share_B * points).ceil()[:, None]
        labels_BN = torch.where(used_BN, 0, IGNORE_INDEX)
        labels_BT = torch.stack([labels_BN, torch.full_like(labels_BN, IGNORE_INDEX)], 2).flatten(1)
        return {"values": values_BTD, "targets": targets_BT, "labels": labels_BT}


@register_task
class TeacherTask(Task):
    """Classes of a fixed random network: inputs of `dims` values with variance 1 / k in dimension k, labels of a random
    MLP with four layers, `width` units and tanh. Each token is one input with its label.

    noise: share of the labels that are drawn at random. network: seed of the network, the same for all seeds of rows.
    """

    task: Literal["teacher"] = "teacher"
    inputs: Literal["ids", "values"] = "values"
    dims: Annotated[int, Field(ge=1, le=2**16)] = 256
    classes: Annotated[int, Field(ge=2, le=MAX_TOKENS)] = 64
    width: Annotated[int, Field(ge=1, le=2**14)] = 256
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.0
    network: Annotated[int, Field(ge=0)] = 0

    def batch(self, seed: int, first: int, rows: int, length: int, device: torch.device | str = "cpu") -> Example:
        """Return values (B, T, D) and labels (B, T), the class of each token."""
        row_B = torch.arange(first, first + rows, device=device)
        x_BTD = normal(seed, row_B, 0, length * self.dims).view(rows, length, self.dims)
        x_BTD = x_BTD * torch.arange(1, self.dims + 1, device=device) ** -0.5
        hidden, sizes = (
            x_BTD / x_BTD.square().mean(-1, keepdim=True).sqrt(),
            [self.dims, *[self.width] * 3, self.classes],
        )
        for layer, (in_, out) in enumerate(pairwise(sizes)):
            weight_OI = normal(self.network, torch.arange(out, device=device), 100 + layer, in_) * 1.5 * in_**-0.5
            hidden = hidden @ weight_OI.mT
            hidden = hidden.tanh() if layer < 3 else hidden
        labels_BT = hidden.argmax(-1)
        if self.noise:
            random_BT = integers(seed, row_B, 2, length, self.classes)
            labels_BT = torch.where(uniform(seed, row_B, 1, length) < self.noise, random_BT, labels_BT)
        return {"values": x_BTD, "labels": labels_BT}
