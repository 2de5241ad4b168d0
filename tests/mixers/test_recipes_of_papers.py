"""Shipped recipes that are a paper's layer, against the formula of the paper in float64, and the tables of the docs that
say which recipes are.

One row of random tokens, two query heads that share a key/value head of 64 dims. Oracles call no mixer and no mask.
"""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.mixers import MIXERS, AttentionShape, Mixer, MixerInputs
from surgery.mixers.linear import l2_normalize
from surgery.planning.recipe import load_recipe, shipped_recipes

DOCS = Path(__file__).resolve().parents[2] / "docs"
HEADS, KEY, VALUE, DIM = 2, 64, 3, 8
SHAPE = AttentionShape(dim=DIM, heads=HEADS, groups=1, key=KEY, value=VALUE, scaling=KEY**-0.5)


def mixer_of(recipe: str, *overrides: str) -> Mixer:
    """Return the recipe's mixer, with parameters of the mask and step sizes moved off their initial values."""
    attention = load_recipe(recipe, list(overrides)).attention
    assert attention is not None
    config = attention.config_for(SHAPE, 0, 1)
    torch.manual_seed(0)
    mixer = MIXERS[config](config, SHAPE).double()
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if name.startswith(("mask.", "beta_proj.")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return mixer


def random_inputs(length: int) -> MixerInputs:
    torch.manual_seed(1)
    sizes = ((HEADS, length, KEY), (1, length, KEY), (1, length, VALUE), (length, DIM))
    return MixerInputs(*(torch.randn(1, *size, dtype=torch.float64) for size in sizes))


def features(inputs: MixerInputs) -> tuple[Tensor, Tensor]:
    """Return (1 + elu(q), 1 + elu(k)), with the scale of the scores shared by q and k."""
    root = KEY**-0.25
    return 1 + F.elu(inputs.q_BHTK[0] * root), 1 + F.elu(inputs.k_BGTK[0] * root)


@torch.no_grad()
def check(recipe: str, length: int, expected_HTV: Tensor, *overrides: str) -> None:
    out_HTV = mixer_of(recipe, *overrides).mix(random_inputs(length))[0][0]
    assert float((out_HTV - expected_HTV).norm() / expected_HTV.norm()) < 1e-6


def normalised(weight_HTT: Tensor, inputs: MixerInputs) -> Tensor:
    weight_HTT = weight_HTT.tril()
    return weight_HTT @ inputs.v_BGTV[0] / weight_HTT.sum(-1, keepdim=True)


@torch.no_grad()
def test_linear_attention():
    """Katharopoulos et al. 2020, eq. 12; TBM, eq. 1, but with t itself: without it the first token would be 0 / 0."""
    inputs = random_inputs(40)
    q_HTF, k_GTF = features(inputs)
    expected_HTV = normalised(q_HTF @ k_GTF.mT, inputs)
    torch.testing.assert_close(expected_HTV[:, 0], inputs.v_BGTV[0, :, 0].expand(HEADS, -1))
    check("linear-attention", 40, expected_HTV)


@torch.no_grad()
def test_toeplitz_block_mixing():
    """TBM, eqs. 1 to 5, section 4.1: R = 8, blocks of 64, W_ib = K(i - b) / sum_b' K(i - b'), b <= i."""
    inputs, mask = random_inputs(200), mixer_of("tbm-elu").mask
    amplitude_RH, rate_R = F.softplus(mask.amplitude_RGJ[:, 0]), F.softplus(mask.rate_RG[:, 0])
    assert len(rate_R) == 8
    block_T = torch.arange(200) // 64
    kernel_HM = torch.einsum("rh,rm->hm", amplitude_RH, torch.exp(-rate_R[:, None] * torch.arange(4)))
    w_HMM = torch.stack([F.pad(kernel_HM[:, : i + 1].flip(1), (0, 3 - i)) for i in range(4)], 1)
    w_HMM = w_HMM / w_HMM.sum(-1, keepdim=True)
    q_HTF, k_GTF = features(inputs)
    check("tbm-elu", 200, normalised(w_HMM[:, block_T][:, :, block_T] * (q_HTF @ k_GTF.mT), inputs))


@torch.no_grad()
@pytest.mark.parametrize("frozen", [False, True])
def test_mhla(frozen):
    """TBM, eq. 2, section 4.1: a matrix over 128 blocks of 64 tokens, rows >= 0 that sum to one over b <= i."""
    overrides = ["attention.mask.weights=frozen"] * frozen
    inputs, mask = random_inputs(200), mixer_of("mhla-elu", *overrides).mask
    raw_HMM = mask.weight_GJMM[0]
    assert raw_HMM.shape == (HEADS, 128, 128) and raw_HMM.requires_grad is not frozen
    w_HMM = raw_HMM.masked_fill(torch.ones(128, 128).triu(1) > 0, -torch.inf).softmax(-1)
    block_T, (q_HTF, k_GTF) = torch.arange(200) // 64, features(inputs)
    expected_HTV = normalised(w_HMM[:, block_T][:, :, block_T] * (q_HTF @ k_GTF.mT), inputs)
    check("mhla-elu", 200, expected_HTV, *overrides)


@torch.no_grad()
@pytest.mark.parametrize("negative, largest", [("false", 1), ("true", 2)])
def test_deltanet(negative, largest):
    """Log-Linear Attention, section 2, footnote 5: S_t = S_(t-1) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, beta in
    (0, 1) or (0, 2). Yang et al. 2024: q and k of unit norm."""
    setting = f"attention.negative_eigenvalues={negative}"
    inputs, beta_proj = random_inputs(30), mixer_of("deltanet", setting).beta_proj
    beta_T = largest * beta_proj(inputs.x_BTD)[0, :, 0].sigmoid()
    q_HTK, k_TK = l2_normalize(inputs.q_BHTK[0] * KEY**-0.25), l2_normalize(inputs.k_BGTK[0, 0] * KEY**-0.25)
    state_VK, outs = torch.zeros(VALUE, KEY, dtype=torch.float64), []
    for beta, q_HK, k_K, v_V in zip(beta_T, q_HTK.unbind(1), k_TK, inputs.v_BGTV[0, 0]):
        state_VK = state_VK - beta * (state_VK @ k_K)[:, None] * k_K + beta * v_V[:, None] * k_K
        outs.append(q_HK @ state_VK.mT)
    check("deltanet", 30, torch.stack(outs, 1), setting)


@torch.no_grad()
def test_toeplitz_and_fourier_masks():
    """Dao and Gu 2024, section 4.3: alpha_(i-j) with a parameter per distance; omega^(i j / T), of which ours is the real
    part with T = 4,096 whatever the length."""
    inputs, at_T = random_inputs(50), torch.arange(50)  # omega = e^(2 pi i)
    score_HTT = (inputs.q_BHTK[0] @ inputs.k_BGTK[0].mT * KEY**-0.5).tril()
    alpha_HL = mixer_of("toeplitz-mask").mask.coefficient_GJL[0]
    distance_TT = (at_T[:, None] - at_T).clamp_min(0)
    check("toeplitz-mask", 50, score_HTT * alpha_HL[:, distance_TT] @ inputs.v_BGTV[0])
    for period, setting in ((4096, ()), (50, ("attention.mask.period=50",))):
        mask_TT = (at_T[:, None] * at_T.double() * (2 * math.pi / period)).cos()
        check("fourier-mask", 50, score_HTT * mask_TT @ inputs.v_BGTV[0], *setting)


@torch.no_grad()
@pytest.mark.parametrize("recipe, dilation", [("banded-mask", 1), ("dilated-mask", 4)])
def test_banded_and_dilated_masks(recipe, dilation):
    """Dao and Gu 2024, section 4.1.4, eq. 10: L is 1 on a band of 256 tokens, or on every 4th token of a wider one."""
    inputs, at_T = random_inputs(1100), torch.arange(1100)
    distance_TT = at_T[:, None] - at_T
    mask_TT = (distance_TT >= 0) & (distance_TT < 256 * dilation) & (distance_TT % dilation == 0)
    check(recipe, 1100, inputs.q_BHTK[0] @ inputs.k_BGTK[0].mT * KEY**-0.5 * mask_TT @ inputs.v_BGTV[0])


@torch.no_grad()
def test_block_diagonal_mask():
    """Dao and Gu 2024, section 4.1.4, eq. 10: L is 1 between tokens of one block of 256, here up to the query."""
    inputs, block_T = random_inputs(600), torch.arange(600) // 256
    mask_TT = (block_T[:, None] == block_T).tril()
    expected = inputs.q_BHTK[0] @ inputs.k_BGTK[0].mT * KEY**-0.5 * mask_TT @ inputs.v_BGTV[0]
    check("block-diagonal-mask", 600, expected)


@torch.no_grad()
def test_toeplitz_mask_of_the_input():
    """Dao and Gu 2024, section 4.3: alpha_(i-j) with parameters that depend on the input."""
    inputs, mask = random_inputs(50), mixer_of("input-toeplitz-mask").mask
    alpha_HT = mask.coefficient_GJL[0, :, :50] * mask.factor(inputs.x_BTD)[0].mT
    distance_TT = torch.arange(50)[:, None] - torch.arange(50)
    score_HTT = (inputs.q_BHTK[0] @ inputs.k_BGTK[0].mT * KEY**-0.5).tril()
    expected = score_HTT * alpha_HT[:, distance_TT.clamp_min(0)] @ inputs.v_BGTV[0]
    check("input-toeplitz-mask", 50, expected)


@torch.no_grad()
def test_nested_mlr_attention():
    """Kuang et al. 2025, eq. 9 and section 5.1: ranks 32|8|6|4|4|4|4|2, p_l = 2^(l-1) blocks of T / p_l tokens, T = 1,024."""
    length, ranks, first = 1024, (32, 8, 6, 4, 4, 4, 4, 2), 0
    inputs, at_T = random_inputs(length), torch.arange(length)
    score_HTT = torch.zeros(HEADS, length, length, dtype=torch.float64)
    for level, rank in enumerate(ranks):
        block_T, dims = at_T * 2**level // length, slice(first, first + rank)
        together_TT = block_T[:, None] == block_T
        score_HTT += together_TT * (inputs.q_BHTK[0, :, :, dims] @ inputs.k_BGTK[0, :, :, dims].mT)
        first += rank
    score_HTT = (KEY**-0.5 * score_HTT).masked_fill(at_T > at_T[:, None], -torch.inf)
    assert first == KEY
    check("mlr-nested", length, score_HTT.softmax(-1) @ inputs.v_BGTV[0])


# -- the tables of docs/paper_layers.md and docs/structures.md ------------------------------------------
def table_rows(page: str) -> list[list[str]]:
    text = (DOCS / page).read_text(encoding="utf-8").split("<!-- layers -->")[1].split("<!-- /layers -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.strip().splitlines()]
    assert rows[0] == ["recipe", "paper, section", "exactly?", "differences"]
    return rows[2:]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_each_recipe_has_a_row():
    for page, attention in (("paper_layers.md", True), ("structures.md", False)):
        named = [name for cells in table_rows(page) for name in codes(cells[0]) if " " not in name]
        loaded = {name: load_recipe(name) for name in shipped_recipes()}
        recipes = [
            name for name, r in loaded.items() if ((r.attention or r.native or r.stock) is not None) is attention
        ]
        assert sorted(named) == sorted(recipes)


@pytest.mark.parametrize(
    "cells", table_rows("paper_layers.md") + table_rows("structures.md"), ids=lambda cells: cells[0]
)
def test_a_row_is_what_the_recipe_says(cells):
    """Overrides of a row are valid, and what is a paper's layer has no softmax window beside it."""
    answer = cells[2].partition(",")[0]
    assert answer in ("yes", "no")
    settings = [text.replace("=T", "=512") for text in codes(cells[3]) if "=" in text and " " not in text.split("=")[0]]
    for command in codes(cells[0]):
        name, *words = shlex.split(command)
        overrides = words[1::2]
        assert words[::2] == ["--set"] * len(overrides)
        if load_recipe(name, [*overrides, *settings]).attention is not None:
            assert mixer_of(name, *overrides, *settings)
            assert answer == "no" or not getattr(mixer_of(name, *overrides).config, "window", 0)
