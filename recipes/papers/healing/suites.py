"""Run suites of `surgery eval` on several conversions of one model and show the results in one table.

python -m recipes.papers.healing.suites run SRC btt-half=FOLDER hybrid-25=FOLDER .. --text heldout.txt --out OUT
python -m recipes.papers.healing.suites show OUT [--figures PREFIX]

    reading    ppl, per-position      on --text, in windows of --length
    needle     needle (--tasks)       --lengths x five depths, --samples of each
    mqar       mqar                   --sequences of every length
    niah       niah_story             like needle, with generated answers; needs lm-eval
    speed      speed                  in --speed-dtype; needs an otherwise idle machine

Each conversion is compared with SRC on the same samples. OUT/NAME.json holds its rows, OUT/kept the finished
evaluations.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.papers.healing.tables import show
from recipes.papers.script import run_script
from surgery.core.files import atomic_write
from surgery.core.progress import RichProgress
from surgery.eval.run import Evaluation, evaluate
from surgery.eval.suite import EvalOptions

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SuiteCall = tuple[list[str], EvalOptions, str]  # suites, options, dtype


def reading(a: argparse.Namespace) -> SuiteCall:
    """Return the suites of language modeling: perplexity and loss by position."""
    return ["ppl", "per-position"], EvalOptions(text=a.text, tokens=a.tokens, length=a.length), "float32"


def needle(a: argparse.Namespace) -> SuiteCall:
    """Return the needle suite. --text surrounds the codes of needle-rank; story questions have their own text."""
    asked = {"lengths": tuple(a.lengths), "depths": DEPTHS, "limit": a.samples, "tasks": tuple(a.tasks)}
    return ["needle"], EvalOptions(text=a.text, **asked), "float32"


def mqar(a: argparse.Namespace) -> SuiteCall:
    """Return the associative recall suite."""
    return ["mqar"], EvalOptions(lengths=tuple(a.lengths), limit=a.sequences), "float32"


def niah(a: argparse.Namespace) -> SuiteCall:
    """Return the needle-in-a-haystack suite with generated answers."""
    asked = {"lengths": tuple(a.lengths), "depths": DEPTHS, "limit": a.samples, "tasks": ("niah_story",)}
    return ["niah"], EvalOptions(**asked), "float32"


def speed(a: argparse.Namespace) -> SuiteCall:
    """Return the speed suite."""
    return ["speed"], EvalOptions(lengths=tuple(a.speed_lengths), limit=a.repeats), a.speed_dtype


PARTS: dict[str, Callable[[argparse.Namespace], SuiteCall]] = {
    "reading": reading, "needle": needle, "mqar": mqar, "niah": niah, "speed": speed,
}  # fmt: skip


def evaluation_record(done: Evaluation) -> dict[str, Any]:
    """Return what tables and figures need. by_position: mean nats per position of a window, of both models."""
    found = {**done.to_dict(), "plots": []}
    losses = done.results.get("per-position", {})
    found["by_position"] = {
        role: [round(x, 4) for x in result.arrays["loss_NT"].double().mean(0).tolist()]
        for role, result in losses.items()
    }
    return found


def run(a: argparse.Namespace) -> None:
    """Run part by part, so that an interrupted run has its first parts for every conversion."""
    kept = a.out / "kept"
    kept.mkdir(parents=True, exist_ok=True)
    named = dict(pair.split("=", 1) for pair in a.conversions)
    for part in a.part or ["reading", "needle", "mqar"]:
        suites, options, dtype = PARTS[part](a)
        for name, folder in named.items():
            done = evaluate(
                folder,
                suites,
                options,
                compare=a.source,
                out=kept,
                device=a.device,
                dtype=dtype,
                progress=RichProgress(),
            )
            place = a.out / f"{name}.json"
            parts = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
            with atomic_write(place, "w") as file:
                file.write(json.dumps({**parts, part: evaluation_record(done)}, indent=1, default=str))
            print(f"{name}: {part}" + "".join(f"; {why}" for why in done.broken.values()), flush=True)


def main() -> None:
    """Run the command `run` or `show`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="Evaluate the conversions.")
    running.add_argument("source", help="Original checkpoint.")
    running.add_argument("conversions", nargs="+", metavar="NAME=FOLDER", help="Converted checkpoints.")
    running.add_argument(
        "--part",
        action="append",
        choices=tuple(PARTS),
        help="Suites to run. Repeatable. Default: reading, needle, mqar.",
    )
    running.add_argument("--text", required=True, help="Text to score.")
    running.add_argument("--out", type=Path, required=True, help="Folder of the results.")
    running.add_argument("--tokens", type=int, default=65536, help="Tokens of the text. Default: 65536.")
    running.add_argument("--length", type=int, default=1024, help="Length of the windows. Default: 1024.")
    running.add_argument(
        "--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048], help="Context lengths of questions."
    )
    running.add_argument("--tasks", nargs="+", default=["needle-rank"], help="Needle tasks. Default: needle-rank.")
    running.add_argument("--samples", type=int, default=20, help="Questions at each length and depth. Default: 20.")
    running.add_argument("--sequences", type=int, default=64, help="MQAR sequences per length. Default: 64.")
    running.add_argument(
        "--speed-lengths", type=int, nargs="+", default=[512, 2048, 8192], help="Context lengths of speed."
    )
    running.add_argument("--speed-dtype", default="bfloat16", help="Default: bfloat16.")
    running.add_argument("--repeats", type=int, default=5, help="Repetitions of speed. Default: 5.")
    running.add_argument("--device", help="Default: a GPU if there is one.")
    running.set_defaults(do=run)
    showing = commands.add_parser("show", help="Print the tables.")
    showing.add_argument("out", type=Path, nargs="+", help="Folders or files NAME.json, in the order of the columns.")
    showing.add_argument("--figures", help="Prefix of the figures PREFIX-needle.png and PREFIX-position.png.")
    showing.set_defaults(do=lambda a: show(a.out, a.figures))
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    run_script(main)
