"""Weights that no stage trains, held in bfloat16 where matrix products are bfloat16."""

from __future__ import annotations

import pytest
import torch
from helpers.forked import run_processes
from helpers.small_training import TINY_CHECKPOINT, healing_recipe, read_losses, tensors

from surgery.training import models
from surgery.training.finetune import finetune
from surgery.training.loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("without_curves")
SHORT = {"length": 32, "tokens": 256, "rate": 1e-3}
STAGES = [
    {"kind": "lm", "trains": ["mlp.down"], **SHORT},
    {"kind": "lora", "targets": ["attention.query"], **SHORT},
    {"kind": "lora", "targets": ["mlp.up"], "adapter": "keep", **SHORT},
]


def heal(texts, out, *stages, **options):
    told = healing_recipe(texts, *stages, precision="bf16", checkpoint=1)
    finetune(str(TINY_CHECKPOINT), told, out, device="cpu", track="none", **options)
    return read_losses(out / "training")


@pytest.mark.slow
def test_losses_and_weights_are_the_same_bit_for_bit(texts, tmp_path, monkeypatch):
    """Trained and merged weights, with an adapter that is kept, in a run that was interrupted."""
    hold, saved, step = models.hold_frozen_in_bfloat16, [], TrainingLoop._step

    def hold_and_count(student, *args):
        saved.append(hold(student, *args))
        return saved[-1]

    def die_in_the_last_stage(loop, batch):
        if (loop.at.stage, loop.at.step) == (2, 1):
            raise KeyboardInterrupt
        trained = loop.optimizer_step.parameters.values()
        assert {p.dtype for p in trained} == {torch.float32}
        step(loop, batch)

    monkeypatch.setattr(models, "hold_frozen_in_bfloat16", hold_and_count)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainingLoop, "_step", die_in_the_last_stage)
        heal(texts, tmp_path / "ours", *STAGES)
    ours = heal(texts, tmp_path / "ours", *STAGES, resume=True)
    assert len(saved) == 2 and saved[0] == saved[1] > 2e5
    monkeypatch.setattr(models, "hold_frozen_in_bfloat16", lambda *args: 0)
    assert ours == heal(texts, tmp_path / "theirs", *STAGES)
    ours, theirs = tensors(tmp_path / "ours"), tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for is_adapter, name in ours:  # PEFT draws a kept adapter's first values in the dtype of the weight below it
        one, other = ours[is_adapter, name], theirs[is_adapter, name]
        torch.testing.assert_close(
            one, other, **({"rtol": 2**-7, "atol": 1e-5} if is_adapter else {"rtol": 0, "atol": 0})
        )


def test_only_weights_that_the_files_have_in_bfloat16_are_held_so(monkeypatch):
    source = models.open_trainable(str(TINY_CHECKPOINT))
    student = models.load_student(source)
    before = {name: p.clone() for name, p in student.named_parameters()}
    changed = {name for name in before if name.endswith("mlp.down_proj.weight")}
    other = next(name for name in before if name.endswith("mlp.up_proj.weight"))
    stored = {name: source.tensors[name] for name in before if name != other}
    ids = torch.arange(8)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = student(ids).logits
        saved = models.hold_frozen_in_bfloat16(student, stored, changed)
        assert torch.equal(student(ids).logits, expected)
    held = {name for name, p in student.named_parameters() if p.dtype == torch.bfloat16}
    assert saved == 2 * sum(before[name].numel() for name in held)
    assert not held & {*changed, other} and "model.embed_tokens.weight" in held
    assert all(before[name].dim() == 2 for name in held)
    assert all(torch.equal(p.float(), before[name]) for name, p in student.named_parameters())


def test_tensors_that_are_not_trained_keep_their_bytes(texts, tmp_path):
    heal(texts, tmp_path / "out", STAGES[0])
    ours, source = tensors(tmp_path / "out"), tensors(TINY_CHECKPOINT)
    trained = {name for _, name in ours if "down_proj" in name}
    assert trained and len(ours) == len(source)
    theirs = {name: tensor for (_, name), tensor in source.items()}
    for (_, name), tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype == torch.bfloat16
        assert torch.equal(tensor, theirs[name]) == (name not in trained), name


@pytest.mark.slow
def test_divided_weights_are_held_so_too(texts, tmp_path):
    """With FSDP2, of whose processes the first alone knows the values; in a second stage, which loads the student again."""

    def run(rank):
        hold = models.hold_frozen_in_bfloat16

        def check(student, *args):
            saved = hold(student, *args)
            assert saved and next(student.parameters()).is_meta == (rank > 0)
            return saved

        models.hold_frozen_in_bfloat16 = check
        heal(texts, tmp_path / "out", *STAGES[:2], sharding="fsdp2")

    assert run_processes(2, run) == [0, 0]
    ours = torch.tensor(read_losses(tmp_path / "out" / "training"))
    torch.testing.assert_close(ours, torch.tensor(heal(texts, tmp_path / "alone", *STAGES[:2])), rtol=1e-2, atol=0)
