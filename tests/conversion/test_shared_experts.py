"""Fits of experts with one basis for all (recipes/papers/quality/shared_experts.py): optimal where a closed form
exists, never worse otherwise.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from helpers.small_experts import write_experts
from transformers import AutoModelForCausalLM

from recipes.papers.quality import shared_experts as table
from surgery.architectures.experts import split_experts

EXPERTS, OUT, IN = 3, 7, 5


@pytest.fixture
def problem():
    """Weights (O, I) and second moments C_e (I, I) of three experts, in float64, one of them with few rows."""
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(OUT, IN, generator=g, dtype=torch.float64) for _ in range(EXPERTS)]
    rows = [torch.randn(count, IN, generator=g, dtype=torch.float64) for count in (40, 9, 3)]
    return weights, [x.mT @ x + 0.01 * torch.eye(IN, dtype=torch.float64) for x in rows]


@pytest.mark.parametrize("fit", [table.each_low_rank, table.shared_left, table.shared_right])
def test_full_rank_is_exact(fit, problem):
    weights, moments = problem
    fits = fit(weights, moments, IN if fit is not table.shared_left else OUT)
    assert table.squared_error(weights, moments, fits) < 1e-16 * table.squared_error(
        weights, moments, [0 * w for w in weights]
    )


def test_a_shared_left_basis_is_the_best_of_its_rank(problem):
    weights, moments = problem
    best = table.squared_error(weights, moments, table.shared_left(weights, moments, 2))
    for seed in range(5):
        noise = torch.randn(OUT, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        basis = torch.linalg.qr(noise)[0]
        assert best < table.squared_error(weights, moments, [basis @ (basis.mT @ w) for w in weights])


def test_no_sweep_of_a_shared_right_basis_increases_the_error(problem):
    weights, moments = problem
    errors = [
        table.squared_error(weights, moments, table.shared_right(weights, moments, 2, sweeps)) for sweeps in range(6)
    ]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(errors)) and errors[-1] < errors[0]
    own = table.squared_error(weights, moments, table.each_low_rank(weights, moments, 2))
    assert own < errors[-1]


def test_one_metric_for_all_experts_needs_no_sweeps(problem):
    weights, (metric, *_) = problem
    metrics = [metric] * EXPERTS
    start, end = (
        table.squared_error(weights, metrics, table.shared_right(weights, metrics, 2, sweeps)) for sweeps in (0, 8)
    )
    assert end == pytest.approx(start, rel=1e-9)


@pytest.mark.parametrize("keep", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("down", [False, True])
def test_both_kinds_store_at_most_their_share_and_nearly_all_of_it(keep, down):
    shape = (128, 256) if down else (256, 128)
    budget = keep * 8 * 128 * 256
    for kind in ("each", "shared"):
        rank, numbers = table.rank_of(kind, down, 8, shape, keep)
        assert numbers <= budget < numbers * (rank + 1) / rank
    assert table.rank_of("shared", down, 8, shape, keep)[0] > table.rank_of("each", down, 8, shape, keep)[0]


def test_the_moments_of_a_model_count_every_routed_row(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_experts("qwen3_moe", tmp_path / "source")).eval()
    split_experts(model)
    ids = torch.randint(3, 96, (3, 20), generator=torch.Generator().manual_seed(1))
    moments = table.expert_moments(model, ids)
    assert [sum(rows for *_, rows in sums) for sums in moments.values()] == [3 * 20 * 2] * 2
    row = table.replace_experts(model, moments, "shared", 0.5)
    assert row["numbers"] <= 0.5 * 2 * 6 * 3 * 32 * 24
    with torch.no_grad():
        assert bool(model(ids).logits.isfinite().all())
