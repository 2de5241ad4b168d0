"""MLBTC, and low rank, BTT and MLR as points of this family, written from its definition (Kuang et al. 2025, eq. 8,
MLBTC):

    W = sum_l alpha_l P_L (+)_k' L[l, k'] P_R (+)_k R[l, k]^T

with (+) a block-diagonal matrix and P a fixed permutation. An oracle for the products of ours: matrices are built here
as they stand in the equation.
"""

from __future__ import annotations

import pytest
import torch

from surgery.mixers import MIXERS, AttentionShape
from surgery.mixers.bilinear_btt import BilinearBTT, BilinearBTTAttention
from surgery.mixers.bilinear_mlbtc import BilinearMLBTC, BilinearMLBTCAttention
from surgery.mixers.bilinear_mlr import BilinearMLR, BilinearMLRAttention
from surgery.structures import STRUCTURES
from surgery.structures.btt import BTT
from surgery.structures.low_rank import LowRank
from surgery.structures.mlbtc import MLBTC
from surgery.structures.mlr import MLR


def mlbtc(levels):
    """levels: (alpha, P_L, blocks L, P_R, blocks R^T); permutations as lists: row i of P x is x[P[i]]."""
    total = 0
    for alpha, p_left, left, p_right, right in levels:
        inner = torch.block_diag(*right)[p_right] if p_right is not None else torch.block_diag(*right)
        outer = torch.block_diag(*left) @ inner
        total = total + alpha * (outer[p_left] if p_left is not None else outer)
    return total


def swap(first, second, inside):
    """The permutation (first, second, inside) -> (second, first, inside)."""
    return torch.arange(first * second * inside).view(first, second, inside).transpose(0, 1).flatten()


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_btt():
    b, c, a, d, s = 3, 4, 5, 6, 2
    linear = STRUCTURES[BTT](c * d, b * a, BTT(blocks=(b, c), rank=s), bias=False).double()
    linear.weight.data, linear.right.data = random(b, c, s, a, seed=1), random(c, d, b, s, seed=2)
    right = [linear.right[i].reshape(d, b * s).mT for i in range(c)]  # x_c -> (b, s)
    left = [linear.weight[i].reshape(c * s, a).mT for i in range(b)]  # (c, s) -> y_b
    assert torch.allclose(linear.dense(), mlbtc([(1.0, None, left, swap(c, b, s), right)]))


def test_low_rank():
    linear = STRUCTURES[LowRank](7, 5, LowRank(rank=3), bias=False).double()
    for i, core in enumerate(linear.parameters()):
        core.data = random(*core.shape, seed=i)
    u, s, vh = torch.linalg.svd(linear.dense())
    left, right = u[:, :3] * s[:3], vh[:3]
    assert torch.allclose(linear.dense(), mlbtc([(1.0, None, [left], None, [right])]))


def fill_cores(config, out, in_):
    linear = STRUCTURES[config](in_, out, config, bias=False).double()
    for i, core in enumerate(linear.parameters()):
        core.data = random(*core.shape, seed=i)
    return linear


@pytest.mark.parametrize("order", ["contiguous", "strided"])
def test_the_structure_is_eq_8(order):
    """Blocks have P = I; a grid has p = c, p' = b, r = b s, r' = c s, P_R swaps b and c, and P_L is the order of the
    outputs.
    """
    b, c, a, d, s, p = 3, 4, 8, 6, 2, 2
    config = MLBTC(levels=(1, p, (b, c)), ranks=(2, 3, s), order=order)
    linear = fill_cores(config, b * a, c * d)
    alphas = (0.5, -2.0, 3.0)
    for core, alpha in zip((linear.weight, linear.left2, linear.left3), alphas):
        core.data *= alpha
    left = [linear.left2[0, i * 12 : (i + 1) * 12] / alphas[1] for i in range(p)]
    right = [linear.right2[:, i * 12 : (i + 1) * 12] for i in range(p)]
    grid_right = [linear.right3[i].reshape(d, b * s).mT for i in range(c)]
    grid_left = [linear.left3[i].reshape(c * s, a).mT / alphas[2] for i in range(b)]
    order_L = swap(b, a, 1) if order == "strided" else None
    levels = [
        (alphas[0], None, [linear.weight[0] / alphas[0]], None, [linear.right1]),
        (alphas[1], None, left, None, right),
        (alphas[2], order_L, grid_left, swap(c, b, s), grid_right),
    ]
    expected, x = mlbtc(levels), random(5, c * d, seed=9)
    assert torch.allclose(linear.dense(), expected)
    assert torch.allclose(linear(x), x @ expected.mT)
    m, n = b * a, c * d
    assert linear.cost() == (m * (2 + 3 + c * s) + n * (2 + 3 + b * s),) * 2  # sum of O r'_l + I r_l


def test_all_levels_of_blocks_are_mlr():
    """With 1, 2 and 4 blocks: the same cores give the same matrix."""
    mlr = fill_cores(MLR(levels=3, ranks=(2, 1, 3), rank=6), 24, 40)
    linear = fill_cores(MLBTC(levels=(1, 2, 4), ranks=(2, 1, 3)), 24, 40)
    for name, level in (("weight", slice(0, 2)), ("left2", slice(2, 3)), ("left3", slice(3, 6))):
        getattr(linear, name).data = mlr.weight.data[..., level]
    for level in (1, 2, 3):
        getattr(linear, f"right{level}").data = getattr(mlr, f"right{level}").data
    assert torch.allclose(linear.dense(), mlr.dense()) and linear.cost() == mlr.cost()


def test_numbers_and_ranks_are_those_of_table_1():
    """D x D: 2 D r and r, 2 D sum r_l and sum r_l p_l, 2 D^(3/2) s and D; as many multiplications as numbers."""
    D, s = 64, 1
    table = [
        (MLBTC(levels=(1,), ranks=(5,)), 2 * D * 5, 5),
        (MLBTC(levels=(1, 2, 4), ranks=(2, 3, 4)), 2 * D * 9, 2 + 6 + 16),
        (MLBTC(levels=((8, 8),), ranks=(s,)), 2 * 8 * D * s, D),
        (LowRank(rank=5), 2 * D * 5, 5),
        (MLR(levels=3, ranks=(2, 3, 4), rank=9), 2 * D * 9, 2 + 6 + 16),
        (BTT(blocks=(8, 8), rank=s), 2 * 8 * D * s, D),
    ]
    for config, numbers, rank in table:
        linear = fill_cores(config, D, D)
        assert linear.cost() == (numbers, numbers) and int(torch.linalg.matrix_rank(linear.dense())) == rank


SHAPE = AttentionShape(dim=16, heads=2, groups=2, key=4, value=4, scaling=0.5)


def fill_random(mixer):
    mixer = mixer.double()
    for i, parameter in enumerate(mixer.parameters()):
        parameter.data = random(*parameter.shape, seed=i)
    return mixer


def test_bilinear_mlr():
    """Scores x^T M x' with M a sum over levels of block-diagonal low rank, divided by the number of score dims."""
    mixer = fill_random(BilinearMLRAttention(BilinearMLR(ranks=(3, 2, 1), base="own"), SHAPE))
    dims = sum(2**level * rank for level, rank in enumerate((3, 2, 1)))
    for head in range(2):
        levels = []
        for level in (1, 2, 3):
            left, right = (getattr(mixer, f"{side}{level}")[head] for side in ("left", "right"))
            levels.append((1.0, None, list(left), None, [block.mT for block in right]))
        assert torch.allclose(mixer.matrix_HDD()[head], mlbtc(levels) / dims)


def test_bilinear_mlbtc_is_eq_8():
    """Blocks along the diagonal, and a grid, whose P_R swaps its two indices; the score is divided by its dims."""
    config = BilinearMLBTC(levels=(1, 4, (2, 8)), ranks=(3, 2, 1), base="own")
    mixer = fill_random(BilinearMLBTCAttention(config, SHAPE))
    dims, (b, c, s) = 3 + 4 * 2 + 2 * 8, (2, 8, 1)
    for head in range(2):
        levels = []
        for level in (1, 2):
            left, right = (getattr(mixer, f"{side}{level}")[head] for side in ("left", "right"))
            levels.append((1.0, None, list(left), None, [block.mT for block in right]))
        left, right = mixer.left3[head], mixer.right3[head]  # (b, c, a, s), (b, c, d, s)
        grid_left = [left[i].transpose(0, 1).flatten(1) for i in range(b)]  # (a, c s)
        grid_right = [right[:, i].transpose(1, 2).flatten(0, 1) for i in range(c)]  # (b s, d)
        levels.append((1.0, None, grid_left, swap(c, b, s), grid_right))
        assert torch.allclose(mixer.matrix_HDD()[head], mlbtc(levels) / dims, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "one, other, names",
    [
        (BilinearMLBTC((1, 2, 4), (3, 2, 1), base="own"), BilinearMLR((3, 2, 1), base="own"), ("left{}", "right{}")),
        (BilinearMLBTC(((4, 4),), (2,), base="own"), BilinearBTT((4, 4), 2, base="own"), ("left", "right")),
    ],
)
def test_bilinear_mlr_and_btt_are_points_of_mlbtc(one, other, names):
    """The same factors give the same scores, fans, score dims and costs."""
    mlbtc_mixer, mixer = (fill_random(MIXERS[config](config, SHAPE)) for config in (one, other))
    for at in range(1, len(one.levels) + 1):
        for name, side in zip(names, ("left", "right")):
            getattr(mlbtc_mixer, f"{side}{at}").data = getattr(mixer, name.format(at)).data
    assert torch.equal(mlbtc_mixer.matrix_HDD(), mixer.matrix_HDD())
    assert list(mlbtc_mixer.mup().values()) == list(mixer.mup().values())
    assert type(mlbtc_mixer).cost(one, SHAPE, 50) == type(mixer).cost(other, SHAPE, 50)


def test_bilinear_btt_is_of_full_rank_where_a_head_is_not():
    mixer = fill_random(BilinearBTTAttention(BilinearBTT(blocks=(4, 4), rank=1, base="own"), SHAPE))
    assert int(torch.linalg.matrix_rank(mixer.matrix_HDD()[0])) == 16 > SHAPE.key
