"""Mapping of checkpoint tensors to parameters, and the refusal of checkpoints with missing or unexpected tensors.

transformers only warns about such tensors: a missing norm weight becomes 1, a missing bias is uninitialized memory. Here both
are errors. A tied weight may be missing if its twin is present. Tensors that a model's class lists as ignorable
(_keys_to_ignore_on_load_missing and _unexpected) may be missing or unexpected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from surgery.core.errors import SurgeryError

SHOWN = 3  # names in a message
# Buffers of earlier versions of transformers, which a checkpoint may still hold. See _adjust_missing_and_unexpected_keys there.
OLD_BUFFERS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", r"\.masked_bias$")


def parameter_names(model: Any, tensors: Iterable[str], name: str) -> dict[str, str]:
    """Return the tensor of each parameter, by transformers' rules for renamed and prefixed checkpoints.

    A tensor that the model does not have appears under the name that the rules give it. name: the checkpoint's, for errors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model) or []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state, keys = model.state_dict(), {}
    for tensor in tensors:
        renamed, merged = rename_source_key(tensor, renamings, converters, model.base_model_prefix, state)
        if merged is not None:
            raise SurgeryError(
                f"{name}: transformers merges or splits tensor {tensor!r} on loading ({merged}); such checkpoints "
                "cannot be read layer by layer. Load it with transformers and save_pretrained to a new folder first"
            )
        if renamed not in state and tensor in state:
            renamed = tensor
        keys[renamed] = tensor
    return keys


def missing_and_unexpected(model: Any, found: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return (parameters and buffers without a tensor, names without a parameter), sorted.

    found: names as returned by `parameter_names`.
    """
    expected, found = set(model.state_dict()), set(found)
    missing, unexpected = expected - found, found - expected
    for twins in _tied_groups(model):
        if twins & found:
            missing -= twins
            unexpected -= twins
    ignored = model._keys_to_ignore_on_load_missing or ()
    left_over = (*(model._keys_to_ignore_on_load_unexpected or ()), *OLD_BUFFERS)
    return (
        sorted(name for name in missing if not _any(ignored, name)),
        sorted(name for name in unexpected if not _any(left_over, name)),
    )


def refuse_incomplete(model: Any, tensors: Iterable[str], name: str, unused: Iterable[str] = ()) -> None:
    """Raise SurgeryError unless the checkpoint `name` has exactly the tensors of `model`.

    unused: extra tensors of the source, as recorded by the conversion.
    """
    refuse_unlike(
        type(model).__name__, *missing_and_unexpected(model, parameter_names(model, tensors, name)), name, unused
    )


def refuse_unlike(
    class_name: str, missing: Iterable[str], unexpected: Iterable[str], name: str, unused: Iterable[str] = ()
) -> None:
    """Raise SurgeryError for missing tensors, or for unexpected ones that are not in `unused`."""
    if missing := sorted(missing):
        raise SurgeryError(
            f"{name} lacks {listed(missing)}, which {class_name} needs; transformers would initialize them randomly. Download or "
            "convert the checkpoint again"
        )
    if unexpected := sorted(set(unexpected) - set(unused)):
        raise SurgeryError(
            f"{name} has {listed(unexpected)}, which {class_name} does not use: its config.json and its weights do not "
            "belong together. Download or convert the checkpoint again"
        )


def load_complete(cls: Any, folder: Any, name: str, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return cls.from_pretrained(folder, **options). Raise SurgeryError if tensors are missing or unexpected."""
    model, info = cls.from_pretrained(folder, **options, trust_remote_code=trust_remote_code, output_loading_info=True)
    table = getattr(model.config, "quantization_config", None)
    unexpected = [key for key in info["unexpected_keys"] if not _any(OLD_BUFFERS, key)]
    refuse_unlike(type(model).__name__, info["missing_keys"], unexpected, name, unused_of(table))
    return model


def unused_of(table: Any) -> list[str]:
    """Return the unused tensors recorded in a surgery table, given as a dict or as SurgeryConfig."""
    found = table.get("unused") if isinstance(table, dict) else getattr(table, "unused", None)
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def class_named(config: Any) -> Any:
    """Return the first transformers class named in the config's `architectures`, or None."""
    import transformers

    named = config.architectures if isinstance(config.architectures, (list, tuple)) else ()
    for name in named:
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(
            found, transformers.PreTrainedModel
        ):  # transformers has other objects too
            return found
    return None


def _tied_groups(model: Any) -> list[set[str]]:
    """Return the sets of parameter names that share one tensor."""
    groups: list[set[str]] = []
    for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        joined = set(pair).union(*(group for group in groups if group & set(pair)))
        groups = [group for group in groups if not group & joined] + [joined]
    return groups


def _any(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def listed(names: list[str]) -> str:
    """Return up to three tensor names and the number of the others, for messages."""
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(map(repr, names[:SHOWN]))}{more}"
