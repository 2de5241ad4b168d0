"""`surgery bench draft` on the embedded checkpoint: what is accepted, and the bound counted from bytes."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

import pytest
import torch
from helpers.small_mixers import random_model
from transformers import DynamicCache

import surgery
from surgery.cli.main import main
from surgery.core.errors import SurgeryError
from surgery.eval.speed import draft, draft_replay
from surgery.eval.speed.generation import FULL_ROWS
from surgery.speculation.bound import speedup
from surgery.speculation.drafter import Drafter
from surgery.speculation.runners import Target
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
    assert counts["forwards"] < 2 * 8 and found["extra_bytes"] == 0 and found["window"] == 8
    assert [row["batch"] for row in found["timing"]] == [1, 8]
    assert all(row["speedup"] == row["original"] / row["drafter"] > 0 for row in found["timing"])
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


@pytest.mark.parametrize("drafter", [None, EMBEDDED], ids=["looked up", "unconverted"])
def test_drafts_for_a_converted_model_are_measured(short, tmp_path, drafter):
    surgery.convert(
        str(EMBEDDED), {"structure": "dense", "attention": {"mixer": "linear", "mask": "gates"}}, tmp_path / "OUT"
    )
    asked = {"model": tmp_path / "OUT", "text": EMBEDDED / "heldout.txt", "sizes": "small", "device": "cpu"}
    found = surgery.bench("draft", drafter=drafter, **asked)
    assert found["drafter"] == (str(drafter) if drafter else "prompt-lookup") and found["acceptance"]["generated"] == 16
    assert (found["extra_bytes"] > 0) == (drafter is not None)
    assert [row["batch"] for row in found["timing"]] == [1, 8]
    assert "batch 8: " in repr(found)


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
        ({"what": "attention", "model": EMBEDDED}, "model is an option of bench draft, bench linear and bench vllm"),
        ({"what": "linear", "text": EMBEDDED / "heldout.txt"}, "text is an option of bench draft"),
        (
            {"what": "draft", "model": EMBEDDED, "text": EMBEDDED / "heldout.txt", "sizes": "compressed"},
            "--sizes 'compressed'",
        ),
    ):
        with pytest.raises(SurgeryError, match=message):
            surgery.bench(**arguments)


def test_tables_name_the_command(short, tmp_path, capsys, monkeypatch):
    """Of the acceptance and of its replay, and both files record it."""
    files = {name: tmp_path / f"{name}.json" for name in ("pattern", "replay")}
    texts = ["--model", str(EMBEDDED), "--text", str(EMBEDDED / "heldout.txt")]
    for name, options in (("pattern", texts), ("replay", ["--replay", str(files["pattern"])])):
        if name == "replay":
            monkeypatch.setattr(draft_replay, "CONTEXTS", {"small": (24,)})
            monkeypatch.setattr(draft_replay, "BATCHES", {"small": (1,)})
        with pytest.raises(SystemExit) as left:
            main(["bench", "draft", *options, "--device", "cpu", "--out", str(files[name])])
        assert left.value.code in (0, None)
        assert "reproduce with: surgery bench draft" in capsys.readouterr().out
        words = json.loads(files[name].read_text())["command"]
        assert words[:3] == ["surgery", "bench", "draft"] and options[1] in words


def test_both_loops_are_timed(monkeypatch):
    """A batch larger than the prompts repeats them."""
    monkeypatch.setitem(draft.TIMED, "cpu", 1)
    model = random_model("llama")
    times = draft.time_loops(Drafter(model, model, Sight(4, 1)), torch.arange(3, 12)[None], 3, 2)
    assert times["batch"] == 2 and times["original"] > 0 and times["speedup"] == times["original"] / times["drafter"]


def test_a_text_within_the_window_is_said(short):
    found = surgery.bench("draft", model=EMBEDDED, text=EMBEDDED / "heldout.txt", sizes="small", device="cpu")
    assert found["acceptance"]["acceptance"] == 1 and "fits into the drafter's window" in repr(found)


def test_a_pattern_is_replayed_on_random_weights(short, tmp_path, monkeypatch):
    """The file of one benchmark gives the accepted drafts of the other; each row of a batch begins at another place of
    it.
    """
    recipe = tmp_path / "near.yaml"
    recipe.write_text("structure: dense\nattention: {mixer: window, window: 8, sinks: 1}\n")
    asked = {"model": EMBEDDED, "text": EMBEDDED / "heldout.txt", "sizes": "small", "device": "cpu"}
    found = surgery.bench("draft", drafter=recipe, out=tmp_path / "draft.json", **asked)
    assert len(found["patterns"]) == 2
    hits, counts = "".join(found["patterns"]), found["acceptance"]
    assert (hits.count("1"), len(hits)) == (counts["accepted"], counts["tested"])
    monkeypatch.setitem(draft_replay.CONTEXTS, "small", (24,))
    monkeypatch.setitem(draft_replay.TURNS, "small", 1)
    out = tmp_path / "replay.json"
    again = surgery.bench("draft", replay=tmp_path / "draft.json", sizes="small", device="cpu", out=out)
    assert json.loads(out.read_text()) == again and again["complete"] and again["window"] == 8
    for row in again["rows"]:
        assert row["speedup"] == row["original_ms"] / row["drafting_ms"] > 0
        assert 1 <= row["tokens_per_round"] <= row["drafts"] + 1
        cost = row["draft_bytes"] / row["original_bytes"]
        assert row["bound"] == pytest.approx(row["tokens_per_round"] / (row["drafts"] * cost + 1))
    assert "acceptance replayed from" in repr(again) and "random weights" in repr(again)
    with pytest.raises(SurgeryError, match="takes the place of --model, --text"):
        surgery.bench("draft", replay=out, **asked)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "serve"}, "has no acceptance pattern"),
        ({"patterns": ["10", "1x"]}, "has no acceptance pattern"),
        ({"patterns": [""]}, "has no acceptance pattern"),
        ({"patterns": "101"}, "has no acceptance pattern"),
        ({"window": None}, "not a window of its original"),
        ({"sinks": -1}, "not a window of its original"),
        ({"window": 2**60}, "not a window of its original"),
    ],
)
def test_files_without_a_pattern_are_refused(change, message, tmp_path):
    path = tmp_path / "draft.json"
    path.write_text(json.dumps({"kind": "draft", "patterns": ["101"], "window": 8, "sinks": 1} | change))
    with pytest.raises(SurgeryError, match=message):
        draft_replay.load_pattern(path)


def test_rows_of_a_pattern_go_on_where_a_round_stopped():
    pattern = draft_replay.Pattern(["1101", "11"], 2)  # 110111, from places 0 and 3
    assert [pattern.next(4), pattern.next(4), pattern.next(2)] == [[2, 4], [4, 1], [1, 2]]


def test_a_replayed_round_drafts_what_the_drafter_drafts():
    """Drafts of a round in the preallocated cache are the drafter's greedy tokens, and the comparison counts those that
    the original chooses.
    """
    model, sight = random_model("llama").double().eval(), Sight(4, 1)
    ids = torch.arange(3, 23)[None]
    with torch.inference_mode():
        first = model(ids).logits[:, -1:].argmax(-1)
        row, wanted = DynamicCache(config=model.config), Drafter(model, model, sight)
        model(ids, past_key_values=row)
        target = Target(model, [None, None])
        target.prefill(ids, torch.ones_like(ids))
        tokens = [first]
        for place in range(20, 23):
            logits = target.run_drafter(wanted.draft_model, tokens[-1], torch.tensor([place]), sight)
            tokens.append(logits[:, -1:].argmax(-1))
        verified = target.verify(torch.cat(tokens, 1), torch.tensor([20])).argmax(-1)
        model.config._attn_implementation = FULL_ROWS
        rounds = draft_replay.DraftRound(model, draft_replay.sighted_rows(row, 1, 4), sight, 1, 3)
        rounds.tokens_BK[:, :1] = first
        accepted = rounds()
    assert torch.equal(rounds.tokens_BK[:, 1:], torch.cat(tokens[1:], 1))
    assert accepted == (verified[:, :3] == rounds.tokens_BK[:, 1:]).long().cumprod(1).sum(1).tolist()
