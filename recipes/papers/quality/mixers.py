"""Tables of attention in docs/quality.md: perplexity after replacing every attention by a mixer, before training, and
cache size.

python -m recipes.papers.quality.mixers SRC --calibration FILE --text FILE [--recipe ssd ..] [--set KEY=VALUE ..]

    copied       mixer initialized without data, with the model's own projections
    calibrated   mixer initialized on the calibration text, output projections fitted to it
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from recipes.papers.script import run_script
from surgery.conversion.convert import convert
from surgery.core.device import choose_device
from surgery.core.errors import SurgeryError
from surgery.eval.run import load
from surgery.eval.suite import EvalOptions, SuiteResult
from surgery.eval.suites.perplexity import format_interval, measure, summarize
from surgery.mixers import MixerInputs
from surgery.mixers.cache_size import cache_bytes
from surgery.modeling.cache import mixer_modules
from surgery.planning.recipe import load_recipe, shipped_recipes

CHUNK_TOKENS = 1024


@torch.no_grad()
def live_cache(model: Any, length: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return (bytes of all mixers' states after `length` tokens, bytes of softmax caches of the same layers)."""
    ours = softmax = 0
    for _, module in mixer_modules(model):
        shape, device = module.mixer.shape, next(model.parameters()).device
        state = module.mixer.empty_state(1, device)
        for first in range(0, length, CHUNK_TOKENS):
            tokens = min(CHUNK_TOKENS, length - first)
            _, state = module.mixer.mix(random_inputs(shape, tokens, device, dtype), state)
        ours += state.nbytes()
        softmax += cache_bytes(None, shape, length, dtype)
    return ours, softmax


def random_inputs(shape: Any, tokens: int, device: torch.device, dtype: torch.dtype) -> MixerInputs:
    """Return random inputs of a mixer."""

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(1, *sizes, device=device, dtype=dtype)

    k_BGTK, v_BGTV = draw(shape.groups, tokens, shape.key), draw(shape.groups, tokens, shape.value)
    return MixerInputs(draw(shape.heads, tokens, shape.key), k_BGTK, v_BGTV, draw(tokens, shape.dim))


def convert_and_measure(
    source: str, recipe: Any, options: EvalOptions, base: SuiteResult, device: Any, contexts: list[int]
) -> dict[str, Any]:
    """Convert, measure, and delete the conversion."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        report = convert(source, recipe, out, device=str(device))
        seconds = time.perf_counter() - began
        model, tokenizer = load(str(out), device, "float32", False)
    errors = [list(record["errors"].values()) for record in report["mixers"]]
    return {
        **summarize(measure(model, tokenizer, options), base),
        "copied": sorted(e[0] for e in errors)[len(errors) // 2] if errors[0] else None,
        "started": sorted(min(e) for e in errors)[len(errors) // 2] if errors[0] else None,
        "cache": {length: live_cache(model, length, torch.bfloat16) for length in contexts},
        "hybrid": report["hybrid"],
        "mixers": report["mixers"],
        "seconds": seconds,
    }


def format_line(found: dict[str, Any]) -> str:
    """Format a result as a line."""
    place = f"{found['recipe']} {found.get('start', '')}"
    if "refused" in found:
        return f"{place}: {found['refused']}"
    score = f"{place}: {found['perplexity']:.4g} +- {found['se']:.2g}"
    if "ratio" not in found:
        return score
    kept = ", ".join(f"{length}: {ours}/{whole}={ours / whole:.4f}" for length, (ours, whole) in found["cache"].items())
    errors = f"errors {found['copied']:.3f} -> {found['started']:.3f}, " if found["copied"] is not None else ""
    return f"{score}, x {format_interval(found['ratio'])}, {errors}cache {kept}, {found['seconds']:.0f} s"


def main() -> None:
    """Print the table row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", help="Checkpoint to convert.")
    add("--calibration", required=True, help="Calibration text.")
    add("--text", required=True, help="Text to score.")
    add("--recipe", action="append", help="Shipped recipe. Repeatable. Default: all that replace attention.")
    add("--start", choices=("copied", "calibrated"), action="append", help="Initialization. Repeatable. Default: both.")
    add(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="Override a key of the recipes.",
    )
    add("--context", type=int, action="append", default=[], help="Measure the cache at this many tokens. Repeatable.")
    add("--tokens", type=int, default=16384, help="Tokens of each text. Default: %(default)s.")
    add("--length", type=int, default=1024, help="Length of the windows in tokens. Default: %(default)s.")
    add("--device", help="Compute on this device. Default: a GPU if there is one.")
    add("--json", type=Path, help="Write the rows to this file.")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    model, tokenizer = load(arguments.source, device, "float32", False)
    options = EvalOptions(text=arguments.text, tokens=arguments.tokens, length=arguments.length)
    base = measure(model, tokenizer, options)
    rows: list[dict[str, Any]] = [{"recipe": "original", **summarize(base)}]
    print(format_line(rows[0]), flush=True)
    text = [
        f"calibration={json.dumps(arguments.calibration)}",
        f"tokens={arguments.tokens}",
        f"length={arguments.length}",
    ]
    names = arguments.recipe or [name for name in shipped_recipes() if load_recipe(name).attention]
    for name in names:
        for start in arguments.start or ["copied", "calibrated"]:
            found: dict[str, Any] = {"recipe": name, "start": start}
            try:
                recipe = load_recipe(name, [*text, f"attention.start={start}", *arguments.overrides])
                found |= convert_and_measure(arguments.source, recipe, options, base, device, arguments.context)
            except SurgeryError as error:
                found["refused"] = str(error)
            rows.append(found)
            print(format_line(found), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    run_script(main)
