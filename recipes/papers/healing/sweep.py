"""Many healing runs side by side, resumable: each is a process of recipes/papers/healing/run.py.

python -m recipes.papers.healing.sweep PLAN SRC --out ROWS [--group order] [--jobs 4] [--time-limit 540]
    -- --data TRAINING --calibration FILE --text FILE

A plan has `common` (options of every run) and `groups` of rows {recipe, seeds, tokens, convert, set}; attention.yaml
beside this file is one. What follows -- goes to every run. ROWS gets one JSON file per recipe and seed, and conversions
in ROWS/converted. Runs whose file has its healed row are skipped, so the same command goes on where a killed one
stopped; the time limit (seconds) kills what is still running. recovery.py prints the table of the files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recipes.papers.script import run_script
from surgery.core.config import read_yaml
from surgery.core.errors import SurgeryError
from surgery.core.files import checksum

POLL_SECONDS = 0.5


class Row(BaseModel):
    """One conversion of a plan. tokens: None takes the healing recipe's; convert, set: overrides of the two recipes."""

    model_config = ConfigDict(extra="forbid")
    recipe: str
    seeds: list[int] = [0]
    tokens: Annotated[int, Field(gt=0)] | None = None
    convert: list[str] = []
    set: list[str] = []


class Plan(BaseModel):
    """A file of runs."""

    model_config = ConfigDict(extra="forbid")
    common: list[str] = []
    groups: dict[str, list[Row]]


@dataclass
class Run:
    """One process: a conversion, healed with one seed."""

    file: Path
    converted: Path
    command: list[str]
    process: subprocess.Popen[bytes] | None = None

    def is_done(self) -> bool:
        """Return whether the file has a healed row, or says why there is none."""
        return any("training" in row or "refused" in row for row in self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows that the process has written so far.

        It replaces the file whole, so half of one is an error.
        """
        if not self.file.exists():
            return []
        try:
            return json.loads(self.file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SurgeryError(
                f"{self.file} is not the JSON of a run: {error}. Delete it to run this row again."
            ) from None


def load_plan(path: Path) -> Plan:
    """Read a plan."""
    try:
        return Plan.model_validate(read_yaml(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the plan"
        keys = ", ".join(Row.model_fields)
        raise SurgeryError(f"{path}: {place}: {first['msg']}. A row has the keys {keys}.") from None
    except (OSError, ValueError) as error:
        raise SurgeryError(f"{path}: the plan cannot be read: {error}") from None


def plan_runs(plan: Plan, groups: list[str], source: str, out: Path, options: list[str]) -> list[Run]:
    """Return the runs of the groups, all of them if none is named; first seeds first."""
    if unknown := sorted(set(groups) - plan.groups.keys()):
        raise SurgeryError(f"the plan has no group {unknown[0]!r}; its groups are {', '.join(plan.groups)}")
    runs: list[tuple[int, Run]] = []
    for name in groups or plan.groups:
        for row in plan.groups[name]:
            numbered = enumerate(row.seeds)
            runs += [(place, make_run(row, seed, source, out, [*plan.common, *options])) for place, seed in numbered]
    return [run for _, run in sorted(runs, key=lambda pair: pair[0])]


def make_run(row: Row, seed: int, source: str, out: Path, options: list[str]) -> Run:
    """Return the run of a row with one seed."""
    name = Path(row.recipe).stem + digest(row.convert)
    converted = out / "converted" / name
    file = out / f"{name}{digest(row.set)}{f'-{row.tokens}' if row.tokens else ''}-{seed}.json"
    command = [sys.executable, "-m", "recipes.papers.healing.run", source, "--recipe", row.recipe]
    command += ["--seed", str(seed), "--json", str(file), "--work", str(converted), *options]
    command += ["--tokens", str(row.tokens)] if row.tokens else []
    command += [word for key in row.convert for word in ("--convert", key)]
    command += [word for key in row.set for word in ("--set", key)]
    return Run(file, converted, command)


def digest(overrides: list[str]) -> str:
    """Return a part of a file name that differs between overrides; "" without any."""
    return f"-{checksum(overrides):08x}" if overrides else ""


def is_converting(run: Run) -> bool:
    """Return whether a process is still at its conversion, which others of the same recipe wait for."""
    if run.process is None or run.process.poll() is not None:
        return False
    return len(run.rows()) < 2


def run_all(runs: list[Run], jobs: int, deadline: float) -> list[Run]:
    """Run what is not done, at most `jobs` at a time; return the runs that failed or were stopped."""
    waiting = [run for run in runs if not run.is_done()]
    running: list[Run] = []
    ended: list[Run] = []
    try:
        while (waiting or running) and time.monotonic() < deadline:
            for run in [r for r in running if r.process and r.process.poll() is not None]:
                running.remove(run)
                ended.append(run)
                print(
                    f"{run.file.stem}: {'done' if run.is_done() else 'failed, see ' + str(log_path(run))}", flush=True
                )
            busy = {run.converted for run in running if is_converting(run)}
            ready = [run for run in waiting if run.converted not in busy]
            if ready and len(running) < jobs:
                waiting.remove(ready[0])
                running.append(start(ready[0]))
                continue
            time.sleep(POLL_SECONDS)
    finally:
        for run in running:
            if run.process and run.process.poll() is None:
                run.process.kill()
                run.process.wait()
    return [run for run in [*ended, *running, *waiting] if not run.is_done()]


def log_path(run: Run) -> Path:
    """Return the file with a run's output."""
    return run.file.with_suffix(".log")


def start(run: Run) -> Run:
    """Start a run's process."""
    run.converted.mkdir(parents=True, exist_ok=True)
    with open(log_path(run), "wb") as log:
        run.process = subprocess.Popen(run.command, stdout=log, stderr=subprocess.STDOUT)
    print(f"{run.file.stem}: started", flush=True)
    return run


def parse_arguments(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line. Returns (own options, options of every run)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="File of runs.")
    parser.add_argument("source", help="Original checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="Folder of the rows.")
    parser.add_argument("--group", action="append", default=[], help="Run this group only. Repeatable.")
    parser.add_argument("--jobs", type=int, default=1, help="Processes at a time. Default: 1.")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="Stop after this many seconds.")
    parser.add_argument("--dry-run", action="store_true", help="Print the commands and run nothing.")
    split = words.index("--") if "--" in words else len(words)
    return parser.parse_args(words[:split]), words[split + 1 :]


def main(words: list[str] | None = None) -> int:
    """Run the plan. Returns 0 if every row is there."""
    arguments, options = parse_arguments(sys.argv[1:] if words is None else words)
    deadline = time.monotonic() + arguments.time_limit
    runs = plan_runs(load_plan(arguments.plan), arguments.group, arguments.source, arguments.out, options)
    if arguments.dry_run:
        for run in runs:
            print(" ".join(run.command))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    left = run_all(runs, max(1, arguments.jobs), deadline)
    for run in left:
        print(f"{run.file.stem}: not finished; the same command goes on")
    return 1 if left else 0


if __name__ == "__main__":
    run_script(main)
