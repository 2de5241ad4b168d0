"""`surgery eval` in two processes gives the results of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.forked import run_command

from surgery.eval.run import evaluate
from surgery.eval.suite import EvalOptions

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "recipes" / "tiny" / "checkpoint"
WORDS = [
    "--text",
    str(TINY / "heldout.txt"),
    "--tokens",
    "768",
    "--length",
    "128",
    "--lengths",
    "128",
    "--depths",
    "0,1",
]
SUITES = ["ppl", "needle", "agreement"]


@pytest.mark.slow
def test_two_processes_share_the_samples(tmp_path):
    words = ["eval", str(TINY), "-s", ",".join(SUITES), *WORDS, "--limit", "3", "--compare", str(TINY), "--json"]
    said = run_command(2, tmp_path, [*words, "--out", str(tmp_path / "out")])
    said = json.loads(said[said.index("{") :])
    options = EvalOptions(text=WORDS[1], tokens=768, length=128, lengths=(128,), depths=(0, 1), limit=3)
    alone = evaluate(str(TINY), SUITES, options, compare=str(TINY))
    assert said["models"]["converted"]["processes"] == 2
    assert len(said["rows"]) == len(alone.rows)
    for row, same in zip(said["rows"], alone.rows):
        assert (row["task"], row["group"], row["samples"]) == (same.task, same.group, same.samples)
        assert row["values"]["converted"] == pytest.approx(same.values["converted"], rel=1e-4)
    assert len((tmp_path / "out" / "results.json").read_text()) > 100
