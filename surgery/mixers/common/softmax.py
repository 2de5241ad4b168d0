"""Softmax attention with a score that is a sum of terms, each limited to pairs within its own extent.

    S[t, s] = scaling sum_l [near_l(t, s)] (q_l[t] . k_l[s] + bias_l)            out = softmax(cap(S) + mask) V

near_l: |t - s| < extent (sliding), or t // extent = s // extent (nested), with positions counted over the real tokens
of a row. Rows are left-padded (kv_layout.py), so that products are computed only for slots within reach. Scores and
weights are float32 or float64. B batch, T queries, S key slots, H = G J heads, K key dim, V value dim, C queries of one
pass, R rank of a term.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from surgery.core.dispatch import dispatched
from surgery.mixers.base import AttentionShape, MixerInputs
from surgery.mixers.common.kv_layout import KVLayout, drop_full_mask, positions_from_mask, token_positions

QUERIES_PER_PASS = 512  # bounds the score matrices in memory


class ScoreTerm(NamedTuple):
    """One summand of the score.

    q: queries of rank R. k: keys of the last slots, at least those within `extent` tokens (None: all slots).
    form: "sliding" or "nested". bias: added within the extent, per head. scale: factor on q . k, per head and slot of
    k.
    """

    q_BGJTR: Tensor
    k_BGSR: Tensor
    extent: int | None = None
    form: str = "sliding"
    bias_GJ: Tensor | None = None
    scale_BGJS: Tensor | None = None


def within_extent(form: str, extent: int | None, t: Tensor, s: Tensor) -> Tensor:
    """Return whether positions t and s are within the extent (broadcast). form: "sliding" or "nested"."""
    if extent is None:
        return torch.ones_like(t == s)
    if form == "nested":
        return t.div(extent, rounding_mode="floor") == s.div(extent, rounding_mode="floor")
    return (t - s).abs() < extent


def group_heads(q_BHTK: Tensor, groups: int) -> Tensor:
    """Return q_BGJTK: axis H split into key/value heads G and the J query heads that share each."""
    q_BGJTK: Tensor = q_BHTK.unflatten(1, (groups, -1))
    return q_BGJTK


def upcast(x: Tensor) -> Tensor:
    """Return x in float32, or float64 if x is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def grouped_matmul(x_BGJCX: Tensor, y_BGXY: Tensor) -> Tensor:
    """Return x @ y, (B, G, J, C, Y), with one product for the J query heads of a group.

    A program exported for any length has a product for each head: torch.export cannot merge axes J and C of unknown
    sizes.
    """
    if isinstance(x_BGJCX.shape[3], torch.SymInt):
        return x_BGJCX @ y_BGXY.unsqueeze(2)
    product_BGJCY: Tensor = (x_BGJCX.flatten(2, 3) @ y_BGXY).unflatten(2, x_BGJCX.shape[2:4])
    return product_BGJCY


def weighted_values(
    score_BGJCS: Tensor, allowed: Tensor | None, v_BGSV: Tensor, shape: AttentionShape, mask: Tensor | None, p: float
) -> Tensor:
    """Return softmax(cap(scaling S) + mask) V (B, G, J, C, V), with dropout p on the weights.

    A query without any visible key gets the mean of the values instead of NaN.
    """
    score = score_BGJCS * shape.scaling
    if shape.softcap is not None:
        score = shape.softcap * torch.tanh(score / shape.softcap)
    least = torch.finfo(score.dtype).min
    if mask is not None:
        mask = mask.unflatten(1, (shape.groups, -1)) if mask.shape[1] > 1 else mask.unsqueeze(1)
        score = score.masked_fill(~mask, least) if mask.dtype == torch.bool else score + mask.to(score.dtype)
    if allowed is not None:
        score = score.masked_fill(~allowed, least)
    weights = F.dropout(torch.softmax(score, -1), p)
    return grouped_matmul(weights, v_BGSV)


@dispatched
def attend(
    terms: list[ScoreTerm],
    v_BGSV: Tensor,
    layout: KVLayout,
    shape: AttentionShape,
    mask: Tensor | None = None,
    p: float = 0.0,
) -> Tensor:
    """Return out_BHTV of softmax attention over the sum of the terms, with dropout p.

    terms[0] must have no extent: it applies to all pairs that causality and the module's window allow.
    """
    terms = [term._replace(q_BGJTR=upcast(term.q_BGJTR), k_BGSR=upcast(term.k_BGSR)) for term in terms]
    values = upcast(v_BGSV)
    out = run_in_passes(
        lambda start, stop: _attend_pass(terms, values, layout, shape, mask=mask, p=p, start=start, stop=stop),
        layout.queries,
    )
    return out.flatten(1, 2).to(v_BGSV.dtype)


def run_in_passes(attend_pass: Callable[[int, int], Tensor], queries: int) -> Tensor:
    """Return out_BGJTV of attend_pass(start, stop) over all queries, QUERIES_PER_PASS at a time.

    With several passes, each is recomputed in the backward pass (activation checkpointing). A program exported for any
    length takes one pass.
    """
    if isinstance(queries, torch.SymInt) or queries <= QUERIES_PER_PASS:
        return attend_pass(0, queries)
    recompute = torch.is_grad_enabled()
    spans = [(start, min(start + QUERIES_PER_PASS, queries)) for start in range(0, queries, QUERIES_PER_PASS)]
    outs = [checkpoint(attend_pass, *span, use_reentrant=False) if recompute else attend_pass(*span) for span in spans]
    return torch.cat(outs, 3)


def dense_attention(terms: list[ScoreTerm], inputs: MixerInputs, shape: AttentionShape) -> Tensor:
    """Return out_BHTV of `attend` by the definition, for sequences from their start with padding anywhere."""
    position_BT, valid_BS = token_positions(inputs)
    t, s = position_BT.unsqueeze(-1), position_BT.unsqueeze(1)
    score = torch.zeros((), device=t.device)
    for term in terms:
        product = torch.einsum("bgjtr,bgsr->bgjts", upcast(term.q_BGJTR), upcast(term.k_BGSR))
        product = product if term.scale_BGJS is None else product * term.scale_BGJS.to(product.dtype)[..., None, :]
        product = product if term.bias_GJ is None else product + term.bias_GJ[..., None, None].to(product.dtype)
        score = score + product * within_extent(term.form, term.extent, t, s)[:, None, None]
    allowed = _visible_pairs(t, s, KVLayout(t, 0, 0, holes=False), shape)
    return dense_weighted_values(score, allowed, valid_BS, inputs, shape)


def dense_weighted_values(
    score: Tensor, allowed: Tensor, valid_BS: Tensor | None, inputs: MixerInputs, shape: AttentionShape
) -> Tensor:
    """Return out_BHTV of scores (B, G, J, T, T). allowed: visible pairs (B, T, T); valid_BS: False at padding."""
    allowed = allowed if valid_BS is None else allowed & valid_BS[:, None, :]
    mask = None if inputs.mask_BHTS is None else inputs.mask_BHTS[..., -score.shape[-1] :]
    out = weighted_values(score, allowed[:, None, None], upcast(inputs.v_BGTV), shape, mask, inputs.dropout)
    return out.flatten(1, 2).to(inputs.v_BGTV.dtype)


def _attend_pass(
    terms: list[ScoreTerm],
    v_BGSV: Tensor,
    layout: KVLayout,
    shape: AttentionShape,
    *,
    mask: Tensor | None,
    p: float,
    start: int,
    stop: int,
) -> Tensor:
    """Return out_BGJCV of the queries start .. stop - 1; p: dropout."""
    low, high = layout.reach(start, stop, shape.window, shape.causal)
    first = layout.slots - layout.queries
    t_BC1 = layout.positions(first + start, first + stop).unsqueeze(-1)
    score = _term_score(terms[0], layout, start, stop, low, high)
    for term in terms[1:]:
        near_low, near_high = layout.reach(start, stop, term.extent, shape.causal)
        near_low, near_high = max(near_low, low, layout.slots - term.k_BGSR.shape[2]), min(near_high, high)
        term_score = _term_score(term, layout, start, stop, near_low, near_high)
        if term.bias_GJ is not None:
            term_score = term_score + term.bias_GJ[..., None, None].to(term_score.dtype)
        if term.extent is not None:
            inside_BCS = within_extent(
                term.form, term.extent, t_BC1, layout.positions(near_low, near_high).unsqueeze(1)
            )
            term_score = term_score * inside_BCS[:, None, None]
        score = add_score_slice(score, term_score, near_low - low)
    allowed_BCS = _visible_pairs(t_BC1, layout.positions(low, high).unsqueeze(1), layout, shape)
    mask = None if mask is None else mask[..., start:stop, low:high]
    return weighted_values(score, allowed_BCS[:, None, None], v_BGSV[:, :, low:high], shape, mask, p)


def add_score_slice(score: Tensor, addend: Tensor, at: int) -> Tensor:
    """Return score with `addend` added from slot `at` on; in place if no gradient needs the old score."""
    if score.shape == addend.shape:
        return score + addend
    if addend.requires_grad or score.requires_grad:
        return score + F.pad(addend, (at, score.shape[-1] - at - addend.shape[-1]))
    score[..., at : at + addend.shape[-1]] += addend
    return score


def _term_score(term: ScoreTerm, layout: KVLayout, start: int, stop: int, low: int, high: int) -> Tensor:
    """Return the scaled q . k (B, G, J, C, S) of queries start .. stop - 1 and slots low .. high - 1."""
    missing = layout.slots - term.k_BGSR.shape[2]
    q = term.q_BGJTR[:, :, :, start:stop]
    product = grouped_matmul(q, term.k_BGSR[:, :, low - missing : high - missing].mT)
    if term.scale_BGJS is None:
        return product
    scale: Tensor = term.scale_BGJS[..., None, low - missing : high - missing].to(product.dtype)
    return product * scale


def _visible_pairs(t: Tensor, s: Tensor, layout: KVLayout, shape: AttentionShape) -> Tensor:
    allowed = s <= t if shape.causal else torch.ones_like(s <= t)
    if layout.holes:
        allowed &= s >= 0
    if shape.window is not None:
        allowed &= within_extent("sliding", shape.window, t, s)
    return allowed


# -- torch's fused attention, for scores without structure ---------------------------------------------------------
def sdpa_attn_mask(
    layout: KVLayout, shape: AttentionShape, valid_BS: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """Return the attn_mask of F.scaled_dot_product_attention: the given mask combined with window, causality and
    padding.

    Returns None if the `is_causal` flag is enough. valid_BS: False at padding; mask: boolean or additive, or None.
    """
    windowed = shape.window is not None and layout.slots > shape.window
    later = shape.causal and layout.slots > layout.queries > 1
    if not (layout.holes or windowed or later or valid_BS is not None):
        return mask
    s_BS = layout.positions(0, layout.slots) if valid_BS is None else positions_from_mask(valid_BS)
    t_BT1 = s_BS[:, layout.slots - layout.queries :].unsqueeze(-1)
    allowed = _visible_pairs(t_BT1, s_BS.unsqueeze(1), layout, shape).unsqueeze(1)
    if valid_BS is not None:
        allowed = allowed & valid_BS[:, None, None, :]
    if mask is None:
        return allowed
    return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, torch.finfo(mask.dtype).min)


def sdpa_attention(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, shape: AttentionShape, mask: Tensor | None, p: float
) -> Tensor:
    """Return out_BHTV with the same bits as transformers: torch's fused attention, or its eager formula with a
    softcap.
    """
    length, heads = q_BHTK.shape[2], q_BHTK.shape[1] // k_BGSK.shape[1]
    causal = shape.causal and mask is None and length > 1
    if shape.softcap is not None:
        return _eager_attention(q_BHTK, k_BGSK, v_BGSV, shape, mask, p)
    gqa = heads > 1 and mask is None and k_BGSK.shape[-1] == v_BGSV.shape[-1] <= 256
    if heads > 1 and not gqa and length > 1:
        k_BGSK, v_BGSV = k_BGSK.repeat_interleave(heads, 1), v_BGSV.repeat_interleave(heads, 1)
    if heads > 1 and not gqa and length == 1:
        q_BHTK = q_BHTK.reshape(q_BHTK.shape[0], -1, heads, q_BHTK.shape[-1])
        mask = (
            mask.reshape(mask.shape[0], -1, heads, mask.shape[-1]) if mask is not None and mask.shape[1] > 1 else mask
        )
    out = F.scaled_dot_product_attention(
        q_BHTK, k_BGSK, v_BGSV, mask, dropout_p=p, is_causal=causal, scale=shape.scaling, enable_gqa=gqa
    )
    return out.reshape(out.shape[0], -1, length, out.shape[-1])


def sdpa_without_cache(inputs: MixerInputs, shape: AttentionShape) -> Tensor:
    """Return out_BHTV of torch's fused attention over sequences from their start, called exactly as transformers
    does.
    """
    length = inputs.q_BHTK.shape[2]
    layout = KVLayout(torch.full((1,), length, device=inputs.q_BHTK.device), length, length, holes=False)
    mask = None if inputs.mask_BHTS is None else inputs.mask_BHTS[..., -length:]
    mask = sdpa_attn_mask(layout, shape, drop_full_mask(inputs.valid_BT), mask)
    return sdpa_attention(inputs.q_BHTK, inputs.k_BGTK, inputs.v_BGTV, shape, mask, inputs.dropout)


def _eager_attention(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, shape: AttentionShape, mask: Tensor | None, p: float
) -> Tensor:
    heads = q_BHTK.shape[1] // k_BGSK.shape[1]
    weights = torch.matmul(q_BHTK, k_BGSK.repeat_interleave(heads, 1).mT) * shape.scaling
    if shape.softcap is not None:
        weights = torch.tanh(weights / shape.softcap) * shape.softcap
    if mask is None and shape.causal:
        mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).tril(
            weights.shape[-1] - weights.shape[-2]
        )
    if mask is not None and mask.dtype == torch.bool:
        least = torch.finfo(weights.dtype).min
        mask = torch.where(mask, torch.zeros((), dtype=weights.dtype, device=mask.device), least)
    weights = weights if mask is None else weights + mask
    weights = torch.softmax(weights, -1, dtype=torch.promote_types(weights.dtype, torch.float32)).to(q_BHTK.dtype)
    return torch.matmul(F.dropout(weights, p), v_BGSV.repeat_interleave(heads, 1))
