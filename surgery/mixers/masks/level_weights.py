"""Weights of the levels of log-linear attention: forms of lambda, and matrix-valued Lambda (Guo et al. 2025, section
3.1, appendix A).

The paper leaves the form of lambda open and tunes it. With z = W x + b and a learned number c for each query head and
level:

    softplus   lambda = softplus(z)                     without c
    linear     lambda = c z                             may be negative
    positive   lambda = softplus(c z)
    bounded    lambda = exp(-exp(c) softplus(z))        between 0 and 1

Matrix-valued: o_t = sum_l (Lambda_t^(l)^T q_t)^T S_t^(l), with Lambda (F, F) for each query head and level and S the
state of level l. States and their merges do not change. Only the query differs from level to level, so that a mask sees
J L queries per group in place of J, each with the lambda of one level and zeros for the others:

    diagonal   Lambda_t = lambda_t (I + diag(U D x_t + b))     with D (rank, dim) and U (heads L F, rank)
    static     Lambda_t = lambda_t A                           A (F, F), learned
    low_rank   Lambda_t = lambda_t (I + B C^T)                 B, C (F, rank), learned
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.mixers.base import AttentionShape, MethodModule
from surgery.mixers.masks.base import Signals
from surgery.mixers.masks.chunking import inverse_softplus
from surgery.mixers.projections import Float32Linear

Form = Literal["softplus", "linear", "positive", "bounded"]
Matrix = Literal["scalar", "diagonal", "static", "low_rank"]
FORMS: tuple[str, ...] = ("softplus", "linear", "positive", "bounded")
MATRICES: tuple[str, ...] = ("scalar", "diagonal", "static", "low_rank")
LARGEST_BOUNDED = 0.99  # initial lambda of the bounded form, which does not reach 1


def initial_scale(form: str) -> float:
    """Return the initial value of c."""
    return 0.0 if form == "bounded" else 1.0


def compute_lambdas(form: str, z: Tensor, scale: Tensor | None) -> Tensor:
    """Return lambda of z. scale: c, broadcast against z; None for the form `softplus`."""
    if form == "softplus" or scale is None:
        return F.softplus(z)
    scale = scale.to(z.dtype)
    if form == "linear":
        return scale * z
    if form == "positive":
        return F.softplus(scale * z)
    return torch.exp(-scale.exp() * F.softplus(z))


def invert_lambdas(form: str, lambdas: Tensor) -> Tensor:
    """Return z for lambdas >= 0, with c at its initial value.

    The form `bounded` takes lambdas up to LARGEST_BOUNDED; smaller ones than 1e-6 become 1e-6, except in the form
    `linear`.
    """
    if form == "linear":
        return lambdas
    lambdas = lambdas.clamp_min(1e-6)
    if form == "bounded":
        return inverse_softplus(-lambdas.clamp_max(LARGEST_BOUNDED).log())
    return inverse_softplus(lambdas)


class LevelMatrices(MethodModule):
    """The matrices Lambda / lambda of each query head and level, initially the identity. Parameters are float32.

    shape: of the linear branch; key: the number of features F. levels: L.
    """

    def __init__(self, matrix: str, rank: int, shape: AttentionShape, levels: int):
        super().__init__()
        heads = (shape.groups, shape.heads // shape.groups, levels)
        self.matrix, self.shape, self.levels = matrix, shape, levels
        self.down = self.up = None
        self.matrix_GJLFF = self.left_GJLFR = self.right_GJLFR = None
        if matrix == "diagonal":
            self.down = Float32Linear(shape.dim, rank, bias=False)
            self.up = Float32Linear(rank, shape.heads * levels * shape.key)
            nn.init.zeros_(self.up.weight)
            nn.init.zeros_(self.up.bias)
        elif matrix == "static":
            self.matrix_GJLFF = nn.Parameter(torch.eye(shape.key).repeat(*heads, 1, 1))
        else:
            self.left_GJLFR = nn.Parameter(torch.randn(*heads, shape.key, rank) * shape.key**-0.5)
            self.right_GJLFR = nn.Parameter(torch.zeros(*heads, shape.key, rank))

    @staticmethod
    def macs(matrix: str, rank: int, features: int, levels: int) -> int:
        """Return multiply-accumulates per token and query head, without those of linears."""
        macs_of = {"scalar": 0, "diagonal": features, "static": features**2, "low_rank": 2 * features * rank}
        return levels * macs_of[matrix]

    def signals(self, x_BTD: Tensor) -> Signals:
        """Return the signal `diagonal` (B, T, G, J, L, F) of the form `diagonal`."""
        if self.down is None or self.up is None:
            return {}
        sizes = (self.shape.groups, -1, self.levels, self.shape.key)
        return {"diagonal": self.up(self.down(x_BTD)).unflatten(-1, sizes)}

    def queries(self, q_BGJTF: Tensor, signals: Signals) -> Tensor:
        """Return Lambda^T q / lambda of every level, (B, G, J L, T, F)."""
        q_BGJ1TF = q_BGJTF.unsqueeze(3)
        if "diagonal" in signals:
            out = q_BGJ1TF * (1 + signals["diagonal"].permute(0, 2, 3, 4, 1, 5).to(q_BGJTF.dtype))
        elif self.matrix_GJLFF is not None:
            out = q_BGJ1TF @ self.matrix_GJLFF.to(q_BGJTF.dtype)
        else:
            assert self.left_GJLFR is not None and self.right_GJLFR is not None
            out = q_BGJ1TF + (q_BGJ1TF @ self.left_GJLFR.to(q_BGJTF.dtype)) @ self.right_GJLFR.to(q_BGJTF.dtype).mT
        return out.flatten(2, 3)


def one_level_each(level_BTGJL: Tensor) -> Tensor:
    """Return lambdas (B, T, G, J L, L): query (j, l) has the lambda of level l, and zeros for the other levels."""
    return torch.diag_embed(level_BTGJL).flatten(3, 4)
