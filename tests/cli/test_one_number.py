"""One number for one thing: every place that tells a figure of a checkpoint tells the same."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from surgery.cli.main import main
from surgery.core.tables import format_count
from surgery.publish.figures import CACHE_TOKENS, checkpoint_figures
from surgery.publish.summary import inspect

TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny" / "checkpoint"
CONVERT = {
    "tokens": 128, "length": 64, "structure": "dense", "allocate": "uniform", "curvature": "none", "tune": "false",
    "rules": '[{"match": "mlp.up", "structure": "low_rank", "keep": 0.5}]',
    "attention": '{"mixer": "linear", "window": 8, "layers": "5"}',
}  # fmt: skip
HEAL = (
    *("stages.*.tokens=128", "stages.*.length=32", "stages.*.batch=2", "stages.*.rows=2", "evaluate=0"),
    *("data.packing=stream", "data.validation_examples=2"),
)


@pytest.fixture
def command(capsys):
    """command(*words) -> what `surgery` prints, on one line."""

    def run(*words) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert not left.value.code, err
        return " ".join(out.split())

    return run


def figures_in(text: str, figures: dict, verdict: str) -> None:
    """Assert that a text has every figure's share, its sizes before and after, and the verdict."""
    for figure in figures.values():
        assert figure.share in text, (figure, text)
        for size, number in zip(figure.texts, (figure.before, figure.after)):
            assert size in text or f"{number:,}" in text, (figure, text)
    assert verdict in text, text


def test_convert_inspect_page_card_compare_and_eval_tell_the_same(command, tmp_path, monkeypatch):
    """A tiny checkpoint with structured MLPs and a mixer is converted, healed, evaluated and compared."""
    monkeypatch.setenv("COLUMNS", "400")
    text, held = tmp_path / "text.txt", tmp_path / "held.txt"
    corpus = (TINY / "calibration.txt").read_text(encoding="utf-8")
    text.write_text(corpus[:12_000], encoding="utf-8")
    held.write_text(corpus[12_000:16_000], encoding="utf-8")
    out, healed, results = tmp_path / "OUT", tmp_path / "HEALED", tmp_path / "RESULTS"
    sets = [word for key, value in CONVERT.items() for word in ("--set", f"{key}={value}")]
    converted = command("convert", TINY, "--recipe", "low-rank-half", "--calibration", text, *sets, "--out", out)
    before_healing = inspect(str(out))
    figures = checkpoint_figures(before_healing)
    assert list(figures) == ["parameters", "bytes", "replaced", "cache"]
    figures_in(converted, figures, before_healing["verdict"])
    assert before_healing["verdict"].startswith(
        f"Cache {figures['cache'].share} at 8K tokens, {figures['replaced'].share} of the weights"
    )
    assert "on held-out text" in before_healing["verdict"]
    figures_in(command("inspect", out), figures, before_healing["verdict"])

    sets = [word for value in HEAL for word in ("--set", value)]
    command("finetune", out, "--recipe", "linears", "--tiny", "--teacher", TINY, "--data", text, *sets, "--out", healed)
    measured = command(
        "eval",
        healed,
        "--suite",
        "ppl",
        "--text",
        held,
        "--tokens",
        256,
        "--length",
        32,
        "--compare",
        TINY,
        "--out",
        results,
    )
    (found,) = (
        row
        for row in json.loads((results / "results.json").read_text())["rows"]
        if row["task"] == "ppl" and not row["group"]
    )
    change, low, high = (f"{found['ratio'][key]:.4g}" for key in ("change", "low", "high"))
    ratio = f"x {change} [{low}, {high}]"
    assert re.search(rf"x {re.escape(change)} +{re.escape(low)} to {re.escape(high)}", measured)

    inspected = inspect(str(healed), results)
    assert f"perplexity {ratio}, " in inspected["verdict"] and "healed on" in inspected["verdict"]
    assert checkpoint_figures(inspected).keys() == figures.keys()
    figures = checkpoint_figures(inspected)
    figures_in(command("inspect", healed, "--eval", results), figures, inspected["verdict"])

    compared = command("compare", results, "--out", tmp_path / "COMPARED")
    assert ratio in compared
    for key, figure in figures.items():
        assert figure.share in compared, (key, compared)
        assert key == "replaced" or all(size in compared for size in figure.texts), (key, compared)
    inspected_by_comparison = inspect(str(healed), tmp_path / "COMPARED")
    assert inspected_by_comparison["verdict"] == inspected["verdict"]

    page = tmp_path / "page.html"
    for folder in (results, tmp_path / "COMPARED"):
        command("report", healed, "--eval", folder, "--out", page)
        shown = re.sub("</?small>", "", html.unescape(page.read_text(encoding="utf-8")))
        figures_in(shown, {}, inspected["verdict"])
        assert f"<b>{ratio}</b>" in shown
        for figure in figures.values():
            assert f"<b>{figure.share}</b>" in shown and figure.texts[0] in shown

    card = command("push", healed, "me/tiny", "--license", "mit", "--eval", results, "--dry-run")
    figures_in(card, figures, inspected["verdict"])
    assert re.search(rf"x {re.escape(change)} \| {re.escape(low)} to {re.escape(high)}", card)
    assert CACHE_TOKENS == 8192 and format_count(round(figures["parameters"].after)) in card
