"""Errors of linears that a structure replaces at equal stored parameters, the table of docs/measurements/quality.md.

    python -m recipes.papers.quality.projection SRC [--calibration TEXT] [--keep 0.5] [--structures low_rank btt monarch mlr]

Every linear of the layers keeps the same share of its parameters (allocate: uniform). Without a text the error is that
of the weights (Frobenius); with one, that of the outputs on held-out rows. Prints the mean over the linears of the
relative errors after the projection and after the sweeps, and the seconds of all fits.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from recipes.papers.script import run_script
from surgery.conversion.convert import convert
from surgery.planning.recipe import validate_recipe

OPTIONS: dict[str, dict[str, Any]] = {
    "btt": {"blocks": [4, 4]},
    "mlbtc": {"levels": [1, [4, 4]]},
    "mlbtc_monarch": {"structure": "mlbtc", "levels": [1, 2, 4, "monarch"]},
}


def measure_structure(source: str, structure: str, keep: float, calibration: str | None) -> tuple[float, float, float]:
    """Return (mean error after the projection, mean error after the sweeps, seconds of the fits) over the linears of a
    checkpoint.
    """
    data = {
        "structure": structure,
        "keep": keep,
        "allocate": "uniform",
        "curvature": "none",
        "calibrate": "independent",
    }
    data |= {"calibration": calibration, "tokens": 8192, "length": 256, **OPTIONS.get(structure, {})}
    with tempfile.TemporaryDirectory() as folder:
        report = convert(source, validate_recipe(data, structure), Path(folder) / "out")
    records = report["modules"]
    start, error = (sum(record[key] for record in records) / len(records) for key in ("start", "error"))
    return start, error, sum(record["seconds"] for record in records)


def main() -> None:
    """Print a table for the structures of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--calibration")
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--structures", nargs="+", default=["low_rank", "btt", "monarch", "mlr"])
    options = parser.parse_args()
    print("| structure | projected | after sweeps | seconds |\n| --- | --- | --- | --- |")
    for structure in options.structures:
        start, error, seconds = measure_structure(options.source, structure, options.keep, options.calibration)
        print(f"| `{structure}` | {start:.4f} | {error:.4f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    run_script(main)
