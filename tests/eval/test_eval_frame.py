"""`surgery eval` with invented suites: resuming, failing, thresholds, batches, files."""

from __future__ import annotations

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress
from surgery.eval import run as frame
from surgery.eval import suite as suites
from surgery.eval.batching import score_in_batches
from surgery.eval.model import OpenedModel
from surgery.eval.results.models import compare_folders
from surgery.eval.results.thresholds import parse_thresholds
from surgery.eval.run import evaluate
from surgery.eval.several import evaluate_models
from surgery.eval.suite import EvalMetric, EvalModel, EvalOptions, Sample, Suite, SuiteResult

ACCURACY = EvalMetric("accuracy", "accuracy", scale=100, floor=0.1)
LOSS = EvalMetric("nll", "ppl", higher_is_better=False, title="perplexity")
OPTIONS = EvalOptions()


@pytest.fixture
def models(monkeypatch, tmp_path):
    """Names stand for checkpoints; `told` lists what ran: (suite, model)."""
    told: list[tuple[str, str]] = []

    def open_stub(role, name, ranks=None):
        return OpenedModel(role, name, tmp_path, f"{name}-fingerprint")

    @contextmanager
    def load_stub(one, device, dtype, trust, ranks, progress):
        yield EvalModel(
            one.role, one.name, one.folder, one.fingerprint, None, None, device, torch.float32, 64, ranks, progress
        )

    def suite(name, metric, values):
        def run(eval_model, options):
            told.append((name, eval_model.name))
            each = values(eval_model.name)
            samples = [Sample(name, str(i), {metric.name: v}, {"length": 8}) for i, v in enumerate(each)]
            return SuiteResult(samples, {metric.name: metric}, arrays={"x": torch.arange(3)}, notes=["a note"])

        return Suite(name, f"the suite {name}", run)

    def breaks(eval_model, options):
        told.append(("broken", eval_model.name))
        raise ValueError("no such thing")

    def beside(eval_models, options):
        told.append(("both", " ".join(s.name for s in eval_models)))
        return [SuiteResult([Sample("both", "0", {"accuracy": 1})], {"accuracy": ACCURACY}) for _ in eval_models]

    made = {
        "both": Suite("both", "side by side", lambda s, o: beside([s], o)[0], run_pair=beside),
        "right": suite("right", ACCURACY, lambda n: [1, 1, 1, 1 - (n == "worse")] * 5),
        "loss": suite("loss", LOSS, lambda n: [1.0 + 0.1 * (n == "worse") + 0.01 * i for i in range(20)]),
        "broken": Suite("broken", "breaks", breaks),
    }
    suites.load_suites()  # a module first imported below would register its suite in `made`
    monkeypatch.setattr(suites, "SUITES", made)
    monkeypatch.setattr(suites, "load_suites", lambda: made)
    monkeypatch.setattr(frame, "open_model", open_stub)
    monkeypatch.setattr(frame, "load_eval_model", load_stub)
    return told


def test_both_are_measured_and_paired(models):
    done = evaluate("worse", ["right", "loss"], OPTIONS, compare="good")
    assert models == [("right", "good"), ("loss", "good"), ("right", "worse"), ("loss", "worse")]
    row = done.row("right")
    assert row.values == {"base": 100, "converted": 75} and row.p == pytest.approx(2 / 2**5)
    assert done.row("loss").ratio.change == pytest.approx(2.718281828**0.1) and done.exit_code == 0


def test_itself_is_measured_once_and_differs_by_nothing(models):
    done = evaluate("good", ["right"], OPTIONS, compare="good")
    assert models == [("right", "good")]
    assert all((r.difference.change, r.difference.low, r.difference.high) == (0, 0, 0) for r in done.rows)


def test_what_is_done_is_not_done_again(models, tmp_path):
    out = tmp_path / "out"
    first = evaluate("worse", ["right"], OPTIONS, compare="good", out=out)
    again = evaluate("worse", ["right", "loss"], OPTIONS, compare="good", out=out)
    assert models[2:] == [("loss", "good"), ("loss", "worse")]
    assert again.row("right") == first.row("right")
    assert evaluate("other", ["right"], OPTIONS, compare="good", out=out) and models[4:] == [("right", "other")]
    evaluate("worse", ["right"], EvalOptions(seed=1), compare="good", out=out)
    assert models[5:] == [("right", "good"), ("right", "worse")]
    evaluate("worse", ["right"], EvalOptions(seed=1, batch_size=3), compare="good", out=out)
    assert len(models) == 7


def test_side_by_side(models, tmp_path):
    """Loaded together; kept for that pair."""
    out = tmp_path / "out"
    evaluate("worse", ["both", "right"], OPTIONS, compare="good", out=out)
    assert models == [("right", "good"), ("right", "worse"), ("both", "good worse")]
    evaluate("worse", ["both"], OPTIONS, compare="good", out=out)
    assert len(models) == 3
    evaluate("other", ["both"], OPTIONS, compare="good", out=out)
    evaluate("good", ["both"], OPTIONS, compare="good", out=out)
    assert models[3:] == [("both", "good other"), ("both", "good")]


def test_several_models_share_the_base_and_are_compared(models, tmp_path):
    out = tmp_path / "out"
    evaluate("old", ["right"], OPTIONS, out=out)
    done = evaluate_models(
        ["worse", "other", "worse"], ["right", "loss"], OPTIONS, out=out, compare="good", fail_below=["right=0.9"]
    )
    assert models[1:] == [(suite, model) for model in ("good", "worse", "other") for suite in ("right", "loss")]
    assert (
        done.comparison.names == ["good", "worse", "other"] and done.comparison.base == "good" and done.exit_code == 1
    )
    row = next(row for row in done.comparison.rows if row.task == "right")
    assert row.values == {"good": 100, "worse": 75, "other": 100} and row.differences["worse"].change == -25
    assert any("worse: limit right=0.9 MISSED" in message for message in done.messages)
    assert {"comparison.json", "table.md", "table.csv", "table.tex"} <= {path.name for path in out.iterdir()}
    assert json.loads((out / "results.json").read_text())["models"]["converted"]["name"] == "old"
    assert done.to_dict()["limits"]["other"][0]["held"]
    for name in ("worse", "other"):  # what --verify reads
        (place,) = out.glob(f"{name}-*")
        told = json.loads((place / "results.json").read_text())
        assert {role: model["name"] for role, model in told["models"].items()} == {"base": "good", "converted": name}
        assert compare_folders([out, place]).base == "good"
    with pytest.raises(SurgeryError, match="Give --out DIR"):
        evaluate_models(["worse", "other"], ["right"], OPTIONS, out=None)
    with pytest.raises(SurgeryError, match="one and the same"):
        evaluate_models(["worse", "worse"], ["right"], OPTIONS, out=tmp_path / "one")


def test_several_models_take_turns(models, tmp_path, monkeypatch):
    """Suites that time load all models together, once; the same command again measures nothing, and differences are
    given.
    """
    monkeypatch.setattr("surgery.eval.results.models.SUITES", suites.SUITES)
    done = evaluate_models(["worse", "other"], ["both"], OPTIONS, out=tmp_path / "out", compare="good")
    assert models == [("both", "good worse other")]
    again = evaluate_models(["other", "worse"], ["both"], OPTIONS, out=tmp_path / "out", compare="good")
    assert (
        len(models) == 1
        and again.comparison.to_dict()["rows"][0]["values"] == done.comparison.to_dict()["rows"][0]["values"]
    )
    row = next(row for row in done.comparison.rows if row.task == "both")
    assert set(row.differences) == {"worse", "other"}
    assert not any("no differences" in note for note in done.comparison.notes)
    evaluate("worse", ["both"], OPTIONS, compare="good", out=tmp_path / "out")
    assert models[1:] == [("both", "good worse")]


def test_models_that_do_not_fit_together(models, monkeypatch):
    def beside(eval_models, options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setitem(suites.SUITES, "both", Suite("both", "side by side", lambda s, o: None, run_pair=beside))
    with pytest.raises(
        SurgeryError, match=r"both: 2 models take turns and must fit in the memory of .* Evaluate fewer at once"
    ):
        evaluate("worse", ["both"], OPTIONS, compare="good")
    done = evaluate("worse", ["both", "right"], OPTIONS, compare="good")
    assert "take turns" in done.broken["both"] and done.exit_code == 2


HARMS = [("result.json", harm) for harm in ("", "{", "[]", "3", "null", '"x"', '{"key": {}}', "[" * 100_000)]
HARMS += [
    ("samples.jsonl", '{"task": 3'),
    ("samples.jsonl", "[1]"),
    ("arrays.safetensors", "x"),
    ("arrays.safetensors", ""),
]


@pytest.mark.parametrize("name, harm", HARMS, ids=range(len(HARMS)))
def test_damaged_results_are_measured_again(models, tmp_path, name, harm):
    evaluate("good", ["right"], OPTIONS, out=tmp_path / "out")
    (found,) = (tmp_path / "out").rglob(name)
    found.write_text(harm)
    assert evaluate("good", ["right"], OPTIONS, out=tmp_path / "out").row("right").values == {"converted": 100}
    assert len(models) == 2


def test_files(models, tmp_path):
    done = evaluate(
        "worse",
        ["right"],
        OPTIONS,
        compare="good",
        out=tmp_path / "out",
        fail_below=["right=0.5"],
        command=["surgery", "eval"],
    )
    names = sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file())
    folders = ["good-good-fin/right", "worse-worse-fi/right"]
    files = ["arrays.safetensors", "result.json", "samples.jsonl"]
    assert names == sorted([*(f"{d}/{f}" for d in folders for f in files), "results.json", "table.md"])
    said = json.loads((tmp_path / "out" / "results.json").read_text())
    assert said == json.loads(json.dumps(done.to_dict()))
    assert said["limits"] == [
        {"limit": "right=0.5", "task": "right", "metric": "accuracy", "ratio": 0.75, "held": True}
    ]
    table = (tmp_path / "out" / "table.md").read_text()
    assert (
        "| right | right, accuracy | 20 | 100 [83.9, 100] | 75 [53.1, 88.8] | -25 |" in table
        and "- right: a note" in table
    )
    assert "- reproduce with: surgery eval\n" in table
    line = json.loads((tmp_path / "out" / folders[1] / "samples.jsonl").read_text().splitlines()[3])
    assert line["metrics"] == {"accuracy": 0} and line["id"] == "3" and line["group"] == {"length": 8}


def test_a_suite_that_breaks_does_not_stop_the_others(models, tmp_path):
    done = evaluate(
        "worse", ["broken", "right"], OPTIONS, compare="good", out=tmp_path / "out", fail_below=["broken=0.9"]
    )
    assert models == [("broken", "good"), ("right", "good"), ("right", "worse")]
    assert done.broken == {"broken": "ValueError: no such thing (good)"} and done.exit_code == 2
    assert done.row("right").samples == 20 and not done.verdicts[0].held
    assert "could not be measured" in (tmp_path / "out" / "table.md").read_text()
    assert not list((tmp_path / "out").rglob("broken"))


def test_alone_its_error_is_the_answer(models):
    with pytest.raises(ValueError, match="no such thing"):
        evaluate("good", ["broken"], OPTIONS)


def test_a_failure_before_the_first_result_leaves_no_folder(models, tmp_path):
    with pytest.raises(ValueError, match="no such thing"):
        evaluate("good", ["broken"], OPTIONS, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="no such thing"):
        evaluate("good", ["broken"], OPTIONS, out=tmp_path / "mine")
    assert (tmp_path / "mine").is_dir()


@pytest.mark.parametrize(
    "limit, code",
    [
        ("right=0.75", 0),
        ("right=0.76", 1),
        ("loss=1.11", 0),
        ("loss=1.1", 1),
        ("loss:perplexity=1.2", 0),
        ("right:accuracy=0.9", 1),
    ],
)
def test_limits(models, limit, code):
    assert evaluate("worse", ["right", "loss"], OPTIONS, compare="good", fail_below=[limit]).exit_code == code


@pytest.mark.parametrize(
    "given, compare, says",
    [
        ("ppl", "x", "must be NAME=SHARE, a share of the base's score, for example --fail-below ppl=1.05"),
        ("ppl=-1", "x", "must be NAME=SHARE"),
        ("ppl=nan", "x", "must be NAME=SHARE"),
        ("ppl=1.05", None, "is a share of the base's score. Give the base with --compare BASE"),
    ],
)
def test_limits_that_say_nothing(given, compare, says):
    with pytest.raises(SurgeryError, match=says):
        parse_thresholds([given], compare is not None)


def test_a_limit_of_nothing_measured(models):
    with pytest.raises(SurgeryError, match="nothing of that name was measured; measured: right"):
        evaluate("worse", ["right"], OPTIONS, compare="good", fail_below=["rigth=0.9"])


def test_a_file_in_the_way(models, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(SurgeryError, match=r"is a file\. Give a folder"):
        evaluate("good", ["right"], OPTIONS, out=tmp_path / "out")
    with pytest.raises(SurgeryError, match=r"is not a folder\. Create it first"):
        evaluate("good", ["right"], OPTIONS, out=tmp_path / "a" / "b")


def test_a_text_counts_by_its_bytes(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one")
    first = EvalOptions(text=str(text)).digest()
    assert EvalOptions(text=str(text), batch_size=7).digest() == first
    text.write_text("two")
    assert EvalOptions(text=str(text)).digest() != first


# -- batches -----------------------------------------------------------------------------------------
def eval_model(told=None, ranks=None):
    say = SimpleNamespace(say=(told if told is not None else []).append, bar=Progress().bar)
    device = torch.device("cpu")
    return EvalModel("base", "m", None, "", None, None, device, torch.float32, None, ranks or DistContext(), say)


def test_out_of_memory_halves_the_batch_and_goes_on():
    told, sizes = [], []

    def score(batch):
        sizes.append(len(batch))
        if len(batch) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return [10 * item for item in batch]

    items = list(range(1, 31))
    found = score_in_batches(
        eval_model(told), EvalOptions(batch_size=16), items, score, lambda i: 8, "t", prepare=lambda i: i
    )
    assert found == [10 * i for i in items]
    assert sizes[:5] == [1, 16, 8, 4, 2] and max(sizes[4:]) == 2
    assert told[0] == "out of memory at 16 rows per batch; continuing with 8" and len(told) == 3


def test_one_row_that_does_not_fit_is_said():
    def score(batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(SurgeryError, match="out of memory at one row of 4,096 tokens; use shorter --lengths"):
        score_in_batches(eval_model(), EvalOptions(batch_size=2), [1, 2], score, lambda i: 4096, "t")


def test_other_errors_are_not_memory():
    def score(batch):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        score_in_batches(eval_model(), OPTIONS, [1, 2], score, lambda i: 4, "t")


def test_batches_are_of_like_lengths_and_prepared_one_ahead():
    seen, made = [], []

    def score(batch):
        seen.append(batch)
        assert len(made) <= sum(map(len, seen)) + 64
        return batch

    items = [100, 3, 90, 2, 60, 40, 3]
    found = score_in_batches(
        eval_model(), EvalOptions(batch_size=4), items, score, lambda i: i, "t", prepare=lambda i: made.append(i) or i
    )
    assert found == items and seen == [[100], [90, 60], [40], [3, 3, 2]] and sorted(made) == sorted(items)


def test_auto_holds_as_many_tokens_at_every_length():
    seen = []
    score_in_batches(
        eval_model(), OPTIONS, [512] * 40 + [64] * 40, lambda b: seen.append(b) or b, lambda i: i, "t", tokens=1024
    )
    assert [len(b) for b in seen] == [2] * 20 + [16, 16, 8]
