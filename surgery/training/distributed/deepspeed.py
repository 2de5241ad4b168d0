"""DeepSpeed ZeRO through Accelerate: configure the engine for a stage of a recipe, run optimizer steps, remove the
engine.

    ZeRO-1    shards optimizer states
    ZeRO-2    shards optimizer states and gradients; every process has all weights
    ZeRO-3    shards weights as well; those of a module are gathered while it runs

The engine clips gradients, skips steps with NaN or infinite gradients, and updates the parameters. Learning rates,
data, moving average and checkpoints are those of this package. Weights stay in float32. DeepSpeed's torch_autocast runs
matrix products in half precision, and communicates weights and gradients of linears in half precision.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from surgery.checkpoint.safetensors_io import read_tensor
from surgery.core.errors import SurgeryError
from surgery.training.batches import BatchLayout
from surgery.training.checkpoints import StoredStates
from surgery.training.distributed.step import OptimizerStep
from surgery.training.optim import ParameterGroup
from surgery.training.sharded_tensors import MaybeSharded, full_tensor

HALF_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
# Elements per communication bucket unless configured; DeepSpeed's default of 500M takes 2 GB in float32.
BUCKET_ELEMENTS = 50_000_000
INITIAL_SCALE = {
    "scale": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 0,
}
UNSUPPORTED_SETTINGS = {
    "optimizer": "set the optimizer in the recipe (stages.*.optimiser)",
    "scheduler": "set the schedule in the recipe (stages.*.schedule)",
    "amp": "set the precision in the recipe",
    "tensor_parallel": "layers of a converted model cannot be split over devices",
    "sequence_parallel_size": "sequences cannot be split over devices",
    "curriculum_learning": "set the data in the recipe",
    "data_efficiency": "set the data in the recipe",
    "compression_training": "the conversion sets the structures",
    "zenflow": "it replaces the recipe's optimizer",
}


def is_deepspeed_launch() -> bool:
    """Return whether `accelerate launch` was configured for DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def disable_zero3_init() -> None:
    """Keep transformers from sharding models at loading: each process loads the full model, sharded when a stage
    begins.
    """
    if is_deepspeed_launch():
        os.environ["ACCELERATE_DEEPSPEED_ZERO3_INIT"] = "false"


def configure_libraries(accelerator: Any, cpu: bool) -> None:
    """Enable DeepSpeed on CPUs, undo its effect on transformers' loading, and silence its log messages and warnings."""
    from transformers.integrations import unset_hf_deepspeed_config

    if cpu:
        _enable_on_cpu(accelerator)
    unset_hf_deepspeed_config()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it logs its whole configuration
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # it uses deprecated names


def _enable_on_cpu(accelerator: Any) -> None:
    """Enable DeepSpeed on CPUs, for tests: Accelerate accepts it for GPUs only."""
    from accelerate import PartialState
    from accelerate.utils import DeepSpeedPlugin, DistributedType

    for state in (PartialState(), accelerator.state):  # the second is sometimes copied from the first
        state.distributed_type = DistributedType.DEEPSPEED
    if accelerator.state.deepspeed_plugins is None:
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision("no")
        plugin.select(_from_accelerator_state=True)
        accelerator.state.deepspeed_plugins = plugin


def zero_stage(accelerator: Any) -> int:
    """Return the ZeRO stage, 0 without DeepSpeed."""
    from accelerate.utils import DistributedType

    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return 0
    return int(accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"])


# -- settings ----------------------------------------------------------------------------------------------
def check_settings(accelerator: Any) -> None:
    """Raise SurgeryError for DeepSpeed settings that training does not support."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    zero = config.get("zero_optimization", {})
    why = next((f"{key}: {reason}" for key, reason in UNSUPPORTED_SETTINGS.items() if config.get(key)), None)
    if zero_stage(accelerator) not in (1, 2, 3):
        why = f"stage {zero_stage(accelerator)} shards nothing; use accelerate launch --multi_gpu"
    for half in ("fp16", "bf16"):
        if config.get(half, {}).get("enabled") is True:
            why = f"{half}: enabled: trained weights stay in float32; set precision: {half} in the recipe"
    if (zero.get("offload_param") or {}).get("device", "none") != "none":
        why = "offload_param: weights cannot be offloaded; offload_optimizer: {device: cpu} is supported"
    if (zero.get("offload_optimizer") or {}).get("device", "none") not in ("none", "cpu"):
        why = "offload_optimizer: only device: cpu is supported"
    if (
        zero.get("mics_shard_size", -1) > 0
        or zero.get("zero_hpz_partition_size", 1) > 1
        or zero.get("zero_quantized_weights")
    ):
        why = (
            "zero_optimization: MiCS and ZeRO++ are not supported; weights must be sharded over all processes, "
            "unquantized"
        )
    if why:
        raise SurgeryError(
            f"DeepSpeed settings: {why}. See recipes/accelerate/deepspeed_zero2.yaml and deepspeed_zero3.yaml for "
            "settings that work."
        )


def configure_engine(accelerator: Any, layout: BatchLayout, clip: float | None, precision: str) -> None:
    """Set the config of the engine that `prepare` creates next. clip: maximum gradient norm; precision: bf16, fp16 or
    no.
    """
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    config |= {
        "train_micro_batch_size_per_gpu": layout.rows,
        "gradient_accumulation_steps": layout.accumulation_steps,
        "train_batch_size": layout.batch,
        "gradient_clipping": clip or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "torch_autocast": {"enabled": False},
    }
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        config["zero_optimization"].setdefault(key, BUCKET_ELEMENTS)
    accelerator.gradient_accumulation_steps = layout.accumulation_steps
    if precision in HALF_DTYPES:
        safe = [f"{cls.__module__}.{cls.__qualname__}" for cls in _linear_classes()]
        config["torch_autocast"] = {
            "enabled": True,
            "dtype": HALF_DTYPES[precision],
            "lower_precision_safe_modules": safe,
        }


def _linear_classes() -> list[type]:
    """Return the modules that only multiply matrices: their weights and gradients are sent in half precision, as with
    FSDP2.
    """
    from transformers.pytorch_utils import Conv1D

    from surgery.structures import STRUCTURES

    return [nn.Linear, Conv1D, *(STRUCTURES[config] for config in STRUCTURES)]


@torch.no_grad()
def detach_model(accelerator: Any, engine: Any) -> Any:
    """Remove the engine and return the model with unsharded weights, copied to new tensors, on every process."""
    model, old, new = engine.module, list(engine.module.parameters()), dict[int, nn.Parameter]()
    for p in old:
        new[id(p)] = nn.Parameter(full_tensor(p).clone(), requires_grad=p.requires_grad)
    places = [(module, dict(module._parameters.items())) for module in model.modules()]
    zero = engine.optimizer
    _clear_engine_hooks(engine)
    accelerator.free_memory()  # destroys the engine
    for referenced in (
        *old,
        zero,
        engine,
    ):  # referenced by autograd hooks, in cycles that the garbage collector cannot see
        vars(referenced).clear()
    for module, parameters in places:
        module._parameters = {name: None if p is None else new[id(p)] for name, p in parameters.items()}
        module.__dict__.pop("_original_parameters", None)
    return model


def _clear_engine_hooks(engine: Any) -> None:
    """Remove the hooks and global references that the engine's destruction leaves, which would keep everything in
    memory.
    """
    from deepspeed.runtime.zero import parameter_offload

    for name in ("module_forward_pre_hook", "module_forward_post_hook"):
        if (handle := getattr(engine, name, None)) is not None:
            handle.remove()
    parameter_offload.FWD_MODULE_STACK.clear()


# -- a step ------------------------------------------------------------------------------------------------
class ZeroOptimizerStep(OptimizerStep):
    """An optimizer step by the DeepSpeed engine, which skips steps with NaN or infinite gradients on all processes."""

    can_rerun = False

    def _parameters(self, groups: list[ParameterGroup]) -> dict[str, Tensor]:
        return {name: p for group in groups for name, p in zip(group.names, group.parameters)}

    def _setup(self, skip: bool) -> None:
        self.zero = self.run.optimizer
        self.optimizer_state = ZeroOptimizerState(self.zero, self.names, self.parameters)
        self.loss_scale_state: dict[str, Any] | None = None
        if getattr(self.zero, "torch_autocast_gradscaler", None) is not None:
            self.zero.torch_autocast_gradscaler = (
                None  # it unscales neither the gradient norm nor the clipped gradients
            )
            self.restore_scale(INITIAL_SCALE)

    @property
    def uses_loss_scale(self) -> bool:
        """Whether fp16 loss scaling is active."""
        return self.loss_scale_state is not None

    def forward(self, last: bool) -> AbstractContextManager[Any]:
        """Tell the engine whether this is the last micro-batch of the step."""
        self.run.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss`. The engine averages over processes; the factor undoes that."""
        self.run.backward(loss * self.layout.world, scale_wrt_gas=False)

    def step(self) -> Tensor | None:
        """Clip, update the parameters, and return the gradient norm before clipping."""
        self.run.step()
        if self.loss_scale_state is not None:
            self._rescale(bool(self.zero.overflow))
        norm = self.run.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm, device=self.accelerator.device).detach().float()

    def clear_found_inf(self) -> None:
        """Do nothing: the engine has no such flag."""

    # -- the loss scale ------------------------------------------------------------------------------
    def _rescale(self, overflow: bool) -> None:
        """Update the scale as torch's GradScaler does, in its format: a run can be resumed with or without
        DeepSpeed.
        """
        state: dict[str, Any] = {**(self.loss_scale_state or INITIAL_SCALE)}
        state["_growth_tracker"] = 0 if overflow else state["_growth_tracker"] + 1
        if overflow:
            state["scale"] *= state["backoff_factor"]
        elif state["_growth_tracker"] == state["growth_interval"]:
            state |= {"scale": state["scale"] * state["growth_factor"], "_growth_tracker": 0}
        self.restore_scale(state)

    def scaler_state(self) -> dict[str, Any] | None:
        """Return the state of the loss scale as JSON data, None without loss scaling."""
        return self.loss_scale_state

    def restore_scale(self, state: dict[str, Any]) -> None:
        """Restore what `scaler_state` returned."""
        self.loss_scale_state = dict(state)
        self.zero.override_loss_scale(self.loss_scale_state["scale"])


class ZeroOptimizerState:
    """Unsharded optimizer state by parameter name. ZeRO steps on flat shards of many parameters.

    Names and shapes are those of `TorchOptimizerState`, so that a run can be resumed without DeepSpeed or on another
    number of processes.
    """

    def __init__(self, zero: Any, names: list[list[str]], parameters: dict[str, Tensor]):
        self.zero, self.names, self.parameters = zero, names, parameters

    def states(self) -> dict[str, MaybeSharded]:
        """Return <state>.<parameter> -> tensor, or a function that gathers it."""
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link()
        states: dict[str, MaybeSharded] = {}
        for name, p, flat in self._places():
            for key, value in self.zero.optimizer.state.get(flat, {}).items():
                if not isinstance(value, Tensor) or value.shape != flat.shape:
                    states[f"{key}.{name}"] = torch.as_tensor(value)
                else:
                    states[f"{key}.{name}"] = partial(safe_get_full_optimizer_state, p, key)
        return states

    def restore(self, stored: StoredStates) -> None:
        """Load stored states into the sharded optimizer."""
        from deepspeed.utils import safe_set_full_optimizer_state

        for name, _, flat in self._places():
            for key, info in stored.get(name, {}).items():
                initial = torch.zeros_like(flat).detach() if info.shape else read_tensor(info).to(flat.device)
                self.zero.optimizer.state[flat].setdefault(key, initial)
        if hasattr(self.zero, "_lazy_init_hp_params_optimizer_state"):  # ZeRO-1 and 2 map parameters to their states
            self.zero._lazy_init_hp_params_optimizer_state()
        for name, p, flat in self._places():
            for key, info in stored.get(name, {}).items():
                if info.shape:
                    safe_set_full_optimizer_state(p, read_tensor(info, check=False).to(flat.device), key)

    def _link(self) -> None:
        """Map every parameter to its part of the optimizer state again: ZeRO-1 and 2 do it only once, after the first
        step of the first parameter group, and for that group only."""
        if hasattr(self.zero, "_lazy_init_hp_params_optimizer_state"):
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def _places(self) -> list[tuple[str, Tensor, Tensor]]:
        """Return (name, parameter, flat shard of this process that contains its part of the parameter)."""
        places = []
        for number, names in enumerate(self.names):
            for name in names:
                p: Any = self.parameters[name]
                if hasattr(p, "ds_tensor"):
                    flats, number_ = (
                        self.zero.fp32_partitioned_groups_flat,
                        self.zero.grad_position[self.zero.get_param_id(p)][0],
                    )
                else:
                    flats, number_ = self.zero.single_partition_of_fp32_groups, number
                places.append((name, p, flats[number_]))
        return places
