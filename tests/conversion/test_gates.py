"""Hybrids by: gates: the blend, the penalty, what the gates find, resumption, streaming and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conversion.test_convert import bytes_of
from conversion.test_restored import local_copy, stories  # noqa: F401
from helpers.small import make_recipe, tiny_inputs
from safetensors.torch import save_file

from surgery.calibration.data import CalibrationSet
from surgery.checkpoint.outline import describe_checkpoint
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion import gates
from surgery.conversion.blended import BlendedAttention, gates_of
from surgery.conversion.convert import convert
from surgery.conversion.gates import GatedAttention, GateTraining, rows_with_copies
from surgery.core.errors import SurgeryError
from surgery.core.files import partial_path
from surgery.core.journal import Journal
from surgery.mixers import MIXERS, AttentionShape, MixerInputs, mixer_config
from surgery.mixers.softmax import Softmax
from surgery.planning.plan import make_plan
from surgery.publish.summary import inspect
from surgery.publish.tables import hybrid_lines

SHAPE = AttentionShape(dim=24, heads=6, groups=3, key=8, value=6, scaling=8**-0.5, rotary=8)
WINDOWED = {"mixer": "linear", "mask": "decay", "window": 16, "sinks": 2, "steps": 4}


def gated_recipe(stories, attention=WINDOWED, **hybrid):  # noqa: F811
    keys = {"by": "gates", "gate_steps": 12, **hybrid}
    return make_recipe(structure="dense", attention={**attention, "hybrid": keys}, calibration=stories)


# -- the blend -------------------------------------------------------------------------------------
@pytest.mark.parametrize("rope", ["keep", "drop"])
@torch.no_grad()
def test_gates_lie_between_the_mixer_and_softmax(rope):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    angle_1TR = torch.arange(9.0)[None, :, None] * torch.tensor([1.0, 0.3, 0.1, 0.03] * 2)
    inputs = MixerInputs(
        draw(2, 6, 9, 8), draw(2, 3, 9, 8), draw(2, 3, 9, 6), draw(2, 9, 24), rope=(angle_1TR.cos(), angle_1TR.sin())
    )
    config = mixer_config({"mixer": "linear", "rope": rope})
    mixer = MIXERS[config](config, SHAPE)
    blended = BlendedAttention(mixer, torch.tensor([0.0, 0.3, 1.0]))
    out, linear = blended(inputs)[0], mixer(inputs)[0]
    rotated = inputs
    if rope == "drop":
        from surgery.mixers.common.rope import rotate_inputs

        rotated = rotate_inputs(inputs, SHAPE, "test")
    softmax = MIXERS[Softmax()](Softmax(), SHAPE)(rotated)[0]
    for group, gate in enumerate((0.0, 0.3, 1.0)):
        own = slice(2 * group, 2 * group + 2)
        assert torch.allclose(out[:, own], gate * softmax[:, own] + (1 - gate) * linear[:, own], atol=1e-6)
    gated = GatedAttention(mixer, 1)
    assert gated.gates().tolist() == [0.5] * 3
    gated.fixed_G = gates_of([1], SHAPE, torch.device("cpu"))
    assert gated.gates().tolist() == [0, 1, 0]


def test_copies_are_made_in_rows_of_both_parts():
    ids = torch.arange(12 * 160).view(12, 160)
    samples = CalibrationSet({"input_ids": ids}, 8, 12)
    found, changed = rows_with_copies(samples, 0.5, seed=0)
    differs = (found.inputs["input_ids"] != ids).any(1)
    assert changed == 6 and differs.nonzero().flatten().tolist() == [0, 1, 2, 3, 8, 9]
    assert (found.n_fit, found.rows) == (8, 12)


# -- choices ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("of", ["layers", "heads"])
def test_the_same_choice_twice_after_an_interruption_and_streamed(of, checkpoints, calibration, tmp_path, monkeypatch):
    monkeypatch.setattr(gates, "SAVE_STEPS", 4)
    recipe, source = gated_recipe(calibration("llama"), keep=0.5, of=of), checkpoints("llama")
    told = convert(str(source), recipe, tmp_path / "whole")["hybrid"]
    units = 2 if of == "layers" else 4
    values = [(layer, i, g) for layer, own in told["gate_values"].items() for i, g in enumerate(own)]
    assert len(values) == units and len(told["gate_losses"]) == 3
    ranked = sorted(values, key=lambda v: -v[2])[: units // 2]
    if of == "layers":
        assert set(told["gates"]["softmax"]) == {layer for layer, _, _ in ranked}
    else:
        assert {(layer, h) for layer, own in told["gates"]["heads"].items() for h in own} == {
            (n, i) for n, i, _ in ranked
        }
    assert told[told["kept"]]["converted"] == min(told[name]["converted"] for name in ("gates", "every"))
    assert any(
        line.startswith("gates: model.layers.0: 0.")
        for line in hybrid_lines(inspect(str(tmp_path / "whole"))["hybrid"])
    )

    add = Journal.add

    def stop_after(step, count):
        seen = []

        def adding(self, name, **what):
            add(self, name, **what)
            seen.append(name)
            if seen.count(step) == count:
                raise KeyboardInterrupt

        monkeypatch.setattr(Journal, "add", adding)

    ran = []
    step = gates.GateRefinement.step
    monkeypatch.setattr(
        gates.GateRefinement, "step", lambda self, rows, rate: ran.append(rows) or step(self, rows, rate)
    )
    # The graph of a step is streamed from here on: the same numbers.
    monkeypatch.setattr(gates, "resident_bytes", lambda plan: 2**62)
    for name, count in (("gated", 2), ("gates", 1), ("gates", 1)):
        stop_after(name, count)
        resume = partial_path(tmp_path / "out").exists()
        with pytest.raises(KeyboardInterrupt):
            convert(str(source), recipe, tmp_path / "out", resume=resume)
    assert len(ran) == 8
    folder = partial_path(tmp_path / "out") / "gates"
    monkeypatch.setattr(Journal, "add", add)
    convert(str(source), recipe, tmp_path / "out", resume=True)
    assert len(ran) == 12 and not folder.exists()
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / "out")


def test_damaged_states_are_trained_anew(checkpoints, calibration, tmp_path, monkeypatch):
    monkeypatch.setattr(gates, "SAVE_STEPS", 4)
    recipe, source = gated_recipe(calibration("llama"), keep=0.5), checkpoints("llama")
    convert(str(source), recipe, tmp_path / "whole")
    add = Journal.add

    def adding(self, name, **what):
        add(self, name, **what)
        if name == "gates":
            raise KeyboardInterrupt

    for damaged in ("step-4.safetensors", "model.layers.1.safetensors"):
        monkeypatch.setattr(Journal, "add", adding)
        with pytest.raises(KeyboardInterrupt):
            convert(str(source), recipe, tmp_path / damaged)
        monkeypatch.setattr(Journal, "add", add)
        file = partial_path(tmp_path / damaged) / "gates" / damaged
        file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
        convert(str(source), recipe, tmp_path / damaged, resume=True)
        assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / damaged)


@pytest.mark.slow
def test_a_layer_that_is_local_already_gets_the_lowest_gate(stories, tmp_path, monkeypatch):  # noqa: F811
    """Layer 3 sees 8 tokens only, which the mixer's window of 16 does as well: only the penalty acts on its gate."""
    monkeypatch.setattr(gates, "MIXER_RATE", 1e-9)
    monkeypatch.setattr(gates, "GATE_RATE", 0.2)
    local_copy(tmp_path / "source", 3)
    recipe = gated_recipe(stories, {"mixer": "window", "window": 16}, keep=0.5, gate_steps=16)
    told = convert(str(tmp_path / "source"), recipe, tmp_path / "out")["hybrid"]
    values = {layer: own[0] for layer, own in told["gate_values"].items()}
    assert min(values, key=values.get) == "model.layers.3"


def test_the_expected_share_nears_keep(checkpoints, calibration, tmp_path, monkeypatch):
    monkeypatch.setattr(gates, "GATE_RATE", 0.3)
    shares, real = [], GateTraining._expected_share

    def recorded(self):
        shares.append(real(self))
        return shares[-1]

    monkeypatch.setattr(GateTraining, "_expected_share", recorded)
    recipe = gated_recipe(calibration("llama"), keep=0.25, of="heads", gate_steps=40)
    convert(str(checkpoints("llama")), recipe, tmp_path / "out")
    assert shares[0] == 0.5 and abs(shares[-1] - 0.25) < 0.1


@pytest.mark.parametrize("family", ["gemma2", "phi3", "gpt2", "bert", "vit"])
def test_families(family, checkpoints, calibration, tmp_path):
    """Windows and soft caps, fused and transposed projections, encoders without a head, images."""
    attention = {"mixer": "linear", "mask": "decay", "steps": 2}
    for of in ("layers", "heads"):
        hybrid = {"keep": 0.5, "by": "gates", "gate_steps": 3, "of": of}
        recipe = make_recipe(
            structure="dense", attention={**attention, "hybrid": hybrid}, calibration=calibration(family)
        )
        told = convert(str(checkpoints(family)), recipe, tmp_path / of)["hybrid"]
        assert 0 <= told["gates"]["converted"] < 1e30
    assert sum(map(len, told["heads"].values())) == sum(map(len, told["gate_values"].values())) // 2


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_nothing(side, checkpoints, tmp_path):
    ids_BT = tiny_inputs("llama", 6, 48)["input_ids"]
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[:, slice(42, None) if side == "right" else slice(6)] = 0
    told = []
    for filler in (3, 50):
        inputs = {"input_ids": ids_BT.masked_fill(mask_BT == 0, filler), "attention_mask": mask_BT}
        save_file(inputs, tmp_path / "inputs.safetensors")
        hybrid = {"keep": 0.5, "by": "gates", "gate_steps": 4, "of": "heads"}
        attention = {"mixer": "linear", "mask": "decay", "steps": 2, "hybrid": hybrid}
        recipe = make_recipe(structure="dense", attention=attention, calibration=tmp_path / "inputs.safetensors")
        told.append(convert(str(checkpoints("llama")), recipe, tmp_path / f"out{filler}")["hybrid"])
    for layer, own in told[0]["gate_values"].items():
        assert own == pytest.approx(told[1]["gate_values"][layer], rel=1e-3)


# -- recipes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "hybrid, said",
    [
        ({"keep": 0.5, "gate_steps": 5}, "gate_steps is an option of by: gates, and softmax is chosen by sensitivity"),
        ({"keep": 0.5, "by": "restored", "gate_steps": 5}, "chosen by restored"),
        ({"keep": 0.5, "by": "gates", "align_steps": 5}, "align_steps is an option of by: restored"),
        ({"keep": 0.5, "by": "every", "repeated": 0.1}, "by: restored or by: gates"),
        ({"keep": 0.5, "by": "gates", "gate_steps": 0}, "gate_steps"),
        ({"layers": [0], "by": "gates", "gate_steps": 5}, "chosen by layers"),
    ],
)
def test_options_that_do_not_apply_are_refused(hybrid, said):
    with pytest.raises(SurgeryError, match=said):
        make_recipe(structure="dense", attention={**WINDOWED, "hybrid": hybrid})


def test_gates_need_text_and_are_planned(checkpoints, tmp_path):
    recipe = make_recipe(structure="dense", attention={**WINDOWED, "hybrid": {"keep": 0.5, "by": "gates"}})
    plan = make_plan(describe_checkpoint(open_checkpoint(str(checkpoints("llama")))), recipe)
    assert "chosen on the calibration text by gates" in " ".join(plan.notes) and plan.measured_softmax_count == 1
    with pytest.raises(SurgeryError, match="by: gates is measured on calibration text"):
        convert(str(checkpoints("llama")), recipe, tmp_path / "out")


def test_interleaved_pairs_are_refused_before_the_conversion():
    config = mixer_config({"mixer": "linear", "rope": "drop"})
    with pytest.raises(SurgeryError, match="interleaved"):
        BlendedAttention(MIXERS[config](config, replace(SHAPE, interleaved=True)), torch.zeros(3))
