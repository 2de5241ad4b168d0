"""Nystroemformer: softmax attention through m landmarks (Xiong et al. 2021), in T m instead of T^2.

    O = softmax(Q K~^T) A^+ softmax(Q~ K^T) V      A = softmax(Q~ K~^T) (m, m); Q~, K~: means of m segments of queries and keys

A^+ is an iteration of third order: Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4, from Z = A^T / (|A|_1 |A|_inf).
Six steps in the paper. Landmarks mix all tokens, so the attention is bidirectional.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError

STEPS = 6


def segment_means(x_BHTK: Tensor, count: int) -> Tensor:
    """Return the means of `count` segments of the tokens, (B, H, count, K); lengths of segments differ by one token at
    most.
    """
    return torch.stack([part.mean(-2) for part in x_BHTK.tensor_split(count, dim=-2)], dim=-2)


def pseudo_inverse(a_Xmm: Tensor, steps: int = STEPS) -> Tensor:
    """Return the approximation of the pseudo-inverse of row-stochastic matrices after so many steps."""
    eye = torch.eye(a_Xmm.shape[-1], dtype=a_Xmm.dtype, device=a_Xmm.device)
    norms = a_Xmm.abs().sum(-2).amax(-1) * a_Xmm.abs().sum(-1).amax(-1)
    z = a_Xmm.mT / norms[..., None, None]
    for _ in range(steps):
        az = a_Xmm @ z
        z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
    return z


def nystrom_attention(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSV: Tensor,
    landmarks: int,
    scaling: float,
    *,
    steps: int = STEPS,
    causal: bool = False,
) -> Tensor:
    """Return out_BHTV. landmarks: m, at most the number of queries and of keys.

    Raises SurgeryError otherwise, and for causal attention.
    """
    if causal:
        raise SurgeryError(
            "Nystroem attention: landmarks are means over tokens that come after a query, so the attention cannot be "
            "causal; use a "
            "mixer such as ssd"
        )
    most = min(q_BHTK.shape[-2], k_BHSK.shape[-2])
    if not 1 <= landmarks <= most:
        raise SurgeryError(f"Nystroem attention: landmarks must be 1 to {most}, the number of tokens (got {landmarks})")
    middle_q, middle_k = segment_means(q_BHTK, landmarks), segment_means(k_BHSK, landmarks)
    first = (scaling * q_BHTK @ middle_k.mT).softmax(-1)
    inverse = pseudo_inverse((scaling * middle_q @ middle_k.mT).softmax(-1), steps)
    out_BHTV: Tensor = first @ (inverse @ ((scaling * middle_q @ k_BHSK.mT).softmax(-1) @ v_BHSV))
    return out_BHTV
