"""`surgery run`: all steps in one folder, continued by the same command."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path

import pytest

from surgery import workflow
from surgery.core.errors import SurgeryError
from surgery.workflow import RunOptions, run, split_text

TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny" / "checkpoint"
EVAL = (("tokens", 64), ("length", 32), ("limit", 2))
SMALL = ("tokens=256", "length=64", "allocate=uniform", "curvature=none", "tune=false")
HEAL = (
    *("stages.*.tokens=128", "stages.*.length=32", "stages.*.batch=2", "stages.*.rows=2", "evaluate=0"),
    *("data.packing=stream", "data.validation_examples=2"),
)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text((TINY / "calibration.txt").read_text(encoding="utf-8")[:12_000], encoding="utf-8")
    return path


def options(corpus: Path, **changed) -> RunOptions:
    given = {
        "source": str(TINY),
        "recipe": "low-rank-half",
        "overrides": SMALL,
        "data": str(corpus),
        "suites": ("ppl",),
    }
    return RunOptions(**{**given, "eval_options": EVAL, "device": "cpu", **changed})


def test_an_interrupted_run_goes_on_and_ends_with_the_verdict(text, tmp_path, monkeypatch):
    """The healing is interrupted; the second run converts nothing again, heals, measures and writes the page."""
    chosen, out = options(text, heal="linears", tiny=True, heal_overrides=HEAL), tmp_path / "RUN"

    def interrupted(self, train):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(workflow._Run, "_heal", interrupted)
        run(chosen, out)
    before = (out / "converted" / "model.safetensors").stat().st_mtime_ns
    shown: list = []
    result = run(chosen, out, show=shown.extend)
    assert (out / "converted" / "model.safetensors").stat().st_mtime_ns == before
    assert result.model == out / "healed" and result.page == out / "report.html"
    assert result.verdict in result.page.read_text(encoding="utf-8").replace("&#x27;", "'")
    assert f"[bold]{result.verdict}[/]" in shown and "healed on 124 tokens" in result.verdict
    assert result.results["rows"][0]["suite"] == "ppl" and json.dumps(result.to_dict())
    written = json.loads((out / "eval" / "generations.json").read_text())["generations"]
    assert len(written) == 3 and all(each["prompt"] in unescape(result.page.read_text()) for each in written)
    train, held_out = ((out / "texts" / f"{name}.txt").read_text() for name in ("train", "heldout"))
    assert train + held_out == text.read_text() and len(held_out) <= 0.1 * len(train + held_out)
    assert result.report["training"] and result.report["recipe"]["calibration"].endswith("train.txt")
    text.write_text("another text. " * 1000)
    with pytest.raises(SurgeryError, match="digests differ"):
        run(chosen, out)
    with pytest.raises(SurgeryError, match="recipe"):
        run(options(text, overrides=(*SMALL, "keep=0.7")), out)


def test_the_original_writes_the_text_and_auto_chooses_the_recipe(text, tmp_path):
    """The same command again finds everything done: settings, text and choice are the same."""
    overrides = (*HEAL, "data.validation=0")
    chosen = options(
        text, data="generated", calibration=str(text), heal="auto", tiny=True, heal_overrides=overrides,
        overrides=(*SMALL, "layers=0"),
    )  # fmt: skip
    shown: list = []
    result = run(chosen, tmp_path / "RUN", show=shown.extend)
    assert any("linears replaced" in str(line) for line in shown)
    (record,) = result.report["training"]
    assert record["recipe"]["stages"][0]["rate"] == 3e-4
    assert record["recipe"]["data"]["sources"] == [{"generated": True, "path": str(tmp_path / "RUN" / "healed-text")}]
    assert (tmp_path / "RUN" / "healed-text" / "teacher_text.json").is_file()
    assert run(chosen, tmp_path / "RUN").model == result.model


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"data": None}, "no text was given"),
        ({"data": "generated"}, "--data generated is text to train on, and nothing is trained"),
        ({"data": "generated", "heal": "auto"}, "no text was given"),
        ({"data": "org/name"}, "not a local .txt file"),
        ({"heal_overrides": ("seed=1",)}, "Give --heal RECIPE"),
        ({"heal": "linears", "data": None, "text": str(TINY / "heldout.txt")}, "Give --data"),
        ({"text": "absent.txt"}, "--text absent.txt: there is no such file"),
        ({"suites": ("ppll",)}, "unknown suite 'ppll'"),
        ({"recipe": "nope", "data": None}, "no recipe 'nope'"),
        ({"eval_options": (("length", 4095),)}, "or --length "),
        ({"eval_options": (("length", 4096),)}, "at least two windows"),
        ({"recipe": "btt-hlaf"}, "did you mean 'btt-half'"),
        ({"heal": "liners"}, "linears"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(text, tmp_path, changed, words):
    with pytest.raises(SurgeryError, match=words):
        run(options(text, **changed), tmp_path / "RUN")
    assert not (tmp_path / "RUN").exists()


def test_a_model_is_not_measured_on_the_text_it_was_fitted_to(text, tmp_path):
    copy = tmp_path / "copy.txt"
    copy.write_bytes(text.read_bytes())
    for measured in (text, copy):
        with pytest.raises(SurgeryError, match="also the text to train or calibrate on"):
            run(options(text, text=str(measured)), tmp_path / "RUN")


def test_texts_in_utf_16_are_split(text, tmp_path):
    words = text.read_text(encoding="utf-8")
    text.write_text(words, encoding="utf-16")
    train, held_out = workflow._split_texts(options(text), tmp_path)
    assert Path(train).read_text(encoding="utf-8") + Path(held_out).read_text(encoding="utf-8") == words


def test_a_folder_of_something_else_is_refused(text, tmp_path):
    (tmp_path / "FILE").write_text("mine")
    with pytest.raises(SurgeryError, match="is a file"):
        run(options(text), tmp_path / "FILE")
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "notes.txt").write_text("mine")
    with pytest.raises(SurgeryError, match="holds no run"):
        run(options(text), tmp_path / "RUN")


def test_texts_are_cut_between_lines_or_words():
    assert split_text("a\n" * 50, "x") == ("a\n" * 46, "a\n" * 4)
    first, rest = split_text("word " * 40, "x")
    assert first + rest == "word " * 40 and first.endswith(" ") and rest.strip()
    with pytest.raises(SurgeryError, match="too few"):
        split_text("a", "x")
