"""Refinement: new parameters trained on the calibration text, kept only where the held-out rows improve."""

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
from surgery.calibration.data import CalibrationSet
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion import convert as convert_module
from surgery.conversion import refine, refine_model
from surgery.conversion.convert import convert
from surgery.conversion.estimation.estimate import estimate_refinement, refinement_of_samples
from surgery.conversion.estimation.shape import TextRows, conversion_shape
from surgery.core.errors import SurgeryError
from surgery.core.files import partial_path
from surgery.core.journal import Journal
from surgery.core.progress import Progress
from surgery.planning import refine_budget
from surgery.planning.plan import make_plan
from surgery.planning.recipe import RefineRecipe
from surgery.planning.refine_budget import (
    BUDGET_SECONDS,
    BUDGET_THREADS,
    epoch_seconds,
    epochs_in_words,
    resolve_refine,
)
from surgery.structures import STRUCTURES
from surgery.structures.low_rank import LowRank

BASE = {"structure": "low_rank", "keep": 0.5, "allocate": "uniform", "sweeps": 1, "holdout": 0.25}
BOTH = {**BASE, "refine": {"layers": 2, "model": 2}}
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
    monkeypatch.setattr(refine, "TRIAL_STEPS", 4)
    monkeypatch.setattr(refine, "RATES", (3e-3, 3e-2))


def run(checkpoint, inputs, out, recipe, **options):
    return convert(str(checkpoint), make_recipe(**recipe, calibration=inputs), out, device="cpu", **options)


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


# -- what it does ----------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["gemma2", "vit", "bert"])
def test_every_kind_of_model_comes_closer_to_the_original(family, checkpoints, calibration, tmp_path):
    checkpoint, inputs = checkpoints(family), calibration(family)
    plain = run(checkpoint, inputs, tmp_path / "plain", BASE)
    report = run(checkpoint, inputs, tmp_path / "refined", BOTH)
    found = report["refine"]
    assert (found["layers"], found["model"]) == (2, 2) and found["by_layer"]
    records = [*found["by_layer"].values(), found["whole"]]
    assert all(r["end"] < r["start"] if r["rate"] else r["end"] == r["start"] for r in records)
    assert found["whole"]["rate"] > 0
    if report["held_out"]["unit"] == "relative output error":
        assert report["held_out"]["converted"] < plain["held_out"]["converted"]
    else:
        load, new = tiny_config(family)[0].from_pretrained, tiny_inputs(family, 8, seed=7)
        folders = (tmp_path / "plain", tmp_path / "refined", checkpoint)
        logits = [model_outputs(load(path), new).log_softmax(-1) for path in folders]
        divergences = [float((logits[2].exp() * (logits[2] - x)).sum()) for x in logits[:2]]
        assert divergences[1] < divergences[0]
    before, after = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "refined")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    source = tensors_of(checkpoint)
    cores = {name for name in before if name not in source or before[name].shape != source[name].shape}
    assert before.keys() == after.keys() and changed and changed <= cores, "nothing but the new parameters changes"
    assert report["totals"] == plain["totals"]


def test_a_replaced_head_and_fused_linears_are_refined_too(checkpoints, calibration, tmp_path):
    recipe = {**BOTH, "fused": "split", "rules": [{"match": "head", "keep": 0.5}], "refine": {"layers": 0, "model": 2}}
    for family, head in (("phi3", "lm_head"),):
        out = tmp_path / family
        plain = run(checkpoints(family), calibration(family), tmp_path / f"{family}-plain", {**recipe, "refine": False})
        report = run(checkpoints(family), calibration(family), out, recipe)
        assert report["refine"]["by_layer"] == {} and report["refine"]["whole"]["rate"] > 0
        before, after = tensors_of(tmp_path / f"{family}-plain"), tensors_of(out)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert any(name.startswith(head) for name in changed), changed
        assert plain["totals"] == report["totals"]


def test_mixers_are_refined(checkpoints, calibration, tmp_path):
    checkpoint, inputs = checkpoints("llama"), calibration("llama")
    run(checkpoint, inputs, tmp_path / "plain", MIXER)
    report = run(checkpoint, inputs, tmp_path / "refined", {**MIXER, "refine": {"layers": 2, "model": 2}})
    assert report["refine"]["whole"]["end"] < report["refine"]["whole"]["start"]
    before, after = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "refined")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(".mixer." in name for name in changed)


def test_a_refinement_that_does_not_help_changes_nothing(checkpoints, calibration, tmp_path, monkeypatch):
    monkeypatch.setattr(refine, "RATES", (1e4,))
    checkpoint, inputs = checkpoints("llama"), calibration("llama")
    plain = run(checkpoint, inputs, tmp_path / "plain", BASE)
    report = run(checkpoint, inputs, tmp_path / "refined", BOTH)
    records = [*report["refine"]["by_layer"].values(), report["refine"]["whole"]]
    assert all(r["rate"] == 0 and r["epoch"] == 0 and r["end"] == r["start"] for r in records)
    before, after = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "refined")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert report["held_out"]["converted"] == pytest.approx(plain["held_out"]["converted"], rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("slices", [1, 3])
def test_the_gradient_of_the_divergence_is_that_of_autograd(family, slices, checkpoints, monkeypatch):
    model = MetaModel(open_checkpoint(str(checkpoints(family)), False))
    plan = make_plan(model, make_recipe(**BASE))
    head = refine_model.ChunkedLMHead(model, plan.layout.head, plan.layout.architecture, torch.device("cpu"))
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
    loss, grad = refine_model.divergence_gradient(head, found, wanted)
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
    forward = refine_model._StreamedLayer.forward
    monkeypatch.setattr(refine_model._StreamedLayer, "forward", staticmethod(lambda *a: calls.append(1) or forward(*a)))
    run(checkpoint, inputs, tmp_path / "streamed", recipe)
    assert calls and bytes_of(tmp_path / "streamed") == bytes_of(tmp_path / "resident")


def test_killed_after_every_journal_line(checkpoints, calibration, tmp_path, monkeypatch):
    checkpoint, inputs = checkpoints("llama"), calibration("llama")
    recipe = {**BOTH, "refine": {"layers": 1, "model": 1}}
    run(checkpoint, inputs, tmp_path / "whole", recipe)
    whole, add = bytes_of(tmp_path / "whole"), Journal.add
    steps = []
    for lines in (3, 5, 6, 7):

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
        monkeypatch.setattr(refine, "TRIAL_STEPS", 4)
        monkeypatch.setattr(refine, "RATES", (3e-3, 3e-2))
        if lines == 6:  # a damaged file of a fitted layer
            (partial_path(out) / "fitted" / "model.layers.0.safetensors").write_bytes(b"damaged")
        run(checkpoint, inputs, out, recipe, resume=True)
        assert bytes_of(out) == whole, lines
    assert {"refine", "fitted", "piece"} <= set(steps)


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
    assert model.surgery_report["refine"]["whole"]["rate"] > 0


# -- refusals, and the time of `auto` --------------------------------------------------------------
def test_refusals(checkpoints, tmp_path):
    with pytest.raises(SurgeryError, match="refine trains on the calibration text, and there is none"):
        convert(str(checkpoints("llama")), make_recipe(**BOTH), tmp_path / "out", device="cpu")
    assert not list(tmp_path.iterdir())
    module = torch.nn.Sequential(torch.nn.Linear(32, 32))
    data = {"input": torch.randn(16, 32)}
    with pytest.raises(
        SurgeryError, match=r"refine needs the layers of a transformers model .got a Sequential.*refine=False"
    ):
        surgery.apply(module, BOTH, calibration=data)
    said = []
    surgery.apply(module, {**BASE, "refine": "auto"}, calibration=data, progress=Listener(said))
    assert module.surgery_report["recipe"]["refine"] is None
    assert any("no refinement: it needs the layers of a transformers model (got a Sequential)" in line for line in said)
    with pytest.raises(SurgeryError, match="refine: write auto, false, or epochs"):
        make_recipe(**BASE, refine=True)


def test_auto_fits_its_budget_and_is_told_by_the_plan(checkpoints, tmp_path):
    model = MetaModel(open_checkpoint(str(checkpoints("llama")), False))
    plan = make_plan(model, make_recipe(**BASE, refine="auto"))
    for tokens in (2**14, 2**26, 2**27, 2**28, 2**29, 2**40):
        for others in (0.0, 100.0):
            epochs, seconds = (
                resolve_refine(plan, tokens, "cpu", others),
                epoch_seconds(plan, tokens, "cpu", BUDGET_THREADS),
            )
            assert others + seconds.total(epochs) <= BUDGET_SECONDS["cpu"]
            one_more = others + seconds.total(epochs) + (1 + seconds.trials) * max(seconds.model, seconds.layers)
            assert (epochs.layers, epochs.model) == (20, 20) or one_more > BUDGET_SECONDS["cpu"]
    assert resolve_refine(plan, 2**14, "cpu", BUDGET_SECONDS["cpu"]) == RefineRecipe(layers=0, model=0)
    assert resolve_refine(make_plan(model, make_recipe(**BASE)), 2**14, "cpu", 0.0).model == 0
    told = surgery.plan(checkpoints("llama"), {**BASE, "refine": "auto"}, device="cpu")
    assert told["refine"]["layers"] == told["refine"]["model"] == 20 and told["refine"]["budget"] == 300
    assert told["refine"]["seconds"] + told["refine"]["other_seconds"] < 300
    assert "refine: 20 epochs of each layer and 20 epochs of the whole model" in told._repr_html_()
    assert "the budget of refine: auto is 5 minutes for the whole conversion on 2 threads" in told._repr_html_()


def test_epochs_of_auto_do_not_depend_on_threads_and_cores(checkpoints, monkeypatch):
    """The budget is set so that a count for one, two or eight threads would choose other epochs."""
    model, recipe = MetaModel(open_checkpoint(str(checkpoints("llama")), False)), make_recipe(**BASE, refine="auto")
    plan, rows, threads = make_plan(model, recipe), TextRows(3 * 2**14, 2**14, 64), torch.get_num_threads()
    shape = conversion_shape(model, plan, True)
    others = estimate_refinement(shape, rows, "cpu", 1).others
    epoch = epoch_seconds(plan, rows.tokens, "cpu", BUDGET_THREADS)
    monkeypatch.setitem(BUDGET_SECONDS, "cpu", others + (7.5 + epoch.trials) * epoch.model)
    found = {}
    try:
        for count in (1, 2, 8):
            torch.set_num_threads(count)
            monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
            monkeypatch.setenv("OMP_NUM_THREADS", str(count))
            samples = CalibrationSet({"input_ids": torch.zeros(1, 1).long().expand(2**16, 64)}, rows.fit, 2**16)
            found[count] = refinement_of_samples(model, plan, samples, "cpu")
    finally:
        torch.set_num_threads(threads)
    assert len({(each.epochs, each.others) for each in found.values()}) == 1
    assert found[1].epochs == RefineRecipe(layers=0, model=7)
    assert found[1].seconds == pytest.approx(8 * found[8].seconds) and found[8].where == "8 threads"
    assert "7 epochs of the whole model" in epochs_in_words(found[8].to_dict())


def test_auto_has_the_epochs_of_the_plan_and_of_a_live_model(checkpoints, calibration, tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM

    said, recipe = [], {**BASE, "refine": "auto"}
    monkeypatch.setattr(refine_budget, "MAX_EPOCHS", 1)
    checkpoint, inputs = checkpoints("llama"), calibration("llama")
    rows, length = load_file(inputs)["input_ids"].shape
    plan = surgery.plan(checkpoint, recipe, tokens=rows * length, length=length, device="cpu")["refine"]
    report = run(checkpoint, inputs, tmp_path / "out", recipe, progress=Listener(said))
    assert (plan["layers"], plan["model"]) == (report["refine"]["layers"], report["refine"]["model"]) == (1, 1)
    assert any("the budget of refine: auto is 5 minutes" in line for line in said)
    model = surgery.apply(LlamaForCausalLM.from_pretrained(checkpoint), recipe, calibration=load_file(inputs))
    state, written = model.state_dict(), tensors_of(tmp_path / "out")
    assert all(torch.equal(state[name], tensor) for name, tensor in written.items())


def test_steps_are_relative_to_the_size_of_a_core():
    """Also of cores below MIN_SCALE, which is for what starts at zero: biases, and matrices of zeros."""
    linear = STRUCTURES[LowRank](8, 6, LowRank(rank=2))
    for size, scale in ((1.0, 1.0), (1e-6, 1e-6), (0.0, refine.MIN_SCALE)):
        assert refine.step_scale(linear, "weight", torch.full((1, 6, 2), size)) == pytest.approx(scale)
    assert refine.step_scale(linear, "bias", torch.full((6,), 1e-6)) == refine.MIN_SCALE
    assert refine.step_scale(torch.nn.LayerNorm(6), "weight", torch.full((6,), 1e-6)) == refine.MIN_SCALE


def test_auto_refines_nothing_without_time_or_text(checkpoints, calibration, tmp_path, monkeypatch):
    said, checkpoint = [], checkpoints("llama")
    monkeypatch.setattr(refine_budget, "BUDGET_SECONDS", {"cpu": 1.0})
    report = run(
        checkpoint, calibration("llama"), tmp_path / "out", {**BASE, "refine": "auto"}, progress=Listener(said)
    )
    assert (report["refine"]["layers"], report["refine"]["model"], report["refine"]["whole"]) == (0, 0, None)
    assert any("refine: no epochs, because the other steps are estimated at" in line for line in said)
    free = convert(str(checkpoint), make_recipe(**BASE, refine="auto"), tmp_path / "free", device="cpu")
    assert free.get("refine") is None
    assert surgery.plan(checkpoint, {**BASE, "refine": "auto"}, calibrated=False)["refine"] is None
