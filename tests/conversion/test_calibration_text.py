"""Calibration texts: decoding, the field of a row that is read, and warnings for unsuitable text."""

from __future__ import annotations

import codecs
import json
import random

import pytest
import torch
from cli.test_tiny import FOLDER as TINY
from helpers.small import make_recipe

from surgery.calibration.data import CalibrationSet, decode_text, detect_encoding, document_stream
from surgery.calibration.layer_runner import LayerRunner
from surgery.checkpoint.source import open_checkpoint as open_checkpoint
from surgery.conversion.context import ConversionContext
from surgery.conversion.convert import convert
from surgery.conversion.sources import FolderSource
from surgery.conversion.text_check import _warnings, score_text
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress
from surgery.publish.html.data import load_page_data
from surgery.training.data.recipe import SourceConfig
from surgery.training.data.sources import open_data_source

TEXT = "It was a small house.\nÜber den Fluß ging ein Mann, 100 € in der Tasche.\n" * 20


# -- decoding ----------------------------------------------------------------------------------------------
ENCODED = {
    "utf-8": TEXT.encode(),
    "utf-8-sig": codecs.BOM_UTF8 + TEXT.encode(),
    "utf-16": TEXT.encode("utf-16"),
    "utf-16, the other way": codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
    "utf-16-le": TEXT.encode("utf-16-le"),
    "utf-16-be": TEXT.encode("utf-16-be"),
    "utf-32": TEXT.encode("utf-32"),
}


@pytest.mark.parametrize("name", ENCODED)
def test_4_5_utf_16_is_read_as_that_with_a_note(tmp_path, name, capsys):
    path = tmp_path / "text.txt"
    path.write_bytes(ENCODED[name])
    text, note = decode_text(path)
    assert text == TEXT
    assert (note is None) == name.startswith("utf-8") and (note is None or f"{path} is UTF-" in note)
    notes: list[str] = []
    assert list(document_stream(str(path), notes)) == [TEXT] and notes == ([note] if note else [])
    list(document_stream(str(path)))
    assert capsys.readouterr().err == (f"note: {note}\n" if note else "")
    if note:
        with pytest.raises(
            SurgeryError, match=r"must be UTF-8 \(got UTF-.*\)\. Convert it, for example: iconv -f UTF-"
        ):
            open_data_source(SourceConfig(path=str(path)), 0, "training", 0.0, False)


def test_4_5_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(random.Random(0).randbytes(5000))
    with pytest.raises(SurgeryError, match=r"text\.txt is not text in UTF-8: .* cannot be read; save it as UTF-8"):
        decode_text(path)
    path.write_bytes(TEXT.encode() + "für".encode("latin-1"))
    assert decode_text(path)[1] == f"{path}: 1 of {len(TEXT) + 3:,} characters are not UTF-8 and were replaced"
    path.write_bytes((TEXT + "\ufffd").encode())  # a replacement character that the text itself holds
    assert decode_text(path) == (TEXT + "\ufffd", None)
    assert detect_encoding(b"") is None and detect_encoding(b"a\0b") is None


# -- fields ------------------------------------------------------------------------------------------------
def test_4_5_a_row_without_text_names_the_file_and_its_fields(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 3, "words": ["a"]}\n{"id": 4, "words": ["b"]}\n')
    with pytest.raises(
        SurgeryError,
        match=r"calibration data .*rows\.jsonl has no field with text; its fields: id \(int\), words \(list\)",
    ):
        list(document_stream(str(path)))


def test_4_5_rows_that_lack_the_field_are_passed_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 3, "text": "a"}\n{"id": 4, "text": null}\n{"id": 5, "text": "b"}\n')
    assert list(document_stream(str(path))) == ["a", "b"]


# -- whether it suits the model ------------------------------------------------------------------------------
RECIPE = {"structure": "low_rank", "keep": 0.9, "allocate": "uniform", "curvature": "none", "tokens": 256, "length": 64}


@pytest.fixture(scope="module")
def report_of(tmp_path_factory):
    """report_of(text) -> (the conversion's report, what it said, its folder), of the embedded checkpoint."""

    def make(text: str, **keys):
        place = tmp_path_factory.mktemp("text")
        (place / "text.txt").write_text(text)
        said: list[str] = []
        progress = Progress()
        progress.say = said.append  # type: ignore[method-assign]
        rule = {"match": "mlp.down", "layers": "0:1", "structure": "low_rank", "keep": 0.9}
        recipe = make_recipe(
            **{**RECIPE, "structure": "dense", "rules": [rule], "calibration": place / "text.txt", **keys}
        )
        report = convert(str(TINY), recipe, place / "out", progress=progress)
        return report, [line for line in said if "warning" in line], place / "out"

    return make


@pytest.fixture(scope="module")
def suits(report_of):
    return report_of((TINY / "calibration.txt").read_text())


def test_4_5_text_that_suits_is_not_warned_of(suits):
    report, said, out = suits
    told = report["calibration"]
    assert not said and told["warnings"] == []
    assert abs(told["loss"] - told["own_samples_loss"]) < 2.0
    assert json.loads((out / "surgery_report.json").read_text())["calibration"] == told


UNFIT = {
    "bytes": ("".join(chr(random.Random(i).randrange(0x400, 0x2FFF)) for i in range(2000)), "unlike what the model was trained on"),
    "one letter": ("a" * 40_000, "distinct tokens"),
    "short": ("", "where 1,024 were asked for"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_4_5_unfit_text_is_warned_of_in_convert_and_the_report(report_of, name):
    text, says = UNFIT[name]
    keys = {}
    if name == "short":
        text, keys = (TINY / "calibration.txt").read_text()[:1200], {"tokens": 1024}
    report, said, out = report_of(text, **keys)
    told = report["calibration"]
    assert any(says in line for line in told["warnings"]), told
    assert len(said) == len(told["warnings"]) and any(says in line for line in said)
    assert any(says in line for line in load_page_data(str(out)).notes)
    if name == "bytes":
        assert told["loss"] > told["own_samples_loss"] + 2
        assert (
            f"{told['loss']:.2f} nats per token, samples drawn from the model itself {told['own_samples_loss']:.2f}"
            in told["warnings"][0]
        )


def test_4_5_samples_are_the_same_for_the_same_seed(suits):
    """Drawn once more, outside a conversion."""
    place = suits[2].parent
    source = FolderSource(str(TINY))
    skeleton = source.open(Progress())
    plan = source.plan(make_recipe(**{**RECIPE, "calibration": place / "text.txt"}))
    calibration = source.calibration(plan.recipe)
    assert calibration is not None and calibration.is_text
    batch = CalibrationSet.from_inputs(calibration.tensors, plan.recipe.holdout)
    device = torch.device("cpu")
    runner = LayerRunner(skeleton, plan.layout.layers, plan.layout.head, device)
    again = score_text(
        ConversionContext(skeleton, plan, plan.recipe, batch, runner, place, DistContext(), device, Progress())
    )
    assert again is not None and again.own_samples == pytest.approx(
        suits[0]["calibration"]["own_samples_loss"], abs=2e-4
    )
    assert again.loss == pytest.approx(suits[0]["calibration"]["loss"], abs=2e-4)


def test_4_5_a_large_checkpoint_is_judged_without_samples(monkeypatch, report_of):
    monkeypatch.setattr("surgery.conversion.text_check.MAX_READ_BYTES", 0)
    report, said, _ = report_of(UNFIT["bytes"][0])
    assert report["calibration"]["own_samples_loss"] is None and "another language" in said[0]


def test_a_loss_that_is_no_number_blames_the_model():
    """Not the text: rope_theta 0 in config.json makes every score NaN."""
    (said,) = _warnings(float("nan"), None, 1000, 1000)
    assert said.startswith("the original model has a loss of nan") and "rope_theta" in said
