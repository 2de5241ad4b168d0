"""A model in memory as the source of a conversion: its tensors stay where they are, and are read like those of a checkpoint.

A transformers model is built once more on the meta device from its config, as `surgery convert` builds it from config.json, so that
equal weights give equal bits. Any other module, and a transformers model that was changed after it was built, is copied to the
meta device. A module that is no transformers model becomes one layer (surgery/conversion/whole_module.py).
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.architectures.experts import split_experts
from surgery.checkpoint.meta_model import MetaModel, split_stored_experts
from surgery.checkpoint.model_classes import build_on_meta
from surgery.checkpoint.safetensors_io import TensorInfo
from surgery.checkpoint.source import CheckpointSource
from surgery.conversion.whole_module import PREFIX, PlainConfig, PlainModel
from surgery.core.errors import SurgeryError
from surgery.modeling.live import HOOKS, has_adapter, is_converted


@dataclass(frozen=True)
class LiveSource(CheckpointSource):
    """The tensors of a model in memory, in the place of a checkpoint's files. It has no companion files."""

    def companions(self) -> list[Path]:
        """Return []: there are no files beside a live model's weights."""
        return []


class LiveModel(MetaModel):
    """A live model's copy on the meta device, and its tensors. Reading them copies them; the live model is not changed.

    live: the model. prefix: what the paths of the copy have before those of the live model, "" for transformers models.
    Attributes of MetaModel: as there; tensors have the names of the parameters.
    """

    def __init__(self, live: Any):
        check_replaceable(live)
        self.live, self.trust_remote_code, self.unused = live, False, []
        state = {name: tensor for name, tensor in live.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
        if is_library_model(live):
            config, self.prefix = saved_config(live), ""
            self.config = type(live.config).from_dict(copy.deepcopy(config))
            self.model = self._library_copy(state)
            split_experts(self.model)
            pairs = dict(getattr(live, "all_tied_weights_keys", None) or {})
            self.tied = {name: twin for name, twin in pairs.items() if _share_memory(state, name, twin)}
            name = live.config.name_or_path or type(live).__name__
        else:
            config, self.prefix, name = {"model_type": type(live).__name__}, PREFIX, type(live).__name__
            self.config = PlainConfig(type(live).__name__)
            self.model = PlainModel(_empty_copy(live), self.config)
            self.tied = {f"{PREFIX}{name}": f"{PREFIX}{twin}" for name, twin in _shared_names(state).items()}
        owner = type(live).__name__
        tensors = {
            f"{self.prefix}{name}": TensorInfo.in_memory(f"{self.prefix}{name}", tensor, owner)
            for name, tensor in state.items()
            if f"{self.prefix}{name}" not in self.tied
        }
        self.source: CheckpointSource = LiveSource(name, Path(), config, tensors)
        if is_library_model(live):
            self.source = split_stored_experts(self.source, self.model)
        self.keys = {name: name for name in self.source.tensors}

    def live_path(self, path: str) -> str:
        """Return the path in the live model of a module of the copy."""
        return path.removeprefix(self.prefix)

    def _library_copy(self, state: dict[str, Tensor]) -> Any:
        """Build the model from its config; copy it if the live model has other parameters than its config makes."""
        built = build_on_meta(type(self.live), copy.deepcopy(self.config), type(self.live).__name__)
        expected = {name: tensor.shape for name, tensor in built.state_dict().items()}
        return built if expected == {name: tensor.shape for name, tensor in state.items()} else _empty_copy(self.live)


def is_library_model(model: Any) -> bool:
    """Return whether a module is a model of transformers."""
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def saved_config(model: Any) -> dict[str, Any]:
    """Return the config.json that the model's save_pretrained writes."""
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], str(model.dtype).removeprefix("torch.")
    loaded: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    return loaded


def _share_memory(state: dict[str, Tensor], name: str, twin: str) -> bool:
    return (
        name in state and twin in state and (state[name] is state[twin] or _place(state[name]) == _place(state[twin]))
    )


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.device, tensor.data_ptr(), tensor.shape) if not tensor.is_meta else (id(tensor),)


def _shared_names(state: dict[str, Tensor]) -> dict[str, str]:
    """Return name -> first name of the same tensor, for parameters that a module has under several names."""
    first: dict[Any, str] = {}
    found = {}
    for name, tensor in state.items():
        twin = first.setdefault(id(tensor), name)
        if twin != name:
            found[name] = twin
    return found


def _empty_copy(model: nn.Module) -> Any:
    """Return a copy with parameters on meta, buffers on the CPU, in evaluation mode and without hooks."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer if buffer.is_meta else buffer.detach().to("cpu", copy=True)
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:  # a module may hold anything: locks, files, streams
        raise SurgeryError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {' '.join(str(error).split())[:200]}), which "
            "its calibration needs. Remove the attribute that cannot be copied, or apply surgery to the submodule with the linears"
        ) from None
    for module in copied.modules():
        for hooks in HOOKS:
            getattr(module, hooks).clear()
    for module in copied.modules():
        for name, values in module._buffers.items():
            if values is not None and values.is_floating_point():
                module._buffers[name] = values.float()
    return copied.eval()


# -- models that cannot be converted ---------------------------------------------------------------
def check_is_module(model: Any, function: str) -> None:
    """Raise SurgeryError unless `model` is a module. function: its caller, for the message."""
    if not isinstance(model, nn.Module):
        raise SurgeryError(
            f"surgery.{function} takes a model in memory (got a {type(model).__name__}: {str(model)[:80]!r}). Load it first, or "
            "use surgery.convert(source, recipe, out) on a checkpoint"
        )


def check_replaceable(model: Any) -> None:
    """Raise SurgeryError if modules of the model cannot be replaced: a wrapper, an adapter, quantized or converted weights."""
    kind = type(model).__name__
    inner = next((name for name in ("_orig_mod", "module") if hasattr(model, name) and _is_wrapper(model)), None)
    if inner:
        raise SurgeryError(
            f"{kind} wraps a model; replaced modules must be known to it. Apply surgery to model.{inner} first"
        )
    if hasattr(model, "peft_config") or has_adapter(model):
        raise SurgeryError(
            f"{kind} has a PEFT adapter, whose base weights may not change below it. Merge it first (model = "
            "model.merge_and_unload()), or apply surgery to the base model and add the adapter afterwards"
        )
    if is_converted(model):
        raise SurgeryError(
            f"{kind} is already converted. Start from the original model, or multiply its structured linears out first "
            "(surgery.densify(model)); attention that was replaced stays replaced"
        )
    table = getattr(getattr(model, "config", None), "quantization_config", None)
    if table is not None or getattr(model, "is_quantized", False):
        method = table.get("quant_method") if isinstance(table, dict) else getattr(table, "quant_method", "unknown")
        raise SurgeryError(
            f"{kind} is quantized ({getattr(method, 'value', method)}); surgery needs full-precision weights. Load it without "
            "quantization, or call model.dequantize()"
        )
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and type(tensor.detach()) is not Tensor:
            raise SurgeryError(
                f"{kind}: {name} is a {type(tensor.detach()).__name__}, not a plain tensor (sharded or quantized weights). Apply "
                "surgery before the model is sharded or quantized"
            )


def _is_wrapper(model: Any) -> bool:
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    return (
        isinstance(model, parallel) or hasattr(model, "_orig_mod") or "FullyShardedDataParallel" in type(model).__name__
    )
