"""PyTorch's scaled_dot_product_attention for scores whose terms all reach every key, such as those of prompts within
the window.

    S = sum_l q_l k_l = [q_1 .. q_L] [k_1 .. k_L]

It replaces `attend` where it was measured to be faster than the kernels of MLR attention. Biases of near scores are the
same for all keys then, and a softmax does not depend on them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.mlr_attention import join_levels, tuning_key
from surgery.kernels.tuning import CallReader, TuningQuery, is_fastest, named_sizes, training_pass
from surgery.mixers.base import AttentionShape
from surgery.mixers.common.kv_layout import KVLayout
from surgery.mixers.common.softmax import ScoreTerm, attend, sdpa_attention

HALF_DTYPES = (torch.bfloat16, torch.float16)
MAX_DIMS = 128  # of keys and of values; beyond, and where the two differ, PyTorch may have no fused kernel


def accepts(
    terms: list[ScoreTerm],
    v_BGSV: Tensor,
    layout: KVLayout,
    shape: AttentionShape,
    mask: Tensor | None = None,
    p: float = 0.0,
) -> bool:
    """Return whether the call is plain causal softmax attention over the concatenated levels, of sizes that PyTorch has
    fused kernels for."""
    dims = sum(term.q_BGJTR.shape[-1] for term in terms)
    return (
        mask is None
        and p == 0.0
        and shape.causal
        and shape.softcap is None
        and layout.queries == layout.slots
        and not layout.holes
        and all(reaches_all(term, layout) for term in terms)
        and all(term.k_BGSR.shape[1] == v_BGSV.shape[1] for term in terms)  # keys have a group axis of their own
        and all(term.scale_BGJS is None for term in terms)
        and (shape.window is None or shape.window >= layout.slots)
        and dims == v_BGSV.shape[-1] <= MAX_DIMS
        and dims % 8 == 0
        and all(x.dtype == v_BGSV.dtype for term in terms for x in (term.q_BGJTR, term.k_BGSR))
        and v_BGSV.dtype in HALF_DTYPES
    )


def reaches_all(term: ScoreTerm, layout: KVLayout) -> bool:
    """Return whether every pair is near.

    False for a bias that requires a gradient: the kernels return its gradient, zeros.
    """
    far = term.extent is None or (term.form == "sliding" and term.extent >= layout.slots)
    trained = term.bias_GJ is not None and term.bias_GJ.requires_grad and torch.is_grad_enabled()
    return far and term.k_BGSR.shape[2] == layout.slots and not trained


def tuning_query(terms: list[ScoreTerm], v_BGSV: Tensor, layout: KVLayout, *_: Any, **__: Any) -> TuningQuery:
    """Return the sizes of the call under which kernels/tuning.json lists its timings: a score of one level."""
    q = terms[0].q_BGJTR
    at = named_sizes(lanes=len(v_BGSV) * q.shape[1] * q.shape[2], tokens=layout.queries, levels=1)
    parts = (x for term in terms for x in (term.q_BGJTR, term.k_BGSR))
    return TuningQuery(training_pass(v_BGSV, *parts), at, v_BGSV, ("kernel", "original"))


@register_kernel(
    attend,
    accepts=accepts,
    is_faster=is_fastest("mlr", CallReader(tuning_query, tuning_key), "original"),
    implementation="original",
)
def sdpa_attend(
    terms: list[ScoreTerm],
    v_BGSV: Tensor,
    layout: KVLayout,
    shape: AttentionShape,
    mask: Tensor | None = None,
    p: float = 0.0,
) -> Tensor:
    """Return out_BHTV; arguments as in `attend`."""
    q_BHTK = concatenate_levels(tuple(term.q_BGJTR.flatten(1, 2) for term in terms))
    k_BGSK = concatenate_levels(tuple(term.k_BGSR for term in terms))
    return sdpa_attention(q_BHTK, k_BGSK, v_BGSV, shape, mask, p)


def concatenate_levels(parts: tuple[Tensor, ...]) -> Tensor:
    """Return the levels concatenated along their dimensions; a copy if gradients are needed, because autograd does not
    see through the view of `join_levels`."""
    needs_grad = torch.is_grad_enabled() and any(level_keys.requires_grad for level_keys in parts)
    return torch.cat(parts, -1) if needs_grad and len(parts) > 1 else join_levels(parts)
