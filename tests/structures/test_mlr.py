"""MLR matrices: product, descent and exchange of rank, against formulas written from the definition."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from helpers.small import tiny_inputs
from safetensors.torch import load_file, save_file

from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.conversion.estimation.counting import OperationCounter
from surgery.core.errors import SurgeryError
from surgery.planning.plan import make_plan
from surgery.planning.recipe import load_recipe
from surgery.structures import STRUCTURES, Metric, add_damping
from surgery.structures.low_rank import LowRank
from surgery.structures.mlr import MLR, MLRLinear, rank_limits, spread_evenly
from surgery.structures.mlr_fit import Descent, best_descent, exchange_ranks, expected_sweeps


def random_levels(out, in_, ranks):
    """Return sum over levels of block-diagonal low rank, written from the definition (even blocks, float64)."""
    return sum(
        torch.block_diag(
            *[
                torch.randn(out // 2**level, r, dtype=torch.float64)
                @ torch.randn(r, in_ // 2**level, dtype=torch.float64)
                for _ in range(2**level)
            ]
        )
        for level, r in enumerate(ranks)
    )


COUNTS = [1, 2, 4]
STEPS = [(level, k) for level in range(3) for k in range(2**level)]


def metric_of(out, in_):
    mix, gram = torch.randn(in_, in_, dtype=torch.float64), torch.randn(out, out, dtype=torch.float64)
    return Metric(add_damping(mix @ mix.mT / in_, 0.01), add_damping(gram @ gram.mT / out, 0.05))


@pytest.mark.parametrize("out, in_, ranks", [(24, 32, (2, 1, 3)), (37, 53, (3, 0, 2, 1)), (11, 121, (1, 2))])
def test_product_is_the_sum_over_levels(out, in_, ranks):
    linear = MLRLinear(in_, out, MLR(levels=len(ranks), ranks=ranks, rank=sum(ranks)), bias=False).double()
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    expected, start = torch.zeros(out, in_, dtype=torch.float64), 0
    for level, r in enumerate(ranks):
        o, i = -(-out // 2**level), -(-in_ // 2**level)
        for row, column in itertools.product(range(out), range(in_)):
            if r and row // o == column // i:
                right = getattr(linear, f"right{level + 1}")
                expected[row, column] += linear.weight[0, row, start : start + r].detach() @ right[:, column].detach()
        start += r
    x = torch.randn(3, in_, dtype=torch.float64)
    assert torch.allclose(linear(x), x @ expected.mT, atol=1e-12)
    assert torch.allclose(linear.dense(), expected, atol=1e-12)
    assert linear.cost() == (sum(ranks) * (out + in_),) * 2


def test_one_level_is_low_rank():
    weight, metric = torch.randn(20, 30, dtype=torch.float64), metric_of(20, 30)
    found = MLRLinear.project(weight, MLR(levels=1, rank=4), metric)
    expected = STRUCTURES[LowRank].project(weight, LowRank(rank=4), metric)
    assert torch.allclose(found.dense(), expected.dense(), atol=1e-10)


def test_a_last_level_of_single_numbers_adds_a_diagonal():
    weight = random_levels(8, 8, (2,)) + torch.diag(torch.randn(8, dtype=torch.float64))
    linear = MLRLinear.project(weight, MLR(levels=4, ranks=(0, 0, 0, 1)))
    assert torch.allclose(linear.dense(), torch.diag(weight.diagonal()), atol=1e-12)


@pytest.mark.parametrize("dims", [(32, 48), (37, 23)])
def test_every_block_step_lowers_the_error_in_the_metric(dims):
    weight, metric = torch.randn(*dims, dtype=torch.float64), metric_of(*dims)
    descent, ranks = Descent(weight, metric, COUNTS), (3, 2, 2)
    before = descent.error()
    for _ in range(3):
        for level, k in STEPS:
            descent.fit_block(level, k, ranks[level])
            now = descent.error()
            assert now <= before * (1 + 1e-10)
            before = now


def test_left_factors_are_solved_jointly_where_g_is_diagonal():
    weight, metric = torch.randn(37, 23, dtype=torch.float64), metric_of(37, 23)
    metric = Metric(metric.c_II, metric.g_OO.diagonal().clone())
    descent = Descent(weight, metric, COUNTS)
    for _ in range(3):
        descent.sweep((3, 2, 2))
        before = descent.error()
        descent.solve_left()
        assert descent.error() < before
    gradient_OI = descent.gap_c_OI
    for level, k in STEPS:
        o, i = descent.block_shape(level)
        gradient = gradient_OI[k * o : (k + 1) * o, k * i : (k + 1) * i]
        right = descent.factors[level].right[k, :, : gradient.shape[1]]
        assert float((gradient @ right.mT).norm()) < 1e-3 * float((weight @ metric.c_II).norm())


def test_a_block_step_is_the_minimum_over_that_block():
    """200 random changes of the factors of one block do not lower the error; the cross terms of C and G are in it."""
    weight, metric = torch.randn(16, 24, dtype=torch.float64), metric_of(16, 24)
    descent = Descent(weight, metric, [1, 2])
    descent.sweep((2, 1))
    descent.fit_block(1, 0, 1)
    best, blocks = metric.squared_norm(descent.gap_OI), descent.factors[1]
    assert best == pytest.approx(descent.error())
    for trial in range(200):
        size = 10.0 ** -(trial % 5)
        left, right = (m[0] + size * torch.randn_like(m[0]) for m in (blocks.left, blocks.right))
        gap_OI = descent.gap_OI.clone()
        gap_OI[:8, :12] += blocks.left[0] @ blocks.right[0] - left @ right
        assert metric.squared_norm(gap_OI) >= best * (1 - 1e-12)


@pytest.mark.parametrize("dims", [(32, 48), (37, 23)])
def test_blocks_of_a_level_are_fitted_together_only_where_that_lowers_the_error(dims):
    """The predicted change of the error is the change, and a level whose blocks interfere is fitted block by block."""
    weight, (out, in_) = torch.randn(*dims, dtype=torch.float64), dims
    metric = metric_of(out, in_)
    descent = Descent(weight, metric, COUNTS)
    descent.sweep((3, 0, 0))
    target = descent.whitened_target(2)
    new = descent.best_blocks(2, 2, target)
    before, predicted = descent.error(), descent.error_change(2, target, new)
    together = descent.copy()
    together.place(2, slice(None), new)
    assert together.error() == pytest.approx(before + predicted, rel=1e-9)
    # One direction of inputs and of outputs has nearly all the weight: each of the four blocks alone would remove its
    # error, and all four together overshoot.
    ones = [torch.full((n, n), 100.0, dtype=torch.float64) + torch.eye(n, dtype=torch.float64) for n in (in_, out)]
    shared = Descent(torch.ones(*dims, dtype=torch.float64), Metric(*ones), COUNTS)
    target = shared.whitened_target(2)
    assert shared.error_change(2, target, shared.best_blocks(2, 1, target)) > 0
    before = shared.error()
    for rank in (1, 2, 1):
        shared.fit_level(2, rank)
        assert shared.error() <= before * (1 + 1e-9) or rank < shared.ranks[2]
        assert shared.factors[2].left.shape[2] == rank
        assert shared.error() == pytest.approx(shared.metric.squared_norm(shared.gap_OI), rel=1e-6)
        before, shared.ranks[2] = shared.error(), rank


def test_large_blocks_start_from_their_old_factors():
    """Above `WARM_SIZE` a step iterates from the old factors; the error falls and ends where exact steps end."""
    weight = torch.randn(144, 160, dtype=torch.float64) @ torch.diag(0.97 ** torch.arange(160, dtype=torch.float64))
    metric = metric_of(144, 160)
    descent = Descent(weight, metric, [1, 2])
    descent.sweep((10, 3))
    exact, errors = descent.copy(), [descent.error()]
    for _ in range(12):
        descent.sweep((10, 3))
        errors.append(descent.error())
        exact.factors = dict(exact.factors)
        for level, rank in enumerate((10, 3)):
            target = exact.whitened_target(level)
            exact.place(level, slice(None), Descent(weight, metric, [1, 2]).best_blocks(level, rank, target))
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(errors))
    assert errors[-1] < 1.002 * exact.error()


@pytest.mark.parametrize("seed", range(2))
def test_ranks_are_recovered_from_an_even_spread(seed):
    torch.manual_seed(seed)
    weight, limits = random_levels(32, 32, (2, 1, 0, 3)), rank_limits(4, 32, 32)
    descent = Descent(weight, Metric(), [1, 2, 4, 8])
    for _ in range(3):
        descent.sweep(spread_evenly(6, limits))
    descent = exchange_ranks(descent, limits)
    assert tuple(descent.ranks) == (2, 1, 0, 3)
    for _ in range(100):
        descent.sweep(descent.ranks)
    assert descent.error() < 1e-6 * float(weight.square().sum())


def test_never_worse_than_low_rank():
    weight, metric = random_levels(24, 36, (2, 2, 2)), metric_of(24, 36)
    for rank in (3, 7):
        mlr = MLRLinear.project(weight, MLR(rank=rank), metric)
        low = STRUCTURES[LowRank].project(weight, LowRank(rank=rank), metric)
        assert mlr.cost() == low.cost()
        assert metric.squared_norm(weight - mlr.dense()) <= metric.squared_norm(weight - low.dense()) * (1 + 1e-9)


@pytest.mark.parametrize(
    "config, says",
    [
        (MLR(levels=9, rank=2), "9 levels; use 1 to 3"),
        (MLR(levels=2, ranks=(1, 2, 3)), r"ranks must be 2 numbers from 0 to \[10, 5\]"),
        (MLR(ranks=(1, 7)), r"ranks must be 2 numbers from 0 to \[10, 5\]"),
        (MLR(ranks=(1, 2), rank=5), "the sum of ranks is 3; it must be the rank, and 1 to 10"),
    ],
)
def test_refusals(config, says):
    with pytest.raises(SurgeryError, match=says):
        MLRLinear.fit(config, 10, 12, budget=200)


def test_given_ranks_take_no_part_in_the_allocation(checkpoints):
    model = MetaModel(open_checkpoint(str(checkpoints("llama"))))
    plan = make_plan(model, load_recipe("mlr-half", ["ranks=[4, 2, 1]", "levels=3", "keep=1.0"]))
    assert all(target.has_fixed_rank and target.preview.ranks == (4, 2, 1) for target in plan.replaced_targets())


def test_a_fit_without_values_is_counted_as_all_of_its_sweeps():
    """One sweep on the meta device stands for the number of sweeps that a fit is expected to take."""
    weight, limits, ranks = torch.empty(32, 48, device="meta"), rank_limits(3, 32, 48), (3, 2, 1)
    with OperationCounter() as one:
        Descent(weight, Metric(), COUNTS).sweep(ranks)
    with OperationCounter() as fit:
        best_descent(weight, Metric(), [ranks], limits, exchange=True)
    assert fit.work.roots == pytest.approx(expected_sweeps([ranks], True) * one.work.roots)
    assert one.work.roots == sum(2**level * (32 / 2**level) ** 3 for level in range(3))


@pytest.mark.parametrize(
    "setting, says",
    [("levels=0", "write a whole number from 1 to 32"), ("ranks=[1, -2]", "write one whole number for each level")],
)
def test_recipe_refuses(setting, says):
    with pytest.raises(SurgeryError, match=says):
        load_recipe("mlr-half", [setting])


ONE_FREE = (
    "rules=[{match: 'attention.*', structure: dense}, {match: 'mlp.*', structure: dense}, {match: mlp.down, structure: "
    "mlr}]"
)


@pytest.mark.parametrize("given", [["layers=0:1", ONE_FREE], ["ranks=[4, 2, 1]", "levels=3"]])
def test_the_recipe_converts_loads_and_densifies(checkpoints, tmp_path, given):
    import transformers

    save_file(tiny_inputs("llama", 4), tmp_path / "inputs.safetensors")
    keys = [*given, f"calibration={tmp_path / 'inputs.safetensors'}", "allocate=uniform", "tune=false"]
    recipe = load_recipe("mlr-half", keys)
    report = convert(str(checkpoints("llama")), recipe, tmp_path / "out")
    assert all(record["structure"]["structure"] == "mlr" for record in report["modules"])
    table = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["modules"]
    for spec in table.values():
        assert spec["rank"] == sum(spec["ranks"]) and (spec["ranks"] == [4, 2, 1] or given[0] == "layers=0:1")
    densify(tmp_path / "out", tmp_path / "dense")
    ids = torch.arange(12)[None]
    answers = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)(ids).logits for name in ("out", "dense")
    ]
    assert torch.allclose(*answers, atol=1e-4)
    assert any("right1" in name for name in load_file(tmp_path / "out" / "model.safetensors"))
