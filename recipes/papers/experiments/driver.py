"""The commands `run` and `show` of every experiment of recipes/papers/experiments."""

from __future__ import annotations

import argparse
import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from recipes.papers.experiments.sweep import (
    Cell,
    Row,
    Setting,
    cell_minutes,
    gpu_minutes,
    is_complete,
    missing_runs,
    read_rows,
    run_sweep,
    split_cells,
    stack_size,
)
from recipes.papers.experiments.verdicts import UNDECIDED, Verdict
from recipes.papers.training.compute import CONVENTION
from surgery.core.device import choose_device, device_name, side_stream
from surgery.core.errors import SurgeryError

ROWS = Path(__file__).with_name("rows")  # results that belong to the repository
MEMORY = {"cpu": 2.0, "gpu": 60.0}  # GB of a stack of runs
GPU_TIME = f"{UNDECIDED}: GPU time"  # a setting whose runs are not complete
COUNTED = " of one H200, counted"  # from the sizes of tensors, not measured


@dataclass(frozen=True)
class Experiment:
    """One experiment of a paper: see its fields in recall.py.

    rule: the comparisons of the claim and its baselines; verdicts.py says what follows from them. settings: sweeps of several
    sizes; smoke: of seconds, for tests. baselines: methods that the paper has figures for and claims nothing about;
    missed: what their rows lack of these figures, one sentence each; None: the paper has none. data: help of the option --data, a file that `train` finds as options["data"]
    of the setting; "": no such option.
    """

    name: str
    title: str
    source: str
    claim: str
    rule: str
    settings: tuple[Setting, ...]
    smoke: Setting
    heads: Callable[[Cell], int]
    train: Callable[[Setting, Cell, list[tuple[float, int]], Any], list[Row]]
    verdict: Callable[[list[Row], Setting], Verdict]
    table: Callable[[list[Row], Setting], list[list[str]]]
    draw: Callable[[Any, list[Row], Setting], None]
    data: str = ""
    baselines: tuple[str, ...] = ()
    missed: Callable[[list[Row], Setting], list[str]] | None = None

    @property
    def command(self) -> str:
        """The command without its arguments."""
        return f"python -m recipes.papers.experiments.{self.name}"

    def run_command(self, setting: Setting) -> str:
        """Return the command that trains the runs of a setting."""
        name, _, steps = setting.name.partition("@")
        options = (f" --steps {steps}" if steps else "") + (" --data FILE" if self.data else "")
        return f"{self.command} run --setting {name}{options}"

    def setting(self, name: str) -> Setting:
        """Return a setting by name, also one with another number of steps, such as gpu@20000."""
        base, _, steps = name.partition("@")
        setting = next(s for s in (*self.settings, self.smoke) if s.name == base)
        return setting.lengthened(int(steps)) if steps else setting

    def settings_of(self, rows: list[Row]) -> list[Setting]:
        """Return the settings of the experiment, each followed by those of the rows with another number of steps."""
        longer = {row["setting"] for row in rows if "@" in row["setting"]}
        named = [self.setting(name) for name in longer]
        return [
            found
            for s in self.settings
            for found in (s, *sorted((n for n in named if n.name.partition("@")[0] == s.name), key=lambda n: n.steps))
        ]

    def judge(self, rows: list[Row], setting: Setting) -> Verdict:
        """Return the verdict of a setting: from its rows if the sweep is complete, else what it would take."""
        if is_complete(rows, setting):
            return self.verdict(rows, setting)
        have = sum(row["setting"] == setting.name for row in rows)
        state = f"{have} of {setting.runs} runs"
        if setting.where == "cpu":
            return Verdict(UNDECIDED, f"{state}: {self.run_command(setting)}")
        minutes = gpu_minutes(setting, self.heads, stack_size(setting, self.heads, MEMORY["gpu"]))
        return Verdict(GPU_TIME, f"{state}; forecast {math.ceil(minutes)} minutes{COUNTED}")


def run(experiment: Experiment, arguments: argparse.Namespace) -> None:
    """Train the runs that the file lacks."""
    setting = replace(experiment.setting(arguments.setting), graph=not arguments.plain)
    if experiment.data and arguments.data is not None:
        setting = replace(setting, options={**setting.options, "data": str(arguments.data)})
    device = choose_device(arguments.device)
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    side_by_side = arguments.side_by_side
    memory = (arguments.memory or MEMORY["gpu" if device.type == "cuda" else "cpu"]) / side_by_side
    out = arguments.out or ROWS / f"{experiment.name}.jsonl"
    part, parts = arguments.part
    origin = describe_origin(device, arguments.commit)
    ends, base = time.monotonic() + 60 * arguments.minutes, setting
    if arguments.lengthen > 1 and (parts > 1 or arguments.steps or arguments.methods):
        raise SurgeryError(
            f"--lengthen {arguments.lengthen} doubles the steps until the rows of the baselines reach the paper's "
            "figures, so one process trains all cells. Leave out --part, --methods and --steps, or use them without "
            "--lengthen."
        )
    if arguments.steps:
        setting = setting.lengthened(arguments.steps)

    def train(setting: Setting, cells: list[Cell]) -> bool:
        """Return whether the cells have all rows, those of other methods than --methods apart."""
        cells = [cell for cell in cells if not arguments.methods or cell.method in arguments.methods]
        stack = stack_size(setting, experiment.heads, memory)
        cells = split_cells(
            setting, parts, lambda c: cell_minutes(setting, c, experiment.heads(c), stack(c)), cells
        )[part - 1]  # fmt: skip
        if device.type == "cuda":
            counted = sum(cell_minutes(setting, c, experiment.heads(c), stack(c)) for c in cells)
            print(f"forecast, counted: {counted:.1f} minutes of one cell at a time", flush=True)
        minutes = (ends - time.monotonic()) / 60
        return run_sweep(
            setting, experiment.train, out, device, stack=stack, cells=cells, minutes=minutes, origin=origin,
            side_by_side=side_by_side, stream=lambda: side_stream(device),
        )  # fmt: skip

    while experiment.missed is not None and 2 * setting.steps <= arguments.lengthen * base.steps:
        if not train(setting, [cell for cell in setting.cells if cell.method in experiment.baselines]):
            return
        if not (missed := experiment.missed(read_rows(out), setting)):
            break
        print(f"{setting.name}: {'; '.join(missed)}. Twice as many steps follow", flush=True)
        setting = base.lengthened(2 * setting.steps)
    if train(setting, setting.cells):
        print(f"complete: {out}")


def describe_origin(device: torch.device, commit: str | None = None) -> Row:
    """Return what every row says about where it comes from: the device's name, the version of torch and the commit.

    commit: None: that of the checkout, which has none if it is a copy without history.
    """
    if commit is None:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
        try:
            commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            commit = ""
    origin = {"machine": device_name(device), "torch": torch.__version__}
    return {**origin, "commit": commit} if commit else origin


def parse_count(text: str) -> int:
    """Return a whole number of at least 1. Raises argparse's error for other text."""
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text)):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on (got {text!r})")
    return int(text)


def parse_part(text: str) -> tuple[int, int]:
    """Return (part, number of parts) of "2/8". Raises argparse's error for other text."""
    part, _, parts = text.partition("/")
    if not (part.isascii() and part.isdigit() and parts.isascii() and parts.isdigit()) or len(text) > 9:
        raise argparse.ArgumentTypeError(f"--part must be PART/PARTS, for example 2/8 (got {text!r})")
    if not 1 <= int(part) <= int(parts):
        raise argparse.ArgumentTypeError(f"--part: the part must be 1 to {parts} (got {part})")
    return int(part), int(parts)


def load_rows(experiment: Experiment, paths: list[Path]) -> list[Row]:
    """Return the rows of the files, or those of the repository."""
    return [row for path in paths or [ROWS / f"{experiment.name}.jsonl"] for row in read_rows(path)]


def show(experiment: Experiment, paths: list[Path], plot: Path | None) -> str:
    """Return the claim, its rule, tables and verdicts in Markdown, and draw the plot."""
    rows = load_rows(experiment, paths)
    parts = [
        f"{experiment.title} ({experiment.source}). Claim: {experiment.claim}. MACs: {CONVENTION}, without the head.",
        f"Rule: {experiment.rule}.",
    ]
    names = {row["setting"] for row in rows}
    known = experiment.settings_of(rows)
    shown = [s for s in (*known, *map(experiment.setting, sorted(names - {s.name for s in known}))) if s.name in names]
    for setting in shown:
        parts.append(f"Setting `{setting.name}`:\n\n{markdown(experiment.table(rows, setting))}")
    for setting in (*known, *(s for s in shown if s not in known)):
        left = missing_runs(rows, setting) if setting in shown else 0
        more = f". `run` would train {left} more runs" if left else ""
        parts.append(f"`{setting.name}`: {experiment.judge(rows, setting)}{more}")
    if plot is not None and shown:
        draw(experiment, rows, shown, plot)
    return "\n\n".join(parts)


def markdown(lines: list[list[str]]) -> str:
    """Return a Markdown table; the first line is its head."""
    rule = ["---"] * len(lines[0])
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def draw(experiment: Experiment, rows: list[Row], settings: list[Setting], path: Path) -> None:
    """Draw two panels for each setting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(settings), 2, figsize=(8, 3.2 * len(settings)), squeeze=False)
    for pair, setting in zip(axes, settings):
        experiment.draw(pair, rows, setting)
        have = sum(row["setting"] == setting.name for row in rows)
        part = "" if is_complete(rows, setting) else f" ({have} of {setting.runs} runs)"
        pair[0].set_title(f"{experiment.name}, {setting.name}{part}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main(experiment: Experiment, given: list[str] | None = None) -> None:
    """Run the command `run` or `show`."""
    parser = argparse.ArgumentParser(prog=experiment.command, description=f"{experiment.title} ({experiment.source}).")
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="Train the runs that the file lacks.")
    names = [s.name for s in (*experiment.settings, experiment.smoke)]
    running.add_argument("--setting", choices=names, default="cpu", help="Size of the sweep. Default: cpu.")
    running.add_argument("--out", type=Path, help="JSON-lines file. Default: the one of the repository.")
    running.add_argument("--device", help="Default: a GPU if there is one.")
    running.add_argument(
        "--memory", type=float, help="GB of the stacks of runs that train at a time. Default: 2 on a CPU, 60 on a GPU."
    )
    running.add_argument("--minutes", type=float, default=math.inf, help="Start no stack that would end later.")
    running.add_argument(
        "--steps", type=parse_count, help="Steps of every run, instead of the setting's. Default: its."
    )
    if experiment.missed is not None:
        running.add_argument(
            "--lengthen", type=parse_count, metavar="K",
            help="Double the steps, up to K times those of the setting, until the baselines reach the paper's figures; "
            "then train all methods. Default: 1.",
        )  # fmt: skip
    running.add_argument(
        "--part", type=parse_part, default=(1, 1), metavar="K/N",
        help="Train the K-th of N parts of the sweep, for N processes, which may share one --out. Default: 1/1.",
    )  # fmt: skip
    methods = sorted({cell.method for s in (*experiment.settings, experiment.smoke) for cell in s.cells})
    running.add_argument(
        "--methods", nargs="+", choices=methods, metavar="METHOD", help="Train these methods only. Default: all."
    )
    running.add_argument(
        "--side-by-side", type=parse_count, default=1, metavar="N",
        help="Train N methods or widths at a time, each on a stream of its own of one GPU. --memory is of all together. Default: 1.",
    )  # fmt: skip
    running.add_argument("--commit", help="Commit that the rows name. Default: that of the checkout.")
    if experiment.data:
        running.add_argument("--data", type=Path, help=experiment.data)
    running.add_argument("--plain", action="store_true", help="Do not use CUDA graphs.")
    running.set_defaults(lengthen=1, do=lambda arguments: run(experiment, arguments))
    showing = commands.add_parser("show", help="Print tables and verdicts.")
    showing.add_argument("rows", type=Path, nargs="*", help="Files of `run`. Default: the one of the repository.")
    showing.add_argument("--plot", type=Path, help="Draw the results to this file.")
    showing.set_defaults(do=lambda arguments: print(show(experiment, arguments.rows, arguments.plot)))
    arguments = parser.parse_args(given)
    arguments.do(arguments)
