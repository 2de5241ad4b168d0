"""Table of docs/measurements/quality.md: perplexity after converting every linear of the layers, by structure and method, without training.

python -m surgery.recipes.papers.quality.linears SRC --calibration FILE --text FILE [--keep 0.75 --keep 0.5] [--json OUT]

    plain        no calibration text: Frobenius norm
    whitened     closed form in the metric of the inputs, each layer separately, the same share of parameters everywhere
    ALS          the same with alternating least squares
    everything   the same with sequential calibration, curvature of the outputs, and a budget allocated over layers and roles
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from surgery.conversion.convert import convert
from surgery.core.device import choose_device
from surgery.core.errors import SurgeryError
from surgery.eval.run import load
from surgery.eval.suite import EvalOptions, SuiteResult
from surgery.eval.suites import perplexity as ppl
from surgery.planning.recipe import validate_recipe

INDEPENDENT = {"calibrate": "independent", "allocate": "uniform", "curvature": "none"}
STEPS: dict[str, dict[str, Any]] = {
    "plain": {"calibration": None},
    "whitened": {**INDEPENDENT, "sweeps": 0},
    "ALS": INDEPENDENT,
    "everything": {},
}
STRUCTURES: dict[str, dict[str, Any]] = {
    "low_rank": {},
    "btt": {"blocks": [4, 4]},
    "monarch": {},
    "kronecker": {},
    "pivoted_low_rank": {},
    "auto": {},
}
CLOSED_FORM = ("low_rank", "pivoted_low_rank")  # the whitened solution is the optimum, so there are no sweeps


def structure_steps(structure: str, steps: list[str]) -> list[str]:
    """Return the methods that apply to a structure."""
    chosen = ["everything"] if structure == "auto" else steps
    return [s for s in chosen if not (s == "ALS" and structure in CLOSED_FORM)]


def measure_checkpoint(folder: str, options: EvalOptions, device: torch.device) -> SuiteResult:
    """Measure a checkpoint's perplexity."""
    return ppl.measure(*load(folder, device, "float32", False), options)


def convert_and_measure(
    source: str, recipe: dict[str, Any], options: EvalOptions, base: SuiteResult, device: Any
) -> dict[str, Any]:
    """Convert, measure, and delete the conversion."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        report = convert(source, validate_recipe(recipe, "table"), out, device=str(device))
        seconds = time.perf_counter() - began
        found = measure_checkpoint(str(out), options, device)
    return {
        **ppl.summarize(found, base),
        "kept": report["totals"]["kept"],
        "macs": report["totals"]["macs_after"] / report["totals"]["macs_before"],
        "allocation": report["allocation"]["kept"],
        "seconds": seconds,
    }


def main() -> None:
    """Run the command: print a line per structure, method and share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--keep", type=float, action="append")
    parser.add_argument("--structure", choices=STRUCTURES, action="append")
    parser.add_argument("--step", choices=STEPS, action="append")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    options = EvalOptions(text=arguments.text, tokens=arguments.tokens, length=arguments.length)
    base = measure_checkpoint(arguments.source, options, device)
    rows = [{"structure": "original", **ppl.summarize(base)}]
    print(format_line(rows[0]), flush=True)
    text = {"calibration": arguments.calibration, "tokens": arguments.tokens, "length": arguments.length}
    for keep in arguments.keep or [0.75, 0.5]:
        for structure in arguments.structure or list(STRUCTURES):
            for step in structure_steps(structure, arguments.step or list(STEPS)):
                choices = {**text, "structure": structure, "keep": keep, **STRUCTURES[structure], **STEPS[step]}
                found = {"structure": structure, "step": step, "keep": keep}
                try:
                    found |= convert_and_measure(arguments.source, choices, options, base, device)
                except SurgeryError as error:
                    found["refused"] = str(error)
                rows.append(found)
                print(format_line(found), flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(rows, indent=1))


def format_line(found: dict[str, Any]) -> str:
    """Format a result as a line."""
    place = " ".join(str(found.get(k, "")) for k in ("structure", "step", "keep"))
    if "refused" in found:
        return f"{place}: {found['refused']}"
    line = f"{place}: {found['perplexity']:.4g} +- {found['se']:.2g}"
    if "ratio" not in found:
        return line
    return (
        f"{line}, x {ppl.format_interval(found['ratio'])}, kept {found['kept']:.3f}, "
        f"MACs {found['macs']:.3f}, {found['allocation']}, {found['seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
