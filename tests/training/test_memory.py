"""Activations in memory: what `memory: auto` chooses, and steps that run out of memory."""

from __future__ import annotations

import pytest
import torch
from helpers.small_training import LM, healing_recipe, read_losses, tensors

from surgery.core.errors import SurgeryError
from surgery.training.finetune import finetune
from surgery.training.loop import TrainingLoop
from surgery.training.memory import MemoryChoice, MemoryNeed, choose, read_choice, reduce_choice, split_rows
from surgery.training.stages.lm import LMStage

GB = 10**9
STAGE = {**LM, "batch": 8, "rows": 4, "tokens": 512}  # 4 steps of 2 forwards


# -- the choice --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("available", "expected"),
    [(40, ("keep", 8)), (20, ("keep", 4)), (8, ("checkpoint", 4)), (3, ("checkpoint", 1)), (1, ("checkpoint", 1))],
)
def test_the_fastest_choice_that_fits(available, expected):
    """Rows of 1,024 tokens: with fewer than 4 rows per forward recomputing is faster than keeping."""
    needs = {"keep": MemoryNeed(2 * GB, 4 * GB), "checkpoint": MemoryNeed(2 * GB, GB)}
    assert choose(needs.get, 8, 1024, available * GB) == MemoryChoice(*expected)


def test_a_stage_that_cannot_recompute_takes_fewer_rows():
    measured = []

    def measure(memory):
        measured.append(memory)
        return MemoryNeed(0, GB)

    assert choose(measure, 6, 512, 3 * GB, can_checkpoint=False) == MemoryChoice("keep", 3)
    assert measured == ["keep"]


def test_one_row_that_runs_out_is_recomputed():
    needs = {"keep": None, "checkpoint": MemoryNeed(GB, 0)}
    assert choose(needs.get, 1, 512, 2 * GB) == MemoryChoice("checkpoint", 1)


def test_less_memory_step_by_step():
    choice, seen = MemoryChoice("keep", 12), []
    while choice is not None:
        seen.append((choice.memory, choice.rows))
        choice = reduce_choice(choice, can_checkpoint=True)
    assert seen == [("keep", 12), ("checkpoint", 12), ("checkpoint", 6), ("checkpoint", 3), ("checkpoint", 1)]
    assert reduce_choice(MemoryChoice("keep", 1), can_checkpoint=False) is None


@pytest.mark.parametrize(
    "stored", [None, [], {"memory": "auto", "rows": 2}, {"memory": "keep", "rows": 3}, {"memory": "keep", "rows": True}]
)
def test_stored_choices_are_checked(stored):
    assert read_choice(stored, 4) is None
    assert read_choice({"memory": "checkpoint", "rows": 2}, 4) == MemoryChoice("checkpoint", 2)


def test_rows_are_divided_in_order():
    batch = {"input_ids": torch.arange(12).view(4, 3), "index": torch.arange(4)}
    parts = split_rows([batch, batch], 2)
    assert [part["index"].tolist() for part in parts] == [[0, 1], [2, 3]] * 2
    assert torch.equal(parts[1]["input_ids"], batch["input_ids"][2:])


# -- steps that run out ------------------------------------------------------------------------------
def run_out(monkeypatch, *forwards):
    """Let these forwards of `lm` stages run out of memory, counted from 0, after random numbers were drawn."""
    losses, count = LMStage.losses, iter(range(10**6))

    def limited(self, models, batch):
        if next(count) in forwards:
            torch.rand(3)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..")
        return losses(self, models, batch)

    monkeypatch.setattr(LMStage, "losses", limited)


def train(btt, texts, out, **keys):
    result = finetune(str(btt), healing_recipe(texts, {**STAGE, **keys}), out, device="cpu")
    return read_losses(out / "training"), tensors(out), result


@pytest.mark.slow
def test_a_step_that_runs_out_runs_again_with_less(btt, texts, tmp_path, monkeypatch, without_curves):
    """Step 1's second forward runs out once, then its first one: the run is that with these settings from step 1 on."""
    with monkeypatch.context() as patch:
        run_out(patch, 3, 4)
        losses, weights, result = train(btt, texts, tmp_path / "out")
    assert result["stages"][0]["memory"] == {"memory": "checkpoint", "rows": 2}

    run, chosen = TrainingLoop._step, []

    def from_step_1(self, step):
        if self.at.step == 1:
            self._use_choice(MemoryChoice("checkpoint", 2))
            chosen.append(self.optimizer_step.layout.accumulation_steps)
        run(self, step)

    monkeypatch.setattr(TrainingLoop, "_step", from_step_1)
    expected, theirs, _ = train(btt, texts, tmp_path / "expected")
    assert chosen == [4]
    assert losses == expected
    assert all(torch.equal(weights[name], tensor) for name, tensor in theirs.items())


@pytest.mark.slow
def test_the_data_is_the_same(btt, texts, tmp_path, monkeypatch, without_curves):
    """Fewer rows per forward change a run by rounding alone."""
    plain, weights, _ = train(btt, texts, tmp_path / "plain")
    run_out(monkeypatch, 0, 1)
    losses, ours, _ = train(btt, texts, tmp_path / "out")
    assert [loss for *_, loss in losses] == pytest.approx([loss for *_, loss in plain], rel=1e-5)
    for name, tensor in weights.items():
        assert torch.linalg.vector_norm(ours[name].float() - tensor.float()) < 1e-3 * torch.linalg.vector_norm(
            tensor.float()
        ), name


@pytest.mark.slow
def test_nothing_left_to_try(btt, texts, tmp_path, monkeypatch):
    run_out(monkeypatch, *range(2, 100))
    with pytest.raises(
        SurgeryError, match=r"memory ran out in step 2 \(activations are recomputed, 1 row per forward\)"
    ):
        train(btt, texts, tmp_path / "out")


def test_on_a_cpu_auto_keeps(btt, texts, tmp_path, without_curves):
    auto, weights, result = train(btt, texts, tmp_path / "auto", memory="auto")
    kept, theirs, _ = train(btt, texts, tmp_path / "keep", memory="keep")
    assert auto == kept and "memory" not in result["stages"][0]
    assert all(torch.equal(weights[name], tensor) for name, tensor in theirs.items())
