"""Run all stages of a healing recipe on one model: load, train stage by stage, evaluate, write the result."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint.meta_model import split_stored_experts
from surgery.core.errors import SurgeryError
from surgery.core.files import partial_path, size_text
from surgery.core.journal import Journal
from surgery.core.progress import Progress
from surgery.training import models as model_loading
from surgery.training.batches import stack_examples, to_device
from surgery.training.best_state import BEST, BestCheckpoint, better
from surgery.training.checkpoints import CheckpointManager, TrainPosition, TrainState
from surgery.training.data.dataset import make_data
from surgery.training.data.packing import check_packed_attention
from surgery.training.data.shared_tokens import SharedTokens
from surgery.training.distributed.accelerator import (
    batch_layout,
    configure_sharding,
    loads_values,
    make_accelerator,
    precision_name,
    prepare,
    sharding_name,
    unwrap_model,
)
from surgery.training.export import (
    ADAPTER,
    MERGED,
    adapter_digests,
    check_exported_tensors,
    delivery_record,
    loss_records,
    merge_trained,
    publish_result,
    round_to_stored_dtype,
    run_environment,
    stage_record,
    stored_parameters,
    tensor_keys,
    write_result,
)
from surgery.training.logging import (
    CURVE_NAME,
    LogReporter,
    TrainingLog,
    draw_curve,
    end_trackers,
    groups_table,
    start_trackers,
)
from surgery.training.loop import LoopContext, TrainingLoop
from surgery.training.optim import check_parameter_kinds, make_groups, make_optimizer
from surgery.training.recipe import HealingRecipe, stage_data_config
from surgery.training.sharded_tensors import allocate_meta_tensors, copy_full_, reshard_modules
from surgery.training.stages import STAGES, Stage, StageModels
from surgery.training.stages.base import READOUT
from surgery.training.stages.lora import LoraStage
from surgery.training.suitability import check_kept_frozen, recipe_warnings
from surgery.training.validation import Validation
from surgery.training.weight_norm import add_core_norms, fold_core_norms, folded_parameters


def parameters_without_adapters(model: Any) -> dict[str, Tensor]:
    """Return the parameters by name, without the `.base_layer` that PEFT inserts around adapted modules."""
    return {name.replace(".base_layer.", "."): p for name, p in model.named_parameters()}


def changed_parameters(recipe: HealingRecipe, models: StageModels, roles: dict[str, tuple[str, ...]]) -> set[str]:
    """Return the names of the student's parameters that any stage changes.

    Raises SurgeryError if a stage does not fit the model. No weight is read: the model may be on the meta device.
    """
    names: set[str] = set()
    for number, config in enumerate(recipe.stages):
        stage = STAGES[config](config)
        check_parameter_kinds(config.rates)
        names |= stage.changed_parameters(models, roles)
        if isinstance(stage, LoraStage) and stage.keeps_adapter(models, roles) and number + 1 < len(recipe.stages):
            raise SurgeryError(
                f"stage {number + 1}, lora, leaves an adapter that is not merged (structured targets, or adapter: "
                "keep), which "
                "later stages would not load. Make it the last stage."
            )
    return names


class StageRunner:
    """Runs a recipe's stages on the model of `source` and writes the healed checkpoint to `out`.

    teacher: folder or Hub id, or None. trust: whether remote code may run. skip: skip steps with NaN or infinite
    gradients. track: name of an experiment tracker, or None. show: called with the tables to display. sharding: of
    several processes, auto, ddp or fsdp2. rates_tried: results of the rate search, for the record. After every stage
    there is a checkpoint; a resumed run continues from the latest one.
    """

    def __init__(
        self, source: Any, recipe: HealingRecipe, out: Path, *, teacher: str | None, trust: bool, skip: bool,
        track: str | None, device: str | None, progress: Progress, show: Any, sharding: str = "auto",
        rates_tried: Sequence[dict[str, Any]] = (),
    ):  # fmt: skip
        configure_sharding(sharding, sum(info.numel for info in source.tensors.values()), device)
        self.source, self.recipe, self.out, self.trust, self.skip = source, recipe, out, trust, skip
        self.teacher_name, self.work, self.show, self.rates_tried = teacher, partial_path(out), show, rates_tried
        self.accelerator = make_accelerator(device, recipe.precision, track, self.work)
        self.main = self.accelerator.is_main_process
        self.journal: Journal | None = None
        self.progress = progress if self.main else Progress()
        self.reporter = LogReporter(self.progress, self.main)
        self.trained: set[str] = set()
        self.stages: list[dict[str, Any]] = []
        self.is_sharded = bool(sharding_name(self.accelerator))

    def run(self) -> dict[str, Any]:
        """Run the remaining stages, write the result and return the record of the run."""
        self.began = time.perf_counter()
        torch.manual_seed(self.recipe.seed)
        self.tokenizer = model_loading.load_source_tokenizer(self.source, self.trust)
        self.checkpoints = CheckpointManager(
            self.work / "checkpoints",
            self.recipe.checkpoints,
            self.accelerator.process_index,
            self.accelerator.wait_for_everyone,
        )
        self.best = BestCheckpoint(self.work / BEST, self.accelerator.process_index, self.accelerator.wait_for_everyone)
        self.log = TrainingLog(self.work, self.accelerator)
        self.progress.say(f"loading {self.source.name}")
        student = self._load_student()
        self.stored = split_stored_experts(self.source, student)  # with a tensor for each linear of an expert
        self.roles = model_loading.linear_roles(self.source, student)
        at = self._restore_position()
        start_trackers(self.accelerator, self.recipe, self.out, at)
        models = self._load_models(student)
        if at.stage == len(self.recipe.stages):
            self._restore_weights(models)
        self.validation = self._make_validation()
        if warning := self.validation.warning():
            self.progress.say(f"warning: {warning}")
        self.baseline_losses = self._measure_baseline(models)
        for number in range(at.stage, len(self.recipe.stages)):
            self._run_stage(models, number, at if number == at.stage else TrainPosition(number))
        latest = self.checkpoints.latest()
        assert latest is not None, "every stage ends with a checkpoint"
        ended = self.checkpoints.read_position(latest)
        record = self._record(ended.notes, time.perf_counter() - self.began)
        self.progress.say("writing the healed checkpoint")
        self._write_result(models, record, latest, ended.notes)
        return record

    # -- setup and resume ---------------------------------------------------------------------------------
    def _restore_position(self) -> TrainPosition:
        latest = self.checkpoints.latest()
        at = self.checkpoints.read_position(latest) if latest else TrainPosition()
        self.trained = set(at.notes.get("trained", []))
        self.stages = list(at.notes.get("stages", []))
        if self.main:
            self.log.truncate_after(at.stage, at.step)
        if latest:
            self.progress.say(f"resuming from {latest.name}")
        self.accelerator.wait_for_everyone()
        return at

    def _load_student(self) -> Any:
        """Load the student; on the meta device where the first process scatters its values."""
        return model_loading.load_student(self.source, self.trust, on_meta=not loads_values(self.accelerator))

    def _load_models(self, student: Any) -> StageModels:
        recipe, wants = self.recipe, {STAGES[stage](stage).needs_teacher for stage in self.recipe.stages}
        for stage in recipe.stages:
            model_loading.check_length(student, stage.length)
        cache = None
        if recipe.teacher.cache is not None and "logits" in wants:
            from surgery.training.teacher_cache.write_read import TeacherCache

            cache = TeacherCache(recipe.teacher.cache)
        teacher = None
        if self.teacher_name is not None:
            self.progress.say(f"loading the teacher {self.teacher_name}")
            # Stages that want more than logits use weights of its modules outside of its forward pass.
            teacher = model_loading.load_teacher(
                self.teacher_name, student, self.tokenizer, recipe.teacher, self.accelerator.device, self.trust,
                is_sharded=sharding_name(self.accelerator) == "FSDP2" and "model" not in wants,
            )  # fmt: skip
        models = StageModels(student, student, teacher, cache)
        self.changing = self._changed_parameters(models)
        self.keys = tensor_keys(student, self.stored, self.changing)
        if saved := self._hold_frozen_in_bfloat16(student):
            self.progress.say(f"frozen weights are held in bfloat16, which saves {size_text(saved)} of memory")
        if not self.is_sharded:
            student.to(self.accelerator.device)
        if teacher is not None and not self.is_sharded:
            saved = model_loading.share_frozen_tensors(student, teacher, self.changing)
            if saved:
                self.progress.say(f"teacher and student share {size_text(saved)} of frozen weights in memory")
        return models

    def _hold_frozen_in_bfloat16(self, student: Any) -> int:
        """Hold weights that no stage changes in the precision of the matrix products; return the bytes saved."""
        has_own_precision = sharding_name(self.accelerator).startswith("ZeRO")
        if has_own_precision or precision_name(self.accelerator, self.recipe.precision) != "bf16":
            return 0
        stored = stored_parameters(student, self.stored)
        return model_loading.hold_frozen_in_bfloat16(student, stored, self.changing)

    def _changed_parameters(self, models: StageModels) -> set[str]:
        """Return the names of parameters that any stage will change, after checking that all stages fit model and batch
        layout.
        """
        for config in self.recipe.stages:
            batch_layout(self.accelerator, config)
        changed = changed_parameters(self.recipe, models, self.roles)
        report = model_loading.conversion_report(self.source)
        stages = [STAGES[config](config) for config in self.recipe.stages]
        loras = [stage.adapted_weights(models, self.roles) for stage in stages if isinstance(stage, LoraStage)]
        check_kept_frozen(self.source.name, report.get("stock"), changed.union(*loras))
        stock = bool(report.get("stock"))
        whole = stock or bool(report.get("depth"))
        for warning in recipe_warnings(
            self.source.name, models.student, self.recipe.stages, converted_whole=whole, stock=stock
        ):
            self.progress.say(f"warning: {warning}")
        return changed

    def _make_validation(self) -> Validation:
        last = self.recipe.stages[-1]
        if STAGES[last].reads != "ids":  # a loss of their own, on rows that never repeat: the training log has it
            return Validation([], last.rows, self.accelerator)
        data = make_data(stage_data_config(self.recipe, last), self.tokenizer, last.length, self.recipe.seed)  # type: ignore[arg-type]
        return Validation(data.validation(), last.rows, self.accelerator)

    def _measure_baseline(self, models: StageModels) -> dict[str, float | None]:
        """Return the validation losses of the original (the teacher) and of the converted model before training, in
        nats per token. A resumed run reads them from the journal."""
        lines = [line for line in self.journal.entries if line["step"] == "measured"] if self.journal else []
        losses: dict[str, float | None] = {"original": None, "before": None}
        for line in lines:
            losses |= {key: line[key] for key in losses if key in line}
        if self.accelerator.num_processes > 1:
            from accelerate.utils import broadcast_object_list

            losses, lines = broadcast_object_list([losses, lines])
        if not lines and self.validation:
            self.progress.say("measuring the loss on validation text before training")
            if models.teacher is not None and models.teacher.device.type == self.accelerator.device.type:
                losses["original"] = self.validation.loss(models.teacher)
            if not self.is_sharded:
                self.validation.compile_kernels(models.student)
                losses["before"] = self.validation.loss(models.student)
            self._record_baseline(losses)
        return losses

    def _record_baseline(self, losses: dict[str, float | None]) -> None:
        self.baseline_losses = losses
        if self.journal:
            self.journal.add("measured", **losses)

    def _measure_sharded_baseline(self, models: StageModels, number: int, at: TrainPosition) -> None:
        """Measure the converted model before the first step, where it only fits once it is sharded."""
        if self.is_sharded and self.validation and (number, at.step) == (0, 0):
            self._record_baseline({**self.baseline_losses, "before": self.validation.student_loss(models)})

    # -- a stage ---------------------------------------------------------------------------------------
    def _run_stage(self, models: StageModels, number: int, at: TrainPosition) -> None:
        """Train one stage and save a checkpoint after it."""
        config = self.recipe.stages[number]
        stage: Stage = STAGES[config](config)
        if self.is_sharded and number:
            # A model cannot be sharded twice: load it again and restore the weights from the checkpoint.
            models.student = models.run = self._load_student()
            self._hold_frozen_in_bfloat16(models.student)
        torch.manual_seed(self.recipe.seed + 1000 * number)  # all processes must create identical new parameters
        if at.step == 0:
            self._restore_weights(models)
        changed = stage.changed_parameters(models, self.roles)
        trained = self._prepare_stage(models, stage)
        if at.step:
            self._restore_weights(models)
        allocate_meta_tensors(models.student)
        models.student.requires_grad_(False)
        for name in trained:  # whoever holds a parameter that FSDP2 replaces by its shards holds it whole on the device
            models.student.get_parameter(name).requires_grad_(True)
        groups = make_groups(models.student, trained, config)
        optimiser = make_optimizer(groups, config.optimiser)
        if self.main:
            self.show(groups_table(f"{number + 1}. {config.kind}", groups))
        models.run, optimiser = prepare(
            self.accelerator,
            models.student,
            optimiser,
            groups,
            config,
            self.recipe.precision,
            captured=self.recipe.cuda_graph,
        )
        torch.manual_seed(self.recipe.seed + 1000 * number + 1 + self.accelerator.process_index)
        data = make_data(stage_data_config(self.recipe, config), self.tokenizer, config.length, self.recipe.seed)  # type: ignore[arg-type]
        if self.accelerator.num_processes > 1:
            data.tokens = SharedTokens(
                self.work / "tokens" / data.fingerprint()[:16], self.accelerator.is_local_main_process
            )
        self._check_stage(models, stage, data)
        self._measure_scales(models, stage, data)
        self._measure_sharded_baseline(models, number, at)
        at.notes["trained"], at.notes["stages"] = sorted(self.trained), self.stages
        now = parameters_without_adapters(models.student)
        earlier = {n: now[n] for n in now if n not in trained and (n in self.trained or n.endswith(".0.size"))}
        context = LoopContext(
            accelerator=self.accelerator, recipe=self.recipe, data=data, log=self.log, checkpoints=self.checkpoints,
            report=self.reporter, validate=self.validation.student_loss, skip_bad_steps=self.skip,
            limit_validation=self.validation.limit_tokens,
            evaluate=self.recipe.evaluates, after_evaluation=self._save_if_best, earlier=earlier,
            steps_before=sum(s.steps for s in self.recipe.stages[:number]), began=self.began,
        )  # fmt: skip
        loop = TrainingLoop(context, stage, models, groups, optimiser, at)
        with self.reporter.stage(f"{number + 1}. {config.kind}", config.steps, at.step):
            loop.run()
        self.trained |= changed
        self._finish_stage(models, stage, loop)

    def _save_if_best(self, loss: float | None, at: TrainPosition, train_state: TrainState) -> None:
        """Save the state if its validation loss (nats per token) is the best so far."""
        if self.recipe.deliver == "best":
            self.best.save_if_best(loss, self.baseline_losses["before"], at, train_state)

    def _restore_weights(self, models: StageModels) -> None:
        if latest := self.checkpoints.latest():
            self.checkpoints.restore_weights(latest, parameters_without_adapters(models.student))

    def _prepare_stage(self, models: StageModels, stage: Stage) -> set[str]:
        """Let the stage add its new parameters; return the names of all parameters that it trains."""
        stage.prepare(models, self.roles)
        trained = stage.trained_parameters(models, self.roles)
        for name in trained:  # PEFT gives an adapter the dtype of the weight below it
            parameter = models.student.get_parameter(name)
            parameter.data = parameter.data.float()
        return add_core_norms(models.student, trained) if stage.config.weight_norm == "cores" else trained

    def _measure_scales(self, models: StageModels, stage: Stage, data: Any) -> None:
        config = stage.config
        rows = [example for example, _ in zip(data.examples(0), range(config.rows))]
        if rows:
            stage.measure(models, to_device(stack_examples(rows, list(range(len(rows)))), self.accelerator.device))

    def _check_stage(self, models: StageModels, stage: Stage, data: Any) -> None:
        check_packed_attention(models.student, data.config.packing, stage.config.rows)
        if models.cache is not None and stage.needs_teacher == "logits":
            models.cache.check(data)

    def _finish_stage(self, models: StageModels, stage: Stage, loop: TrainingLoop) -> None:
        """Unwrap the model and save a checkpoint after the stage.

        After the last stage the checkpoint holds the delivered state, rounded to the dtype in which it is stored. Its
        notes hold the validation loss and the digests of the adapter's files.
        """
        self.accelerator.wait_for_everyone()
        adapter = isinstance(stage, LoraStage) and stage.keeps_adapter(models, self.roles)
        after = self.validation.student_loss(models) if adapter else None
        reshard_modules(models.student)
        models.student = models.run = unwrap_model(self.accelerator, models.run)
        if stage.config.memory == "checkpoint":
            model_loading.disable_gradient_checkpointing(models.student)
        if stage.config.weight_norm == "cores":
            fold_core_norms(models.student)
        stage.finish(models, self.roles, self.work if self.main else None)
        train_state = TrainState({n: p for n, p in folded_parameters(models.student).items() if n in self.trained})
        over = loop.at.stage + 1 == len(self.recipe.stages)
        if over:
            round_to_stored_dtype(train_state.parameters, self.keys, self.stored)
        after = after if adapter else self.validation.student_loss(models)
        reshard_modules(models.student)
        self.stages.append(stage_record(stage.config.kind, loop.at))
        position = TrainPosition(
            loop.at.stage + 1, notes={"trained": sorted(self.trained), "stages": self.stages, "after": after}
        )
        if over:
            position.notes |= self._deliver_state(models, train_state, after)
        else:
            self._save_if_best(after, position, train_state)
        position.notes["adapter"] = adapter_digests(self.work) if self.main else {}
        self.checkpoints.save(position, train_state)

    # -- the delivered state -----------------------------------------------------------------------------
    def _deliver_state(self, models: StageModels, train_state: TrainState, last: float | None) -> dict[str, Any]:
        """Load the state to be delivered into the model and return its notes for the checkpoint.

        last: validation loss of the state after the last step, which the model holds now.
        """
        start, saved = self.baseline_losses["before"], self.best.latest()
        chosen, after = "last", last
        if self.recipe.deliver == "best" and last is not None:
            if saved is not None and better(self.best.loss(saved), last):
                chosen, after = saved.name, self._load_state(models, train_state, saved)
            if start is not None and after is not None and better(start, after):
                chosen, after = "start", self._load_state(models, train_state, None)
        return {"after": after, "last": last, "delivered": chosen}

    def _load_state(self, models: StageModels, train_state: TrainState, saved: Path | None) -> float | None:
        """Load a saved best state, or the start (None), into the trained parameters and return its validation loss.

        Values are rounded to the stored dtype. The student is loaded again and restored exactly as when a killed run
        resumes.
        """
        student = self._load_student()
        adapter = False
        if self.main:
            shutil.rmtree(self.work / ADAPTER, ignore_errors=True)  # it belongs to the state after the last step
        if saved is not None:
            adapter = self._restore_best(StageModels(student, student, models.teacher, models.cache), saved)
        parameters = {n: p for n, p in student.named_parameters() if n in self.trained}
        round_to_stored_dtype(parameters, self.keys, self.stored)
        for name, p in train_state.parameters.items():
            values = parameters[name].detach()
            copy_full_(p, torch.empty_like(values, device=p.device) if values.is_meta else values.to(p.device))
        if saved is None:
            return self.baseline_losses["before"]
        loss = self.best.loss(saved) if adapter else self.validation.student_loss(models)
        reshard_modules(models.student)
        return loss

    def _restore_best(self, models: StageModels, saved: Path) -> bool:
        """Restore the student from a best state and finish its stage. Return whether an adapter stays separate."""
        at = self.best.read_position(saved)
        if at.step == 0:  # after a stage
            self.best.restore_weights(saved, parameters_without_adapters(models.student))
            return False
        config = self.recipe.stages[at.stage]
        stage: Stage = STAGES[config](config)
        adapter = isinstance(stage, LoraStage) and stage.keeps_adapter(models, self.roles)
        self._prepare_stage(models, stage)
        self.best.restore_weights(saved, parameters_without_adapters(models.student))
        if config.weight_norm == "cores":
            fold_core_norms(models.student)
        stage.finish(models, self.roles, self.work if self.main else None)
        return adapter

    # -- the result ---------------------------------------------------------------------------------------
    def _record(self, notes: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the record of the run for the report. notes: those of the last checkpoint."""
        record: dict[str, Any] = {
            "out": str(self.out),
            "teacher": self.teacher_name,
            "stages": self.stages,
            "trained": len(self.trained),
        }
        if self.rates_tried:
            record["rates_tried"] = list(self.rates_tried)
        record["validation"] = loss_records({**self.baseline_losses, "after": notes["after"]})
        record["delivered"] = delivery_record(self.recipe, self.baseline_losses["before"], notes)
        record["validation_rows"] = len(self.validation.examples)
        return {**record, **run_environment(self.recipe, self.accelerator), "seconds": round(seconds, 1)}

    def _write_result(self, models: StageModels, record: dict[str, Any], latest: Path, notes: dict[str, Any]) -> None:
        """Write the result from the last checkpoint, never from the model in memory, and compare both before
        OUT.partial is removed."""
        if self.main:
            draw_curve(self.log.lines(), self.work / CURVE_NAME)
        end_trackers(self.accelerator)
        if self.main:
            trained = self.checkpoints.weights(latest)
            if set(trained) != self.trained or adapter_digests(self.work) != notes["adapter"]:
                raise SurgeryError(
                    f"{latest} does not match its notes, or {self.work / ADAPTER} was changed after training. Remove "
                    "that "
                    "checkpoint and run the same command with --resume to continue from the one before."
                )
            new = {self.keys[name]: info for name, info in trained.items()}
            new = merge_trained(self.source, self.stored, new, self.work / MERGED)
            target = write_result(self.source, new, self.work, record, bool(notes["adapter"]))
            if (self.work / READOUT).is_dir():
                shutil.copytree(self.work / READOUT, target / READOUT, symlinks=True)
            check_exported_tensors(target, self.source, new)
            for source, name in (("surgery", "tensorboard"), ("wandb", "wandb")):
                if (self.work / source).is_dir():
                    shutil.copytree(self.work / source, target / "training" / name, symlinks=True)
            publish_result(target, self.out, self.work)
        self.accelerator.wait_for_everyone()
