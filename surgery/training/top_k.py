"""Top-k log-probabilities: the k most likely tokens individually, all other tokens as one event, the "rest".

log p_k = z_k - logsumexp(z)        z: logits / temperature        log p_rest = log(1 - sum_k p_k)
"""

from __future__ import annotations

from torch import Tensor

MIN_MASS = 1e-7  # floor of 1 - sum of float32 probabilities, about their rounding error
MIN_LOG_PROB = -80.0  # finite floor of an exact rest, in nats


def top_k_log_probs(
    logits_NV: Tensor, k: int, temperature: float = 1.0, *, exact_rest: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the top tokens (N, k), most likely first, their log-probabilities (N, k), and that of the rest (N,),
    float32.

    exact_rest: compute the rest as the logsumexp of all other logits, at least MIN_LOG_PROB. This needs a copy of the
    logits, and is accurate where almost all mass is on the top tokens. False: compute it with `log_remaining_mass`.
    """
    logits_NV = logits_NV.float() / temperature
    values_NK, tokens_NK = logits_NV.topk(min(k, logits_NV.shape[-1]), dim=-1)
    total_N1 = logits_NV.logsumexp(-1, keepdim=True)
    top_NK = values_NK - total_N1
    if not exact_rest:
        return tokens_NK, top_NK, log_remaining_mass(top_NK)
    others_NV = logits_NV.scatter(-1, tokens_NK, float("-inf"))
    rest_N = (others_NV.logsumexp(-1) - total_N1.squeeze(-1)).clamp_min(MIN_LOG_PROB)
    return tokens_NK, top_NK, rest_N


def log_remaining_mass(top_NK: Tensor) -> Tensor:
    """Return log(1 - sum of exp(top)), (N,), with the difference at least MIN_MASS."""
    return (1 - top_NK.exp().sum(-1)).clamp_min(MIN_MASS).log()
