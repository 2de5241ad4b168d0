"""structure: pruned: the neurons of routed experts, end to end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from helpers import killing
from helpers.forked import run_processes
from helpers.narrowed import check_densified, check_stock, load
from helpers.small import make_recipe, model_outputs, relative, tiny_inputs
from helpers.small_experts import SPLIT, write_experts
from helpers.small_training import EMBEDDED, healing_recipe
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import surgery
import surgery.calibration.partition
from surgery.architectures.linears import LinearInfo
from surgery.calibration.moments import InputMoments
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.conversion.fit import FitContext, fit_linear
from surgery.conversion.quantize_checkpoint import quantize
from surgery.core.errors import SurgeryError
from surgery.planning.targets import LinearTarget
from surgery.publish.tables import expert_lines
from surgery.structures.pruned import Pruned
from surgery.training.models import load_student, open_trainable
from surgery.training.optim import select_parameters

EXPERTS = {"match": "expert.*", "structure": "pruned", "multiple": 4}
NARROW = {"structure": "dense", "keep": 0.5, "rules": [EXPERTS]}
DENSE = {"structure": "dense", "experts": 3}
QUICK = {"allocate": "uniform", "curvature": "none", "sweeps": 1}
MIXED = [{**EXPERTS, "width": 12}, {**EXPERTS, "width": 8, "layers": "1:"}]  # two widths
QUICK_KINDS = ("mixtral", "qwen3_next", "deepseek_v2", "granitemoe", "llama4_text")
# Kinds whose config has one width for routed and shared experts.
ONE_KEY = ("glm4_moe", "deepseek_v2", "deepseek_v3", "llama4_text")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("inputs") / "inputs.safetensors"
    save_file(tiny_inputs("llama", 12), path)
    return str(path)


@pytest.fixture(scope="module")
def two_widths(experts, inputs, tmp_path_factory) -> Path:
    """A checkpoint whose layers have experts of different widths."""
    out = tmp_path_factory.mktemp("two-widths") / "out"
    convert(str(experts("qwen3_moe")), make_recipe(structure="dense", rules=MIXED, **QUICK, calibration=inputs), out)
    return out


def pruned_records(report: dict) -> list[dict]:
    return [record for record in report["modules"] if record["structure"]["structure"] == "pruned"]


# -- every family ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK_KINDS else pytest.param(kind, marks=pytest.mark.slow) for kind in SPLIT]
)
def test_the_widths_of_the_plan_are_those_of_the_result(kind, experts, tmp_path):
    source, out = experts(kind), tmp_path / "out"
    plan = surgery.plan(str(source), NARROW)
    report = convert(str(source), make_recipe(**NARROW), out)
    widths = {record["structure"]["width"] for record in pruned_records(report)}
    assert len(widths) == 1 and [row["role"] for row in plan["rows"]] == ["expert.gate + expert.up + expert.down"]
    assert plan["totals"]["params_after"] == report["totals"]["replaced_params_after"]
    assert any("so the result needs this package" in note for note in plan["notes"]) == (kind in ONE_KEY)
    stored = sum(t.numel() for t in load_file(out / "model.safetensors").values())
    assert report["totals"]["params_after"] == stored
    assert bool(model_outputs(load(out), tiny_inputs("llama", 2, seed=2)).isfinite().all())
    config = json.loads((out / "config.json").read_text())
    assert ("quantization_config" in config) == (kind in ONE_KEY)
    if kind not in ONE_KEY:
        assert not list(out.glob("*.py"))
        with pytest.raises(SurgeryError, match="ordinary checkpoint already"):
            densify(str(out), tmp_path / "dense")
        assert not any(AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)[1].values())
        assert widths <= {config.get("moe_intermediate_size"), config.get("intermediate_size")}


@pytest.mark.slow
def test_the_result_is_an_ordinary_checkpoint(experts, inputs, tmp_path):
    """In a process that cannot import this package: with fewer neurons, and with fewer experts."""
    kinds, recipes = ("mixtral", "granitemoe", "gpt_oss", "deepseek_v3"), (NARROW, NARROW, DENSE, DENSE)
    for kind, recipe in zip(kinds, recipes):
        convert(str(experts(kind)), make_recipe(**recipe, **QUICK, calibration=inputs), tmp_path / kind)
        assert not list((tmp_path / kind).glob("*.py"))
        with pytest.raises(SurgeryError, match="ordinary checkpoint already"):
            densify(str(tmp_path / kind), tmp_path / "dense")
    check_stock(tmp_path, kinds, ["llama"] * len(kinds))


def test_shared_experts_of_the_same_key_are_pruned_with_them(tmp_path):
    """DeepSeek's config has one width for both; both get it, or the table says which. The plan's note says how."""
    source = str(write_experts("deepseek_v3", tmp_path / "source", n_shared_experts=2))
    routed = {**EXPERTS, "width": 12}
    (note,) = surgery.plan(source, {"structure": "dense", "rules": [routed]})["notes"]
    assert "needs this package" in note and "{match: '*.shared_experts.*', structure: pruned, width: 24}" in note
    shared = {"match": "*.shared_experts.*", "structure": "pruned", "width": 24}
    assert not surgery.plan(source, {"structure": "dense", "rules": [routed, shared]})["notes"]
    chosen = {"width": "uniform", "multiple": 4}  # by the budget, which may give the two other shares
    for rules in ([routed, {**shared, "width": 12}], [routed, {**shared, **chosen}], [{**routed, **chosen}, shared]):
        assert surgery.plan(source, {"structure": "dense", "keep": 0.5, "rules": rules})["notes"] == [note]
    convert(source, make_recipe(structure="dense", rules=[routed, shared]), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["moe_intermediate_size"] == 12 and "quantization_config" not in config
    assert bool(model_outputs(load(tmp_path / "out"), tiny_inputs("llama", 2, seed=2)).isfinite().all())


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", pytest.param("llama4_text", marks=pytest.mark.slow)])
def test_neurons_of_zeros_go_first_and_nothing_changes(kind, inputs, tmp_path):
    """Half of each expert's neurons are zero in `down`, others in each expert."""
    source = write_experts(kind, tmp_path / "source")
    model, generator = load(source), torch.Generator().manual_seed(0)
    for name, down in model.named_parameters():
        if name.endswith("experts.down_proj"):  # (E, D, F), or transposed (E, F, D)
            axis = 1 if kind in ("gpt_oss", "llama4_text") else 2
            for expert in down.data:
                zeros = torch.randperm(down.shape[axis], generator=generator)[: down.shape[axis] // 2]
                expert.index_fill_(axis - 1, zeros, 0.0)
    model.save_pretrained(source)
    convert(str(source), make_recipe(**NARROW, **QUICK, damping=1e-9, calibration=inputs), tmp_path / "out")
    found, wanted = (
        model_outputs(load(folder), tiny_inputs("llama", 3, seed=2)) for folder in (tmp_path / "out", source)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("llama4_text", marks=pytest.mark.slow)])
def test_calibration_lowers_the_error(kind, experts, inputs, tmp_path):
    source, outputs = experts(kind), {}
    convert(str(source), make_recipe(**NARROW), tmp_path / "free")
    report = convert(str(source), make_recipe(**NARROW, **QUICK, calibration=inputs), tmp_path / "fitted")
    for name in ("free", "fitted"):
        outputs[name] = model_outputs(load(tmp_path / name), load_file(inputs))
    wanted = model_outputs(load(source), load_file(inputs))
    assert relative(outputs["fitted"], wanted) < 0.97 * relative(outputs["free"], wanted)
    assert all(record["rows"] is not None for record in pruned_records(report))


# -- experts with few tokens -------------------------------------------------------------------------------------------
def test_white_rows_draw_a_fit_towards_the_original():
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(6, 24, generator=g), torch.randn(10, 24, generator=g)
    linear = LinearInfo("down", ("expert.down",), "layer", 0, 1, 10, 24, False, False, experts="experts")
    up = LinearInfo("up", ("expert.up",), "layer", 0, 1, 24, 10, False, False, experts="experts")
    target, gaps = LinearTarget(linear, 10, 0.5, (Pruned(multiple=1),), neurons=(up,)), []
    for rows in (0, 100, 100_000):
        moments = InputMoments({target.name: (weight, False)})
        moments.add(x, x)
        moments.add_white(rows)
        assert (moments.count, moments.borrowed) == (6 + rows, rows)
        fitted = fit_linear(target, 240, weight, FitContext(moments.means(), damping=1e-6)).linear
        gaps.append(float((fitted.weight[0].detach() - weight[:, fitted.columns.long()]).norm()))
    assert gaps[0] > gaps[1] > gaps[2] and gaps[2] < 1e-2


def test_an_expert_without_tokens_keeps_the_original_weights_and_is_named(inputs, tmp_path):
    source = write_experts("mixtral", tmp_path / "source", num_local_experts=8, num_experts_per_tok=1)
    router = "model.layers.0.mlp.gate.weight"
    model = load(source)
    with torch.no_grad():
        model.get_parameter(router).zero_()
        model.get_parameter(router)[0] = 1.0
        model.get_parameter(router)[1] = -1.0  # each token goes to expert 0 or 1
    model.save_pretrained(source)
    report = convert(str(source), make_recipe(**NARROW, **QUICK, calibration=inputs), tmp_path / "out")
    record = next(r for r in report["modules"] if r["name"].startswith("model.layers.0.mlp.experts.5."))
    assert (record["rows"], record["shared_rows"]) == (0, 48)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    name = next(n for n in before if ".layers.0." in n and n.endswith("experts.5.w2.weight"))
    columns = {column.numpy().tobytes() for column in before[name].mT.contiguous()}
    kept = after[name].mT.contiguous()
    assert kept.shape[0] == 24 and all(
        min((column - torch.frombuffer(bytearray(c), dtype=column.dtype)).abs().max() for c in columns) < 1e-4
        for column in kept
    )
    assert any("their fit is drawn towards the original" in line for line in expert_lines(report["modules"]))


# -- several widths ------------------------------------------------------------------------------------------------------
def test_several_widths_are_in_the_table(two_widths, experts, tmp_path):
    config = json.loads((two_widths / "config.json").read_text())
    assert {e["in_features"] for p, e in config["quantization_config"]["modules"].items() if "down" in p} == {8, 12}
    check_densified(two_widths, experts("qwen3_moe"), tiny_inputs("llama", 3, seed=2), tmp_path / "dense")


def test_integers(two_widths, tmp_path):
    quantize(str(two_widths), tmp_path / "int8")
    inputs = tiny_inputs("llama", 3, seed=2)
    found, wanted = (model_outputs(load(folder), inputs) for folder in (tmp_path / "int8", two_widths))
    assert 0 < relative(found, wanted) < 0.1


# -- allocation, training, models in memory ------------------------------------------------------------------------------
def test_measured_allocation_gives_all_experts_one_width(experts, inputs, tmp_path):
    """Attention shares the budget."""
    recipe = make_recipe(structure="low_rank", keep=0.5, rules=[EXPERTS], sweeps=1, calibration=inputs)
    report = convert(str(experts("qwen3_moe")), recipe, tmp_path / "out")
    assert len({record["structure"]["width"] for record in pruned_records(report)}) == 1
    assert report["totals"]["kept"] <= 0.5
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["moe_intermediate_size"] % 4 == 0


def test_training_counts_them_as_new(experts, inputs, tmp_path):
    convert(str(experts("mixtral")), make_recipe(**NARROW, **QUICK, calibration=inputs), tmp_path / "out")
    student = load_student(open_trainable(str(tmp_path / "out")))
    chosen = select_parameters(student, ["new"], {})
    assert len(chosen) == 2 * 4 * 3 and all(".experts." in name for name in chosen)


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("granitemoe", marks=pytest.mark.slow)])
def test_an_ordinary_checkpoint_is_healed(kind, inputs, texts, tmp_path):
    """Its experts are trained as linears, and written in the form that its files had."""
    from surgery.training.finetune import finetune

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    source = write_experts(kind, tmp_path / "source", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(source)
    convert(str(source), make_recipe(**NARROW, **QUICK, calibration=inputs), tmp_path / "out")
    stage = {"kind": "lm", "tokens": 512, "trains": ["new"], "rate": 1e-2}
    finetune(str(tmp_path / "out"), healing_recipe(texts, stage), tmp_path / "healed")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "healed"))
    assert {name: t.shape for name, t in before.items()} == {name: t.shape for name, t in after.items()}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    names = ("experts", "input_linear", "output_linear")
    assert moved == {name for name in before if any(f".{part}." in name for part in names)}
    assert not any(AutoModelForCausalLM.from_pretrained(tmp_path / "healed", output_loading_info=True)[1].values())


def test_tuning_trains_all_linears_of_the_experts(experts, inputs, tmp_path):
    tune = {**NARROW, **QUICK, "tune": {"layers": 2, "model": 2}}
    untuned = convert(str(experts("mixtral")), make_recipe(**NARROW, **QUICK, calibration=inputs), tmp_path / "a")
    tuned = convert(str(experts("mixtral")), make_recipe(**tune, calibration=inputs), tmp_path / "b")
    assert tuned["held_out"]["converted"] < untuned["held_out"]["converted"]
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all(".experts." in name for name in moved)


@pytest.mark.parametrize("rules", [[EXPERTS], [{**EXPERTS, "width": 24}, {**EXPERTS, "width": 16, "layers": "1:"}]])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_apply_equals_convert(kind, rules, experts, inputs, tmp_path):
    recipe = {**NARROW, **QUICK, "rules": rules}
    surgery.convert(str(experts(kind)), recipe, tmp_path / "out", calibration=inputs)
    model = surgery.apply(load(experts(kind)), recipe, calibration=load_file(inputs))
    found = tiny_inputs("llama", 2, seed=4)
    assert relative(model_outputs(model, found), model_outputs(load(tmp_path / "out"), found)) < 1e-5
    model.save_pretrained(tmp_path / "saved")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "saved"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "saved")]
    assert configs[0]["intermediate_size"] == configs[1]["intermediate_size"] == (48 if len(rules) > 1 else 24)


def test_inspect_counts_what_stays(experts, inputs, tmp_path):
    report = convert(str(experts("qwen3_moe")), make_recipe(**NARROW, **QUICK, calibration=inputs), tmp_path / "out")
    found = surgery.inspect(tmp_path / "out")
    assert found["checks"]["as_reported"] and found["totals"] == report["totals"]
    linears = 2 * (2 * 32 * 32 + 2 * 16 * 32) + 96 * 32
    assert found["macs_per_token"] == {"before": linears + 2 * 2 * 3 * 32 * 24, "after": linears + 2 * 2 * 3 * 32 * 12}


# -- journal and processes -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_killed_and_resumed_to_the_same_bytes(kind, experts, inputs, tmp_path):
    recipe = make_recipe(**{**NARROW, "allocate": "measured", "sweeps": 1}, calibration=inputs)
    whole, *resumed = killing.convert_with_kills(
        lambda out, resume: convert(str(experts(kind)), recipe, out, resume=resume), tmp_path, kills=1
    )
    assert resumed
    for out in resumed:
        for name in ("model.safetensors", "config.json"):
            assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_give_the_bytes_of_one(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(surgery.calibration.partition, "MIN_SHARD_TOKENS", 64)
    source = write_experts("qwen3_moe", tmp_path / "source", num_hidden_layers=1, num_experts=12)
    recipe = make_recipe(**NARROW, **QUICK, calibration=inputs)
    for count in (1, 2):
        out = tmp_path / f"out-{count}"
        assert run_processes(count, lambda _, out=out: convert(str(source), recipe, out, device="cpu")) == [0] * count
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out-1" / name).read_bytes() == (tmp_path / "out-2" / name).read_bytes()


# -- what is refused -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"match": "expert.up", "structure": "pruned"}], r"need the same settings .*Give them in one rule for expert"),
        ([{**EXPERTS, "multiple": 64}], r"gate_proj\+up_proj\+down_proj: widths of a pruned MLP are multiples of 64"),
        ([{**EXPERTS, "width": 25}], "width must be from 1 to the 24 neurons of the MLP .got 25"),
        ([{**EXPERTS, "groups": 2}], "is a number of key/value heads, and an MLP has none"),
        ([EXPERTS, {**EXPERTS, "keep": 0.7, "layers": "1:"}], r"uniform gives all experts one size.*keep 0.5, 0.7"),
    ],
)
def test_refusals(rules, message, experts):
    with pytest.raises(SurgeryError, match=message):
        surgery.plan(str(experts("qwen3_moe")), {"structure": "dense", "keep": 0.5, "rules": rules})
