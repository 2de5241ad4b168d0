"""The class of a checkpoint whose config.json names no architectures, and how many tokens its positions allow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.small import model_outputs
from helpers.tiny_families import DECODER, ENCODER, IMAGES, TINY_FAMILIES, WHISPER

import surgery
from surgery.architectures.positions import longest_input
from surgery.checkpoint.load_model import load_model
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.core.errors import SurgeryError

T = transformers
CASES = {
    "LlamaForCausalLM": lambda: T.LlamaConfig(**DECODER),
    "LlamaModel": lambda: T.LlamaConfig(**DECODER),
    "BertForMaskedLM": lambda: T.BertConfig(**ENCODER),
    "ViTForImageClassification": lambda: T.ViTConfig(**IMAGES),
    "CLIPVisionModel": lambda: T.CLIPVisionConfig(**IMAGES),
    "WhisperForConditionalGeneration": lambda: T.WhisperConfig(**WHISPER),
    "WhisperForAudioClassification": lambda: T.WhisperConfig(**WHISPER),
}


def save_without_architectures(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_the_class_is_the_one_whose_parameters_the_files_hold(name, tmp_path):
    folder = save_without_architectures(getattr(T, name)(CASES[name]()), tmp_path / "source")
    assert type(MetaModel(open_checkpoint(str(folder))).model).__name__ == name


def test_the_converted_checkpoint_names_its_class(tmp_path):
    model = T.ViTForImageClassification(T.ViTConfig(**IMAGES)).eval()
    folder = save_without_architectures(model, tmp_path / "source")
    surgery.convert(str(folder), {"structure": "low_rank", "rank": "full"}, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["ViTForImageClassification"]
    inputs = TINY_FAMILIES["vit"].inputs(2, 0, 1)
    for loaded in (
        load_model(open_checkpoint(str(folder)), torch.float32),
        T.AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval(),
    ):
        torch.testing.assert_close(model_outputs(loaded, inputs), model_outputs(model, inputs), rtol=1e-4, atol=1e-5)


def test_files_that_no_class_fits_are_refused_as_before(tmp_path):
    folder = save_without_architectures(T.ViTModel(T.ViTConfig(**IMAGES)), tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(SurgeryError, match="lacks tensors"):
        surgery.plan(str(folder), {"structure": "low_rank", "keep": 0.5})


def test_roberta_counts_positions_from_its_padding_index():
    roberta = {**ENCODER, "pad_token_id": 1, "max_position_embeddings": 130}
    assert longest_input(T.RobertaModel(T.RobertaConfig(**roberta))) == 128
    assert longest_input(T.BertModel(T.BertConfig(**ENCODER))) == 128
    assert longest_input(torch.nn.Linear(2, 2)) is None
    ids = torch.full((1, 128), 5)
    model = T.RobertaModel(T.RobertaConfig(**roberta)).eval()
    with torch.no_grad():
        assert bool(model(ids).last_hidden_state.isfinite().all())
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, 129), 5))
