"""Steps for which the memory of the device does not suffice: the run goes on from there with less."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.small_training import healing_recipe, read_losses

from surgery.core.errors import SurgeryError
from surgery.training.finetune import finetune
from surgery.training.memory import MemoryPlan
from surgery.training.stages.lm import LMStage

STAGE = {"kind": "lm", "trains": ["new"], "tokens": 1024, "rows": 4}


def test_plans_go_down_to_one_row_of_recomputed_activations():
    plans = [MemoryPlan(12)]
    while (plan := plans[-1].smaller(2048, can_recompute=True)) is not None:
        plans.append(plan)
    found = [(plan.rows, plan.recompute) for plan in plans]
    assert found == [(12, False), (6, False), (6, True), (3, True), (1, True)]
    assert MemoryPlan(2).smaller(64, can_recompute=False) == MemoryPlan(1)
    assert MemoryPlan(1).smaller(64, can_recompute=False) is None


@pytest.mark.parametrize(
    "stored", [None, {}, {"rows": 3, "recompute": True}, {"rows": True, "recompute": 1}, {"rows": 0}]
)
def test_a_stored_plan_that_does_not_divide_the_batch_is_not_used(stored):
    assert MemoryPlan.read(stored, 4, False) == MemoryPlan(4)


def fail_with(monkeypatch, most_rows, steps):
    """Let the loss of more than `most_rows` rows, or of a model that keeps activations, run out of memory from its
    `steps`-th call on."""
    plain, calls = LMStage.losses, []

    def losses(self, models, batch):
        calls.append(len(batch["input_ids"]))
        parts = plain(self, models, batch)
        kept = not models.student.is_gradient_checkpointing
        if len(calls) > steps and (len(batch["input_ids"]) > most_rows or kept):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return parts

    monkeypatch.setattr(LMStage, "losses", losses)
    return calls


def test_a_run_goes_on_with_less_from_the_step_that_did_not_fit(btt, texts, tmp_path, monkeypatch):
    finetune(str(btt), healing_recipe(texts, STAGE), tmp_path / "whole")
    calls = fail_with(monkeypatch, most_rows=2, steps=2)
    lines = []
    record = finetune(str(btt), healing_recipe(texts, STAGE), tmp_path / "less", show=lines.extend)
    assert calls[:6] == [4, 4, 4, 4, 2, 2]  # kept, then recomputed, then two rows a forward
    assert record["stages"][0]["memory"] == {"rows": 2, "recompute": True}
    losses = [torch.tensor([loss for *_, loss in read_losses(tmp_path / n / "training")]) for n in ("whole", "less")]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


def test_a_resumed_run_begins_with_the_plan_that_fitted(btt, texts, tmp_path, monkeypatch):
    from surgery.training import loop

    calls = fail_with(monkeypatch, most_rows=2, steps=0)
    step = loop.TrainingLoop._step

    def stopping(self, batch):
        if self.at.step == 3:
            raise KeyboardInterrupt
        step(self, batch)

    monkeypatch.setattr(loop.TrainingLoop, "_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        finetune(str(btt), healing_recipe(texts, STAGE), tmp_path / "out")
    (notes,) = list((tmp_path / "out.partial" / "checkpoints").glob("*2*/*.json"))[:1]
    assert json.loads(notes.read_text())["notes"]["memory"] == {"rows": 2, "recompute": True}
    monkeypatch.setattr(loop.TrainingLoop, "_step", step)
    calls.clear()
    finetune(str(btt), healing_recipe(texts, STAGE), tmp_path / "out", resume=True)
    assert set(calls) == {2}


def test_where_one_row_does_not_fit_the_error_says_what_to_set(btt, texts, tmp_path, monkeypatch):
    fail_with(monkeypatch, most_rows=0, steps=0)
    with pytest.raises(SurgeryError, match="does not hold a step with 1 row a forward and recomputed activations"):
        finetune(str(btt), healing_recipe(texts, STAGE), tmp_path / "out")
    with pytest.raises(SurgeryError, match=r"kept activations, and there is no smaller plan\. Set fewer rows"):
        finetune(str(btt), healing_recipe(texts, {**STAGE, "memory": "keep"}), tmp_path / "kept")
