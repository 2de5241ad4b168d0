"""structure: pruned: the neurons of an MLP, end to end."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import killing
from helpers.forked import run_processes
from helpers.narrowed import check_densified, check_stock, load
from helpers.small import FAMILIES, make_recipe, model_outputs, relative, tiny_config, tiny_inputs
from helpers.small_experts import write_experts
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import surgery
import surgery.calibration.partition
from surgery.architectures.linears import LinearInfo, find_linears
from surgery.calibration.moments import InputMoments
from surgery.checkpoint.model_classes import model_class
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.conversion.fit import FitContext, fit_linear
from surgery.conversion.quantize_checkpoint import quantize
from surgery.conversion.trial import budgets_by_gain
from surgery.core.errors import SurgeryError
from surgery.planning.allocate import CostPoint
from surgery.planning.pruned_mlps import find_pruned_mlps
from surgery.planning.targets import LinearTarget
from surgery.structures.pruned import Pruned
from surgery.training.auto_recipe import read_facts
from surgery.training.models import load_student, open_trainable, pruned_linears
from surgery.training.optim import select_parameters
from surgery.training.suitability import is_converted
from surgery.vllm.servable import check_config

PRUNED = {"structure": "pruned", "multiple": 8}
KINDS = ("llama", "gpt2", "gpt_neox", "phi3")  # gate and up, Conv1D with biases, biases, fused
QUICK = {"allocate": "uniform", "sweeps": 1}
WIDTHS = [{"match": "mlp.*", "layers": "1:", "keep": 0.8}]  # other widths in the second layer


def pruned_records(report: dict) -> list[dict]:
    return [record for record in report["modules"] if record["structure"]["structure"] == "pruned"]


@pytest.fixture(scope="module")
def per_layer(checkpoints, calibration, tmp_path_factory):
    """per_layer(family) -> folder with MLPs of two widths, made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("per-layer") / family
            recipe = make_recipe(**PRUNED, **QUICK, keep=0.5, rules=WIDTHS, calibration=calibration(family))
            convert(str(checkpoints(family)), recipe, made[family])
        return made[family]

    return make


# -- every family ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_the_widths_of_the_plan_are_those_of_the_result(family, checkpoints, tmp_path):
    recipe = make_recipe(**PRUNED, keep=0.5, rules=WIDTHS)
    report = convert(str(checkpoints(family)), recipe, tmp_path / "out")
    assert pruned_records(report)
    assert all(record["params_after"] == record["macs_after"] for record in pruned_records(report))
    stored = sum(t.numel() for t in load_file(tmp_path / "out" / "model.safetensors").values())
    assert report["totals"]["params_after"] == stored
    inputs = tiny_inputs(family, 3, seed=2)
    assert bool(model_outputs(load(tmp_path / "out"), inputs).isfinite().all())


@pytest.mark.parametrize("family", KINDS)
def test_neurons_are_rows_of_the_original(family, checkpoints, per_layer):
    """Gate, up and their biases lose rows and keep the others bit by bit."""
    before, after = (
        load_file(checkpoints(family) / "model.safetensors"),
        load_file(per_layer(family) / "model.safetensors"),
    )
    changed = [name for name in before if before[name].shape != after[name].shape]
    model = load(checkpoints(family))
    layout = {linear.path: linear for linear in find_linears(model).linears}
    assert len({tuple(after[name].shape) for name in changed}) > 2, "two widths"
    for name in changed:
        linear = next(n for path, n in layout.items() if name.rpartition(".")[0] in (path, path.partition(".")[2]))
        if "mlp.down" in linear.roles:
            continue
        whole, kept = (t.mT if linear.transposed and t.dim() == 2 else t for t in (before[name], after[name]))
        rows = {row.numpy().tobytes() for row in whole.contiguous()}
        assert all(row.numpy().tobytes() in rows for row in kept.contiguous())


@pytest.mark.parametrize("family", KINDS)
def test_the_full_width_is_the_original(family, checkpoints, calibration, tmp_path):
    width = 128 if family == "gpt2" else 48
    recipe = make_recipe(**PRUNED, **QUICK, width=width, calibration=calibration(family))
    convert(str(checkpoints(family)), recipe, tmp_path / "out")
    inputs = tiny_inputs(family, 3, seed=2)
    found, wanted = (model_outputs(load(folder), inputs) for folder in (tmp_path / "out", checkpoints(family)))
    assert relative(found, wanted) < 1e-4


@pytest.mark.parametrize("family", KINDS)
def test_densify_gives_the_same_function_in_the_original_sizes(family, checkpoints, per_layer, tmp_path):
    check_densified(per_layer(family), checkpoints(family), tiny_inputs(family, 3, seed=2), tmp_path / "dense")


@pytest.mark.parametrize("family", KINDS)
def test_integers(family, per_layer, tmp_path):
    quantize(str(per_layer(family)), tmp_path / "int8")
    inputs = tiny_inputs(family, 3, seed=2)
    found, wanted = (model_outputs(load(folder), inputs) for folder in (tmp_path / "int8", per_layer(family)))
    assert 0 < relative(found, wanted) < 0.1
    densify(str(tmp_path / "int8"), tmp_path / "dense")
    assert relative(model_outputs(load(tmp_path / "dense"), inputs), found) < 1e-4


STOCK_FAMILIES = ("llama-tied", "gpt2", "gpt_neox", "phi3", "bert", "t5-gated")


# -- ordinary checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("families", [STOCK_FAMILIES[:1], pytest.param(STOCK_FAMILIES[1:], marks=pytest.mark.slow)])
def test_one_width_is_an_ordinary_checkpoint(families, checkpoints, calibration, tmp_path):
    """In a process that cannot import this package."""
    for family in families:
        recipe = make_recipe(**PRUNED, **QUICK, keep=0.5, width="uniform", calibration=calibration(family))
        convert(str(checkpoints(family)), recipe, tmp_path / family)
        config = json.loads((tmp_path / family / "config.json").read_text())
        assert "quantization_config" not in config and "auto_map" not in config
        assert 24 in (config.get("intermediate_size"), config.get("d_ff")) or config.get("n_inner") == 64
        assert not list((tmp_path / family).glob("*.py"))
    check_stock(tmp_path, families, families)


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_next"])
def test_shared_experts_of_one_width_are_an_ordinary_checkpoint(kind, tmp_path):
    source = write_experts(kind, tmp_path / "source")
    rules = [{"match": "mlp.*", **PRUNED, "width": "uniform"}]
    report = convert(str(source), make_recipe(structure="dense", keep=0.5, rules=rules), tmp_path / "out")
    assert {record["structure"]["width"] for record in pruned_records(report)} == {8}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["shared_expert_intermediate_size"] == 8 and "quantization_config" not in config
    model = load(tmp_path / "out")
    assert all(m.shape[0] == 8 for name, m in model.named_parameters() if name.endswith("shared_expert.up_proj.weight"))
    assert bool(model_outputs(model, tiny_inputs("llama", 2, seed=2)).isfinite().all())


def test_commands_on_an_ordinary_checkpoint(checkpoints, calibration, tmp_path):
    recipe = make_recipe(**PRUNED, **QUICK, keep=0.5, calibration=calibration("llama"))
    report = convert(str(checkpoints("llama")), recipe, tmp_path / "out")
    found = surgery.inspect(tmp_path / "out")
    assert found["checks"]["as_reported"] and found["totals"] == report["totals"]
    plan = surgery.plan(str(checkpoints("llama")), {**PRUNED, "keep": 0.5})
    linears = 2 * (2 * 32 * 32 + 2 * 16 * 32) + 96 * 32
    assert found["macs_per_token"] == {"before": linears + 6 * 32 * 48, "after": linears + 6 * 32 * 24}
    assert {(*row["shape"], row["count"]) for row in found["linears"]["unchanged"]} >= {(24, 32, 4), (32, 24, 2)}
    assert {(*row["shape"], row["count"]) for row in plan["unchanged"]} >= {(24, 32, 4), (32, 24, 2)}
    with pytest.raises(SurgeryError, match="ordinary checkpoint already"):
        densify(str(tmp_path / "out"), tmp_path / "dense")
    again = convert(str(tmp_path / "out"), make_recipe(structure="low_rank", keep=0.5), tmp_path / "again")
    assert again["totals"]["params_before"] == report["totals"]["params_after"], "it converts like any other"


def test_attention_low_rank_beside_one_width(checkpoints, calibration, tmp_path):
    """The table has the attention alone, and what is multiplied out is ordinary and narrow."""
    rules = [{"match": "mlp.*", "structure": "pruned", "multiple": 8, "width": "uniform"}]
    recipe = make_recipe(structure="low_rank", keep=0.5, rules=rules, calibration=calibration("llama"))
    report = convert(str(checkpoints("llama")), recipe, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert all("self_attn" in path for path in config["quantization_config"]["modules"])
    assert config["intermediate_size"] < 48 and report["totals"]["kept"] <= 0.5
    densify(str(tmp_path / "out"), tmp_path / "dense")
    dense = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert dense["intermediate_size"] == config["intermediate_size"] and "quantization_config" not in dense
    inputs = tiny_inputs("llama", 2, seed=3)
    found, wanted = (model_outputs(load(tmp_path / name), inputs) for name in ("dense", "out"))
    assert relative(found, wanted) < 1e-4


# -- the fit ------------------------------------------------------------------------------------------------------------
def test_the_bias_is_fitted_too():
    """No change of the bias or of the columns that stay lowers the error of the calibration rows."""
    g = torch.Generator().manual_seed(0)
    x0 = torch.randn(4000, 24, generator=g).relu() @ torch.randn(24, 24, generator=g) + 2
    x, gap = x0 + 0.1 * torch.randn(4000, 24, generator=g), torch.randn(4000, 10, generator=g) + 1
    weight = torch.randn(10, 24, generator=g)
    linear = LinearInfo("down", ("mlp.down",), "layer", 0, 1, 10, 24, True, False)
    up = LinearInfo("up", ("mlp.up",), "layer", 0, 1, 24, 10, True, False)
    target = LinearTarget(linear, 10, 0.5, (Pruned(multiple=1),), neurons=(up,))
    assert target.numel == 24 * 20 and target.fits_bias
    moments = InputMoments({target.name: (weight, True)}, fits_bias=True)
    for rows in (slice(0, 1000), slice(1000, 4000)):
        moments.add(x[rows], x0[rows], gap[rows])
    fitted = fit_linear(target, 240, weight, FitContext(moments.means(), damping=1e-9))
    change = moments.bias_change(target.name, fitted.linear.dense())
    rest = x0 @ weight.mT + gap - x @ fitted.linear.dense().mT - change
    columns = fitted.linear.columns.long()
    assert len(columns) == 12
    assert float(rest.mean(0).abs().max()) < 1e-3
    assert float((rest.mT @ x[:, columns] / len(x)).abs().max()) < 1e-2 * float((rest.mT @ x / len(x)).abs().max())


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_biases_of_the_result_lower_the_error(family, checkpoints, calibration, tmp_path):
    recipe = make_recipe(**PRUNED, **QUICK, keep=0.5, calibration=calibration(family))
    convert(str(checkpoints(family)), recipe, tmp_path / "out")
    fitted, inputs = load(tmp_path / "out"), load_file(calibration(family))
    kept = copy.deepcopy(fitted)
    original = load(checkpoints(family))
    downs = [linear.path for linear in find_linears(original).linears if "mlp.down" in linear.roles]
    for path in downs:
        assert not torch.equal(fitted.get_submodule(path).bias, original.get_submodule(path).bias)
        kept.get_submodule(path).bias.data = original.get_submodule(path).bias.data
    wanted = model_outputs(original, inputs)
    assert relative(model_outputs(fitted, inputs), wanted) < relative(model_outputs(kept, inputs), wanted)


def test_tuning_trains_all_linears_of_the_mlp(checkpoints, calibration, tmp_path):
    recipe = {**PRUNED, **QUICK, "keep": 0.5, "rules": WIDTHS}
    untuned = surgery.convert(str(checkpoints("gpt2")), recipe, tmp_path / "a", calibration=str(calibration("gpt2")))
    tune = {**recipe, "tune": {"layers": 2, "model": 2}}
    tuned = surgery.convert(str(checkpoints("gpt2")), tune, tmp_path / "b", calibration=str(calibration("gpt2")))
    assert tuned["held_out"]["converted"] < untuned["held_out"]["converted"]
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    moved = {name.partition("h.0.")[2] for name in before if not torch.equal(before[name], after[name])}
    assert {"mlp.c_fc.weight", "mlp.c_proj.weight"} <= moved and not any("attn" in name for name in moved)


@pytest.mark.parametrize("rules", [[], WIDTHS])
def test_training_counts_them_as_new(rules, checkpoints, calibration, tmp_path):
    """Also in an ordinary checkpoint, where only the report says that the MLPs are pruned."""
    recipe = make_recipe(**PRUNED, **QUICK, keep=0.5, rules=rules, calibration=calibration("llama"))
    convert(str(checkpoints("llama")), recipe, tmp_path / "out")
    source = open_trainable(str(tmp_path / "out"))
    student, names = load_student(source), [f"mlp.{role}_proj.weight" for role in ("gate", "up", "down")]
    assert select_parameters(student, ["new"], {}) == {f"model.layers.{i}.{name}" for i in range(2) for name in names}
    assert is_converted(student) and not is_converted(load_student(open_trainable(str(checkpoints("llama")))))
    assert read_facts(source).linears == 6


@pytest.mark.parametrize(
    ("report", "paths"),
    [
        ([], []), ({"modules": 3}, []), ({"modules": [3, {}, {"name": "a"}, {"name": ["a"], "structure": {"structure": "pruned"}}]}, []),
        ({"modules": [{"name": "a", "structure": "pruned"}]}, []),
        ({"modules": [{"name": "mlp.up+down", "structure": {"structure": "pruned"}}]}, ["mlp.up", "mlp.down"]),
    ],
)  # fmt: skip
def test_the_report_of_another_model_is_refused_and_other_entries_count_as_none(report, paths, checkpoints, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(checkpoints("llama"), out)
    (out / "surgery_report.json").write_text(json.dumps(report))
    source = open_trainable(str(out))
    assert pruned_linears(source) == paths
    if not paths:
        load_student(source)
        return
    with pytest.raises(SurgeryError, match=r"report\.json names .mlp\.up. as a linear of a pruned MLP"):
        load_student(source)


# -- allocation -----------------------------------------------------------------------------------------------------------
def test_widths_and_ranks_share_one_budget(checkpoints, calibration, tmp_path, monkeypatch):
    from helpers.small import allocate_by_gain

    allocate_by_gain(monkeypatch)
    rules = [{"match": "mlp.*", "structure": "pruned", "multiple": 8}]
    recipe = make_recipe(structure="low_rank", keep=0.5, rules=rules, calibration=calibration("llama"))
    report = convert(str(checkpoints("llama")), recipe, tmp_path / "out")
    assert report["allocation"]["kept"] == "measured" and 0.4 < report["totals"]["kept"] <= 0.5
    shares = {r["name"]: round(r["params_after"] / r["params_before"], 2) for r in report["modules"]}
    assert len(set(shares.values())) > 2
    assert all(r["structure"]["width"] % 8 == 0 for r in pruned_records(report))


def test_uniform_widths_are_one_module_of_the_allocation():
    def target(path: str, width: str | None) -> LinearTarget:
        down = LinearInfo(path, ("mlp.down",), path, 0, 1, 1, 4, False, False)
        up = LinearInfo(f"{path}.up", ("mlp.up",), path, 0, 1, 4, 9, False, False)
        return LinearTarget(down, 1, 0.5, (Pruned(width, 1),), neurons=(up,))

    for width, wanted in ((None, [30, 10]), ("uniform", [20, 20])):
        a, b = target("a", width), target("b", width)
        options = {
            t.name: [CostPoint(10 * n, error * (4 - n) ** 2) for n in (1, 2, 3, 4)]
            for t, error in ((a, 100.0), (b, 1.0))
        }
        assert [budgets_by_gain(options, [a, b])[t.name] for t in (a, b)] == wanted


# -- journal, processes, models in memory --------------------------------------------------------------------------------
def test_killed_and_resumed_to_the_same_bytes(checkpoints, calibration, tmp_path):
    recipe = make_recipe(**PRUNED, **QUICK, keep=0.5, rules=WIDTHS, calibration=calibration("gpt2"), tune={"model": 1})
    whole, *resumed = killing.convert_with_kills(
        lambda out, resume: convert(str(checkpoints("gpt2")), recipe, out, resume=resume), tmp_path, kills=1
    )
    assert resumed
    for out in resumed:
        for name in ("model.safetensors", "config.json"):
            assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_give_the_bytes_of_one(checkpoints, calibration, tmp_path, monkeypatch):
    monkeypatch.setattr(surgery.calibration.partition, "MIN_SHARD_TOKENS", 64)
    recipe = make_recipe(**PRUNED, keep=0.5, calibration=calibration("gpt2"))
    for count in (1, 2):
        out = tmp_path / f"out-{count}"
        work = lambda _, out=out: convert(str(checkpoints("gpt2")), recipe, out, device="cpu")  # noqa: E731
        assert run_processes(count, work) == [0] * count
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out-1" / name).read_bytes() == (tmp_path / "out-2" / name).read_bytes()


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("rules", [[], WIDTHS])
def test_apply_equals_convert(family, rules, checkpoints, calibration, tmp_path):
    recipe = {**PRUNED, **QUICK, "keep": 0.5, "rules": rules}
    inputs = load_file(calibration(family))
    surgery.convert(str(checkpoints(family)), recipe, tmp_path / "out", calibration=str(calibration(family)))
    model = surgery.apply(load(checkpoints(family)), recipe, calibration=inputs)
    stored = load(tmp_path / "out")
    found = tiny_inputs(family, 2, seed=4)
    assert torch.equal(model_outputs(model, found), model_outputs(stored, found))
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert ("quantization_config" in config) == bool(rules)
    assert torch.equal(model_outputs(load(tmp_path / "saved"), found), model_outputs(stored, found))


# -- what is refused -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            {"rules": [{"match": "head", "structure": "pruned"}]},
            r"removes neurons of MLPs and heads of attention. Match",
        ),
        ({"rules": [{"match": "mlp.up", "structure": "pruned"}]}, r"need the same settings \(got .*low_rank keep 0.5"),
        ({"structure": "pruned", "rules": [{"match": "mlp.down", "keep": 0.7}]}, "need the same settings"),
        (
            {"structure": "pruned"},
            r"gate_proj\+up_proj\+down_proj: widths of a pruned MLP are multiples of 64, and its",
        ),
        ({"structure": "pruned", "width": 49}, "width must be from 1 to the 48 neurons of the MLP .got 49"),
        ({"structure": "pruned", "width": "wide"}, "width: write a whole number over 0, for example 768, or uniform"),
        (
            {"structure": "auto", "candidates": ["pruned"]},
            "candidates: pruned replaces the linears of an MLP together, and needs a candidate for one linear",
        ),
        ({**PRUNED, "width": "uniform", "rules": WIDTHS}, r"different shares \(keep 0.5, 0.8\)"),
    ],
)
def test_refusals(recipe, message, checkpoints):
    with pytest.raises(SurgeryError, match=message):
        surgery.plan(str(checkpoints("llama")), {"structure": "low_rank", "keep": 0.5, **recipe})


def test_attention_stays_dense_with_a_note(checkpoints):
    plan = surgery.plan(str(checkpoints("llama")), {**PRUNED, "keep": 0.5})
    assert [row["role"] for row in plan["rows"]] == ["mlp.gate + mlp.up + mlp.down"]
    assert any("attention.output stay dense, which are of no MLP" in note for note in plan["notes"])


def test_shared_weights_are_refused():
    cls, config = tiny_config("llama")
    model, recipe = cls(config), make_recipe(**PRUNED, keep=0.5)
    layout = find_linears(model)
    settings = {n.path: [recipe.settings(lambda _: False, n.index, n.count)] for n in layout.linears if n.layer}
    mlps, _ = find_pruned_mlps(recipe, layout, settings, {}, model)
    assert [mlp.down.path for mlp in mlps] == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    model.all_tied_weights_keys = {f"model.layers.{i}.mlp.up_proj.weight": "shared.weight" for i in range(2)}
    with pytest.raises(SurgeryError, match=r"model.layers.0.mlp.up_proj.weight is shared with another module"):
        find_pruned_mlps(recipe, layout, settings, {}, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_features": 64}, "maps 64 features to"),
        ({"in_features": 16, "out_features": 16}, "maps 16 features to 16, where the model has a weight of shape"),
        ({"rank": 3}, "'rank' of structure pruned"),
    ],
)
def test_damaged_tables(change, message, per_layer):
    config = AutoConfig.from_pretrained(per_layer("llama"))
    config.quantization_config["modules"]["model.layers.0.mlp.down_proj"] |= change
    with pytest.raises(SurgeryError, match=message):
        model_class(config).from_pretrained(per_layer("llama"), config=config)


def test_vllm_serves_several_widths_without_biases(per_layer):
    config = json.loads((per_layer("llama") / "config.json").read_text())
    assert len(check_config(config, "it").modules) == 6
    for entry in config["quantization_config"]["modules"].values():
        entry["bias"] = True
    with pytest.raises(SurgeryError, match=r"Convert with width: uniform, or use `transformers serve`"):
        check_config(config, "it")


def test_an_mlp_may_keep_all_of_its_neurons(checkpoints, tmp_path):
    """One token repeated: the measured allocation leaves the neurons of a layer where the other one needs none."""
    save_file({"input_ids": torch.full((8, 24), 7)}, tmp_path / "inputs.safetensors")
    rules = [{"match": "mlp.*", "structure": "pruned", "multiple": 8}]
    recipe = make_recipe(structure="dense", keep=0.6, rules=rules, calibration=tmp_path / "inputs.safetensors")
    report = convert(str(checkpoints("llama")), recipe, tmp_path / "out")
    kept = [record["params_after"] / record["params_before"] for record in report["modules"]]
    assert max(kept) == 1 and min(kept) < 0.6
