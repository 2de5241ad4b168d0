"""recipes/papers/quality/public_model.py: rows of a tiny model, measured once, and their tables."""

from __future__ import annotations

import json

import pytest
from helpers.small_training import TINY_CHECKPOINT, copy_first_layers

from recipes.papers.quality import public_model
from recipes.papers.quality.public_model import main, show
from surgery.core.errors import SurgeryError

STATES = ["original", "converted", "converted", "healed", "healed", "control"]


@pytest.mark.slow
def test_rows_are_measured_once(tmp_path, monkeypatch, capsys):
    """All four states; the same command again measures nothing, and a lost row is measured from what --work has."""
    paragraphs = (TINY_CHECKPOINT / "calibration.txt").read_text(encoding="utf-8")
    heldout = (TINY_CHECKPOINT / "heldout.txt").read_text(encoding="utf-8")
    for name, text in (
        ("data", paragraphs),
        ("a", heldout[:8000]),
        ("b", heldout[8000:16000]),
        ("cal", paragraphs[:999]),
    ):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    out = tmp_path / "rows.jsonl"
    copy_first_layers(tmp_path / "source", 3)  # with fewer layers a window of 16 tokens changes hardly anything
    command = ["run", str(tmp_path / "source"), "--conversion", "sliding-window", "--convert", "attention.window=16"]
    command += ["--convert", "tokens=64", "--convert", "length=32", "--calibration", str(tmp_path / "cal.txt")]
    command += ["--text", f"a={tmp_path / 'a.txt'}", "--text", f"b={tmp_path / 'b.txt'}"]
    command += ["--data", str(tmp_path / "data.txt"), "--tokens", "256", "--healing", "linears", "--tiny"]
    command += ["--set", "stages.*.length=32", "--set", "stages.*.batch=4", "--set", "stages.*.rows=4"]
    command += ["--set", "data.validation=0.1", "--set", "data.validation_examples=2"]
    command += ["--score", "320", "--window", "64", "--lengths", "320", "--samples", "1"]
    command += ["--greedy-prompts", "2", "--greedy-tokens", "4"]
    record = {"query": "The man lost his balance because", "choices": ["he slept.", "he slipped."], "gold": 1}
    (tmp_path / "mc").mkdir()
    (tmp_path / "mc" / "copa.jsonl").write_text(f"{json.dumps(record)}\n", encoding="utf-8")
    command += [
        "--mc",
        str(tmp_path / "mc"),
        "--bits",
        "4",
        "--ruler",
        "niah_single_1",
        "--ruler-samples",
        "1",
        "--speed",
        "64",
    ]
    command += ["--work", str(tmp_path / "work"), "--out", str(out), "--device", "cpu"]
    main(command)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["state"] for row in rows] == STATES
    assert [row["settings"].get("bits") for row in rows] == [None, None, 4, None, 4, None]
    original, converted, small, healed, _, control = rows
    assert small["bytes"] < converted["bytes"] and small["texts"]["a"]["ratio"] != converted["texts"]["a"]["ratio"]
    assert "ratio" not in original["texts"]["a"] and converted["texts"]["a"]["ratio"]["ratio"] > 1
    assert converted["cache_bytes"]["320"] < original["cache_bytes"]["320"] == control["cache_bytes"]["320"]
    assert healed["training"]["tried"] == [] and len(control["training"]["tried"]) == 3
    assert 0 < converted["texts"]["b"]["top1"]["value"] <= 100 and converted["needles"].keys() == {"320"}
    assert all(row["mc"]["copa"]["value"] in (0, 100) for row in rows)
    table = show(rows)
    assert "| model | copa, % | average (change) |" in table and "| RULER | niah_single_1, 320 |" in table
    name = "| `sliding-window` (attention.window=16, tokens=64, length=32), "
    assert f"{name}healed, 4 bits, 256 tokens |" in table
    assert table.index("| original |") < table.index("| control, 256 tokens, rate") < table.index(f"{name}converted |")
    assert "| decoding, tokens/s | 64 x 1 | 64 x 16 |" in table
    assert "| model | text | KL, nats | same token, % |" in table and "needles at 320, %" in table

    monkeypatch.setattr(public_model, "convert", None)  # nothing is made again
    monkeypatch.setattr(public_model, "finetune", None)
    main(command)
    assert len(out.read_text().splitlines()) == 6
    main([*command, "--states", "original", "--work", str(tmp_path / "other"), "--out", str(tmp_path / "one.jsonl")])
    assert [json.loads(line)["state"] for line in (tmp_path / "one.jsonl").read_text().splitlines()] == ["original"]
    out.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:5]), encoding="utf-8")
    main(command)
    again = json.loads(out.read_text().splitlines()[-1])
    assert again == control
    capsys.readouterr()
    main(["show", str(out)])
    assert capsys.readouterr().out.strip() == table


def test_scores_of_an_earlier_run_are_marked():
    """The last row of a state is shown; needles that it lacks are those of the row before."""
    rows = [json.loads(line) for line in public_model.ROWS.read_text(encoding="utf-8").splitlines()]
    with_needles = next(row for row in rows if row["state"] == "converted" and "needles" in row)
    later = {name: scores for name, scores in with_needles.items() if name != "needles"} | {"parameters": 7_000_000}
    later["settings"] = with_needles["settings"] | {"samples": 0}
    table = show([with_needles, later])
    shares = [line for line in table.splitlines() if line.count("†") == 4]
    assert len(shares) == 1 and "| 7.0M |" in table and table.endswith("same recipe and number of tokens.")
    assert "†" not in show([later, with_needles])


def test_files_and_recipes_are_checked_first(tmp_path):
    given = ["run", str(TINY_CHECKPOINT), "--calibration", str(TINY_CHECKPOINT / "calibration.txt")]
    given += [
        "--text",
        f"a={TINY_CHECKPOINT / 'heldout.txt'}",
        "--work",
        str(tmp_path),
        "--out",
        str(tmp_path / "rows"),
    ]
    with pytest.raises(SurgeryError, match=r"--data nowhere\.txt does not exist"):
        main([*given, "--conversion", "ssd", "--data", "nowhere.txt", "--tokens", "64"])
    with pytest.raises(SurgeryError, match="--tokens must be a number"):
        main([*given, "--conversion", "ssd", "--data", "nowhere.txt", "--tokens", "zz"])
    with pytest.raises(SurgeryError, match="no-such-recipe"):
        main([*given, "--conversion", "no-such-recipe", "--data", "nowhere.txt"])
    assert not list(tmp_path.iterdir())


def test_no_rows_and_no_text():
    with pytest.raises(SurgeryError, match="there are no rows of this command"):
        show([])
    with pytest.raises(SurgeryError, match=r"--text must be NAME=FILE.*got 'heldout.txt'"):
        public_model.parse_text("heldout.txt")
