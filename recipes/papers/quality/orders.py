"""Table of docs/measurements/quality.md: BTT and Monarch with blocks of neighboring outputs and of every b-th output,
at equal parameters.

python -m recipes.papers.quality.orders SRC --calibration FILE --text FILE [--keep 0.5] [--tokens 16384] [--length 1024]

Both orders have the same grids, ranks and stored bytes: the budget is spread evenly. For each role the mean relative
output error of its matrices on held-out calibration rows, and the perplexity of the whole converted model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from recipes.papers.quality.linears import STEPS, STRUCTURES, convert_and_measure, measure_checkpoint
from recipes.papers.script import run_script
from surgery.core.device import choose_device
from surgery.eval.suite import EvalOptions
from surgery.eval.suites import perplexity as ppl

ORDERS = ("contiguous", "strided")


def main() -> None:
    """Print a line for each structure, step, share and order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", help="Checkpoint to convert.")
    add("--calibration", required=True, help="Calibration text.")
    add("--text", required=True, help="Text to score.")
    add("--keep", type=float, action="append", help="Share of the parameters to keep. Repeatable. Default: 0.5.")
    add("--structure", choices=("btt", "monarch"), action="append", help="Repeatable. Default: both.")
    add("--step", choices=("plain", "whitened", "ALS"), action="append", help="Repeatable. Default: ALS.")
    add("--tokens", type=int, default=16384, help="Tokens of each text. Default: %(default)s.")
    add("--length", type=int, default=1024, help="Length of the windows in tokens. Default: %(default)s.")
    add("--device", help="Compute on this device. Default: a GPU if there is one.")
    add("--json", type=Path, help="Write the rows to this file.")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    options = EvalOptions(text=arguments.text, tokens=arguments.tokens, length=arguments.length)
    base = measure_checkpoint(arguments.source, options, device)
    print(f"original: {ppl.summarize(base)['perplexity']:.4g}", flush=True)
    text = {"calibration": arguments.calibration, "tokens": arguments.tokens, "length": arguments.length}
    rows = []
    for keep in arguments.keep or [0.5]:
        for structure in arguments.structure or ["btt", "monarch"]:
            for step in arguments.step or ["ALS"]:
                for order in ORDERS:
                    recipe = {**text, "structure": structure, "keep": keep, **STRUCTURES[structure], **STEPS[step]}
                    recipe |= {"allocate": "uniform", "order": order}
                    found = {"structure": structure, "step": step, "keep": keep, "order": order}
                    found |= convert_and_measure(arguments.source, recipe, [options], [base], device)
                    rows.append(found)
                    print(format_line(found), flush=True)
                    if arguments.json:
                        arguments.json.write_text(json.dumps(rows, indent=1))


def format_line(found: dict[str, Any]) -> str:
    """Format a row as a line."""
    place = " ".join(str(found[key]) for key in ("structure", "step", "keep", "order"))
    errors = ", ".join(f"{role} {error:.3f}" for role, error in found["errors"].items())
    return f"{place}: {found['perplexity']:.4g} +- {found['se']:.2g}, kept {found['kept']:.4f}; {errors}"


if __name__ == "__main__":
    run_script(main)
