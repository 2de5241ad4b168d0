"""Tuning: new parameters trained on the calibration text, kept only where the held-out rows improve."""

from __future__ import annotations

import os

import pytest
import torch
from conversion.test_convert import Crash, bytes_of
from helpers.forked import run_processes
from helpers.small import make_recipe, model_outputs, tiny_config, tiny_inputs
from safetensors.torch import load_file

import surgery
import surgery.calibration.partition
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion import convert as convert_module
from surgery.conversion import gradients, tune, tune_model
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError
from surgery.core.files import partial_path
from surgery.core.journal import Journal
from surgery.core.progress import Progress
from surgery.planning.plan import make_plan
from surgery.structures import STRUCTURES
from surgery.structures.low_rank import LowRank

BASE = {"structure": "low_rank", "keep": 0.5, "allocate": "uniform", "sweeps": 1, "holdout": 0.25}
BOTH = {**BASE, "tune": {"layers": 2, "model": 2}}
MIXER = {
    **BASE,
    "structure": "dense",
    "curvature": "none",
    "attention": {"mixer": "linear", "mask": "gates", "features": "hedgehog", "steps": 1},
}


class Listener(Progress):
    """Keeps the messages of a conversion."""

    def __init__(self, said):
        self.said = said

    def say(self, text):
        self.said.append(text)


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    monkeypatch.setattr(tune, "TRIAL_STEPS", 4)
    monkeypatch.setattr(tune, "RATES", (3e-3, 3e-2))


def run(checkpoint, inputs, out, recipe, **options):
    return convert(str(checkpoint), make_recipe(**recipe, calibration=inputs), out, device="cpu", **options)


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


# -- what it does ----------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["gemma2", "vit", "bert"])
def test_every_kind_of_model_comes_closer_to_the_original(family, checkpoints, calibration, tmp_path):
    checkpoint, inputs = checkpoints(family), calibration(family)
    plain = run(checkpoint, inputs, tmp_path / "plain", BASE)
    report = run(checkpoint, inputs, tmp_path / "tuned", BOTH)
    steps = dict(report["time"]["seconds"])
    total = steps.pop("total")
    assert 0 < steps["tune"] < total
    assert sum(steps.values()) <= total + 0.01 * len(steps)  # no step counts in another one
    found = report["tune"]
    assert (found["layers"], found["model"]) == (2, 2) and found["by_layer"]
    records = [*found["by_layer"].values(), found["whole"]]
    assert all(r["end"] < r["start"] if r["rate"] else r["end"] == r["start"] for r in records)
    assert found["whole"]["rate"] > 0
    if report["held_out"]["unit"] == "relative output error":
        assert report["held_out"]["converted"] < plain["held_out"]["converted"]
    else:
        load, new = tiny_config(family)[0].from_pretrained, tiny_inputs(family, 8, seed=7)
        folders = (tmp_path / "plain", tmp_path / "tuned", checkpoint)
        logits = [model_outputs(load(path), new).log_softmax(-1) for path in folders]
        divergences = [float((logits[2].exp() * (logits[2] - x)).sum()) for x in logits[:2]]
        assert divergences[1] < divergences[0]
    before, after = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "tuned")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    source = tensors_of(checkpoint)
    cores = {name for name in before if name not in source or before[name].shape != source[name].shape}
    assert before.keys() == after.keys() and changed and changed <= cores, "nothing but the new parameters changes"
    assert report["totals"] == plain["totals"]


def test_a_replaced_head_and_fused_linears_are_tuned_too(checkpoints, calibration, tmp_path):
    recipe = {**BOTH, "fused": "split", "rules": [{"match": "head", "keep": 0.5}], "tune": {"layers": 0, "model": 2}}
    for family, head in (("phi3", "lm_head"),):
        out = tmp_path / family
        plain = run(checkpoints(family), calibration(family), tmp_path / f"{family}-plain", {**recipe, "tune": False})
        report = run(checkpoints(family), calibration(family), out, recipe)
        assert report["tune"]["by_layer"] == {} and report["tune"]["whole"]["rate"] > 0
        before, after = tensors_of(tmp_path / f"{family}-plain"), tensors_of(out)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert any(name.startswith(head) for name in changed), changed
        assert plain["totals"] == report["totals"]


def test_mixers_are_tuned(checkpoints, calibration, tmp_path):
    checkpoint, inputs = checkpoints("llama"), calibration("llama")
    run(checkpoint, inputs, tmp_path / "plain", MIXER)
    report = run(checkpoint, inputs, tmp_path / "tuned", {**MIXER, "tune": {"layers": 2, "model": 2}})
    assert report["tune"]["whole"]["end"] < report["tune"]["whole"]["start"]
    before, after = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "tuned")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(".mixer." in name for name in changed)


def test_a_tuning_that_does_not_help_changes_nothing(checkpoints, calibration, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "RATES", (1e4,))
    checkpoint, inputs = checkpoints("llama"), calibration("llama")
    plain = run(checkpoint, inputs, tmp_path / "plain", BASE)
    report = run(checkpoint, inputs, tmp_path / "tuned", BOTH)
    records = [*report["tune"]["by_layer"].values(), report["tune"]["whole"]]
    assert all(r["rate"] == 0 and r["epoch"] == 0 and r["end"] == r["start"] for r in records)
    before, after = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "tuned")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert report["held_out"]["converted"] == pytest.approx(plain["held_out"]["converted"], rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("slices", [1, 3])
def test_the_gradient_of_the_divergence_is_that_of_autograd(family, slices, checkpoints, monkeypatch):
    model = MetaModel(open_checkpoint(str(checkpoints(family)), False))
    plan = make_plan(model, make_recipe(**BASE))
    head = tune_model.ChunkedLMHead(model, plan.layout.head, plan.layout.architecture, torch.device("cpu"))
    assert (head.cap is not None) == (family == "gemma2")
    whole = next(head.slices(1))
    if slices > 1:
        parts = [(i, whole[1][i : i + 32], None) for i in range(0, 96, 32)]
        monkeypatch.setattr(head, "slices", lambda rows: iter(parts))
    generator = torch.Generator().manual_seed(0)
    found, wanted = (torch.randn(7, whole[1].shape[1], generator=generator) for _ in range(2))
    leaf = found.clone().requires_grad_(True)
    q, p = (head.logits(x, whole[1], None).log_softmax(-1) for x in (leaf, wanted))
    kl = torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)
    loss, grad = tune_model.divergence_gradient(head, found, wanted)
    assert loss == pytest.approx(float(kl.detach()), rel=1e-4)
    torch.testing.assert_close(grad, torch.autograd.grad(kl, leaf)[0], rtol=1e-3, atol=1e-4)


# -- the same bytes --------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["phi3", "t5"])
def test_a_streamed_step_computes_the_same_numbers(family, checkpoints, calibration, tmp_path, monkeypatch):
    checkpoint, inputs = checkpoints(family), calibration(family)
    recipe = {**BOTH, "rules": [{"match": "head", "keep": 0.5}]} if family == "phi3" else BOTH
    run(checkpoint, inputs, tmp_path / "resident", recipe)
    monkeypatch.setattr(convert_module, "resident_bytes", lambda plan: 2**60)
    calls = []
    forward = gradients._RecomputedLayer.forward
    monkeypatch.setattr(gradients._RecomputedLayer, "forward", staticmethod(lambda *a: calls.append(1) or forward(*a)))
    run(checkpoint, inputs, tmp_path / "streamed", recipe)
    assert calls and bytes_of(tmp_path / "streamed") == bytes_of(tmp_path / "resident")


def test_killed_after_every_journal_line(checkpoints, calibration, tmp_path, monkeypatch):
    checkpoint, inputs = checkpoints("llama"), calibration("llama")
    recipe = {**BOTH, "tune": {"layers": 1, "model": 1}}
    run(checkpoint, inputs, tmp_path / "whole", recipe)
    whole, add = bytes_of(tmp_path / "whole"), Journal.add
    steps = []
    for lines in (2, 4, 5, 6):

        def crash(self, step, *, lines=lines, **what):
            if len(self.entries) == lines:
                raise Crash
            add(self, step, **what)
            steps.append(step)

        out = tmp_path / f"out-{lines}"
        monkeypatch.setattr(Journal, "add", crash)
        with pytest.raises(Crash):
            run(checkpoint, inputs, out, recipe)
        monkeypatch.undo()
        monkeypatch.setattr(tune, "TRIAL_STEPS", 4)
        monkeypatch.setattr(tune, "RATES", (3e-3, 3e-2))
        if lines == 5:  # a damaged file of a fitted layer
            (partial_path(out) / "fitted" / "model.layers.0.safetensors").write_bytes(b"damaged")
        run(checkpoint, inputs, out, recipe, resume=True)
        assert bytes_of(out) == whole, lines
    assert {"fitted", "piece"} <= set(steps)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_several_processes_make_the_bytes_of_one(checkpoints, calibration, tmp_path, monkeypatch):
    monkeypatch.setattr(surgery.calibration.partition, "MIN_SHARD_TOKENS", 48)
    checkpoint, inputs = checkpoints("llama"), calibration("llama")
    run(checkpoint, inputs, tmp_path / "alone", BOTH)
    assert run_processes(2, lambda rank: run(checkpoint, inputs, tmp_path / "shared", BOTH)) == [0, 0]
    assert bytes_of(tmp_path / "shared") == bytes_of(tmp_path / "alone")


def test_a_live_model_gets_the_tensors_of_the_command(checkpoints, calibration, tmp_path):
    from transformers import LlamaForCausalLM

    checkpoint, inputs = checkpoints("llama"), calibration("llama")
    run(checkpoint, inputs, tmp_path / "out", BOTH)
    model = surgery.apply(LlamaForCausalLM.from_pretrained(checkpoint), BOTH, calibration=load_file(inputs))
    state, written = model.state_dict(), tensors_of(tmp_path / "out")
    assert all(torch.equal(state[name], tensor) for name, tensor in written.items())
    assert model.surgery_report["tune"]["whole"]["rate"] > 0


# -- what it needs, and its time -------------------------------------------------------------------
def test_without_text_nothing_is_tuned_and_a_warning_says_so(checkpoints, tmp_path):
    said = []
    report = convert(
        str(checkpoints("llama")), make_recipe(**BOTH), tmp_path / "out", device="cpu", progress=Listener(said)
    )
    assert report["tune"] is None and any("in the Frobenius norm and not tuned" in line for line in said)
    plain = convert(str(checkpoints("llama")), make_recipe(**BASE), tmp_path / "plain", device="cpu")
    before, after = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before) and plain["notes"] != report["notes"]
    said.clear()
    convert(
        str(checkpoints("llama")),
        make_recipe(**{**MIXER, "tune": {"model": 1}}),
        tmp_path / "mixers",
        progress=Listener(said),
    )
    assert any("no calibration text: nothing is tuned" in line for line in said)


def test_a_model_that_is_not_of_transformers_is_not_tuned_and_a_note_says_so():
    module, said = torch.nn.Sequential(torch.nn.Linear(32, 32)), []
    surgery.apply(module, BOTH, calibration={"input": torch.randn(16, 32)}, progress=Listener(said))
    assert module.surgery_report["recipe"]["tune"] is None
    assert any("tune needs the layers of a transformers model (got a Sequential)" in line for line in said)


def test_the_plan_says_what_is_tuned_and_how_long_it_takes(checkpoints):
    source = checkpoints("llama")
    told = surgery.plan(source, {**BASE, "tune": {"layers": 2, "model": 1}}, device="cpu")
    assert (told["tune"]["layers"], told["tune"]["model"]) == (2, 1)
    assert "tune: at most 2 epochs of each layer and 1 epoch of the whole model" in told._repr_html_()
    assert "tuning is estimated" not in told._repr_html_()
    more = surgery.plan(source, {**BASE, "tune": {"layers": 4, "model": 2}, "tokens": 2**32}, device="cpu")
    assert more["tune"]["seconds"] > 3600
    assert "--set tune=false leaves tuning out" in more._repr_html_()
    for off in (False, None, {}, {"layers": 0, "model": 0}):
        assert surgery.plan(source, {**BASE, "tune": off})["tune"] is None
    assert surgery.plan(source, {**BASE, "tune": {"model": 1}}, calibrated=False)["tune"] is None
    with pytest.raises(SurgeryError, match="tune: write false, or epochs"):
        make_recipe(**BASE, tune=True)


def test_a_conversion_has_the_epochs_of_a_shipped_recipe(checkpoints, calibration, tmp_path):
    """No clock and no estimate decides: `tune: {model: 20}` is 20 epochs, less where the held-out rows stop them."""
    from surgery.planning.recipe import load_recipe

    recipe = load_recipe("low-rank-half", [f"calibration={calibration('llama')}", "allocate=uniform", "sweeps=1"])
    report = convert(str(checkpoints("llama")), recipe, tmp_path / "out", device="cpu")
    assert (report["tune"]["layers"], report["tune"]["model"]) == (0, 20) and report["tune"]["whole"]["epochs"] == 20
    assert report["tune"]["whole"]["end"] < report["tune"]["whole"]["start"] and not report["tune"]["by_layer"]


def test_steps_are_relative_to_the_size_of_a_core():
    """Also of cores below MIN_SCALE, which is for what starts at zero: biases, and matrices of zeros."""
    linear = STRUCTURES[LowRank](8, 6, LowRank(rank=2))
    for size, scale in ((1.0, 1.0), (1e-6, 1e-6), (0.0, tune.MIN_SCALE)):
        assert tune.step_scale(linear, "weight", torch.full((1, 6, 2), size)) == pytest.approx(scale)
    assert tune.step_scale(linear, "bias", torch.full((6,), 1e-6)) == tune.MIN_SCALE
    assert tune.step_scale(torch.nn.LayerNorm(6), "weight", torch.full((6,), 1e-6)) == tune.MIN_SCALE
