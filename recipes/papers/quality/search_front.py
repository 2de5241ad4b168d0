"""Points of the front of `surgery search`, healed on the same tokens: predicted loss and its interval beside the measured.

python -m recipes.papers.quality.search_front run SRC --max-bytes 60% --max-bytes 75% --calibration FILE
    --text code=FILE --text prose=FILE --data TRAINING --tokens 5M --work FOLDER [--single pruned-half] [--out ROWS.jsonl]
python -m recipes.papers.quality.search_front show [ROWS.jsonl ..]

1. search    each --max-bytes, in WORK/SEARCH; its recipes are kept in WORK/points. A search that is there is not
             measured again, so that it may be made elsewhere, for example on a CPU
2. points    --points of them, evenly spread over the bytes, from the smallest to the largest
3. singles   each --single recipe with the `keep` that has the bytes of a point, for --single-points of the points
4. run       all of them by public_model.py, whose arguments and rows these are: conversion, healing, scores, control

Predicted is the KL divergence from the original after healing, in nats per token of text like the calibration text;
measured is that of each text (`kl` of the suite agreement). An interrupted command continues, also after --minutes.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recipes.papers.quality.equal_bytes import latest, table
from recipes.papers.quality.public_model import (
    KEYS,
    PublicModel,
    Row,
    add_arguments,
    choice_table,
    perplexity_cell,
    share_cell,
    value_cell,
)
from recipes.papers.quality.quantized import append_row, read_rows
from recipes.papers.script import run_script
from surgery.budget.recipes import recipe_text
from surgery.budget.search import SearchSettings, search
from surgery.checkpoint.meta_model import MetaModel
from surgery.conversion.sources import FolderSource
from surgery.core.errors import SurgeryError
from surgery.core.files import read_json, size_text, write_json
from surgery.core.progress import RichProgress
from surgery.planning.plan import make_plan
from surgery.planning.recipe import load_recipe

ROWS = Path(__file__).parent / "rows" / "search_front.jsonl"  # results that belong to the repository
STEPS = 12  # halvings of the interval of `keep`


# -- which models are measured --------------------------------------------------------------------------
def find_points(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the points of the fronts of all limits by rising bytes, each with the path of its recipe in WORK/points."""
    found: dict[int, dict[str, Any]] = {}
    for limit in a.max_bytes:
        folder, name = a.work / "points", limit.replace("%", "-percent")
        record = folder / f"{name}.json"
        if not record.exists():
            settings = SearchSettings(
                str(a.calibration), a.search_tokens, a.search_length, a.seed, points=a.front, only=a.only, device=a.device
            )  # fmt: skip
            result = search(a.source, a.work / "SEARCH", {"bytes": limit}, settings, RichProgress())
            folder.mkdir(parents=True, exist_ok=True)
            points = [point for point in result["points"] if point["recipe"]]
            for point in points:
                shutil.copy(a.work / "SEARCH" / point["recipe"], folder / f"{name}-{point['recipe']}")
            write_json(record, points)
        for point in read_json(record):
            found.setdefault(point["costs"]["bytes"], {**point, "path": str(folder / f"{name}-{point['recipe']}")})
    return [found[size] for size in sorted(found)]


def spread(points: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return `number` of the points, those nearest to evenly spread bytes."""
    left, chosen = list(points), []
    first, last = points[0]["costs"]["bytes"], points[-1]["costs"]["bytes"]
    for index in range(min(number, len(points))):
        wanted = first + (last - first) * index / max(1, number - 1)
        nearest = min(left, key=lambda point: abs(point["costs"]["bytes"] - wanted))
        left.remove(nearest)
        chosen.append(nearest)
    return sorted(chosen, key=lambda point: int(point["costs"]["bytes"]))


def single_recipe(model: MetaModel, name: str, target: int, folder: Path) -> str:
    """Return the path of a recipe whose `keep` gives the model at most `target` parameters by its plan, and nearly as
    many. Ranks and widths that the conversion allocates by measurements may differ by a percent.

    Raises SurgeryError if the smallest `keep` tried has more.
    """
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        if parameters_of(model, name, middle) <= target:
            low = middle
        else:
            high = middle
    if not low:
        raise SurgeryError(f"{name} has more than {target:,} parameters at keep {high:.3g}. Leave it out of --single")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{Path(name).stem}-{low:.4f}.yaml"
    recipe = load_recipe(name, [f"keep={low}"])
    path.write_text(recipe_text(recipe.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
    return str(path)


def parameters_of(model: MetaModel, name: str, keep: float) -> float:
    """Return the parameters of a model after a recipe with this `keep`; infinite where no rank has so few."""
    try:
        return make_plan(model, load_recipe(name, [f"keep={keep}"])).totals()["model_after"]
    except SurgeryError:
        return float("inf")


def run(a: argparse.Namespace) -> None:
    """Search, choose points, and measure them and the single recipes."""
    points = find_points(a)
    if not points:
        raise SurgeryError(
            f"no point within --max-bytes {', '.join(a.max_bytes)} changes the model. Give smaller limits"
        )
    chosen = spread(points, a.points)
    model = FolderSource(a.source).open(RichProgress())
    beside = spread(chosen, a.single_points) if a.single_points else []
    singles = [
        single_recipe(model, name, point["costs"]["parameters"], a.work / "singles")
        for point in beside
        for name in a.single
    ]
    known = {row["conversion"] for row in read_rows(a.out) if row["kind"] == "predicted"}
    for point in chosen:
        if point["path"] not in known:
            row = {"kind": "predicted", "model": Path(a.source).stem, "conversion": point["path"], "point": point}
            append_row(a.out, row)
    a.conversion = [*(point["path"] for point in chosen), *dict.fromkeys(singles)]
    PublicModel(a).run()


# -- the tables ------------------------------------------------------------------------------------------
def is_inside(point: dict[str, Any], value: float) -> bool:
    """Return whether a measured loss lies in the predicted interval."""
    return bool(point["low"] <= value <= point["high"])


def front_lines(rows: Iterable[Row]) -> list[str]:
    """Return the table of all healed models by rising bytes, with predictions, and a sentence for each text."""
    rows = list(rows)
    points = {row["conversion"]: row["point"] for row in rows if row["kind"] == "predicted"}
    healed = [row for row in latest([r for r in rows if r["kind"] == "public"], KEYS) if row["state"] == "healed"]
    if not healed:
        raise SurgeryError("there are no rows of healed models; write them with `run`")
    texts = list(healed[0]["texts"])
    head = ["model", "bytes", "predicted KL", "interval", *(f"KL, {name}" for name in texts)]
    head += [*(f"perplexity, {name}" for name in texts), "needles, %"]
    body, inside = [], dict.fromkeys(texts, 0)
    for row in sorted(healed, key=lambda row: int(row["bytes"])):
        point = points.get(row["conversion"])
        if point is not None:
            for name in texts:
                inside[name] += is_inside(point, row["texts"][name]["kl"]["value"])
        needles = row.get("needles", {})
        body.append(
            [
                Path(row["conversion"]).stem,
                size_text(row["bytes"]),
                f"{point['loss']:.3g}" if point else "",
                f"{point['low']:.2g} to {point['high']:.2g}" if point else "",
                *(value_cell(row["texts"][name], "kl", ".3g") for name in texts),
                *(perplexity_cell(row["texts"][name]) for name in texts),
                share_cell(needles[max(needles, key=int)]) if needles else "",
            ]
        )  # fmt: skip
    measured = [row for row in healed if row["conversion"] in points]
    sentences = [f"{name}: {count} of {len(measured)} points inside the interval" for name, count in inside.items()]
    return [table([head, *body]), *sentences]


def show(rows: list[Row]) -> str:
    """Return the table of the front, and that of multiple choice, in Markdown. Raises SurgeryError without rows."""
    public = latest([row for row in rows if row["kind"] == "public"], KEYS)
    choice = choice_table([row for row in public if "mc" in row])
    return "\n\n".join([*front_lines(rows), *choice])


def main(given: list[str] | None = None) -> None:
    """Run the command `run` or `show`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="Search, then measure the rows that the file lacks.")
    add_arguments(running)
    add = running.add_argument
    add("--max-bytes", action="append", required=True, help="Limit of a search, e.g. 60%%. Repeatable.")
    add("--front", type=int, default=6, help="Points of the front of each limit. Default: %(default)s.")
    add("--points", type=int, default=6, help="Points to measure. Default: %(default)s.")
    add("--only", help="Kinds of choices of the search, as of surgery search.")
    add("--search-tokens", type=int, help="Calibration tokens of the search. Default: the recipe's.")
    add("--search-length", type=int, help="Length of its samples. Default: the recipe's.")
    add("--single", action="append", default=[], help="Recipe with `keep` to measure at equal bytes. Repeatable.")
    add("--single-points", type=int, default=1, help="At how many of the points. Default: %(default)s.")
    running.set_defaults(do=run, out=ROWS)
    showing = commands.add_parser("show", help="Print the tables in Markdown.")
    showing.add_argument("rows", type=Path, nargs="*", help="Files of `run`. Default: the one of the repository.")
    showing.set_defaults(do=lambda a: print(show([row for path in a.rows or [ROWS] for row in read_rows(path)])))
    arguments = parser.parse_args(given)
    arguments.do(arguments)


if __name__ == "__main__":
    run_script(main)
