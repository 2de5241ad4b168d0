"""The model on the meta device: transformers' own class, every parameter without storage.

`load_module` and `unload_module` read and release weights one layer at a time. Tensor names are mapped to parameters by
transformers' own loading rules, so renamed families (ViT, legacy BERT) and checkpoints with or without the base model's
prefix work. See convert_and_load_state_dict_in_model in
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/core_model_loading.py
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from surgery.architectures.expert_layout import file_names
from surgery.architectures.experts import RoutedExperts, split_experts
from surgery.checkpoint.model_classes import build_on_meta, class_of_tensors, model_class
from surgery.checkpoint.safetensors_io import TensorInfo, read_tensor
from surgery.checkpoint.source import CheckpointSource
from surgery.checkpoint.tensor_names import (
    check_linear_tensors,
    check_tensor_names,
    check_tensor_shapes,
    map_tensor_names,
    missing_and_unexpected,
)
from surgery.core.environment import check_environment
from surgery.core.errors import SurgeryError

SPECIAL_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetaModel:
    """A model on the meta device, and the tensors of its checkpoint.

    model: parameters on meta, buffers computed; experts as linears (surgery/architectures/experts.py). keys: tensor
    name in the file by parameter name. tied: tied parameters, as transformers lists them. unused: tensors that the
    model's class does not use.
    """

    model: Any
    config: Any
    source: CheckpointSource
    keys: dict[str, str]
    tied: dict[str, str]
    unused: list[str]
    trust_remote_code: bool

    def __init__(self, source: CheckpointSource, trust_remote_code: bool = False):
        self.trust_remote_code = trust_remote_code
        self.config = load_config(source, trust_remote_code)
        if (cls := class_of_tensors(self.config, source)) is not None:
            self.config.architectures = [cls.__name__]
        self.model = _build_on_meta(self.config, source, trust_remote_code)
        self.source = source = split_stored_experts(source, self.model)
        self.keys = _parameter_keys(self.model, source)
        self.tied = dict(getattr(self.model, "all_tied_weights_keys", None) or {})
        missing, unexpected = missing_and_unexpected(self.model, self.keys)
        check_tensor_names(type(self.model).__name__, missing, (), source.name)
        check_linear_tensors(self.model, unexpected, source.name)
        self.unused = sorted({name for key in unexpected for name in (key, self.keys[key])})
        check_tensor_shapes(self.model, {key: source.tensors[name] for key, name in self.keys.items()}, source.name)

    @classmethod
    def of_built(cls, model: Any, config: Any, source: CheckpointSource, tied: dict[str, str]) -> MetaModel:
        """Return the meta model of modules that exist already, with parameters on meta.

        The source's tensors have their names.
        """
        meta_model = cls.__new__(cls)
        meta_model.model, meta_model.config, meta_model.source, meta_model.tied = model, config, source, tied
        meta_model.keys = {name: name for name in source.tensors}
        meta_model.trust_remote_code, meta_model.unused = False, []
        return meta_model

    def tensor_info(self, parameter: str) -> TensorInfo:
        """Return the location of a parameter's tensor; of a tied parameter, the location of its twin's."""
        for name in (parameter, self.tied.get(parameter, ""), *(k for k, v in self.tied.items() if v == parameter)):
            if name in self.keys:
                return self.source.tensors[self.keys[name]]
        raise SurgeryError(
            f"{self.source.name} has no tensor for parameter {parameter!r}, which its model class expects"
        )

    def module(self, path: str) -> nn.Module:
        """Return the module at `path`."""
        module: nn.Module = self.model.get_submodule(path)
        return module

    def most_parameters(self, paths: Iterable[str]) -> int:
        """Return the number of parameters of the largest module among paths, 0 without any."""
        return max((sum(p.numel() for p in self.module(path).parameters()) for path in paths), default=0)

    def load_module(self, path: str, device: torch.device, skip: Iterable[str] = ()) -> int:
        """Read the parameters of the module at `path` in float32 onto `device`; return the number of bytes read.

        skip: paths of submodules that stay on meta.
        """
        module, total, skip = self.module(path), 0, tuple(f"{s}." for s in skip)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            full = f"{path}.{name}" if path else name
            if full.startswith(skip) or not (tensor.is_meta or full in self.keys):
                continue
            if not tensor.is_meta and self.source.tensors[self.keys[full]].dtype not in ("F32", "F16", "BF16", "F64"):
                continue
            info = self.tensor_info(full)
            set_module_tensor(module, name, read_tensor(info, torch.float32, device=device))
            total += info.nbytes
        return total

    def unload_module(self, path: str) -> None:
        """Move the parameters of the module at `path` back to meta, which frees their memory."""
        module = self.module(path)
        for name, tensor in list(module.named_parameters()):
            set_module_tensor(module, name, torch.empty_like(tensor, device="meta"))


def build_unconverted_model(source: CheckpointSource) -> Any:
    """Return the original model of a converted checkpoint, on meta."""
    config = {k: v for k, v in source.config.items() if k not in ("quantization_config", "auto_map")}
    return bare_model(CheckpointSource(source.name, source.folder, config, {}))


def bare_model(source: CheckpointSource, trust_remote_code: bool = False) -> Any:
    """Build the model of a config on meta, without reading any tensor."""
    return _build_on_meta(load_config(source, trust_remote_code), source, trust_remote_code)


def set_module_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Set the parameter or buffer `name` to `tensor`, without requires_grad."""
    *parents, leaf = name.split(".")
    for parent in parents:
        module = getattr(module, parent)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[leaf] = tensor


def config_object(config_type: type[Any], config: dict[str, Any]) -> Any:
    """Return an object of a transformers config class with the values of a config.json, which is not changed.

    transformers writes infinity and NaN as {"__float__": "Infinity"}, and reads that from files only.
    """
    return config_type.from_dict(_decode(copy.deepcopy(config)))


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"__float__"} and isinstance(tag := value["__float__"], str) and tag in SPECIAL_FLOATS:
            return SPECIAL_FLOATS[tag]
        return {key: _decode(entry) for key, entry in value.items()}
    return [_decode(entry) for entry in value] if isinstance(value, list) else value


def load_config(source: CheckpointSource, trust_remote_code: bool) -> Any:
    """Load the transformers config of a checkpoint. Raises SurgeryError if transformers cannot use it."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
        return config if source.whole is None else config_object(type(config), source.config)
    except Exception as error:  # a config from the Hub can fail in any way
        check_environment(error)
        raise SurgeryError(
            f"{source.name}: transformers cannot use its config.json ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]})"
        ) from None


def split_stored_experts(source: CheckpointSource, model: Any) -> CheckpointSource:
    """Return the source with merged tensors of experts listed as a tensor for each linear of the model's RoutedExperts.

    See ExpertLayout for what they hold. Only the locations are listed; nothing is read. Tensors of other shapes stay as
    they are.
    """
    routed = [(path, m) for path, m in model.named_modules() if isinstance(m, RoutedExperts)]
    tensors = dict(source.tensors)
    for path, module in routed:
        for merged in module.layout.merged_names():
            for name in file_names(model, f"{path}.{merged}"):
                info = tensors.get(name)
                if info is not None and info.shape[:1] == (module.num_experts,) and len(info.shape) == _axes(merged):
                    del tensors[name]
                    prefix = f"{model.base_model_prefix}."
                    base = path if name.startswith(prefix) else path.removeprefix(prefix)
                    tensors |= {tensor.name: tensor for tensor in _expert_tensors(info, base, merged, module)}
    return replace(source, tensors=tensors) if routed else source


def _axes(merged: str) -> int:
    return 2 if merged.endswith("_bias") else 3


def _expert_tensors(info: TensorInfo, base: str, merged: str, module: RoutedExperts) -> list[TensorInfo]:
    tensors, layout = [], module.layout
    for index in range(module.num_experts):
        expert = info.rows(index, index + 1)
        flat = replace(
            expert, shape=expert.shape[1:], tensor=None if expert.tensor is None else expert.tensor.squeeze(0)
        )
        for name, rows in layout.pieces(merged, layout.outputs(flat.shape)):
            tensors.append(replace(flat.outputs(rows, layout.transposed), name=f"{base}.{index}.{name}"))
    return tensors


def _build_on_meta(config: Any, source: CheckpointSource, trust_remote_code: bool) -> Any:
    model = build_on_meta(model_class(config, trust_remote_code), config, source.name, trust_remote_code)
    split_experts(model)
    return model


def _parameter_keys(model: Any, source: CheckpointSource) -> dict[str, str]:
    return map_tensor_names(model, source.tensors, source.name)
