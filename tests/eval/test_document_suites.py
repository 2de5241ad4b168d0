"""LongBench v2, LongBench-E, BABILong and InfiniteBench, offline, on the mirror in miniature."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress
from surgery.eval.averages import (
    LONGBENCH2,
    LONGBENCH_E_TASKS,
    SuiteAverages,
    babilong_averages,
    infinitebench_averages,
    longbench2_averages,
    longbench_e_averages,
)
from surgery.eval.document_suites import BABILONG, longbench2_groups, shorten_texts
from surgery.eval.lm_eval.adapter import harness_model
from surgery.eval.long_context.longbench import length_range
from surgery.eval.results.averages import average_rows
from surgery.eval.run import load
from surgery.eval.suite import EvalMetric, EvalModel, EvalOptions, Sample, SuiteResult, find_suite
from surgery.eval.task_names import load_tasks

ROOT = Path(__file__).resolve().parents[2]
TINY, MIRROR = ROOT / "recipes" / "tiny" / "checkpoint", ROOT / "eval" / "mirror"
QUICK = {"max_gen_toks": 2}


@pytest.fixture(scope="module")
def eval_model() -> EvalModel:
    model, tokenizer = load(str(TINY), torch.device("cpu"), "float32", False)
    return EvalModel(
        "base", "tiny", TINY, "", model, tokenizer, torch.device("cpu"), torch.float32, 1024, DistContext(), Progress()
    )


def run(eval_model: EvalModel, suite: str, **given) -> SuiteResult:
    return find_suite(suite).run(eval_model, EvalOptions(data_root=MIRROR, **given))


def means(suite: str, result: SuiteResult) -> dict[str, float]:
    rows, _ = average_rows(suite, find_suite(suite).averages, {"base": result})
    return {row.label: row.values["base"] for row in rows}


def test_longbench2_by_length(eval_model):
    found = run(eval_model, "longbench2", limit=1, tasks=("code", "legal_multi"))
    assert [s.group for s in found.samples] == [{"words": "short"}] * 2
    assert found.metrics["acc"].kind == "accuracy" and found.floors["longbench2_code"]["acc"] == 0.25
    assert "code repositories" in means("longbench2", found)


@pytest.mark.slow
def test_longbench2(eval_model):
    found = run(eval_model, "longbench2", limit=1)
    assert len(found.samples) == 20 and {s.group["words"] for s in found.samples} == {"short"}
    assert found.metrics["acc"].kind == "accuracy" and found.floors["longbench2_code"]["acc"] == 0.25
    overall = means("longbench2", found)
    correct = sum(s.metrics["acc"] for s in found.samples)
    assert overall["overall"] == overall["short"] == pytest.approx(correct / 20) and "long" not in overall
    assert {*LONGBENCH2} < set(overall)


def test_documents_that_are_too_long_lose_their_middle(eval_model):
    found = run(eval_model, "longbench2", tasks=("graph", "longbench2_table"), lengths=(96, 1024))
    assert {s.group["length"] for s in found.samples} == {96, 1024} and len({s.id for s in found.samples}) == 8
    (note,) = found.notes
    assert "scored without their middle: 8 of longbench2_graph, 8 of longbench2_table" in note
    lm = harness_model(eval_model, EvalOptions(), 64, keep_ends=True)
    assert lm._truncate(list(range(10)), 4) == [0, 1, 8, 9] and lm._truncate([1, 2], 4) == [1, 2]
    assert lm._truncate(torch.arange(10), 5).tolist() == [0, 1, 7, 8, 9]
    assert harness_model(eval_model, EvalOptions(), 64)._truncate(list(range(10)), 4) == [6, 7, 8, 9]


def test_ranges_of_longbench2():
    assert longbench2_groups({"context": "a " * 31_999}) == {"words": "short"}
    assert longbench2_groups({"context": "a " * 32_000, "difficulty": "hard"}) == {
        "words": "medium",
        "difficulty": "hard",
    }
    assert longbench2_groups({"context": "a " * 128_000}) == {"words": "long"}
    assert longbench2_groups({"context": "a", "length": "long"}) == {"words": "long"}


def test_every_question_of_longbench2_counts_the_same():
    """A mean over tasks would be 50."""
    samples = [Sample("longbench2_code", str(i), {"acc": 1.0}, {"words": "short"}) for i in range(9)]
    others = [task for tasks in LONGBENCH2.values() for task in tasks if task != "code"]
    samples += [Sample(f"longbench2_{task}", "0", {"acc": 0.0}, {"words": "long"}) for task in others]
    result = SuiteResult(samples, {"acc": EvalMetric("acc", "accuracy")})
    rows, notes = average_rows("longbench2", longbench2_averages, {"base": result})
    found = {row.name: row for row in rows}
    assert found["overall"].values["base"] == pytest.approx(9 / 28) and found["overall"].samples == 28
    low, high = found["overall"].intervals["base"]
    assert 0.1 < low < 9 / 28 < high < 0.6
    assert found["short"].values["base"] == 1 and found["long"].values["base"] == 0 and not notes


def test_longbench_e_by_length(eval_model):
    found = run(eval_model, "longbench-e", tasks=("trec", "lcc"), gen_kwargs=QUICK, limit=1, lengths=(256,))
    assert sorted((s.task, s.group["words"], s.group["length"]) for s in found.samples) == [
        (f"longbench_e_{task}", words, 256) for task in ("lcc", "trec") for words in ("0-4k", "4-8k", "8k+")
    ]


@pytest.mark.slow
def test_longbench_e(eval_model):
    found = run(eval_model, "longbench-e", gen_kwargs=QUICK, limit=1)
    assert {s.task for s in found.samples} == {f"longbench_e_{task}" for task in LONGBENCH_E_TASKS}
    assert {s.group["words"] for s in found.samples} == {"0-4k", "4-8k", "8k+"} and len(found.samples) == 39
    labels = means("longbench-e", found)
    assert {f"average of the 13 tasks, {n} words" for n in ("0-4k", "4-8k", "8k+")} < set(labels) and len(labels) == 6
    assert [length_range({"length": n}) for n in (0, 3999, 4000, 7999, 8000)] == ["0-4k", "0-4k", "4-8k", "4-8k", "8k+"]


def test_means_of_longbench_e():
    samples = [
        Sample(f"longbench_e_{task}", f"{words} {i}", {"score": float(task == "lcc")}, {"words": words})
        for task in LONGBENCH_E_TASKS
        for words in ("0-4k", "4-8k", "8k+")
        for i in range(3)
    ]
    result = SuiteResult(samples, {"score": EvalMetric("score", scale=100.0, top=1.0)})
    rows, _ = average_rows("longbench-e", longbench_e_averages, {"base": result})
    found = {row.name: row.values["base"] for row in rows}
    assert found["average of the 13 tasks, 8k+ words"] == pytest.approx(100 / 13)
    assert found["mean of the 6 categories, 8k+ words"] == pytest.approx(100 / 12)


def test_babilong(eval_model):
    found = run(eval_model, "babilong", lengths=(1024, 2048), tasks=("qa1", "babilong_qa2"), limit=1, gen_kwargs=QUICK)
    assert {(s.task, s.group["length"]) for s in found.samples} == {
        (f"babilong_{task}", n) for task in ("qa1", "qa2") for n in (1024, 2048)
    }
    prompts = [s.shown["arguments"][0][0] for s in found.samples if s.task == "babilong_qa1"]
    assert all(p.startswith("I will give you context") and "Charlie went to the hallway" in p for p in prompts)
    assert len({s.shown["doc"]["input"] for s in found.samples}) == 4
    assert next(a.label for a in babilong_averages((1024, 2048)).averages[0].members) == "babilong_qa1 at 1,024"
    with pytest.raises(SurgeryError, match="--lengths 1000: babilong has 1024, 2048"):
        run(eval_model, "babilong", lengths=(1000,))


@pytest.mark.slow
def test_tasks_of_babilong_without_surrounding_text(eval_model):
    short = run(eval_model, "babilong", tasks=("qa6",), gen_kwargs=QUICK)
    assert {(s.task, *s.group) for s in short.samples} == {("babilong_qa6",)} and len(short.samples) == 2


def test_a_length_that_the_mirror_lacks_is_told_and_the_others_run(eval_model, tmp_path):
    place = tmp_path / BABILONG
    place.mkdir(parents=True)
    shutil.copy(MIRROR / BABILONG / "1k" / "qa1.jsonl", place)
    (place / "README.md").write_text(
        "---\nconfigs:\n- config_name: 1k\n  data_files:\n  - split: qa1\n    path: qa1.jsonl\n---\n"
    )
    asked = EvalOptions(data_root=tmp_path, lengths=(1024, 4096), tasks=("qa1",), limit=1, gen_kwargs=QUICK)
    found = find_suite("babilong").run(eval_model, asked)
    assert (
        len(found.samples) == 1 and list(found.broken) == ["babilong at 4k"] and "4k" in found.broken["babilong at 4k"]
    )


def test_infinitebench_has_types_of_its_columns(eval_model):
    found = run(eval_model, "infinitebench", tasks=("passkey", "longbook_qa_chn"), limit=1, gen_kwargs=QUICK)
    assert [s.shown["doc"]["answer"] for s in found.samples] == [["71432"], ["小明"]]
    alone = run(
        eval_model, "infinitebench_passkey", limit=1, gen_kwargs=QUICK
    )  # lm-eval's own, truncated from the left
    assert [s.task for s in alone.samples] == ["infinitebench_passkey"]
    assert len(load_tasks(["infinitebench"], EvalOptions(data_root=MIRROR))["tasks"]) == 11


@pytest.mark.slow
def test_infinitebench(eval_model):
    found = run(eval_model, "infinitebench", limit=1, gen_kwargs=QUICK)
    assert len({s.task for s in found.samples}) == 11 and all(0 <= s.metrics["score"] <= 1 for s in found.samples)
    assert list(means("infinitebench", found)) == ["average of 11 tasks, without math_calc"]
    (code,) = [s for s in found.samples if s.task == "infinitebench_code_debug"]
    assert code.shown["arguments"][0][0].startswith("There is ONLY ONE function")
    assert isinstance(infinitebench_averages(()), SuiteAverages)


def test_documents_are_not_written_whole():
    shown = shorten_texts({"doc": {"context": "a" * 10_000 + "end"}, "arguments": [("x" * 5000, "A")], "n": 3})
    assert len(shown["doc"]["context"]) < 3100 and shown["doc"]["context"].endswith("aend") and shown["n"] == 3
    assert len(shown["arguments"][0][0]) < 3100 and shown["arguments"][0][1] == "A"


@pytest.mark.parametrize(
    ("suite", "task", "says"),
    [
        ("longbench2", "grap", "did you mean 'graph'"),
        ("longbench-e", "narrativeqa", "has no task 'narrativeqa'"),
        ("infinitebench", "math_calc", "has no task 'math_calc'"),
        ("babilong", "qa21", "has no task 'qa21'"),
    ],
)
def test_unknown_tasks(eval_model, suite, task, says):
    with pytest.raises(SurgeryError, match=says):
        run(eval_model, suite, tasks=(task,))
    with pytest.raises(SurgeryError, match="--suite longbench-e --tasks qasper"):
        find_suite("longbench_qasper_e")
