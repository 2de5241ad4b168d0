"""Softmax attention whose terms all reach everywhere, as for prompts within the window or the least extent: one product.

    S = sum_l q_l k_l = [q_1 .. q_L] [k_1 .. k_L]

That is torch's fused attention, taken where it was measured to be faster than MLR attention's kernels. What near scores
are raised by is the same for all keys then, so the softmax does not see it.
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
MAX_DIMS = 128  # of keys and of values, at most and alike: else torch may have no fused form


def accepts(
    terms: list[ScoreTerm],
    v_BGSV: Tensor,
    layout: KVLayout,
    shape: AttentionShape,
    mask: Tensor | None = None,
    p: float = 0.0,
) -> bool:
    dims = sum(term.q_BGJTR.shape[-1] for term in terms)
    return (
        mask is None
        and p == 0.0
        and shape.causal
        and shape.softcap is None
        and layout.queries == layout.slots
        and not layout.holes
        and all(reaches_all(term, layout) for term in terms)
        and all(term.k_BGSR.shape[1] == v_BGSV.shape[1] for term in terms)  # not keys that all groups share
        and all(term.scale_BGJS is None for term in terms)
        and (shape.window is None or shape.window >= layout.slots)
        and dims == v_BGSV.shape[-1] <= MAX_DIMS
        and dims % 8 == 0
        and all(x.dtype == v_BGSV.dtype for term in terms for x in (term.q_BGJTR, term.k_BGSR))
        and v_BGSV.dtype in HALF_DTYPES
    )


def reaches_all(term: ScoreTerm, layout: KVLayout) -> bool:
    """Whether every pair is near. A bias that learns is to get a gradient, of zeros: the kernels give it one."""
    far = term.extent is None or (term.form == "sliding" and term.extent >= layout.slots)
    learns = term.bias_GJ is not None and term.bias_GJ.requires_grad and torch.is_grad_enabled()
    return far and term.k_BGSR.shape[2] == layout.slots and not learns


def tuning_query(terms: list[ScoreTerm], v_BGSV: Tensor, layout: KVLayout, *_: Any, **__: Any) -> TuningQuery:
    """As a score of one level beside the library's."""
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
    """out_BHTV."""
    q_BHTK = concatenate_levels(tuple(term.q_BGJTR.flatten(1, 2) for term in terms))
    k_BGSK = concatenate_levels(tuple(term.k_BGSR for term in terms))
    return sdpa_attention(q_BHTK, k_BGSK, v_BGSV, shape, mask, p)


def concatenate_levels(parts: tuple[Tensor, ...]) -> Tensor:
    """A view of neighbours would hide the parts from autograd."""
    learns = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    return torch.cat(parts, -1) if learns and len(parts) > 1 else join_levels(parts)
