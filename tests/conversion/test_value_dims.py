"""structure: value_dims, end to end: values and output projections of all heads with fewer dims."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import killing
from helpers.narrowed import check_densified, load
from helpers.small import make_recipe, model_outputs, relative, tiny_config, tiny_inputs
from safetensors.torch import load_file, save_file

import surgery
from surgery.conversion.convert import convert
from surgery.conversion.quantize_checkpoint import quantize
from surgery.core.errors import SurgeryError
from surgery.core.journal import Journal

RULES = [{"match": f"attention.{role}", "structure": "value_dims", "multiple": 2} for role in ("value", "output")]
QUICK = {"structure": "dense", "keep": 0.5, "allocate": "uniform", "sweeps": 1}
KINDS = ("llama", "qwen2", "qwen3", "olmo2", "bert")  # GQA, biases of values, norms of heads, of all heads, encoder


@pytest.fixture(scope="module")
def half(checkpoints, calibration, tmp_path_factory):
    """half(family) -> folder with half of the value dims, made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("values") / family
            convert(
                str(checkpoints(family)),
                make_recipe(**QUICK, rules=RULES, calibration=calibration(family)),
                made[family],
            )
        return made[family]

    return make


@pytest.mark.parametrize("family", KINDS)
def test_half_of_the_value_dims(family, half, checkpoints, tmp_path):
    report = surgery.inspect(half(family))
    assert report["checks"]["as_reported"] and len(report["modules"]) == 2
    assert all(r["params_after"] == r["macs_after"] == r["params_before"] // 2 for r in report["modules"])
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoints(family), half(family)))
    changed = {name.rpartition(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 4, "values and output projections of two layers"
    inputs = tiny_inputs(family, 3, seed=2)
    converted, original = load(half(family)), load(checkpoints(family))
    assert 0 < relative(model_outputs(converted, inputs), model_outputs(original, inputs)) < 0.7
    check_densified(half(family), checkpoints(family), inputs, tmp_path / "dense")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_all_value_dims_are_the_original(family, checkpoints, calibration, tmp_path):
    rules = [{**rule, "width": 8} for rule in RULES]
    convert(
        str(checkpoints(family)), make_recipe(**QUICK, rules=rules, calibration=calibration(family)), tmp_path / "out"
    )
    inputs = tiny_inputs(family, 3, seed=2)
    found, wanted = (model_outputs(load(folder), inputs) for folder in (tmp_path / "out", checkpoints(family)))
    assert relative(found, wanted) < 1e-4


def test_integers(half, tmp_path):
    quantize(str(half("llama")), tmp_path / "int8")
    inputs = tiny_inputs("llama", 3, seed=2)
    found, wanted = (model_outputs(load(folder), inputs) for folder in (tmp_path / "int8", half("llama")))
    assert 0 < relative(found, wanted) < 0.1


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_apply_equals_convert(family, half, checkpoints, calibration, tmp_path):
    model = surgery.apply(
        load(checkpoints(family)), {**QUICK, "rules": RULES}, calibration=load_file(calibration(family))
    )
    stored, inputs = load(half(family)), tiny_inputs(family, 2, seed=4)
    assert torch.equal(model_outputs(model, inputs), model_outputs(stored, inputs))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(model_outputs(load(tmp_path / "saved"), inputs), model_outputs(stored, inputs))


def test_killed_and_resumed_to_the_same_bytes(checkpoints, calibration, tmp_path):
    recipe = make_recipe(**QUICK, rules=RULES, calibration=calibration("qwen2"), tune={"model": 1})
    whole, *resumed = killing.convert_with_kills(
        lambda out, resume: convert(str(checkpoints("qwen2")), recipe, out, resume=resume), tmp_path, kills=1
    )
    assert resumed
    for out in resumed:
        for name in ("model.safetensors", "config.json"):
            assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("after", [1, 2])
def test_interrupted_after_a_layer_and_resumed_to_the_same_bytes(after, tmp_path, monkeypatch):
    """The layers above are fitted to the inputs that the finished one gives, in both runs computed alike."""
    torch.manual_seed(0)
    cls, config = tiny_config("llama")
    config.num_hidden_layers = 3
    cls(config).save_pretrained(tmp_path / "source")
    save_file(tiny_inputs("llama", 8), tmp_path / "inputs.safetensors")
    recipe = make_recipe(structure="dense", keep=0.6, rules=RULES, calibration=tmp_path / "inputs.safetensors")
    whole = convert(str(tmp_path / "source"), recipe, tmp_path / "whole")
    add = Journal.add

    def crash(self, step, **what):
        add(self, step, **what)
        if sum(entry["step"] == "piece" for entry in self.entries) == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Journal, "add", crash)
        convert(str(tmp_path / "source"), recipe, tmp_path / "resumed")
    resumed = convert(str(tmp_path / "source"), recipe, tmp_path / "resumed", resume=True)
    assert resumed["files"] == whole["files"] and resumed["held_out"] == whole["held_out"]


@pytest.mark.parametrize(
    ("family", "recipe", "message"),
    [
        ("gpt_neox", {"rules": RULES}, "no linear of the layer's self-attention computes its values alone"),
        ("t5", {"rules": RULES}, "T5 adds a learned position bias"),
        ("llama", {"rules": RULES[:1]}, "need the same settings"),
        (
            "llama",
            {"rules": [{"match": "mlp.up", "structure": "value_dims"}]},
            "Match attention.value and attention.output",
        ),
        ("llama", {"rules": [{**r, "multiple": 8} for r in RULES]}, "covers 4 of the 8 of a head. Raise keep to 1"),
        ("llama", {"rules": RULES, "attention": {"mixer": "mlr", "ranks": [4]}}, "layers.0 gets a mixer"),
        ("llama", {"rules": [{**r, "groups": 1} for r in RULES]}, "has no option 'groups'"),
        ("llama", {"structure": "auto", "candidates": ["value_dims"]}, "candidates: value_dims replaces"),
    ],
)
def test_refusals(family, recipe, message, checkpoints):
    with pytest.raises(SurgeryError, match=message):
        surgery.plan(str(checkpoints(family)), {**QUICK, **recipe})
