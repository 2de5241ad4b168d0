"""--track: TensorBoard itself if it is installed, the others through stubs of their packages."""

from __future__ import annotations

import json
import struct
import sys
import types

import pytest
from helpers.small_training import healing_recipe

from surgery.core.errors import SurgeryError
from surgery.training.finetune import finetune

pytestmark = pytest.mark.usefixtures("without_curves")

STAGE = {"kind": "lm", "trains": ["new"], "tokens": 1024}


def events(folder):
    """(tag, step, value) of every scalar that TensorBoard was told."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):  # length, its checksum, the event, its checksum
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            at += 16 + size
    return found


def test_tensorboard_has_what_the_log_has(btt, texts, tmp_path):
    pytest.importorskip("tensorboardX")
    finetune(str(btt), healing_recipe(texts, STAGE, evaluate=2), tmp_path / "out", track="tensorboard", device="cpu")
    training = tmp_path / "out" / "training"
    told = events(training / "tensorboard")
    lines = [json.loads(line) for line in (training / "log.jsonl").read_text().splitlines()]
    losses = {line["total_steps"]: line["loss"] for line in lines if "loss" in line}
    seen = {step: value for tag, step, value in told if tag == "lm/loss"}
    assert len(seen) == 4 and all(seen[step] == pytest.approx(losses[step], rel=1e-6) for step in losses)
    assert {tag for tag, *_ in told} >= {
        "lm/ce",
        "lm/rate",
        "lm/gradient_norm",
        "lm/tokens_per_second",
        "lm/validation",
    }


@pytest.fixture
def wandb(monkeypatch):
    """A package of that name that writes down its calls."""
    from accelerate import tracking
    from accelerate.utils import imports

    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step=None, **_: calls.append(("log", step, values)), finish=lambda: calls.append(("finish",))
    )
    fake = types.ModuleType("wandb")
    fake.init = lambda **told: calls.append(("init", told)) or run
    fake.config = types.SimpleNamespace(update=lambda values, **_: calls.append(("config", values)))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(imports, "is_wandb_available", lambda: True)
    monkeypatch.setattr(tracking, "_available_trackers", [tracking.LoggerType.WANDB])
    return fake, calls


def test_wandb_is_told_once_a_line(btt, texts, tmp_path, wandb):
    _, calls = wandb
    finetune(str(btt), healing_recipe(texts, STAGE), tmp_path / "out", track="wandb", device="cpu")
    kinds = [call[0] for call in calls]
    assert kinds[:2] == ["init", "config"] and kinds[-1] == "finish" and kinds.count("log") == 4
    assert calls[0][1]["name"] == "out" and calls[0][1]["project"] == "surgery"
    assert calls[1][1]["stage 1/kind"] == "lm"
    assert [call[1] for call in calls if call[0] == "log"] == [1, 2, 3, 4]


def test_a_tracker_that_does_not_start_says_what_to_do(btt, texts, tmp_path, wandb):
    fake, _ = wandb

    def refuses(**_):
        raise RuntimeError("api_key not configured (no-tty)")

    fake.init = refuses
    with pytest.raises(SurgeryError, match=r"--track wandb does not start: .*no-tty.*wandb login.*--track none"):
        finetune(str(btt), healing_recipe(texts, STAGE), tmp_path / "out", track="wandb", device="cpu")
    assert not list(tmp_path.iterdir()), "what is refused leaves nothing"


def test_a_missing_package_is_named(btt, texts, tmp_path, monkeypatch):
    from accelerate.utils import imports

    monkeypatch.setattr(imports, "is_trackio_available", lambda: False, raising=False)
    with pytest.raises(SurgeryError, match=r"the package trackio is not installed\. Run pip install trackio"):
        finetune(str(btt), healing_recipe(texts, STAGE), tmp_path / "out", track="trackio", device="cpu")
