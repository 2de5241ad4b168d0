"""Rows of logits: log-sum-exp, divergence from a teacher's rows, and the gradient of both, written over the logits.

    x = transform(z)        q = softmax(x / temperature)        s = softmax(x)        p: q of the teacher's logits
    forward   KL(p || q) = sum_v p_v (log p_v - log q_v)        dKL/dx_v = (q_v - p_v) / temperature
    reverse   KL(q || p) = sum_v q_v (log q_v - log p_v)        dKL/dx_v = q_v (log q_v - log p_v - KL) / temperature
    CE        -log s_label                                      dCE/dx_v = s_v - [v = label]

Both functions are references that kernels/linear_loss replaces on GPUs. They convert a few rows at a time to float32, so
that memory does not grow with the number of rows.

N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from surgery.core.dispatch import dispatched

Direction = Literal["forward", "reverse"]
# Logits in float32 at a time: on a CPU few enough to stay in its cache.
MAX_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}


class LogitTransform(NamedTuple):
    """What a model does with the product of its output head: softcap tanh(scale z / softcap), or scale z if softcap
    is 0.
    """

    scale: float = 1.0
    softcap: float = 0.0

    def apply(self, z: Tensor) -> Tensor:
        """Return the transformed logits, in float32 at least."""
        x = z.to(torch.promote_types(z.dtype, torch.float32))
        x = x * self.scale if self.scale != 1 else x
        return self.softcap * torch.tanh(x / self.softcap) if self.softcap else x

    def slope(self, x: Tensor) -> Tensor | float:
        """Return the derivative by z, from the transformed logits."""
        return self.scale * (1 - (x / self.softcap).square()) if self.softcap else self.scale


UNCHANGED = LogitTransform()


class RowSpec(NamedTuple):
    """What is computed of the rows.

    transform, teacher_transform: of both models. temperature: of q and p. direction: of the divergence. size: the first
    logits that q and p are taken over (embeddings may be padded differently). soft, hard: whether q and s are needed.
    """

    size: int
    soft: bool
    hard: bool
    temperature: float = 1.0
    direction: Direction = "forward"
    transform: LogitTransform = UNCHANGED
    teacher_transform: LogitTransform = UNCHANGED

    def shares_sum(self, vocabulary: int) -> bool:
        """Return whether q and s are the same distribution."""
        return self.soft and self.hard and self.temperature == 1 and self.size == vocabulary


class RowStats(NamedTuple):
    """Per row, (N,) in float32: logsumexp of x / temperature over `size` logits, of the teacher's, the divergence in
    nats, and logsumexp of x over all; None where not asked for.
    """

    soft_N: Tensor | None = None
    teacher_N: Tensor | None = None
    kl_N: Tensor | None = None
    hard_N: Tensor | None = None


@dispatched
def row_stats(logits_NV: Tensor, teacher_NV: Tensor | None, spec: RowSpec) -> RowStats:
    """Return the statistics of rows of logits. teacher_NV: None for rows without a whole teacher distribution."""
    parts = [
        _stats(logits_NV[rows], None if teacher_NV is None else teacher_NV[rows], spec) for rows in _groups(logits_NV)
    ]
    columns = zip(*parts)
    return RowStats(*(None if column[0] is None else torch.cat(column) for column in columns))


def _stats(logits_NV: Tensor, teacher_NV: Tensor | None, spec: RowSpec) -> RowStats:
    x_NV = spec.transform.apply(logits_NV)
    soft_N = teacher_N = kl_N = None
    if spec.soft:
        soft_N, log_q_NV = _log_softmax(_tempered(x_NV, spec))
        if teacher_NV is not None:
            teacher_N, log_p_NV = _log_softmax(_tempered(spec.teacher_transform.apply(teacher_NV), spec))
            from_NV, to_NV = (log_p_NV, log_q_NV) if spec.direction == "forward" else (log_q_NV, log_p_NV)
            kl_N = torch.linalg.vecdot(from_NV.exp(), from_NV.sub_(to_NV))
    hard_N = None
    if spec.hard:
        hard_N = soft_N if spec.shares_sum(x_NV.shape[-1]) else _log_softmax(x_NV)[0]
    return RowStats(soft_N, teacher_N, kl_N, hard_N)


def _log_softmax(x_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Return (logsumexp, log_softmax); PyTorch's logsumexp by itself takes more passes."""
    log_NV = x_NV.log_softmax(-1)
    return x_NV.amax(-1) - log_NV.amax(-1), log_NV


@dispatched
def row_gradient_(
    logits_NV: Tensor,
    teacher_NV: Tensor | None,
    stats: RowStats,
    soft_N: Tensor | None,
    hard_N: Tensor | None,
    labels_N: Tensor | None,
    *,
    spec: RowSpec,
) -> None:
    """Overwrite logits by the gradient of sum_n soft_n temperature KL_n + hard_n CE_n.

    Without a teacher the first term is the one whose gradient by x is soft_n q. labels_N: any token where hard_n is 0.
    """
    for rows in _groups(logits_NV):
        x_NV = spec.transform.apply(logits_NV[rows])
        grad_NV = None
        if soft_N is not None:
            teacher = None if teacher_NV is None else teacher_NV[rows]
            kl_N = None if stats.kl_N is None else stats.kl_N[rows]
            grad_NV = _soft_gradient(x_NV, teacher, kl_N, spec).mul_(soft_N[rows, None])
        if hard_N is not None:
            assert labels_N is not None
            hard_NV = x_NV.softmax(-1).mul_(hard_N[rows, None])
            hard_NV.scatter_add_(-1, labels_N[rows, None], -hard_N[rows, None].to(hard_NV.dtype))
            if grad_NV is not None:
                hard_NV[:, : spec.size] += grad_NV
            grad_NV = hard_NV
        assert grad_NV is not None
        if grad_NV.shape != x_NV.shape:
            grad_NV = torch.nn.functional.pad(grad_NV, (0, x_NV.shape[-1] - spec.size))
        slope = spec.transform.slope(x_NV)
        logits_NV[rows] = grad_NV if isinstance(slope, float) and slope == 1 else grad_NV.mul_(slope)


def _soft_gradient(x_NV: Tensor, teacher_NV: Tensor | None, kl_N: Tensor | None, spec: RowSpec) -> Tensor:
    """Return temperature dKL/dx, or q without a teacher, over the first `size` logits."""
    y_NV = _tempered(x_NV, spec)
    if teacher_NV is None:
        return y_NV.softmax(-1)
    u_NV = _tempered(spec.teacher_transform.apply(teacher_NV), spec)
    if spec.direction == "forward":
        return y_NV.softmax(-1).sub_(u_NV.softmax(-1))
    assert kl_N is not None
    log_q_NV = y_NV.log_softmax(-1)
    return log_q_NV.exp().mul_(log_q_NV.sub_(u_NV.log_softmax(-1)).sub_(kl_N[:, None]))


def _tempered(x_NV: Tensor, spec: RowSpec) -> Tensor:
    x_NV = x_NV[:, : spec.size]
    return x_NV / spec.temperature if spec.temperature != 1 else x_NV


def _groups(logits_NV: Tensor) -> Iterator[slice]:
    """Yield slices of rows."""
    count, size = logits_NV.shape
    rows = max(1, MAX_ELEMENTS.get(logits_NV.device.type, 2**24) // max(1, size))
    return (slice(start, start + rows) for start in range(0, max(count, 1), rows))


def gathered(logits_NV: Tensor, tokens_NK: Tensor, transform: LogitTransform) -> Tensor:
    """Return the transformed logits of some tokens, (N, K)."""
    return transform.apply(logits_NV.gather(-1, tokens_NK))
