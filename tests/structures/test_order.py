"""BTT and Monarch in strided order: the same matrices as in contiguous order, with the rows permuted."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.linear_times import bench_result
from helpers.small import make_recipe, tiny_config, tiny_inputs
from safetensors.torch import save_file

from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.conversion.preflight import journal_fingerprint
from surgery.core.errors import SurgeryError
from surgery.modeling.modules import build_module
from surgery.planning.measured_times import PHASES, MeasuredTimes, tuning_tables
from surgery.planning.recipe import validate_recipe
from surgery.publish.summary import describe_structure
from surgery.structures import STRUCTURES, Metric, add_damping
from surgery.structures.base import config_from_dict
from surgery.structures.btt import BTT
from surgery.structures.monarch import Monarch
from surgery.vllm.packed_linear import Shard, slice_spec


def strided_rows(b: int, a: int) -> torch.Tensor:
    """Return the row of the matrix that row k of the blocks, one after another, is in strided order."""
    return torch.arange(b * a).view(a, b).T.flatten()


def random_metric(out: int, in_: int, how: str) -> Metric:
    """Return a metric of float64: plain, inputs, both or diagonal."""
    mix_II, gram_OO = torch.randn(in_, in_).double(), torch.randn(out, out).double()
    moment_II = None if how == "plain" else add_damping(mix_II @ mix_II.T / in_, 0.01)
    full_OO = add_damping(gram_OO @ gram_OO.T / out, 0.05)
    return Metric(moment_II, {"both": full_OO, "diagonal": full_OO.diagonal().clone()}.get(how))


@pytest.mark.parametrize("config", [BTT(blocks=(4, 5), rank=1), Monarch(blocks=(4, 5), rank=1)])
def test_rank_one_is_every_kronecker_product(config):
    weight = torch.kron(torch.randn(3, 5).double(), torch.randn(4, 7).double())
    errors = {}
    for order in ("contiguous", "strided"):
        linear = STRUCTURES[config].project(weight, replace(config, order=order))
        errors[order] = float((linear.dense().detach() - weight).norm() / weight.norm())
    assert errors["strided"] < 1e-12
    assert errors["contiguous"] > 0.1


@pytest.mark.parametrize("out, in_", [(24, 20), (23, 19), (7, 40)])
@pytest.mark.parametrize("rows", [(), (3,), (2, 50)])
def test_forward_is_the_dense_product(out, in_, rows):
    linear = STRUCTURES[BTT](in_, out, BTT(blocks=(4, 5), rank=2, order="strided")).double()
    torch.nn.init.normal_(linear.bias)
    x = torch.randn(*rows, in_).double()
    torch.testing.assert_close(linear(x), x @ linear.dense().T + linear.bias, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(linear.product(x), x @ linear.dense().T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["plain", "inputs", "both", "diagonal"])
def test_fits_are_those_of_the_permuted_matrix(how):
    """Projection, error curve and alternating least squares of W in strided order: those of W with its rows
    permuted.
    """
    out, in_, config = 24, 20, BTT(blocks=(4, 5), rank=2)
    weight, metric = torch.randn(out, in_).double(), random_metric(out, in_, how)
    rows = strided_rows(4, 6)
    gram = metric.g_OO
    if gram is not None:
        gram = gram[rows] if gram.dim() == 1 else gram[rows][:, rows]
    moved, there = weight[rows], Metric(metric.c_II, gram)
    strided = replace(config, order="strided")
    cls = STRUCTURES[BTT]
    one, other = cls.project(weight, strided, metric), cls.project(moved, config, there)
    for _ in range(2):
        torch.testing.assert_close(one.dense()[rows], other.dense(), rtol=1e-8, atol=1e-8)
        assert one.sweep(weight, metric) == pytest.approx(other.sweep(moved, there))
    curves = cls.rank_error_curve(weight, strided, metric), cls.rank_error_curve(moved, config, there)
    assert [error for _, error in curves[0]] == pytest.approx([error for _, error in curves[1]])


@pytest.mark.parametrize("how", ["plain", "inputs", "both", "diagonal"])
@pytest.mark.parametrize("out, in_", [(23, 19), (9, 31)])
def test_padded_blocks_fit_exactly_at_full_rank_and_sweeps_descend(how, out, in_):
    weight, metric = torch.randn(out, in_).double(), random_metric(out, in_, how)
    cls, config = STRUCTURES[BTT], BTT(blocks=(4, 3), rank="full", order="strided")
    full = cls.project(weight, cls.fit(config, out, in_, 0.0), metric)
    torch.testing.assert_close(full.dense(), weight, rtol=1e-9, atol=1e-9)
    linear = cls.project(weight, replace(config, rank=1), metric)
    before = metric.squared_norm(weight - linear.dense())
    left = linear.sweep(weight, metric)
    after = metric.squared_norm(weight - linear.dense())
    if how != "both":  # sweeps take the blocks G_bb of a full G only
        assert after <= before * (1 + 1e-9)
        assert left is None or left == pytest.approx(after, rel=1e-5)


def test_gradients_against_float64_differences():
    linear = STRUCTURES[BTT](7, 9, BTT(blocks=(2, 3), rank=2, order="strided")).double()
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: linear(x), (x, linear.weight, linear.right, linear.bias))


def test_mup_is_that_of_contiguous_order():
    built = [STRUCTURES[BTT](20, 24, BTT(blocks=(4, 5), rank=2, order=order)) for order in ("contiguous", "strided")]
    assert built[0].mup() == built[1].mup()
    assert built[0].cost() == built[1].cost()


@pytest.mark.parametrize("config", [BTT(blocks=(4, 5), rank=2), Monarch(blocks=(4, 5), rank=1)])
def test_tables_name_strided_order_only(config):
    """Checkpoints of contiguous order stay readable by versions that know no other."""
    assert "order" not in config.to_dict()
    strided = replace(config, order="strided")
    assert config_from_dict(strided.to_dict()) == strided
    entry = {**strided.to_dict(), "in_features": 20, "out_features": 24, "bias": False}
    linear = build_module(entry, "cpu", torch.float64)
    again = build_module(entry, "cpu", torch.float64)
    again.load_state_dict(linear.state_dict())
    x = torch.randn(5, 20).double()
    assert torch.equal(linear(x), again(x))
    assert describe_structure(strided.to_dict()).endswith(" strided")


def test_recipes_take_the_order_and_refuse_others():
    assert validate_recipe({"order": "strided"}, "here").order == "strided"
    with pytest.raises(SurgeryError, match="order: write contiguous or strided"):
        validate_recipe({"order": "rows"}, "here")


def test_tensor_parallel_slices_cut_inputs_and_hold_outputs_whole():
    config = BTT(blocks=(4, 4), rank=2, order="strided").to_dict()
    spec = {**config, "in_features": 16, "out_features": 24, "bias": False}
    assert slice_spec(spec, Shard(0, 2, "out")) == (spec, {})
    linear, x = build_module(spec, "cpu", torch.float64), torch.randn(3, 16).double()
    parts = 0
    for rank in range(2):
        local, cuts = slice_spec(spec, Shard(rank, 2, "in"))
        part = build_module(local, "cpu", torch.float64)
        part.load_state_dict(
            {name: core.chunk(cuts[name][1], cuts[name][0])[rank] for name, core in linear.state_dict().items()}
        )
        parts = parts + part(x.chunk(2, -1)[rank])
    torch.testing.assert_close(parts, linear(x))


@pytest.mark.parametrize("family, fused", [("llama", "whole"), ("gpt2", "whole"), ("gpt2", "split")])
@pytest.mark.parametrize("structure", ["btt", "monarch"])
def test_a_converted_model_is_its_densified_one(family, fused, structure, checkpoints, tmp_path):
    """Fitted, saved, loaded and made dense again, also the parts of a fused matrix; logits stay the same."""
    inputs = tiny_inputs(family, 6)
    save_file(inputs, tmp_path / "inputs.safetensors")
    keys = {"structure": structure, "blocks": [2, 2], "order": "strided", "fused": fused, "keep": 0.6, "sweeps": 1}
    keys |= {"allocate": "uniform", "calibration": tmp_path / "inputs.safetensors"}
    report = convert(str(checkpoints(family)), make_recipe(**keys), tmp_path / "out", device="cpu")
    replaced = [record["structure"] for record in report["modules"] if record["structure"]["structure"] == structure]
    assert replaced and all(entry["order"] == "strided" for entry in replaced)
    densify(str(tmp_path / "out"), tmp_path / "dense")
    cls = tiny_config(family)[0]
    models = [cls.from_pretrained(tmp_path / name, dtype=torch.float32).eval() for name in ("out", "dense")]
    with torch.no_grad():
        structured, dense = (model(**inputs).logits for model in models)
    torch.testing.assert_close(structured, dense, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 64])
def test_the_predicted_time_has_a_copy_of_the_outputs(tokens):
    times = MeasuredTimes(tuning_tables([bench_result()])[0])
    config, phase = BTT(blocks=(2, 2), rank=4), "decode" if tokens == 1 else "prefill"
    found = [
        times.structured(phase, tokens, replace(config, order=order).to_dict(), (48, 32))
        for order in ("contiguous", "strided")
    ]
    assert found[0].measured and not found[1].measured
    copied = 2 * 2 * tokens * 48 / times.bandwidth  # read and written in bfloat16
    assert found[1].ms == pytest.approx(found[0].ms + max(copied, times.shortest[PHASES[phase]]))


def test_journals_without_an_order_stay_resumable():
    """A journal has the key only where a recipe or a rule gives it."""
    source = SimpleNamespace(fingerprint=lambda: "", weights_digest=lambda: "")
    rules = [{"match": "mlp.*", "rank": 4}, {"match": "attention.*", "order": "strided"}]
    for keys in ({}, {"order": "strided"}):
        saved = json.loads(journal_fingerprint(source, make_recipe(rules=rules, **keys), None)["recipe"])
        assert saved.get("order") == keys.get("order") and ("order" in saved) == bool(keys)
        assert "order" not in saved["rules"][0] and saved["rules"][0]["rank"] == 4
        assert saved["rules"][1]["order"] == "strided"
    assert (
        json.loads(journal_fingerprint(source, make_recipe(rules=rules[:1]), None)["recipe"])["rules"][0]["rank"] == 4
    )
    assert json.loads(journal_fingerprint(source, make_recipe(), None)["recipe"])["rules"] == []
