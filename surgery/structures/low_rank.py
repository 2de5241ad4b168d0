"""Low rank: B = left @ right, left (O, R), right (R, I).

Optimal in the metric (Eckart-Young on the whitened matrix): with T^T T = G, R R^T = C and U the leading left
singular vectors of T W R, B = T^-1 U U^T T W. U comes from eigh of the smaller Gram matrix of T W R.
Input whitening: SVD-LLM (Wang et al. 2024), CorDA; two-sided: K-FAC-weighted SVD.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.dispatch import dispatched_by
from surgery.structures import linalg
from surgery.structures.base import (
    STRUCTURES,
    MuP,
    Rank,
    StructureConfig,
    StructuredLinear,
    balance_factors,
    curve_ranks,
    exact_factors,
)
from surgery.structures.btt_products import btt_call_key
from surgery.structures.metric import Metric, inverse_size

FEW_TOKENS = 4  # up to which a kernel may be faster than PyTorch's two products


@dataclass(frozen=True)
class LowRank(StructureConfig):
    """Config of a low-rank matrix. rank: R."""

    name: ClassVar[str] = "low_rank"
    rank: Rank = None


def leading_directions(m_OI: Tensor, rank: int) -> Tensor:
    """Return the leading left singular vectors of m, (..., O, rank), from `eigh` of its smaller Gram matrix.

    Forming the Gram matrix loses precision only for singular values below 3e-4 of the largest. The projection needs
    orthonormal columns, which `orthonormalize` ensures.
    """
    m_OI = m_OI * inverse_size(m_OI)
    if m_OI.shape[-2] <= m_OI.shape[-1]:
        return leading_eigenvectors(m_OI @ m_OI.mT, rank)
    v_IR = leading_eigenvectors(m_OI.mT @ m_OI, rank)
    return orthonormalize(m_OI @ v_IR)


def orthonormalize(y_OR: Tensor) -> Tensor:
    """Return orthonormal columns (..., O, R) with the span of nearly orthogonal columns.

    Runs CholeskyQR twice (Yamamoto et al. 2015, CholeskyQR2), which is many times as fast as Householder QR; the latter
    is used if the columns are linearly dependent.
    """
    norm_1R = torch.linalg.vector_norm(y_OR, dim=-2, keepdim=True)
    q_OR: Tensor = y_OR / torch.where(norm_1R > 0, norm_1R, 1.0)
    for _ in range(2):
        gram_RR = q_OR.mT @ q_OR
        lower_RR, failed = linalg.cholesky_ex(gram_RR)
        if bool(failed.any() | (lower_RR.diagonal(dim1=-2, dim2=-1) < 1e-2).any()):
            return linalg.qr(y_OR)[0]
        q_OR = linalg.solve_triangular(lower_RR.mT, q_OR, upper=True, left=False)
    return q_OR


def leading_eigenvectors(gram: Tensor, rank: int) -> Tensor:
    """Return the eigenvectors (..., n, rank) of the largest eigenvalues, largest first."""
    return linalg.eigh(gram)[1][..., -rank:].flip(-1)


def cosine_transform(size: int) -> Tensor:
    """Return the orthogonal matrix (size, size) of the discrete cosine transform (DCT-II), float32."""
    places = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(torch.pi / size * places[:, None] * (places + 0.5)) * (2 / size) ** 0.5
    matrix[0] /= 2**0.5
    transform: Tensor = matrix.float()
    return transform


def low_rank_factors(weight_OI: Tensor, rank: int, metric: Metric) -> tuple[Tensor, Tensor]:
    """Return left (O, R) and right (R, I) of the best rank-R approximation in the metric; exact at full rank."""
    if rank >= min(weight_OI.shape):
        return exact_factors(weight_OI)
    if weight_OI.shape[0] <= weight_OI.shape[1]:  # the Gram matrix needs no root of C
        product_OI, weighed_OI = (m * inverse_size(m) for m in metric.left_gram_factors(weight_OI))
        u_OR = leading_eigenvectors(product_OI @ weighed_OI.mT, rank)
    else:
        u_OR = leading_directions(metric.whiten(weight_OI), rank)
    return balance_factors(metric.apply_output_root_inverse(u_OR), u_OR.mT @ metric.apply_output_root(weight_OI))


def tail_energies(m_OI: Tensor) -> Tensor:
    """Return tail[..., r], the sum of squared singular values beyond the first r, for r = 0 .. min(O, I)."""
    return gram_tails(m_OI @ m_OI.mT if m_OI.shape[-2] <= m_OI.shape[-1] else m_OI.mT @ m_OI)


def gram_tails(gram: Tensor) -> Tensor:
    """Return tail[..., r], the sum of all but the r largest eigenvalues, for r = 0 .. n."""
    energies = linalg.eigvalsh(gram).clamp_min(0)  # ascending, so the tail is a cumulative sum
    tail = torch.cat([torch.zeros_like(energies[..., :1]), energies.cumsum(-1)], dim=-1)
    return tail.flip(-1)


def low_rank_call_key(x: Tensor, right_RI: Tensor, left_1OR: Tensor, bias: Tensor | None) -> Hashable | None:
    """Return what the selection of a kernel for `low_rank_linear` depends on; None for a call whose selection is not
    kept.
    """
    return btt_call_key(x, right_RI, left_1OR, bias, 0)


@dispatched_by(low_rank_call_key)
def low_rank_linear(x: Tensor, right_RI: Tensor, left_1OR: Tensor, bias: Tensor | None) -> Tensor:
    """Return left (right x) + bias (..., O) for x (..., I). On a GPU a kernel computes it for a few tokens."""
    y = F.linear(F.linear(x, right_RI), left_1OR[0])
    return y if bias is None else y + bias


@STRUCTURES.register(LowRank)
class LowRankLinear(StructuredLinear):
    """Low-rank linear layer, y = left (right x). Cores: `weight` = left, stored as (1, O, R), `right` (R, I)."""

    weight: Tensor
    right: Tensor
    group: tuple[Any, int] | None = None  # a LinearGroup (surgery.structures.grouped), and the place in it

    @property
    def call_group(self) -> Any:
        """The LinearGroup, for `hold_groups`, or None."""
        return None if self.group is None else self.group[0]

    @classmethod
    def shapes(cls, config: Any, out: int, in_: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every core (layout in the class docstring)."""
        return {"weight": (1, out, config.rank), "right": (config.rank, in_)}

    @classmethod
    def full_rank(cls, config: Any, out: int, in_: int) -> int:
        """Return the smallest rank that represents every (out, in) matrix exactly."""
        return min(out, in_)

    @classmethod
    def project(cls, weight_OI: Tensor, config: Any, metric: Metric | None = None) -> StructuredLinear:
        """Return the linear module closest to `weight_OI` (O, I) in the metric."""
        left_OR, right_RI = low_rank_factors(weight_OI, config.rank, metric or Metric())
        return cls.from_cores(config, weight_OI.shape, {"weight": left_OR[None], "right": right_RI})

    def cores_to_round(self) -> dict[str, Tensor]:
        """Return cores of the same matrix that lose less when values beside each other share a scale: left D^-1 Q and
        Q^T D right, with D the norms of left's columns, and Q orthogonal, which spreads large columns over the rank.
        """
        left_OR, right_RI = self.weight.detach()[0].float(), self.right.detach().float()
        norms_R = torch.linalg.vector_norm(left_OR, dim=0)
        norms_R = torch.where(norms_R > 0, norms_R, 1.0)
        q_RR = cosine_transform(len(norms_R)).to(left_OR.device)
        cores = {"weight": (left_OR / norms_R @ q_RR)[None], "right": q_RR.mT @ (norms_R[:, None] * right_RI)}
        return {name: core.to(getattr(self, name).dtype) for name, core in cores.items()}

    @classmethod
    def rank_error_curve(
        cls, weight_OI: Tensor, config: Any, metric: Metric, steps: int = 64
    ) -> list[tuple[Any, float]]:
        """Return (config, squared error in the metric) at about `steps` ranks, cheapest first."""
        if weight_OI.shape[0] <= weight_OI.shape[1]:
            tail = gram_tails(metric.left_gram(weight_OI)).tolist()
        else:
            tail = tail_energies(metric.whiten(weight_OI)).tolist()
        ranks = curve_ranks(cls.full_rank(config, *weight_OI.shape), steps)
        return [(replace(config, rank=r), tail[r]) for r in ranks]

    def product(self, x: Tensor) -> Tensor:
        """Return B x (..., O) without the bias, for x (..., I)."""
        right, left = self.right_and_left()
        return F.linear(F.linear(x, right), left[0])

    def product_by_cores(
        self, x: Tensor, multiply: Callable[[str, Tensor], Tensor], tables: Mapping[str, Any]
    ) -> Tensor:
        """Return B x (..., O), without the bias. multiply(name, x): the product of a core with x (..., K). tables:
        of indices, of which this structure has none."""
        return multiply("weight", multiply("right", x))

    def forward(self, x: Tensor) -> Tensor:
        """Return B x + bias (..., O) for x (..., I)."""
        # An exported graph holds for any number of tokens, so it has no branch on them.
        # The flag is read here and not by `is_exporting`, whose call takes time in every step.
        if getattr(torch.compiler, "_is_exporting_flag", False) or x.numel() > FEW_TOKENS * x.shape[-1]:
            return super().forward(x)
        joined = self.group
        if joined is not None and not torch.is_grad_enabled():
            group, position = joined
            together: Tensor = group.output(position, x)
            return together
        y: Tensor = low_rank_linear(x, *self.right_and_left(), self.bias)
        return y

    def dense(self) -> Tensor:
        """Return B as a dense matrix (O, I)."""
        return self.weight[0] @ self.right

    def macs(self) -> int:
        """Return multiply-accumulates per token."""
        return self.weight.numel() + self.right.numel()

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of each core."""
        rank = self.config.rank
        return {"right": MuP(self.in_features, rank), "weight": MuP(rank, self.out_features)}
