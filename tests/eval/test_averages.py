"""Averages over tasks are those of the papers, are given only when whole, and their intervals cover."""

from __future__ import annotations

import numpy as np
import pytest

from surgery.core.tables import format_tokens
from surgery.eval.averages import (
    LONGBENCH,
    RULER_LENGTHS,
    RULER_TASKS,
    longbench_averages,
    retrieval_averages,
    ruler_averages,
    zeroshot_averages,
)
from surgery.eval.long_context.longbench.prompts import TASKS as LONGBENCH_TASKS
from surgery.eval.long_context.retrieval import TASKS as RETRIEVAL
from surgery.eval.long_context.ruler import TASKS
from surgery.eval.results import statistics
from surgery.eval.results.averages import average_rows
from surgery.eval.suite import EvalMetric, Sample, SuiteResult

SCORE = EvalMetric("score", "mean", scale=100.0, top=1.0)
GPT4 = (96.6, 96.3, 95.2, 93.2, 87.0, 81.2)  # RULER, table 3


def result(cells: dict[tuple[str, int | None], list[float]], metric: EvalMetric = SCORE) -> SuiteResult:
    """A result with the given scores by (task, length)."""
    samples = [
        Sample(task, f"{task} {length} {i}", {metric.name: v}, {} if length is None else {"length": length})
        for (task, length), values in cells.items()
        for i, v in enumerate(values)
    ]
    return SuiteResult(samples, {metric.name: metric})


def ruler(by_length: dict[int, float], tasks=RULER_TASKS) -> SuiteResult:
    return result({(task, n): [share] * 4 for n, share in by_length.items() for task in tasks})


def named(rows, name):
    return next(row for row in rows if row.name == name)


def test_the_tasks_are_those_of_the_suites():
    assert set(RULER_TASKS) == set(TASKS)
    assert {t for pair in LONGBENCH.values() for tasks in pair for t in tasks} == set(LONGBENCH_TASKS)
    (average, *_) = retrieval_averages([512]).averages
    assert {m.task for m in average.members} == set(RETRIEVAL)


def test_ruler_s_weighted_averages_are_the_paper_s():
    rows, notes = average_rows("ruler", ruler_averages, {"m": ruler({n: v / 100 for n, v in zip(RULER_LENGTHS, GPT4)})})
    assert named(rows, "wAvg (inc), 4K to 128K").values["m"] == pytest.approx(89.0, abs=0.05)
    assert named(rows, "wAvg (dec), 4K to 128K").values["m"] == pytest.approx(94.1, abs=0.05)
    effective = named(rows, "effective length, threshold 85.6")
    assert effective.values == {"m": 65536.0} and notes == []
    assert [row.values["m"] for row in rows[:6]] == pytest.approx(GPT4)


def test_effective_length_of_the_base_s_own_threshold():
    base, ours = ruler({4096: 0.5, 8192: 0.4}), ruler({4096: 0.6, 8192: 0.55})
    rows, _ = average_rows("ruler", ruler_averages, {"base": base, "converted": ours}, "base")
    own = named(rows, "effective length, threshold 50 (the base at 4,096)")
    assert own.values == {"base": 4096, "converted": 8192} and own.differences == {}
    assert named(rows, "effective length, threshold 85.6").values == {"base": 0, "converted": 0}


def test_the_effective_length_is_as_uncertain_as_the_averages():
    """Near the threshold its interval names both lengths, far from it one; a base that scores 0 is no threshold."""
    rows, notes = average_rows("ruler", ruler_averages, {"base": ruler({4096: 1.0, 8192: 0.86, 16384: 0.2})}, "base")
    fixed = named(rows, "effective length, threshold 85.6")
    assert fixed.values == {"base": 8192} and fixed.intervals == {"base": (4096, 8192)}
    assert named(rows, "effective length, threshold 100 (the base at 4,096)").intervals["base"][0] == 4096
    zero = {"base": ruler({4096: 0.0, 8192: 0.0}), "ours": ruler({4096: 0.5, 8192: 0.5})}
    rows, notes = average_rows("ruler", ruler_averages, zero, "base")
    assert "effective length, threshold of the base is not given: the base scores 0 at 4,096" in notes
    assert [row.name for row in rows if row.unit == "tokens"] == ["effective length, threshold 85.6"]


def test_longbench_categories_and_overall():
    every = {(f"longbench_{t}", None): [i / 40] * 3 for i, t in enumerate(LONGBENCH_TASKS)}
    rows, notes = average_rows("longbench", longbench_averages, {"m": result(every)})
    mean = {row.name: row.values["m"] for row in rows}
    score = {task: 100 * i / 40 for i, task in enumerate(LONGBENCH_TASKS)}
    each = [np.mean([score[t] for t in english]) for english, _ in LONGBENCH.values()]
    assert mean["overall (English), mean of the 6 categories"] == pytest.approx(np.mean(each)) and notes == []
    assert mean["summarization"] == pytest.approx(each[2])
    chinese = [np.mean([score[t] for t in zh]) for _, zh in LONGBENCH.values()]
    assert mean["overall (Chinese), mean of the 6 categories"] == pytest.approx(np.mean(chinese))
    paper = [score[name] for name, task in LONGBENCH_TASKS.items() if task.in_paper]
    assert mean["average of the 14 tasks of Log-Linear Attention"] == pytest.approx(np.mean(paper))


def test_a_partial_average_has_another_name_and_says_what_is_missing():
    rows, notes = average_rows("ruler", ruler_averages, {"m": ruler({4096: 0.5}, RULER_TASKS[:11])})
    assert [row.name for row in rows] == ["mean of 11 of the 13 tasks"] and rows[0].missing == ["qa_1", "qa_2"]
    assert notes == ["average of the 13 tasks at 4,096 is not given: qa_1, qa_2 were not measured"]
    assert rows[0].source == ""


def test_zeroshot_takes_the_metrics_that_papers_report():
    samples = [
        Sample(task, f"{task} {i}", {"acc": 0.0, "acc_norm": 1.0})
        for task in ("lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge")
        for i in range(4)
    ]
    metrics = {name: EvalMetric(name, "accuracy") for name in ("acc", "acc_norm")}
    rows, _ = average_rows("zeroshot", zeroshot_averages, {"m": SuiteResult(samples, metrics)})
    assert [row.values["m"] for row in rows] == pytest.approx([2 / 6, 2 / 5, 0.0])


def test_intervals_pair_models_and_hold_the_value():
    rng = np.random.default_rng(0)
    hard = {(t, 4096): rng.random(40) for t in RULER_TASKS}
    base = result({k: (v < 0.8).astype(float).tolist() for k, v in hard.items()})
    ours = result({k: (v < 0.75).astype(float).tolist() for k, v in hard.items()})
    rows, _ = average_rows("ruler", ruler_averages, {"base": base, "ours": ours}, "base")
    row = rows[0]
    low, high = row.intervals["ours"]
    assert low < row.values["ours"] < high and row.samples == 13 * 40
    change = row.differences["ours"]
    assert change.low < change.change < change.high < 0
    assert change.high - change.low < 0.7 * (high - low)


def test_equal_answers_are_not_certain_and_one_model_is_itself():
    one = ruler({4096: 1.0})
    rows, _ = average_rows("ruler", ruler_averages, {"base": one, "other": one, "itself": one}, "base", ["itself"])
    row = rows[0]
    assert row.intervals["base"][0] < 100 and row.intervals["base"][1] == 100
    assert row.differences["other"].low < 0 < row.differences["other"].high
    assert (row.differences["itself"].low, row.differences["itself"].high) == (0, 0)


def test_a_task_of_one_question_has_no_interval():
    rows, _ = average_rows("ruler", ruler_averages, {"m": result({(t, 4096): [1.0] for t in RULER_TASKS})})
    assert rows[0].intervals == {"m": None} and rows[0].values == {"m": 100}


@pytest.mark.parametrize("n", [5, 25])
def test_interval_of_an_average_covers(n, monkeypatch):
    """Tasks of unequal difficulty; what is lost differs by task."""
    monkeypatch.setattr(statistics, "BOOTSTRAP_DRAWS", 200)
    rng = np.random.default_rng(3)
    keep, lost = np.linspace(0.3, 0.95, 13), np.linspace(0.0, 0.3, 13)
    hits = [0, 0]
    for seed in range(120):
        u = rng.random((13, n))
        base = {(t, 4096): (u[i] < keep[i]).astype(float).tolist() for i, t in enumerate(RULER_TASKS)}
        ours = {(t, 4096): (u[i] < keep[i] * (1 - lost[i])).astype(float).tolist() for i, t in enumerate(RULER_TASKS)}
        both = {"base": result(base), "ours": result(ours)}
        row = average_rows("ruler", ruler_averages, both, "base", seed=seed)[0][0]
        low, high = row.intervals["base"]
        hits[0] += low <= 100 * keep.mean() <= high
        change = row.differences["ours"]
        hits[1] += change.low <= -100 * (keep * lost).mean() <= change.high
    assert all(0.9 <= hit / 120 <= 1 for hit in hits), hits


def test_lengths_are_written_as_people_write_them():
    assert [format_tokens(n) for n in (0, 500, 512, 4096, 131072, 2**20)] == ["none", "500", "512", "4K", "128K", "1M"]
