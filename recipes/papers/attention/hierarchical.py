"""Hierarchical matrices of Guo et al. 2025, "Log-Linear Attention", appendices B.1 to B.3: HODLR, HSS and
quasi-hierarchical. Plain-torch references, without a recipe.

    matrix = random_matrix("hodlr", length=64, rank=2)
    matrix.dense() @ x, matrix.product(x)

A matrix (T, T), T a power of two, is divided as a balanced binary tree divides 1 .. T. Level l >= 1 has T / 2^l pairs of
sibling clusters of n = 2^(l-1) tokens, and each pair has one block of rank k below the diagonal,

    M[I_2i, I_2i-1] = U_i^(l) V_i^(l)^T,   U, V (n, k)

with the diagonal M[t, t] besides. The blocks above the diagonal, which the appendix has too, would be those of M^T; a
causal mask has none. The three classes differ in the bases:

    hodlr               every level stores its own U and V: T k log2 T numbers
    hss                 U and V of level l + 1 are those of the two children of level l times a matrix (2 k, k), so that
                        only translations are stored; M[I_2i, I_2i-1] = U S V^T with S (k, k)
    quasi_hierarchical  V is nested as in hss, and U is stored at every level. The mask of log-linear attention (eq. 4)
                        is one of rank 1 with V = 1 / (alpha_1 .. alpha_s): `log_linear_mask`

A product with x (T, D) takes as many multiplications for each column as numbers are stored: O(T log T), and O(T) for
hss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CLASSES = ("hodlr", "hss", "quasi_hierarchical")


def unfold_bases(leaves_TK: Tensor, translations: list[Tensor]) -> list[Tensor]:
    """Return the bases (T / n, n, K) of all levels: the leaves (n = 1), then each from its children.

    translations: of level l = 2, 3, .., (T / n, 2 K, K).
    """
    bases = [leaves_TK[:, None]]
    for move in translations:
        children = bases[-1].unflatten(0, (-1, 2))
        upper, lower = move.chunk(2, dim=1)
        bases.append(torch.cat([children[:, 0] @ upper, children[:, 1] @ lower], dim=1))
    return bases


@dataclass(frozen=True)
class Hierarchical:
    """A lower triangular hierarchical matrix.

    diagonal (T,). left, right: bases of the levels l = 1, 2, .., U of the second and V of the first cluster of each
    pair, (T / 2^l, n, K). They are stored, or None where they are nested: then leaves (T, K) and translations (T / n, 2
    K, K) of levels 2, 3, .. are, for all clusters. cores: S (T / 2^l, K, K) of each level, or None for the identity.
    """

    diagonal: Tensor
    left: list[Tensor] | None = None
    right: list[Tensor] | None = None
    left_leaves: Tensor | None = None
    left_moves: tuple[Tensor, ...] = ()
    right_leaves: Tensor | None = None
    right_moves: tuple[Tensor, ...] = ()
    cores: list[Tensor] | None = None

    @property
    def levels(self) -> int:
        """log2 of the length."""
        return len(self.diagonal).bit_length() - 1

    @property
    def numbers(self) -> int:
        """The number of stored numbers."""
        listed = (*(self.left or ()), *(self.right or ()), *self.left_moves, *self.right_moves, *(self.cores or ()))
        single = [t for t in (self.diagonal, self.left_leaves, self.right_leaves) if t is not None]
        return sum(t.numel() for t in (*listed, *single))

    def core(self, level: int) -> Tensor | None:
        """Return S of a level, counted from 0, or None."""
        return None if self.cores is None else self.cores[level]

    def dense(self) -> Tensor:
        """Return the matrix (T, T)."""
        dense_TT = self.diagonal.diag()
        left, right = self.left, self.right
        if left is None and self.left_leaves is not None:
            left = [basis[1::2] for basis in unfold_bases(self.left_leaves, list(self.left_moves))]
        if right is None and self.right_leaves is not None:
            right = [basis[0::2] for basis in unfold_bases(self.right_leaves, list(self.right_moves))]
        assert left is not None and right is not None
        for level, (u, v) in enumerate(zip(left, right)):
            n, core = 2**level, self.core(level)
            for i, block in enumerate((u if core is None else u @ core) @ v.mT):
                dense_TT[(2 * i + 1) * n : (2 * i + 2) * n, 2 * i * n : (2 * i + 1) * n] = block
        return dense_TT

    def product(self, x_TD: Tensor) -> Tensor:
        """Return M x (T, D), without forming the matrix."""
        y_TD, states = self.diagonal[:, None] * x_TD, []
        carried = None  # V^T x of the clusters of a level, for nested bases
        for level in range(self.levels):
            n = 2**level
            if self.right is not None:
                states.append(self.right[level].mT @ x_TD.unflatten(0, (-1, n))[0::2])
                continue
            assert self.right_leaves is not None
            if carried is None:
                carried = self.right_leaves[:, :, None] * x_TD[:, None]
            else:
                carried = self.right_moves[level - 1].mT @ carried.unflatten(0, (-1, 2)).flatten(1, 2)
            states.append(carried[0::2])
        states = [s if (core := self.core(level)) is None else core @ s for level, s in enumerate(states)]
        if self.left is not None:
            for level, state in enumerate(states):
                y_TD.unflatten(0, (-1, 2**level))[1::2] += self.left[level] @ state
            return y_TD
        assert self.left_leaves is not None
        below = None  # what the clusters of a level get, for nested bases, from the largest clusters on
        for level in reversed(range(self.levels)):
            state = torch.stack([torch.zeros_like(states[level]), states[level]], dim=1).flatten(0, 1)
            if below is not None:
                state = state + (self.left_moves[level] @ below).unflatten(1, (2, -1)).flatten(0, 1)
            below = state
        return y_TD if below is None else y_TD + (self.left_leaves[:, None] @ below)[:, 0]


def random_matrix(kind: str, length: int, rank: int) -> Hierarchical:
    """Return a random float64 matrix of a class; ValueError for another name, or a length that is no power of two."""
    if kind not in CLASSES or length < 2 or length & (length - 1):
        raise ValueError(f"kind must be one of {CLASSES} and length a power of two (got {kind!r}, {length})")
    levels = length.bit_length() - 1

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    def bases() -> list[Tensor]:
        return [draw(length >> (level + 1), 2**level, rank) for level in range(levels)]

    def moves() -> tuple[Tensor, ...]:
        return tuple(draw(length >> level, 2 * rank, rank) / (2 * rank) ** 0.5 for level in range(1, levels))

    diagonal = draw(length)
    if kind == "hodlr":
        return Hierarchical(diagonal, left=bases(), right=bases())
    if kind == "quasi_hierarchical":
        return Hierarchical(diagonal, left=bases(), right_leaves=draw(length, rank), right_moves=moves())
    cores = [draw(length >> (level + 1), rank, rank) for level in range(levels)]
    left, right = draw(length, rank), draw(length, rank)
    return Hierarchical(
        diagonal, left_leaves=left, left_moves=moves(), right_leaves=right, right_moves=moves(), cores=cores
    )


def log_linear_mask(gates_T: Tensor, lambdas_TL: Tensor) -> Hierarchical:
    """Return the mask of log-linear attention (eq. 4 with gates) as a quasi-hierarchical matrix of rank 1 (B.3).

    gates_T: alpha_t > 0. lambdas_TL: lambda of levels 0, 1, .., of token t (T, log2 T + 1). M[t, s] = lambda_t^(l)
    alpha_(s+1) .. alpha_t with l the level of the block that holds (t, s).
    """
    length = len(gates_T)
    levels, decay_T = length.bit_length() - 1, gates_T.cumprod(0)
    left = []
    for level in range(levels):
        pairs = (decay_T * lambdas_TL[:, level + 1]).view(-1, 2, 2**level)
        left.append(pairs[:, 1, :, None])
    moves = tuple(torch.ones(length >> level, 2, 1, dtype=gates_T.dtype) for level in range(1, levels))
    return Hierarchical(lambdas_TL[:, 0], left=left, right_leaves=(1 / decay_T)[:, None], right_moves=moves)
