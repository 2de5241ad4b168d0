"""DeepSpeed's ZeRO behind Accelerate: its engine set up from a recipe's stage, driven a step at a time, taken off again.

    stages 1, 2    optimiser states, and gradients, shared out; weights whole everywhere
    stage 3        weights as well, a module's gathered while it runs

The engine clips, leaves out steps whose gradient is no number, and steps; rates, data, running mean and checkpoints are
ours. Weights stay in float32; products, and what is sent between devices for linears, are in half precision by
DeepSpeed's torch_autocast. (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".)
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
BUCKET_ELEMENTS = (
    50_000_000  # numbers sent at once, where the settings say nothing; DeepSpeed's own 500M are 2 GB in float32
)
INITIAL_SCALE = {
    "scale": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 0,
}
UNSUPPORTED_SETTINGS = {
    "optimizer": "the optimiser is the recipe's (stages.*.optimiser)",
    "scheduler": "the schedule is the recipe's (stages.*.schedule)",
    "amp": "the precision is the recipe's",
    "tensor_parallel": "a layer of a converted model is not split over devices",
    "sequence_parallel_size": "a sequence is not split over devices",
    "curriculum_learning": "the data is the recipe's",
    "data_efficiency": "the data is the recipe's",
    "compression_training": "the structures are the conversion's",
    "zenflow": "its optimiser is another one than the recipe's",
}


def is_deepspeed_launch() -> bool:
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def disable_zero3_init() -> None:
    """Models are opened whole, by each process, and spread when a stage begins: transformers is not to spread them."""
    if is_deepspeed_launch():
        os.environ["ACCELERATE_DEEPSPEED_ZERO3_INIT"] = "false"


def configure_libraries(accelerator: Any, cpu: bool) -> None:
    from transformers.integrations import unset_hf_deepspeed_config

    if cpu:
        _enable_on_cpu(accelerator)
    unset_hf_deepspeed_config()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it tells at length what it sets up
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # it calls by older names


def _enable_on_cpu(accelerator: Any) -> None:
    """Accelerate takes DeepSpeed for GPUs alone, though it runs on CPUs as well, where a run can be tried out."""
    from accelerate import PartialState
    from accelerate.utils import DeepSpeedPlugin, DistributedType

    for state in (PartialState(), accelerator.state):  # the second is filled from the first now and then
        state.distributed_type = DistributedType.DEEPSPEED
    if accelerator.state.deepspeed_plugins is None:
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision("no")
        plugin.select(_from_accelerator_state=True)
        accelerator.state.deepspeed_plugins = plugin


def zero_stage(accelerator: Any) -> int:
    """0 without DeepSpeed."""
    from accelerate.utils import DistributedType

    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return 0
    return int(accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"])


# -- settings ----------------------------------------------------------------------------------------------
def check_settings(accelerator: Any) -> None:
    """Settings that a healing cannot keep."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    zero = config.get("zero_optimization", {})
    why = next((f"{key}: {reason}" for key, reason in UNSUPPORTED_SETTINGS.items() if config.get(key)), None)
    if zero_stage(accelerator) not in (1, 2, 3):
        why = f"stage {zero_stage(accelerator)} spreads nothing: use accelerate launch --multi_gpu"
    for half in ("fp16", "bf16"):
        if config.get(half, {}).get("enabled") is True:
            why = f"{half}: enabled: trained weights are float32 beneath; set precision: {half} in the recipe"
    if (zero.get("offload_param") or {}).get("device", "none") != "none":
        why = "offload_param: weights stay on the devices; offload_optimizer: {device: cpu} is possible"
    if (zero.get("offload_optimizer") or {}).get("device", "none") not in ("none", "cpu"):
        why = "offload_optimizer: to the CPU's memory (device: cpu) or not at all"
    if (
        zero.get("mics_shard_size", -1) > 0
        or zero.get("zero_hpz_partition_size", 1) > 1
        or zero.get("zero_quantized_weights")
    ):
        why = "zero_optimization: parts of weights are shared by all processes and kept exact (no MiCS, no ZeRO++)"
    if why:
        raise SurgeryError(
            f"DeepSpeed's settings: {why}. recipes/accelerate/deepspeed_zero2.yaml and deepspeed_zero3.yaml are ones that work"
        )


def configure_engine(accelerator: Any, layout: BatchLayout, clip: float | None, precision: str) -> None:
    """The engine that `prepare` makes next."""
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
    """What is one product after the other, whose weights and gradients are sent in half precision, as FSDP2 does."""
    from transformers.pytorch_utils import Conv1D

    from surgery.structures import STRUCTURES

    return [nn.Linear, Conv1D, *(STRUCTURES[config] for config in STRUCTURES)]


@torch.no_grad()
def detach_model(accelerator: Any, engine: Any) -> Any:
    """The model without its engine: whole weights, everywhere, in tensors of their own."""
    model, old, new = engine.module, list(engine.module.parameters()), dict[int, nn.Parameter]()
    for p in old:
        new[id(p)] = nn.Parameter(full_tensor(p).clone(), requires_grad=p.requires_grad)
    places = [(module, dict(module._parameters.items())) for module in model.modules()]
    zero = engine.optimizer
    _clear_engine_hooks(engine)
    accelerator.free_memory()  # ends the engine
    for left in (*old, zero, engine):  # held by autograd's hooks, which no collector sees through
        vars(left).clear()
    for module, parameters in places:
        module._parameters = {name: None if p is None else new[id(p)] for name, p in parameters.items()}
        module.__dict__.pop("_original_parameters", None)
    return model


def _clear_engine_hooks(engine: Any) -> None:
    """What its own end leaves on the model and in lists of DeepSpeed's, by which all of it would stay in memory."""
    from deepspeed.runtime.zero import parameter_offload

    for name in ("module_forward_pre_hook", "module_forward_post_hook"):
        if (handle := getattr(engine, name, None)) is not None:
            handle.remove()
    parameter_offload.FWD_MODULE_STACK.clear()


# -- a step ------------------------------------------------------------------------------------------------
class ZeroOptimizerStep(OptimizerStep):
    """By the engine. A step whose gradient is no number is left out by it, in all processes."""

    can_rerun = False

    def _parameters(self, groups: list[ParameterGroup]) -> dict[str, Tensor]:
        return {name: p for group in groups for name, p in zip(group.names, group.parameters)}

    def _setup(self, skip: bool) -> None:
        self.zero = self.run.optimizer
        self.optimizer_state = ZeroOptimizerState(self.zero, self.names, self.parameters)
        self.loss_scale_state: dict[str, Any] | None = None
        if getattr(self.zero, "torch_autocast_gradscaler", None) is not None:
            self.zero.torch_autocast_gradscaler = None  # it unscales neither the norm nor what is clipped by it
            self.restore_scale(INITIAL_SCALE)

    @property
    def uses_loss_scale(self) -> bool:
        return self.loss_scale_state is not None

    def forward(self, last: bool) -> AbstractContextManager[Any]:
        self.run.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """The engine takes the mean over processes."""
        self.run.backward(loss * self.layout.world, scale_wrt_gas=False)

    def step(self) -> Tensor | None:
        self.run.step()
        if self.loss_scale_state is not None:
            self._rescale(bool(self.zero.overflow))
        norm = self.run.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm, device=self.accelerator.device).detach().float()

    def clear_found_inf(self) -> None:
        pass

    # -- the loss scale ------------------------------------------------------------------------------
    def _rescale(self, overflow: bool) -> None:
        """By the rule and in the words of torch's GradScaler, so that a run may go on with that, and the other way round."""
        state: dict[str, Any] = {**(self.loss_scale_state or INITIAL_SCALE)}
        state["_growth_tracker"] = 0 if overflow else state["_growth_tracker"] + 1
        if overflow:
            state["scale"] *= state["backoff_factor"]
        elif state["_growth_tracker"] == state["growth_interval"]:
            state |= {"scale": state["scale"] * state["growth_factor"], "_growth_tracker": 0}
        self.restore_scale(state)

    def scaler_state(self) -> dict[str, Any] | None:
        return self.loss_scale_state

    def restore_scale(self, state: dict[str, Any]) -> None:
        self.loss_scale_state = dict(state)
        self.zero.override_loss_scale(self.loss_scale_state["scale"])


class ZeroOptimizerState:
    """What the optimiser remembers, whole tensor by whole tensor though it steps on flat parts of many: the same names and
    shapes as without DeepSpeed, so that a run may go on without it, or on another number of processes."""

    def __init__(self, zero: Any, names: list[list[str]], parameters: dict[str, Tensor]):
        self.zero, self.names, self.parameters = zero, names, parameters

    def states(self) -> dict[str, MaybeSharded]:
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link()
        found: dict[str, MaybeSharded] = {}
        for name, p, flat in self._places():
            for key, value in self.zero.optimizer.state.get(flat, {}).items():
                if not isinstance(value, Tensor) or value.shape != flat.shape:
                    found[f"{key}.{name}"] = torch.as_tensor(value)
                else:
                    found[f"{key}.{name}"] = partial(safe_get_full_optimizer_state, p, key)
        return found

    def restore(self, stored: StoredStates) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        for name, _, flat in self._places():
            for key, info in stored.get(name, {}).items():
                blank = torch.zeros_like(flat).detach() if info.shape else read_tensor(info).to(flat.device)
                self.zero.optimizer.state[flat].setdefault(key, blank)
        if hasattr(
            self.zero, "_lazy_init_hp_params_optimizer_state"
        ):  # stages 1 and 2 remember where each one's part is
            self.zero._lazy_init_hp_params_optimizer_state()
        for name, p, flat in self._places():
            for key, info in stored.get(name, {}).items():
                if info.shape:
                    safe_set_full_optimizer_state(p, read_tensor(info, check=False).to(flat.device), key)

    def _link(self) -> None:
        """Stages 1 and 2 note where each parameter's part of a state is when the first of the groups has stepped, and of
        that group alone; so once more."""
        if hasattr(self.zero, "_lazy_init_hp_params_optimizer_state"):
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def _places(self) -> list[tuple[str, Tensor, Tensor]]:
        """(name, parameter, the flat part that this process steps on and that holds what is its of the parameter)."""
        found = []
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
                found.append((name, p, flats[number_]))
        return found
