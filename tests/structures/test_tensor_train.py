"""Tensor trains and block tensor trains: products and projections against sums written from their definition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.small import tiny_inputs
from safetensors.torch import load_file, save_file

from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.core.errors import SurgeryError
from surgery.planning.plan import make_plan
from surgery.planning.recipe import load_recipe
from surgery.structures import STRUCTURES, Metric, add_damping
from surgery.structures.btt import BTT
from surgery.structures.tensor_train import BlockTensorTrain, TensorTrain, near_equal_factors

KINDS = (TensorTrain, BlockTensorTrain)


def random_linear(config, out, in_):
    linear = STRUCTURES[config](in_, out, config, bias=False).double().requires_grad_(False)
    for core in linear.parameters():
        core.normal_()
    return linear


@pytest.mark.parametrize("kind", KINDS)
def test_product_is_the_sum_over_the_ranks(kind, monkeypatch):
    """Factors (2, 3, 4) x (3, 2, 5), ranks 2 and 3: every entry from the sum in the definition."""
    m, n, r = (2, 3, 4), (3, 2, 5), [1, 2, 3, 1]
    cls = STRUCTURES[kind]
    monkeypatch.setattr(cls, "factors", classmethod(lambda *_: (m, n)))
    monkeypatch.setattr(cls, "bond_ranks", classmethod(lambda *_: r))
    linear = random_linear(kind(cores=3, rank=3), 24, 30)
    cores = [linear.weight, linear.core2, linear.core3]
    expected = torch.zeros(24, 30, dtype=torch.float64)
    for row in range(24):
        for column in range(30):
            i = [int(k) for k in torch.unravel_index(torch.tensor(row), m)]
            j = [int(k) for k in torch.unravel_index(torch.tensor(column), n)]
            chain = torch.ones(1, 1, dtype=torch.float64)
            for t, core in enumerate(cores):
                batch = (0, 0)
                if kind is BlockTensorTrain:
                    batch = [0, 0]
                    for k in range(t):
                        batch[0] = batch[0] * n[k] + j[k]
                    for k in range(t + 1, 3):
                        batch[1] = batch[1] * m[k] + i[k]
                chain = chain @ core[batch[0], batch[1], j[t], :, :, i[t]].mT
            expected[row, column] = chain[0, 0]
    assert torch.allclose(linear.dense(), expected, atol=1e-12)
    x = torch.randn(7, 30, dtype=torch.float64)
    for count in (1, 7):  # by the cores, and, where that costs less, by the dense matrix
        assert torch.allclose(linear(x[:count]), x[:count] @ expected.mT, atol=1e-10)
    assert torch.allclose(linear._multiply(linear._cores(), x), x @ expected.mT, atol=1e-10)


@pytest.mark.parametrize("dims", [(24, 30), (64, 64), (37, 53)])
def test_a_block_tensor_train_is_recovered(dims):
    config = BlockTensorTrain(cores=3, rank=2)
    weight = random_linear(config, *dims).dense()
    found = STRUCTURES[config].project(weight, config)
    assert Metric().relative_error(weight, found.dense()) < 1e-7


def test_a_tensor_train_is_recovered():
    config = TensorTrain(cores=3, rank=3)
    weight = random_linear(config, 60, 64).dense()
    assert Metric().relative_error(weight, STRUCTURES[config].project(weight, config).dense()) < 1e-7


@pytest.mark.parametrize("kind", KINDS)
def test_rank_one_holds_any_kronecker_product(kind):
    parts = [torch.randn(m, n, dtype=torch.float64) for m, n in ((3, 4), (4, 4), (4, 4))]
    weight = torch.kron(parts[0], torch.kron(parts[1], parts[2]))
    assert near_equal_factors(48, 3) == (3, 4, 4) and near_equal_factors(64, 3) == (4, 4, 4)
    config = kind(cores=3, rank=1)
    assert Metric().relative_error(weight, STRUCTURES[config].project(weight, config).dense()) < 1e-7


def test_two_cores_are_btt():
    """With m_2 row blocks the rows of BTT are (i_2, i_1), those of two cores (i_1, i_2)."""
    weight = torch.randn(48, 64, dtype=torch.float64)
    config = BlockTensorTrain(cores=2, rank=2)
    (m1, m2), (n1, _) = near_equal_factors(48, 2), near_equal_factors(64, 2)
    turned = weight.view(m1, m2, 64).transpose(0, 1).reshape(48, 64)
    btt = BTT(blocks=(m2, n1), rank=2)
    expected, found = (STRUCTURES[c].project(w, c) for c, w in ((btt, turned), (config, weight)))
    again = expected.dense().view(m2, m1, 64).transpose(0, 1).reshape(48, 64)
    assert torch.allclose(found.dense(), again, atol=1e-10) and found.cost() == expected.cost()


@pytest.mark.parametrize("r", [1, 2, 3])
def test_counts_are_those_of_the_paper(r):
    """d^(1/3) in every dimension: (2 r + r^2) d^(4/3) multiplications, and the numbers of each kind (appendix C)."""
    for kind, power in ((TensorTrain, 2 / 3), (BlockTensorTrain, 4 / 3)):
        config = kind(cores=3, rank=r)
        params, macs = STRUCTURES[config](64, 64, config, bias=False).cost()
        assert macs == round((2 * r + r**2) * 64 ** (4 / 3)) and params == round((2 * r + r**2) * 64**power)
    assert STRUCTURES[BlockTensorTrain].bond_ranks(BlockTensorTrain(cores=3), 64, 64, 99) == [1, 4, 4, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_each_sweep_lowers_the_error_in_the_metric(kind):
    mix, gram = torch.randn(60, 60, dtype=torch.float64), torch.randn(36, 36, dtype=torch.float64)
    metric = Metric(add_damping(mix @ mix.mT / 60, 0.01), add_damping(gram @ gram.mT / 36, 0.05))
    weight, config = torch.randn(36, 60, dtype=torch.float64), kind(rank=2)
    linear = STRUCTURES[config].project(weight, config, metric)
    before = start = metric.squared_norm(weight - linear.dense().detach())
    for _ in range(4):
        error = linear.sweep(weight, metric)
        assert error <= before * (1 + 1e-12)
        before = error
    assert error < 0.98 * start


@pytest.mark.parametrize("n", [1, 5, 7, 24, 37, 121, 256, 688])
def test_factors_are_near_equal_and_cover(n):
    for count in (2, 3, 4):
        assert n <= math.prod(near_equal_factors(n, count)) <= max(n + 2, 1.5 * n)
        assert math.prod(near_equal_factors(n, count, padded=False)) == n


@pytest.mark.parametrize("cores", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_refusals(kind, cores):
    with pytest.raises(SurgeryError, match=f"{cores} cores; use 2 to 3"):
        STRUCTURES[kind].fit(kind(cores=cores), 10, 12, budget=100)


@pytest.mark.parametrize("name", ["tensor-train-half", "btt-3-cores"])
def test_the_recipe_plans_converts_loads_and_densifies(checkpoints, tmp_path, name):
    import transformers

    save_file(tiny_inputs("llama", 4), tmp_path / "inputs.safetensors")
    recipe = load_recipe(
        name, [f"calibration={tmp_path / 'inputs.safetensors'}", "allocate=uniform", "sweeps=1", "tune=false"]
    )
    plan = make_plan(MetaModel(open_checkpoint(str(checkpoints("llama")))), recipe)
    report = convert(str(checkpoints("llama")), recipe, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for record, target in zip(report["modules"], plan.replaced_targets(), strict=True):
        own = [tensor for key, tensor in stored.items() if key.startswith(f"{record['name']}.")]
        planned = STRUCTURES[target.preview].params(target.preview, target.out, target.in_)
        assert record["params_after"] == planned == sum(t.numel() for t in own if t.dim() > 1)
    densify(tmp_path / "out", tmp_path / "dense")
    ids = torch.arange(12)[None]
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind) for kind in ("out", "dense")]
    assert torch.allclose(*(model(ids).logits for model in models), atol=1e-4)
    models[0].save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[key], tensor) for key, tensor in stored.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_of_a_higher_rank_than_full_stores_no_more(kind):
    cls, full = STRUCTURES[kind], STRUCTURES[kind].full_rank(kind(cores=3), 24, 30)
    assert cls.params(replace(kind(cores=3), rank=full + 5), 24, 30) == cls.params(kind(cores=3, rank=full), 24, 30)
