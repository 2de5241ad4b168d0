"""recipes/papers/quality/search_front.py: points of a search and single recipes of a tiny model, healed and scored."""

from __future__ import annotations

import json

import pytest
from helpers.small_training import TINY_CHECKPOINT

from recipes.papers.quality import public_model, search_front
from recipes.papers.quality.search_front import main, show, spread
from surgery.core.errors import SurgeryError


def point(size: int) -> dict:
    return {"costs": {"bytes": size}}


def test_points_are_spread_over_the_bytes():
    points = [point(size) for size in (10, 11, 12, 13, 50, 98, 100)]
    assert spread(points, 3) == [point(10), point(50), point(100)]
    assert spread(points, 9) == points and spread(points, 1) == points[:1]


def test_predicted_and_measured_are_one_table():
    """Points with their intervals among single recipes, by rising bytes; a row without a healed model is none."""
    scores = {"perplexity": {"value": 4.0, "se": 0.1}, "kl": {"value": 0.25, "se": 0.01}}
    row = {
        "kind": "public",
        "model": "m",
        "state": "healed",
        "settings": {},
        "texts": {"a": scores, "b": {**scores, "kl": {"value": 3.0, "se": None}}},
    }
    rows = [
        {"kind": "predicted", "model": "m", "conversion": "W/points/60-recipe-1.yaml", "point": {"loss": 0.2, "low": 0.1, "high": 0.9}},
        {**row, "conversion": "W/points/60-recipe-1.yaml", "bytes": 2_000_000},
        {**row, "conversion": "W/singles/pruned-half-0.6.yaml", "bytes": 1_000_000},
    ]  # fmt: skip
    shown = show(rows)
    assert shown.index("pruned-half-0.6") < shown.index("| 60-recipe-1 | 2.0 MB | 0.2 | 0.1 to 0.9 | 0.25 ± 0.01 | 3 |")
    assert "a: 1 of 1 points inside the interval" in shown and "b: 0 of 1 points" in shown
    with pytest.raises(SurgeryError, match="there are no rows of healed models"):
        show(rows[:1])


@pytest.mark.slow
def test_a_tiny_model_end_to_end(tmp_path, monkeypatch, capsys):
    """Two points and a single recipe; a command that ran out of minutes continues, and nothing is made twice."""
    paragraphs = (TINY_CHECKPOINT / "calibration.txt").read_text(encoding="utf-8")
    heldout = (TINY_CHECKPOINT / "heldout.txt").read_text(encoding="utf-8")
    for name, text in {"data": paragraphs, "a": heldout[:8000], "b": heldout[8000:16000], "cal": paragraphs}.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    record = {"query": "The man lost his balance because", "choices": ["he slept.", "he slipped."], "gold": 1}
    (tmp_path / "mc").mkdir()
    (tmp_path / "mc" / "copa.jsonl").write_text(f"{json.dumps(record)}\n", encoding="utf-8")
    out = tmp_path / "rows.jsonl"
    command = ["run", str(TINY_CHECKPOINT), "--max-bytes", "60%", "--max-bytes", "80%", "--only", "mlp pruned"]
    command += ["--front", "2", "--points", "2", "--search-tokens", "512", "--search-length", "64"]
    command += [
        "--single",
        "pruned-half",
        "--calibration",
        str(tmp_path / "cal.txt"),
        "--states",
        "original",
        "healed",
        "control",
    ]
    command += ["--convert", "tokens=512", "--convert", "length=64", "--convert", "tune=false"]
    command += ["--text", f"a={tmp_path / 'a.txt'}", "--text", f"b={tmp_path / 'b.txt'}"]
    command += ["--data", str(tmp_path / "data.txt"), "--tokens", "256", "--healing", "linears", "--tiny"]
    command += ["--set", "stages.*.length=32", "--set", "stages.*.batch=4", "--set", "stages.*.rows=4"]
    command += ["--set", "data.validation=0.1", "--set", "data.validation_examples=2"]
    command += ["--score", "320", "--window", "64", "--lengths", "320", "--samples", "1"]
    command += ["--greedy-prompts", "2", "--greedy-tokens", "4", "--mc", str(tmp_path / "mc")]
    command += ["--work", str(tmp_path / "work"), "--out", str(out), "--device", "cpu"]
    main([*command, "--minutes", "0"])
    assert [json.loads(line)["kind"] for line in out.read_text().splitlines()] == ["predicted"] * 2
    assert "the same command continues" in capsys.readouterr().out
    monkeypatch.setattr(search_front, "search", None)  # both searches are finished
    main(command)
    rows = [json.loads(line) for line in out.read_text().splitlines() if '"kind": "public"' in line]
    assert [row["state"] for row in rows] == ["original", "healed", "healed", "healed", "control"]
    sizes = [row["bytes"] for row in rows]
    assert sizes[1] < sizes[2] < sizes[0] and abs(sizes[3] / sizes[1] - 1) < 0.02
    table = show([json.loads(line) for line in out.read_text().splitlines()])
    assert "of 2 points inside the interval" in table and "| model | copa, % | average (change) |" in table
    monkeypatch.setattr(public_model, "convert", None)  # nothing is made again
    monkeypatch.setattr(public_model, "finetune", None)
    before = out.read_text()
    main(command)
    assert out.read_text() == before
