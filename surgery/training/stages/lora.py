"""LoRA on linears, structured ones too: y = W x + alpha / rank * up(down(x)). All other parameters are frozen, except
those that `unfrozen` selects.

At the end the update is merged into dense linears. For structured linears, where the sum would lose the structure, it
stays an adapter, in a folder that PEFT reads.
"""

from __future__ import annotations

import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor

from surgery.checkpoint.safetensors_io import TensorSource, write_shard
from surgery.core.config import Count, Real
from surgery.core.errors import SurgeryError, suggestion
from surgery.modeling.joined import JoinedLinear
from surgery.modeling.modules import SplitLinear
from surgery.structures import StructuredLinear
from surgery.training.optim import select_parameters
from surgery.training.sharded_tensors import full_tensor
from surgery.training.stages.base import STAGES, Batch, Roles, Stage, StageConfig, StageModels
from surgery.training.stages.distill import DistillConfig, DistillStage
from surgery.training.stages.lm import LMConfig, LMStage, text_lengths

ADAPTER = "adapter"
ADAPTER_NAMES = {"merge": "merged", "keep": "default"}


class LoraStageConfig(StageConfig):
    """Keys of a `lora` stage.

    targets: roles, or paths of linears with * and ?. unfrozen: parameters that are trained beside the adapters, in the
    words of `trains`, which this stage does not read. loss: that of the stage `lm` or `distill`. adapter: at the end of
    the stage, "merge" adds the update to the weights where possible; "keep" leaves an adapter everywhere. shortest: as
    in the stage `lm`, with its loss.
    """

    name: ClassVar[str] = "lora"
    rank: Annotated[int, Field(ge=1)] = 8
    alpha: Annotated[int, Field(ge=1)] = 16
    dropout: Annotated[Real, Field(ge=0, lt=1)] = 0.0
    targets: tuple[str, ...] = ("attention",)
    unfrozen: tuple[str, ...] = ()
    loss: Literal["lm", "distill"] = "lm"
    temperature: Annotated[Real, Field(gt=0)] = 1.0
    top_k: Annotated[int, Field(ge=1)] | None = None
    ce_weight: Annotated[Real, Field(ge=0)] = 0.0
    adapter: Literal["merge", "keep"] = "merge"
    shortest: Annotated[Count, Field(ge=8)] | None = None

    @model_validator(mode="after")
    def _check_shortest(self) -> LoraStageConfig:
        text_lengths(self.length, self.shortest)
        if self.shortest is not None and self.loss != "lm":
            raise ValueError(f"shortest cuts rows for the loss lm only (got loss {self.loss})")
        return self


@STAGES.register(LoraStageConfig)
class LoraStage(Stage):
    """Trains LoRA adapters with the loss of an `lm` or `distill` stage."""

    config: LoraStageConfig

    def __init__(self, config: Any):
        super().__init__(config)
        shared = {k: v for k, v in dict(config).items() if k in DistillConfig.model_fields and k != "kind"}
        self.inner: Stage = DistillStage(DistillConfig(kind="distill", **shared))
        if config.loss == "lm":
            plain = {k: v for k, v in dict(config).items() if k in LMConfig.model_fields and k != "kind"}
            self.inner = LMStage(LMConfig(kind="lm", **plain))

    @property
    def needs_teacher(self) -> Any:
        """What the inner stage needs."""
        return self.inner.needs_teacher

    def prepare(self, models: StageModels, roles: Roles) -> None:
        """Insert LoRA adapters with PEFT. Raises SurgeryError for a target that matches no linear."""
        from peft import LoraConfig, inject_adapter_in_model

        self.inner.prepare(models, roles)
        for adapter, paths in self._paths(models.student, roles).items():
            if not paths:
                continue
            settings = LoraConfig(
                r=self.config.rank, lora_alpha=self.config.alpha, lora_dropout=self.config.dropout, target_modules=paths
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    inject_adapter_in_model(settings, models.student, ADAPTER_NAMES[adapter])
                except ValueError as error:  # out_proj of Mamba, whose weight some kernels read themselves
                    raise SurgeryError(
                        f"stage lora: targets: PEFT has no adapters for {', '.join(paths[:3])}{', ..' * (len(paths) > 3)}: "
                        f"{error} Leave them out of targets"
                    ) from None

    def _paths(self, student: Any, roles: Roles) -> dict[str, list[str]]:
        """Return {"merge": paths, "keep": paths} of the targets."""
        paths: dict[str, list[str]] = {"merge": [], "keep": []}
        for word in self.config.targets:
            matches = [path for path, linear_roles in roles.items() if _target_matches(word, path, linear_roles)]
            if not matches:
                words = sorted({role for linear_roles in roles.values() for role in linear_roles})
                raise SurgeryError(f"stage lora: targets: {word!r} matches no linear{suggestion(word, words)}")
            for path in matches:
                module = student.get_submodule(path)
                structured = isinstance(
                    getattr(module, "base_layer", module), (StructuredLinear, SplitLinear, JoinedLinear)
                )
                adapter = "keep" if structured else self.config.adapter
                if path not in paths[adapter]:
                    paths[adapter].append(path)
        return paths

    def keeps_adapter(self, models: StageModels, roles: Roles) -> bool:
        """Return whether an adapter remains after the stage."""
        return bool(self._paths(models.student, roles)["keep"])

    def adapted_weights(self, models: StageModels, roles: Roles) -> set[str]:
        """Return the names of the weights that have an adapter, merged or not."""
        return {f"{path}.weight" for paths in self._paths(models.student, roles).values() for path in paths}

    def trained_parameters(self, models: StageModels, roles: Roles) -> set[str]:
        """Return the names of all LoRA parameters, and of those that stay unfrozen."""
        names = {name for name, _ in models.student.named_parameters() if ".lora_" in name}
        return names | select_parameters(models.student, self.config.unfrozen, roles)

    def changed_parameters(self, models: StageModels, roles: Roles) -> set[str]:
        """Return the names of the weights that the adapters are merged into, and of those that stay unfrozen."""
        names = {f"{path}.weight" for path in self._paths(models.student, roles)["merge"]}
        return names | select_parameters(models.student, self.config.unfrozen, roles)

    def begin_step(self, step: int, seed: int) -> None:
        """Draw what differs from step to step in the inner stage."""
        self.inner.begin_step(step, seed)

    def losses(self, models: StageModels, batch: Batch) -> dict[str, Tensor]:
        """Return the losses of the inner stage."""
        return self.inner.losses(models, batch)

    def finish(self, models: StageModels, roles: Roles, folder: Path | None) -> None:
        """Merge the adapters of dense linears, write the others to folder/adapter, and remove PEFT's modules."""
        student, adapter_tensors = models.student, {}
        paths = self._paths(student, roles)
        for path in paths["merge"]:
            layer = student.get_submodule(path)
            layer.merge()
            student.set_submodule(path, layer.get_base_layer())
        for path in paths["keep"]:
            layer = student.get_submodule(path)
            for side in ("lora_A", "lora_B"):
                adapter_tensors[f"base_model.model.{path}.{side}.weight"] = full_tensor(
                    getattr(layer, side)["default"].weight
                )
            student.set_submodule(path, layer.get_base_layer())
        if adapter_tensors and folder is not None:
            self._write_adapter(folder / ADAPTER, paths["keep"], adapter_tensors)
        for name in ("peft_config", "_hf_peft_config_loaded"):
            student.__dict__.pop(name, None)

    def _write_adapter(self, folder: Path, paths: list[str], tensors: dict[str, Tensor]) -> None:
        from peft import LoraConfig

        folder.mkdir(exist_ok=True)
        options: dict[str, Any] = {"r": self.config.rank, "lora_alpha": self.config.alpha, "target_modules": paths}
        LoraConfig(**options, task_type="CAUSAL_LM", inference_mode=True).save_pretrained(str(folder))
        write_shard(
            folder / "adapter_model.safetensors", [TensorSource.from_tensor(name, t) for name, t in tensors.items()]
        )


def _target_matches(word: str, path: str, roles: tuple[str, ...]) -> bool:
    return fnmatchcase(path, word) or any(fnmatchcase(r, word) or r.startswith(f"{word}.") for r in roles)
