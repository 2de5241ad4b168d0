"""`speed`: structures chosen by predicted time, within a target, never slower than dense."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from conversion.test_convert import Crash, bytes_of
from helpers.forked import run_processes
from helpers.linear_times import SHAPES, bench_result, write_times
from helpers.small import make_recipe

import surgery
import surgery.calibration.partition
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion import trial
from surgery.conversion.convert import convert
from surgery.conversion.layer_shards import select_valid_entries
from surgery.conversion.score import HeldOutScore
from surgery.core.errors import SurgeryError
from surgery.core.files import partial_path
from surgery.core.journal import Journal
from surgery.planning.allocate import CostPoint
from surgery.planning.measured_times import read_measured_times
from surgery.planning.plan import make_plan
from surgery.planning.recipe import load_recipe, parse_recipe
from surgery.planning.speed import allocate_time, even_points, find_table, time_after, time_before
from surgery.planning.speed_recipe import SpeedRecipe
from surgery.publish.html.page import write_page
from surgery.publish.speed_notes import report_times

BASE = {"structure": "low_rank", "round_ranks": 4, "sweeps": 0, "holdout": 0.25}


@pytest.fixture
def times(tmp_path):
    """times(**changes) -> path of a file of times; see `bench_result`."""
    return lambda **changes: write_times(tmp_path / "linear.json", **changes)


def planned(checkpoint, **recipe):
    return make_plan(MetaModel(open_checkpoint(str(checkpoint))), make_recipe(**recipe))


# -- the plan --------------------------------------------------------------------------------------
@pytest.mark.parametrize("speed, tokens", [({"decode": 1.2}, 1), ({"prefill": 1.2, "tokens": 64}, 64)])
def test_a_plan_meets_the_target_and_slows_no_matrix(speed, tokens, checkpoints, times):
    plan = planned(checkpoints("llama"), **BASE, speed={**speed, "measured": times()})
    assert (plan.time.device, plan.time.tokens) == ("X1", tokens)
    for target in plan.replaced_targets():
        assert target.dense_ns == pytest.approx(target.numel * tokens * 10**6, rel=0.01)  # files have three digits
        assert all(option.ns < target.dense_ns and option.config.rank % 4 == 0 for option in target.options)
        assert all(option.ns == pytest.approx(1.25e6 * option.params * tokens, rel=0.2) for option in target.options)
    shown = {t.name: t.preview and t.preview.to_dict() for t in plan.replaced_targets()}
    assert 1.2 <= time_before(plan) / time_after(plan, shown) < 1.3
    assert len({t.preview.rank for t in plan.replaced_targets() if t.preview}) >= 1


def test_plan_and_inspect_say_it_in_words(checkpoints, calibration, times, tmp_path):
    keys = {**BASE, "speed": {"decode": 1.2, "device": "x1", "measured": times()}}
    shown = surgery.plan(str(checkpoints("llama")), keys)
    line = "replaced linears, decoding step in a CUDA graph, X1 (bfloat16), predicted: 1.54e+04 -> "
    assert line in str(shown) and "1.2x faster (target: 1.2x); " in str(shown)
    assert "% of the time of all linears" in str(shown) and 0 < shown["speed_target"]["share"] <= 1
    assert "all linears of the model, decoding step in a CUDA graph, X1 (bfloat16)" in str(shown)
    assert shown["totals"]["params_after"] < shown["totals"]["params_before"]
    surgery.convert(checkpoints("llama"), keys, tmp_path / "out", calibration=calibration("llama"))
    found = surgery.inspect(tmp_path / "out")
    assert line in str(found) and found["speed"]["target"] == 1.2 <= found["speed"]["ratio"]
    assert 0 <= found["speed"]["dense"] <= found["speed"]["matrices"] == 14


@pytest.mark.parametrize(
    "speed, changes, says",
    [
        ({"decode": 40}, {}, r"decode 40 cannot be reached for a decoding step .* on X1 \(bfloat16\): .* reach [\d.]+\. Set speed.decode to"),
        ({"decode": 1.2}, {"slowness": {"low_rank": 9.0}}, "none of the structures is faster than the dense matrices"),
        ({"decode": 1.2}, {"slowness": {"btt": 1.0}}, r"low_rank for 32 -> 32 \(model.layers.0.* was not measured for a decoding step"),
        ({"decode": 1.2}, {"shapes": [(256, 256)]}, r"a linear of 32 -> 32 .* was not measured .* within a factor of 2 .*Measure it with: surgery bench linear"),
        ({"prefill": 1.2, "tokens": 512}, {}, r"was not measured for a prompt of 512 tokens on X1"),
        ({"decode": 1.2, "device": "X2"}, {}, r"no times of 'X2', it has those of X1 \(bfloat16\)"),
        ({"decode": 1.2, "dtype": "float32"}, {}, r"no times of 'float32', it has those of X1 \(bfloat16\)"),
        ({"decode": 1.2}, {"rows": []}, "has no measured times of structured linears"),
        ({"decode": 1.2}, {"device": "G\x1b[2J"}, "device must be plain text"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_or_reached_is_refused(speed, changes, says, checkpoints, times):
    with pytest.raises(SurgeryError, match=says):
        planned(checkpoints("llama"), **BASE, speed={**speed, "measured": times(**changes)})


def test_the_best_ratio_that_is_named_is_reached(checkpoints, times):
    keys = {**BASE, "speed": {"decode": 100, "measured": times()}}
    with pytest.raises(SurgeryError, match=r"Set speed\.decode to") as refused:
        planned(checkpoints("llama"), **keys)
    best = float(str(refused.value).split("Set speed.decode to ")[1].split()[0])
    keys["speed"]["decode"] = best
    assert planned(checkpoints("llama"), **keys).time.ratio == best


def test_matrices_that_no_structure_makes_faster_stay_dense(checkpoints, times, tmp_path):
    """Attention is slower with any structure here: its matrices stay dense, and those of the MLP meet the target."""
    result = bench_result()
    for row in result["rows"]:
        size = row["sizes"]
        if row["op"] != "original" and (size["outputs"], size["inputs"]) in SHAPES[:2]:
            row["ms"] *= 20
    (tmp_path / "slow.json").write_text(json.dumps(result))
    plan = planned(checkpoints("llama"), **BASE, speed={"decode": 1.1, "measured": str(tmp_path / "slow.json")})
    for target in plan.replaced_targets():
        assert bool(target.options) == ("mlp" in target.name)
        assert target.preview is None or target.options


def test_several_structures_and_what_was_not_measured(checkpoints, times):
    """BTT has candidates at measured ranks below the multiple; structures without times are no candidates, and the plan
    says so.
    """
    keys = {
        **BASE,
        "structure": "auto",
        "candidates": ["btt", "low_rank", "kronecker"],
        "blocks": [2, 2],
        "round_ranks": 8,
    }
    plan = planned(checkpoints("llama"), **keys, speed={"decode": 1.2, "measured": times()})
    assert any(note.startswith("speed: kronecker left out of the candidates") for note in plan.notes)
    found = {(option.config.name, option.config.rank) for t in plan.replaced_targets() for option in t.options}
    assert ("btt", 4) in found and ("low_rank", 8) in found and ("low_rank", 4) not in found
    assert "kronecker" not in {config.name for t in plan.replaced_targets() for config in t.configs}


@pytest.mark.parametrize(
    "text, says",
    [
        ("speed: {decode: 1.2, device: X}\nkeep: 0.5", "keep has no effect beside it"),
        ("speed: {decode: 1.2, device: X}\nrules: [{match: mlp.up, rank: 3}]", "rank has no effect beside it"),
        ("speed: {decode: 1.2}", "name the device"),
        ("speed: {decode: 1.2, prefill: 2, device: X}", "either prefill or decode"),
        ("speed: {device: X}", "either prefill or decode"),
        ("speed: {decode: 1.0, device: X}", r"speed: write a ratio over 1 .* \(got"),
        ("speed: {decode: .nan, device: X}", r"speed: write a ratio over 1"),
        ("speed: {decode: 1.2, prompt: 5, device: X}", r"unknown key 'speed.prompt'"),
        ("speed: 1.4", r"speed: write a ratio over 1 .* \(got 1.4\)"),
    ],
)
def test_recipes_are_checked(text, says):
    with pytest.raises(SurgeryError, match=says):
        parse_recipe(text, "mine.yaml")


def test_the_included_times_of_a_gpu_are_found():
    table = find_table(SpeedRecipe(decode=1.2, device="nvidia h200"))
    assert table["device"] == "NVIDIA H200" and {row["op"] for row in table["rows"]} == {"btt", "low_rank"}
    assert load_recipe("fast-half").speed is None


def test_time_is_spent_where_it_lowers_the_error_most(checkpoints, times):
    """The targets that lose most are the ones that get time; every choice is within the target."""
    plan = planned(checkpoints("llama"), **BASE, speed={"decode": 1.25, "measured": times()})
    targets = plan.replaced_targets()
    loud = {target.name for target in targets if target.name.endswith("up_proj")}
    points = {
        t.name: [CostPoint(p.params, p.error * (100 if t.name in loud else 1)) for p in even_points(t)] for t in targets
    }
    choice = allocate_time(targets, points, plan.time)
    ranks = {name: 99 if config is None else config.rank for name, config in choice.items()}
    assert min(ranks[name] for name in loud) > max(rank for name, rank in ranks.items() if name.endswith("gate_proj"))
    plain = {name: config and config.to_dict() for name, config in choice.items()}
    assert time_after(plan, plain) * 1.25 <= time_before(plan)


def test_routed_experts_are_refused(checkpoints, times, tmp_path):
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
    }
    config |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SurgeryError, match="belongs to routed experts"):
        surgery.plan(tmp_path / "moe", {**BASE, "speed": {"decode": 1.2, "measured": times()}})


def test_a_report_shows_the_times_of_all_linears(checkpoints, times, tmp_path, monkeypatch):
    """Of a conversion without `speed` too, wherever its shapes were measured; a damaged entry gets no time."""
    convert(str(checkpoints("llama")), make_recipe(structure="low_rank", keep=0.5), tmp_path / "out")
    assert "all linears" not in str(surgery.inspect(tmp_path / "out")), "not measured"
    table = read_measured_times(Path(times(shapes=[*SHAPES, (96, 32)])))
    monkeypatch.setattr("surgery.publish.speed_notes.tables", lambda: [table])
    assert "predicted:" not in str(surgery.inspect(tmp_path / "out")), "a GPU's times are no use on a CPU"
    with monkeypatch.context() as gpu:
        gpu.setattr("surgery.core.device.choose_device", lambda name: torch.device("cuda"))
        assert "decoding step in a CUDA graph, X1 (bfloat16), predicted:" in str(surgery.inspect(tmp_path / "out"))
    page = write_page(str(tmp_path / "out"))
    assert "all linears of the model, decoding step in a CUDA graph, X1" in page.read_text()
    kinds = surgery.inspect(tmp_path / "out")["linears"]
    for damage in ({"structure": "btt"}, {"structure": "btt", "blocks": "sqrt"}, {"structure": "btt", "blocks": [0, 2]}, {"structure": "low_rank", "rank": "full"}, {"structure": "x"}):  # fmt: skip
        assert report_times({**kinds, "replaced": [{**kinds["replaced"][0], "structure": damage}]}) == []


def test_the_shapes_of_a_model_are_measured(checkpoints, tmp_path):
    """From the config alone; the file serves a plan of the model, and no other benchmark takes a model."""
    (tmp_path / "SRC").mkdir()
    (tmp_path / "SRC" / "config.json").write_text((checkpoints("llama") / "config.json").read_text())
    out = tmp_path / "linear.json"
    result = surgery.bench("linear", model=tmp_path / "SRC", out=out, device="cpu", only="dense,low rank")
    sizes = {(row["sizes"]["outputs"], row["sizes"]["inputs"]) for row in result["rows"]}
    assert sizes == {*SHAPES, (96, 32)} and result["sizes"] == "model"
    shown = surgery.plan(tmp_path / "SRC", "low-rank-half", measured=out, context=128)
    assert "before" in shown["linear_times"]["prefill"] and "before" in shown["linear_times"]["decode"]
    for kind, sizes in (("attention", None), ("linear", "small")):
        with pytest.raises(SurgeryError, match="Leave"):
            surgery.bench(kind, model=tmp_path / "SRC", sizes=sizes, device="cpu")


@pytest.mark.parametrize("better", ["uniform", "measured"])
def test_trials_run_with_each_contender_s_structures(better, checkpoints, calibration, times, tmp_path, monkeypatch):
    """Sequential trials decide where the quick one contradicts the error curves, as for parameters."""
    found = {
        name: HeldOutScore("nats per token", 2.0, 2.1 if name == better else 2.2, None, 10)
        for name in ("uniform", "measured")
    }
    monkeypatch.setattr(trial.QuickTrial, "run", lambda self: found)
    keys = {**BASE, "speed": {"decode": 1.2, "measured": times()}, "calibration": calibration("llama")}
    report = convert(str(checkpoints("llama")), make_recipe(**keys), tmp_path / "out", device="cpu")
    assert ("sequential trials" if better == "uniform" else "quick trials") in report["allocation"]["why"]
    assert report["speed"]["ratio"] >= 1.2


# -- the conversion ----------------------------------------------------------------------------------
@pytest.mark.parametrize("allocate", ["measured", "uniform"])
def test_a_conversion_meets_the_target(allocate, checkpoints, calibration, times, tmp_path):
    keys = {**BASE, "structure": "auto", "candidates": ["btt", "low_rank"], "blocks": [2, 2], "round_ranks": 8}
    keys |= {"allocate": allocate, "speed": {"decode": 1.2, "measured": times()}, "calibration": calibration("llama")}
    report = convert(str(checkpoints("llama")), make_recipe(**keys), tmp_path / "out", device="cpu")
    plan = planned(checkpoints("llama"), **{**keys, "calibration": None})
    stored = {module["name"]: module["structure"] for module in report["modules"]}
    options = {
        t.name: [{"structure": "dense"}, *(o.config.to_dict() for o in t.options)] for t in plan.replaced_targets()
    }
    assert all(stored[name] in mine for name, mine in options.items())
    assert time_after(plan, stored) * 1.2 <= time_before(plan)
    assert report["speed"]["after"] == time_after(plan, stored) / 1e6 and report["speed"]["ratio"] >= 1.2
    kept = report["allocation"]
    if allocate == "uniform":
        assert kept == {"kept": "uniform", "why": "recipe"}
    else:
        assert "tokens" in kept["why"] and kept["uniform"] and kept["measured"]
        assert kept["kept"] == min(("uniform", "measured"), key=lambda name: kept[name]["converted"])


def test_without_text_time_is_spent_evenly(checkpoints, times, tmp_path):
    keys = {**BASE, "speed": {"decode": 1.2, "measured": times()}}
    report = convert(str(checkpoints("llama")), make_recipe(**keys), tmp_path / "out", device="cpu")
    plan = planned(checkpoints("llama"), **keys)
    shown = {t.name: t.preview.to_dict() if t.preview else {"structure": "dense"} for t in plan.replaced_targets()}
    assert {m["name"]: m["structure"] for m in report["modules"]} == shown
    assert report["allocation"] == {"kept": "uniform", "why": "no calibration text"}


def test_killed_after_every_journal_line(checkpoints, calibration, times, tmp_path, monkeypatch):
    source, add = str(checkpoints("llama")), Journal.add
    keys = {**BASE, "speed": {"decode": 1.2, "measured": times()}}
    recipe = make_recipe(**keys, calibration=calibration("llama"))
    convert(source, recipe, tmp_path / "whole", device="cpu")
    for lines in (1, 2, 3, 5):

        def crash(self, step, *, lines=lines, **what):
            if len(self.entries) == lines:
                raise Crash
            add(self, step, **what)

        out = tmp_path / f"out-{lines}"
        monkeypatch.setattr(Journal, "add", crash)
        with pytest.raises(Crash):
            convert(source, recipe, out, device="cpu")
        monkeypatch.setattr(Journal, "add", add)
        convert(source, recipe, out, device="cpu", resume=True)
        assert bytes_of(out) == bytes_of(tmp_path / "whole"), lines


def test_other_times_are_not_resumed_with(checkpoints, calibration, times, tmp_path, monkeypatch):
    keys = {**BASE, "allocate": "uniform", "speed": {"decode": 1.2, "measured": times()}}
    recipe, add = make_recipe(**keys, calibration=calibration("llama")), Journal.add

    def crash(self, step, **what):
        if step == "budgets":
            raise Crash
        add(self, step, **what)

    monkeypatch.setattr(Journal, "add", crash)
    with pytest.raises(Crash):
        convert(str(checkpoints("llama")), recipe, tmp_path / "out", device="cpu")
    monkeypatch.undo()
    times(slowness={"low_rank": 1.2})
    with pytest.raises(SurgeryError, match="was begun with another measured times"):
        convert(str(checkpoints("llama")), recipe, tmp_path / "out", device="cpu", resume=True)
    assert partial_path(tmp_path / "out").is_dir()


def test_journal_entries_are_checked_against_the_plan(checkpoints, times):
    """Only options of the plan, of every target, with their parameters and within the target, are taken from a
    journal.
    """
    plan = planned(checkpoints("llama"), **BASE, speed={"decode": 1.2, "measured": times()})
    structures = {t.name: t.preview.to_dict() if t.preview else None for t in plan.replaced_targets()}
    budgets = {t.name: t.uniform_budget() for t in plan.replaced_targets()}
    entry = {"step": "budgets", "budgets": budgets, "allocation": {"kept": "uniform"}, "structures": structures}
    assert select_valid_entries([entry], plan) == [entry]
    name = next(name for name, structure in structures.items() if structure)
    broken = [
        {**entry, "structures": None},
        {**entry, "structures": dict.fromkeys(structures)},  # all dense: too slow
        {**entry, "structures": {**structures, name: {"structure": "low_rank", "rank": 5}}},
        {**entry, "structures": {**structures, name: {"structure": "low_rank", "rank": True}}},
        {**entry, "structures": {**structures, name: 7}},
        {**entry, "structures": {name: structures[name]}},
        {**entry, "budgets": {**budgets, name: 1.0}},
    ]
    assert select_valid_entries(broken, plan) == []
    plain = planned(checkpoints("llama"), structure="low_rank")
    assert select_valid_entries([entry], plain) == [], "a recipe without speed has no structures in its journal"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_several_processes_make_the_bytes_of_one(checkpoints, calibration, times, tmp_path, monkeypatch):
    monkeypatch.setattr(surgery.calibration.partition, "MIN_SHARD_TOKENS", 48)
    keys = {**BASE, "speed": {"decode": 1.2, "measured": times()}}
    recipe = make_recipe(**keys, calibration=calibration("llama"))

    def run(out):
        convert(str(checkpoints("llama")), recipe, out, device="cpu")

    run(tmp_path / "alone")
    assert run_processes(2, lambda rank: run(tmp_path / "shared")) == [0, 0]
    assert bytes_of(tmp_path / "shared") == bytes_of(tmp_path / "alone")


def test_a_live_model_gets_the_same_structures(checkpoints, calibration, times, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    keys = {**BASE, "speed": {"decode": 1.2, "measured": times()}}
    report = convert(str(checkpoints("llama")), make_recipe(**keys, calibration=calibration("llama")), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(checkpoints("llama"))
    model = surgery.apply(model, keys, calibration=[load_file(calibration("llama"))])
    assert model.surgery_report["speed"] == report["speed"]
    assert [m["structure"] for m in model.surgery_report["modules"]] == [m["structure"] for m in report["modules"]]
