"""Candidates for `auto` at equal bytes (recipes/papers/quality/candidates.py): sizes, fits of matrices that they
represent, the script.
"""

from __future__ import annotations

import importlib.resources
import json
import shutil
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.papers.quality import candidates as table
from surgery.structures import STRUCTURES, Metric
from surgery.structures.pivoted_low_rank import PivotedLowRank

EMBEDDED = importlib.resources.files("surgery.recipes.tiny.checkpoint")
SHAPES = ((32, 48), (48, 32))


def make_problem(weight_OI: torch.Tensor, seed: int = 0) -> table.Problem:
    """A problem whose inputs are correlated."""
    g = torch.Generator().manual_seed(seed)
    in_ = weight_OI.shape[1]
    x_NI = torch.randn(400, in_, generator=g, dtype=torch.float64) @ torch.randn(
        in_, in_, generator=g, dtype=torch.float64
    )
    moment_II = x_NI.mT @ x_NI / len(x_NI)
    g_O = torch.ones(len(weight_OI), dtype=torch.float64)
    return table.Problem("layers.0.linear", 0, "query", weight_OI, Metric(moment_II), moment_II, g_O)


def random_matrix(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- bytes -------------------------------------------------------------------------------------------------------
def test_bytes_by_hand():
    assert table.low_rank_size((8, 6), 2) == 2 * 2 * 14
    assert table.pivoted_size((8, 6), 2) == 2 * 2 * 12 + 4 * 8
    assert table.sparse_size((16, 640), 10) == 2 * 10 + 2 * 10 + 4 * 17  # columns and row starts
    assert table.sparse_size((16, 640), 4000) == 2 * 4000 + 16 * 640 // 8  # a bitmap
    assert table.pattern_size((8, 8), (2, 4)) == 16 * (2 * 2 + 4 / 8)
    assert table.pattern_size((8, 8), (3, 8)) == 8 * (2 * 3 + 8 / 8)
    assert table.pivoted_size((8, 6), 0) == table.sparse_size((8, 6), 0) == 0


def test_bytes_of_pivoted_low_rank_are_those_of_the_structure():
    linear = STRUCTURES[PivotedLowRank].project(random_matrix(12, 10), PivotedLowRank(4))
    stored = {name: getattr(linear, name) for name in linear.core_names()}
    values = sum(core.numel() for core in stored.values() if core.is_floating_point())
    indices = sum(core.nbytes for core in stored.values() if not core.is_floating_point())
    assert table.pivoted_size((12, 10), 4) == 2 * values + indices


@pytest.mark.parametrize("keep", [0.5, 0.75])
@pytest.mark.parametrize("family", [*table.FAMILIES, *table.GROUP_FAMILIES])
def test_every_fit_stores_at_most_its_share_and_most_of_it(family, keep):
    for shape in SHAPES:
        group = [make_problem(random_matrix(*shape, seed=seed)) for seed in (1, 2)]
        budget = sum(keep * table.dense_size(problem.shape) for problem in group)
        variants = list(zip(*table.fit_group(group, keep, family), strict=True))
        assert variants
        for fits in variants:
            size = sum(fit.size for fit in fits)
            # Ranks of grids on so small a matrix are coarse.
            assert size <= budget and (size > 0.5 * budget if "btt" in family else size > 0.85 * budget)
            assert all(fit.dense_OI.shape == shape for fit in fits)


def test_single_elements_are_as_many_as_are_counted():
    problem = make_problem(random_matrix(32, 48))
    (fit,) = table.FAMILIES["sparse"](problem, 0.5 * table.dense_size(problem.shape))
    assert fit.size == table.sparse_size(problem.shape, int(fit.dense_OI.count_nonzero()))
    mask = table.largest_of_pattern(problem.weight_OI.abs(), (3, 8))
    assert bool((mask.unflatten(-1, (-1, 8)).sum(-1) == 3).all())


# -- fits --------------------------------------------------------------------------------------------------------
def exact_matrix(family: str) -> torch.Tensor:
    """A matrix (32, 48) that a family represents within half of the bytes."""
    dense_OI = random_matrix(32, 48)
    if family == "sparse":
        return dense_OI * table.largest_elements(random_matrix(32, 48, seed=2), 500)
    if family == "pivoted + pattern":
        return dense_OI * table.largest_of_pattern(random_matrix(32, 48, seed=2), (3, 8))
    if family == "btt, clustered":
        return random_matrix(32, 2) @ random_matrix(2, 48, seed=2)
    return random_matrix(32, 4) @ random_matrix(4, 48, seed=2)


@pytest.mark.parametrize("family", [*table.FAMILIES, *table.GROUP_FAMILIES])
def test_a_matrix_that_a_family_represents_is_found(family):
    problem = make_problem(exact_matrix(family))
    fits = (
        [fit for (fit,) in table.fit_group([problem] * 2, 0.5, family)]
        if "," in family and "btt" not in family
        else None
    )
    if fits is None:
        fits = list(table.FAMILIES[family](problem, 0.5 * table.dense_size(problem.shape)))
    assert min(problem.evaluate(fit.dense_OI)[0] for fit in fits) < 1e-3


def test_low_rank_and_single_elements_are_told_apart():
    spikes = 40 * table.largest_elements(random_matrix(48, 64, seed=3), 20)
    weight_OI = random_matrix(48, 3) @ random_matrix(3, 64, seed=2) + spikes
    fit = table.low_rank_and_elements(weight_OI, 3, partial(table.largest_elements, count=20), Metric(), 20)
    assert float((fit - weight_OI).norm() / weight_OI.norm()) < 1e-3


def test_values_of_single_elements_are_least_squares():
    problem = make_problem(random_matrix(6, 8))
    mask_OI = table.largest_elements(random_matrix(6, 8, seed=2), 20)
    found_OI = table.solve_elements(problem.weight_OI, mask_OI, mask_OI * 0, problem.metric, steps=40)
    c_II = problem.metric.c_II
    for found, mask, row in zip(found_OI, mask_OI.bool(), problem.weight_OI):
        wanted = torch.linalg.solve(c_II[mask][:, mask], (c_II @ row)[mask])
        torch.testing.assert_close(found[mask], wanted)
        assert not found[~mask].any()


def test_correlated_channels_share_a_block():
    x_NX = random_matrix(500, 4).repeat_interleave(6, dim=1) + 0.3 * random_matrix(500, 24, seed=2)
    shuffle = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    order = table.cluster_order((x_NX.mT @ x_NX)[shuffle][:, shuffle], 4)
    assert order.sort().values.tolist() == list(range(24))
    assert all(len(set((block // 6).tolist())) == 1 for block in shuffle[order].split(6))


def test_ranks_go_where_they_lower_the_error_most():
    tails = [torch.tensor([9.0, 4, 1, 0]), torch.tensor([0.9, 0.4, 0.1, 0])]
    sizes = [torch.arange(4.0)] * 2
    assert table.allocate_ranks(tails, sizes, 4) == [3, 1]
    assert table.allocate_ranks(tails, sizes, 100) == [3, 3]


@pytest.mark.parametrize("shared", [False, True])
def test_a_budget_over_the_whole_model_is_kept_and_goes_where_it_lowers_the_error_most(shared):
    def make_group(name, scale, shapes):
        matrices = [scale * random_matrix(*shape, seed=seed) for seed, shape in enumerate(shapes)]
        return [replace(make_problem(weight), path=f"{name}.{k}") for k, weight in enumerate(matrices)]

    # Errors of the first group are a million times those of the second, and "down" has rank 4.
    groups = [make_group(name, scale, [(32, 48), (16, 48)]) for name, scale in (("first", 1.0), ("second", 1e-3))]
    groups.append([replace(make_problem(exact_matrix("pivoted")), path="down")])
    fits = table.fit_spread(groups, 0.5, shared)
    problems = {problem.path: problem for group in groups for problem in group}
    dense = {path: table.dense_size(problem.shape) for path, problem in problems.items()}
    assert set(fits) == set(problems)
    assert 0.4 * sum(dense.values()) < sum(fit.size for fit in fits.values()) <= 0.5 * sum(dense.values())
    for path in ("first.0", "first.1"):
        assert fits[path].size == dense[path] and torch.equal(fits[path].dense_OI, problems[path].weight_OI)
    assert fits["down"].size == table.pivoted_size((32, 48), 4)
    assert problems["down"].evaluate(fits["down"].dense_OI)[0] < 1e-3
    # What is counted is what the ranks of the fits store.
    second = groups[1] if shared else groups[1][:1]
    rank = int(torch.linalg.matrix_rank(torch.cat([fits[problem.path].dense_OI for problem in second]), rtol=1e-6))
    outputs = sum(len(problem.weight_OI) for problem in second)
    assert sum(fits[problem.path].size for problem in second) == pytest.approx(table.pivoted_size((outputs, 48), rank))


# -- the script --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The first layer of the embedded checkpoint."""
    folder = tmp_path_factory.mktemp("source") / "SRC"
    shutil.copytree(str(EMBEDDED), folder, ignore=shutil.ignore_patterns("*.py", "*.txt", "__pycache__"))
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    kept = {k: v for k, v in weights.items() if "layers." not in k or ".layers.0." in k}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return folder


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["candidates", *map(str, arguments)])
    table.main()


def test_the_script_writes_rows_and_tables(source, tmp_path, monkeypatch, capsys):
    texts = ("--calibration", str(EMBEDDED / "calibration.txt"), "--text", str(EMBEDDED / "heldout.txt"))
    size = ("--tokens", 512, "--length", 64, "--fisher", 1, "--json", tmp_path / "rows.json")
    families = ("--family", "low rank", "--family", "low rank, shared", "--family", "pivoted, shared, spread")
    run(monkeypatch, source, *texts, *size, *families, "--swap", "pivoted", "--swap", "low rank")
    found = json.loads((tmp_path / "rows.json").read_text())
    assert len(found["matrices"]) == 4 * 7
    spread = [row for row in found["matrices"] if "spread" in row["family"]]
    assert sum(row["size"] for row in spread) <= 0.5 * sum(2 * row["numel"] for row in spread)
    assert {row["role"] for row in found["matrices"]} == set(table.ROLES)
    assert all(row["size"] <= 0.5 * 2 * row["numel"] * 1.01 or "shared" in row["family"] for row in found["matrices"])
    by_family = {
        family: {row["role"]: row["error"] for row in found["matrices"] if row["family"] == family}
        for family in ("low rank", "pivoted", "low rank, shared")
    }
    assert all(by_family["pivoted"][role] < by_family["low rank"][role] for role in table.ROLES)
    assert by_family["low rank, shared"]["down"] == by_family["low rank"]["down"]  # nothing to share
    pivoted, low_rank = found["models"]
    assert pivoted["to_first"]["ratio"] == 1 and 0 < pivoted["perplexity"] < 2000 and low_rank["family"] == "low rank"
    out = capsys.readouterr().out
    assert "| low rank, shared |" in out and "| 50% | pivoted |" in out


def test_swaps_without_all_layers_are_refused(source, monkeypatch):
    texts = ("--calibration", str(EMBEDDED / "calibration.txt"), "--text", str(EMBEDDED / "heldout.txt"))
    with pytest.raises(SystemExit):
        run(monkeypatch, source, *texts, "--swap", "pivoted", "--layer", 0)
