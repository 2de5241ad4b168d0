"""Trials of allocations: their statistics, their scores, and when the sequential trial decides."""

from __future__ import annotations

import pytest
import torch
from helpers.small import make_recipe, tiny_config, tiny_inputs
from safetensors.torch import save_file

from surgery.conversion import trial
from surgery.conversion.choices import allocation_lines
from surgery.conversion.convert import convert
from surgery.conversion.score import HeldOutScore


def conversion(family, checkpoints, tmp_path, padded=False, **keys):
    inputs = tiny_inputs(family, 8)
    if padded:
        mask = torch.ones(8, inputs["input_ids"].shape[1], dtype=torch.int64)
        mask[::2, 15:] = 0
        inputs["attention_mask"] = mask
    save_file(inputs, tmp_path / "inputs.safetensors")
    keys = {"holdout": 0.25, "allocate": "measured", **keys}
    recipe = make_recipe(structure="low_rank", calibration=tmp_path / "inputs.safetensors", **keys)
    return inputs, convert(str(checkpoints(family)), recipe, tmp_path / "out", device="cpu")


@pytest.mark.parametrize("family, padded", [("llama", False), ("bert", True), ("gpt2", False)])
def test_a_quick_trial_gathers_the_original_inputs(family, padded, checkpoints, tmp_path, monkeypatch):
    seen, fit = {}, trial.quick_fit

    def look(cut, configs, weight_OI, metric, sweeps):
        seen[cut.linear.path] = metric.c_II.double()
        return fit(cut, configs, weight_OI, metric, sweeps)

    monkeypatch.setattr(trial, "quick_fit", look)
    inputs, _ = conversion(family, checkpoints, tmp_path, padded, keep=0.6, damping=1e-6)
    rows = 6
    model = tiny_config(family)[0].from_pretrained(checkpoints(family), dtype=torch.float32).eval()
    found = {}
    for path in seen:
        hook = lambda _, args, path=path: found.update({path: args[0].detach().double()})  # noqa: E731
        model.get_submodule(path).register_forward_pre_hook(hook)
    with torch.no_grad():
        model(**{name: value[:rows] for name, value in inputs.items()})
    assert len(seen) >= 8
    for path, c_II in seen.items():
        x = found[path]
        x = x[inputs["attention_mask"][:rows].bool()] if padded else x.flatten(0, -2)
        expected = x.mT @ x / len(x)
        assert float((c_II - expected).norm() / expected.norm()) < 1e-4, path


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_a_quick_trial_is_an_independent_conversion(family, checkpoints, tmp_path):
    _, report = conversion(family, checkpoints, tmp_path, family == "bert", keep=0.5, calibrate="independent")
    found, expected = report["allocation"][report["allocation"]["kept"]], report["held_out"]
    assert "quick trials" in report["allocation"]["why"]
    assert found["original"] == pytest.approx(expected["original"], rel=1e-5)
    assert found["converted"] == pytest.approx(expected["converted"], rel=1e-4)


@pytest.mark.parametrize(
    "better, calibrate, kind",
    [
        ("uniform", "sequential", "sequential trials"),
        ("measured", "sequential", "quick trials"),
        ("uniform", "independent", "quick trials"),
    ],
)
@pytest.mark.parametrize("rise", [0.5, 0.001])
def test_sequential_trials_decide_where_the_quick_one_contradicts_the_survey(
    better, calibrate, kind, rise, checkpoints, tmp_path, monkeypatch
):
    """However small the rise of the loss is.

    Matrices that are fitted independently have no other trial than the quick one.
    """

    def run(self):
        return {
            name: HeldOutScore("nats per token", 2.0, 2.0 * (1 + (0.9 if name == better else 1.0) * rise), None, 10)
            for name in ("uniform", "measured")
        }

    monkeypatch.setattr(trial.QuickTrial, "run", run)
    _, report = conversion("llama", checkpoints, tmp_path, keep=0.5, calibrate=calibrate)
    allocation = report["allocation"]
    assert kind in allocation["why"]
    assert (allocation["measured"]["tokens"] == 10) == (kind == "quick trials")
    best = min(("uniform", "measured"), key=lambda name: allocation[name]["converted"])
    assert allocation["kept"] == best


def test_a_short_text_and_a_large_expected_gain_are_tried_as_all_are(checkpoints, tmp_path):
    _, report = conversion("llama", checkpoints, tmp_path, keep=0.5, holdout=0.75)
    assert "trials" in report["allocation"]["why"] and report["allocation"]["uniform"]["tokens"]


def test_the_kept_allocation_is_shown_with_its_reason():
    score = {"unit": "nats per token", "original": 1.0, "converted": 2.0, "difference_se": None, "tokens": 10}
    worse = {**score, "converted": 2.5}
    assert allocation_lines({"kept": "uniform", "why": "recipe"}) == []
    without_text = allocation_lines({"kept": "uniform", "why": "no calibration text"})  # whatever `allocate` asks for
    assert without_text == [
        "allocation of ranks: not measured, because there is no calibration text; kept: uniform (the same share of "
        "every matrix)"
    ]
    tried = allocation_lines({"kept": "uniform", "why": "held-out loss of trials", "uniform": score, "measured": worse})
    assert tried == [
        "allocation of ranks, held-out loss of trials: uniform 2.0000, measured 2.5000 nats per token; kept: uniform "
        "(the same share of every "
        "matrix)"
    ]
