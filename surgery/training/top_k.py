"""Top-k log-probabilities: the k most likely tokens individually, all other tokens as one event, the "rest".

log p_k = z_k - logsumexp(z)        z: logits / temperature        log p_rest = log(1 - sum_k p_k)
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from surgery.core.logit_rows import UNCHANGED, Direction, LogitTransform

MIN_MASS = 1e-7  # floor of 1 - sum of float32 probabilities, about their rounding error
MIN_LOG_PROB = -80.0  # finite floor of an exact rest, in nats


class TopK(NamedTuple):
    """A distribution by its top tokens (N, K), their log-probabilities (N, K), and that of the rest (N,)."""

    tokens_NK: Tensor
    top_NK: Tensor
    rest_N: Tensor


def top_k_log_probs(
    logits_NV: Tensor,
    k: int,
    temperature: float = 1.0,
    *,
    exact_rest: bool = False,
    transform: LogitTransform = UNCHANGED,
    log_sum_N: Tensor | None = None,
) -> TopK:
    """Return the top tokens, most likely first, and their log-probabilities, float32.

    exact_rest: compute the rest as the logsumexp of all other logits, at least MIN_LOG_PROB. This needs a copy of the
    logits, and is accurate where almost all mass is on the top tokens. False: compute it with `log_remaining_mass`.
    transform: of the logits, which keeps their order. log_sum_N: logsumexp of transformed logits / temperature, where
    it is known: then the logits are not converted to float32.
    """
    if log_sum_N is not None:
        values_NK, tokens_NK = logits_NV.topk(min(k, logits_NV.shape[-1]), dim=-1)
        top_NK = transform.apply(values_NK) / temperature - log_sum_N[:, None]
        return TopK(tokens_NK, top_NK, log_remaining_mass(top_NK))
    logits_NV = transform.apply(logits_NV) / temperature
    values_NK, tokens_NK = logits_NV.topk(min(k, logits_NV.shape[-1]), dim=-1)
    total_N1 = logits_NV.logsumexp(-1, keepdim=True)
    top_NK = values_NK - total_N1
    if not exact_rest:
        return TopK(tokens_NK, top_NK, log_remaining_mass(top_NK))
    others_NV = logits_NV.scatter(-1, tokens_NK, float("-inf"))
    rest_N = (others_NV.logsumexp(-1) - total_N1.squeeze(-1)).clamp_min(MIN_LOG_PROB)
    return TopK(tokens_NK, top_NK, rest_N)


def log_remaining_mass(top_NK: Tensor) -> Tensor:
    """Return log(1 - sum of exp(top)), (N,), with the difference at least MIN_MASS."""
    return (1 - top_NK.exp().sum(-1)).clamp_min(MIN_MASS).log()


def top_k_divergence(log_q_NK: Tensor, teacher: TopK, direction: Direction = "forward") -> Tensor:
    """Return the divergence over k tokens and the rest as one event, (N,) in nats.

    log_q_NK: the student's log-probabilities of the teacher's top tokens. forward: KL(teacher || student), reverse:
    KL(student || teacher).
    """
    rest_N, gap_NK = log_remaining_mass(log_q_NK), teacher.top_NK - log_q_NK
    if direction == "forward":
        return (teacher.top_NK.exp() * gap_NK).sum(-1) + teacher.rest_N.exp() * (teacher.rest_N - rest_N)
    return rest_N.exp() * (rest_N - teacher.rest_N) - (log_q_NK.exp() * gap_NK).sum(-1)
