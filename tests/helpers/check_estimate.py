"""Convert random models and print what `surgery plan` estimates beside what is measured, as a Markdown table.

python tests/helpers/check_estimate.py FOLDER 50m 150m 500m --tokens 4096 --length 256
python tests/helpers/check_estimate.py FOLDER 1b 7b --device cuda --tokens 8192 --length 1024

Memory is the sum of the tensors that the process holds, at its peak, as PyTorch's profiler records it; --rss: the peak
of the process's resident memory instead, without the profiler, which takes memory itself and does not see the thread of
a conversion without text. Seconds are processor seconds of the conversion, without imports. On a GPU (--device cuda)
seconds are wall time, and memory is the peak that PyTorch allocated on the GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import random_llama

# layers, width, MLP width, heads, key/value heads, vocabulary, tied
SHAPES = {
    "20m": (4, 512, 2048, 8, 4, 8000, True),
    "50m": (12, 512, 2048, 8, 4, 8000, True),
    "150m": (8, 1024, 4096, 16, 8, 16000, True),
    "1b-4": (4, 2048, 8192, 32, 8, 32000, True),
}


def convert(source: str, recipe: str, overrides: list[str], rss: bool, device: str = "cpu") -> dict[str, Any]:
    """Convert `source` in this process; return the seconds of its steps and the peak of its memory in bytes."""
    import contextlib
    import shutil
    import time

    import torch
    from torch.profiler import ProfilerActivity, profile

    from surgery.conversion.convert import convert as run
    from surgery.core.device import peak_rss
    from surgery.planning.recipe import load_recipe

    chosen = load_recipe(recipe, overrides)
    shutil.rmtree(f"{source}-out", ignore_errors=True)
    record = (
        contextlib.nullcontext()
        if rss or device != "cpu"
        else profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    )
    clock = time.process_time if device == "cpu" else time.perf_counter
    began = clock()
    with record:
        report = run(source, chosen, f"{source}-out", device=device)
    seconds, held, most = clock() - began, 0, 0
    if device != "cpu":
        most = torch.cuda.max_memory_allocated()
    elif rss:
        most = peak_rss()
    else:
        changes = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(changes, key=lambda event: event.start_ns()):
            held += event.nbytes()
            most = max(most, held)
    return {
        "seconds": seconds, "steps": report["time"]["seconds"], "peak": most, "host": peak_rss(), "threads": torch.get_num_threads(),
        "result": report["totals"]["bytes_after"], "sweeps": sum(m["sweeps"] for m in report["modules"]) / max(1, len(report["modules"])),
    }  # fmt: skip


def row(name: str, folder: Path, arguments: argparse.Namespace) -> str:
    """Return the table's row of one model."""
    import surgery

    source, text = folder / name, folder / f"{name}-calibration.safetensors"
    random_llama.SHAPES[name] = SHAPES.get(name, random_llama.SHAPES.get(name))
    if not source.exists():
        random_llama.write_checkpoint(
            source, name, tokens=arguments.tokens, length=arguments.length, layers=arguments.layers
        )
    overrides = [*arguments.set, f"tokens={arguments.tokens}", f"length={arguments.length}"]
    plan = dict(surgery.plan(source, arguments.recipe, overrides=dict(o.split("=", 1) for o in overrides), device="cpu" if arguments.device == "cpu" else "h200",
                             calibrated=not arguments.data_free))["estimate"]  # fmt: skip
    given = overrides if arguments.data_free else [*overrides, f"calibration={text}"]
    command = [
        sys.executable,
        __file__,
        "--convert",
        json.dumps([str(source), arguments.recipe, given, arguments.rss, arguments.device]),
    ]
    done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    parallel = plan["threads"] if arguments.device == "cpu" else 1
    low, high = (sum(step["seconds"][i] for step in plan["steps"]) * parallel for i in (0, 1))
    peak = plan["peak_host"] if arguments.rss else plan["peak_tensors"]
    if arguments.device != "cpu":
        peak = plan["peak_device"]
    cells = [
        name, arguments.recipe, f"{done['seconds']:.0f}", f"{low:.0f} to {high:.0f}", f"{done['sweeps']:.1f}", f"{done['peak'] / 1e6:,.0f}",
        f"{peak / 1e6:,.0f} ({peak / done['peak'] - 1:+.0%})", f"{done['result'] / 1e6:,.0f}", f"{plan['disk']['result'] / 1e6:,.0f}",
    ]  # fmt: skip
    print(
        json.dumps(
            {
                "measured": {**done["steps"], "host MB": done["host"] / 1e6},
                "estimated": {s["name"]: [*s["seconds"], s["device"] / 1e6] for s in plan["steps"]}
                | {"host MB": plan["peak_host"] / 1e6},
            }
        ),
        file=sys.stderr,
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table, or (with --convert) convert one model and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--recipe", default="btt-half")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rss", action="store_true")
    parser.add_argument("--data-free", action="store_true")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda, whose estimates are of an H200.")
    parser.add_argument("--convert", type=json.loads)
    arguments = parser.parse_args()
    if arguments.convert:
        print(json.dumps(convert(*arguments.convert)))
        return
    print(
        f"| model | recipe | {'processor ' if arguments.device == 'cpu' else ''}seconds | estimated | sweeps | peak "
        "memory, MB | estimated | result, MB | estimated |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in arguments.names:
        print(row(name, arguments.folder, arguments), flush=True)


if __name__ == "__main__":
    main()
