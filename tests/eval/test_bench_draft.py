"""`surgery bench draft` on the embedded checkpoint: what is accepted, and the bound counted from bytes."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

import pytest
import torch
from helpers.small_mixers import random_model

import surgery
from surgery.cli.main import main
from surgery.core.errors import SurgeryError
from surgery.eval.speed import draft
from surgery.speculation.bound import speedup
from surgery.speculation.drafter import Drafter
from surgery.speculation.slots import Sight

EMBEDDED = Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint")))


@pytest.fixture
def short(monkeypatch):
    """Two prompts of 40 tokens, eight new ones."""
    monkeypatch.setitem(draft.SIZES, "small", (2, 40, 8))


def test_acceptance_and_bound(short, tmp_path):
    recipe = tmp_path / "near.yaml"
    recipe.write_text("structure: dense\nattention: {mixer: window, window: 8, sinks: 1}\n")
    asked = {"model": EMBEDDED, "text": EMBEDDED / "heldout.txt", "sizes": "small", "device": "cpu"}
    found = surgery.bench("draft", drafter=recipe, out=tmp_path / "draft.json", **asked)
    assert json.loads((tmp_path / "draft.json").read_text()) == found
    counts = found["acceptance"]
    assert counts["generated"] == 16 and 0 <= counts["accepted"] <= counts["tested"] <= counts["drafted"]
    assert counts["forwards"] < 2 * 8 and found["extra_bytes"] == 0 and found["window"] == 8 and "timing" not in found
    rows = {(row["context"], row["batch"]): row for row in found["bounds"]}
    assert len(rows) == len(draft.CONTEXTS) * len(draft.BATCHES)
    for row in rows.values():
        assert (
            row["bound"]
            == speedup(counts["probability"], row["drafts"], row["draft_bytes"] / row["original_bytes"])
            >= 1
        )
    assert rows[1024, 64]["original_bytes"] - rows[1024, 1]["original_bytes"] == 63 * 1024 * 6 * 2 * 4 * 32 * 4
    assert rows[262_144, 64]["draft_bytes"] == rows[1024, 64]["draft_bytes"]
    assert "bound on the speedup" in repr(found) and "accepted" in repr(found)


def test_the_command_prints_json_and_refuses_by_name(short, capsys):
    with pytest.raises(SystemExit) as left:
        main(
            [
                "bench",
                "draft",
                "--model",
                str(EMBEDDED),
                "--text",
                str(EMBEDDED / "heldout.txt"),
                "--device",
                "cpu",
                "--json",
            ]
        )
    printed = json.loads(capsys.readouterr().out)
    assert left.value.code in (0, None) and printed["drafter"] == "sliding-window"
    for arguments, message in (
        ({"what": "draft"}, "needs a checkpoint and a text"),
        ({"what": "attention", "model": EMBEDDED}, "model is an option of bench draft and bench linear"),
        ({"what": "linear", "text": EMBEDDED / "heldout.txt"}, "text is an option of bench draft"),
        (
            {"what": "draft", "model": EMBEDDED, "text": EMBEDDED / "heldout.txt", "sizes": "compressed"},
            "--sizes 'compressed'",
        ),
    ):
        with pytest.raises(SurgeryError, match=message):
            surgery.bench(**arguments)


def test_both_loops_are_timed(monkeypatch):
    """What runs on a GPU, here on the CPU: two times, of which nothing is asked."""
    monkeypatch.setattr(draft, "TIMED", 1)
    model = random_model("llama")
    times = draft.time_loops(Drafter(model, model, Sight(4, 1)), torch.arange(3, 12)[None], 3)
    assert set(times) == {"original", "drafter"} and min(times.values()) > 0


def test_a_text_within_the_window_is_said(short):
    found = surgery.bench("draft", model=EMBEDDED, text=EMBEDDED / "heldout.txt", sizes="small", device="cpu")
    assert found["acceptance"]["acceptance"] == 1 and "fits into the drafter's window" in repr(found)
