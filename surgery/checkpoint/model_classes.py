"""The class of transformers that a checkpoint is built with: the one that config.json names, or the one that its
tensors fit.

Towers that were saved on their own, and some older checkpoints, have a config.json without `architectures`. A class
fits if it has no parameter without a tensor; of several, the one that uses the most tensors, under the names that they
have in the files.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from surgery.architectures.experts import split_experts
from surgery.checkpoint.source import CheckpointSource
from surgery.checkpoint.tensor_names import find_model_class, map_tensor_names, missing_and_unexpected
from surgery.core.environment import check_environment
from surgery.core.errors import SurgeryError

# Of classes with the same parameters, the class of the first of these that lists it is used.
AUTO_ORDER = ("AutoModel", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM")


def model_class(config: Any, trust_remote_code: bool = False) -> Any:
    """Return the class named by the config's `architectures`, or an Auto class that supports the config."""
    import transformers

    if (named_class := find_model_class(config)) is not None:
        return named_class
    if getattr(config, "auto_map", None) and trust_remote_code:
        for auto in ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModel"):
            if auto in config.auto_map:
                return getattr(transformers, auto)
    return transformers.AutoModel


def class_of_tensors(config: Any, source: CheckpointSource) -> Any:
    """Return the class of transformers whose parameters a checkpoint without `architectures` holds.

    Returns None if the config names its architectures, if its model has remote code, or if no class fits.
    """
    if config.architectures or getattr(config, "auto_map", None) or not source.tensors:
        return None
    fits = []
    for order, cls in enumerate(_candidates(config)):
        try:
            model = build_on_meta(cls, config, source.name)
            split_experts(model)
            keys = map_tensor_names(model, source.tensors, source.name)
        except SurgeryError:  # another class may fit
            continue
        missing, unexpected = missing_and_unexpected(model, keys)
        if not missing:
            renamed = sum(parameter != tensor for parameter, tensor in keys.items())
            fits.append(((len(unexpected), renamed, order), cls))
    return min(fits, key=lambda fit: fit[0])[1] if fits else None


def _candidates(config: Any) -> Iterator[Any]:
    """Yield the model classes of transformers with the config's class, each once, those of AUTO_ORDER first."""
    import transformers

    seen = set()
    for auto in AUTO_ORDER:
        mapping = getattr(transformers, auto)._model_mapping
        named = mapping.get(type(config), ())
        for cls in named if isinstance(named, (list, tuple)) else (named,):
            if cls not in seen:
                seen.add(cls)
                yield cls
    module_name = type(config).__module__
    if not module_name.startswith("transformers.models."):
        return
    modeling = module_name.replace(".configuration_", ".modeling_")
    try:
        module = importlib.import_module(modeling)
    except ImportError as error:
        if (
            error.name != modeling
        ):  # a family without a modeling file of its own raises ModuleNotFoundError for that file
            check_environment(error)
        return
    for name in getattr(module, "__all__", ()):
        cls = getattr(module, name, None)
        if not isinstance(cls, type) or name.endswith("PreTrainedModel"):  # a base class without a forward
            continue
        if getattr(cls, "config_class", None) is type(config) and cls not in seen:
            seen.add(cls)
            yield cls


def build_on_meta(cls: Any, config: Any, name: str, trust_remote_code: bool = False) -> Any:
    """Build a model of a class with parameters on meta and computed buffers (rotary tables), without allocating
    weights.

    name: of the checkpoint or the model, for errors.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    try:
        with no_init_weights(), init_empty_weights(include_buffers=False):
            if hasattr(cls, "from_config") and not hasattr(cls, "base_model_prefix"):
                model = cls.from_config(config, trust_remote_code=trust_remote_code)
            else:
                model = cls._from_config(config)
    except Exception as error:
        check_environment(error)
        raise SurgeryError(
            f"{name}: transformers cannot build {cls.__name__} from its config ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]})"
        ) from None
    model.eval()
    model.requires_grad_(False)
    return model
