"""`surgery bench speed` and the suite `speed`: models in turns, rows of JSON, going on after a kill, tables and the
figure.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
import torch
from rich.text import Text

from recipes.papers.speed import update_tables
from surgery.core.errors import SurgeryError
from surgery.eval.run import evaluate
from surgery.eval.speed import context_tables, contexts
from surgery.eval.speed.model import ORIGINAL
from surgery.eval.speed.run import bench
from surgery.eval.speed.tables import markdown, result_tables, save_plot
from surgery.eval.suite import EvalOptions
from surgery.eval.suites import speed as suite

TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny" / "checkpoint"
GOOD = {
    "model": "a",
    "context": 8,
    "batch": 1,
    "weight_bytes": 5,
    "cache_bytes": 2,
    "step_ms": [1.0],
    "first_token_ms": [2.0],
}


@pytest.fixture
def small(monkeypatch):
    """Contexts of 8 and 16 tokens, one round."""
    monkeypatch.setitem(contexts.CONTEXTS, "small", (8, 16))
    monkeypatch.setitem(contexts.RUNS, "small", 1)


def run(out, **options):
    return bench("speed", "small", device="cpu", out=out, **{"only": "mlr", **options})


def row(model, context, batch, ms, first=None, **others):
    """A row as `measure_context` makes it."""
    times = {} if batch > 1 else {"first_token_ms": first or [2 * x for x in ms]}
    held = {"step_ms": ms, "weight_bytes": 10, "cache_bytes": 4 * batch * context, **times}
    return {"model": model, "context": context, "batch": batch, **held, **others}


def test_every_table_says_how_to_reproduce_it(small, tmp_path):
    """The command is in the file, below the tables and on the page; a token in it is not."""
    words = ["surgery", "bench", "speed", "--only", "[mlr]", "hf_" + "a" * 34]
    result = run(tmp_path / "speed.json", command=words)
    line = "reproduce with: surgery bench speed --only '[mlr]' '***'"
    assert json.loads((tmp_path / "speed.json").read_text())["command"] == [*words[:-1], "***"]
    assert Text.from_markup(result_tables(result)[-1]).plain == line and line in markdown(result)
    linear = bench("linear", "small", device="cpu", only="nothing", time_limit=1e-9, command=words)
    assert Text.from_markup(result_tables(linear)[-1]).plain == line
    assert "reproduce" not in str(result_tables(run(None))[-1])


def test_models_take_turns_in_every_round(monkeypatch):
    turns = []
    monkeypatch.setattr(contexts, "_run_once", lambda model, ids, rows, steps, keep: turns.append((id(model), keep)))
    models = contexts.make_models(contexts.NAMES[:2], "small", torch.device("cpu"), torch.float32)
    contexts.measure_context(models, 8, (1, 2), runs=2, steps=2, device=torch.device("cpu"))
    first, second = map(id, models.values())
    assert turns == [(first, False), (second, False)] + 2 * [(first, True), (second, True)]


def test_a_killed_run_goes_on_at_the_missing_context(small, tmp_path, monkeypatch):
    out, whole, calls = tmp_path / "speed.json", contexts.measure_context, []

    def killed(models, context, *args, **options):
        calls.append(context)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(models, context, *args, **options)

    monkeypatch.setattr(contexts, "measure_context", killed)
    with pytest.raises(KeyboardInterrupt):
        run(out)
    first = json.loads(out.read_text())
    assert not first["complete"] and {r["context"] for r in first["rows"]} == {8} and len(first["rows"]) == 4
    result = run(out)
    assert calls == [8, 16, 16] and result["complete"] and json.loads(out.read_text()) == result
    assert result["rows"][:4] == first["rows"]
    assert [(r["model"], r["context"], r["batch"]) for r in result["rows"]] == [
        (name, context, batch) for context in (8, 16) for name in (ORIGINAL, "MLR attention") for batch in (1, 2)
    ]
    assert all(contexts.is_row(r) and len(r["step_ms"]) == 1 for r in result["rows"])
    assert result["rows"][1]["cache_bytes"] == 2 * result["rows"][0]["cache_bytes"]
    with pytest.raises(SurgeryError, match=r"other models, to which this run cannot add"):
        run(out, only="btt")
    none = run(tmp_path / "none.json", time_limit=-1)
    assert none["rows"] == [] and not none["complete"]
    with pytest.raises(SurgeryError, match="no context was measured"):
        save_plot(none, tmp_path / "none.png")


def test_the_live_cache_is_what_it_holds(small):
    """Keys and values of 8 + 3 tokens in 2 layers of 2 heads with 16 dimensions, in float32; without room for further
    tokens.
    """
    assert run(None)["rows"][0]["cache_bytes"] == 2 * 2 * 2 * 16 * (8 + contexts.STEPS["small"]) * 4


def test_what_does_not_fit_says_so_and_the_others_run(small, monkeypatch, tmp_path):
    whole = contexts._decode_rows

    def scarce(model, read, token, batch, steps):
        if batch == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return whole(model, read, token, batch, steps)

    monkeypatch.setattr(contexts, "_decode_rows", scarce)
    result = run(None)
    assert all((r["batch"] == 2) == ("note" in r) for r in result["rows"]) and all(map(contexts.is_row, result["rows"]))
    assert all("tokens_s_many" not in s.metrics for s in context_tables.speed_samples(result["rows"][:2]))
    assert "does not fit" in markdown(result)
    save_plot(result, tmp_path / "speed.png")

    def never(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(contexts, "prefill", never)
    with pytest.raises(SurgeryError, match=r"no length was measured; 8 tokens: does not fit"):
        contexts.check_rows(run(None)["rows"])


def test_rows_of_files_are_checked(small, tmp_path):
    assert contexts.is_row(GOOD)
    for damage in (
        {"step_ms": []}, {"step_ms": [float("nan")]}, {"step_ms": 3.0}, {"first_token_ms": None}, {"batch": True}, {"model": 3},
        {"cache_bytes": -1}, {"peak_bytes": 0.5}, {"context": 2**64}, {"note": 3, "step_ms": []},
    ):  # fmt: skip
        assert not contexts.is_row({**GOOD, **damage}), damage
    assert contexts.is_row({**GOOD, "step_ms": [], "note": "does not fit"})
    out = tmp_path / "speed.json"
    run(out)
    found = json.loads(out.read_text())
    out.write_text(json.dumps({**found, "rows": found["rows"][:3]}))  # not whole: a model has one batch
    assert [r["context"] for r in run(out)["rows"]] == 4 * [8] + 4 * [16]
    out.write_text(json.dumps({**found, "rows": [{**GOOD, "step_ms": []}]}))
    with pytest.raises(SurgeryError, match="has damaged rows"):
        run(out)


def test_tables_samples_and_figure(tmp_path, monkeypatch):
    rows = [
        row("original", 2048, 1, [4.0, 6.0, 5.0]), row("original", 2048, 16, [8.0, 8.0, 8.0], peak_bytes=10**9),
        row("small", 2048, 1, [2.0, 3.0, 2.5]), row("small", 2048, 16, [4.0, 4.0, 4.0], peak_bytes=4 * 10**8),
    ]  # fmt: skip
    rows += [{**r, "context": 8192} for r in rows]
    result = {
        "kind": "speed", "dtype": "bfloat16", "rows": rows, "complete": True, "device": "X1", "versions": {"torch": "2"},
        "date": "2026-01-02", "sizes": "full",
    }  # fmt: skip
    text = markdown(result)
    assert "| original | 10 | 10 |" in text and "| small | 5 (2x) | 5 (2x) |" in text  # ms, times as fast
    assert "| small | 4,000 (2x) | 4,000 (2x) |" in text and "| small | 0.4 (40%) | 0.4 (40%) |" in text
    assert "2K | 8K" in text and "X1, bfloat16" in text and len(result_tables(result)) == 2 * 6 + 2
    (sample, *_) = found = context_tables.speed_samples(rows[:2])
    assert len(found) == 3 and sample.group == {"length": 2048}
    assert (
        sample.metrics["tokens_s"] == 250
        and sample.metrics["tokens_s_many"] == 2000
        and sample.metrics["prefill_ms"] == 8
    )
    drawn = []
    monkeypatch.setattr(
        "surgery.eval.results.plots.plot_panels", lambda *args, **options: drawn.append((args, options))
    )
    context_tables.save_speed_plot(result, tmp_path / "speed.png")
    (((_, panels, names, *_), options),) = drawn
    assert names == ["original", "small"] and options == {"base": "original"}
    curve = panels[0].curves["original"]
    assert (
        curve.xs == [2048, 8192]
        and curve.ys == 2 * [2 * median([4, 6, 5])]
        and (curve.lows, curve.highs) == ([8, 8], [12, 12])
    )
    page = f"a\n{update_tables.BEGIN}\n## Linear\n\nkept\n{update_tables.END}z"
    changed = update_tables.update_page(page, [result])
    assert "## Speed\n\nX1" in changed and "kept" in changed and changed.endswith("z")


def test_files_of_speed_change_the_page_and_no_choice_of_kernels(small, tmp_path, monkeypatch):
    page, table = tmp_path / "page.md", tmp_path / "tuning.json"
    page.write_text(f"{update_tables.BEGIN}{update_tables.END}")
    table.write_text('{"tables": []}')
    monkeypatch.setattr(update_tables, "PAGE", page)
    monkeypatch.setattr(update_tables, "TABLE", table)
    run(tmp_path / "speed.json")
    update_tables.main([str(tmp_path / "speed.json")])
    assert "## Speed, float32" in page.read_text() and json.loads(table.read_text()) == {"tables": []}


def test_a_killed_suite_goes_on_at_the_missing_length(tmp_path, monkeypatch):
    calls, whole = [], suite.measure_context

    def killed(models, context, *args, **options):
        calls.append(context)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(models, context, *args, **options)

    monkeypatch.setattr(suite, "measure_context", killed)
    options, out = EvalOptions(lengths=(16, 32), limit=1), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        evaluate(str(TINY), ["speed"], options, out=out)
    (journal,) = out.rglob("*.jsonl")
    kept = json.loads(journal.read_text())["value"]
    done = evaluate(str(TINY), ["speed"], options, out=out)
    assert calls == [16, 32, 32] and not list(out.rglob("*.unfinished"))
    result = done.results["speed"]["converted"]
    assert [r["step_ms"] for r in result.info["bench"][:2]] == [r["step_ms"] for r in kept]
    assert (out / "speed.png").stat().st_size > 1000
