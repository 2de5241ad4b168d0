"""Runs killed between the last checkpoint and the rename of the result, at every file operation.

After --resume the delivered tensors are those of an uninterrupted run.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers import killing
from helpers.forked import run_processes
from helpers.small_training import LM, LORA, assert_equal_tensors, healing_recipe, set_fsdp_environment, tensors

from surgery.core.errors import SurgeryError
from surgery.training.finetune import finetune

pytestmark = pytest.mark.usefixtures("without_curves")

OPTIONS = {"device": "cpu", "track": "none"}


def every_state_goes_on(home, states, run, whole):
    """Each of them in the place of `home`, resumed where it is not finished."""
    assert len(states) > 5
    for state in states:
        shutil.rmtree(home)
        shutil.copytree(state, home, symlinks=True)
        if not (home / "out").exists():
            run(True)
        assert_equal_tensors(home / "out", whole)
        record = json.loads((home / "out" / "surgery_report.json").read_text())["training"]
        assert len(record) == 1 and record[0]["validation"]["after"] == json.loads((whole / "surgery_report.json").read_text())["training"][0]["validation"]["after"]  # fmt: skip


def test_1b_finetune_with_an_adapter(student, words, tmp_path):
    """Structured linears keep an adapter beside the weights; what the stage before it trained is in the weights."""
    home, told = tmp_path / "home", healing_recipe(words, LM, LORA, checkpoint=1)
    home.mkdir()

    def run(resume=False):
        finetune(str(student), told, home / "out", resume=resume, **OPTIONS)

    states = killing.copy_states(run, home, tmp_path / "states", "stage-02-step-0000000")
    shutil.copytree(home / "out", tmp_path / "whole")
    before, after = tensors(student), tensors(tmp_path / "whole")
    assert any(adapter for adapter, _ in after)
    assert all(not torch.equal(before[name], after[name]) for name in before if before[name].dim() > 1)
    every_state_goes_on(home, states, run, tmp_path / "whole")


def test_1b_pretrain(words, tmp_path):
    """The model from scratch, beside the checkpoint that it began as."""
    from surgery.training.pretrain.pretrain import pretrain
    from surgery.training.pretrain.recipe import parse_pretrain_recipe

    home = tmp_path / "home"
    home.mkdir()
    shape = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    data = {"sources": str(words), "packing": "stream", "validation": 0.05, "validation_examples": 2}
    told = {"model": shape, "layers": {"structure": "low_rank", "rank": 2, "fused": "split"}, "data": data}
    made = parse_pretrain_recipe({**told, "tokenizer": {"kind": "characters"}, "precision": "float32", "stages": [LM]})

    def run(resume=False):
        pretrain(made, home / "out", resume=resume, **OPTIONS)

    states = killing.copy_states(run, home, tmp_path / "states", "stage-01-step-0000000")
    shutil.copytree(home / "out", tmp_path / "whole")
    every_state_goes_on(home, states, run, tmp_path / "whole")


def test_1b_sharded(student, words, tmp_path):
    """Weights spread over two processes; gone on with by one, which takes the same whole tensors up, and once by
    two.
    """
    home, told = tmp_path / "home", healing_recipe(words, LM, checkpoint=1)
    home.mkdir()

    def run(resume=False):
        finetune(str(student), told, home / "out", resume=resume, **OPTIONS)

    def both(resume):
        def work(rank):
            set_fsdp_environment(rank)
            if rank or resume:
                run(resume)
            else:
                killing.record_states(run, home, tmp_path / "states", "stage-01-step-0000000")

        return run_processes(2, work)

    assert both(False) == [0, 0]
    shutil.copytree(home / "out", tmp_path / "whole")
    record = json.loads((home / "out" / "surgery_report.json").read_text())["training"][0]
    assert (record["spread"], record["processes"]) == ("FSDP2", 2)
    states = sorted((tmp_path / "states").iterdir())
    assert len(states) > 15
    every_state_goes_on(
        home, states[::3], run, tmp_path / "whole"
    )  # written by the code of the first test, state by state
    shutil.rmtree(home)
    shutil.copytree(states[3], home, symlinks=True)
    assert both(True) == [0, 0]
    assert_equal_tensors(home / "out", tmp_path / "whole")


def test_1b_teacher_cache(student, words, tmp_path):
    """The same files, from every state."""
    from surgery.training.data.dataset import make_data
    from surgery.training.models import load_causal_lm, load_source_tokenizer, open_trainable
    from surgery.training.recipe import stage_data_config
    from surgery.training.teacher_cache.write_read import write_teacher_cache

    home, told, source = tmp_path / "home", healing_recipe(words, LM), open_trainable(str(student))
    data = make_data(stage_data_config(told, told.stages[0]), load_source_tokenizer(source), 16, told.seed)
    model = load_causal_lm(source, torch.float32).eval()

    def run(resume=False):
        write_teacher_cache(model, data, home / "cache", 4, 10, per_shard=3, resume=resume)

    home.mkdir()
    states = killing.copy_states(run, home, tmp_path / "states")
    whole = {path.name: path.read_bytes() for path in (home / "cache").iterdir()}
    assert len(states) > 15 and len(whole) >= 5
    for state in states:
        shutil.rmtree(home)
        shutil.copytree(state, home)
        run(True)
        assert {path.name: path.read_bytes() for path in (home / "cache").iterdir()} == whole


def test_1b_a_result_of_other_numbers_gets_no_name(student, words, tmp_path, monkeypatch):
    """Nor does the work folder go; --resume writes it again."""
    from surgery.checkpoint.safetensors_io import TensorSource
    from surgery.training import export as result

    written, out = result._output_entry, tmp_path / "out"
    monkeypatch.setattr(result, "_output_entry", lambda info, trained: TensorSource.from_file(info.name, info))
    with pytest.raises(SurgeryError, match=r"tensor '.*' is not the one in .*stage-01-step-0000000.*--resume"):
        finetune(str(student), healing_recipe(words, LM), out, **OPTIONS)
    assert not out.exists() and (tmp_path / "out.partial" / "checkpoints").is_dir()
    monkeypatch.setattr(result, "_output_entry", written)
    weights = tmp_path / "out.partial" / "checkpoints" / "stage-01-step-0000000" / "weights.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(SurgeryError, match=r"weights\.safetensors is missing or damaged"):
        finetune(str(student), healing_recipe(words, LM), out, resume=True, **OPTIONS)
    weights.write_bytes(good)
    finetune(str(student), healing_recipe(words, LM), out, resume=True, **OPTIONS)
    assert tensors(out).keys() == tensors(student).keys()
