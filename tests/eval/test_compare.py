"""`surgery compare`: what is compared, what is refused, and that a stranger's results cannot do harm."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re

import pytest
import torch
from typer.testing import CliRunner

import surgery
from surgery.core.errors import SurgeryError
from surgery.eval.results import folders as reading
from surgery.eval.results.model_tables import format_comparison, lines, notes
from surgery.eval.results.models import compare_folders
from surgery.eval.results.pareto import CostPoint, pareto_front
from surgery.eval.results.store import ResultStore, result_key
from surgery.eval.suite import EvalMetric, EvalOptions, Sample, SuiteResult, infer_metric_kind
from surgery.publish.html.models import _front as front_of_page

ACCURACY = EvalMetric("accuracy", "accuracy", scale=100, unit="%")
NLL = EvalMetric("nll", "ppl", higher_is_better=False, title="perplexity")
MS = EvalMetric("prefill_ms", "mean", higher_is_better=False, unit="ms", title="prefill", pooled=False)
VERSIONS = {"surgery": "0.1.0", "torch": "2.0"}
EVIL = "x|y $a$ <b> & % \\input{/etc/passwd} [l](u) *e*"


def needle(right: int) -> SuiteResult:
    samples = [
        Sample("needle", f"{n} {d} {i}", {"accuracy": float(i < right)}, {"length": n, "depth": d})
        for n in (512, 1024)
        for d in (0.0, 1.0)
        for i in range(8)
    ]
    return SuiteResult(samples, {"accuracy": ACCURACY})


def ppl(loss: float) -> SuiteResult:
    return SuiteResult(
        [Sample("ppl", str(i), {"nll": loss + 0.01 * i}, weight=10 + i) for i in range(20)], {"nll": NLL}
    )


def positions(loss: float) -> SuiteResult:
    samples = [
        Sample("per-position", str(i), {"nll": loss}, {"position": p}, unit=str(i)) for i in range(6) for p in (64, 100)
    ]
    losses = loss + 0.1 * torch.rand(6, 100, generator=torch.Generator().manual_seed(0))
    return SuiteResult(samples, {"nll": EvalMetric("nll", "mean", higher_is_better=False)}, arrays={"loss_NT": losses})


def speed(ms: float) -> SuiteResult:
    samples = [
        Sample("speed", f"{n} {i}", {"prefill_ms": ms * n + i}, {"length": n}) for n in (512, 2048) for i in range(6)
    ]
    return SuiteResult(samples, {"prefill_ms": MS})


def front(chosen, **change):
    """A front of a search of three points, as recipes have it."""
    points = [(2000, 1.5, 1.0, 2.5), (4000, 0.25, 0.125, 0.5), (8000, 0.0, 0.0, 0.0)]
    data = {"cost": "bytes", "limit": 5000, "original": 8000, "at": 4096, "healing": True, "chosen": chosen}
    return data | {"points": [dict(zip(("value", "loss", "low", "high"), point)) for point in points]} | change


def save(
    folder,
    name,
    results,
    *,
    options=None,
    parameters=1000,
    stored_bytes=None,
    device="cpu",
    reads=None,
    front=None,
    healed=None,
    **key,
):
    """Write results as `surgery eval --out` does."""
    folder.mkdir(exist_ok=True)
    options = options or EvalOptions()
    store = ResultStore(folder)
    fingerprint = (name.encode().hex() * 40)[:64]
    for suite, result in results.items():
        result.reads = {"file:/a/b.txt": "0" * 64} if reads is None else reads
        told = {"versions": VERSIONS, "device": device, "name": name, "parameters": parameters}
        told |= {"stored_bytes": stored_bytes} | ({} if front is None else {"front": front})
        told |= {} if healed is None else {"healed": healed}
        result.provenance = told | {"options": options.model_dump(mode="json", exclude_defaults=True)}
        whole = result_key(fingerprint, suite, options, "cpu", "float32") | key
        store.save(store.result_folder(name, fingerprint, suite), whole, result)
    return folder


@pytest.fixture
def three(tmp_path):
    """Three models in three folders: original, small and smaller."""
    every = {"original": (8, 1.0, 2.0, 3000), "small": (7, 1.1, 1.5, 2000), "smaller": (1, 1.6, 1.0, 1000)}
    return [
        save(
            tmp_path / name,
            name,
            {"needle": needle(right), "ppl": ppl(loss), "per-position": positions(loss), "speed": speed(ms)},
            parameters=count,
        )
        for name, (right, loss, ms, count) in every.items()
    ]


def test_all_models_are_one_table(three):
    done = compare_folders(three[1:], three[0])
    assert done.names == ["original", "small", "smaller"] and done.base == "original" and done.exit_code == 0
    row = next(r for r in done.rows if r.task == "needle" and not r.group)
    assert row.values == {"original": 100, "small": 87.5, "smaller": 12.5} and row.samples == 32
    assert row.differences["smaller"].high < -50 and row.p["smaller"] < 1e-6 and "original" not in row.differences
    ratio = next(r for r in done.rows if r.task == "ppl").ratios
    assert ratio["small"].change == pytest.approx(math.exp(0.1)) and set(ratio) == {"small", "smaller"}
    table = {line[1]: line for line in lines(done)}
    assert table["stored parameters"][3:] == ["3.00k", "2.00k (66.7%)", "1.00k (33.3%)"]
    assert table["needle, accuracy (%)"][3:] == [
        "100 [89.3, 100]",
        "87.5 [71.9, 95] (-12.5)",
        "12.5 [4.97, 28.1] (-87.5*)",
    ]
    assert (
        "x 1.105 [" in table["ppl, perplexity"][4] and not next(r for r in done.rows if r.suite == "speed").differences
    )


def test_without_a_base_there_are_no_differences(three):
    done = compare_folders(three)
    assert done.base is None and all(not row.differences for row in done.rows)


def test_the_base_that_results_name_is_the_default(three):
    (three[2] / "results.json").write_text(
        json.dumps({"models": {"base": {"fingerprint": (b"original".hex() * 40)[:64]}}})
    )
    assert compare_folders(three).base == "original"


def test_one_folder_may_hold_all_models_and_a_model_s_folder_is_one(tmp_path):
    for i, name in enumerate(("a", "b", "c")):
        save(tmp_path / "all", name, {"needle": needle(i + 1)})
    assert compare_folders([tmp_path / "all"]).names == ["a", "b", "c"]
    (one,) = (tmp_path / "all").glob("b-*")
    assert compare_folders([tmp_path / "all"], one).base == "b"
    with pytest.raises(SurgeryError, match=r"has 3 models\. Give the folder of one of them"):
        compare_folders([tmp_path / "all"], tmp_path / "all")


def test_same_names_are_told_apart(tmp_path):
    for name in ("x/model", "y/model"):
        save(tmp_path / name[0], name, {"needle": needle(3)})
    names = compare_folders([tmp_path / "x", tmp_path / "y"]).names
    assert len(set(names)) == 2 and all(name.startswith("model (") for name in names)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"options": EvalOptions(limit=3)}, "limit 3 instead of default"),
        ({"reads": {"file:/c.txt": "1" * 64}}, r"other content of text file 1 \(1{12} instead of 0{12}\)"),
        ({"reads": {"mirror:a/b": "1" * 64}}, "other content of"),
        ({"version": 2}, "version 2 of the suite instead of 1"),
    ],
)
def test_results_that_were_measured_otherwise_are_refused(tmp_path, changed, says):
    import re

    folders = [save(tmp_path / "a", "a", {"needle": needle(3)}), save(tmp_path / "b", "b", {"needle": needle(3)})]
    folders.append(save(tmp_path / "c", "c", {"needle": needle(3)}, **changed))
    done = compare_folders(folders)
    assert len(done.refused) == 1 and re.search(says, done.refused[0]) and done.exit_code == 2
    assert all("c" not in row.values for row in done.rows) and any(n.startswith("REFUSED") for n in notes(done))
    with pytest.raises(SurgeryError, match="no results in common that can be compared"):
        compare_folders([folders[0], folders[2]])


def test_scores_that_are_all_0_or_1_are_compared_with_others(tmp_path):
    """Which of them are accuracies is inferred from the scores, so it is no reason to refuse a model."""
    for name, values in (("a", [0.0, 1.0, 1.0]), ("b", [0.5, 1.0, 0.0]), ("c", [0.0, 0.0, 1.0])):
        metric = infer_metric_kind(EvalMetric("score", scale=100, top=1.0), values)
        samples = [Sample("qasper", str(i), {"score": value}) for i, value in enumerate(values)]
        save(tmp_path / name, name, {"longbench": SuiteResult(samples, {"score": metric})})
    done = compare_folders([tmp_path / name for name in "abc"], tmp_path / "a")
    (row,) = done.rows
    assert not done.refused and row.metric.kind == "mean" and not row.intervals and set(row.values) == {"a", "b", "c"}


def test_other_samples_are_refused(tmp_path):
    fewer = needle(3)
    fewer.samples = fewer.samples[:-4]
    folders = [save(tmp_path / "a", "a", {"needle": needle(3)}), save(tmp_path / "b", "b", {"needle": fewer})]
    with pytest.raises(SurgeryError, match=r"other samples \(28 instead of 32, 28 in common\)"):
        compare_folders(folders)


def test_a_moved_text_is_the_same_and_other_versions_are_a_remark(tmp_path):
    save(tmp_path / "a", "a", {"needle": needle(3)}, reads={"file:/x.txt": "1" * 64})
    other = needle(4)
    save(tmp_path / "b", "b", {"needle": other}, reads={"file:/y/z.txt": "1" * 64}, surgery="0.2.0", dtype="bfloat16")
    done = compare_folders([tmp_path / "a", tmp_path / "b"])
    assert not done.refused and "needle of b: dtype bfloat16 instead of float32" in done.notes


def test_timings_of_another_device_are_refused_and_lengths_that_did_not_fit_are_left_out(tmp_path):
    results = {"needle": needle(3), "speed": speed(1.0)}
    save(tmp_path / "a", "a", results, device="CPU one")
    save(tmp_path / "b", "b", results, device="CPU two")
    done = compare_folders([tmp_path / "a", tmp_path / "b"])
    assert (
        "speed of b is not compared with a: timed on CPU two in float32 instead of CPU one in float32" in done.refused
    )
    short = speed(2.0)
    short.samples = [s for s in short.samples if s.group["length"] == 512]
    save(tmp_path / "c", "c", {"speed": short}, device="CPU one")
    done = compare_folders([tmp_path / "a", tmp_path / "c"])
    assert {row.group["length"] for row in done.rows} == {512}
    assert any("6 samples that others lack are left out" in note for note in done.notes)


def test_the_table_says_how_to_reproduce_it(tmp_path):
    for name, words in (("a", ["surgery", "eval", "my model", "--limit", "3"]), ("b", ["evil\x1b[2J"]), ("c", 3)):
        result = needle(3)
        save(tmp_path / name, name, {"needle": result})
        (path,) = (tmp_path / name).rglob("result.json")
        stored = json.loads(path.read_text())
        stored["provenance"]["command"] = words
        path.write_text(json.dumps(stored))
    found = notes(compare_folders([tmp_path / name for name in "abc"]))
    assert [note for note in found if "reproduce" in note] == ["reproduce with: surgery eval 'my model' --limit 3  # a"]


# -- Pareto ------------------------------------------------------------------------------------------
def test_pareto_front():
    points = {
        name: CostPoint(cost, None, quality, None)
        for name, cost, quality in [
            ("cheap", 1, 5.0), ("middle", 2, 3.0), ("worse", 3, 4.0), ("best", 4, 2.0), ("nan", 0, math.nan), ("twin", 2, 3.0),
        ]
    }  # fmt: skip
    assert pareto_front(points, higher_is_better=False) == ["cheap", "middle", "twin", "best"]
    assert pareto_front(points, higher_is_better=True) == ["cheap"]


def test_charts_of_quality_against_costs(three):
    done = compare_folders(three[1:], three[0])
    assert [(c.cost, c.quality) for c in done.charts] == [
        ("stored parameters", "ppl, perplexity, ratio to original"),
        ("prefill, ms, at 2,048 tokens", "ppl, perplexity, ratio to original"),
    ]
    assert done.charts[0].front == ["smaller", "small", "original"] and not done.charts[0].higher_is_better
    ratio = next(row for row in done.rows if row.suite == "ppl" and not row.group).ratios["small"]
    point, base = done.charts[0].points["small"], done.charts[0].points["original"]
    assert (point.quality, point.quality_interval) == (ratio.change, (ratio.low, ratio.high))
    assert (base.quality, base.quality_interval) == (1.0, None) and done.charts[1].points["small"].cost_interval
    assert compare_folders(three, quality="needle").charts[0].quality == "needle, accuracy (%)"
    with pytest.raises(SurgeryError, match=r"--quality: nothing is called 'needel'; did you mean 'needle'"):
        compare_folders(three, quality="needel")


# -- fronts of searches --------------------------------------------------------------------------------
def of_one_search(tmp_path, **evil):
    """The original, and two models from points of one front; the second from the first point."""
    fronts = {"original": None, "half-of-a-model-with-a-long-name": front(2), "quarter": front(1) | evil}
    losses = (1.0, 1.25, 2.0)
    return [
        save(tmp_path / name, name, {"ppl": ppl(loss)}, front=own) for (name, own), loss in zip(fronts.items(), losses)
    ]


def test_models_of_one_search_share_a_front(tmp_path):
    """Beside the predicted loss stands the measured rise of the loss, because the divergence was not measured."""
    from surgery.cli.main import app

    folders = of_one_search(tmp_path)
    done = compare_folders(folders[1:], folders[0])
    (shared,) = done.fronts
    assert shared.chosen == {"half-of-a-model-with-a-long-name": 2, "quarter": 1} and shared.quantity == "rise"
    assert shared.measured == pytest.approx({"half-of-a-model-with-a-long-name": 0.25, "quarter": 1.0})
    assert shared.lines()[0] == ["1", "2.0 kB", "25%", "1.5", "1 to 2.5", "1", "quarter"]
    assert [line[-1] for line in shared.lines()] == ["quarter", "half-of-a-model-with-a-long-name", ""]
    words = ["compare", *map(str, folders[1:]), "--base", str(folders[0])]
    run = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")], env={"COLUMNS": "80"})
    before_notes = run.stdout.partition("± is the")[0].splitlines()
    assert run.exit_code == 0 and len(before_notes) > 8 and all(len(line) <= 80 for line in before_notes)
    assert (
        re.search(r"1 +2.0 kB +25% +1.5 +1 to 2.5 +1 +quarter", run.stdout) and "front of surgery search" in run.stdout
    )
    stored = json.loads((tmp_path / "out" / "comparison.json").read_text())["fronts"]
    assert stored == [shared.to_dict()] and "chosen" not in stored[0]["front"]
    markdown, latex, table = (format_comparison(done, form) for form in ("markdown", "latex", "csv"))
    assert "| 1 | 2.0 kB | 25% | 1.5 | 1 to 2.5 | 1 | quarter |" in markdown
    assert r"1 & 2.0 kB & 25\% & 1.5 & 1 to 2.5 & 1 & quarter \\" in latex and latex.count(r"\end{tabular}") == 2
    rows = [row for row in csv.DictReader(io.StringIO(table)) if row["task"] == "predicted loss after healing"]
    assert [(row["model"], row["value"], row["high"]) for row in rows][1] == ("quarter", "1.5", "2.5")


@pytest.mark.parametrize("healing", [True, False])
def test_a_prediction_after_healing_beside_an_unhealed_model_is_said_to_be_one(healing, tmp_path):
    every = {"original": None, "raw": False, "healed": True, "unknown": None}
    folders = [
        save(
            tmp_path / name, name, {"ppl": ppl(1.5)}, front=front(2, healing=healing) if number else None, healed=healed
        )
        for number, (name, healed) in enumerate(every.items())
    ]
    (shared,) = compare_folders(folders[1:], folders[0]).fronts
    said = "raw was not healed, but losses are predicted after healing"
    assert (shared.remark, shared.note.endswith(said)) == ((said, True) if healing else ("", False))
    assert shared.to_dict().get("remark", "") == shared.remark
    names = {line[-1] for line in shared.lines()}
    assert ("raw (not healed)" in names) == healing and {"healed", "unknown"} <= names
    page = front_of_page(shared.to_dict())
    assert ("raw (not healed)" in page) == healing and "unknown (not healed)" not in page


def test_models_of_other_searches_have_other_fronts(tmp_path):
    folders = of_one_search(tmp_path, at=8192)
    assert [list(shared.chosen.values()) for shared in compare_folders(folders).fronts] == [[2], [1]]


@pytest.mark.parametrize(
    "change", [{"chosen": 4}, {"cost": EVIL}, {"points": []}, {"limit": -1}, {"more": "\x1b[2J"}, {"at": 2.5}]
)
def test_a_damaged_front_of_a_stranger_is_left_out(change, tmp_path):
    """The measurements of its model are compared, and a line says what is wrong."""
    done = compare_folders(of_one_search(tmp_path, **change))
    assert len(done.names) == 3 and done.exit_code == 2 and len(done.fronts) == 1
    (why,) = done.refused
    assert why.startswith("the front of quarter is left out: front: ") and why.isprintable() and len(why) < 600


# -- files -------------------------------------------------------------------------------------------
def test_the_command_writes_tables_and_figures(three, tmp_path):
    from surgery.cli.main import app

    words = ["compare", str(three[1]), str(three[2]), "--base", str(three[0]), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert done.exit_code == 0 and "87.5 [71.9, 95] (-12.5)" in done.stdout
    figures = [
        "needle-length.png",
        "needle.png",
        "pareto-prefill.png",
        "pareto-stored-parameters.png",
        "per-position.png",
    ]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {*figures, "comparison.json", "table.md", "table.csv", "table.tex"} <= names
    data = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert data["base"] == "original" and set(figures) <= set(data["plots"]) and len(data["charts"]) == 2
    assert CliRunner().invoke(app, [*words[:-2], "--format", "csv"]).stdout == (tmp_path / "out/table.csv").read_text()
    again = surgery.compare(three[1:], base=three[0], out=tmp_path / "table.tex")
    assert (tmp_path / "table.tex").read_text() == (tmp_path / "out" / "table.tex").read_text()
    assert json.loads(json.dumps(dict(again)))["rows"] == data["rows"] and "87.5" in repr(again)


def test_what_the_command_refuses(three, tmp_path):
    from surgery.cli.main import app

    for words, says in (
        (["--format", "html"], "--format 'html' is not known"),
        (["--out", str(tmp_path / "a" / "b")], "Create it first"),
        (["--out", str(three[0] / "x.png" / "y")], "Create it first"),
    ):
        done = CliRunner().invoke(app, ["compare", *map(str, three), *words])
        assert isinstance(done.exception, SurgeryError) and says in str(done.exception)
    with pytest.raises(SurgeryError, match=r"needs two models \(got 1\)"):
        compare_folders(three[:1])
    with pytest.raises(SurgeryError, match=r"has no results\. Write them with `surgery eval"):
        compare_folders([tmp_path])
    with pytest.raises(SurgeryError, match="takes a list of folders"):
        surgery.compare(str(three[0]))


def test_numbers_of_the_csv_are_whole(three):
    found = list(csv.DictReader(io.StringIO(format_comparison(compare_folders(three[1:], three[0]), "csv"))))
    (row,) = (
        r for r in found if r["task"] == "needle" and r["model"] == "small" and not r["length"] and not r["depth"]
    )
    assert (row["value"], row["difference"], row["n"]) == ("87.5", "-12.5", "32") and float(row["low"]) < 87.5


def test_text_of_results_is_escaped(tmp_path):
    for name in ("a", "b"):
        evil = needle(3)
        evil.samples = [Sample(EVIL, s.id, s.metrics, s.group) for s in evil.samples]
        evil.notes = ["=cmd|' /C calc'!A0", EVIL]
        save(tmp_path / name, f"=1+{name}", {"needle": evil})
    done = compare_folders([tmp_path / "a", tmp_path / "b"])
    markdown, latex, table = (format_comparison(done, form) for form in ("markdown", "latex", "csv"))
    assert r"x\|y" in markdown and "<b>" not in markdown and r"\[l\](u)" in markdown
    assert r"\input" not in latex.replace(r"\textbackslash{}input", "") or "% " in latex
    assert all("\\input{" not in line for line in latex.splitlines() if not line.startswith("%"))
    assert all(not cell.startswith("=") for row in csv.reader(io.StringIO(table)) for cell in row)


def test_remarks_of_results_cannot_write_to_the_terminal(tmp_path):
    for name in ("a", "b"):
        result = needle(3)
        result.notes = ["a\x1b[2Jb\nc" + "d" * 10_000]
        save(tmp_path / name, name, {"needle": result, "speed": speed(1.0)}, device=f"{name}\x1b[2J")
    done = compare_folders([tmp_path / "a", tmp_path / "b"])
    text = [*notes(done), *done.refused]
    assert any("a?[2Jb c" in line for line in text) and any("timed on b?[2J" in line for line in text)
    assert all(line.isprintable() and len(line) < 1000 for line in text)


def test_groups_of_other_suites_are_in_the_csv(tmp_path):
    for name in ("a", "b"):
        result = needle(3)
        result.samples = [
            Sample(s.task, s.id, s.metrics, {"language": "en" if i % 2 else "de"}) for i, s in enumerate(result.samples)
        ]
        save(tmp_path / name, name, {"other": result})
    table = format_comparison(compare_folders([tmp_path / "a", tmp_path / "b"]), "csv")
    tasks = {row["task"] for row in csv.DictReader(io.StringIO(table))}
    assert {"needle, language de", "needle, language en"} <= tasks


HARMS = [
    ("result.json", lambda p: p.write_text("{"), "is damaged"),
    ("result.json", lambda p: p.write_text("[" * 100_000), "is damaged"),
    ("result.json", lambda p: p.write_text(p.read_text().replace('"scale": 100', '"scale": 0')), "finite scale above 0"),
    ("result.json", lambda p: p.write_text(p.read_text().replace('"scale": 100', '"scale": NaN')), "finite scale above 0"),
    ("result.json", lambda p: p.write_text(p.read_text().replace('"fingerprint"', '"finger"')), "has no fingerprint"),
    ("samples.jsonl", lambda p: p.write_text(""), "is empty"),
    ("samples.jsonl", lambda p: p.write_text(p.read_text().replace('"weight": 1.0', '"weight": -1.0')), "negative"),
    ("samples.jsonl", lambda p: p.write_text(p.read_text().replace('"weight": 1.0', '"weight": 0.0')), "add up to 0"),
    ("samples.jsonl", lambda p: p.write_text(p.read_text().replace('"length": 512', '"length": "long"')), "finite number"),
    ("samples.jsonl", lambda p: p.write_text(p.read_text().replace('"depth": 1.0', '"depth": Infinity')), "finite number"),
    ("result.json", lambda p: p.write_text("{"), "or is damaged: result.json: Invalid JSON: [^:]*[.] Measure it again"),
    ("samples.jsonl", lambda p: p.write_text(p.read_text() + "[1e999]\n"), r"samples.jsonl, line \d+: [^:]*[.] Measure it again"),
    ("samples.jsonl", lambda p: p.write_text(p.read_text().replace('{"accuracy"', '{"other"')), "does not describe"),
    ("samples.jsonl", lambda p: p.write_text(p.read_text().replace('"needle"', '"a\\u001b[2Jb"')), "plain text"),
    ("samples.jsonl", lambda p: p.write_text(p.read_text().replace('"needle"', '"' + "n" * 301 + '"')), "plain text"),
    ("samples.jsonl", lambda p: p.write_text(p.read_text().replace('"accuracy": 1.0', '"accuracy": 0.5')), "must be 0 or 1"),
    ("samples.jsonl", lambda p: (p.unlink(), p.symlink_to("/dev/zero")), "not a regular file"),
    ("samples.jsonl", lambda p: (p.unlink(), os.mkfifo(p)), "not a regular file"),
    ("samples.jsonl", lambda p: p.unlink(), "No such file"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "harm", "says"), HARMS, ids=range(len(HARMS)))
def test_a_stranger_s_results_are_checked(tmp_path, name, harm, says):
    folders = [save(tmp_path / each, each, {"needle": needle(3)}) for each in ("a", "b")]
    (path,) = folders[1].rglob(name)
    harm(path)
    with pytest.raises(SurgeryError, match=says):
        compare_folders(folders, folders[0])


def test_a_damaged_suite_is_left_out_and_the_others_are_compared(three, tmp_path):
    """Of one model a suite, of another everything: the tables have what is whole, and say what is not in them and
    why.
    """
    from surgery.cli.main import app

    (path,) = three[1].rglob("needle/samples.jsonl")
    path.write_text(path.read_text().replace('"length": 512', '"length": "long"', 1))
    for path in three[2].rglob("result.json"):
        path.write_text("{")
    done = compare_folders(three[1:], three[0])
    assert done.names == ["original", "small"] and {row.suite for row in done.rows} == {"ppl", "per-position", "speed"}
    assert done.charts[0].points and done.exit_code == 2 and len(done.refused) == 5
    (why,) = [each for each in done.refused if each.startswith("needle of small-")]
    assert "must be a finite number. Measure it again with the same command." in why and "needle of small" in why
    assert any(each.startswith("ppl of smaller-") and "Invalid JSON" in each for each in done.refused)
    words = ["compare", *map(str, three), "--out", str(tmp_path / "out")]
    run = CliRunner().invoke(app, words, env={"COLUMNS": "400"})
    assert run.exit_code == 2 and "needle of small-" in run.output and "ppl" in run.stdout
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["refused"] == done.refused
    assert "is left out" in (tmp_path / "out" / "table.md").read_text()
    with pytest.raises(SurgeryError, match=r"needs two models \(got 1\).*ppl of smaller-.* is left out"):
        compare_folders([three[0], three[2]])
    with pytest.raises(SurgeryError, match=r"--base .* has no result that can be read. needle of smaller-"):
        compare_folders(three[:2], three[2])


def test_arrays_and_sizes_are_checked(tmp_path, monkeypatch):
    folders = [save(tmp_path / each, each, {"per-position": positions(1.0)}) for each in ("a", "b")]
    (path,) = folders[1].rglob("arrays.safetensors")
    good = path.read_bytes()
    path.write_bytes(b"x")
    with pytest.raises(SurgeryError, match="is damaged"):
        compare_folders(folders)
    path.write_bytes(good)
    monkeypatch.setitem(reading.MAX_BYTES, "arrays.safetensors", 10)
    with pytest.raises(SurgeryError, match="must have at most 10 bytes"):
        compare_folders(folders)


@pytest.mark.parametrize("name", ["results.json", "comparison.json"])
@pytest.mark.parametrize(
    ("held", "says"),
    [
        ("[1, 2]", r"{} must hold a JSON object, .*\(got a list\)"),
        ("{{", "{} is not JSON"),
        ('{{"models": {{}}}}', "has a {}, but no folder of a model"),
    ],
)
def test_a_folder_with_a_summary_alone_says_what_is_wrong_with_it(name, held, says, tmp_path):
    (tmp_path / name).write_text(held.format())
    with pytest.raises(SurgeryError, match=says.format(name)):
        compare_folders([tmp_path])


def test_a_link_to_a_model_elsewhere_is_not_followed(tmp_path):
    save(tmp_path / "a", "a", {"needle": needle(3)})
    (tmp_path / "b").mkdir()
    (elsewhere,) = (tmp_path / "a").iterdir()
    (tmp_path / "b" / "link").symlink_to(elsewhere)
    with pytest.raises(SurgeryError, match="has no results"):
        compare_folders([tmp_path / "a", tmp_path / "b"])


def test_quality_against_stored_bytes(tmp_path):
    """Integers have no number of parameters, but bytes, so a quantized model is in that chart."""
    for name, right, told in (
        ("a", 8, {"stored_bytes": 4000, "parameters": 1000}),
        ("b", 7, {"stored_bytes": 500, "parameters": None}),
    ):
        save(tmp_path / name, name, {"needle": needle(right)}, **told)
    done = compare_folders([tmp_path / "a", tmp_path / "b"])
    (chart,) = done.charts
    assert chart.cost == "stored bytes" and {n: p.cost for n, p in chart.points.items()} == {"a": 4000, "b": 500}
    assert [line[1:] for line in lines(done)[:2]] == [
        ["stored parameters", "", "1.00k", ""],
        ["stored bytes", "", "4.0 kB", "500 bytes"],
    ]
    found = csv.DictReader(io.StringIO(format_comparison(done, "csv")))
    assert [row["value"] for row in found if row["task"] == "stored bytes"] == ["4000", "500"]


@pytest.mark.parametrize("text", ["{", "[]", '{"models": 3}', '{"models": {"base": {"fingerprint": "\\ud800"}}}'])
def test_a_damaged_file_of_an_evaluation_does_not_stop_the_comparison(three, text):
    (three[0] / "results.json").write_text(text)
    (three[2] / "results.json").write_text(
        json.dumps({"models": {"base": {"fingerprint": (b"original".hex() * 40)[:64]}}})
    )
    done = compare_folders(three)
    assert done.base == "original" and len(done.models) == 3
    says = [why for why in done.refused if "which model is the base is not read from original" in why]
    assert bool(says) == (text in ("{", "[]") or "ud800" in text) and done.exit_code == (2 if says else 0)


@pytest.mark.parametrize(
    ("limit", "value", "says"),
    [
        ("MAX_LINE", 40, "line 1 must"),
        ("MAX_SAMPLES", 11, "at most 11 samples"),
        ("MAX_KEPT", 500, "at most 500 bytes"),
    ],
)
def test_files_of_samples_have_a_limited_size(three, monkeypatch, limit, value, says):
    """Prompts are not kept, and lines, samples and numbers have limits: a file of gigabytes does not fill memory."""
    monkeypatch.setattr(f"surgery.eval.results.store.{limit}", value)
    with pytest.raises(SurgeryError, match=says):
        compare_folders(three)


def test_prompts_are_not_kept_in_memory(tmp_path):
    for name in ("a", "b"):
        result = needle(3)
        result.samples = [
            Sample(s.task, s.id, s.metrics, s.group, shown={"prompt": "x" * 1000}) for s in result.samples
        ]
        save(tmp_path / name, name, {"needle": result})
    done = compare_folders([tmp_path / "a", tmp_path / "b"])
    assert all(not sample.shown for sample in done.results["needle"]["a"].samples)
