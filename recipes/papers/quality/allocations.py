"""Table of docs/measurements/quality.md: perplexity after converting every linear of the layers, by the allocation of
the parameter budget.

python -m recipes.papers.quality.allocations SRC --calibration FILE --text FILE --structure btt --keep 0.5 uniform spread tilt=0.5 lems=0,5

Each allocation follows the expected rise of the loss at each number of parameters (surgery.conversion.fisher), except
`uniform`:

    uniform          the same share of every matrix
    spread           by the gain of each further rank, as `allocate: measured` tries it
    tilt=T           the rises in layer l of L times exp(T (1 - 2 l / (L - 1))), so that a positive T gives more to early layers; the head counts
                     as the last one
    lems=ALPHA,GAMMA the rises in layer l times the cross-layer factor of LEMS (Thoma et al. 2026,
                     github.com/lems-svd/lems): 1 + GAMMA (S_l - S_(L-1)) / (S_0 - S_(L-1)), S_l = sum of (k + 1)^-ALPHA
                     for k from l to L - 1
    power=P          the rises to the power P
    mean             the mean of `uniform` and `spread`
    probed=SWEEPS,N  `spread` by error curves that fits at N sizes correct (curve_probes.py)
"""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from recipes.papers.quality.curve_probes import probed_points
from recipes.papers.quality.linears import STRUCTURES, convert_and_measure, format_line, measure_checkpoint
from recipes.papers.script import run_script
from surgery.conversion import convert, fisher
from surgery.conversion.context import ConversionContext
from surgery.conversion.trial import budgets_by_gain, measure_rank_errors, uniform_budgets
from surgery.core.device import choose_device
from surgery.core.errors import SurgeryError
from surgery.eval.suite import EvalOptions
from surgery.eval.suites import perplexity as ppl
from surgery.planning.allocate import CostPoint

Budgets = dict[str, float]
Chosen = tuple[Budgets, dict[str, Any]]


def lems_factor(layer: int, layers: int, alpha: float, gamma: float) -> float:
    """Return the factor of the errors in a layer, from 1 + gamma in the first layer to 1 in the last."""
    rest = [sum((k + 1) ** -alpha for k in range(first, layers)) for first in (layer, 0, layers - 1)]
    return 1 + gamma * (rest[0] - rest[2]) / max(rest[1] - rest[2], 1e-12)


def choose(ctx: ConversionContext, name: str, values: tuple[float, ...]) -> Chosen:
    """Return the budgets of an allocation, and the report's "allocation" entry."""
    uniform, layers = uniform_budgets(ctx.plan), list(ctx.plan.layout.layers)
    points = fisher.cost_points
    if name == "probed":
        points = partial(probed_points, sweeps=int(values[0]), probes=int(values[1]))
    with patch.object(fisher, "cost_points", points):
        free, options = ctx.plan.replaced_targets(), measure_rank_errors(ctx)
    place = {target.name: target.linear.layer or "" for target in free}
    scaled = options
    index = {path: layers.index(layer) if layer in layers else len(layers) - 1 for path, layer in place.items()}
    if name == "tilt":
        tilt = {path: math.exp(values[0] * (1 - 2 * index[path] / max(1, len(layers) - 1))) for path in index}
        scaled = {path: [CostPoint(n, tilt[path] * error) for n, error in options[path]] for path in index}
    if name == "lems":
        scaled = {
            path: [CostPoint(n, error * lems_factor(index[path], len(layers), *values)) for n, error in options[path]]
            for path in index
        }
    if name == "power":
        scaled = {path: [CostPoint(n, max(error, 0.0) ** values[0]) for n, error in options[path]] for path in place}
    budgets = {**uniform, **({} if name == "uniform" else budgets_by_gain(scaled, free))}
    if name == "mean":
        budgets = {path: (uniform[path] + budgets[path]) / 2 for path in uniform}
    return budgets, {"kept": name, "why": "recipe"}


def parse_allocation(text: str) -> tuple[str, tuple[float, ...]]:
    """Return (name, values) of an allocation. Raises SurgeryError for an unknown one or a wrong number of values."""
    name, _, given = text.partition("=")
    counts = {"uniform": 0, "spread": 0, "mean": 0, "tilt": 1, "power": 1, "lems": 2, "probed": 2}
    try:
        values = tuple(float(value) for value in given.split(",")) if given else ()
    except ValueError:
        values = (math.nan,)
    if len(values) != counts.get(name, -1) or not all(map(math.isfinite, values)):
        raise SurgeryError(
            f"allocation {text!r} must be uniform, spread, mean, tilt=T, power=P, lems=ALPHA,GAMMA or probed=SWEEPS,N"
        )
    return name, values


def main() -> None:
    """Print the table row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", help="Checkpoint to convert.")
    add("allocations", nargs="+", help="Allocations to measure, as above.")
    add("--calibration", required=True, help="Calibration text.")
    add("--text", required=True, help="Text to score.")
    add("--keep", type=float, default=0.5, help="Share of the parameters to keep. Default: %(default)s.")
    add("--structure", choices=STRUCTURES, default="low_rank", help="Structure to measure. Default: %(default)s.")
    add("--tokens", type=int, default=16384, help="Tokens of the calibration text. Default: %(default)s.")
    add("--length", type=int, default=1024, help="Length of the windows in tokens. Default: %(default)s.")
    add("--score", type=int, default=16384, help="Tokens of --text to score. Default: %(default)s.")
    add("--set", action="append", default=[], metavar="KEY=JSON", help="Another key of the recipe. Repeatable.")
    add("--device", help="Compute on this device. Default: a GPU if there is one.")
    add("--json", type=Path, help="Write the rows to this file.")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    options = EvalOptions(text=arguments.text, tokens=arguments.score, length=arguments.length)
    base = measure_checkpoint(arguments.source, options, device)
    recipe = {
        "calibration": arguments.calibration,
        "tokens": arguments.tokens,
        "length": arguments.length,
        "structure": arguments.structure,
        "keep": arguments.keep,
        **STRUCTURES[arguments.structure],
        **{key: json.loads(value) for key, _, value in (given.partition("=") for given in arguments.set)},
    }
    rows = [{"structure": "original", **ppl.summarize(base)}]
    print(format_line(rows[0]), flush=True)
    for allocation in arguments.allocations:
        name, values = parse_allocation(allocation)
        with patch.object(convert, "choose_budgets", partial(choose, name=name, values=values)):
            found = convert_and_measure(arguments.source, recipe, [options], [base], device)
        rows.append({"structure": arguments.structure, "step": allocation, "keep": arguments.keep, **found})
        print(format_line(rows[-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    run_script(main)
