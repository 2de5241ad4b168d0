"""Hybrids whose layers are chosen by measurements: the divergences that rank layers, the rows they are measured on, and
whole conversions.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from conversion.test_convert import bytes_of
from helpers.slow import slow_where
from helpers.small import choose_layers_quickly, make_recipe, tiny_config, tiny_inputs
from helpers.small_training import EMBEDDED, copy_first_layers
from safetensors.torch import save_file
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from surgery.calibration import lm_head
from surgery.calibration.data import CalibrationSet
from surgery.calibration.lm_head import ChunkedLMHead
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion import aligned, preflight, restored
from surgery.conversion.choices import hybrid_lines
from surgery.conversion.convert import convert
from surgery.conversion.restored import NEAR, DivergenceScorer, scored_rows
from surgery.core.errors import SurgeryError
from surgery.core.files import partial_path
from surgery.core.journal import Journal
from surgery.planning.plan import make_plan
from surgery.publish.summary import inspect


# -- divergences -----------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_divergences_are_those_of_the_whole_logits(family, tmp_path, monkeypatch):
    """The vocabulary comes in several slices, with the soft cap of Gemma 2."""
    torch.manual_seed(0)
    cls, config = tiny_config(family)
    config.vocab_size, config.pad_token_id = 600, 0
    model = cls(config)
    model.get_output_embeddings().weight.data.mul_(60)  # logits large enough that a lost maximum would overflow
    model.save_pretrained(tmp_path)
    meta_model = MetaModel(open_checkpoint(str(tmp_path)), False)
    layout = make_plan(meta_model, make_recipe(structure="low_rank")).layout
    monkeypatch.setattr(lm_head, "MAX_LOGITS", {"cpu": 1})
    monkeypatch.setattr(lm_head, "ROWS_PER_PASS", 5)
    head = ChunkedLMHead(meta_model, layout.head, layout.architecture, torch.device("cpu"))
    assert len(list(head.slices(7))) == 3
    hidden_ND, other_ND = torch.randn(2, 13, config.hidden_size) * 3
    weight_VD, bias = model.get_output_embeddings().weight.detach(), None
    p, q = (head.logits(x.double(), weight_VD.double(), bias).log_softmax(-1) for x in (hidden_ND, other_ND))
    wanted_N = kl_div(q, p, reduction="none", log_target=True).sum(-1)
    assert torch.allclose(head.divergences(hidden_ND, other_ND).double(), wanted_N, rtol=1e-4, atol=1e-4)
    assert head.divergences(hidden_ND, hidden_ND).max() < 1e-5


# -- scored rows -----------------------------------------------------------------------------------
@pytest.mark.parametrize("side", ["right", "left"])
def test_scored_rows_end_with_a_copy_from_far_back(side):
    ids_BT = torch.arange(12 * 160).view(12, 160)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[4:, slice(150, None) if side == "right" else slice(10)] = 0
    mask_BT[5, :100] = 0  # at most 60 real tokens: no room for a copy
    samples = CalibrationSet({"input_ids": ids_BT, "attention_mask": mask_BT}, 2, 12)
    scored, changed = scored_rows(samples, 0.5, seed=3)
    assert (scored.rows, scored.n_fit, changed) == (10, 0, 5) and samples.inputs["input_ids"] is ids_BT
    assert torch.equal(ids_BT, torch.arange(12 * 160).view(12, 160))
    found_BT, differs = scored.inputs["input_ids"], []
    for row, (before_T, after_T, real_T) in enumerate(zip(ids_BT[2:], found_BT, mask_BT[2:].bool())):
        assert torch.equal(before_T[~real_T], after_T[~real_T])
        before_N, after_N = before_T[real_T], after_T[real_T]
        if torch.equal(before_N, after_N):
            continue
        differs.append(row)
        count = (len(before_N) - NEAR.window) // 4
        start = int((before_N == after_N[-count]).nonzero())
        assert torch.equal(after_N[-count:], before_N[start : start + count])
        assert torch.equal(after_N[:-count], before_N[:-count])
        assert len(before_N) - count - start > NEAR.window
    assert differs == [0, 1, 2, 4, 5]
    assert torch.equal(scored_rows(samples, 0.5, seed=3)[0].inputs["input_ids"], found_BT)
    assert not torch.equal(scored_rows(samples, 0.5, seed=4)[0].inputs["input_ids"], found_BT)
    assert scored_rows(samples, 0.0, seed=3)[1] == 0 and scored_rows(samples, 1.0, seed=3)[1] == 9


def test_rows_without_token_ids_or_of_two_stacks_stay():
    images = CalibrationSet({"pixel_values": torch.randn(4, 3, 16, 16)}, 2, 4)
    assert scored_rows(images, 1.0, seed=0)[1] == 0
    pair = CalibrationSet({"input_ids": torch.arange(400).view(4, 100), "decoder_input_ids": torch.ones(4, 3)}, 2, 4)
    assert scored_rows(pair, 1.0, seed=0)[1] == 0


class Norms:
    """A head whose divergence of a token is the squared difference of the hidden states."""

    def divergences(self, hidden_ND, other_ND):
        return (hidden_ND - other_ND).square().sum(-1)


def test_weights_are_the_gap_and_a_score_is_a_weighted_mean():
    scorer = object.__new__(DivergenceScorer)
    scorer.head, scorer.unit, scorer.weight_BT = Norms(), "nats", None
    scorer.mask_BT = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    original_BTD, near_BTD, student_BTD = torch.randn(3, 2, 4, 5)
    even = scorer.score(original_BTD, student_BTD)
    real_BT = scorer.mask_BT.bool()
    found_N = (original_BTD - student_BTD).square().sum(-1)[real_BT].double()
    assert even.tokens == 7 and even.converted == pytest.approx(float(found_N.mean()))
    near_BTD[0, 3] = torch.nan  # padding
    assert scorer.weight_by_gap(original_BTD, near_BTD)
    gap_N = (original_BTD - near_BTD).square().sum(-1)[real_BT].double()
    assert float(scorer.weight_BT[real_BT].mean()) == pytest.approx(1) and float(scorer.weight_BT[0, 3]) == 0
    wanted = float((gap_N * found_N).sum() / gap_N.sum())
    assert scorer.score(original_BTD, student_BTD).converted == pytest.approx(wanted)
    student_BTD[1, 2, 0] = torch.nan
    overflowed = scorer.score(original_BTD, student_BTD)
    assert overflowed.converted <= 1e30 and json.loads(json.dumps(overflowed.to_dict())) == overflowed.to_dict()
    assert not scorer.weight_by_gap(original_BTD, original_BTD) and scorer.weight_BT is None


# -- conversions -----------------------------------------------------------------------------------
WINDOWED = {"mixer": "linear", "mask": "decay", "window": 16, "sinks": 2, "steps": 4}


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """Six rows of 160 tokens of the embedded checkpoint's calibration text, two of them held out."""
    file = tmp_path_factory.mktemp("stories") / "inputs.safetensors"
    text = (EMBEDDED / "calibration.txt").read_text(encoding="utf-8")[:8000]
    ids = AutoTokenizer.from_pretrained(EMBEDDED)(text)["input_ids"][: 6 * 160]
    save_file({"input_ids": torch.tensor(ids).view(6, 160)}, file)
    return file


def stories_recipe(stories, mixer=WINDOWED, **hybrid):
    attention = {**mixer, "hybrid": {"choose_by": "restored", **hybrid}}
    return make_recipe(structure="dense", attention=attention, calibration=stories)


@pytest.mark.slow
def test_the_same_choice_twice_and_after_an_interruption(stories, tmp_path, monkeypatch):
    monkeypatch.setattr(aligned, "ALIGN_STEPS", 2)
    recipe, source = stories_recipe(stories, softmax=0.6), tmp_path / "source"
    copy_first_layers(source, 3)
    report = convert(str(source), recipe, tmp_path / "whole")
    told = report["hybrid"]
    layers = [f"model.layers.{i}" for i in range(3)]
    assert len(told["order"]) == len(told["softmax"]) == len(told["rounds"]) == 2 and told["repeated_rows"] == 1
    assert sorted(told["measured"]["softmax"]) == sorted(told["order"]) and told["weights"] == "far"
    assert list(told["rounds"][0]) == layers and set(told["rounds"][1]) == {*layers} - {told["order"][0]}
    for chosen, scores in zip(told["order"], told["rounds"]):
        assert scores[chosen] == min(scores.values())
    assert told["measured"]["converted"] == told["rounds"][1][told["order"][1]] < told["aligned"]["converted"]
    assert told[told["kept"]]["converted"] == min(told[name]["converted"] for name in ("measured", "every"))
    assert all(errors["aligned"] < errors["start"] for errors in told["alignment"].values())
    shown = hybrid_lines(inspect(str(tmp_path / "whole"))["hybrid"])
    assert f"order in which layers got softmax back: {', '.join(told['order'])}" in shown and "no softmax " in shown[-1]
    assert shown[-1].endswith(f"softmax in {', '.join(told['softmax'])}")

    add, steps = Journal.add, []

    def stop_after(step, count):
        def adding(self, done, **what):
            add(self, done, **what)
            steps.append((done, what.get("piece", what.get("round"))))
            if [s for s, _ in steps].count(step) == count:
                raise KeyboardInterrupt

        monkeypatch.setattr(Journal, "add", adding)

    for step, count in (("aligned", 2), ("aligned", 3), ("restored", 1)):
        stop_after(step, count)
        resume = partial_path(tmp_path / "out").exists()
        with pytest.raises(KeyboardInterrupt):
            convert(str(source), recipe, tmp_path / "out", resume=resume)
        if count == 3:  # a damaged file is trained anew
            file = partial_path(tmp_path / "out") / "aligned" / "model.layers.1.safetensors"
            file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    stop_after("none", 1)
    convert(str(source), recipe, tmp_path / "out", resume=True)
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / "out")
    done = [what for name, what in steps if name == "aligned"]
    assert done == [*layers, layers[1]]
    assert [what for name, what in steps if name == "restored"] == [0, 1]


def local_copy(folder, layer):
    """The embedded checkpoint as a Qwen2, whose layer `layer` sees the last 8 tokens only."""
    llama = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps",
            "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id")  # fmt: skip
    kinds = ["sliding_attention" if i == layer else "full_attention" for i in range(6)]
    config = Qwen2Config(
        **{name: getattr(llama.config, name) for name in kept},
        rope_parameters=llama.config.rope_parameters,
        layer_types=kinds,
        use_sliding_window=True,
        sliding_window=8,
    )
    model = Qwen2ForCausalLM(config)
    state = {name: torch.zeros_like(t) for name, t in model.state_dict().items() if name.endswith("bias")}
    model.load_state_dict({**llama.state_dict(), **state})
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)


@pytest.mark.parametrize("weights", slow_where(lambda weights: weights == "even", ["far", "even"]))
def test_a_layer_that_is_local_already_is_restored_last(weights, stories, tmp_path, monkeypatch):
    """Layer 3 comes first in the whole model; once it sees 8 tokens only, the student's window of 16 does all it
    does.
    """
    monkeypatch.setattr(aligned, "ALIGN_STEPS", 0)
    if weights == "even":
        monkeypatch.setattr(restored, "MIN_GAP", 1e9)
    recipe = stories_recipe(stories, {"mixer": "window", "window": 16}, softmax=0.9)
    local_copy(tmp_path / "source", 3)
    told = convert(str(tmp_path / "source"), recipe, tmp_path / "out")["hybrid"]
    assert told["weights"] == weights and len(told["order"]) == 5 and "model.layers.3" not in told["order"]
    before = [told["aligned"]["converted"], *(scores[layer] for scores, layer in zip(told["rounds"], told["order"]))]
    assert [scores["model.layers.3"] for scores in told["rounds"]] == pytest.approx(before[:-1], rel=1e-4)
    assert before[-1] < 1e-5 < before[0]  # all other layers are restored: the original


@pytest.mark.parametrize("family", ["gemma2", "phi3", "bert", "vit"])
def test_families(family, checkpoints, calibration, tmp_path, monkeypatch):
    """Sliding windows and soft caps, fused projections, an output projection outside of the attention module,
    images.
    """
    choose_layers_quickly(monkeypatch)
    attention = {"mixer": "linear", "mask": "decay", "steps": 4, "hybrid": {"softmax": 0.5, "choose_by": "restored"}}
    recipe = make_recipe(structure="dense", attention=attention, calibration=calibration(family))
    told = convert(str(checkpoints(family)), recipe, tmp_path / "out")["hybrid"]
    assert told["weights"] == "far" and len(told["softmax"]) == 1
    assert 0 < told["measured"]["converted"] < told["aligned"]["converted"]
    assert all(errors["aligned"] < 1e30 for errors in told["alignment"].values())


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_nothing(side, tmp_path, monkeypatch):
    monkeypatch.setattr(aligned, "ALIGN_STEPS", 3)
    torch.manual_seed(0)
    cls, config = tiny_config("llama")
    config.max_position_embeddings = 256
    cls(config).save_pretrained(tmp_path / "source")
    ids_BT = tiny_inputs("llama", 6, 96)["input_ids"]
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[:, slice(90, None) if side == "right" else slice(6)] = 0
    hybrid = {"softmax": 0.5, "choose_by": "restored"}
    told = []
    for filler in (3, 50):
        inputs = {"input_ids": ids_BT.masked_fill(mask_BT == 0, filler), "attention_mask": mask_BT}
        save_file(inputs, tmp_path / "inputs.safetensors")
        recipe = make_recipe(
            structure="dense",
            attention={"mixer": "linear", "mask": "decay", "steps": 4, "hybrid": hybrid},
            calibration=tmp_path / "inputs.safetensors",
        )
        told.append(convert(str(tmp_path / "source"), recipe, tmp_path / f"out{filler}")["hybrid"])
    assert told[0]["rounds"][0] == pytest.approx(told[1]["rounds"][0], rel=1e-4)
    assert told[0]["alignment"]["model.layers.0"] == pytest.approx(told[1]["alignment"]["model.layers.0"], rel=1e-3)
    assert told[0]["repeated_rows"] == 1 and told[0]["measured"]["tokens"] == 2 * 90


# -- recipes ---------------------------------------------------------------------------------------
def test_windows_too_short_for_distant_context_are_refused(checkpoints, calibration, tmp_path):
    hybrid = {"softmax": 0.5, "choose_by": "measured"}
    recipe = make_recipe(structure="dense", attention={**WINDOWED, "hybrid": hybrid}, calibration=calibration("llama"))
    with pytest.raises(SurgeryError, match=r"have 24 tokens\. Set length above 68"):
        convert(str(checkpoints("llama")), recipe, tmp_path / "out")
    assert not partial_path(tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_the_aligned_layers_count_as_bytes_to_write(family, checkpoints, calibration, monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "size_text", str)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    choose_layers_quickly(monkeypatch)
    wanted = {}
    for choose_by in ("every", "measured", "restored"):
        hybrid = {"softmax": 0.5, "choose_by": choose_by}
        attention = {"mixer": "linear", "mask": "decay", "hybrid": hybrid}
        recipe = make_recipe(structure="dense", attention=attention, calibration=calibration(family))
        with pytest.raises(SurgeryError, match="writes up to") as error:
            convert(str(checkpoints(family)), recipe, tmp_path / "out")
        wanted[choose_by] = int(str(error.value).split("up to ")[1].split(".")[0])
    assert wanted["measured"] == wanted["every"]  # no layer is aligned
    assert wanted["restored"] - wanted["every"] == 4 * 2 * 4 * 32 * 32  # bytes x layers x projections
