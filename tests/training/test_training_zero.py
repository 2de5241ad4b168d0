"""DeepSpeed's ZeRO gives the losses of one process without it, also after a kill and with another number of
processes.
"""

from __future__ import annotations

import importlib.util
import os
import socket

import pytest
import torch
from helpers.forked import run_processes
from helpers.small_training import TINY_CHECKPOINT, read_losses

from surgery.core.errors import SurgeryError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install '.[deepspeed]'"
)
STAGES = [
    {"kind": "align", "trains": ["new"]},
    {"kind": "distill", "trains": ["new"], "ema": 0.9, "weight_norm": "cores"},
    {"kind": "lm", "trains": ["all"], "memory": "checkpoint"},
]


def make_recipe(texts, stages=STAGES, **keys):
    from surgery.training.recipe import parse_healing_recipe

    data = {"sources": [{"path": str(texts)}], "validation": 0.1, "validation_examples": 3}
    common = {"length": 48, "batch": 4, "rows": 1, "tokens": 384, "rate": 1e-4}
    base = {"precision": "float32", "log": 1, "checkpoint": 1, "data": data, "common": common}
    base |= {"evaluate": 0, "deliver": "last"}
    return parse_healing_recipe({**base, "stages": stages, **keys})


def enable_zero(stage):
    """In a child: DeepSpeed's ZeRO of that stage, as `accelerate launch` asks for it; 0: without."""
    if not stage:
        return
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)}
    if "LOCAL_RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")


def heal(btt, recipe, out, stage, count, dies_at=None, **options):
    """Exit codes of `count` processes; dies_at: (stage, step) at which they are gone."""
    from surgery.training.finetune import finetune
    from surgery.training.loop import TrainingLoop

    step = TrainingLoop._step

    def dying(self, taken):
        if (self.at.stage, self.at.step) == dies_at:
            os._exit(9)
        step(self, taken)

    def run(rank):
        enable_zero(stage)
        TrainingLoop._step = dying
        finetune(str(btt), recipe, out, teacher=str(TINY_CHECKPOINT), track="none", device="cpu", **options)

    return run_processes(count, run)


@pytest.fixture(scope="module")
def alone(btt, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "out"
    assert heal(btt, make_recipe(texts), out, 0, 1) == [0]
    return out


def same_losses(a, b):
    ours, theirs = (torch.tensor(read_losses(f / "training"), dtype=torch.float64) for f in (a, b))
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_are_one(alone, btt, texts, tmp_path, stage):
    from transformers import AutoModelForCausalLM

    assert heal(btt, make_recipe(texts), tmp_path / "out", stage, 2) == [0, 0]
    same_losses(tmp_path / "out", alone)
    ours, theirs = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (tmp_path / "out", alone))
    assert ours.keys() == theirs.keys()
    for name, t in theirs.items():  # stored in half precision: one unit in the last place
        torch.testing.assert_close(ours[name].float(), t.float(), rtol=8e-3, atol=1e-4)


@pytest.mark.parametrize(
    "first, then",
    [((3, 2), (0, 1)), ((0, 1), (2, 2)), ((2, 1), (3, 1))],
    ids=["zero3-to-one", "one-to-zero2", "2-to-3"],
)
def test_a_killed_run_goes_on_elsewhere(alone, btt, texts, tmp_path, first, then):
    """(ZeRO stage, processes) before the kill and after it; the optimiser and the running mean come along."""
    gone = heal(btt, make_recipe(texts), tmp_path / "out", *first, dies_at=(1, 1))
    assert all(gone) and not (tmp_path / "out").exists()
    assert not any(heal(btt, make_recipe(texts), tmp_path / "out", *then, resume=True))
    same_losses(tmp_path / "out", alone)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_bad_step_changes_nothing(btt, texts, tmp_path, monkeypatch, stage):
    from safetensors.torch import load_file

    from surgery.training.stages.lm import LMStage

    plain = LMStage.losses

    def poison_loss(self, models, batch):
        parts = plain(self, models, batch)
        bad = float("nan") if 9 in batch["index"].tolist() else 1.0
        return {**parts, "total": parts["total"] * bad}

    flat = {"kind": "lm", "trains": ["new"], "schedule": {"name": "constant", "warmup": 0}}
    two, three = (make_recipe(texts, [{**flat, "tokens": 192 * n}]) for n in (2, 3))
    assert heal(btt, two, tmp_path / "two", stage, 1) == [0]
    monkeypatch.setattr(LMStage, "losses", poison_loss)
    assert heal(btt, three, tmp_path / "three", stage, 1, skip_bad_steps=True) == [0]
    one, other = (load_file(tmp_path / f / "model.safetensors") for f in ("two", "three"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_bad_step_stops_with_a_sentence(btt, texts, tmp_path):
    from surgery.training.finetune import finetune
    from surgery.training.stages.lm import LMStage

    def run(rank):
        enable_zero(2)
        plain = LMStage.losses
        LMStage.losses = lambda self, models, batch: {"total": plain(self, models, batch)["total"] * float("inf")}
        with pytest.raises(SurgeryError, match="step 1: the loss or its gradient is NaN or infinite"):
            finetune(str(btt), make_recipe(texts, [{"kind": "lm"}]), tmp_path / "out", track="none", device="cpu")

    assert run_processes(1, run) == [0]


@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_of_the_engine_stays(tmp_path, stage):
    """After a stage the model is its own again, and what the optimiser held is handed back."""
    import gc
    import weakref
    from types import SimpleNamespace

    from torch import nn

    from surgery.training.distributed.accelerator import make_accelerator, prepare, unwrap_model

    def run(rank):
        enable_zero(stage)
        accelerator = make_accelerator("cpu", "float32", "none", tmp_path)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimiser = torch.optim.AdamW(model.parameters(), fused=True)
        config = SimpleNamespace(batch=2, rows=2, clip=1.0)
        engine, _ = prepare(accelerator, model, optimiser, [], config, "float32")
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(torch.ones(2, 8)).sum(), scale_wrt_gas=False)
        engine.step()
        held = [weakref.ref(engine), weakref.ref(engine.optimizer), weakref.ref(optimiser)]
        plain = unwrap_model(accelerator, engine)
        del engine, optimiser, _
        gc.collect()
        assert not any(ref() for ref in held)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())
        assert all(not hasattr(p, "ds_id") and p.numel() in (8, 64) for p in plain.parameters())
        plain(torch.ones(2, 8)).sum().backward()

    assert run_processes(1, run) == [0]
