"""transformers' Trainer and TRL's SFTTrainer over converted models: 20 steps, and the same weights after a run that was
resumed at step 10.
"""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from helpers.small import DECODER, tiny_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

import surgery
from surgery.core.progress import Progress

RECIPES = ("low-rank-half", "gated-deltanet")
SETTINGS = {
    "max_steps": 20, "save_steps": 10, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "report_to": "none", "use_cpu": True,
    "logging_steps": 1, "disable_tqdm": True, "bf16": False, "seed": 0,
}  # fmt: skip


def rows() -> Dataset:
    ids = torch.randint(3, DECODER["vocab_size"], (32, 16), generator=torch.Generator().manual_seed(0)).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids, "attention_mask": [[1] * 16] * 32})


def converted_model(recipe: str):
    torch.manual_seed(0)
    cls, config = tiny_config("llama")
    return surgery.apply(cls(config), recipe, calibration=None, progress=Progress())


def word_tokenizer():
    """A tokenizer of as many words as the tiny model has tokens."""
    words = {f"w{n}": n for n in range(3, DECODER["vocab_size"])} | {"<pad>": 0, "<s>": 1, "</s>": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def check_resumed(make, tmp_path) -> None:
    """make(folder) -> trainer of the same model.

    Train 20 steps, then again from the checkpoint of step 10; compare every tensor.
    """
    trainer = make(str(tmp_path / "whole"))
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert trainer.state.global_step == 20 and sum(losses[-5:]) < sum(losses[:5])
    again = make(str(tmp_path / "again"))
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-10"))
    expected, found = trainer.model.state_dict(), again.model.state_dict()
    assert again.state.global_step == 20 and expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.allclose(value, found[name], rtol=1e-5, atol=1e-6), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again" / "checkpoint-20")
    assert all(torch.equal(value, found[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_trainer(recipe, tmp_path):
    def make(folder):
        return Trainer(converted_model(recipe), TrainingArguments(output_dir=folder, **SETTINGS), train_dataset=rows())

    check_resumed(make, tmp_path)


@pytest.mark.parametrize("recipe", RECIPES)
def test_sft_trainer(recipe, tmp_path):
    trl = pytest.importorskip("trl")

    def make(folder):
        config = trl.SFTConfig(output_dir=folder, max_length=16, **SETTINGS)
        return trl.SFTTrainer(converted_model(recipe), config, train_dataset=rows(), processing_class=word_tokenizer())

    check_resumed(make, tmp_path)
