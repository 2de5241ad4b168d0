"""Tuning with `norms: true`: norms and biases of the original, trained beside the new parameters, under their own
names.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from conversion.test_convert import Crash, bytes_of
from conversion.test_tune import BASE, MIXER, run, tensors_of
from helpers.forked import run_processes
from helpers.slow import slow_where
from helpers.small import make_recipe, model_outputs, tiny_config, tiny_inputs
from helpers.small_experts import write_experts
from safetensors.torch import load_file, save_file

import surgery
import surgery.calibration.partition
from surgery.architectures.experts import split_experts
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion import convert as convert_module
from surgery.conversion import gradients, tune, tune_layer, tune_model
from surgery.conversion.densify import densify
from surgery.conversion.norms import layer_norms_and_biases, outer_norms, weight_offset
from surgery.conversion.quantize_checkpoint import quantize
from surgery.core.errors import SurgeryError
from surgery.core.journal import Journal
from surgery.planning.plan import make_plan

BOTH = {**BASE, "tune": {"layers": 1, "model": 2, "norms": True}}
LAYERS = {**BASE, "tune": {"layers": 1, "model": 0, "norms": True}}


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    monkeypatch.setattr(tune, "TRIAL_STEPS", 4)
    monkeypatch.setattr(tune, "RATES", (3e-3,))


@pytest.fixture
def every_epoch_helps(monkeypatch):
    """Make held-out losses fall with every call, for tests of what is trained: whether a real one falls depends on the
    processor's rounding.
    """
    calls = itertools.count()
    for kind in (tune_layer.LayerTuning, tune_model.ModelTuning):
        real = kind.held_out_loss
        monkeypatch.setattr(kind, "held_out_loss", lambda self, real=real: real(self) * 0 + 0.5 ** next(calls))


@pytest.fixture
def with_values(checkpoints, tmp_path):
    """Return a function that copies a tiny checkpoint with norms that are not 1 and biases that are not 0, in a
    dtype.
    """

    def build(family, dtype=torch.float32):
        folder = tmp_path / f"{family}-{dtype}"
        torch.manual_seed(3)
        model = tiny_config(family)[0].from_pretrained(checkpoints(family)).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        return folder

    return build


def changes(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


# -- what is trained -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "family, trained, left",
    [
        ("llama", {"input_layernorm.weight", "model.norm.weight"}, {"embed_tokens", "lm_head"}),
        ("qwen2", {"q_proj.bias", "k_proj.bias", "v_proj.bias", "model.norm.weight"}, {"embed_tokens"}),
        ("gemma3", {"q_norm.weight", "post_feedforward_layernorm.weight", "model.norm.weight"}, {"embed_tokens"}),
        ("gpt2", {"ln_1.bias", "ln_2.weight", "c_attn.bias", "c_proj.bias", "ln_f.bias"}, {"wte", "wpe"}),
        ("bert", {"LayerNorm.weight", "intermediate.dense.bias", "transform.LayerNorm.bias"}, {"embeddings", "decoder", "cls.predictions.bias"}),
        pytest.param("t5", {"encoder.final_layer_norm.weight", "layer.2.layer_norm.weight"}, {"shared", "relative_attention_bias"}, marks=pytest.mark.slow),
        ("vit", {"layernorm_before.bias", "vit.layernorm.weight"}, {"embeddings", "classifier"}),
    ],
)  # fmt: skip
def test_norms_and_biases_come_with_the_cores(
    family, trained, left, every_epoch_helps, with_values, calibration, tmp_path
):
    checkpoint = with_values(family)
    report = run(checkpoint, calibration(family), tmp_path / "tuned", BOTH)
    assert report["tune"]["norms"] and report["tune"]["whole"]["rate"] > 0
    source, tuned = tensors_of(checkpoint), tensors_of(tmp_path / "tuned")
    kept = {name: t for name, t in source.items() if name in tuned and t.shape == tuned[name].shape}
    assert {name: t.dtype for name, t in kept.items()} == {name: tuned[name].dtype for name in kept}
    assert all(name in kept for name, t in source.items() if t.dim() == 1)
    changed = changes(kept, tuned)
    for word in trained:
        assert any(word in name for name in changed), (word, changed)
    for word in left:
        assert not any(word in name for name in changed), (word, changed)
    assert all(source[name].dim() == 1 for name in changed)


@pytest.mark.parametrize("family, fused", [("qwen2", "whole"), ("gpt2", "split"), ("gpt_neox", "split")])
def test_the_files_have_the_loss_of_the_report(family, fused, every_epoch_helps, with_values, calibration, tmp_path):
    checkpoint, inputs = with_values(family), calibration(family)
    report = run(checkpoint, inputs, tmp_path / "tuned", {**BOTH, "fused": fused})
    assert report["tune"]["whole"]["rate"] > 0
    model = tiny_config(family)[0].from_pretrained(tmp_path / "tuned")
    held = load_file(inputs)["input_ids"][-report["calibration"]["held_out_windows"] :]
    losses = -model_outputs(model, {"input_ids": held})[:, :-1].log_softmax(-1).gather(2, held[:, 1:, None])
    assert float(losses.mean()) == pytest.approx(report["held_out"]["converted"], rel=1e-5)


@pytest.mark.parametrize("recipe", [BOTH, LAYERS])
def test_other_commands_take_the_trained_norms(recipe, every_epoch_helps, with_values, calibration, tmp_path):
    checkpoint, out = with_values("qwen2"), tmp_path / "tuned"
    run(checkpoint, calibration("qwen2"), out, recipe)
    densify(str(out), tmp_path / "dense")
    quantize(str(out), tmp_path / "int8", bits=8)
    load, new = tiny_config("qwen2")[0].from_pretrained, tiny_inputs("qwen2", 4, seed=7)
    wanted = model_outputs(load(out), new)
    torch.testing.assert_close(model_outputs(load(tmp_path / "dense"), new), wanted, rtol=1e-4, atol=1e-5)
    tuned = tensors_of(out)
    names = [name for name, tensor in tuned.items() if tensor.dim() == 1]
    assert changes({name: tensors_of(checkpoint)[name] for name in names}, tuned)
    for folder in ("dense", "int8"):
        assert not changes({name: tuned[name] for name in names}, tensors_of(tmp_path / folder))
    assert model_outputs(load(tmp_path / "int8"), new).isfinite().all()


def test_bfloat16_norms_are_stored_in_bfloat16(every_epoch_helps, with_values, calibration, tmp_path):
    checkpoint = with_values("llama", torch.bfloat16)
    run(checkpoint, calibration("llama"), tmp_path / "out", BOTH)
    source, tuned = tensors_of(checkpoint), tensors_of(tmp_path / "out")
    norms = {name: tensor for name, tensor in source.items() if tensor.dim() == 1}
    assert {tuned[name].dtype for name in norms} == {torch.bfloat16} and changes(norms, tuned)


def test_norms_of_a_layer_with_a_mixer_are_trained(with_values, calibration, tmp_path):
    checkpoint, inputs = with_values("qwen3"), calibration("qwen3")
    report = run(checkpoint, inputs, tmp_path / "out", {**MIXER, "tune": BOTH["tune"]})
    assert report["tune"]["whole"]["end"] < report["tune"]["whole"]["start"]
    source, tuned = tensors_of(checkpoint), tensors_of(tmp_path / "out")
    changed = {name for name in source if name in tuned and source[name].shape == tuned[name].shape}
    changed = {name for name in changed if not torch.equal(source[name], tuned[name])}
    assert any("q_norm" in name for name in changed) and all("norm" in name for name in changed)


def test_layers_without_new_parameters_keep_their_norms(every_epoch_helps, with_values, calibration, tmp_path):
    checkpoint = with_values("llama")
    run(checkpoint, calibration("llama"), tmp_path / "out", {**BOTH, "layers": "1:"})
    source, tuned = tensors_of(checkpoint), tensors_of(tmp_path / "out")
    assert changes({n: t for n, t in source.items() if "layers.0." in n}, tuned) == set()
    assert changes({n: t for n, t in source.items() if "layers.1.input" in n or n == "model.norm.weight"}, tuned)


def test_a_tuning_that_does_not_help_keeps_the_norms(with_values, calibration, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "RATES", (1e4,))
    checkpoint, inputs = with_values("gpt2"), calibration("gpt2")
    run(checkpoint, inputs, tmp_path / "plain", BASE)
    run(checkpoint, inputs, tmp_path / "tuned", BOTH)
    assert not changes(tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "tuned"))


def test_shared_tensors_are_not_trained(checkpoints):
    model = MetaModel(open_checkpoint(str(checkpoints("bert")), False))
    plan = make_plan(model, make_recipe(**BASE))
    assert not any("decoder" in name or name == "cls.predictions.bias" for name in outer_norms(model, plan.layout))
    layer = plan.layout.layers[0]
    name = next(name for name in layer_norms_and_biases(model, layer) if name.endswith("LayerNorm.weight"))
    model.tied = {"elsewhere.weight": name}
    assert name not in layer_norms_and_biases(model, layer)


@pytest.mark.parametrize("family, norm, offset", [("gemma2", "input_layernorm", 1), ("llama", "input_layernorm", 0), ("gemma3", "self_attn.q_norm", 1), ("gpt2", "ln_1", 0)])  # fmt: skip
def test_steps_of_a_norm_are_relative_to_what_it_multiplies_by(family, norm, offset, checkpoints):
    model = MetaModel(open_checkpoint(str(checkpoints(family)), False))
    layer = make_plan(model, make_recipe(**BASE)).layout.layers[0]
    assert weight_offset(model.module(f"{layer}.{norm}")) == offset
    assert weight_offset(torch.nn.Linear(3, 3)) == 0


@pytest.mark.parametrize(
    "kind, words",
    slow_where(
        lambda kind, _: kind == "gpt_oss",
        [("gpt_oss", ("experts.0.gate_proj.bias", "q_proj.bias")), ("qwen3_next", ("linear_attn.norm", "q_norm"))],
    ),
)
def test_layers_with_experts_in_memory_and_in_the_command(kind, words, every_epoch_helps, tmp_path):
    from transformers import AutoModelForCausalLM

    source, inputs = write_experts(kind, tmp_path / "source"), tmp_path / "inputs.safetensors"
    ids = torch.randint(3, 96, (24, 24), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": ids}, inputs)
    rules = [{"match": f"expert.{role}", "share": "experts"} for role in ("gate", "up")]
    recipe = {**BOTH, "curvature": "none", "rules": rules}
    report = run(source, inputs, tmp_path / "command", recipe)
    assert report["tune"]["whole"]["rate"] > 0
    model = surgery.apply(AutoModelForCausalLM.from_pretrained(source), recipe, calibration={"input_ids": ids})
    model.save_pretrained(tmp_path / "applied")
    one, other = tensors_of(tmp_path / "command"), tensors_of(tmp_path / "applied")
    assert one.keys() == other.keys() and not changes(one, other)
    before = AutoModelForCausalLM.from_pretrained(source)
    split_experts(before)
    originals = {name: tensor for name, tensor in before.state_dict().items() if tensor.dim() == 1}
    changed = changes(originals, one)
    assert all(any(word in name for name in changed) for word in words), changed
    assert not any(word in name for name in changed for word in ("A_log", "dt_bias", "sinks", "router"))


# -- the same bytes --------------------------------------------------------------------------------
@pytest.mark.parametrize("family", slow_where(lambda family: family == "t5", ["gpt2", "t5"]))
def test_a_streamed_step_computes_the_same_numbers(family, with_values, calibration, tmp_path, monkeypatch):
    checkpoint, inputs = with_values(family), calibration(family)
    run(checkpoint, inputs, tmp_path / "resident", BOTH)
    monkeypatch.setattr(convert_module, "resident_bytes", lambda plan: 2**60)
    calls = []
    forward = gradients._RecomputedLayer.forward
    monkeypatch.setattr(gradients._RecomputedLayer, "forward", staticmethod(lambda *a: calls.append(1) or forward(*a)))
    run(checkpoint, inputs, tmp_path / "streamed", BOTH)
    assert calls and bytes_of(tmp_path / "streamed") == bytes_of(tmp_path / "resident")


@pytest.mark.parametrize("epochs", [{"layers": 1, "model": 1}, {"layers": 1, "model": 0}])
def test_killed_after_every_journal_line(epochs, with_values, calibration, tmp_path, monkeypatch):
    checkpoint, inputs = with_values("qwen2"), calibration("qwen2")
    recipe = {**BASE, "tune": {**epochs, "norms": True}}
    run(checkpoint, inputs, tmp_path / "whole", recipe)
    whole, add = bytes_of(tmp_path / "whole"), Journal.add
    for lines in (3, 4, 6) if epochs["model"] else (3,):

        def crash(self, step, *, lines=lines, **what):
            if len(self.entries) == lines:
                raise Crash
            add(self, step, **what)

        out = tmp_path / f"out-{lines}"
        monkeypatch.setattr(Journal, "add", crash)
        with pytest.raises(Crash):
            run(checkpoint, inputs, out, recipe)
        monkeypatch.setattr(Journal, "add", add)
        run(checkpoint, inputs, out, recipe, resume=True)
        assert bytes_of(out) == whole, lines


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_several_processes_make_the_bytes_of_one(with_values, calibration, tmp_path, monkeypatch):
    monkeypatch.setattr(surgery.calibration.partition, "MIN_SHARD_TOKENS", 48)
    checkpoint, inputs = with_values("qwen2"), calibration("qwen2")
    run(checkpoint, inputs, tmp_path / "alone", BOTH)
    assert run_processes(2, lambda rank: run(checkpoint, inputs, tmp_path / "shared", BOTH)) == [0, 0]
    assert bytes_of(tmp_path / "shared") == bytes_of(tmp_path / "alone")


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_a_live_model_gets_the_tensors_of_the_command(family, with_values, calibration, tmp_path):
    checkpoint, inputs = with_values(family), calibration(family)
    run(checkpoint, inputs, tmp_path / "out", BOTH)
    live = tiny_config(family)[0].from_pretrained(checkpoint)
    model = surgery.apply(live, BOTH, calibration=load_file(inputs))
    state, written = model.state_dict(), tensors_of(tmp_path / "out")
    assert all(torch.equal(state[name], tensor) for name, tensor in written.items())


# -- recipes ---------------------------------------------------------------------------------------
def test_recipes_and_plans(checkpoints):
    with pytest.raises(SurgeryError, match=r"tune: write .* with norms: true or false .got .'norms': 3"):
        make_recipe(**BASE, tune={"norms": 3})
    told = surgery.plan(checkpoints("llama"), BOTH)
    assert told["tune"]["norms"] and "norms and biases too" in told._repr_html_()
    told = surgery.plan(checkpoints("llama"), {**BASE, "tune": {"layers": 2, "model": 2}})
    assert "norms" not in told["tune"] and "norms and biases" not in told._repr_html_()
