"""Create the Accelerate accelerator of a run, prepare models for it, and undo the preparation after a stage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from surgery.core.errors import SurgeryError
from surgery.training.batches import BatchLayout
from surgery.training.distributed import deepspeed as zero
from surgery.training.distributed.launch import is_worker
from surgery.training.distributed.step import OptimizerStep, is_bare_replica
from surgery.training.logging import tracker_names
from surgery.training.optim import ParameterGroup
from surgery.training.sharded_tensors import scatter_values

SHARDINGS = ("auto", "ddp", "fsdp2")
REPLICATED_PARAMETERS = 1.5e9  # Llama 3.2 1B has 1.24e9; above, `auto` shards
REPLICA_BYTES = 18  # of a parameter on each device: float32 weight, gradient and two AdamW states, bfloat16 teacher
REPLICA_SHARE = 0.6  # of a GPU's memory; the rest is for activations
FSDP_SETTINGS = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # of recipes/accelerate/fsdp2.yaml


def configure_sharding(asked: str, parameters: int, device: str | None) -> None:
    """Set FSDP2 in this process's environment, as `accelerate launch` does, where weights are to be sharded.

    asked: of SHARDINGS; auto follows `accelerate launch` where that started this process, and otherwise shards models
    above REPLICATED_PARAMETERS and those that would leave no room on a GPU. parameters: of the student. Raises
    SurgeryError if the processes were started for another kind.
    """
    if asked not in SHARDINGS:
        raise SurgeryError(f"--sharding must be one of {', '.join(SHARDINGS)} (got {asked}).")
    configured = "DeepSpeed" if zero.is_deepspeed_launch() else "fsdp2" if _is_fsdp_launch() else ""
    if asked == "auto":
        if is_worker() and not configured and needs_sharding(parameters, device):
            os.environ.update(FSDP_SETTINGS)
    elif int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise SurgeryError(f"--sharding {asked} needs several processes. Add --gpus, for example --gpus 4.")
    elif configured not in ("", asked):
        raise SurgeryError(
            f"--sharding {asked}: accelerate launch is configured for {configured}. Leave out --sharding."
        )
    elif asked == "fsdp2" and not configured:
        os.environ.update(FSDP_SETTINGS)


def needs_sharding(parameters: int, device: str | None) -> bool:
    """Return whether `--sharding auto` divides a model of this many parameters over the devices."""
    if parameters > REPLICATED_PARAMETERS:
        return True
    if device == "cpu" or not torch.cuda.is_available():
        return False
    memory = torch.cuda.get_device_properties(0).total_memory
    return parameters * REPLICA_BYTES > REPLICA_SHARE * memory


def _is_fsdp_launch() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP") == "true"


def make_accelerator(device: str | None, precision: str, track: str | None, folder: Path) -> Any:
    """Return an Accelerator with the settings of `accelerate launch`; on the CPU if there is no GPU or device is "cpu".

    precision: of the recipe. track: names of trackers. folder: where trackers write. Raises SurgeryError for
    unsupported settings.
    """
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

    cpu = device == "cpu" or not torch.accelerator.is_available()
    tracking_options: dict[str, Any] = {"log_with": tracker_names(track) or None, "project_dir": str(folder)}
    # With DeepSpeed the engine sets the precision, see prepare.
    mixed = "no" if zero.is_deepspeed_launch() else _accelerate_precision(precision, cpu)
    _reset_accelerator_state(cpu, mixed)
    zero.disable_zero3_init()
    # Gradients need no copy beside the buckets that are communicated.
    replicas = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    # FSDP2 would hold whole gradients between the micro-batches of a step, in the precision of matrix products.
    accumulation = GradientAccumulationPlugin(num_steps=1, sync_each_batch=_is_fsdp_launch())
    accelerator = Accelerator(
        cpu=cpu, mixed_precision=mixed, kwargs_handlers=[replicas], gradient_accumulation_plugin=accumulation,
        **tracking_options,
    )  # fmt: skip
    if cpu and accelerator.num_processes > 1 and _is_fsdp_launch():
        _enable_fsdp_on_cpu(accelerator)
    if zero.is_deepspeed_launch():
        zero.configure_libraries(accelerator, cpu)
    _check_supported(accelerator)
    return accelerator


def end_process_group() -> None:
    """Leave the group of several processes. A process that runs several recipes calls it after the last one."""
    from accelerate import PartialState

    PartialState().destroy_process_group()


def batch_layout(accelerator: Any, config: Any) -> BatchLayout:
    """Return how a stage's batch is divided over forwards and processes. config: the stage's."""
    return BatchLayout.create(config.batch, config.rows, accelerator.process_index, accelerator.num_processes)


def prepare(
    accelerator: Any, model: Any, optimiser: Any, groups: list[ParameterGroup], config: Any, precision: str,
    *, captured: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Return (wrapped model, wrapped optimizer) for a stage.

    groups: of the optimizer; config: the stage's; precision: of the recipe.

    captured: whether a CUDA graph may hold the forward and backward pass. Replicas then stay unwrapped, and
    OptimizerStep sums their gradients. With FSDP2 all values are those of the first process, and the groups hold the
    shards afterwards.
    """
    if captured and is_bare_replica(accelerator, model):
        for parameter in (p for p in model.parameters() if p.requires_grad):
            torch.distributed.broadcast(parameter.data, 0)
        run = accelerator.prepare_model(model, evaluation_mode=True)  # without DistributedDataParallel
        return run, accelerator.prepare_optimizer(optimiser)
    if zero.zero_stage(accelerator):
        mixed = _accelerate_precision(precision, accelerator.device.type == "cpu")
        zero.configure_engine(accelerator, batch_layout(accelerator, config), config.clip, mixed)
    if not getattr(accelerator, "is_fsdp2", False):
        return accelerator.prepare(model, optimiser)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    run, optimiser = accelerator.prepare(model, optimiser)
    scatter_values(run, values)
    for group, prepared in zip(groups, optimiser.param_groups):
        group.parameters = list(prepared["params"])
    return run, optimiser


def loads_values(accelerator: Any) -> bool:
    """Return whether this process reads the student's values: with FSDP2 the first alone, and others build the student
    on the meta device.
    """
    return accelerator.is_main_process or not getattr(accelerator, "is_fsdp2", False)


def optimizer_step_class(accelerator: Any) -> type[OptimizerStep]:
    """Return ZeroOptimizerStep with DeepSpeed, else OptimizerStep."""
    return zero.ZeroOptimizerStep if zero.zero_stage(accelerator) else OptimizerStep


def sharding_name(accelerator: Any) -> str:
    """Return "ZeRO-1" to "ZeRO-3" or "FSDP2", or "" if every device has all weights and optimizer states."""
    if stage := zero.zero_stage(accelerator):
        return f"ZeRO-{stage}"
    return "FSDP2" if getattr(accelerator, "is_fsdp2", False) else ""


def precision_name(accelerator: Any, precision: str) -> str:
    """Return the precision of matrix products as Accelerate names it: no, bf16 or fp16."""
    cpu = accelerator.device.type == "cpu"
    return _accelerate_precision(precision, cpu) if zero.zero_stage(accelerator) else accelerator.mixed_precision


def unwrap_model(accelerator: Any, run: Any) -> Any:
    """Return the model as it was before `prepare`.

    Its flag _is_accelerate_prepared is removed as well: Accelerate would assume that the model still casts to half
    precision, and the next stage would run in float32.
    """
    if zero.zero_stage(accelerator):
        return zero.detach_model(accelerator, run)
    model = accelerator.unwrap_model(run, keep_fp32_wrapper=False)
    for attribute in ("forward", "_is_accelerate_prepared"):
        model.__dict__.pop(attribute, None)
    accelerator.free_memory()
    return model


def _check_supported(accelerator: Any) -> None:
    from accelerate.utils import DistributedType

    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise SurgeryError(
            "accelerate is configured for FSDP 1, which is not supported. Set fsdp_version: 2, see "
            "recipes/accelerate/fsdp2.yaml."
        )
    if kind == DistributedType.MEGATRON_LM:
        raise SurgeryError(
            f"accelerate is configured for {kind.value}, which needs its own model classes. Use FSDP2: accelerate "
            "launch "
            "--config_file recipes/accelerate/fsdp2.yaml .."
        )
    if kind == DistributedType.DEEPSPEED:
        zero.check_settings(accelerator)


def _accelerate_precision(precision: str, cpu: bool) -> str:
    """Return Accelerate's name of a recipe's precision: no, bf16 or fp16."""
    if precision == "auto":
        return "no" if cpu or not (torch.cuda.is_available() and torch.cuda.is_bf16_supported()) else "bf16"
    return {"float32": "no"}.get(precision, precision)


def _reset_accelerator_state(cpu: bool, precision: str) -> None:
    """Forget the device and precision of an earlier run's Accelerator in this process, which a new one must otherwise
    match.

    The process group of several processes is kept.
    """
    from accelerate.state import AcceleratorState

    if not AcceleratorState._shared_state:
        return
    state = AcceleratorState()
    if (state._mixed_precision, state.device.type == "cpu") != (precision, cpu):
        AcceleratorState._reset_state(reset_partial_state=state.num_processes == 1)


def _enable_fsdp_on_cpu(accelerator: Any) -> None:
    """Enable FSDP2 on CPUs, for tests: Accelerate accepts it for GPUs only."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    for state in (PartialState(), accelerator.state):  # the second is sometimes copied from the first
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin = FullyShardedDataParallelPlugin()
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
