"""Text that a checkpoint was calibrated or trained on is not scored without a warning, nor is another original taken."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from helpers.small_training import TINY_CHECKPOINT as TINY

import surgery
from surgery.eval.model import OpenedModel
from surgery.eval.report_warnings import fitted_text_warnings, other_original_warning


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("calibration.txt", "train.txt", "other.txt"):
        (tmp_path / name).write_text("Story: a b c")
    return tmp_path


def warnings_of(place, report, text):
    (place / "model" / "surgery_report.json").write_text(report if isinstance(report, str) else json.dumps(report))
    return fitted_text_warnings([OpenedModel("converted", "M", place / "model", "0")], str(text))


REPORT = {
    "recipe": {"calibration": "calibration.txt"},
    "training": [{"recipe": {"data": {"sources": [{"path": "train.txt", "weight": 1.0}, {"generated": "mqar"}]}}}],
}


@pytest.mark.parametrize("text, use", [("calibration.txt", "calibrated"), ("train.txt", "trained")])
def test_texts_that_the_report_names_are_found_by_any_path(place, text, use):
    (place / "link.txt").symlink_to(place / text)
    for name in (text, place / text, place / "model" / ".." / text, "link.txt"):
        (warning,) = warnings_of(place, REPORT, name)
        assert warning.startswith(f"M was {use} on {name}")
    assert not warnings_of(place, REPORT, "other.txt") and not warnings_of(place, REPORT, "missing.txt")


@pytest.mark.parametrize(
    "report",
    ["", "[]", "null", {"recipe": 3}, {"recipe": {"calibration": ["x"]}}, {"training": {"a": 1}}, {"training": [None, {"recipe": {"data": []}}]},
     {"training": [{"recipe": {"data": {"sources": "calibration.txt"}}}]}, {"recipe": {"calibration": "a\0b"}}],
)  # fmt: skip
def test_any_report_is_survived(place, report):
    assert warnings_of(place, report, "calibration.txt") == []


@pytest.mark.parametrize(
    "source, warned",
    [({"name": "SRC", "fingerprint": "0"}, True), (3, False), ({"name": ["SRC"], "fingerprint": "0"}, False), ({"name": "SRC", "fingerprint": None}, False)],
)  # fmt: skip
def test_an_original_is_compared_by_its_fingerprint(place, source, warned):
    (place / "model" / "surgery_report.json").write_text(json.dumps({"source": source}))
    models = OpenedModel("base", str(TINY), TINY, "1"), OpenedModel("converted", "M", place / "model", "2")
    warning = other_original_warning(*models)
    assert (warning is not None) == warned
    assert not warned or "names 'SRC' as its original" in warning
    assert other_original_warning(models[0], dataclasses.replace(models[1], fingerprint="1")) is None  # with itself


def test_the_evaluation_warns_and_records_it(place, capsys):
    """On the standard error at the start, and in the results."""
    shutil.copytree(TINY, place / "copy")
    shutil.copy(TINY / "heldout.txt", place / "calibration.txt")
    (place / "copy" / "surgery_report.json").write_text(json.dumps(REPORT))
    found = surgery.evaluate(place / "copy", text="calibration.txt", tokens=256, length=128, device="cpu")
    assert "was calibrated on calibration.txt, so figures on this text flatter it" in " ".join(found["notes"])
    assert "warning: " in capsys.readouterr().err
    assert not surgery.evaluate(place / "copy", text=str(TINY / "heldout.txt"), tokens=256, length=128, device="cpu")[
        "notes"
    ]
