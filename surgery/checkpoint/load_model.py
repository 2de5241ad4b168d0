"""Load the model of a checkpoint, converted or not: the one loader that training and evaluation share."""

from __future__ import annotations

from typing import Any

import torch

from surgery.checkpoint import meta_model
from surgery.checkpoint.model_classes import class_of_tensors, model_class
from surgery.checkpoint.remote_code import check_code_trusted
from surgery.checkpoint.source import CheckpointSource
from surgery.checkpoint.tensor_names import load_checked_model


def load_config(source: CheckpointSource, trust_remote_code: bool = False) -> Any:
    """Load the transformers config of a checkpoint. Its remote code runs only with `trust_remote_code`."""
    check_code_trusted(source.folder, source.name, source.config, trust_remote_code)
    return meta_model.load_config(source, trust_remote_code)


def load_model(
    source: CheckpointSource, dtype: torch.dtype | str, trust_remote_code: bool = False, *, on_meta: bool = False
) -> Any:
    """Load the model of a checkpoint on the CPU, in evaluation mode.

    The class is the first one that `architectures` in config.json names and transformers has, otherwise the one that
    the tensors fit, otherwise an Auto class. dtype: of the parameters; "auto" keeps the dtype of the checkpoint. on_meta:
    leave parameters and buffers on the meta device; names and shapes are checked all the same. Raises SurgeryError if
    tensors are missing or unexpected, or if the checkpoint has remote code that is not trusted.
    """
    config = load_config(source, trust_remote_code)
    cls = class_of_tensors(config, source) or model_class(config, trust_remote_code)
    options = {"device_map": "meta"} if on_meta else {}
    model = load_checked_model(cls, source.folder, source.name, trust_remote_code, dtype=dtype, **options)
    model.__dict__.pop("hf_device_map", None)  # accelerate would not train such a model
    return model
