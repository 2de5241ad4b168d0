"""Table of docs/quality.md: perplexity after converting every linear of the layers, by structure and method, without
training.

python -m recipes.papers.quality.linears SRC --calibration FILE --text FILE [--keep 0.75 --keep 0.5] [--tune 20 20 [--norms]] [--allocate uniform] [--share input] [--json OUT]

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
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from recipes.papers.script import run_script
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
    "everything": {"allocate": "measured"},
}
STRUCTURES: dict[str, dict[str, Any]] = {
    "low_rank": {},
    "btt": {"blocks": [4, 4]},
    "monarch": {},
    "kronecker": {},
    "pivoted_low_rank": {},
    "auto": {},
}
CLOSED_FORM = ("low_rank", "pivoted_low_rank")  # the whitened solution is optimal without sweeps


def structure_steps(structure: str, steps: list[str]) -> list[str]:
    """Return the methods that apply to a structure."""
    chosen = ["everything"] if structure == "auto" else steps
    return [s for s in chosen if not (s == "ALS" and structure in CLOSED_FORM)]


def measure_checkpoint(folder: str, options: EvalOptions, device: torch.device) -> SuiteResult:
    """Measure a checkpoint's perplexity."""
    return ppl.measure(*load(folder, device, "float32", False), options)


def convert_and_measure(
    source: str,
    recipe: dict[str, Any],
    options: list[EvalOptions],
    bases: list[SuiteResult],
    device: Any,
    kept: Path | None = None,
) -> dict[str, Any]:
    """Convert and measure on every text.

    The first text gives the row, the others are under "texts". kept: folder of the conversion; None: it is deleted.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = kept or Path(folder) / "out"
        report = convert(source, validate_recipe(recipe, "table"), out, device=str(device))
        seconds = time.perf_counter() - began
        scores = [ppl.summarize(measure_checkpoint(str(out), one, device), base) for one, base in zip(options, bases)]
    return {
        **scores[0],
        "texts": {one.text: score for one, score in zip(options[1:], scores[1:])},
        "kept": report["totals"]["kept"],
        "macs": report["totals"]["macs_after"] / report["totals"]["macs_before"],
        "allocation": report["allocation"]["kept"],
        "errors": role_errors(report),
        "seconds": seconds,
    }


def role_errors(report: dict[str, Any]) -> dict[str, float]:
    """Return the mean relative output error of each role's matrices."""
    errors: dict[str, list[float]] = defaultdict(list)
    for row in report["modules"]:
        if row["error"] is not None:
            errors[" ".join(row["roles"])].append(row["error"])
    return {role: sum(found) / len(found) for role, found in errors.items()}


def main() -> None:
    """Print the table row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", help="Checkpoint to convert.")
    add("--calibration", required=True, help="Calibration text.")
    add("--text", required=True, action="append", help="Text to score. Repeatable; the table is of the first.")
    add(
        "--keep",
        type=float,
        action="append",
        help="Share of the parameters to keep. Repeatable. Default: 0.75 and 0.5.",
    )
    add("--structure", choices=STRUCTURES, action="append", help="Structure to measure. Repeatable. Default: all.")
    add("--step", choices=STEPS, action="append", help="Method to measure. Repeatable. Default: all.")
    add("--tokens", type=int, default=16384, help="Tokens of each text. Default: %(default)s.")
    add("--length", type=int, default=1024, help="Length of the windows in tokens. Default: %(default)s.")
    add(
        "--score",
        type=int,
        action="append",
        help="Tokens of the --text at the same place to score; one number is for all. Repeatable. Default: as --tokens.",
    )
    add(
        "--tune",
        type=int,
        nargs=2,
        metavar=("LAYERS", "MODEL"),
        help="Epochs of tuning of each layer and of the whole model. Default: no tuning.",
    )
    add(
        "--generate",
        type=int,
        default=0,
        metavar="TOKENS",
        help="Tokens that the original samples and that are fitted to as well. Default: none.",
    )
    add("--norms", action="store_true", help="Tune norms and biases too. Default: the new parameters alone.")
    add(
        "--share",
        choices=("none", "input"),
        action="append",
        help="Linears of one input as one matrix, for the method `everything`. Repeatable. Default: none.",
    )
    add("--allocate", help="Allocation of the budget, for the method `everything`. Default: that of recipes.")
    add("--device", help="Compute on this device. Default: a GPU if there is one.")
    add(
        "--conversions",
        type=Path,
        help="Keep the conversions in this folder, to score them with `surgery eval`. Default: delete them.",
    )
    add("--json", type=Path, help="Write the rows to this file.")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    scored = arguments.score or [arguments.tokens]
    if len(scored) not in (1, len(arguments.text)):
        parser.error(
            f"--score is given {len(scored)} times and --text {len(arguments.text)} times. Give one number, or one for "
            "each text."
        )
    scored = scored * len(arguments.text) if len(scored) == 1 else scored
    options = [EvalOptions(text=text, tokens=n, length=arguments.length) for text, n in zip(arguments.text, scored)]
    bases = [measure_checkpoint(arguments.source, one, device) for one in options]
    texts = {one.text: ppl.summarize(base) for one, base in zip(options[1:], bases[1:])}
    rows = [{"structure": "original", **ppl.summarize(bases[0]), "texts": texts}]
    print(format_line(rows[0]), flush=True)
    text = {"calibration": arguments.calibration, "tokens": arguments.tokens, "length": arguments.length}
    if arguments.generate:
        text["generated_tokens"] = arguments.generate
    tune = {}
    if arguments.tune is not None:
        tune = {"tune": {**dict(zip(("layers", "model"), arguments.tune)), "norms": arguments.norms}}
    elif arguments.norms:
        parser.error("--norms needs --tune LAYERS MODEL")
    allocate = {} if arguments.allocate is None else {"allocate": arguments.allocate}
    shares = {"everything": arguments.share or ["none"]}
    wanted = [
        (keep, structure, step, share)
        for keep in arguments.keep or [0.75, 0.5]
        for structure in arguments.structure or list(STRUCTURES)
        for step in structure_steps(structure, arguments.step or list(STEPS))
        for share in shares.get(step, ["none"])
    ]
    for keep, structure, step, share in wanted:
        recipe = {
            **text,
            **tune,
            "structure": structure,
            "keep": keep,
            "share": share,
            **STRUCTURES[structure],
            **STEPS[step],
            **(allocate if step == "everything" else {}),
        }
        found = {"structure": structure, "step": step, "keep": keep, "share": share}
        name = f"{structure}-{step}-{keep}" + ("-joined" if share == "input" else "")
        kept = arguments.conversions and arguments.conversions / name
        try:
            found |= convert_and_measure(arguments.source, recipe, options, bases, device, kept)
        except SurgeryError as error:
            found["refused"] = str(error)
        rows.append(found)
        print(format_line(found), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1))


def format_score(score: dict[str, Any]) -> str:
    """Format the perplexity on a further text."""
    ratio = f", x {ppl.format_interval(score['ratio'])}" if "ratio" in score else ""
    return f"{score['perplexity']:.4g} +- {score['se']:.2g}{ratio}"


def format_line(found: dict[str, Any]) -> str:
    """Format a result as a line."""
    place = " ".join(str(found.get(k, "")) for k in ("structure", "step", "keep"))
    place += " joined" if found.get("share") == "input" else ""
    if "refused" in found:
        return f"{place}: {found['refused']}"
    others = "".join(f", {Path(name).name} {format_score(score)}" for name, score in found.get("texts", {}).items())
    score = f"{place}: {found['perplexity']:.4g} +- {found['se']:.2g}{others}"
    if "ratio" not in found:
        return score
    return (
        f"{score}, x {ppl.format_interval(found['ratio'])}, kept {found['kept']:.3f}, "
        f"MACs {found['macs']:.3f}, {found['allocation']}, {found['seconds']:.0f} s"
    )


if __name__ == "__main__":
    run_script(main)
