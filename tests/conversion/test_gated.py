"""Hybrids whose layers are chosen by gradients: the gradient of the divergence, and whole conversions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conversion.test_convert import bytes_of
from conversion.test_restored import WINDOWED, local_copy
from helpers.small import choose_layers_quickly, make_recipe, tiny_config
from helpers.small_training import EMBEDDED, copy_first_layers
from safetensors.torch import save_file
from transformers import AutoTokenizer

from surgery.calibration import lm_head
from surgery.calibration.data import CalibrationSet
from surgery.calibration.lm_head import ChunkedLMHead
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion import convert as convert_module
from surgery.conversion import gated
from surgery.conversion.choices import hybrid_lines
from surgery.conversion.convert import convert
from surgery.conversion.gated import GatedChoice, rows_to_score
from surgery.conversion.restored import weight_tokens
from surgery.core.errors import SurgeryError
from surgery.planning.attention_recipe import HybridRecipe
from surgery.planning.plan import make_plan
from surgery.publish.summary import inspect


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """Six rows of 160 tokens of the embedded checkpoint's calibration text."""
    file = tmp_path_factory.mktemp("stories") / "inputs.safetensors"
    text = (EMBEDDED / "calibration.txt").read_text(encoding="utf-8")[:8000]
    ids = AutoTokenizer.from_pretrained(EMBEDDED)(text)["input_ids"][: 6 * 160]
    save_file({"input_ids": torch.tensor(ids).view(6, 160)}, file)
    return file


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gradients_of_divergences_are_autograds(family, tmp_path, monkeypatch):
    """The vocabulary comes in several slices, with the soft cap of Gemma 2."""
    torch.manual_seed(0)
    cls, config = tiny_config(family)
    config.vocab_size, config.pad_token_id = 600, 0
    model = cls(config)
    model.get_output_embeddings().weight.data.mul_(20)
    model.save_pretrained(tmp_path)
    meta_model = MetaModel(open_checkpoint(str(tmp_path)), False)
    layout = make_plan(meta_model, make_recipe(structure="low_rank")).layout
    monkeypatch.setattr(lm_head, "MAX_LOGITS", {"cpu": 1})
    monkeypatch.setattr(lm_head, "ROWS_PER_PASS", 5)
    head = ChunkedLMHead(meta_model, layout.head, layout.architecture, torch.device("cpu"))
    hidden_ND, other_ND = (torch.randn(2, 13, config.hidden_size) * 3).unbind()
    weight_VD, leaf_ND = model.get_output_embeddings().weight.detach().double(), other_ND.double().requires_grad_(True)
    p, q = (head.logits(x.double(), weight_VD, None).log_softmax(-1) for x in (hidden_ND, leaf_ND))
    (wanted_ND,) = torch.autograd.grad((p.exp() * (p - q)).sum(), leaf_ND)
    found_ND = head.divergence_gradient(hidden_ND, other_ND).double()
    assert (found_ND - wanted_ND).norm() < 1e-4 * wanted_ND.norm()


def context_of(source, recipe, out, monkeypatch):
    """Return the context of a conversion, which ends before the choice."""
    found = []

    def keep(self):
        found.append(self.ctx)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert_module.Conversion, "_resolve_attention", keep)
        with pytest.raises(KeyboardInterrupt):
            convert(str(source), recipe, out)
    return found[0]


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "bert", "vit"])
def test_gains_are_the_slopes_of_the_divergence(family, checkpoints, calibration, tmp_path, monkeypatch):
    """A difference quotient over the gate of one layer is the gradient's entry; with all gates at 0 the student is the
    one with windows.
    """
    choose_layers_quickly(monkeypatch)
    attention = {"mixer": "linear", "mask": "decay", "hybrid": {"softmax": 0.5}}
    recipe = make_recipe(structure="dense", attention=attention, calibration=calibration(family))
    ctx = context_of(checkpoints(family), recipe, tmp_path / "out", monkeypatch)
    choice = GatedChoice(ctx, recipe.attention.hybrid)
    _, final = weight_tokens(ctx, choice.scored, choice.scorer, choice.layers)
    score = lambda student_BTD: choice.scorer.score(final["original"], student_BTD).converted  # noqa: E731
    step, layer = 0.02, choice.layers[0]

    def divergence(gate):
        gate_pass = gated.GatePass(ctx, {**dict.fromkeys(choice.layers, 0.0), layer: gate})
        streams = gated.Streams(gate_pass.runner, choice.scored, {"student": gated.Stream(range(choice.scored.rows))})
        with torch.enable_grad():
            return score(streams.run_with_gradients(gate_pass).detach())

    assert divergence(0.0) == pytest.approx(score(final["near"]), rel=1e-3)
    gains = choice._gains("", [], final["original"])
    assert gains[layer] == pytest.approx((divergence(0.0) - divergence(step)) / step, rel=0.1, abs=1e-4)


@pytest.mark.slow
def test_the_same_choice_twice_and_its_report(stories, tmp_path):
    copy_first_layers(tmp_path / "source", 3)
    attention = {**WINDOWED, "hybrid": {"softmax": 0.6}}
    recipe = make_recipe(structure="dense", attention=attention, calibration=stories)
    told = convert(str(tmp_path / "source"), recipe, tmp_path / "whole")["hybrid"]
    layers = [f"model.layers.{i}" for i in range(3)]
    assert len(told["order"]) == len(told["softmax"]) == len(told["gains"]) == 2 and told["repeated_rows"] == 3
    assert list(told["gains"][0]) == layers and set(told["gains"][1]) == {*layers} - {told["order"][0]}
    for chosen, gains in zip(told["order"], told["gains"]):
        assert gains[chosen] == max(gains.values())
    assert told["weights"] == "far" and told["measured"]["converted"] < told["near"]["converted"]
    assert told[told["kept"]]["converted"] == min(told[name]["converted"] for name in ("measured", "every"))
    shown = hybrid_lines(inspect(str(tmp_path / "whole"))["hybrid"])
    assert f"order in which layers got softmax back: {', '.join(told['order'])}" in shown and "no softmax " in shown[-1]
    convert(str(tmp_path / "source"), recipe, tmp_path / "again")
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / "again")


@pytest.mark.slow
def test_a_layer_that_is_local_already_is_chosen_last(stories, tmp_path, monkeypatch):
    attention = {"mixer": "window", "window": 16, "hybrid": {"softmax": 0.9}}
    recipe = make_recipe(structure="dense", attention=attention, calibration=stories)
    local_copy(tmp_path / "source", 3)
    told = convert(str(tmp_path / "source"), recipe, tmp_path / "out")["hybrid"]
    assert len(told["order"]) == 5 and "model.layers.3" not in told["order"]
    assert [gains["model.layers.3"] for gains in told["gains"]] == pytest.approx([0.0] * 4, abs=1e-5)
    assert told["measured"]["converted"] < 1e-5 < told["near"]["converted"]  # the original


def test_scored_rows_are_spread_over_the_text():
    ids_BT = torch.arange(40)[:, None].expand(40, 1024).contiguous()
    samples = CalibrationSet({"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)}, 35, 40)
    scored = rows_to_score(samples)
    assert scored.inputs["input_ids"][:, 0].tolist() == [5, 15, 25, 35]
    assert (scored.n_fit, scored.rows, len(scored.mask())) == (0, 4, 4)
    few = rows_to_score(replace(samples, inputs={"input_ids": ids_BT[:, :8]}))
    assert few.rows == 40


def test_restored_chooses_layers_only():
    with pytest.raises(SurgeryError, match="choose_by: restored chooses whole layers"):
        HybridRecipe(softmax=0.5, choose_by="restored", unit="heads")
