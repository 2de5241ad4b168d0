"""Trials of allocations: their statistics, their scores, and when the sequential trial decides."""

from __future__ import annotations

import pytest
import torch
from helpers.small import make_recipe, tiny_config, tiny_inputs
from safetensors.torch import save_file

from surgery.conversion import trial
from surgery.conversion import trial as budget
from surgery.conversion.convert import convert
from surgery.conversion.score import HeldOutScore
from surgery.publish.tables import allocation_lines

TOKENS_PER_INPUT = (
    6 * 24 / 64
)  # of the tiny models: windows to fit to, their tokens, and the inputs of the widest matrix


def conversion(family, checkpoints, tmp_path, padded=False, **keys):
    inputs = tiny_inputs(family, 8)
    if padded:
        mask = torch.ones(8, inputs["input_ids"].shape[1], dtype=torch.int64)
        mask[::2, 15:] = 0
        inputs["attention_mask"] = mask
    save_file(inputs, tmp_path / "inputs.safetensors")
    keys = {"holdout": 0.25, "allocate": "best", **keys}
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
    rows = round(6 * budget.TRIAL_SHARE)
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
def test_on_all_the_text_a_quick_trial_is_an_independent_conversion(family, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "TRIAL_SHARE", 1.0)
    _, report = conversion(family, checkpoints, tmp_path, family == "bert", keep=0.5, calibrate="independent")
    found, expected = report["allocation"][report["allocation"]["kept"]], report["held_out"]
    assert "quick trials" in report["allocation"]["why"]
    assert found["original"] == pytest.approx(expected["original"], rel=1e-5)
    assert found["converted"] == pytest.approx(expected["converted"], rel=1e-4)


@pytest.mark.parametrize("rise, kind", [(0.5, "sequential trials"), (0.001, "quick trials")])
def test_sequential_trials_decide_where_the_quick_one_contradicts_the_survey(
    rise, kind, checkpoints, tmp_path, monkeypatch
):
    def run(self):
        return {
            name: HeldOutScore("nats per token", 2.0, 2.0 * (1 + share * rise), None, 10)
            for name, share in (("uniform", 0.9), ("spread", 1.0))
        }

    monkeypatch.setattr(trial.QuickTrial, "run", run)
    _, report = conversion("llama", checkpoints, tmp_path, keep=0.5)
    allocation = report["allocation"]
    assert kind in allocation["why"]
    assert (allocation["spread"]["tokens"] == 10) == (kind == "quick trials")
    best = min(("uniform", "spread"), key=lambda name: allocation[name]["converted"])
    assert allocation["kept"] == best


def test_no_trial_where_the_expected_rise_is_certain(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(trial.QuickTrial, "run", lambda self: pytest.fail("a trial ran"))
    monkeypatch.setattr(trial, "CERTAIN_SHARE", 1.0)
    monkeypatch.setattr(trial, "CERTAIN_TOKENS", TOKENS_PER_INPUT)
    _, report = conversion("llama", checkpoints, tmp_path, keep=0.5, allocate="auto")
    allocation = report["allocation"]
    assert allocation["kept"] == "spread" and "no trial" in allocation["why"]
    assert 0 < allocation["expected"] <= 1


@pytest.mark.parametrize(
    "family, share, keys",
    [
        ("llama", 0.0, {}),
        ("llama", 1.0, {"curvature": "none"}),
        ("llama", 1.0, {"calibrate": "independent"}),
        ("llama", 1.0, {"keep": 0.45}),
        ("llama", 1.0, {"rules": [{"match": "mlp.up", "keep": 0.45}]}),
        ("llama", 1.0, {"holdout": 0.5}),
        ("llama", 1.0, {"rules": [{"match": "mlp.up", "structure": "monarch"}]}),
        ("bert", 1.0, {}),
    ],
    ids=[
        "small gain",
        "no curvature",
        "independent",
        "few parameters",
        "few of one role",
        "few tokens",
        "monarch",
        "no next token",
    ],
)
def test_a_trial_where_the_expected_rise_is_not_certain(family, share, keys, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "CERTAIN_SHARE", share)
    monkeypatch.setattr(trial, "CERTAIN_TOKENS", TOKENS_PER_INPUT)
    _, report = conversion(family, checkpoints, tmp_path, **{"keep": 0.5, "allocate": "auto", **keys})
    assert "trials" in report["allocation"]["why"] and report["allocation"]["uniform"]["tokens"]


def test_no_trial_where_the_text_is_short(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(trial.QuickTrial, "run", lambda self: pytest.fail("a trial ran"))
    _, report = conversion("llama", checkpoints, tmp_path, keep=0.5, holdout=0.75, allocate="auto")
    assert report["allocation"]["kept"] == "uniform" and "no trial" in report["allocation"]["why"]


@pytest.mark.parametrize(
    "losses, kept",
    [
        ({}, 0.0),
        ({0.5: 2.9}, 0.5),
        ({0.5: 2.9, 1.0: 2.8}, 1.0),
        ({0.5: 2.9, 1.0: 2.8, 1.5: 2.7}, 1.5),
        ({-0.5: 2.9, 0.5: 2.995}, -0.5),  # a step up that gains less than one percent of the rise does not count
    ],
)
def test_the_tilt_moves_as_long_as_the_loss_falls(losses, kept, checkpoints, tmp_path, monkeypatch):
    """The trials are made up: 3 nats at every tilt that is not in `losses`, of 2 originally."""
    budgets_of: dict[float, dict[str, int]] = {}
    allocated, tried = trial.tilted_budgets, []

    def allocate(plan, options, free, tilt):
        budgets_of[tilt] = allocated(plan, options, free, tilt)
        return budgets_of[tilt]

    def sequential(ctx, budgets, done):
        tried.append(list(budgets_of)[-1])
        return HeldOutScore("nats per token", 2.0, losses.get(tried[-1], 3.0), None, 10)

    monkeypatch.setattr(trial, "tilted_budgets", allocate)
    monkeypatch.setattr(trial, "sequential_trial", sequential)
    _, report = conversion("llama", checkpoints, tmp_path, keep=0.5, allocate="depth")
    allocation = report["allocation"]
    assert allocation["kept"] == "depth" and allocation["tilt"] == kept
    assert len(tried) == len(set(tried)) == len(allocation["tilts"])
    assert max(map(abs, tried)) <= trial.MAX_TILT
    stored = sum(record["params_after"] for record in report["modules"])
    assert stored <= 0.5 * sum(record["params_before"] for record in report["modules"])
    if kept > 0:  # the first of the two layers has more parameters, the last one less
        first = [sum(n for name, n in budgets_of[tilt].items() if ".layers.0." in name) for tilt in (0.0, kept)]
        assert first[0] < first[1]


def test_a_tilt_over_depth_is_found_by_conversions(checkpoints, tmp_path):
    _, report = conversion("llama", checkpoints, tmp_path, keep=0.5, allocate="depth", sweeps=1)
    allocation = report["allocation"]
    assert {"+0", "+0.5"} <= set(allocation["tilts"]) and allocation["tilt"] in (-1.5, -1, -0.5, 0, 0.5, 1, 1.5)
    least = min(score["converted"] for score in allocation["tilts"].values())
    kept = allocation["tilts"][f"{allocation['tilt']:+g}"]
    assert kept["converted"] <= least + trial.MIN_TILT_GAIN * max(kept["converted"] - kept["original"], 0.0)


def test_the_kept_allocation_is_shown_with_its_reason():
    """Reasons are read from a report, which may be a stranger's: brackets are no markup."""
    score = {"unit": "nats per token", "original": 1.0, "converted": 2.0, "difference_se": None, "tokens": 10}
    worse = {**score, "converted": 2.5}
    assert allocation_lines({"kept": "uniform", "why": "recipe"}) == []
    without_text = allocation_lines({"kept": "uniform", "why": "no calibration text"})  # whatever `allocate` asks for
    assert without_text == ["ranks chosen: the same share of every matrix (uniform); no calibration text"]
    tried = allocation_lines({"kept": "uniform", "why": "trials", "uniform": score, "spread": worse, "expected": 0.95})
    assert tried == [
        "ranks chosen: the same share of every matrix (uniform); trials: uniform 2.0000, spread 2.5000 nats per token"
    ]
    certain = allocation_lines({"kept": "spread", "why": "[bold]no trial", "expected": 0.25})
    assert certain == [
        "ranks chosen: more for matrices whose errors fall most with rank (spread); \\[bold]no trial; expected: 0.25"
    ]
    depth = {"kept": "depth", "why": "trials", "tilt": -0.5, "tilts": {"+0": worse, "-0.5": score}}
    shown = "ranks chosen: more in late layers (tilt -0.5); trials: +0 2.5000, -0.5 2.0000 nats per token"
    assert allocation_lines(depth) == [shown]
