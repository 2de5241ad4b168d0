"""recipes/papers/healing/suites.py: suites on several conversions, their table and figures."""

from __future__ import annotations

import json
import sys

import pytest
from helpers.small_training import TINY_CHECKPOINT

from recipes.papers.healing import suites as healed_suites
from recipes.papers.healing import tables as healed_shown


def row(suite, metric, values, group=None, **told):
    kind = "ppl" if suite == "ppl" else "mean"
    shown = {"name": metric, "kind": kind, "title": "", "unit": "%" if metric == "accuracy" else "", "scale": 100}
    errors = dict.fromkeys(values, 0.5)
    change = {"change": values["converted"] - values["base"], "low": -9.0, "high": 1.0}
    found = {"suite": suite, "task": suite, "metric": shown, "group": group or {}, "samples": 1200, "flags": []}
    return found | {"values": values, "errors": errors, "difference": change, "ratio": change} | told


def test_a_column_for_each_conversion(tmp_path):
    first = [
        row("needle", "accuracy", {"base": 90.0, "converted": 75.0}),
        row("needle", "nll", {"base": 1, "converted": 2}),
    ]
    guess = row(
        "mqar", "accuracy", {"base": 1.0, "converted": 1.0}, {"length": 256}, flags=["no evidence of what was lost"]
    )
    second = [row("needle", "accuracy", {"base": 90.0, "converted": 90.0})]
    (tmp_path / "b.json").write_text(json.dumps({"needle": {"rows": first}, "mqar": {"rows": [guess]}}))
    (tmp_path / "a.json").write_text(json.dumps({"needle": {"rows": second}}))
    found = healed_shown.load_parts([tmp_path / "b.json", tmp_path / "a.json"])
    head, _, needles, recall = healed_shown.markdown(found).splitlines()
    assert healed_shown.change_table(found).splitlines()[-1] == "| a | +0 [-9, 1] |  |"
    assert head == "| | n | original | b | a |"
    assert needles == "| `needle`, % | 1,200 | 90 ± 0.5 | 75 ± 0.5, -15 [-9, 1] | 90 ± 0.5, +0 [-9, 1] |"
    assert recall.startswith("| `mqar`, 256, % | 1,200 | 1 ± 0.5 (no evidence: guesses) | 1 ± 0.5") and recall.endswith(
        "|  |"
    )


def test_suites_run_part_after_part(tmp_path, monkeypatch, capsys):
    """One model beside itself, which is measured once."""
    told = [
        "--text",
        TINY_CHECKPOINT / "heldout.txt",
        "--tokens",
        256,
        "--length",
        64,
        "--lengths",
        128,
        "--samples",
        1,
    ]
    told += ["--sequences", 2, "--part", "reading", "--part", "needle", "--part", "mqar", "--device", "cpu"]
    words = ["suites", "run", TINY_CHECKPOINT, f"same={TINY_CHECKPOINT}", *told, "--out", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    healed_suites.main()
    parts = json.loads((tmp_path / "out" / "same.json").read_text())
    assert list(parts) == ["reading", "needle", "mqar"] and len(parts["reading"]["by_position"]["base"]) == 63
    monkeypatch.setattr(sys, "argv", ["suites", "show", str(tmp_path / "out"), "--figures", str(tmp_path / "same")])
    capsys.readouterr()
    healed_suites.main()
    table = capsys.readouterr().out
    assert "| `ppl` |" in table and "| `per-position` |" in table and "`mqar`" in table
    assert {path.name for path in tmp_path.glob("*.png")} == {"same-position.png", "same-needle-rank.png"}


@pytest.mark.parametrize("values, expected", [([1.0], [1.0]), ([0.0] * 40 + [41.0], None)])
def test_running_means_are_of_what_is_there(values, expected):
    found = healed_shown.smooth(values)
    assert len(found) == len(values) and (expected is None or found == expected)
    assert expected is not None or (found[0] == 0 and found[-1] == pytest.approx(41 / 17))
