"""HODLR, HSS and quasi-hierarchical matrices of Guo et al. 2025, appendices B.1 to B.3: dense form against product, ranks
of blocks, nesting, and costs.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recipes.papers.attention.hierarchical import CLASSES, log_linear_mask, random_matrix, unfold_bases

LENGTHS = (2, 8, 64)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_product_is_that_of_the_dense_matrix(kind, length):
    matrix, x = random_matrix(kind, length, rank=3), torch.randn(length, 5, dtype=torch.float64)
    dense = matrix.dense()
    assert torch.equal(dense, dense.tril())
    assert torch.allclose(matrix.product(x), dense @ x, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("kind", CLASSES)
def test_blocks_of_siblings_have_the_rank(kind):
    dense = random_matrix(kind, 64, rank=2).dense()
    for level in range(6):
        n = 2**level
        for i in range(0, 64, 2 * n):
            assert int(torch.linalg.matrix_rank(dense[i + n : i + 2 * n, i : i + n])) == min(2, n)


def test_nested_bases_make_larger_blocks_low_rank():
    """All tokens before a cluster reach it through its basis: rank k in HSS, more in HODLR. Of a quasi-hierarchical
    matrix that holds for columns only.
    """

    def ranks(kind):
        dense = random_matrix(kind, 32, rank=2).dense()
        return [int(torch.linalg.matrix_rank(block)) for block in (dense[24:, :24], dense[8:, :8])]

    assert ranks("hss") == [2, 2]
    assert ranks("quasi_hierarchical") == [4, 2]
    assert ranks("hodlr") == [4, 4]


def test_bases_are_translated():
    matrix = random_matrix("hss", 16, rank=2)
    bases = unfold_bases(matrix.right_leaves, list(matrix.right_moves))
    for level, move in enumerate(matrix.right_moves):
        for i in range(len(move)):
            children = torch.block_diag(bases[level][2 * i], bases[level][2 * i + 1])
            assert torch.allclose(bases[level + 1][i], children @ move[i])


@pytest.mark.parametrize("kind", CLASSES)
def test_costs(kind):
    """Numbers that are stored: T log T for HODLR and quasi-hierarchical matrices, T for HSS. The product multiplies by
    each at most once per column.
    """
    k = 2
    for length in (64, 512):
        levels, matrix = length.bit_length() - 1, random_matrix(kind, length, k)
        one_basis = length * k * levels // 2  # half of the clusters of each level
        nested = length * k + sum(2 * k * k * (length >> level) for level in range(1, levels))
        cores = k * k * (length - 1)
        expected = {"hodlr": 2 * one_basis, "quasi_hierarchical": one_basis + nested, "hss": 2 * nested + cores}[kind]
        assert matrix.numbers == length + expected
        with FlopCounterMode(display=False) as counter:
            matrix.product(torch.randn(length, 3, dtype=torch.float64))
        assert counter.get_total_flops() <= 2 * 3 * matrix.numbers
    if kind == "hss":
        assert matrix.numbers < length * (1 + 2 * k + 5 * k * k)


def fenwick_level(t, s):
    """The level of the bucket of token s for the query t, from 0: t itself, then t without its lowest bits (eq. 3)."""
    end = t
    while s < end:
        size = end & -end
        if s >= end - size:
            return size.bit_length()
        end -= size
    return 0


def test_the_mask_of_log_linear_attention_is_quasi_hierarchical():
    length = 32
    gates = torch.rand(length, dtype=torch.float64) * 0.3 + 0.7
    lambdas = torch.rand(length, 6, dtype=torch.float64)
    matrix = log_linear_mask(gates, lambdas)
    expected = torch.zeros(length, length, dtype=torch.float64)
    for t in range(length):
        for s in range(t + 1):
            expected[t, s] = lambdas[t, fenwick_level(t, s)] * gates[s + 1 : t + 1].prod()
    assert torch.allclose(matrix.dense(), expected)
    x = torch.randn(length, 4, dtype=torch.float64)
    assert torch.allclose(matrix.product(x), expected @ x)


def test_other_names_and_lengths_are_refused():
    with pytest.raises(ValueError, match="kind must be one of"):
        random_matrix("strong", 8, 1)
    with pytest.raises(ValueError, match="length a power of two"):
        random_matrix("hss", 12, 1)
