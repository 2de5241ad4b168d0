"""`surgery bench`: run and compare the cases of one kind."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from surgery.core.device import choose_device, device_name
from surgery.core.errors import SurgeryError, suggestion
from surgery.core.files import explain_disk_errors, read_json, write_json
from surgery.core.progress import Progress
from surgery.eval.speed import attention, contexts, decode, linear, model, packages, serve
from surgery.eval.speed import train as training
from surgery.eval.speed.baselines import distribution_version
from surgery.eval.speed.host_time import measure_host_time
from surgery.eval.speed.roofline import add_floor, measure_ceilings
from surgery.eval.speed.timer import Benchmark, BenchmarkCase, ResultRow, TimedImplementation

KINDS = ("linear", "attention", "packages", "decode", "model")
TRAIN, SERVE, SPEED = "train", "serve", "speed"
SIZES = ("full", "main", "compressed", "small")  # compressed: of linears alone
STAGES = ("lm", "distill")  # of bench train
DTYPES = ("bfloat16", "float16", "float32")


def bench(
    kind: str,
    sizes: str | None = None,
    peers: bool = False,
    device: str | None = None,
    time_limit: float | None = None,
    *,
    out: Path | None = None,
    only: str | None = None,
    progress: Progress | None = None,
    dtype: str | None = None,
    shapes_of: str | None = None,
    stage: str | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Run a benchmark and return its results as JSON data, written to `out` after every case.

    Args:
        kind: one of KINDS, or "train", or "serve" or "speed", which continue the measurements of an unfinished run in
            `out`.
        sizes: full, main, compressed (linears at half and a quarter of the parameters) or small; default: full on a
            GPU, else small.
        peers: include other libraries.
        time_limit: seconds after which no further case starts.
        only: comma-separated words; only implementations whose name contains one of them run. A word after a minus sign
            excludes names. The first implementation always runs.
        dtype: bfloat16, float16 or float32; default: bfloat16 on a GPU, else float32.
        shapes_of: of `linear`: a checkpoint, a folder or Hub id, whose shapes are measured instead of `sizes`.
        stage: of `train`: lm, or distill for healing with a teacher; default: lm.
        command: the command line's arguments, recorded in the results.
    """
    check_result_file(out)
    describe = partial(describe_environment, command=command)
    started, progress = time.monotonic(), progress or Progress()
    deadline = started + time_limit if time_limit else float("inf")
    if stage is not None and (kind != TRAIN or stage not in STAGES):
        raise SurgeryError(
            f"--stage {stage!r} is not one of {', '.join(STAGES)}{suggestion(stage, STAGES)}"
            if kind == TRAIN
            else f"--stage is an option of bench train (got bench {kind}). Leave it out"
        )
    if kind == TRAIN:  # chooses a device for each process itself
        sizes = sizes or ("full" if torch.cuda.is_available() and device != "cpu" else "small")
        _check_options(kind, sizes)
        if stage == "distill":
            from surgery.eval.speed.train_distill import train_distill

            return train_distill(sizes, only, device, deadline, out=out, progress=progress, about=describe)
        return training.train(sizes, only, device, deadline, out=out, progress=progress, about=describe)
    if shapes_of is not None and (kind != "linear" or sizes is not None):
        raise SurgeryError(
            f"--model gives the shapes of bench linear in place of --sizes (got bench {kind}, sizes {sizes}). Leave "
            "one out"
        )
    shapes = None if shapes_of is None else linear.checkpoint_shapes(shapes_of)
    run_device = choose_device(device)
    gpu = run_device.type == "cuda"
    sizes = sizes or ("full" if gpu else "small")
    _check_options(kind, sizes, dtype)
    torch_dtype = getattr(torch, dtype or ("bfloat16" if gpu else "float32"))
    if kind in (SERVE, SPEED):
        about, run = describe(run_device), serve.serve if kind == SERVE else contexts.speed
        return run(sizes, only, run_device, torch_dtype, deadline, out=out, progress=progress, about=about)
    budget_ms, max_ms = (25.0, 3000.0 if kind == "model" else 700.0) if gpu else (2.0, 20_000.0)
    benchmark = Benchmark(run_device, budget_ms, max_ms, deadline, min_runs=3 if kind != "model" else 1)
    limits = measure_ceilings(benchmark, torch_dtype)
    result: dict[str, Any] = {
        "kind": kind,
        "sizes": sizes if shapes is None else "model",
        **describe(run_device),
        "dtype": str(torch_dtype).removeprefix("torch."),
    }
    result |= {"ceilings": limits, "rows": [], "complete": False}
    for case in _benchmark_cases(kind, sizes, run_device, torch_dtype, peers, shapes):
        case.implementations = _select_implementations(case, only, gpu)
        progress.say(case_line(case, _run_case(benchmark, case, limits, result["rows"])))
        if out is not None:
            save_result(out, result)
        if time.monotonic() > deadline:
            break
    else:
        result["complete"] = True
    if kind == "packages":
        result["choices"] = packages.choices()
        result["versions"] |= packages.versions()
    result["seconds"] = round(time.monotonic() - started, 1)
    if out is not None:
        save_result(out, result)
    return result


def check_result_file(out: Path | None) -> None:
    """Raise SurgeryError, before anything is measured, if results cannot be written to `out`, or if another kind of
    file would be lost.
    """
    if out is None:
        return
    if out.is_dir():
        raise SurgeryError(f"--out {out} is a folder. Name a JSON file in it, for example {out / 'bench.json'}")
    if not out.parent.is_dir():
        raise SurgeryError(f"--out {out}: {out.parent} is not a folder. Create it first.")
    if out.is_file() and out.stat().st_size:
        with suppress(SurgeryError):
            stored = read_json(out)
            if isinstance(stored, dict) and "kind" in stored:  # every result has it
                return
        raise SurgeryError(f"--out {out} exists and was not written by `surgery bench`. Choose another name.")


def save_result(out: Path, result: dict[str, Any]) -> None:
    """Write results as JSON."""
    with explain_disk_errors(out):
        write_json(out, result)


def _check_options(kind: str, sizes: str, dtype: str | None = None) -> None:
    is_selected = (
        ("bench", kind, (*KINDS, SPEED, SERVE, TRAIN)),
        ("--sizes", sizes, SIZES),
        ("--dtype", dtype or DTYPES[0], DTYPES),
    )
    for what, value, valid in is_selected:
        if value not in valid:
            raise SurgeryError(f"{what} {value!r} is not one of {', '.join(valid)}{suggestion(value, valid)}")
    if sizes == "compressed" and kind != "linear":
        raise SurgeryError(
            f"--sizes compressed are sizes of linears (got bench {kind}). Use --sizes main, or bench linear"
        )


def _benchmark_cases(
    kind: str,
    sizes: str,
    device: torch.device,
    dtype: torch.dtype,
    peers: bool,
    shapes: Sequence[tuple[int, int]] | None,
) -> Iterator[BenchmarkCase]:
    if shapes is not None:
        return linear.benchmark_cases(sizes, device, dtype, shapes)
    if kind == "attention":
        return attention.benchmark_cases(sizes, device, dtype, peers)
    modules = {"linear": linear, "packages": packages, "decode": decode, "model": model}
    return modules[kind].benchmark_cases(sizes, device, dtype)


def _select_implementations(case: BenchmarkCase, only: str | None, gpu: bool) -> list[TimedImplementation]:
    """Return the implementations that --only selects; on a CPU without kernels."""
    words = (only or "").lower().split(",")
    without = [word[1:] for word in words if word.startswith("-")]
    among = [word for word in words if not word.startswith("-")] or [""]

    def is_selected(implementation: TimedImplementation) -> bool:
        name = implementation.name.lower()
        return any(word in name for word in among) and not any(word in name for word in without)

    return [
        r
        for i, r in enumerate(case.implementations)
        if (i == 0 or is_selected(r)) and (gpu or r.choice not in ("kernel", "products"))
    ]


def _run_case(
    benchmark: Benchmark, case: BenchmarkCase, limits: dict[str, float], into: list[ResultRow]
) -> list[ResultRow]:
    rows = measure_host_time(benchmark, case) if case.host else benchmark.run(case)
    works = {implementation.name: implementation.work for implementation in case.implementations}
    for row in rows:
        add_floor(row, works[row["rival"]], limits)
        if rows[0]["ms"] and row["ms"]:
            row["ratio"] = rows[0]["ms"] / row["ms"]
        cache = case.sizes.get("cache", {})
        row["sizes"] = {k: v for k, v in case.sizes.items() if k != "cache"}
        if row["rival"] in cache:
            row["cache"] = cache[row["rival"]]
    into += rows
    return rows


def case_line(case: BenchmarkCase, rows: list[ResultRow]) -> str:
    """Return a one-line summary of a measured case."""

    def time_of(row: ResultRow) -> str:
        if not row["ms"]:
            return f"({row['note']})"
        return f"{row['host_us']:.4g} us" if "host_us" in row else f"{row['ms']:.4g}"

    shown = (f"{row['rival']} {time_of(row)}" for row in rows)
    return f"{case.table}, {case.x:,}: " + " | ".join(shown)


def describe_environment(device: torch.device, command: Sequence[str] = ()) -> dict[str, Any]:
    """Return device, versions and date, which measurements depend on, and the command line's arguments without
    secrets.
    """
    from surgery.publish.hub.files import redact_secrets

    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    if find_spec("triton") is not None:
        from importlib.metadata import version

        versions["triton"] = version("triton")
    from importlib.metadata import version as of

    versions["transformers"] = of("transformers")
    versions["flash-linear-attention"] = distribution_version("flash-linear-attention")
    capability = list(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None
    return {
        "device": device_name(device),
        "capability": capability,
        "date": date.today().isoformat(),
        "versions": versions,
        **({"command": redact_secrets(list(command))} if command else {}),
    }
