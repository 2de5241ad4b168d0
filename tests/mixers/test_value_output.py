"""Structured W_V W_O^T of Kuang et al. 2025, eq. 3: against the dense matrices, and its fit to weights of a model."""

from __future__ import annotations

import pytest
import torch

from recipes.papers.attention.value_output import attention_output, fit_value_output, relative_errors
from surgery.structures.mlbtc import MLBTC

HEADS, DIM, KEY, LENGTH = 3, 16, 4, 11


def random_attention():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    score_HTT = draw(HEADS, LENGTH, LENGTH).masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf)
    return score_HTT.softmax(-1), draw(LENGTH, DIM), draw(HEADS, DIM, KEY), draw(HEADS, DIM, KEY)


@pytest.mark.parametrize(
    "levels, ranks", [((1,), (2,)), ((1, 4), (2, 2)), (((4, 4), 2), (1, 3)), ((1, "sqrt"), (1, 2))]
)
def test_the_output_is_eq_3(levels, ranks):
    weight_HTT, x_TD, value_HDK, output_HDK = random_attention()
    maps = fit_value_output(value_HDK, output_HDK, MLBTC(levels=levels, ranks=ranks))
    n_HDD = torch.stack([linear.dense().mT for linear in maps])
    expected_TD = torch.einsum("hts,sd,hde->te", weight_HTT, x_TD, n_HDD)
    torch.testing.assert_close(attention_output(weight_HTT, x_TD, maps), expected_TD, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("levels, ranks", [((1,), (KEY,)), ((1, 2), (KEY, 1)), (((4, 4),), (KEY,)), (((2, 2),), (8,))])
def test_a_map_that_holds_the_rank_of_a_head_is_the_original(levels, ranks):
    """Each head's W_V W_O^T has rank K, so that a level of one block, or whole blocks of a grid, are exact."""
    weight_HTT, x_TD, value_HDK, output_HDK = random_attention()
    maps = fit_value_output(value_HDK, output_HDK, MLBTC(levels=levels, ranks=ranks))
    assert max(relative_errors(maps, value_HDK, output_HDK)) < 1e-12
    values_HTK = torch.einsum("hts,sd,hdk->htk", weight_HTT, x_TD, value_HDK)
    original_TD = torch.einsum("htk,hdk->td", values_HTK, output_HDK)
    torch.testing.assert_close(attention_output(weight_HTT, x_TD, maps), original_TD, rtol=1e-12, atol=1e-11)


def test_the_fit_of_one_level_is_the_best_low_rank_matrix_in_the_metric():
    """Eckart and Young: the error is what the left out singular values of (W_V W_O^T)^T C^(1/2) are."""
    _, x_TD, value_HDK, output_HDK = random_attention()
    moment_DD = x_TD.mT @ x_TD + 0.1 * torch.eye(DIM, dtype=torch.float64)
    root_DD = torch.linalg.cholesky(moment_DD)
    maps = fit_value_output(value_HDK, output_HDK, MLBTC(levels=(1,), ranks=(2,)), moment_DD)
    for linear, v_DK, o_DK in zip(maps, value_HDK, output_HDK):
        target_DD = o_DK @ v_DK.mT
        left_out = torch.linalg.svdvals(target_DD @ root_DD)[2:].norm()
        assert float(((linear.dense() - target_DD) @ root_DD).norm() / left_out) == pytest.approx(1, abs=1e-9)


def test_more_levels_fit_better():
    _, _, value_HDK, output_HDK = random_attention()
    errors = [
        sum(relative_errors(fit_value_output(value_HDK, output_HDK, config), value_HDK, output_HDK))
        for config in (
            MLBTC(levels=(1,), ranks=(1,)),
            MLBTC(levels=(1, 2), ranks=(1, 1)),
            MLBTC(levels=(1, 2, (4, 4)), ranks=(1, 1, 1)),
        )
    ]
    assert errors[2] < errors[1] < errors[0] < HEADS
