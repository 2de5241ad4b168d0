"""The accelerator a run is on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from surgery.core.errors import SurgeryError
from surgery.training.batches import BatchLayout
from surgery.training.distributed import deepspeed as zero
from surgery.training.distributed.step import OptimizerStep
from surgery.training.logging import tracker_names


def make_accelerator(device: str | None, precision: str, track: str | None, folder: Path) -> Any:
    """Accelerate's, as `accelerate launch` set it up; on CPUs where there is nothing else."""
    from accelerate import Accelerator

    cpu = device == "cpu" or not torch.accelerator.is_available()
    tracking_options: dict[str, Any] = {"log_with": tracker_names(track) or None, "project_dir": str(folder)}
    word = (
        "no" if zero.is_deepspeed_launch() else _accelerate_precision(precision, cpu)
    )  # DeepSpeed's is the engine's, see prepare
    _reset_accelerator_state(cpu, word)
    zero.disable_zero3_init()
    accelerator = Accelerator(cpu=cpu, mixed_precision=word, **tracking_options)
    if cpu and accelerator.num_processes > 1 and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        _enable_fsdp_on_cpu(accelerator)
    if zero.is_deepspeed_launch():
        zero.configure_libraries(accelerator, cpu)
    _check_supported(accelerator)
    return accelerator


def batch_layout(accelerator: Any, config: Any) -> BatchLayout:
    """config: of a stage."""
    return BatchLayout.create(config.batch, config.rows, accelerator.process_index, accelerator.num_processes)


def prepare(accelerator: Any, model: Any, optimiser: Any, config: Any, precision: str) -> tuple[Any, Any]:
    """(what is called, its optimiser) on all devices, for a stage of that config."""
    if zero.zero_stage(accelerator):
        word = _accelerate_precision(precision, accelerator.device.type == "cpu")
        zero.configure_engine(accelerator, batch_layout(accelerator, config), config.clip, word)
    return accelerator.prepare(model, optimiser)


def optimizer_step_class(accelerator: Any) -> type[OptimizerStep]:
    return zero.ZeroOptimizerStep if zero.zero_stage(accelerator) else OptimizerStep


def sharding_name(accelerator: Any) -> str:
    """How weights or their optimiser are spread over devices; "" where every device has all of them."""
    if stage := zero.zero_stage(accelerator):
        return f"ZeRO-{stage}"
    return "FSDP2" if getattr(accelerator, "is_fsdp2", False) else ""


def precision_name(accelerator: Any, precision: str) -> str:
    """Accelerate's word for that of the products."""
    cpu = accelerator.device.type == "cpu"
    return _accelerate_precision(precision, cpu) if zero.zero_stage(accelerator) else accelerator.mixed_precision


def unwrap_model(accelerator: Any, run: Any) -> Any:
    """The model as it was before `prepare`. Its mark goes too: Accelerate takes a model that bears it for one that still
    casts to half precision, and a next stage would run in float32."""
    if zero.zero_stage(accelerator):
        return zero.detach_model(accelerator, run)
    model = accelerator.unwrap_model(run, keep_fp32_wrapper=False)
    for left in ("forward", "_is_accelerate_prepared"):
        model.__dict__.pop(left, None)
    accelerator.free_memory()
    return model


def _check_supported(accelerator: Any) -> None:
    from accelerate.utils import DistributedType

    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise SurgeryError(
            "accelerate is set up for the first FSDP; set fsdp_version: 2, see recipes/accelerate/fsdp2.yaml"
        )
    if kind == DistributedType.MEGATRON_LM:
        raise SurgeryError(
            f"accelerate is set up for {kind.value}, which wants models of its own making; use FSDP2, which spreads a model as it "
            "is: accelerate launch --config_file recipes/accelerate/fsdp2.yaml .."
        )
    if kind == DistributedType.DEEPSPEED:
        zero.check_settings(accelerator)


def _accelerate_precision(precision: str, cpu: bool) -> str:
    """Accelerate's."""
    if precision == "auto":
        return "no" if cpu or not (torch.cuda.is_available() and torch.cuda.is_bf16_supported()) else "bf16"
    return {"float32": "no"}.get(precision, precision)


def _reset_accelerator_state(cpu: bool, precision: str) -> None:
    """A process remembers the device and the precision of its first Accelerator and refuses others; a run before this
    one is over. Where several processes stand in one group, that goes on."""
    from accelerate.state import AcceleratorState

    if not AcceleratorState._shared_state:
        return
    state = AcceleratorState()
    if (state._mixed_precision, state.device.type == "cpu") != (precision, cpu):
        AcceleratorState._reset_state(reset_partial_state=state.num_processes == 1)


def _enable_fsdp_on_cpu(accelerator: Any) -> None:
    """Accelerate takes FSDP for GPUs alone, though torch's runs on CPUs as well, where a run can be tried out."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    for state in (PartialState(), accelerator.state):  # the second is filled from the first now and then
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
