"""`surgery bench`: fair timing, and notes on what did not run."""

from __future__ import annotations

import json
import math
import time
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from rich.text import Text

from recipes.papers.speed import page_tables
from recipes.papers.speed import update_tables as publish
from surgery.cli.main import main
from surgery.core.errors import SurgeryError
from surgery.eval.speed import host_time, linear, timer
from surgery.eval.speed import run as runs
from surgery.eval.speed.roofline import linear_attention_work, linear_work, log_linear_reads, softmax_work
from surgery.eval.speed.run import KINDS, bench
from surgery.eval.speed.tables import (
    crossovers,
    format_cell,
    format_ms,
    markdown,
    result_grids,
    result_tables,
    save_plot,
)
from surgery.eval.speed.timer import Benchmark, BenchmarkCase, TimedImplementation, WorkEstimate, backward
from surgery.kernels import tuning as measured
from surgery.planning import measured_times
from surgery.publish import speed_notes
from surgery.publish.speed_notes import plan_notes, predict_linears, predicted_lines, report_notes, speed_in_words

CPU = torch.device("cpu")


def run_benchmark(*rivals, x=1, **options):
    race = Benchmark(CPU, budget_ms=1.0, max_ms=options.pop("max_ms", 1000.0), **options)
    return race, race.run(BenchmarkCase("t", x, {}, list(rivals)))


def fails(error):
    def make():
        raise error

    return make


def test_what_goes_wrong_with_one_stops_no_other():
    rivals = [
        TimedImplementation("none", fails(torch.OutOfMemoryError("CUDA out of memory"))),
        TimedImplementation("refuses", fails(ValueError("not on Hopper\nsecond line"))),
        TimedImplementation("runs", lambda: lambda: None),
    ]
    _, rows = run_benchmark(*rivals)
    assert [row.get("note") for row in rows] == ["out of memory", "ValueError: not on Hopper", None]
    assert rows[2]["ms"] > 0 and rows[2]["runs"] >= 3


def test_a_reference_is_not_timed_as_a_kernel():
    _, rows = run_benchmark(TimedImplementation("k", lambda: lambda: None, choice="kernel"))
    assert rows[0]["note"] == "no kernel" and rows[0]["ms"] is None


@pytest.fixture
def clock(monkeypatch):
    """clock(ms) lets the benchmark's clock go on by ms; otherwise it stands still."""
    now = [0.0]

    def go_on(ms):
        now[0] += ms / 1e3

    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0]))
    return go_on


def test_the_slow_are_left_out_at_larger_sizes(clock):
    slow = TimedImplementation("slow", lambda: lambda: clock(20))
    race, rows = run_benchmark(slow, x=10, max_ms=30.0)
    assert rows[0]["ms"] == pytest.approx(20)
    assert race.run(BenchmarkCase("t", 100, {}, [slow]))[0]["note"].startswith("left out")


def test_a_growing_size_that_adds_little_work_is_timed(clock):
    """One token of a linear reads all weights; more tokens read them no oftener."""
    make = lambda: lambda: clock(20)  # noqa: E731
    one, many = (TimedImplementation("linear", make, work=WorkEstimate(b, f)) for b, f in ((1e6, 1e6), (1.2e6, 1e8)))
    race, _ = run_benchmark(one, x=1, max_ms=30.0)
    assert "note" not in race.run(BenchmarkCase("t", 100, {}, [many]))[0]


def test_time_is_over_at_once():
    _, rows = run_benchmark(TimedImplementation("r", lambda: lambda: None), deadline=time.monotonic() - 1)
    assert rows[0]["note"] == "time limit"


def test_several_calls_in_a_run_count_as_several(clock):
    _, rows = run_benchmark(
        TimedImplementation("one", lambda: lambda: clock(10)),
        TimedImplementation("ten", lambda: lambda: clock(10), times=10),
    )
    assert [row["ms"] for row in rows] == pytest.approx([10, 1])


def test_a_median_of_several_runs_is_reported(clock):
    """After a warm-up and a first time, which are not counted."""
    times = iter([90, 80, 2, 7, 3])
    _, rows = run_benchmark(TimedImplementation("r", lambda: lambda: clock(next(times))))
    assert rows[0]["ms"] == pytest.approx(3) and rows[0]["runs"] == 3


def test_backward_reaches_every_leaf():
    x, unused = torch.ones(3), torch.ones(2)
    backward(lambda: 2 * x, [x, unused])()
    assert x.requires_grad and x.grad is None


def test_floors_are_the_bytes_and_operations_of_the_definition():
    assert linear_work(8, 4, 2, 8, back=False, width=2) == WorkEstimate(2 * (8 * 6 + 8), 2 * 8 * 8)
    # every pair, key and value, a multiplication and an addition, half of them behind the diagonal
    assert softmax_work(1, 1, 128, 64, 64, back=False, width=2).flops == 128 * 128 * 128
    sizes = {"back": False, "width": 2, "extra": 1}
    assert linear_attention_work(1, 1, 1, 64, 8, 8, **sizes) == WorkEstimate(64 * (2 * 32 + 4), 64 * 4 * 8 * 8)
    assert linear_attention_work(1, 1, 1, 64, 8, 8, **sizes, reads=3).flops == 64 * 8 * 8 * 8
    # 256 chunks: eight levels above them
    assert log_linear_reads(64) == 1 and log_linear_reads(256 * 64) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_runs_on_a_cpu(kind, tmp_path):
    out = tmp_path / "out.json"
    result = bench(kind, sizes="small", device="cpu", out=out)
    assert json.loads(out.read_text()) == json.loads(json.dumps(result)) and result["complete"]
    assert all(row["ms"] for row in result["rows"]), [row for row in result["rows"] if not row["ms"]]
    assert {"device", "date", "versions", "ceilings"} <= result.keys()
    titles = {title for title, _, _ in result_grids(result["rows"])}
    assert len(titles) >= 2 and all(title in markdown(result) for title in titles)
    assert result_tables(result)


def test_the_cpus_time_per_call_is_the_least_mean_of_a_burst(monkeypatch):
    """With and without gradients; what fails is noted, and other load during some of the bursts adds nothing."""
    now, recorded = [0.0], []
    monkeypatch.setattr(host_time, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0]))

    def busy_at_first():
        now[0] += 3e-6 if len(recorded) > 2 * host_time.BURST else 1e-3
        recorded.append(torch.is_grad_enabled())

    for host in ("no grad", "grad"):
        now[0], recorded[:] = 0.0, []
        rivals = [
            TimedImplementation("dense", lambda: busy_at_first),
            TimedImplementation("refuses", fails(ValueError("not on Hopper"))),
            TimedImplementation("k", lambda: lambda: None, choice="kernel"),
        ]
        case = BenchmarkCase("t", 1, {"tokens": 1}, rivals, host=host)
        one, refuses, kernel = host_time.measure_host_time(Benchmark(CPU, budget_ms=1.0, max_ms=1000.0), case)
        assert one["host_us"] == pytest.approx(3) and one["ms"] == pytest.approx(3e-3) and one["host"] == host
        assert one["runs"] == host_time.TURNS and len(recorded) == 1 + host_time.TURNS * host_time.BURST
        assert set(recorded) == {host == "grad"}
        assert [row["note"] for row in (refuses, kernel)] == ["ValueError: not on Hopper", "no kernel"]
        assert refuses["ms"] is refuses["host_us"] is None
        assert format_cell(one) == "3.0 us" and "dense 3 us | refuses (ValueError" in runs.case_line(
            case, [one, refuses]
        )
    late = Benchmark(CPU, budget_ms=1.0, max_ms=1000.0, deadline=-1.0)
    assert {row["note"] for row in host_time.measure_host_time(late, case)} == {"time limit"}


def test_linears_have_tables_of_the_cpus_time(tmp_path):
    """Beside F.linear, which stands for dense there; planning and kernel choice do not read them."""
    out = tmp_path / "linear.json"
    result = bench("linear", sizes="small", device="cpu", only="reference,low", out=out)
    hosts = [row for row in result["rows"] if "host_us" in row]
    titles = {f"linear 64 -> {o}, CPU time of an eager call{g}" for o in (64, 96) for g in ("", " with gradients")}
    assert {row["table"] for row in hosts} == titles and {row["host"] for row in hosts} == {"no grad", "grad"}
    assert {row["rival"] for row in hosts} == {row["rival"] for row in result["rows"]} and "dense" in hosts[0]["rival"]
    assert all(row["host_us"] > 0 and row["sizes"]["tokens"] == 1 for row in hosts)
    shown = [str(part) for part in result_tables(result)]
    assert any("dense: F.linear" in part for part in shown) and " us " in markdown(result)
    rest = {**result, "rows": [row for row in result["rows"] if "host_us" not in row]}
    assert measured_times.tuning_tables([result]) == measured_times.tuning_tables([rest])


def test_only_some():
    rivals = {row["rival"] for row in bench("linear", sizes="small", device="cpu", only="btt,-chosen,-s=4,-16")["rows"]}
    assert rivals == {
        "dense",
        "BTT s=1 (Monarch), reference",
        "BTT s=1 (Monarch), multiplied out",
        "BTT 4 x 4, half, reference",
    }


def test_compressed_linears_become_rows_of_the_table(tmp_path, monkeypatch):
    """Half and a quarter of the parameters, with and without ranks of whole multiples; their rows join the table by
    --add.
    """
    monkeypatch.setitem(linear.SHAPES, "compressed", ((256, 256), (256, 320)))
    monkeypatch.setitem(linear.TOKENS, "compressed", (1, 8))
    out, table, page = tmp_path / "compressed.json", tmp_path / "tuning.json", tmp_path / "performance.md"
    result = bench("linear", sizes="compressed", device="cpu", out=out)
    assert result["complete"] and json.loads(out.read_text())["rows"] == json.loads(json.dumps(result["rows"]))
    rivals = {row["rival"] for row in result["rows"] if row["sizes"]["outputs"] == 320}
    assert rivals == {"dense", "dense, FP8"} | {
        f"{name}, {share}, rank {rank}{way}"
        for name, ranks, ways in (
            ("low rank", {"half": (71, 64), "quarter": (35,)}, ("", ", FP8")),
            ("BTT 4 x 4", {"half": (17,), "quarter": (8,)}, (", reference", ", FP8")),
        )
        for share, ranks_of in ranks.items()
        for rank in ranks_of
        for way in ways
    }
    on_gpu = next(row for row in result["rows"] if row.get("op") == "btt" and row["x"] == 8)
    result["rows"] += [{**on_gpu, "rival": f"BTT, {way}", "way": way, "ms": 1.0} for way in ("products", "kernel")]
    out.write_text(json.dumps(result))
    table.write_text('{"tables": []}')
    page.write_text(f"{publish.BEGIN}{publish.END}")
    monkeypatch.setattr(publish, "TABLE", table)
    monkeypatch.setattr(publish, "PAGE", page)
    publish.main(["--add", str(out)])
    rows = json.loads(table.read_text())["tables"][0]["rows"]
    assert page.read_text() == f"{publish.BEGIN}{publish.END}"
    (row,) = (row for row in rows if "products" in row)
    assert row["products"] == row["kernel"] == 1.0 and row["sizes"]["rank"] == on_gpu["options"]["rank"]
    assert {row["op"] for row in rows} == {"btt", "low_rank"}
    publish.main([str(out)])
    assert "## Linear, compressed, float32" in page.read_text()
    with pytest.raises(SystemExit, match="--add"):
        publish.main(["--ad", str(out)])
    with pytest.raises(SurgeryError, match="sizes of linears"):
        bench("attention", sizes="compressed", device="cpu")


def test_bytes_of_a_cache_are_the_state_s():
    rows = bench("decode", sizes="small", device="cpu", only="mlr")["rows"]
    at = {(row["rival"], row["x"]): row["cache"] for row in rows if row["sizes"]["batch"] == 1}
    assert at["SDPA, room laid out", 128] == 2 * 2 * 128 * 16 * 4
    assert at["MLR attention, reference", 128] < at["SDPA, room laid out", 128]


def test_cells():
    assert [format_ms(ms) for ms in (0.0123456, 1.234, 12.34, 1234.5)] == ["0.0123", "1.23", "12.3", "1,234"]
    assert format_cell({"ms": 0.5, "ratio": 2.0, "fraction": 0.5}) == "0.5 2.00x 50%"
    rows = [
        {"table": "model, prefill", "rival": r, "x": 2000, "ms": ms, "peak": 3e9}
        for r, ms in (("a", 10.0), ("b", None))
    ]
    assert [grid[1:] for grid in result_grids(rows)] == [([2000], [("a", [c])]) for c in ("10.0", "200,000", "3.00")]


def test_crossovers():
    times = {"SDPA flash": (1.0, 4.0, 16.0), "SDPA cuDNN": (1.0, 3.0, 9.0), "a": (2.0, 3.5, 4.0), "b": (9.0, 9.0, 9.5)}
    rows = [
        {"table": "t", "rival": name, "x": x, "ms": ms, "op": "original" if "SDPA" in name else None}
        for name, all_ms in times.items()
        for x, ms in zip((1024, 2048, 4096), all_ms)
    ]
    assert crossovers(rows) == ["t, faster than the fastest of PyTorch's own: from 4,096 a; nowhere b"]


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"table": "t", "x": x, "rival": "r", "ms": 1.0} for x in (1, 2)]
    limits = {"copy": 1e9, "rate": 1e9}
    result = {
        "rows": rows,
        "ceilings": limits,
        "versions": {},
        "device": "d",
        "dtype": "f",
        "date": "",
        "complete": True,
    }
    save_plot(result, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_slips_are_refused_in_a_sentence():
    with pytest.raises(SurgeryError, match="'linaer' is not one of linear, attention"):
        bench("linaer")
    with pytest.raises(SurgeryError, match="--sizes 'huge'"):
        bench("linear", sizes="huge")
    with pytest.raises(SurgeryError, match="--dtype 'half'"):
        bench("linear", dtype="half")


def test_command(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit) as left:
        main(["bench", "linear", "--sizes", "small", "--only", "low rank", "--json", "--out", str(tmp_path / "o.json")])
    assert left.value.code == 0
    assert {row["rival"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"dense", "low rank, half"}
    assert (tmp_path / "o.json").is_file() and runs.KINDS


# -- the measured table ------------------------------------------------------------------------------------
def test_the_table_in_the_repository_is_well_formed():
    options = {"rank", "rows", "columns", "levels", "window"}
    for row in (row for table in measured.tables() for row in table["rows"]):
        assert row["pass"] in get_args(measured.Pass) and set(row["sizes"]) <= {*measured_times.SIZE_NAMES, *options}
        assert set(measured.IMPLEMENTATIONS) & row.keys() and all(
            row[way] > 0 for way in measured.IMPLEMENTATIONS if way in row
        )


@pytest.fixture
def table(monkeypatch):
    """btt wins at many tokens, its reference at few, multiplied out between; log-linear attention wins from 8K."""
    sizes = {"inputs": 4096, "outputs": 4096, "rank": 4}
    rows = [
        {
            "op": "btt",
            "pass": "forward",
            "sizes": {**sizes, "tokens": 1},
            "kernel": 2.0,
            "reference": 1.0,
            "original": 3.0,
        },
        {
            "op": "btt",
            "pass": "forward",
            "sizes": {**sizes, "tokens": 512},
            "kernel": 2.0,
            "reference": 4.0,
            "dense": 1.5,
            "original": 0.75,
        },
        {
            "op": "btt",
            "pass": "forward",
            "sizes": {**sizes, "tokens": 8192},
            "kernel": 1.0,
            "reference": 2.0,
            "original": 3.0,
        },
    ]
    rows += [
        {"op": "hierarchical", "pass": "forward", "sizes": {"tokens": n}, "kernel": float(n), "original": n * n / 8000}
        for n in (1024, 8192)
    ]
    tables = [{"device": "X1", "capability": [9, 0], "dtype": "bfloat16", "rows": rows}]
    for name in ("surgery.kernels.tuning.tables", "surgery.publish.speed_notes.tables"):
        monkeypatch.setattr(name, lambda: tables)
    for cached in (measured.fastest_measured, measured.device_rows):
        cached.cache_clear()
    yield
    for cached in (measured.fastest_measured, measured.device_rows):
        cached.cache_clear()


X1 = measured.DeviceKey((9, 0), "bfloat16")


def at(tokens, **more):
    return measured.named_sizes(tokens=tokens, **{"inputs": 4096, "outputs": 4096, "rank": 4, **more})


def test_measured_rows_decide(table):
    chosen = [measured.fastest_measured("btt", "forward", at(n, inputs=5120), X1) for n in (1, 700, 32768)]
    assert chosen == ["reference", "dense", "kernel"]
    half = measured.DeviceKey((9, 0), "float16")
    assert measured.fastest_measured("btt", "forward", at(1), half) == "reference"
    assert measured.fastest_measured("btt", "forward", at(512), X1, ("kernel", "reference")) == "kernel"


def linears_plan(*targets, unchanged=()):
    """A plan's data: targets (config, (out, in)), unchanged ((out, in), count)."""
    return {
        "targets": [{"first": config, "shape": list(shape)} for config, shape in targets],
        "unchanged": [{"shape": list(shape), "count": count} for shape, count in unchanged],
        "mixers": [],
    }


@pytest.fixture
def linear_table(monkeypatch, table):
    """Dense and low rank of one width, at 8,192 tokens and in a decoding step."""
    rows = [
        {"op": "low_rank", "pass": name, "sizes": {"tokens": n, "inputs": 4096, "outputs": 4096, "rank": r}, "original": ms, "reference": t}
        for name, n, r, ms, t in (("forward", 8192, 1024, 0.4, 0.2), ("captured", 1, 1024, 0.016, 0.028))
    ]  # fmt: skip
    tables = [{"device": "X1", "capability": [9, 0], "dtype": "bfloat16", "rows": rows}]
    for name in ("surgery.kernels.tuning.tables", "surgery.publish.speed_notes.tables"):
        monkeypatch.setattr(name, lambda: tables)
    measured.device_rows.cache_clear()


LOW_RANK = {"structure": "low_rank", "rank": 1024}


def test_the_linears_of_a_plan_have_predicted_times(linear_table):
    plan = linears_plan((LOW_RANK, (4096, 4096)), (LOW_RANK, (4096, 4096)), unchanged=[((4096, 4096), 3)])
    found = predict_linears(plan, 8192)
    assert (found["device"], found["dtype"]) == ("X1", "bfloat16")
    assert found["prefill"] == {
        "tokens": 8192,
        "before": pytest.approx(2.0),
        "after": pytest.approx(1.6),
        "measured": 3,
        "interpolated": 0,
    }
    assert found["decode"]["before"] == pytest.approx(0.08) and found["decode"]["after"] == pytest.approx(0.104)
    prefill, decode = predicted_lines(found)
    assert "prompt of 8,192 tokens, X1 (bfloat16), predicted: 2 -> 1.6 ms, 1.2x faster" in prefill
    assert "1.3x slower (of the times of each shape, 3 measured and 0 interpolated)" in decode


def test_times_between_measured_sizes_follow_operations_and_bytes(linear_table):
    """Twice the tokens, or a matrix of twice the size, takes twice as long where operations bind; no time is below the
    shortest measured.
    """
    plan = linears_plan((LOW_RANK, (4096, 4096)), unchanged=[((8192, 4096), 1)])
    found = predict_linears(plan, 16384)["prefill"]
    assert found == {
        "tokens": 16384,
        "before": pytest.approx(0.8 + 1.6),
        "after": pytest.approx(0.4 + 1.6),
        "measured": 0,
        "interpolated": 3,
    }
    small = predict_linears(linears_plan(({**LOW_RANK, "rank": 512}, (2048, 2048))), 8192)
    assert small["decode"]["before"] >= 0.016 and small["prefill"]["measured"] == 0


@pytest.mark.parametrize(
    "config, shape, says",
    [
        (
            {"structure": "kronecker", "blocks": [4, 4], "rank": 2},
            (4096, 4096),
            "kronecker for 4,096 -> 4,096 was not measured",
        ),
        (LOW_RANK, (64, 64), "dense for 64 -> 64 was not measured. Measure it: surgery bench linear"),
        ({"structure": "btt", "blocks": [4, 4], "rank": 2}, (4096, 4096), "btt for 4,096 -> 4,096 was not measured"),
    ],
)
def test_what_was_not_measured_is_not_predicted(linear_table, config, shape, says):
    lines = predicted_lines(predict_linears(linears_plan((config, shape)), 8192))
    assert len(lines) == 2 and all("no prediction" in line and says in line for line in lines)


def test_a_head_of_any_size_is_extrapolated_and_reads_one_token_of_a_prompt(linear_table):
    plan = linears_plan((LOW_RANK, (4096, 4096)))
    without = predict_linears(plan, 8192)
    plan["unchanged"] = [{"shape": [524288, 4096], "count": 1, "last": True}]
    found = predict_linears(plan, 8192)
    for phase in ("prefill", "decode"):
        assert (
            found[phase]["extrapolated"] == ["4,096 -> 524,288"] and found[phase]["tokens"] == without[phase]["tokens"]
        )
        head = found[phase]["before"] - without[phase]["before"]
        assert head == pytest.approx(found[phase]["after"] - without[phase]["after"]) and head > 0
    plan["unchanged"] = [{"shape": [524288, 4096], "count": 1}]
    assert predict_linears(plan, 8192)["prefill"]["before"] > 10 * found["prefill"]["before"]
    assert "extrapolated from smaller shapes, because it stays dense: 4,096 -> 524,288)" in predicted_lines(found)[0]


def test_no_times_with_experts_or_without_a_table(linear_table, monkeypatch):
    assert predict_linears({**linears_plan((LOW_RANK, (4096, 4096))), "unchanged": None}) is None
    monkeypatch.setattr("surgery.publish.speed_notes.tables", list)
    assert predict_linears(linears_plan((LOW_RANK, (4096, 4096)))) is None and predicted_lines(None) == []


@pytest.mark.parametrize(
    "before, after, says", [(1.4, 1.0, "1.4x faster"), (1.0, 1.7, "1.7x slower"), (1.0, 1.02, "as fast")]
)
def test_speed_is_said_in_words(before, after, says):
    assert speed_in_words(before, after) == says


def bench_result(**changes):
    """A file of `surgery bench linear --out`: dense and low rank of one size."""
    size = {"tokens": 8, "inputs": 64, "outputs": 64}
    row = {"table": "linear 64 -> 64, forward", "x": 8, "sizes": size, "options": {}, "way": "reference"}
    rows = [{**row, "rival": "dense", "op": "original", "ms": 2.0}]
    rows += [{**row, "rival": "low rank", "op": "low_rank", "options": {"rank": 16}, "ms": 1.0}]
    head = {"kind": "linear", "device": "my GPU", "capability": None, "dtype": "float32", "date": "2026-11-22"}
    return {**head, "versions": {}, "rows": rows, **changes}


def test_times_of_a_file_are_used(tmp_path):
    (tmp_path / "linear.json").write_text(json.dumps(bench_result()))
    table = measured_times.read_measured_times(tmp_path / "linear.json")
    plan = linears_plan(({"structure": "low_rank", "rank": 16}, (64, 64)))
    found = predict_linears(plan, 8, table)
    assert found["device"] == "my GPU" and (found["prefill"]["before"], found["prefill"]["after"]) == (2.0, 1.0)
    assert found["decode"] == {"tokens": 1, "unknown": "dense for 64 -> 64"}


def test_a_device_s_name_is_printed_as_it_is(tmp_path):
    (tmp_path / "linear.json").write_text(json.dumps(bench_result(device="[/red] GPU")))
    table = measured_times.read_measured_times(tmp_path / "linear.json")
    plan = linears_plan(({"structure": "low_rank", "rank": 16}, (64, 64)))
    lines = [Text.from_markup(line).plain for line in predicted_lines(predict_linears(plan, 8, table))]
    assert all("[/red] GPU (float32)" in line for line in lines)


def damaged_results():
    dense, low_rank = bench_result()["rows"]
    changes = [{"ms": -1.0}, {"ms": "1"}, {"ms": 1e400}, {"options": {}}, {"op": "btt"}, {"way": 5}]
    changes += [{"sizes": {"tokens": 0, "inputs": 64, "outputs": 64}}, {"sizes": {"tokens": 8, "inputs": 64}}]
    changes += [{"sizes": {"tokens": 8, "inputs": 64.5, "outputs": 64}}]
    rows = [[dense, {**low_rank, **change}] for change in changes]
    whole = [
        {"kind": "attention"},
        {"rows": []},
        {"rows": 7},
        {"device": 3},
        {"device": "GPU\x1b[2J"},
        {"device": "G" * 300},
        *({"rows": each} for each in rows),
    ]
    return ["", "[]", "{}", "null", "[" * 100_000, *(json.dumps(bench_result(**change)) for change in whole)]


@pytest.mark.parametrize("text", damaged_results(), ids=range(len(damaged_results())))
def test_files_of_times_are_checked(text, tmp_path):
    (tmp_path / "linear.json").write_text(text)
    with pytest.raises(SurgeryError, match=r"linear\.json"):
        measured_times.read_measured_times(tmp_path / "linear.json")


def test_a_missing_file_of_times_says_how_to_measure(tmp_path):
    with pytest.raises(SurgeryError, match=r"does not exist\. Measure this machine with"):
        measured_times.read_measured_times(tmp_path / "none.json")


def test_what_was_not_measured_is_left_to_the_kernel_s_rule(table):
    asked = [
        ("btt", "backward", at(1), X1),
        ("unknown", "forward", at(1), X1),
        ("btt", "forward", at(2**20), X1),  # far from every row
        ("btt", "forward", at(1), measured.DeviceKey((10, 0), "bfloat16")),
        ("btt", "forward", at(1), measured.DeviceKey((9, 0), "float32")),
        ("hierarchical", "forward", at(1024), X1),  # a kernel alone: nothing to choose from
    ]
    assert [measured.fastest_measured(*args) for args in asked] == 6 * [None]
    asks = reading("forward", 1)
    for says in (True, False):
        wins = measured.is_fastest("btt", asks, otherwise=lambda says=says: says)
        assert wins() == wins() == says


def reading(pass_, tokens):
    asked = measured.TuningQuery(pass_, at(tokens), torch.ones(1))
    return measured.CallReader(lambda: asked, lambda: tokens)


def test_a_device_reads_its_own_times_and_those_of_others_where_it_lacks_a_size(table, monkeypatch):
    """Two GPUs of one capability, which disagree at 512 tokens; the second was measured at 512 alone."""
    own = {"op": "btt", "pass": "forward", "sizes": dict(at(512)), "kernel": 1.0, "reference": 3.0, "dense": 4.0}
    tables = [*measured.tables(), {"device": "X2", "capability": [9, 0], "dtype": "bfloat16", "rows": [own]}]
    monkeypatch.setattr(measured, "tables", lambda: tables)
    measured.device_rows.cache_clear()
    second = measured.DeviceKey((9, 0), "bfloat16", "X2")
    chosen = [measured.fastest_measured("btt", "forward", at(n), second) for n in (1, 512)]
    assert chosen == ["reference", "kernel"]
    assert measured.fastest_measured("btt", "forward", at(512), measured.DeviceKey((9, 0), "bfloat16", "X1")) == "dense"


def test_sizes_between_the_measured_ones_take_an_implementation_near_the_best(monkeypatch):
    """Each measured size of kernels/tuning.json, chosen by all others: within 10% of the fastest in 98 of 100. The
    times of the H200 choose so in 23 of the 24 sizes that were measured on the H100.
    """
    place = measured.DeviceKey((9, 0), "bfloat16", "NVIDIA H200")
    rows = [row for row in measured.device_rows(place) if sum(name in row for name in measured.IMPLEMENTATIONS) > 1]
    losses, other_device = [], []
    for table in measured.tables():
        for row in table["rows"] if table["device"] == "NVIDIA H100 80GB HBM3" else ():
            ways = tuple(name for name in measured.IMPLEMENTATIONS if row.get(name))
            chosen = measured.fastest_measured(row["op"], row["pass"], tuple(row["sizes"].items()), place, ways)
            if chosen is not None:
                other_device.append(row[chosen] / min(row[name] for name in ways))
    assert len(other_device) == 24 and sum(loss <= 1.1 for loss in other_device) == 23, sorted(other_device)
    for row in rows:
        ways = tuple(name for name in measured.IMPLEMENTATIONS if row.get(name))
        monkeypatch.setattr(measured, "device_rows", lambda _, row=row: [other for other in rows if other is not row])
        query = row["op"], row["pass"], tuple(row["sizes"].items()), place, ways
        chosen = measured.fastest_measured.__wrapped__(*query)  # without its cache
        if chosen is not None:  # else the kernel's own rule decides
            losses.append(row[chosen] / min(row[name] for name in ways))
    assert len(losses) > 500 and sum(loss <= 1.1 for loss in losses) >= 0.98 * len(losses), sorted(losses)[-12:]


def test_an_op_takes_what_the_table_says(table, monkeypatch):
    monkeypatch.setattr(measured, "device_key", lambda device, dtype: X1)
    for way, tokens in (("reference", 1), ("dense", 512), ("kernel", 8192)):
        said = {w: measured.is_fastest("btt", reading("forward", tokens), w)() for w in ("kernel", "dense")}
        assert said == {"kernel": way == "kernel", "dense": way == "dense"}


def test_between_rows_the_nearer_weighs_more(table):
    ratios = [
        measured.log_ratio_to_kernel(measured.nearby_rows("btt", "forward", at(n), X1), "reference")
        for n in (512, 600, 6000, 8192)
    ]
    assert ratios[0] == pytest.approx(math.log(2), abs=1e-3) and ratios[3] == pytest.approx(math.log(2), abs=1e-3)
    few = [
        measured.log_ratio_to_kernel(measured.nearby_rows("btt", "forward", at(n), X1), "reference")
        for n in (1, 4, 100)
    ]
    assert few[0] == pytest.approx(-math.log(2), abs=1e-3) and few[0] < few[1] < few[2] < math.log(2)


def test_tables_read_as_written(tmp_path):
    results = [
        bench("linear", sizes="small", device="cpu", only="low", dtype=dtype) for dtype in ("float32", "bfloat16")
    ]
    tables = measured_times.tuning_tables(results)
    assert json.loads(publish.format_json(tables))["tables"] == tables
    assert [t["dtype"] for t in tables] == ["float32", "bfloat16"]
    assert [publish.heading(r) for r in publish.merge_results(results)] == ["Linear, float32", "Linear"]


def test_what_is_slower_is_said(table):
    first = {"structure": "btt", "blocks": [64, 64], "rank": 4}
    mixers = [{"mixer": "linear: hierarchical mask, identity features"}]
    plan = {"targets": 2 * [{"first": first, "shape": [4096, 4096]}], "mixers": mixers}
    linear, attention = plan_notes(plan, 1024)
    assert (
        linear
        == "note: speed on one X1, launches of kernels included: btt 64x64 for 4,096 -> 4,096 compared with dense: 3.0x faster at 1 token, 2.0x "
        "slower at 512 tokens, 3.0x faster at 8,192 tokens"
    )
    assert (
        "features compared with SDPA at a context of 1,024 tokens: prefill 7.8x slower; faster than SDPA: prefill from "
        "8,192 tokens on" in attention
    )
    assert attention.endswith("; this is attention alone, not the whole model")
    assert report_notes({"mixer_rows": mixers}, 1024) == [attention] and report_notes({}) == []
    assert report_notes({"mixer_rows": mixers}, 16384) == []
    mixers[0]["mixer"] += ", window 64, sinks 4"  # the table has no row with a window, and the note says so
    (attention,) = report_notes({"mixer_rows": mixers}, 1024)
    assert (
        "sinks 4, measured without window and sinks, compared with SDPA at a context of 1,024 tokens: prefill 7.8x "
        "slower" in attention
    )
    ranks = [{"structure": {**first, "rank": rank}, "shape": [4096, 4096]} for rank in (4, 3, 1000)]
    assert report_notes({"modules": [*ranks, {"structure": {"structure": "dense"}, "shape": [4096, 4096]}]}) == [linear]
    assert (
        plan_notes({"targets": [{"first": first, "shape": [64, 64]}], "mixers": []}) == []
    )  # nothing near was measured


def test_equal_linears_are_looked_up_once(table, monkeypatch):
    """A mixture of experts has thousands."""
    looked_up = []
    monkeypatch.setattr(
        speed_notes, "_linear_note", lambda config, *shape: looked_up.append((config["rank"], *shape)) or ""
    )
    targets = [
        {"first": {"structure": "low_rank", "rank": rank}, "shape": [64, 32]} for rank in (4, 4, 8) for _ in range(100)
    ]
    plan_notes({"targets": targets, "mixers": []})
    assert sorted(looked_up) == [(4, 64, 32), (8, 64, 32)]


def test_a_cpu_gets_no_advice_on_a_gpu(table):
    notes = plan_notes({"targets": [], "mixers": [{"mixer": "linear: hierarchical mask, identity features"}]}, 1024)
    assert notes and speed_notes.notes_for_device([*notes, "other"], "cpu") == ["other"]
    assert speed_notes.notes_for_device(notes, "cuda:0") == notes


def test_a_cpu_gets_predictions_for_a_gpu_only_if_it_asks(linear_table):
    lines = predicted_lines(predict_linears(linears_plan((LOW_RANK, (4096, 4096))), 8192))
    assert len(lines) == 2 and speed_notes.notes_for_device(lines, "cpu") == []
    assert (
        speed_notes.notes_for_device(lines, "cpu", asked=True) == lines == speed_notes.notes_for_device(lines, "h200")
    )


def test_times_of_a_sliding_window_are_not_those_of_chunks(table, monkeypatch):
    monkeypatch.setattr(speed_notes, "_ratio_to_softmax", lambda *_: 0.5)
    monkeypatch.setattr(speed_notes, "_break_even", lambda *_: "nowhere")
    mixer = "linear: hierarchical mask, identity features, window 64"
    (sliding,), chunks = (report_notes({"mixer_rows": [{"mixer": m}]}, 1024) for m in (mixer, f"{mixer}, near chunks"))
    assert "decoding 2.0x slower (2.0x slower in a CUDA graph)" in sliding and not chunks


def test_results_become_the_table_and_the_page(tmp_path):
    results = [bench(kind, sizes="small", device="cpu", only="btt,mlr") for kind in ("linear", "attention")]
    (table,) = measured_times.tuning_tables(results)
    rows = table["rows"]
    assert {row["op"] for row in rows} == {"btt", "mlr"}
    assert {row["pass"] for row in rows} == {"forward", "backward", "captured"}
    assert all({"reference", "original"} <= row.keys() for row in rows)
    text = f"before\n{publish.BEGIN}old\n{publish.END}after\n"
    page = publish.update_page(publish.update_page(text, results), results)
    assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page
    assert page.count("### attention, forward + backward") == 1


def test_the_page_leaves_out_what_is_never_the_fastest():
    times = {
        "dense": 3.0,
        "BTT, kernel": 2.0,
        "BTT, reference": 1.0,
        "BTT, as chosen": 1.0,
        "SSD, kernel": 1.0,
        "SSD, reference": 2.0,
        "TBM, kernel": 2.0,
        "TBM, reference": 1.0,
        "MLR, reference": 9.0,
    }
    rows = [{"table": "t", "x": 1, "rival": name, "ms": ms} for name, ms in times.items()]
    names = [row["rival"] for row in publish.shown_rows(rows)]
    assert names == ["dense", "BTT", "SSD, kernel", "TBM, kernel", "TBM, reference", "MLR, reference"]


def test_linears_are_one_table_of_the_page():
    """Multiples of dense, which has milliseconds; a single token in the CUDA graph alone."""
    names = ("forward", "forward, CUDA graph", "forward + backward")
    rows = [
        {"table": f"linear 8 -> 8, {what}", "x": x, "rival": rival, "ms": ms, "ratio": 2.0 / ms}
        for what in names for x in (1, 8192) for rival, ms in (("dense", 2.0), ("BTT s=4", 1.0), ("BTT, half", 1.0))
        if (what == names[0] or x == (1 if what == names[1] else 8192))
    ]  # fmt: skip
    ((_, columns, lines),) = page_tables.grids({"kind": "linear", "rows": rows})
    assert columns == ["forward, 8,192", "forward, CUDA graph, 1", "forward + backward, 8,192"]
    assert lines == [("8 -> 8, dense", 3 * ["2.00"]), ("8 -> 8, BTT s=4", 3 * ["2.00"])]


def test_steps_in_a_graph_and_eager_steps_are_one_table_of_the_page():
    graph = ("decode, batch 1, CUDA graph", ["1", "2", "4"], [("SSD", ["a", "b", "c"])])
    eager = ("decode, batch 1", ["1", "2", "4"], [("SDPA", ["d", "e", "f"]), ("SSD", ["g", "h", "i"])])
    other = ("attention, forward", ["1"], [("SDPA", ["j"])])
    (title, columns, rows), same = page_tables.joined_grids([eager, graph, other])
    assert (title, same) == ("decode, batch 1", other)
    assert columns == ["CUDA graph, 1", "CUDA graph, 2", "CUDA graph, 4", "eager, 1", "eager, 4"]
    assert rows == [("SDPA", ["-", "-", "-", "d", "f"]), ("SSD", ["a", "b", "c", "g", "i"])]


def test_windows_of_decoding_steps_are_rows_of_the_table():
    result = bench("decode", sizes="small", device="cpu", only="window 64")
    rows = measured_times.tuning_tables([result])[0]["rows"]
    masks = ("gates", "hierarchical", "gates delta", "hierarchical delta")
    assert {row["op"] for row in rows} == {f"window {mask}" for mask in masks}
    assert {row["pass"] for row in rows} == {"step", "captured step"} and all(
        row["sizes"]["window"] == 64 for row in rows
    )


def test_what_is_not_measured_again_stays():
    head = {"device": "d", "capability": [9, 0], "dtype": "bfloat16", "versions": {"torch": "2"}}
    row = {"op": "btt", "pass": "forward", "sizes": {"tokens": 1}, "kernel": 1.0}
    old = [{**head, "date": "2026-01-01 to 2026-01-03", "rows": [row, {**row, "op": "mlr"}]}]
    new = {**head, "date": "2026-02-02", "rows": [{**row, "kernel": 2.0}, {**row, "op": "window gates"}]}
    (joined,) = publish.keep_unmeasured([dict(new)], old)
    assert joined["date"] == "2026-01-01 to 2026-02-02"
    assert [(r["op"], r["kernel"]) for r in joined["rows"]] == [("mlr", 1.0), ("btt", 2.0), ("window gates", 1.0)]
    earlier, later = publish.keep_unmeasured([{**new, "versions": {"torch": "3"}}], old)
    assert [r["op"] for r in earlier["rows"]] == ["mlr"] and [r["op"] for r in later["rows"]] == ["btt", "window gates"]
    assert publish.keep_unmeasured([], old) == old
    assert publish.keep_unmeasured([{**new, "dtype": "float32"}], old)[0] == old[0]


def test_sections_of_other_kinds_stay_on_the_page():
    text = f"{publish.BEGIN}\nlegend\n\n## Attention\n\n### a table\n\n## Linear\n\nold\n{publish.END}after\n"
    results = [bench("linear", sizes="small", device="cpu", only="low rank", dtype="bfloat16")]
    page = publish.update_page(text, results)
    assert page.count("## Attention\n\n### a table\n") == 1 and page.index("## Attention") < page.index("## Linear")
    assert "old" not in page and page == publish.update_page(page, results)


def test_a_call_takes_what_the_cpu_takes_to_launch_it_but_not_in_a_graph():
    row = {
        "x": 1,
        "sizes": {"tokens": 1},
        "options": {},
        "op": "btt",
        "way": "kernel",
        "rival": "b",
        "ms": 0.01,
        "launch": 0.05,
    }
    first = {**row, "op": "original", "rival": "a", "ms": 0.03, "launch": 0.02}
    results = [{"device": "d", "capability": [9, 0], "dtype": "f", "date": "", "versions": {}}]
    for table, kernel in (("linear, forward", 0.05), ("linear, forward, CUDA graph", 0.01)):
        results[0]["rows"] = [{**r, "table": table} for r in (first, row)]
        (made,) = measured_times.tuning_tables(results)[0]["rows"]
        assert made["kernel"] == kernel and made["original"] == 0.03


def test_a_cpu_has_no_cuda_graph():
    """Titles say how the calls ran; what is read from them is the same on every device."""
    for kind, only in (("linear", "low rank"), ("decode", "window 64")):
        titles = {row["table"] for row in bench(kind, sizes="small", device="cpu", only=only)["rows"]}
        assert not any("graph" in title for title in titles)
        captured = {title for title in titles if title.endswith(", calls in a row")}
        assert captured and {measured_times.pass_of_table(title) for title in captured} <= {"captured", "captured step"}
    grids = result_grids([{"table": "decode, batch 1, calls in a row", "x": 64, "rival": "a", "ms": 1.0, "cache": 8}])
    assert [title for title, *_ in grids] == ["decode, batch 1, calls in a row"]
    assert measured_times.decoding_call("cpu (x86_64)") == "decoding step"
    assert measured_times.decoding_call("NVIDIA H200") == "decoding step in a CUDA graph"


def test_runs_of_one_kind_are_one():
    row = {"table": "t", "x": 1, "rival": "a", "ms": None}
    common = {"kind": "linear", "dtype": "bfloat16"}
    runs_ = [{**common, "complete": True, "rows": [{**row, "note": "time limit"}, {**row, "rival": "b", "ms": 2.0}]}]
    runs_ += [{**common, "complete": False, "rows": [{**row, "ms": 1.0}, {**row, "rival": "b", "ms": 3.0}]}]
    (one,) = publish.merge_results(runs_)
    assert {r["rival"]: r["ms"] for r in one["rows"]} == {"a": 1.0, "b": 2.0} and not one["complete"]
    assert one["processes"] == 2
