"""The modules and tensors of a checkpoint for `surgery plan` and `surgery inspect`, without transformers' model class
if possible.

An outline (surgery/architectures/outline.py) is used if the checkpoint has exactly the outline's parameters, with their
shapes. Otherwise MetaModel builds transformers' class, and raises the error for a checkpoint with missing or wrong
tensors.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from surgery.architectures.outline import build_outline
from surgery.checkpoint.meta_model import MetaModel, bare_model, build_unconverted_model
from surgery.checkpoint.safetensors_io import TensorInfo
from surgery.checkpoint.source import CheckpointSource


class ModelDescription(Protocol):
    """A checkpoint's model on the meta device and its tensors: a CheckpointOutline or a MetaModel.

    source: the checkpoint. config, model: of transformers, or of the outline. keys: tensor name in the file by
    parameter name. tied: tied parameters, as transformers lists them.
    """

    source: CheckpointSource
    config: Any
    model: Any
    keys: dict[str, str]
    tied: dict[str, str]

    def tensor_info(self, parameter: str) -> TensorInfo:
        """Return the location of a parameter's tensor; of a tied parameter, the location of its twin's."""


class CheckpointOutline:
    """The outline of a checkpoint's model, and its tensors, which have the names of the parameters.

    Attributes: as in ModelDescription.
    """

    def __init__(self, source: CheckpointSource, model: Any):
        self.source, self.model, self.config = source, model, model.config
        self.keys = {name: name for name in source.tensors}
        self.tied: dict[str, str] = model.all_tied_weights_keys

    def tensor_info(self, parameter: str) -> TensorInfo:
        """Return the location of a parameter's tensor; of a tied parameter, the location of its twin's."""
        tensors = self.source.tensors
        return tensors[parameter] if parameter in tensors else tensors[self.tied[parameter]]


class ConfigOutline:
    """The model of a config.json without weights, for a plan.

    Attributes: as in ModelDescription; keys is empty.
    """

    def __init__(self, source: CheckpointSource, trust_remote_code: bool):
        self.source, self.keys = source, dict[str, str]()
        self.model = build_outline(source.config) or bare_model(source, trust_remote_code)
        self.config = self.model.config
        self.tied: dict[str, str] = dict(getattr(self.model, "all_tied_weights_keys", None) or {})

    def tensor_info(self, parameter: str) -> TensorInfo:
        """Return the shape of a parameter, in bfloat16; there is no file."""
        shape = tuple(self.model.get_parameter(parameter).shape)
        return TensorInfo(parameter, self.source.folder, "BF16", shape, 0, 2 * math.prod(shape))


def describe_checkpoint(source: CheckpointSource, trust_remote_code: bool = False) -> ModelDescription:
    """Return the outline of a checkpoint if it has one, otherwise the MetaModel that transformers' class builds.

    Of a source without tensors (a folder with config.json alone) only the config is used.
    """
    if not source.tensors:
        return ConfigOutline(source, trust_remote_code)
    return read_outline(source) or MetaModel(source, trust_remote_code)


def read_outline(source: CheckpointSource) -> CheckpointOutline | None:
    """Return the outline of a checkpoint, or None if its tensors are not exactly the outline's parameters.

    A head that is tied to the input embedding may be missing, because transformers stores tied weights once.
    """
    layers = source.config.get("num_hidden_layers")
    if not isinstance(layers, int) or layers > len(source.tensors):  # do not build thousands of layers in vain
        return None
    model = build_outline(source.config)
    if model is None:
        return None
    shapes = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    stored = {name: info.shape for name, info in source.tensors.items()}
    absent = {name: shapes[name] for name in model.all_tied_weights_keys if name not in stored}
    return CheckpointOutline(source, model) if {**stored, **absent} == shapes else None


def describe_unconverted_model(source: CheckpointSource) -> Any:
    """Return the original model of a converted checkpoint on the meta device: its outline, or transformers' class."""
    config = {key: value for key, value in source.config.items() if key not in ("quantization_config", "auto_map")}
    return build_outline(config) or build_unconverted_model(source)
