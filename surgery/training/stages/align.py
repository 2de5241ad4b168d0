"""Match attention and MLP modules to the teacher's, each on the teacher's own inputs (LoLCATs' attention transfer).

    loss = output_weight * mean over modules of |f(x*) - y*|^2 / |y*|^2     x*, y*: input and output of the teacher's module
           + matrix_weight * mean over attention modules of |W(x*) - W*|^2 / |W*|^2, see
           surgery/training/stages/mixing_matrix.py

The student runs once. Each aligned module receives the teacher's input, and its output is replaced by the teacher's:
modules do not see each other's errors and no gradient crosses a module, so that all train independently in one pass.
|y*|^2 is measured on the first rows of the data, one number per module. With output_weight 0 this is the first stage of
MOHAWK (Bick et al. 2024), with matrix_weight 0 its second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from surgery.core.config import Real
from surgery.core.errors import SurgeryError
from surgery.training.sharded_tensors import any_sharded
from surgery.training.stages.base import STAGES, Batch, Roles, StageConfig, StageModels, model_inputs, skip_logits
from surgery.training.stages.match_hidden import TeacherStage, mean_square, relative_error_sum, valid_mask_BT1
from surgery.training.stages.mixing_matrix import CallArguments, MatrixComparison

OUTPUT_ROLES = {"attention": "attention.output", "mlp": "mlp.down"}  # roles of the linears that end the modules


class AlignConfig(StageConfig):
    """Keys of an `align` stage.

    modules: kinds of modules to align, where they contain trained parameters. matrix_probes: number of random sign
    vectors that estimate the matrix loss; None: all columns, exactly.
    """

    name: ClassVar[str] = "align"
    modules: tuple[Literal["attention", "mlp"], ...] = ("attention", "mlp")
    output_weight: Annotated[Real, Field(ge=0)] = 1.0
    matrix_weight: Annotated[Real, Field(ge=0)] = 0.0
    matrix_probes: Annotated[int, Field(ge=1)] | None = None


@dataclass
class ModuleRecord:
    """Input, output and call arguments of one module of the teacher."""

    x: Tensor
    y: Tensor
    call: CallArguments


def module_paths(kinds: tuple[str, ...], roles: Roles) -> list[str]:
    """Return the paths of the attention and MLP modules, in the order of the layers."""
    output_roles = {OUTPUT_ROLES[kind] for kind in kinds}
    return [path.rpartition(".")[0] for path, linear_roles in roles.items() if output_roles & set(linear_roles)]


@STAGES.register(AlignConfig)
class AlignStage(TeacherStage):
    """Trains attention and MLP modules of the student to reproduce those of the teacher."""

    config: AlignConfig
    can_checkpoint = False
    paths: list[str]

    def __init__(self, config: Any):
        super().__init__(config)
        self.sizes: dict[str, Tensor] = {}
        self.matrices: MatrixComparison | None = None
        self.matrix_sizes: dict[str, Tensor] = {}
        self.spread = False

    def prepare(self, models: StageModels, roles: Roles) -> None:
        """Find the modules to align in student and teacher. Raises SurgeryError if there are none."""
        super().prepare(models, roles)
        if self.config.memory == "checkpoint":
            raise SurgeryError(
                "stage align: memory must be keep or auto (got checkpoint): no gradient passes from layer to layer, so nothing "
                "is saved."
            )
        trained = self.trained_parameters(models, roles)
        self.paths = [
            p for p in module_paths(self.config.modules, roles) if any(n.startswith(f"{p}.") for n in trained)
        ]
        theirs = {name for name, _ in models.teacher.named_modules()}
        if lost := [path for path in self.paths if path not in theirs]:
            raise SurgeryError(
                f"stage align: the teacher has no module {lost[0]}. Give the checkpoint that the student was converted "
                "from."
            )
        self._prepare_matrices(models, roles)

    def _prepare_matrices(self, models: StageModels, roles: Roles) -> None:
        if not self.config.matrix_weight:
            if not self.config.output_weight:
                raise SurgeryError(
                    "stage align: output_weight and matrix_weight are both 0, so the loss is empty. Set one of them "
                    "above 0."
                )
            return
        attention = set(module_paths(("attention",), roles))
        paths = [path for path in self.paths if path in attention]
        if not paths:
            raise SurgeryError(
                "stage align: matrix_weight needs attention modules that train, and there are none. Set modules: "
                "[attention] and trains: [new]."
            )
        self.matrices = MatrixComparison(models.student, models.teacher, paths, self.config.matrix_probes)

    def trained_parameters(self, models: StageModels, roles: Roles) -> set[str]:
        """Return the names of the selected parameters inside of aligned modules."""
        inside = tuple(f"{path}." for path in module_paths(self.config.modules, roles))
        names = super().trained_parameters(models, roles)
        able = {name for name in names if name.startswith(inside)}
        if not able:
            raise SurgeryError(
                f"stage align: trains {', '.join(self.config.trains)} selects nothing inside "
                f"{' or '.join(self.config.modules)} "
                "modules, the only ones that it trains. Try trains: [new], or [attention]."
            )
        return able

    @torch.no_grad()
    def measure(self, models: StageModels, batch: Batch) -> None:
        """Measure the mean squares of the teacher's outputs and mixing matrices."""
        valid = valid_mask_BT1(batch)
        for path, seen in self._record_teacher(models, batch).items():
            self.sizes[path] = mean_square(seen.y, valid)
            if self.matrices is not None and path in self.matrices.pairs:
                self.matrix_sizes[path] = self.matrices.mean_squares(path, seen.call, batch, valid)

    def losses(self, models: StageModels, batch: Batch) -> dict[str, Tensor]:
        """Return `total` and the mean loss of each kind of module, summed over tokens."""
        self.spread = any_sharded(models.student.parameters())
        teacher_records = self._record_teacher(models, batch)
        outputs: dict[str, Tensor] = {}
        matrices: dict[str, Tensor] = {}
        with ExitStack() as stack:
            for path in self.paths:
                module = models.student.get_submodule(path)
                stack.enter_context(self._teacher_forced(module, path, teacher_records[path], batch, outputs, matrices))
            output = models.run(**model_inputs(batch), **skip_logits(models.student))
        parts: dict[str, list[Tensor]] = {}
        for path, loss in outputs.items():
            parts.setdefault(path.rpartition(".")[2], []).append(loss)
        means = {name: torch.stack(some).mean() for name, some in parts.items()}
        total = self.config.output_weight * torch.stack(list(outputs.values())).mean()
        if matrices:
            means["matrix"] = torch.stack(list(matrices.values())).mean()
            total = total + self.config.matrix_weight * means["matrix"]
        if self.spread:
            total = total + output.logits.sum() * 0
        return {"total": total, **{name: mean.detach() for name, mean in means.items()}}

    def _record_teacher(self, models: StageModels, batch: Batch) -> dict[str, ModuleRecord]:
        """Run the teacher and return path -> record for every aligned module."""
        seen: dict[str, ModuleRecord] = {}

        def make_hook(path: str) -> Any:
            def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                x = args[0] if args else kwargs["hidden_states"]
                seen[path] = ModuleRecord(x, _first_output(output), (args, kwargs))

            return hook

        with ExitStack() as stack:
            for path in self.paths:
                handle = models.teacher.get_submodule(path).register_forward_hook(make_hook(path), with_kwargs=True)
                stack.callback(handle.remove)
            models.teacher_output(batch, **skip_logits(models.teacher))
        return seen

    @contextmanager
    def _teacher_forced(
        self,
        module: Any,
        path: str,
        seen: ModuleRecord,
        batch: Batch,
        outputs: dict[str, Tensor],
        matrices: dict[str, Tensor],
    ) -> Iterator[None]:
        """Within the context, feed the module the teacher's input, record its losses, and pass on the teacher's
        output.
        """
        valid = valid_mask_BT1(batch)
        x, y = (t.to(valid.device) for t in (seen.x, seen.y))

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            like = args[0] if args else kwargs["hidden_states"]
            teacher_input = self._substitute(x, like)
            return ((teacher_input, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": teacher_input})

        def after(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            out = _first_output(output)
            outputs[path] = relative_error_sum(out, y, valid, self.sizes[path])
            if self.matrices is not None and path in self.matrix_sizes:
                size, call = self.matrix_sizes[path], (args, kwargs)
                matrices[path] = self.matrices.relative_error_sum(path, call, seen.call, batch, valid, size)
            target = self._substitute(y, out)
            return (target, *output[1:]) if isinstance(output, tuple) else target

        handles = (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _substitute(self, value: Tensor, student_value: Tensor) -> Tensor:
        """Return the teacher's value in the dtype of the student's.

        FSDP2 gathers a layer's weights for the backward pass only if a gradient reaches its output, so with FSDP2 a
        zero gradient is passed through.
        """
        value = value.to(student_value.dtype)
        return value + (student_value - student_value.detach()) * 0 if self.spread else value


def _first_output(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
