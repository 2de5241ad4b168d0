"""Attention masks while a CUDA graph is captured: none, where an ordinary call needs none.

    with masks_of_ordinary_calls([student, teacher]):
        step()                                             an ordinary step
        record_graph(step)                                 makes no mask that the ordinary step did without

transformers leaves out the mask of plain causal rows, which lets SDPA take its flash kernel. It does not while a
stream is captured, as it cannot read there whether a mask hides anything. See the functions that ignore a causal mask
and find packed sequences in
https://github.com/huggingface/transformers/blob/v5.17.0/src/transformers/masking_utils.py (later versions look for
packed rows only).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

ATTENTION_NAME = "surgery_sdpa"  # transformers' own function, with the masks of this module

_is_needed: dict[tuple[Any, ...], bool] = {}  # by call: whether any ordinary call of this kind made a mask


@contextmanager
def masks_of_ordinary_calls(models: Sequence[Any]) -> Iterator[None]:
    """Within the context, let captured calls of these models do without masks that their ordinary calls do without.

    It is for calls whose masks depend on shapes alone: rows without padding, of one document each. Models with another
    attention implementation than sdpa keep theirs.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    AttentionInterface.register(ATTENTION_NAME, ALL_ATTENTION_FUNCTIONS["sdpa"])
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)
    configs = {id(m.config): m.config for model in models for m in model.modules() if hasattr(m, "config")}
    changed = [c for c in configs.values() if getattr(c, "_attn_implementation_internal", None) == "sdpa"]
    for config in changed:
        config._attn_implementation_internal = ATTENTION_NAME
    try:
        yield
    finally:
        for config in changed:
            config._attn_implementation_internal = "sdpa"
        _is_needed.clear()


def _mask(*args: Any, **kwargs: Any) -> Any:
    from transformers.masking_utils import sdpa_mask

    sizes = ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "local_size")
    call = (id(kwargs.get("config")), *args, *(kwargs.get(name) for name in sizes))
    capturing = _is_capturing()
    if capturing and not _is_needed.get(call, True):
        return None
    mask = sdpa_mask(*args, **kwargs)
    if not capturing:
        _is_needed[call] = mask is not None or _is_needed.get(call, False)
    return mask


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
