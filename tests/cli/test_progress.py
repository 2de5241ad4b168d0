"""Progress output: one line a step, a bar on a terminal, lines with rate and time left elsewhere, notes at the end."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from surgery.cli.console import CommandProgress
from surgery.core import progress
from surgery.core.progress import LinePace, RichProgress, duration_text
from surgery.training.logging import LogReporter, format_entry, groups_table


class Clock:
    """Stands in for `time`: each call of `tick` of a step takes `seconds`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


def run_step(shown, clock, counts, seconds, title="converting layers", done_before=0):
    with shown.bar(title, counts) as tick:
        if done_before:
            tick(done_before)
        for _ in range(counts - done_before):
            clock.now += seconds
            tick()


def test_a_short_step_prints_its_name_once(capsys, clock):
    run_step(RichProgress(), clock, 12, 0.1)
    assert capsys.readouterr().err == "converting layers\n"


def test_a_long_step_prints_rate_and_time_left_where_there_is_no_terminal(capsys, clock):
    run_step(RichProgress(), clock, 20, 3.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "converting layers",
        "converting layers: 2 of 20, 3.0 s each, 54 s left",
        "converting layers: 4 of 20, 3.0 s each, 48 s left",
    ]
    assert len(lines) == 11 and lines[-1] == "converting layers: 20 of 20 in 60 s"


def test_a_step_that_ends_early_says_so(capsys, clock):
    with RichProgress().bar("tuning", 20) as tick:
        for _ in range(3):
            clock.now += 6.0
            tick()
    assert capsys.readouterr().err.splitlines()[-1] == "tuning: ended after 3 of 20 in 18 s"


def test_finished_work_of_an_interrupted_run_does_not_count_in_the_rate(capsys, clock):
    run_step(RichProgress(), clock, 20, 8.0, done_before=10)
    assert "converting layers: 11 of 20, 8.0 s each, 72 s left" in capsys.readouterr().err


@pytest.mark.parametrize("counts, seconds", [(20, 1800.0), (100_000, 0.36), (10**6, 0.0001)])
def test_a_step_of_any_length_prints_few_lines(counts, seconds, clock):
    pace, lines, silent, longest = LinePace(counts), 0, 0.0, 0.0
    for done in range(1, counts + 1):
        clock.now += seconds
        silent += seconds
        if pace.is_due(done):
            lines, silent, longest = lines + 1, 0.0, max(longest, silent)
    total = counts * seconds
    assert lines <= 20 + 10 * (total > 600) * 10
    assert longest <= max(progress.LONGEST_SILENCE, 0.06 * total, seconds) + seconds
    assert lines >= (total > progress.LONGEST_SILENCE)


class Terminal(RichProgress):
    def __init__(self):
        super().__init__()
        self.console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)

    def text(self) -> str:
        return self.console.file.getvalue()


def test_a_terminal_keeps_one_line_of_each_step_and_draws_a_step_inside_another():
    shown = Terminal()
    with shown.bar("converting layers", 2) as tick:
        tick()
        tick()
        with shown.bar("tuning the model", 3) as inner:
            inner(3)
    with shown.bar("stopped early", 5) as tick:
        tick(2)
    text = shown.text()
    for line in ("converting layers: 2 of 2 in", "tuning the model: 3 of 3 in", "stopped early: ended after 2 of 5 in"):
        assert text.count(line) == 1
    assert shown.bars is None


def test_lines_are_not_wrapped_in_a_file(capsys):
    RichProgress().say("x " * 200)
    assert capsys.readouterr().err.count("\n") == 1


def test_held_lines_are_printed_once(capsys):
    shown = CommandProgress()
    for _ in range(2):
        shown.say_last("note: not copied")
    shown.say("writing the checkpoint")
    assert capsys.readouterr().err == "writing the checkpoint\n"
    for _ in range(2):
        shown.say_held()
    assert capsys.readouterr().err == "note: not copied\n"


def log_entry(step, steps=100):
    return {
        "stage": 0, "kind": "logits", "step": step, "steps": steps, "tokens": 10, "loss": 0.5, "rate": 1e-3,
        "tokens_per_second": 100.0, "memory": 0, "seconds_left": 61.0,
    }  # fmt: skip


def test_training_without_a_terminal_prints_an_entry_now_and_then(capsys, clock):
    reporter = LogReporter(RichProgress(), True)
    with reporter.stage("1. logits", 100, 0):
        for step in range(1, 101):
            clock.now += 1.0
            reporter(log_entry(step))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["1. logits: 100 steps", format_entry(log_entry(1))] and lines[-1] == format_entry(
        log_entry(100)
    )
    assert len(lines) <= 13 and format_entry(log_entry(1)) == (
        "logits 1/100: loss 0.5000, learning rate 1.00e-03, 100 tokens/s, 1:01 left"
    )


def test_the_groups_of_a_kind_are_one_row():
    rows = [
        {"kind": "structured", "tensors": 1, "parameters": 9, "rate": 0.1, "decay": 0, "fan_in": fan, "fan_out": 4096}
        for fan in (24, 1024)
    ]
    groups = [SimpleNamespace(row=lambda row=row: row) for row in [*rows, {**rows[0], "kind": "other"}]]
    (table,) = groups_table("1. distill", groups)
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["structured", "2", "18", "24 to 1,024", "4,096", "0.1", "0"] and table.row_count == 2


@pytest.mark.parametrize(
    "seconds, text", [(0.2, "under 1 s"), (2.14, "2.1 s"), (21, "21 s"), (200, "3 min"), (5400, "1.5 h")]
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text
