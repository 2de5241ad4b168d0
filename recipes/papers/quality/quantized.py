"""Table of docs/quality.md: perplexity and bytes of one model, dense or structured, with its linears in 16, 8 or 4 bits.

python -m surgery.recipes.papers.quality.quantized SRC --calibration FILE --text FILE [--structure low_rank] [--group 32] [--json OUT]

Bytes are those of all linears of the layers with their scales; embeddings, head and norms are the same in every row and not counted. On a GPU
the milliseconds of a decoding step (one sequence) stand beside them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from surgery.conversion.convert import convert
from surgery.conversion.quantize import dense_linears, make_storage, quantize_module, stored_bytes
from surgery.core.device import choose_device
from surgery.core.errors import SurgeryError
from surgery.eval.run import load
from surgery.eval.suite import EvalOptions
from surgery.eval.suites import perplexity as ppl
from surgery.planning.recipe import validate_recipe


class Row(NamedTuple):
    """A row of the table. keep: share of the parameters, 1 for the dense model; bits: 16 (not quantized), 8 or 4."""

    keep: float
    bits: int


ROWS = (Row(1.0, 16), Row(1.0, 8), Row(1.0, 4), Row(0.75, 16), Row(0.5, 16), Row(0.5, 8), Row(0.75, 4), Row(0.5, 4))


def linears_of(model: Any, paths: list[str]) -> dict[str, Any]:
    """Return the linears of the layers by path, replaced or not."""
    return {path: model.get_submodule(path) for path in paths}


@torch.no_grad()
def measure_row(
    folder: str, paths: list[str], row: Row, group: int, *, options: EvalOptions, device: torch.device
) -> Any:
    """Return (losses of the text, bytes of the linears, milliseconds of a decoding step or None) of a checkpoint in the row's bits.

    Weights are those of the checkpoint in its dtype; products are computed in float32.
    """
    model, *rest = load(folder, torch.device("cpu"), "auto", False)
    if row.bits < 16:
        storage = make_storage(row.bits, group if row.bits == 4 else None)
        for path, linear in linears_of(model, paths).items():
            model.set_submodule(path, quantize_module(linear, storage))
    size = sum(stored_bytes(linear) for linear in linears_of(model, paths).values())
    milliseconds = decoding_step(model.to(device)) if device.type == "cuda" else None
    return ppl.measure(model.float().to(device), *rest, options), size, milliseconds


def decoding_step(model: Any, steps: int = 20) -> float:
    """Return the median milliseconds of a decoding step of one sequence, launches included."""
    out, times = model(torch.ones(1, 64, dtype=torch.int64, device=model.device), use_cache=True), []
    token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    for _ in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)[steps // 2]


def main() -> None:
    """Print the table row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", help="Checkpoint to convert.")
    add("--calibration", required=True, help="Calibration text.")
    add("--text", required=True, help="Text to score.")
    add("--structure", default="low_rank", help="Structure of the converted models. Default: %(default)s.")
    add("--blocks", type=int, nargs=2, help="Block grid of the structure, for example 4 4.")
    add("--group", type=int, default=32, help="Inputs that share a scale, with 4 bits. Default: %(default)s.")
    add("--tokens", type=int, default=16384, help="Tokens to calibrate on. Default: %(default)s.")
    add("--score", type=int, help="Tokens of --text to score. Default: as --tokens.")
    add("--length", type=int, default=1024, help="Length of the windows in tokens. Default: %(default)s.")
    add("--device", help="Compute on this device. Default: a GPU if there is one.")
    add("--json", type=Path, help="Write the rows to this file.")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    options = EvalOptions(text=arguments.text, tokens=arguments.score or arguments.tokens, length=arguments.length)
    paths = list(dense_linears(load(arguments.source, torch.device("cpu"), "auto", False)[0], {}))
    found: list[dict[str, Any]] = []
    print(f"| linears | bits | bytes | perplexity |{' ms a step |' if device.type == 'cuda' else ''}")
    print("| --- " * (5 if device.type == "cuda" else 4) + "|")
    base = None
    with tempfile.TemporaryDirectory() as scratch:
        for keep in dict.fromkeys(row.keep for row in ROWS):
            folder = arguments.source if keep == 1 else str(Path(scratch) / f"{keep}")
            if keep < 1:
                recipe = {"structure": arguments.structure, "keep": keep, "round_ranks": arguments.group}
                recipe |= {"blocks": arguments.blocks} if arguments.blocks else {}
                text = {"calibration": arguments.calibration, "tokens": arguments.tokens, "length": arguments.length}
                convert(
                    arguments.source, validate_recipe({**recipe, **text}, "table"), Path(folder), device=str(device)
                )
            for row in (row for row in ROWS if row.keep == keep):
                line = {"linears": "dense" if keep == 1 else f"{arguments.structure}, {keep:.0%}", "bits": row.bits}
                try:
                    losses, size, ms = measure_row(folder, paths, row, arguments.group, options=options, device=device)
                except SurgeryError as error:
                    found.append({**line, "refused": str(error)})
                    print(f"{line['linears']}, {row.bits} bits: {error}", flush=True)
                    continue
                base = base or losses
                found.append({**line, "bytes": size, **ppl.summarize(losses, base), "ms": ms})
                print(format_line(found[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


def format_line(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    cells = [row["linears"], str(row["bits"]), f"{row['bytes']:,}", f"{row['perplexity']:.4g} ± {row['se']:.2g}"]
    return f"| {' | '.join([*cells, *([] if row['ms'] is None else [format(row['ms'], '.3g')])])} |"


if __name__ == "__main__":
    main()
