"""The rejection rule of speculative decoding, and logits processors for rows of different lengths.

A draft token d drawn from q is accepted with probability min(1, p(d) / q(d)); at the first rejection the token is drawn
from max(p - q, 0), normalized, and after k accepted drafts from the model's next distribution. The tokens are then
distributed as p. Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192,
Algorithm 1 and Appendix A.1. Greedy decoding accepts drafts while they are the argmax.

B rows, k drafts, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process

# Processors whose result does not depend on the text so far.
FREE_OF_TEXT = tuple(
    getattr(logits_process, name)
    for name in (
        *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper"),
        *("EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization", "InfNanRemoveLogitsProcessor"),
    )
    if hasattr(logits_process, name)
)


def process_scores(processors: Any, ids_BL: Tensor, length_B: list[int], scores_BKV: Tensor) -> Tensor:
    """Return scores (B, K, V) after the processors; scores i of a row belong to the token after its first length + i
    tokens.

    Each call sees whole rows of one length, in the order of the batch; the results of rows of other lengths are
    dropped.
    """
    if len(processors) == 0:
        return scores_BKV
    B, K, V = scores_BKV.shape
    if all(type(p) in FREE_OF_TEXT for p in processors):
        flat: Tensor = processors(ids_BL[:1, :1].expand(B * K, 1), scores_BKV.reshape(B * K, V))
        return flat.view(B, K, V)
    out = torch.empty_like(scores_BKV)
    for i in range(K):
        for length in sorted(set(length_B)):
            rows = [b for b in range(B) if length_B[b] == length]
            out[rows, i] = processors(ids_BL[:, : length + i], scores_BKV[:, i].clone())[rows]
    return out


def choose_token(scores_BV: Tensor, sample: bool) -> tuple[Tensor, Tensor | None]:
    """Return (tokens (B,), the distribution (B, V) they were drawn from, or None for the argmax)."""
    if not sample:
        return scores_BV.argmax(-1), None
    q_BV = scores_BV.softmax(-1)
    return torch.multinomial(q_BV, 1)[:, 0], q_BV


def accept_greedy(scores_BKV: Tensor, drafts_Bk: Tensor) -> tuple[Tensor, Tensor]:
    """Return (number of accepted drafts (B,), the token after them (B,)). scores: of the k drafts and the token after
    them.
    """
    best_BK = scores_BKV.argmax(-1)
    accepted_B = (best_BK[:, :-1] == drafts_Bk).long().cumprod(1).sum(1)
    return accepted_B, best_BK.gather(1, accepted_B[:, None])[:, 0]


def accept_sampled(scores_BKV: Tensor, drafts_Bk: Tensor, q_BkV: Tensor) -> tuple[Tensor, Tensor]:
    """Return (number of accepted drafts (B,), the token after them (B,)), by the rejection rule."""
    p_BKV, k = scores_BKV.softmax(-1), drafts_Bk.shape[1]
    p_Bk = p_BKV[:, :k].gather(2, drafts_Bk[..., None])[..., 0]
    q_Bk = q_BkV.gather(2, drafts_Bk[..., None])[..., 0]
    kept_Bk = torch.rand_like(p_Bk) * q_Bk < p_Bk
    accepted_B = kept_Bk.long().cumprod(1).sum(1)
    return accepted_B, torch.multinomial(next_distribution(p_BKV, q_BkV, accepted_B), 1)[:, 0]


def next_distribution(p_BKV: Tensor, q_BkV: Tensor, accepted_B: Tensor) -> Tensor:
    """Return the distribution (B, V) of the token after the accepted drafts: the residual, or p after the last
    draft.
    """
    row_B = torch.arange(len(accepted_B), device=accepted_B.device)
    p_BV = p_BKV[row_B, accepted_B]
    q_BV = torch.cat([q_BkV, torch.zeros_like(p_BKV[:, :1])], 1)[row_B, accepted_B]
    rest_BV = (p_BV - q_BV).clamp_min(0)
    total_B1 = rest_BV.sum(-1, keepdim=True)
    return torch.where(total_B1 > 0, rest_BV / total_B1, p_BV)  # p = q up to rounding: nothing is rejected then
