"""MLBTC matrices: sizes, descent over levels, exchange of rank at unequal costs, and conversion."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from helpers.small import tiny_inputs
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.conversion.estimation.counting import OperationCounter
from surgery.conversion.quantize_checkpoint import quantize
from surgery.core.errors import SurgeryError
from surgery.modeling.modules import build_module
from surgery.planning.plan import make_plan
from surgery.planning.recipe import load_recipe
from surgery.structures import STRUCTURES, Metric, add_damping
from surgery.structures.base import config_from_dict
from surgery.structures.btt import BTT
from surgery.structures.low_rank import LowRank
from surgery.structures.mlbtc import MLBTC, MLBTCLinear, spread_cost
from surgery.structures.mlbtc_fit import LevelDescent
from surgery.structures.mlr import MLR
from surgery.structures.mlr_fit import best_fit, expected_sweeps, total_cost
from surgery.training.weight_norm import add_core_norms, fold_core_norms


def metric_of(out, in_, diagonal=False):
    mix, gram = torch.randn(in_, in_, dtype=torch.float64), torch.randn(out, out, dtype=torch.float64)
    gram = add_damping(gram @ gram.mT / out, 0.05)
    return Metric(add_damping(mix @ mix.mT / in_, 0.01), gram.diagonal().clone() if diagonal else gram)


def random_linear(config, out, in_):
    linear = MLBTCLinear(in_, out, config, bias=False).double().requires_grad_(False)
    for core in linear.parameters():
        core.normal_()
    return linear


# -- sizes -----------------------------------------------------------------------------------------------
@given(
    budget=st.integers(0, 9000),
    levels=st.lists(st.tuples(st.integers(1, 700), st.integers(1, 12)), min_size=1, max_size=5),
)
def test_a_larger_budget_never_spreads_to_less(budget, levels):
    costs, limits = zip(*levels)
    ranks, more = (spread_cost(size, costs, limits) for size in (budget, budget + 1))
    assert all(0 <= rank <= limit for rank, limit in zip(ranks, limits))
    assert total_cost(ranks, costs) <= max(budget, min(costs))
    assert total_cost(ranks, costs) <= total_cost(more, costs)


def test_the_spread_of_equal_costs_is_even():
    assert spread_cost(8 * 100, (100, 100, 100), (32, 16, 8)) == (4, 2, 2)
    assert spread_cost(60 * 100, (100, 100, 100), (32, 16, 8)) == (32, 16, 8)


@pytest.mark.parametrize("keep", [0.3, 0.5, 0.75])
@pytest.mark.parametrize("levels", [None, (1, 2, 4, "monarch"), (3, (2, 5), "sqrt")])
def test_what_is_kept_is_what_is_stored(levels, keep):
    out, in_ = 48, 70
    config = MLBTCLinear.fit(MLBTC(levels), out, in_, keep * out * in_)
    linear = MLBTCLinear.project(torch.randn(out, in_), config, Metric())
    stored = sum(core.numel() for core in linear.parameters())
    assert stored == linear.cost().params == linear.cost().macs == MLBTCLinear.params(linear.config, out, in_)
    assert stored <= MLBTCLinear.params(config, out, in_) <= keep * out * in_
    again = config_from_dict(json.loads(json.dumps(linear.config.to_dict())))
    assert again == linear.config and MLBTCLinear.resolve(again, out, in_) == again


def test_words_are_grids():
    levels = MLBTCLinear.resolve(MLBTC(levels=("sqrt", "monarch", 2)), 64, 256).levels
    assert levels == ((8, 16), (8, 16, 1), 2)
    linear = MLBTCLinear.project(torch.randn(64, 256), MLBTC(levels=(1, "monarch"), rank=30))
    assert linear.config.levels == (1, (8, 16, 1)) and linear.config.ranks[1] <= 1


@pytest.mark.parametrize(
    "config, says",
    [
        (MLBTC(levels=(1, 11)), "a level of 11 blocks would have an empty block"),
        (MLBTC(levels=(1, (4, 40))), "40 blocks along in; use 1 to 12"),
        (MLBTC(levels=(1, (4, 4, 0))), "largest rank of the grid \\[4, 4\\] must be 1 or more"),
        (MLBTC(levels=(2, "monarch")), "no combination of ranks holds every matrix"),
        (MLBTC(levels=()), "levels must be 1 to 32 entries"),
        (MLBTC(levels=(1, 2), ranks=(1, 6)), "ranks must be 2 numbers from 0 to \\[10, 5\\]"),
        (MLBTC(levels=(1, 2), ranks=(0, 0)), "from 1 to 10"),
        (MLBTC(levels=(1, 2), ranks=(3, 1), rank=5), "a rank of 4. The rank must be that or left out \\(got 5\\)"),
        (MLBTC(levels=(1, 2), ranks=(9, 4)), "a rank of 13"),
    ],
)
def test_refusals(config, says):
    with pytest.raises(SurgeryError, match=says):
        MLBTCLinear.fit(config, 10, 12, budget=100)


@pytest.mark.parametrize(
    "entry",
    [
        {"levels": [1, "sqrt"], "ranks": [1, 1]},
        {"levels": [1, [4, 4]], "ranks": [1, 99]},
        {"levels": [1, [4, 4]], "ranks": [1]},
        {"levels": [1, [4, 4, 4, 4]], "ranks": [1, 1]},
        {"levels": [1, [[4, 4]]], "ranks": [1, 1]},
        {"levels": [1, True], "ranks": [1, 1]},
        {"levels": [1, [10**12, 4]], "ranks": [1, 1]},
        {"levels": [1] * 99, "ranks": [1] * 99},
        {"levels": [1, 2], "rank": 10**9},
    ],
)
def test_a_damaged_table_is_refused(entry):
    table = {"structure": "mlbtc", "rank": 5, "in_features": 32, "out_features": 32, "bias": False, **entry}
    with pytest.raises(SurgeryError):
        build_module(table, device="meta", dtype=torch.float32)


# -- fit -------------------------------------------------------------------------------------------------
def test_one_level_is_its_structure():
    weight, metric = torch.randn(20, 30, dtype=torch.float64), metric_of(20, 30, diagonal=True)
    for level, config in ((1, LowRank(rank=4)), ((4, 5), BTT(blocks=(4, 5), rank=2))):
        found = MLBTCLinear.project(weight, MLBTC(levels=(level,), ranks=(config.rank,)), metric)
        expected = STRUCTURES[config].project(weight, config, metric)
        assert torch.allclose(found.dense(), expected.dense(), atol=1e-10)
        errors = [linear.sweep(weight, metric) for linear in (found, expected)]
        assert errors == [None, None] if level == 1 else errors[0] == pytest.approx(errors[1], rel=1e-5)


def test_levels_of_mlr_are_fitted_as_mlr():
    weight, metric, ranks = torch.randn(24, 40, dtype=torch.float64), metric_of(24, 40), (2, 1, 3)
    found = MLBTCLinear.project(weight, MLBTC(levels=(1, 2, 4), ranks=ranks), metric)
    expected = STRUCTURES[MLR].project(weight, MLR(levels=3, ranks=ranks), metric)
    assert torch.allclose(found.dense(), expected.dense(), atol=1e-8)


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("order", ["contiguous", "strided"])
def test_every_step_lowers_the_error_in_the_metric(order, diagonal):
    weight, metric = torch.randn(36, 40, dtype=torch.float64), metric_of(36, 40, diagonal)
    config = MLBTC(levels=(1, (4, 5), 3), ranks=(3, 2, 2), order=order)
    descent = LevelDescent(weight, metric, MLBTCLinear.levels(config, 36, 40))
    descent.sweep(config.ranks)
    before = start = descent.error()
    for _ in range(5):
        for level, rank in enumerate(config.ranks):
            descent.fit_level(level, rank)
            assert descent.error() <= before * (1 + 1e-9)
            before = descent.error()
    assert before < 0.97 * start
    linear = MLBTCLinear.project(weight, config, metric)
    for _ in range(4):
        before, after = metric.squared_norm(weight - linear.dense()), linear.sweep(weight, metric)
        assert after <= before * (1 + 1e-9)
        assert after == pytest.approx(metric.squared_norm(weight - linear.dense()), rel=1e-8)


def test_the_fit_never_loses_to_one_of_its_levels():
    weight, metric = torch.randn(24, 36, dtype=torch.float64), metric_of(24, 36)
    for keep in (0.3, 0.6):
        config = MLBTCLinear.fit(MLBTC(levels=(1, (4, 4))), 24, 36, keep * 24 * 36)
        found = MLBTCLinear.project(weight, config, metric)
        budget = MLBTCLinear.params(config, 24, 36)
        for rival in (LowRank(), BTT(blocks=(4, 4))):
            rival = STRUCTURES[rival].fit(rival, 24, 36, budget)
            alone = STRUCTURES[rival].project(weight, rival, metric)
            assert found.cost().params <= budget
            errors = [metric.squared_norm(weight - linear.dense()) for linear in (found, alone)]
            assert errors[0] <= errors[1] * (1 + 1e-9)


@pytest.mark.parametrize("ranks", [(3, 0), (0, 2), (2, 1)])
def test_ranks_of_a_sum_are_found(ranks):
    """A rank of the grid costs four of low rank, and the fit still finds how a matrix was made."""
    truth = MLBTC(levels=(1, (4, 4)), ranks=ranks)
    weight = random_linear(truth, 32, 32).dense()
    size = MLBTCLinear.resolve(truth, 32, 32).rank
    found = MLBTCLinear.project(weight, MLBTC(levels=(1, (4, 4)), rank=size))
    assert found.config.ranks == ranks
    for _ in range(60):
        found.sweep(weight, Metric())
    assert Metric().relative_error(weight, found.dense()) < 0.03


def test_a_fit_without_values_is_counted_as_all_of_its_sweeps():
    weight, ranks = torch.empty(32, 48, device="meta"), (3, 2)
    levels = MLBTCLinear.levels(MLBTC(levels=(2, (4, 4))), 32, 48)
    with OperationCounter() as one:
        LevelDescent(weight, Metric(), levels).sweep(ranks)
    with OperationCounter() as fit:
        best_fit(lambda: LevelDescent(weight, Metric(), levels), [ranks], (16, 8), (80, 320), exchange=True)
    assert fit.work.roots == pytest.approx(expected_sweeps([ranks], True) * one.work.roots)


# -- models ----------------------------------------------------------------------------------------------
def test_scales_of_levels_are_trained_and_folded():
    """`weight_norm: cores` gives the left core of each level a factor, alpha_l of eq. 8, 1 at first."""
    linear = random_linear(MLBTC(levels=(1, (4, 4)), ranks=(2, 1)), 16, 24).requires_grad_(True)
    model, parts = torch.nn.Sequential(linear), []
    for name in ("left2", "weight"):
        other = random_linear(linear.config, 16, 24)
        other.load_state_dict(linear.state_dict())
        getattr(other, name).zero_()
        parts.append(other.dense())
    add_core_norms(model, {"0.weight", "0.left2"})
    assert torch.allclose(linear.dense(), parts[0] + parts[1])
    with torch.no_grad():
        linear.parametrizations.weight[0].gamma.fill_(0.5)
        linear.parametrizations.left2[0].gamma.fill_(-3.0)
    fold_core_norms(model)
    assert torch.allclose(linear.dense(), 0.5 * parts[0] - 3.0 * parts[1])
    assert set(linear.core_names()) == {name for name, _ in linear.named_parameters()}


def test_auto_takes_it_where_it_is_named(checkpoints):
    model = MetaModel(open_checkpoint(str(checkpoints("llama"))))
    keys = ["structure=auto", "candidates=[low_rank, mlr, mlbtc]", "levels=[1, [2, 2], 2]"]
    targets = make_plan(model, load_recipe("low-rank-btt-half", keys)).replaced_targets()
    assert all([type(c) for c in target.configs] == [LowRank, MLR, MLBTC] for target in targets)
    assert all(target.configs[2].levels == (1, (2, 2), 2) and target.configs[1].levels is None for target in targets)


@pytest.mark.parametrize("given", ["levels=[1, [4]]", "levels=[1, 0]", "levels=[1, monarchs]", "levels=[1, [2, 2, 0]]"])
def test_the_recipe_refuses(given):
    with pytest.raises(SurgeryError, match=r"levels: write a whole number from 1 to 32.*\[1, \[4, 4\]\]"):
        load_recipe("low-rank-btt-half", [given])


def test_levels_of_another_structure_are_refused_in_words(checkpoints):
    with pytest.raises(SurgeryError, match="'mlr': levels: input should be a valid integer"):
        make_plan(MetaModel(open_checkpoint(str(checkpoints("llama")))), load_recipe("mlr-half", ["levels=[1, 2]"]))


@pytest.mark.parametrize("name", ["low-rank-btt-half", "mlr-monarch-half"])
def test_the_recipe_converts_loads_densifies_and_quantizes(checkpoints, tmp_path, name):
    import transformers

    save_file(tiny_inputs("llama", 4), tmp_path / "inputs.safetensors")
    keys = [
        f"calibration={tmp_path / 'inputs.safetensors'}",
        "allocate=uniform",
        "sweeps=1",
        "layers=0:1",
        "tune=false",
    ]
    recipe = load_recipe(name, keys)
    plan = make_plan(MetaModel(open_checkpoint(str(checkpoints("llama")))), recipe)
    report = convert(str(checkpoints("llama")), recipe, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for record, target in zip(report["modules"], plan.replaced_targets(), strict=True):
        own = [tensor for key, tensor in stored.items() if key.startswith(f"{record['name']}.")]
        planned = STRUCTURES[target.preview].params(target.preview, target.out, target.in_)
        assert record["params_after"] == sum(t.numel() for t in own if t.dim() > 1) <= planned <= target.numel // 2
    densify(str(tmp_path / "out"), tmp_path / "dense")
    quantize(str(tmp_path / "out"), tmp_path / "int8", bits=8)
    ids = torch.arange(12)[None]
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind) for kind in ("out", "dense", "int8")]
    logits = [model(ids).logits for model in models]
    assert torch.allclose(logits[0], logits[1], atol=1e-4)
    assert 0 < float((logits[2] - logits[0]).norm() / logits[0].norm()) < 0.05
    models[0].save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[key], tensor) for key, tensor in stored.items())


def test_integers_share_scales_along_what_is_summed():
    config = MLBTC(levels=(1, (4, 4)), ranks=(2, 1))
    linear = random_linear(config, 16, 24)
    assert linear.contracted == {"left2": (1, 2), "right2": (1,)}
    assert replace(linear.config, ranks=None) == MLBTCLinear.resolve(replace(config, ranks=None, rank=6), 16, 24)
