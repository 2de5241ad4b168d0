"""The driver of the healing tables, and its training texts."""

from __future__ import annotations

import json
import sys

import pytest
from helpers.small_training import TINY_CHECKPOINT

from recipes.papers.healing import plot as healing_plot
from recipes.papers.healing import recovery as healing_recovery
from recipes.papers.healing import run as healing
from recipes.papers.healing import text as healing_text
from surgery.core.errors import SurgeryError
from surgery.eval import stories

RUN = {"tokens": 2_500_000, "seconds": 61.4, "tokens_per_second": 81_234.0}
ASKED = {"mean": 0.5, "errors": [[0.1, 0.1], [0.1, 0.1]]}


def test_documents_with_repetitions_repeat_lines_far_apart():
    lines = [f"value_{n} = compute(argument_{n})" for n in range(1500)]
    documents = healing_text.repeat_documents("\n".join([*lines, "short", ""]), 0, characters=4000)
    for _ in range(3):
        rows = next(documents).split("\n")
        places = {row: [i for i, other in enumerate(rows) if other == row] for row in rows}
        assert sum(map(len, rows)) + len(rows) >= 4000 and set(rows) <= set(lines)
        assert 0.3 < sum(len(p) - 1 for p in places.values()) / len(rows) < 0.6
        apart = [b - p[0] for p in places.values() for b in p[1:]]
        assert min(apart) >= healing_text.MIN_LINES_BETWEEN
    with pytest.raises(SurgeryError, match="1,000 are needed"):
        next(healing_text.repeat_documents("a line of a text", 0))


def test_cells_say_what_was_measured():
    row = {"model": "a, healed", "seed": 1, "perplexity": 3.456, "se": 0.234, "needles": ASKED, "training": RUN}
    row["ratio"] = {"ratio": 1.02, "low": 1.01, "high": 1.03}
    assert healing.format_cells(row) == [
        "a, healed", "1", "2.50M", "3.456 ± 0.23", "1.020 [1.010, 1.030]", "50.0 ± 5.0", "61 s, 81.2K tokens/s",
    ]  # fmt: skip
    assert healing.format_cells({"model": "a", "refused": "no"})[3] == "no"


def test_a_curve_runs_over_all_stages():
    record = {
        "validation": {"before": {"loss": 3.0}, "after": {"loss": 1.0}},
        "delivered": {"last": 1.0},
        "stages": [{"tokens": 10}, {"tokens": 30}],
    }
    log = [{"stage": 0, "step": 1, "tokens": 5, "loss": 9.0}, {"stage": 0, "tokens": 5, "validation": 2.5}]
    log.append({"stage": 1, "tokens": 15, "validation": 2.0})
    text = "\n".join(map(json.dumps, log))
    assert healing.validation_curve(record, text) == [[0, 3.0], [5, 2.5], [25, 2.0], [40, 1.0]]


def test_a_row_for_each_of_what_is_varied(tmp_path, monkeypatch, capsys):
    assert healing_text.write(tmp_path / "text.txt", healing_text.story_documents(0), 30_000) >= 30_000
    told = {
        "--recipe": "low-rank-half", "--healing": "linears", "--start": "copied", "--data": tmp_path / "text.txt",
        "--separator": stories.END, "--calibration": TINY_CHECKPOINT / "calibration.txt", "--text": TINY_CHECKPOINT / "heldout.txt",
        "--length": 64, "--score": 256, "--tokens": 512, "--set": "stages.0.length=64", "--needles": 64, "--samples": 1,
        "--validation": 2, "--work": tmp_path / "work", "--device": "cpu", "--json": tmp_path / "rows.json",
    }  # fmt: skip
    words = [str(word) for pair in told.items() for word in pair]
    words += ["--tiny", "--vary", "stages.0.rate=3e-5", "--vary", "stages.0.rate=1e-5 stages.0.trains=[structured]"]
    words += ["--length", "96", "--ranked", "128", "--cache", "16", "--far-off"]
    words += ["--set", "stages.0.batch=4", "--set", "stages.0.rows=4", "--set", "evaluate=1"]
    monkeypatch.setattr(sys, "argv", ["healing", str(TINY_CHECKPOINT), *words])
    healing.main()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["model"].split(",")[-1][:10] for row in rows] == ["original", " converted", " healed st", " healed st"]
    assert len(capsys.readouterr().out.strip().splitlines()) == 2 + len(rows)
    for row in rows[2:]:
        assert row["training"]["stages"][0]["positions"] == 512 and row["perplexity"] < rows[1]["perplexity"]
        assert row["curve"][0][0] == 0 and len(row["curve"]) == 3
        assert set(row["lengths"]) == {"96"} and row["lengths"]["96"]["ratio"]["ratio"] > 0.5
        assert row["ranked"]["128"]["questions"] == 5 and row["cache_bytes"]["16"] == rows[0]["cache_bytes"]["16"]
    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path / "curves.png"), str(tmp_path / "rows.json")])
    healing_plot.main()
    assert (tmp_path / "curves.png").stat().st_size > 5000
    assert rows[2]["perplexity"] != rows[3]["perplexity"] and (tmp_path / "work" / "low-rank-half-copied").is_dir()


def test_far_recovery_is_the_share_of_what_the_window_loses():
    def rows(recipe, seed, near, far):
        healed = {"recipe": recipe, "seed": seed, "training": {"tokens": 100}, "ratio": {"ratio": near}}
        return {**healed, "lengths": {"2048": {"ratio": {"ratio": far}}}, "cache_bytes": {"2048": 25}, "ranked": {}}

    original = {"model": "original", "perplexity": 5.0, "windows": 1, "cache_bytes": {"2048": 100}, "ranked": {}}
    found = healing_recovery.table(
        [
            [original, {**rows("near", 0, 1.21, 1.44), "convert": ["attention.window=64"]}],
            [original, {**rows("far", 0, 1.3, 1.3), "convert": ["attention.near=chunks"]}],
            [original, rows("far", 0, 1.1, 1.2), rows("far", 1, 1.1, 1.2)],
        ],
        "near",
    )
    assert "| far attention.near=chunks | 100 | 1 | 1.300" in found and "| near attention.window=64 |" in found
    assert found.splitlines()[-1].startswith("| far | 100 | 2 | 1.100 ± 0.000, 50% | 1.200 ± 0.000, 50% |")
    assert found.splitlines()[-1].endswith("| 25.0% |") and "1.210, 0%" in found
    changed = {**rows("near", 0, 1.21, 1.44), "convert": ["attention.window=32"]}
    for files, said in (
        ([[original, rows("near", 0, 1.21, 1.44), changed]], "two kinds of near"),
        ([[original]], "no healed rows"),
        ([[original, rows("near", 0, 1.21, 1.44)], [{**original, "perplexity": 6.0}]], "different originals"),
    ):
        with pytest.raises(SurgeryError, match=said):
            healing_recovery.table(files, "near")


def test_pairs_bind_names_that_come_again():
    text = "\n".join(
        f"name{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{chr(97 + i // 676)} = value of it {i}" for i in range(1500)
    )
    first, again = (next(healing_text.pair_documents(text, seed)) for seed in (3, 3))
    lines = first.splitlines()
    repeated = [line for line in set(lines) if lines.count(line) > 1]
    assert first == again and len(first) >= 8000 and len(repeated) >= 4
    with pytest.raises(SurgeryError, match="pairs: the text has 2 different lines"):
        next(healing_text.pair_documents("a line of its own\nanother line here", 0))


def test_story_text_is_a_function_of_the_seed(tmp_path):
    texts = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        healing_text.write(tmp_path / name, healing_text.story_documents(seed), 3000)
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].count(stories.END) > 1 and texts[0].endswith(f"{stories.END}\n")


@pytest.fixture
def packages(tmp_path):
    """Three packages: one is the scored text's own, one has a file of its in it, one has nothing to do with it."""
    scored = [f"scored_{i} = {i}\n" for i in range(60)]
    other = "".join(f"other_{i} = {i}\n" for i in range(60))
    places = {"own/a.py": "".join(scored), "own/b.py": "ours = 1\n" * 60}
    places |= {"friend/copied.py": other[:300] + "".join(scored[:10]), "friend/clean.py": other}
    places |= {"apart/c.py": other.replace("other", "third"), "apart/short.py": "x = 1\n"}
    for name, text in places.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path, "".join(scored)


def test_code_has_nothing_in_common_with_the_scored_text(packages):
    folder, scored = packages
    found = list(healing_text.code_documents(folder, [scored], 0))
    names = sorted(text.split(" ")[0] for text in found)
    assert names == ["other_0", "third_0"]
    assert sorted(healing_text.code_documents(folder, [], 0)) != sorted(found)
