"""`output_attentions=True` for models with mixers: one entry for each layer, None where a mixer has no attention
weights.

transformers leaves layers without weights out of the list, so that entries no longer belong to their layers. Assisted
decoding slices every entry; during it a mixer returns empty weights (B, H, T, 0), which become None at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

try:
    from transformers.utils import output_capturing
except ImportError:  # versions that collect the outputs in the models' own forwards, where None stays in its place
    output_capturing = None  # type: ignore[assignment]

_needs_placeholders: ContextVar[bool] = ContextVar("needs_placeholders", default=False)


def record_no_weights(out: Any) -> None:
    """Append None to the attention weights that transformers collects, if an attention module returned none."""
    if torch.compiler.is_compiling() or output_capturing is None:
        return
    collected = output_capturing._active_collector.get()
    if (
        collected is not None
        and "attentions" in collected
        and isinstance(out, tuple)
        and len(out) > 1
        and out[1] is None
    ):
        collected["attentions"].append(None)


def weights_placeholder(query_BHTK: Tensor) -> Tensor | None:
    """Return empty weights (B, H, T, 0) during assisted decoding, otherwise None."""
    if torch.compiler.is_compiling() or not _needs_placeholders.get():
        return None
    return query_BHTK.new_empty(*query_BHTK.shape[:3], 0)


@contextmanager
def placeholders() -> Iterator[None]:
    """Let mixers return empty weights inside the context."""
    token = _needs_placeholders.set(True)
    try:
        yield
    finally:
        _needs_placeholders.reset(token)


def remove_placeholders(generated: Any) -> Any:
    """Return the result of generate() with None in the place of empty weights."""
    for name in ("attentions", "decoder_attentions"):
        steps = getattr(generated, name, None)
        if steps is not None:
            setattr(
                generated,
                name,
                tuple(tuple(None if x is None or x.shape[-1] == 0 else x for x in step) for step in steps),
            )
    return generated
