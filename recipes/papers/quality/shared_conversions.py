"""Conversions of a mixture of experts with and without `share: experts`, at equal parameters: JSON lines, and a table.

python -m recipes.papers.quality.shared_conversions SRC --calibration FILE --text FILE --json ROWS.jsonl [--keep 0.5] [--time-limit 100]

Only experts are replaced, by low rank, at one share for all matrices (allocate: uniform), layer after layer. Rows that
ROWS.jsonl has are not measured again, and after --time-limit no conversion is begun. The table is printed from the rows
of the file.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from recipes.papers.script import run_script
from surgery.conversion.apply import apply
from surgery.core.device import choose_device
from surgery.core.progress import Progress
from surgery.eval.run import load
from surgery.eval.suite import EvalOptions
from surgery.eval.suites import perplexity as ppl
from surgery.planning.recipe import ConversionRecipe, validate_recipe

BASES = {"own": "none", "shared": "experts"}


def expert_recipe(bases: str, keep: float, tokens: int, length: int) -> ConversionRecipe:
    """Return the recipe of a row. bases: own or shared."""
    rule = {"match": "expert.*", "structure": "low_rank", "share": BASES[bases]}
    common = {"structure": "dense", "keep": keep, "rules": [rule], "tokens": tokens, "length": length}
    return validate_recipe({**common, "allocate": "uniform", "curvature": "none"}, f"of the {bases} bases")


def convert_and_score(arguments: Any, device: torch.device, bases: str, keep: float, base: Any) -> dict[str, Any]:
    """Return the row of one conversion. base: the measurement of the original."""
    model, tokenizer = load(arguments.source, device, "float32", False)
    began = time.perf_counter()
    recipe = expert_recipe(bases, keep, arguments.tokens, arguments.length)
    model = apply(model, recipe, arguments.calibration, tokenizer=tokenizer, progress=Progress())
    seconds, report = time.perf_counter() - began, model.surgery_report
    ranks, errors = {}, {}
    for role in ("gate", "up", "down"):
        found = [record for record in report["modules"] if record["roles"] == [f"expert.{role}"]]
        ranks[role] = max(record["structure"]["rank"] for record in found)
        errors[role] = sum(record["error"] for record in found) / len(found)
    totals = report["totals"]
    row = {"kind": bases, "keep": keep, "ranks": ranks, "errors": errors, "seconds": seconds}
    row |= {"before": totals["replaced_params_before"], "after": totals["replaced_params_after"]}
    return row | ppl.summarize(ppl.measure(model, tokenizer, options_of(arguments)), base)


def options_of(arguments: Any) -> EvalOptions:
    """Return what is scored."""
    return EvalOptions(text=arguments.text, tokens=arguments.tokens, length=arguments.length)


def format_row(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    perplexity = f"{row['perplexity']:.4g} ± {row['se']:.2g}"
    if row["kind"] == "original":
        return f"| all | original | | | {perplexity} | | |"
    ranks, errors = ", ".join(map(str, row["ranks"].values())), ", ".join(f"{e:.3f}" for e in row["errors"].values())
    kept = f"{row['after'] / row['before']:.1%}"
    return (
        f"| {kept} | {row['kind']} | {ranks} | {errors} | {perplexity} | {ppl.format_interval(row['ratio'])} | "
        f"{row['seconds']:.0f} |"
    )


def main() -> None:
    """Measure the rows that are missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", help="Checkpoint of a mixture of experts.")
    add("--calibration", required=True, help="Calibration text.")
    add("--text", required=True, help="Text to score.")
    add("--json", type=Path, required=True, help="Append the rows to this file.")
    add(
        "--keep",
        type=float,
        action="append",
        help="Share of the experts' parameters; may be repeated. Default: 0.5, 0.25, 0.75.",
    )
    add("--tokens", type=int, default=65536, help="Tokens to calibrate on, and to score. Default: %(default)s.")
    add("--length", type=int, default=256, help="Length of the windows in tokens. Default: %(default)s.")
    add(
        "--time-limit",
        type=float,
        default=float("inf"),
        help="Begin no conversion after this many seconds. Default: no limit.",
    )
    add("--device", help="Compute on this device. Default: a GPU if there is one.")
    arguments = parser.parse_args()
    began, device = time.perf_counter(), choose_device(arguments.device)
    known = [json.loads(line) for line in arguments.json.read_text().splitlines()] if arguments.json.is_file() else []
    done = {(row["kind"], row.get("keep")) for row in known}
    model, tokenizer = load(arguments.source, device, "float32", False)
    base = ppl.measure(model, tokenizer, options_of(arguments))
    with arguments.json.open("a") as file:

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps({**row, "device": str(device)}) + "\n")
            file.flush()

        if ("original", None) not in done:
            params = sum(parameter.numel() for parameter in model.parameters())
            write({"kind": "original", "params": params, **ppl.summarize(base, base)})
        for keep in arguments.keep or [0.5, 0.25, 0.75]:
            for bases in BASES:
                if (bases, keep) not in done and time.perf_counter() - began < arguments.time_limit:
                    write(convert_and_score(arguments, device, bases, keep, base))
    print("| kept | bases | ranks of gate, up, down | relative errors | perplexity | ratio to the original | seconds |")
    print("| --- " * 7 + "|")
    for line in arguments.json.read_text().splitlines():
        print(format_row(json.loads(line)))


if __name__ == "__main__":
    run_script(main)
