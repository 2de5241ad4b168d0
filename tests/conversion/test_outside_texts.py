"""Unusual calibration texts: short ones, and tables in UTF-16."""

from __future__ import annotations

import json
import re

import pytest
import torch
from helpers.small_training import TINY_CHECKPOINT
from safetensors.torch import save_file
from transformers import AutoTokenizer

from surgery.calibration.data import document_stream
from surgery.checkpoint.safetensors_io import read_header, read_tensor
from surgery.core.errors import SurgeryError
from surgery.training.data.dataset import make_data
from surgery.training.data.recipe import DataConfig


def test_outside_d10_the_tail_of_one_short_text_is_for_validation(tmp_path):
    text = tmp_path / "cal.txt"
    text.write_text((TINY_CHECKPOINT / "calibration.txt").read_text(encoding="utf-8")[:12000], encoding="utf-8")
    config = DataConfig(sources=str(text), validation=0.01, packing="stream")
    data = make_data(config, AutoTokenizer.from_pretrained(TINY_CHECKPOINT), 128, 0)
    assert len(data.validation()) == 1


def test_outside_d13_tables_in_utf16_are_read(tmp_path, capsys):
    path, lines = tmp_path / "u16.jsonl", [json.dumps({"text": f"story {i}"}) for i in range(3)]
    path.write_text("\n".join(lines), encoding="utf-16")
    notes: list[str] = []
    assert list(document_stream(str(path), notes)) == ["story 0", "story 1", "story 2"]
    assert "UTF-16" in notes[0]
    (tmp_path / "u16.txt").write_text("A story of the moon.", encoding="utf-16")
    assert list(document_stream(str(tmp_path / "u16.txt"))) == ["A story of the moon."]
    assert capsys.readouterr().err.startswith("note: ")


def test_outside_d11_a_piece_with_nan_is_named(tmp_path):
    piece = tmp_path / "pieces" / "model.layers.0.safetensors"
    piece.parent.mkdir()
    save_file({"a": torch.tensor([float("nan")])}, piece)
    with pytest.raises(SurgeryError, match=re.escape(f"the finished layer file {piece} is damaged")):
        read_tensor(read_header(piece)["a"])
