"""Window dropout: which softmax branches are off, when, and that training ends with all of them on."""

from __future__ import annotations

import pytest
import torch
from helpers.small_training import healing_recipe, read_losses

from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, MixerInputs
from surgery.mixers.base import AttentionShape
from surgery.mixers.linear_config import LinearAttention
from surgery.training.stages import STAGES
from surgery.training.stages.window_dropout import WindowDropout


def make_mixer(**options):
    torch.manual_seed(0)
    shape = AttentionShape(16, 2, 2, 8, 8, 8**-0.5)
    config = LinearAttention(mask="gates", window=4, sinks=1, **options)
    return MIXERS[config](config, shape).double()


def make_inputs():
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))  # noqa: E731
    return MixerInputs(draw(1, 2, 12, 8), draw(1, 2, 12, 8), draw(1, 2, 12, 8), draw(1, 12, 16))


@pytest.mark.parametrize("options", [{}, {"normalise": True, "features": "elu"}])
def test_a_branch_that_is_off_adds_nothing(options):
    mixer, inputs = make_mixer(**options).train(), make_inputs()
    whole = mixer(inputs)[0]
    mixer.near_switch = torch.zeros(())
    off = mixer(inputs)[0]
    mixer.near_switch.fill_(1)
    torch.testing.assert_close(mixer(inputs)[0], whole)
    mixer.near_switch.fill_(0)
    torch.testing.assert_close(mixer.eval()(inputs)[0], whole)
    with torch.no_grad():
        mixer.near_weight_H.zero_()
    torch.testing.assert_close(mixer(inputs)[0], off)
    assert not torch.allclose(off, whole)


def test_the_share_of_branches_that_are_off_falls_to_zero():
    dropout = WindowDropout(torch.nn.ModuleList(make_mixer() for _ in range(8)), 0.8, 200)
    off = [1 - sum(dropout.draw(step, 3)) / 8 for step in range(200)]
    first, last = sum(off[:50]) / 50, sum(off[150:]) / 50
    assert 0.6 < first < 0.8 and 0.0 < last < 0.2
    assert dropout.draw(7, 3) == dropout.draw(7, 3) and [dropout.draw(s, 3) for s in range(9)] != [
        dropout.draw(s, 4) for s in range(9)
    ]
    dropout.begin_step(0, 3)
    assert [float(m.near_switch) for m in dropout.mixers] == dropout.draw(0, 3)
    dropout.end()
    assert all(m.near_switch is None for m in dropout.mixers)


def test_a_student_without_such_mixers_is_refused():
    with pytest.raises(SurgeryError, match="window_dropout switches"):
        WindowDropout(torch.nn.Linear(2, 2), 0.5, 10)


def test_the_key_is_written_only_where_it_is_used():
    config_type = STAGES.config_type("distill")
    keys = {"kind": "distill", "tokens": 64, "rate": 1e-3}
    assert "window_dropout" not in config_type(**keys).model_dump()
    assert config_type(**keys, window_dropout=0.5).model_dump()["window_dropout"] == 0.5


@pytest.mark.slow
def test_training_with_it_repeats(texts, tmp_path):
    from helpers.small_training import TINY_CHECKPOINT

    from surgery.conversion.convert import convert
    from surgery.planning.recipe import load_recipe
    from surgery.training.finetune import finetune

    student = tmp_path / "student"
    changes = ["attention.start=copied", "attention.window=4", "attention.mask=gates", "attention.scores=kernel"]
    convert(str(TINY_CHECKPOINT), load_recipe("log-linear", changes), student, device="cpu")
    stage = {"kind": "distill", "trains": ["mixers"], "length": 16, "tokens": 256, "batch": 4, "rows": 2, "rate": 1e-3}

    def train(name, share):
        recipe = healing_recipe(texts, {**stage, "window_dropout": share})
        finetune(str(student), recipe, tmp_path / name, teacher=str(TINY_CHECKPOINT), track="none", device="cpu")
        return [loss for *_, loss in read_losses(tmp_path / name / "training")]

    plain, dropped = train("plain", 0.0), train("dropped", 1.0)
    assert dropped == train("again", 1.0) and dropped[0] > plain[0] + 0.1
