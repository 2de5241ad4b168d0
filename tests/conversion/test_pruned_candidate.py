"""`pruned` among the candidates of `structure: auto`: a trial on held-out text chooses what becomes of the MLPs, and of
routed experts.
"""

from __future__ import annotations

import json

import pytest
import torch
from helpers import killing
from helpers.narrowed import load
from helpers.small import FAMILIES, make_recipe, model_outputs, relative, tiny_inputs
from helpers.small_experts import write_experts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import surgery
from surgery.calibration.sampling import sample_continuations
from surgery.conversion.choices import allocation_lines
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError
from surgery.planning.recipe import load_recipe

AUTO = {"structure": "auto", "candidates": ["pruned", "low_rank", "btt"], "multiple": 8, "keep": 0.5, "sweeps": 1}


@pytest.fixture
def idle_neurons(checkpoints, tmp_path):
    """A checkpoint whose MLPs have only half of their neurons in use, with weights of full rank."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints("llama"), dtype=torch.float32)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data *= 30  # so that the MLPs decide about the loss
        layer.mlp.down_proj.weight.data[:, 1::2] *= 1e-4
    model.save_pretrained(tmp_path / "idle")
    return tmp_path / "idle"


def structures(report: dict) -> set[str]:
    return {r["structure"]["structure"] for r in report["modules"] if any("mlp" in role for role in r["roles"])}


def make_low_rank(mlp) -> None:
    """Give an MLP linears of rank 4 with neurons far from linear, which are all in use and decide the loss."""
    for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        u, s, v = torch.linalg.svd(linear.weight.data, full_matrices=False)
        linear.weight.data = 10 * (u[:, :4] * s[:4]) @ v[:4]


def leave_experts_idle(model, transposed: bool = False) -> None:
    """Leave half of the neurons of every routed expert in use. transposed: down is stored as (E, F, D)."""
    for name, down in model.named_parameters():
        if name.endswith("experts.down_proj"):
            neurons = (down.data if transposed else down.data.mT) * 30
            neurons[:, 1::2] *= 1e-4
            down.data = neurons if transposed else neurons.mT


def write_own_text(model, folder) -> str:
    """Write rows that a model sampled, so that changes of the model raise the loss on them."""
    rows = sample_continuations(model.eval(), torch.arange(48)[:, None], 31, seed=0)
    save_file({"input_ids": rows}, folder / "own.safetensors")
    return str(folder / "own.safetensors")


@pytest.mark.parametrize("allocate", ["measured", "uniform"])
def test_pruned_mlps_are_kept_where_they_win(allocate, idle_neurons, calibration, tmp_path):
    recipe = {**AUTO, "allocate": allocate}
    report = surgery.convert(str(idle_neurons), recipe, tmp_path / "out", calibration=str(calibration("llama")))
    mlps = report["allocation"]["mlps"]
    assert mlps["kept"] == "pruned" and mlps["pruned"]["converted"] < mlps["linears"]["converted"]
    assert structures(report) <= {"pruned", "dense"} and report["totals"]["kept"] <= 0.5
    roles = {role for record in report["modules"] for role in record["roles"]}
    assert {"attention.query", "mlp.down"} <= roles, "the attention gets structures under the same budget"
    first, *_ = allocation_lines(report["allocation"])
    assert first.startswith("MLPs, held-out loss") and first.endswith("kept: pruned (fewer neurons)")
    without = {**recipe, "candidates": ["low_rank", "btt"]}
    other = surgery.convert(str(idle_neurons), without, tmp_path / "other", calibration=str(calibration("llama")))
    assert report["held_out"]["converted"] < other["held_out"]["converted"]
    inputs = tiny_inputs("llama", 3, seed=2)
    outputs = model_outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32), inputs)
    assert bool(outputs.isfinite().all())


def test_structured_linears_are_kept_where_they_win(checkpoints, tmp_path):
    """MLPs of low rank, whose neurons are all in use: the result is that of the recipe without the candidate."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints("llama"), dtype=torch.float32)
    for layer in model.model.layers:
        make_low_rank(layer.mlp)
    model.lm_head.weight.data *= 10
    model.save_pretrained(tmp_path / "low")
    own = write_own_text(model, tmp_path)
    for name, candidates in (("out", AUTO["candidates"]), ("other", ["low_rank", "btt"])):
        recipe = make_recipe(**{**AUTO, "candidates": candidates}, calibration=own)
        report = convert(str(tmp_path / "low"), recipe, tmp_path / name)
        assert report["allocation"].get("mlps", {}).get("kept") == {"out": "linears"}.get(name)
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "other"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("tune", [None, {"model": 1}])
def test_killed_and_resumed_to_the_same_bytes(tune, idle_neurons, calibration, tmp_path):
    recipe = make_recipe(**AUTO, calibration=calibration("llama"), tune=tune)
    whole, *resumed = killing.convert_with_kills(
        lambda out, resume: convert(str(idle_neurons), recipe, out, resume=resume), tmp_path, kills=2
    )
    report = json.loads((whole / "surgery_report.json").read_text())
    assert resumed and report["allocation"]["mlps"]["kept"] == "pruned" and "pruned" in structures(report)
    for out in resumed:
        for name in ("model.safetensors", "config.json"):
            assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_planned(family, checkpoints):
    """Families without an MLP that can be pruned are converted as without the candidate."""
    plan = surgery.plan(str(checkpoints(family)), AUTO)
    notes = [note for note in plan["notes"] if note.startswith("structure: auto tries")]
    without = surgery.plan(str(checkpoints(family)), {**AUTO, "candidates": ["low_rank", "btt"]})
    assert plan["targets"] == without["targets"] and plan["totals"] == without["totals"]
    pruned = surgery.plan(str(checkpoints(family)), {"structure": "pruned", "multiple": 8, "keep": 0.5})
    assert len(notes) == bool([row for row in pruned["rows"] if "pruned" in row["structure"]])


# -- routed experts ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_pruned_experts_are_kept_where_they_win(kind, tmp_path):
    """Experts of which half of the neurons are in use: all get one width, and the attention shares the budget."""
    source, model = tmp_path / "idle", load(write_experts(kind, tmp_path / "idle"))
    leave_experts_idle(model, transposed=kind == "gpt_oss")
    model.lm_head.weight.data *= 10
    model.save_pretrained(source)
    own = write_own_text(model, tmp_path)
    report = surgery.convert(str(source), {**AUTO, "multiple": 4}, tmp_path / "out", calibration=own)
    mlps = report["allocation"]["mlps"]
    assert mlps["kept"] == "pruned" and mlps["pruned"]["converted"] < mlps["linears"]["converted"]
    experts = [r["structure"] for r in report["modules"] if any("expert" in role for role in r["roles"])]
    assert {one["structure"] for one in experts} == {"pruned"} and len({one["width"] for one in experts}) == 1
    assert report["totals"]["kept"] <= 0.5
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["intermediate_size"] == experts[0]["width"]
    table = config.get("quantization_config", {"modules": {}})["modules"]
    assert not any(".experts." in path for path in table), "one width is in the family's own key"
    outputs = model_outputs(load(tmp_path / "out"), tiny_inputs("llama", 3, seed=2))
    assert bool(outputs.isfinite().all())


def test_mlps_and_experts_are_chosen_apart(tmp_path):
    """Idle neurons in the routed experts beside shared ones of low rank. A trial compares both with fewer neurons, either,
    and neither; the report and a line name the losses, and the report can be read.
    """
    model = load(write_experts("qwen2_moe", tmp_path / "source"))
    leave_experts_idle(model)
    for layer in model.model.layers:
        make_low_rank(layer.mlp.shared_expert)
    model.lm_head.weight.data *= 10
    model.save_pretrained(tmp_path / "source")
    recipe = {**AUTO, "multiple": 4, "allocate": "uniform"}
    own = write_own_text(model, tmp_path)
    report = surgery.convert(str(tmp_path / "source"), recipe, tmp_path / "out", calibration=own)
    mlps = report["allocation"]["mlps"]
    losses = {name: mlps[name]["converted"] for name in ("pruned", "pruned_mlps", "pruned_experts", "linears")}
    assert mlps["kept"] == "pruned_experts" and losses["pruned_experts"] == min(losses.values())
    kinds = {kind: set() for kind in ("expert", "mlp", "attention", "head")}
    for record in report["modules"]:
        kinds[record["roles"][0].partition(".")[0]].add(record["structure"]["structure"])
    assert kinds["expert"] == {"pruned"} and "pruned" not in kinds["mlp"]
    first, *_ = allocation_lines(report["allocation"])
    assert all(words in first for words in ("fewer neurons in MLPs", "fewer neurons in experts", "structured linears"))
    assert surgery.inspect(tmp_path / "out")["checks"]["as_reported"]


def test_experts_of_different_shares_are_not_compared(experts):
    rules = [{"match": "expert.*", "layers": "1:", "keep": 0.7}]
    plan = surgery.plan(str(experts("qwen2_moe")), {**AUTO, "multiple": 4, "rules": rules})
    assert any("tries 2 MLPs with fewer neurons" in note for note in plan["notes"])


def test_a_rule_for_one_linear_of_an_mlp_leaves_the_mlp_out(checkpoints):
    """All linears of an MLP need the same settings, and only those with structure: auto are compared."""
    for rule in ({"match": "mlp.down", "keep": 0.7}, {"match": "mlp.up", "structure": "dense"}):
        plan = surgery.plan(str(checkpoints("llama")), {**AUTO, "rules": [rule]})
        assert not any(note.startswith("structure: auto tries") for note in plan["notes"])
    rule = {"match": "mlp.*", "layers": "1:", "keep": 0.7}
    plan = surgery.plan(str(checkpoints("llama")), {**AUTO, "rules": [rule]})
    assert any("tries 2 MLPs" in note for note in plan["notes"])


def test_apply_equals_convert(idle_neurons, calibration, tmp_path):
    inputs = load_file(calibration("llama"))
    surgery.convert(str(idle_neurons), AUTO, tmp_path / "out", calibration=str(calibration("llama")))
    model = AutoModelForCausalLM.from_pretrained(idle_neurons, dtype=torch.float32)
    applied = surgery.apply(model, AUTO, calibration=inputs)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    probe = tiny_inputs("llama", 3, seed=2)
    assert relative(model_outputs(applied, probe), model_outputs(wanted, probe)) < 1e-5


def test_pruned_alone_is_no_candidate_for_one_linear():
    with pytest.raises(SurgeryError, match="candidates: pruned replaces the linears of an MLP together"):
        make_recipe(**{**AUTO, "candidates": ["pruned"]})


def test_the_recipe_tries_it():
    recipe = load_recipe("auto-half")
    assert recipe.tries_pruning and recipe.linear_candidates == ("low_rank", "pivoted_low_rank", "btt", "monarch")
