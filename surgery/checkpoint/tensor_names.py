"""Mapping of checkpoint tensors to parameters, and the refusal of checkpoints with missing or unexpected tensors.

transformers only warns about such tensors: a missing norm weight becomes 1, a missing bias is uninitialized memory.
Here missing tensors are errors. Unexpected tensors are errors in a converted checkpoint, whose table lists those that
its source had (`unused`), and a warning in any other. A tied weight may be missing if its twin is present. Tensors that
a model's class lists as ignorable (_keys_to_ignore_on_load_missing and _unexpected) may be missing or unexpected. See
PreTrainedModel._adjust_missing_and_unexpected_keys in
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/modeling_utils.py
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from surgery.architectures.expert_layout import is_merge_rule
from surgery.architectures.experts import has_split_experts
from surgery.checkpoint.table import QUANT_METHOD
from surgery.core.environment import check_environment
from surgery.core.errors import SurgeryError
from surgery.core.files import is_disk_error

MAX_NAMES = 3  # in a message
# Buffers of earlier versions of transformers, which a checkpoint may still hold (_adjust_missing_and_unexpected_keys).
OLD_BUFFERS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", r"\.masked_bias$")


def map_tensor_names(model: Any, tensors: Iterable[str], name: str) -> dict[str, str]:
    """Return parameter name -> tensor name, by transformers' rules for renamed and prefixed checkpoints.

    A tensor that the model does not have is listed under the name that the rules give it. name: the checkpoint's, for
    errors. Linears of RoutedExperts have the names of their tensors. Raises SurgeryError if transformers would merge or
    split any other tensor.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model) or []
    if has_split_experts(model):
        rules = [rule for rule in rules if not is_merge_rule(rule)]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state, keys = model.state_dict(), {}
    for tensor in tensors:
        renamed, merged = rename_source_key(tensor, renamings, converters, model.base_model_prefix, state)
        if merged is not None:
            raise SurgeryError(
                f"{name}: transformers merges or splits tensor {tensor!r} on loading ({merged}), so the checkpoint "
                "cannot be read "
                "layer by layer. Load the model with transformers and convert it in memory: surgery.apply(model, "
                "recipe)"
            )
        if renamed not in state and tensor in state:
            renamed = tensor
        keys[renamed] = tensor
    return keys


def missing_and_unexpected(model: Any, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return (parameters and buffers without a tensor, names without a parameter), sorted.

    names: names as returned by `map_tensor_names`.
    """
    expected, names = set(model.state_dict()), set(names)
    missing, unexpected = expected - names, names - expected
    for twins in _tied_groups(model):
        if twins & names:
            missing -= twins
            unexpected -= twins
    ignored = model._keys_to_ignore_on_load_missing or ()
    left_over = (*(model._keys_to_ignore_on_load_unexpected or ()), *OLD_BUFFERS)
    return (
        sorted(name for name in missing if not _matches_any(ignored, name)),
        sorted(name for name in unexpected if not _matches_any(left_over, name)),
    )


def check_tensors(model: Any, tensors: Iterable[str], name: str, unused: Iterable[str] = ()) -> None:
    """Raise SurgeryError unless the checkpoint `name` has exactly the tensors of `model`.

    tensors: names, or name -> TensorInfo, whose shapes are then checked too. unused: further tensors that the table of
    the checkpoint allows, because its source had them.
    """
    keys, unused, class_name = map_tensor_names(model, tensors, name), set(unused), type(model).__name__
    missing, unexpected = missing_and_unexpected(model, keys)
    if wrong := sorted(unused & model.state_dict().keys()):
        raise SurgeryError(
            f"{name}: the table in config.json lists {format_tensor_names(wrong)} as unused, which {class_name} uses. "
            "Download or convert the "
            "checkpoint again"
        )
    check_linear_tensors(model, {*unexpected, *unused}, name)
    check_tensor_names(class_name, missing, unexpected, name, unused)
    if isinstance(tensors, Mapping):
        check_tensor_shapes(model, {key: tensors[tensor] for key, tensor in keys.items()}, name)


def check_tensor_shapes(model: Any, tensors: Mapping[str, Any], name: str) -> None:
    """Raise SurgeryError if a tensor has another shape than its parameter. tensors: parameter -> TensorInfo."""
    for key, parameter in model.state_dict().items():
        if key in tensors and tuple(parameter.shape) != tuple(tensors[key].shape):
            raise _shape_error(name, tensors[key].name, tensors[key].shape, key, parameter.shape)


def _shape_error(name: str, tensor: str, stored: Iterable[int], key: str, expected: Iterable[int]) -> SurgeryError:
    return SurgeryError(
        f"{name}: tensor {tensor!r} has shape {list(stored)}, but config.json makes {key!r} {list(expected)}; the "
        "config and "
        "the weights do not belong together"
    )


def check_linear_tensors(model: Any, unexpected: Iterable[str], name: str) -> None:
    """Raise SurgeryError if an unexpected tensor belongs to a linear of the model, which then computes another
    function.

    Such tensors are scales of a quantization, factors of a structure, or a bias.
    """
    from transformers.pytorch_utils import Conv1D

    linears = {
        path for path, m in model.named_modules() if isinstance(m, Conv1D) or hasattr(m, "in_features")
    }  # nn.Linear and all its replacements have in_features
    for tensor in sorted(unexpected):
        parents = tensor.split(".")[:-1]
        if any(".".join(parents[:depth]) in linears for depth in range(1, len(parents) + 1)):
            raise SurgeryError(
                f"{name} has tensor {tensor!r}, which belongs to a linear of {type(model).__name__} and is not used by "
                "it: its "
                "config.json and its weights do not belong together. Download or convert the checkpoint again"
            )


def check_tensor_names(
    class_name: str, missing: Iterable[str], unexpected: Iterable[str], name: str, unused: Iterable[str] = ()
) -> None:
    """Raise SurgeryError for missing tensors, or for unexpected ones that are not in `unused`."""
    if missing := sorted(missing):
        raise SurgeryError(
            f"{name} lacks {format_tensor_names(missing)}, which {class_name} needs; transformers would initialize "
            "them randomly. Download or "
            "convert the checkpoint again"
        )
    if unexpected := sorted(set(unexpected) - set(unused)):
        raise SurgeryError(
            f"{name} has {format_tensor_names(unexpected)}, which {class_name} does not use: its config.json and its "
            "weights do not "
            "belong together. Download or convert the checkpoint again"
        )


def load_checked_model(cls: Any, folder: Any, name: str, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return cls.from_pretrained(folder, **options). Raises SurgeryError for missing tensors and for other shapes.

    Unexpected tensors are errors in a converted checkpoint; in any other they are named in a warning, as `convert`
    does.
    """
    with explain_load_errors(name, cls.__name__):
        model, info = cls.from_pretrained(
            folder,
            **options,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # the error below names the shapes
            output_loading_info=True,
        )
    for key, stored, expected in sorted(info["mismatched_keys"]):
        raise _shape_error(name, key, stored, key, expected)
    table, class_name = getattr(model.config, "quantization_config", None), type(model).__name__
    unexpected = sorted(key for key in info["unexpected_keys"] if not _matches_any(OLD_BUFFERS, key))
    if _is_converted(table):
        check_tensor_names(class_name, info["missing_keys"], unexpected, name, unused_tensors(table))
        return model
    check_tensor_names(class_name, info["missing_keys"], (), name)
    check_linear_tensors(model, unexpected, name)
    if unexpected:
        warnings.warn(f"{name}: {class_name} does not use {format_tensor_names(unexpected)}", UserWarning, stacklevel=2)
    return model


@contextmanager
def explain_load_errors(name: str, class_name: str) -> Iterator[None]:
    """Turn errors of transformers about a config or weights into a SurgeryError that names the checkpoint and the
    class.
    """
    import torch

    try:
        yield
    except (SurgeryError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers documents no exception types for invalid checkpoints
        if is_disk_error(error):
            raise
        check_environment(error)
        raise SurgeryError(
            f"{name}: transformers cannot load it as {class_name} ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}). Its config.json and its weights must belong together. Download it "
            "again"
        ) from None


def _is_converted(table: Any) -> bool:
    method = table.get("quant_method") if isinstance(table, dict) else getattr(table, "quant_method", None)
    return method == QUANT_METHOD


def unused_tensors(table: Any) -> list[str]:
    """Return the unused tensors recorded in a surgery table, given as a dict or as SurgeryConfig."""
    unused = table.get("unused") if isinstance(table, dict) else getattr(table, "unused", None)
    return [name for name in unused if isinstance(name, str)] if isinstance(unused, list) else []


def find_model_class(config: Any) -> Any:
    """Return the first transformers class named in the config's `architectures`, or None."""
    import transformers

    named = config.architectures if isinstance(config.architectures, (list, tuple)) else ()
    for name in named:
        model_class = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(model_class, type) and issubclass(
            model_class, transformers.PreTrainedModel
        ):  # transformers has other objects too
            return model_class
    return None


def _tied_groups(model: Any) -> list[set[str]]:
    """Return the sets of parameter names that share one tensor."""
    groups: list[set[str]] = []
    for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        joined = set(pair).union(*(group for group in groups if group & set(pair)))
        groups = [group for group in groups if not group & joined] + [joined]
    return groups


def _matches_any(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def format_tensor_names(names: list[str]) -> str:
    """Return up to three tensor names and the number of the others, for messages."""
    more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(map(repr, names[:MAX_NAMES]))}{more}"
