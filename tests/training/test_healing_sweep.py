"""Sweeps of healing runs: which runs a plan has, and going on after a stop."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.papers.healing import sweep
from surgery.core.errors import SurgeryError
from surgery.planning.recipe import load_recipe

SHIPPED = Path(sweep.__file__).with_name("attention.yaml")
HEALED = [{"model": "original"}, {"model": "a, converted"}, {"model": "a, healed", "training": {}}]


def fake_run(folder: Path, name: str, converted: str = "a", before: dict[int, str] | None = None) -> sweep.Run:
    """A run whose process writes the rows of a conversion and then of a healed model.

    before: before it writes this number of rows, the process waits until the folder has a file of that name.
    """
    file = folder / f"{name}.json"
    code = f"""
import json, pathlib, time
file, rows, before = pathlib.Path({str(file)!r}), {HEALED!r}, {before or {}!r}
for count in 1, 2, 3:
    while count in before and not (file.parent / before[count]).exists():
        time.sleep(0.02)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(rows[:count]))
    partial.replace(file)
"""
    return sweep.Run(file, folder / converted, [sys.executable, "-S", "-c", code])


def test_the_shipped_plan_is_of_recipes_that_load(tmp_path, capsys):
    plan = sweep.load_plan(SHIPPED)
    for row in (row for rows in plan.groups.values() for row in rows):
        assert load_recipe(row.recipe, row.convert).attention
    words = [
        str(SHIPPED),
        "SRC",
        "--out",
        str(tmp_path / "rows"),
        "--group",
        "aims",
        "--dry-run",
        "--",
        "--data",
        "a b",
    ]
    assert sweep.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and all("--data" in line and "--healing attention" in line for line in lines)
    assert ["--seed 0" in line for line in lines] == [True, True, False, False, False, False]  # first seeds first
    assert not (tmp_path / "rows").exists()


def test_runs_of_one_conversion_wait_until_it_is_made(tmp_path):
    waits = {2: "go"}  # the first conversion ends when another one has begun
    runs = [fake_run(tmp_path, "first", before=waits), fake_run(tmp_path, "second"), fake_run(tmp_path, "other", "b")]
    started = []
    original = sweep.start

    def start(run):
        started.append((run.file.stem, len(runs[0].rows())))
        if run.file.stem == "other":
            (tmp_path / "go").touch()
        return original(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "start", start)
        patch.setattr(sweep, "POLL_SECONDS", 0.02)
        assert sweep.run_all(runs, 3, math.inf) == []
    assert [name for name, _ in started] == ["first", "other", "second"]
    assert started[1][1] < 2 <= started[2][1], "rows of the first run, which has two when its conversion is made"


def test_a_stopped_sweep_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.02)
    quick = fake_run(tmp_path, "quick", before={3: "slow.json"})  # ends when the other has begun
    runs = [quick, fake_run(tmp_path, "slow", "b", before={3: "never"})]

    def clock() -> float:  # the time is up once the quick run has ended
        return float(runs[0].process is not None and runs[0].process.poll() is not None)

    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    left = sweep.run_all(runs, 2, 1.0)
    monkeypatch.setattr(sweep, "time", time)
    assert [run.file.stem for run in left] == ["slow"] and runs[1].process.poll() is not None
    again = [fake_run(tmp_path, "quick", before={1: "never"}), fake_run(tmp_path, "slow", "b")]
    assert sweep.run_all(again, 2, math.inf) == [] and again[0].process is None


def test_a_damaged_file_of_rows_is_named(tmp_path):
    run = fake_run(tmp_path, "a")
    run.file.write_text("[{")
    with pytest.raises(SurgeryError, match="is not the JSON of a run"):
        sweep.run_all([run], 1, math.inf)


def test_a_failing_run_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.02)
    run = sweep.Run(tmp_path / "a.json", tmp_path / "b", [sys.executable, "-S", "-c", "raise SystemExit('no')"])
    assert sweep.run_all([run], 1, math.inf) == [run]
    assert "failed" in capsys.readouterr().out and "no" in sweep.log_path(run).read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("groups: {a: [{recipe: ssd, sedes: [1]}]}", "sedes"),
        ("groups: {a: [{recipe: ssd, tokens: 0}]}", "tokens"),
        ("- 1", "the plan"),
        ("a: [", "cannot be read"),
    ],
)
def test_plans_with_errors_are_refused(tmp_path, content, message):
    (tmp_path / "plan.yaml").write_text(content)
    with pytest.raises(SurgeryError, match=message):
        sweep.load_plan(tmp_path / "plan.yaml")


def test_an_unknown_group_is_refused():
    with pytest.raises(SurgeryError, match="its groups are window, aims, order, means"):
        sweep.plan_runs(sweep.load_plan(SHIPPED), ["nosuch"], "SRC", Path("rows"), [])


def test_rows_with_other_overrides_have_other_files(tmp_path):
    rows = [
        {"recipe": "ssd"},
        {"recipe": "ssd", "convert": ["attention.window=64"]},
        {"recipe": "ssd", "set": ["seed=1"]},
    ]
    plan = sweep.Plan.model_validate(json.loads(json.dumps({"groups": {"a": rows}})))
    runs = sweep.plan_runs(plan, [], "SRC", tmp_path, [])
    assert len({run.file for run in runs}) == 3 and len({run.converted for run in runs}) == 2
