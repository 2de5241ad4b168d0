"""Healing on a GPU: half precision, the loss scaler, bad steps, resuming, and how often the loop waits for the
device.
"""

from __future__ import annotations

import json
import os
import warnings

import pytest
import torch
from helpers.small_training import TINY_CHECKPOINT, healing_recipe, read_losses

from surgery.core.errors import SurgeryError
from surgery.training.distributed.step import OptimizerStep
from surgery.training.finetune import finetune
from surgery.training.loop import TrainingLoop
from surgery.training.stages.lm import LMStage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
STAGE = {"kind": "lm", "trains": ["new"], "tokens": 2048}


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(weights(a).values(), weights(b).values()))


def heal(model, texts, out, precision, *stages, **options):
    keys = options.pop("keys", {})
    told = healing_recipe(texts, *(stages or (STAGE,)), precision=precision, **keys)
    return finetune(str(model), told, out, device="cuda", track="none", **options)


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_every_precision_descends_as_the_cpu_does(btt, texts, tmp_path, precision):
    record = heal(btt, texts, tmp_path / "gpu", precision)
    assert record["precision"] == {"float32": "no"}.get(precision, precision)
    finetune(str(btt), healing_recipe(texts, STAGE), tmp_path / "cpu", device="cpu", track="none")
    ours, theirs = (torch.tensor([loss for *_, loss in read_losses(tmp_path / w / "training")]) for w in ("gpu", "cpu"))
    assert len(ours) == 8
    torch.testing.assert_close(ours, theirs, rtol={"float32": 2e-3, "bf16": 2e-2, "fp16": 5e-3}[precision], atol=0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["align", "hidden", "distill", "lm", "lora"])
def test_every_stage_runs(mixed, texts, tmp_path, kind, precision):
    stage = {"kind": kind, "tokens": 1024, **({} if kind == "lora" else {"trains": ["new"]})}
    record = heal(mixed, texts, tmp_path / "out", precision, stage, teacher=str(TINY_CHECKPOINT))
    assert record["stages"][0]["last_loss"] == record["stages"][0]["last_loss"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_goes_on_to_the_bit(btt, texts, tmp_path, precision, monkeypatch):
    """The scaler's state is in the checkpoint as well."""
    stage = {**STAGE, "ema": 0.9}
    heal(btt, texts, tmp_path / "whole", precision, stage)
    step = TrainingLoop._step

    def dying(self, taken):
        if self.at.step == 5:
            raise KeyboardInterrupt
        step(self, taken)

    monkeypatch.setattr(TrainingLoop, "_step", dying)
    with pytest.raises((KeyboardInterrupt, SurgeryError)):
        heal(btt, texts, tmp_path / "out", precision, stage)
    monkeypatch.setattr(TrainingLoop, "_step", step)
    heal(btt, texts, tmp_path / "out", precision, stage, resume=True)
    assert read_losses(tmp_path / "out" / "training") == read_losses(tmp_path / "whole" / "training")
    assert same(tmp_path / "out", tmp_path / "whole")


def poison(monkeypatch, example, factor):
    plain = LMStage.losses

    def poison_loss(self, models, batch):
        parts = plain(self, models, batch)
        hit = example in batch["index"].tolist()
        return {**parts, "total": parts["total"] * factor} if hit else parts

    monkeypatch.setattr(LMStage, "losses", poison_loss)


def test_a_bad_step_changes_nothing(btt, texts, tmp_path, monkeypatch):
    """The fused optimiser leaves it out by itself: nobody asks the device."""
    stage = {**STAGE, "schedule": {"name": "constant", "warmup": 0}}
    heal(btt, texts, tmp_path / "two", "bf16", {**stage, "tokens": 512})
    poison(monkeypatch, 9, float("nan"))
    heal(btt, texts, tmp_path / "three", "bf16", {**stage, "tokens": 768}, skip_bad_steps=True, keys={"log": 4})
    assert same(tmp_path / "two", tmp_path / "three")
    with pytest.raises(SurgeryError, match="step 3: the loss or its gradient is NaN or infinite"):
        heal(btt, texts, tmp_path / "out", "bf16", {**stage, "tokens": 768}, keys={"log": 4})


def test_a_scaler_lowers_its_scale_and_goes_on(btt, texts, tmp_path, monkeypatch):
    """A gradient beyond half precision's range is how it finds its scale: the step is left out, and no one stops."""
    stage = {**STAGE, "schedule": {"name": "constant", "warmup": 0}}
    heal(btt, texts, tmp_path / "two", "fp16", {**stage, "tokens": 512})
    seen = []
    clipped = OptimizerStep.clip_gradients

    def overflowing(self):
        if len(seen) == 2:
            for p in self.parameters.values():
                p.grad.fill_(float("inf"))
        seen.append(self.accelerator.scaler.get_scale())
        return clipped(self)

    monkeypatch.setattr(OptimizerStep, "clip_gradients", overflowing)
    record = heal(btt, texts, tmp_path / "four", "fp16", {**stage, "tokens": 1024})
    assert seen[3] == seen[2] / 2 and record["stages"][0]["steps"] == 4
    assert all(bool(torch.isfinite(t).all()) for t in weights(tmp_path / "four").values())


def test_the_loop_waits_for_the_device_only_when_it_looks(btt, texts, tmp_path, monkeypatch):
    """What transformers asks (whether rows are packed) is not ours."""
    step, waits = TrainingLoop._step, []

    def record_synchronizations(self, taken):
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step(self, taken)
        torch.cuda.set_sync_debug_mode("default")
        if self.at.step > 2:  # the first steps compile kernels
            waits.extend(f"{w.filename}:{w.lineno}" for w in said if "synchroniz" in str(w.message))

    monkeypatch.setattr(TrainingLoop, "_step", record_synchronizations)
    heal(btt, texts, tmp_path / "out", "bf16", keys={"log": 8})
    ours = [w for w in waits if f"{os.sep}surgery{os.sep}training{os.sep}" in w]
    assert not ours, sorted(set(ours))
    print(json.dumps(sorted(set(waits))))
