"""Losses of rows of logits by their definitions, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.training.top_k import log_remaining_mass


def kl_divergence(student_NV: Tensor, teacher_NV: Tensor, temperature: float) -> Tensor:
    """Return KL(teacher || student) over the whole vocabulary, (N,), in nats."""
    q_NV = (student_NV.float() / temperature).log_softmax(-1)
    p_NV = (teacher_NV.float() / temperature).log_softmax(-1)
    return torch.nn.functional.kl_div(q_NV, p_NV, reduction="none", log_target=True).sum(-1)


def top_k_kl_divergence(
    student_NV: Tensor, tokens_NK: Tensor, top_NK: Tensor, rest_N: Tensor, temperature: float
) -> Tensor:
    """Return KL(teacher || student) over k tokens and the rest as one event, (N,), in nats. top, rest: teacher's
    log-probabilities.
    """
    q_NV = student_NV.float() / temperature
    q_NK = q_NV.gather(-1, tokens_NK) - q_NV.logsumexp(-1, keepdim=True)
    left_N = log_remaining_mass(q_NK)
    return (top_NK.exp() * (top_NK - q_NK)).sum(-1) + rest_N.exp() * (rest_N - left_N)
