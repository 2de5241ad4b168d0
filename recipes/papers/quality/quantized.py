"""Rows of the tables "at equal bytes" in docs/measurements/quality.md: one model, dense or structured, with its linears
in 16, 8 or 4 bits.

python -m recipes.papers.quality.quantized SRC --calibration FILE --text FILE --json ROWS.jsonl [--structure low_rank] [--needles 40]
python -m recipes.papers.quality.quantized_times 1b --json ROWS.jsonl                decoding times, of random weights
python -m recipes.papers.quality.equal_bytes ROWS.jsonl --write docs/measurements/quality.md

Bytes are those of all linears of the layers with their scales; embeddings, head and norms are the same in every row and
not counted. Weights are those of the checkpoint in its dtype; products are computed in float32. With 3 and 2 bits the
dense weights are rounded in the same way, and their bytes counted, but nothing stores them so. A row is written when it
is measured, and rows that the file has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes.papers.script import run_script
from surgery.conversion.convert import convert
from surgery.core.device import choose_device
from surgery.core.errors import SurgeryError
from surgery.eval.run import load
from surgery.eval.suite import EvalOptions, Sample, SuiteResult
from surgery.eval.suites import needle
from surgery.eval.suites import perplexity as ppl
from surgery.modeling.quantize import dense_linears, make_storage, quantize_module, stored_bytes
from surgery.planning.recipe import validate_recipe


class Row(NamedTuple):
    """A row of the table. keep: share of the parameters, 1 for the dense model; bits: 16 (not quantized), 8, 4, or 3
    and 2 (dense, rounded only).
    """

    keep: float
    bits: int


ROWS = (
    *(Row(1.0, bits) for bits in (16, 8, 4, 3, 2)),
    *(Row(0.75, bits) for bits in (16, 8, 4)),
    *(Row(0.5, bits) for bits in (16, 8, 4)),
)
DEPTHS = (0.0, 0.5, 1.0)
# Of a row: what was measured, and on what.
KEYS = ("model", "linears", "keep", "bits", "group", "calibrated", "scored", "length", "needles", "lengths")
FACTORS = tuple(1 - 0.05 * step for step in range(11))  # scales that 3 and 2 bits try, beside the one of 4 bits


def row_name(structure: str, row: Row) -> str:
    """Return the name of a row that --only selects by."""
    return f"{'dense' if row.keep == 1 else f'{structure} {row.keep:.0%}'}, {row.bits} bits"


def linears_of(model: Any, paths: list[str]) -> dict[str, Any]:
    """Return the linears of the layers by path, replaced or not."""
    return {path: model.get_submodule(path) for path in paths}


def round_values(weight_OI: Tensor, bits: int, group: int) -> Tensor:
    """Return the weight with each value rounded to one of 2^bits multiples of its group's scale.

    The scale is the one of FACTORS, and of the symmetric one, with the least squared error, stored in the dtype of the
    weight.
    """
    most = 2 ** (bits - 1)
    blocks = weight_OI.float().unflatten(-1, (-1, group))
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    best, least = blocks, torch.full_like(extreme, torch.inf)
    for factor in (most / (most - 1), *FACTORS):
        scale = (extreme * (-factor / most)).to(weight_OI.dtype).float()
        scale = torch.where(scale == 0, 1.0, scale)
        rounded = (blocks / scale).round().clamp(-most, most - 1) * scale
        error = (blocks - rounded).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, rounded, best), error.minimum(least)
    return best.flatten(-2).to(weight_OI.dtype)


@torch.no_grad()
def store(model: Any, paths: list[str], bits: int, group: int) -> int:
    """Store the linears of a model in `bits`, in place, and return their bytes."""
    if bits < 4:
        size = 0
        for linear in linears_of(model, paths).values():
            linear.weight.copy_(round_values(linear.weight, bits, group))
            numbers, scales = linear.weight.numel(), linear.weight.numel() // group
            size += numbers * bits // 8 + scales * linear.weight.element_size()
        return size
    if bits < 16:
        storage = make_storage(bits, group if bits == 4 else None)
        for path, linear in linears_of(model, paths).items():
            model.set_submodule(path, quantize_module(linear, storage))
    return sum(stored_bytes(linear) for linear in linears_of(model, paths).values())


def measure_row(
    folder: str, paths: list[str], row: Row, group: int, *, options: EvalOptions, device: torch.device
) -> dict[str, Any]:
    """Return {"bytes", "tokens", "losses": nats per token of each window, "answers": a 0 or 1 for each needle}."""
    model, tokenizer = load(folder, torch.device("cpu"), "auto", False)
    found: dict[str, Any] = {"bytes": store(model, paths, row.bits, group)}
    model = model.float().to(device)
    read = ppl.measure(model, tokenizer, options.model_copy(update={"limit": None}))
    found |= {"tokens": read.info["tokens"], "losses": [round(one.metrics["nll"], 5) for one in read.samples]}
    if options.limit is not None:
        asked = needle.run(ppl.as_eval_model(model, tokenizer), options)
        found["answers"] = "".join(f"{one.metrics['accuracy']:.0f}" for one in asked.samples)
    return found


def stored_result(row: dict[str, Any]) -> SuiteResult:
    """Return the losses of a row as the suite's result. All windows have the same length."""
    weight = row["tokens"] / len(row["losses"])
    samples = [Sample("ppl", str(index), {"nll": nll}, weight=weight) for index, nll in enumerate(row["losses"])]
    return SuiteResult(samples, {"nll": ppl.NLL}, info={"tokens": row["tokens"]})


def read_rows(path: Path | None) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; none if there is no file.

    Raises SurgeryError if it holds something else.
    """
    if path is None or not path.is_file():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError:
        raise SurgeryError(
            f"{path} is not a file of JSON lines, which this command writes. Give another file, or remove it"
        ) from None
    if not all(isinstance(row, dict) and isinstance(row.get("kind"), str) for row in rows):
        raise SurgeryError(f"{path} has lines that are not rows of this command. Give another file, or remove it")
    return rows


def append_row(path: Path | None, row: dict[str, Any]) -> None:
    """Append a row to a file of JSON lines."""
    if path is not None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Measure the rows that the file lacks, and print each as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", help="Checkpoint to convert.")
    add("--calibration", required=True, help="Calibration text.")
    add("--text", required=True, help="Text to score, which also surrounds the needles.")
    add("--structure", default="low_rank", help="Structure of the converted models. Default: %(default)s.")
    add("--blocks", type=int, nargs=2, help="Block grid of the structure, for example 4 4.")
    add("--group", type=int, default=32, help="Inputs that share a scale, below 8 bits. Default: %(default)s.")
    add("--tokens", type=int, default=16384, help="Tokens to calibrate on. Default: %(default)s.")
    add("--score", type=int, help="Tokens of --text to score. Default: as --tokens.")
    add("--length", type=int, default=1024, help="Length of the windows in tokens. Default: %(default)s.")
    add("--needles", type=int, help="Questions of needle-rank at each length and depth (0, 0.5, 1). Default: none.")
    add(
        "--lengths",
        type=int,
        nargs="+",
        default=[512, 1024, 2040],
        help="Lengths of the questions in tokens. Default: 512 1024 2040.",
    )
    add(
        "--only",
        action="append",
        help="Measure only rows whose name contains this, for example `dense` or `50%%, 4 bits`. Repeatable. Default: "
        "all.",
    )
    add("--device", help="Compute on this device. Default: a GPU if there is one.")
    add(
        "--conversions", type=Path, help="Keep the conversions here, and use those that are here. Default: delete them."
    )
    add("--json", type=Path, help="Append the rows to this file, and do not measure rows that it has.")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    options = EvalOptions(text=arguments.text, tokens=arguments.score or arguments.tokens, length=arguments.length)
    if arguments.needles:
        asked = {"limit": arguments.needles, "lengths": arguments.lengths, "depths": DEPTHS, "tasks": ("needle-rank",)}
        options = EvalOptions(**{**options.model_dump(exclude_unset=True), **asked})
    chosen = [
        row
        for row in ROWS
        if arguments.only is None or any(word in row_name(arguments.structure, row) for word in arguments.only)
    ]
    if not chosen:
        parser.error(
            f"no row has a name with {' or '.join(arguments.only)}: {row_name(arguments.structure, ROWS[0])}, .."
        )
    paths = list(dense_linears(load(arguments.source, torch.device("cpu"), "auto", False)[0], {}))
    known = {tuple(map(str, (row.get(key) for key in KEYS))): row for row in read_rows(arguments.json)}
    base = None
    print("| linears | bits | bytes | perplexity | ratio to the original | needles |\n" + "| --- " * 6 + "|")
    with tempfile.TemporaryDirectory() as scratch:
        for row in chosen:
            found = describe_row(arguments, row, options)
            key = tuple(map(str, (found[key] for key in KEYS)))
            if key not in known:
                try:
                    folder = converted(arguments, row, arguments.conversions or Path(scratch), device)
                    found |= measure_row(folder, paths, row, arguments.group, options=options, device=device)
                except SurgeryError as error:
                    print(f"{row_name(arguments.structure, row)}: {error}", flush=True)
                    continue
                append_row(arguments.json, found)
                known[key] = found
            base = known[key] if row == ROWS[0] else base
            print(format_line(known[key], base), flush=True)


def describe_row(arguments: argparse.Namespace, row: Row, options: EvalOptions) -> dict[str, Any]:
    """Return what a row is of: KEYS with their values."""
    return {
        "kind": "quality",
        "model": Path(arguments.source).name,
        "linears": "dense" if row.keep == 1 else arguments.structure,
        "keep": row.keep,
        "bits": row.bits,
        "group": arguments.group if row.bits < 8 else None,
        "calibrated": None if row.keep == 1 else arguments.tokens,
        "scored": options.tokens,
        "length": options.length,
        "needles": options.limit,
        "lengths": list(options.lengths),
    }


def converted(arguments: argparse.Namespace, row: Row, folder: Path, device: torch.device) -> str:
    """Return the checkpoint of a row: the original, or its conversion, which is made unless it is there."""
    if row.keep == 1:
        return str(arguments.source)
    out = folder / f"{arguments.structure}-{row.keep:g}"
    if not out.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        recipe = {"structure": arguments.structure, "keep": row.keep, "round_ranks": arguments.group}
        recipe |= {"blocks": arguments.blocks} if arguments.blocks else {}
        text = {"calibration": arguments.calibration, "tokens": arguments.tokens, "length": arguments.length}
        convert(arguments.source, validate_recipe({**recipe, **text}, "table"), out, device=str(device))
    return str(out)


def format_line(row: dict[str, Any], base: dict[str, Any] | None) -> str:
    """Format a row of the table; the ratio needs the row of the original."""
    score = ppl.summarize(stored_result(row), None if base is None else stored_result(base))
    name = "dense" if row["keep"] == 1 else f"{row['linears']}, {row['keep']:.0%}"
    cells = [name, str(row["bits"]), f"{row['bytes']:,}", f"{score['perplexity']:.4g} ± {score['se']:.2g}"]
    cells.append(ppl.format_interval(score["ratio"]) if "ratio" in score else "")
    answers = row.get("answers")
    cells.append(f"{answers.count('1')} of {len(answers)}" if answers else "")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    run_script(main)
