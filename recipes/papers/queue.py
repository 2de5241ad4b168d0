"""Run a list of commands on the GPUs of one machine, side by side, until a time is over.

python -m recipes.papers.queue recipes/papers/quality/public_rows.yaml --gpus 4 --seconds 1500 --logs LOGS [--set source=SRC ..]

The YAML file has `set`, the default values of the words in braces of its commands, and `jobs`, in order of importance:

    name      of the job and of its log, LOGS/NAME.log
    command   for bash, run in the working directory; sees only its own GPUs (CUDA_VISIBLE_DEVICES)
    gpus      that it takes for itself. Default: 1; 0: none
    cards     the numbers of the GPUs that it may take. Default: all
    after     jobs that must have ended with exit status 0
    needs     a path that must exist before it starts
    seconds   it starts only if this much time is left. Default: 0
    limit     it is ended after this many seconds. Default: none

The first job that can start takes the lowest free GPUs; for one that waits for several, they are kept free as they become
so. All are ended when the time is over, or with this program. LOGS/jobs.jsonl gets a line for each job that ended. Jobs
that ended with status 0 in an earlier call with the same LOGS are not run again. Exit status 1: a job failed or did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recipes.papers.experiments.sweep import append_rows
from recipes.papers.script import run_script
from surgery.core.errors import SurgeryError

ENDED = "jobs.jsonl"
STOPPED = 124  # status of a job that was ended
GRACE = 3.0  # seconds between asking a job to end and ending it


class Job(BaseModel):
    """A job of the file; see the fields above."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1, pattern=r"^[^/]+$")
    command: str = Field(min_length=1)
    gpus: int = Field(1, ge=0)
    cards: list[int] | None = None
    after: list[str] = []
    needs: str = ""
    seconds: float = Field(0.0, ge=0)
    limit: float | None = Field(None, gt=0)


class JobFile(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid")
    set: dict[str, str | int | float] | None = None
    jobs: list[Job] = Field(min_length=1)


class Running:
    """A started job: its process, its GPUs, and when it began."""

    def __init__(self, job: Job, gpus: list[int], logs: Path):
        self.job, self.gpus, self.began = job, gpus, time.monotonic()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        with (logs / f"{job.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", job.command], stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def is_over_limit(self) -> bool:
        """Return whether the job has run longer than it may."""
        return self.job.limit is not None and time.monotonic() - self.began > self.job.limit

    def end(self) -> None:
        """End the job and all processes that it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(GRACE)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


class Queue:
    """Jobs of a file and the GPUs that they take in turns."""

    def __init__(self, jobs: list[Job], gpus: int, seconds: float, logs: Path):
        check_jobs(jobs, gpus)
        self.free, self.logs, self.failed = set(range(gpus)), logs, set[str]()
        self.until = time.monotonic() + seconds
        logs.mkdir(parents=True, exist_ok=True)
        self.done = ended_well(logs / ENDED)
        self.waiting = [job for job in jobs if job.name not in self.done]
        self.running: list[Running] = []

    def run(self) -> bool:
        """Run the jobs until none is left that can start, or the time is over. Return whether all ended with status 0."""
        try:
            while (self.waiting or self.running) and self.turn():
                time.sleep(0.2)
        finally:  # also at Ctrl-C: jobs of sessions of their own would go on
            for one in list(self.running):
                one.end()
                self.finish(one, STOPPED)
        for job in self.waiting:
            print(f"{job.name}: not started, {self.why_not(job)}", flush=True)
        return not (self.waiting or self.failed)

    def turn(self) -> bool:
        """Note which jobs ended, end those over their limit and start those that can start; return whether to go on."""
        late = time.monotonic() > self.until
        for one in list(self.running):
            status = one.process.poll()
            if status is None and (late or one.is_over_limit()):
                one.end()
                status = STOPPED
            if status is not None:
                self.finish(one, status)
        if late:
            return False
        return self.start_all() or bool(self.running) or any(map(self.is_due, self.waiting))  # due: waits for a path

    def why_not(self, job: Job) -> str:
        """Return why a job did not start."""
        if missing := [name for name in job.after if name not in self.done]:
            return f"because {missing[0]} did not end with status 0"
        if job.needs and not Path(job.needs).exists():
            return f"because {job.needs} does not exist"
        return "because the time was over or too short for it"

    def start_all(self) -> bool:
        """Start every job that can start; return whether there was one."""
        kept: set[int] = set()  # free GPUs of earlier jobs that wait for more of them
        started = False
        for job in [job for job in self.waiting if self.is_due(job) and (not job.needs or Path(job.needs).exists())]:
            free = self.free - kept
            gpus = sorted(free if job.cards is None else free & set(job.cards))[: job.gpus]
            if len(gpus) == job.gpus:
                self.start(job, gpus)
                started = True
            elif job.gpus > 1:
                kept |= set(gpus)
        return started

    def is_due(self, job: Job) -> bool:
        """Return whether the jobs that a job comes after have ended well, and enough time is left."""
        return set(job.after) <= self.done and time.monotonic() + job.seconds <= self.until

    def start(self, job: Job, gpus: list[int]) -> None:
        """Start a job on free GPUs."""
        self.waiting.remove(job)
        self.free -= set(gpus)
        self.running.append(Running(job, gpus, self.logs))
        print(f"{job.name}: started on {', '.join(map(str, gpus)) or 'no GPU'}", flush=True)

    def finish(self, one: Running, status: int) -> None:
        """Give the GPUs of an ended job back and write its line."""
        self.running.remove(one)
        self.free |= set(one.gpus)
        (self.failed if status else self.done).add(one.job.name)
        seconds = round(time.monotonic() - one.began, 1)
        append_rows(self.logs / ENDED, [{"name": one.job.name, "status": status, "seconds": seconds}])
        print(f"{one.job.name}: status {status} after {seconds:.0f} s", flush=True)


def ended_well(path: Path) -> set[str]:
    """Return the names of the jobs that ended with status 0. A line that was cut off is left out."""
    found = set()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            told = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(told, dict) and told.get("status") == 0:
            found.add(str(told.get("name")))
    return found


def check_jobs(jobs: list[Job], gpus: int) -> None:
    """Raise SurgeryError for jobs that could never start."""
    names, placed = [job.name for job in jobs], set[str]()
    for job in jobs:
        cards = set(range(gpus)) if job.cards is None else set(job.cards)
        if unknown := sorted(set(job.after) - set(names)):
            raise SurgeryError(f"{job.name} comes after {unknown[0]}, which is no job of the file")
        if names.count(job.name) > 1:
            raise SurgeryError(f"there are several jobs {job.name!r}. Give each a name of its own")
        if not cards <= set(range(gpus)) or job.gpus > len(cards):
            raise SurgeryError(
                f"{job.name} needs {job.gpus} of the GPUs {sorted(cards)}, and --gpus {gpus} has 0 to {gpus - 1}"
            )
    while left := [job for job in jobs if job.name not in placed]:
        if not (ready := [job.name for job in left if set(job.after) <= placed]):
            raise SurgeryError(f"{left[0].name} waits for itself: the jobs after each other form a circle")
        placed |= set(ready)


def read_jobs(path: Path, values: dict[str, str]) -> list[Job]:
    """Return the jobs of a file with the values in place of the words in braces. Raises SurgeryError."""
    try:
        content = JobFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SurgeryError(f"{path} cannot be read ({error.strerror})") from None
    except yaml.YAMLError as error:
        raise SurgeryError(f"{path} is not YAML ({' '.join(str(error).split())})") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise SurgeryError(
            f"{path} is no file of jobs: {'.'.join(map(str, first['loc'])) or 'its content'}: {first['msg']}"
        ) from None
    words = {**(content.set or {}), **values}
    for job in content.jobs:
        for word, value in words.items():
            job.command = job.command.replace("{" + word + "}", str(value))
            job.needs = job.needs.replace("{" + word + "}", str(value))
    return content.jobs


def assigned(word: str) -> tuple[str, str]:
    """Return (word, value) of "WORD=VALUE"."""
    name, equals, value = word.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be WORD=VALUE (got {word!r})")
    return name, value


def main(given: list[str] | None = None) -> None:
    """Run the jobs of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("jobs", type=Path, help="YAML file of jobs.")
    add("--gpus", type=int, required=True, help="Number of GPUs.")
    add("--seconds", type=float, required=True, help="End after this time.")
    add("--logs", type=Path, required=True, help="Folder of the logs.")
    add(
        "--set",
        action="append",
        default=[],
        type=assigned,
        metavar="WORD=VALUE",
        help="Value of a word in braces. Repeatable.",
    )
    add("--dry-run", action="store_true", help="Print the commands and end.")
    a = parser.parse_args(given)
    if a.gpus < 0 or not a.seconds > 0:
        raise SurgeryError(f"--gpus must be at least 0 and --seconds more than 0 (got {a.gpus} and {a.seconds:g})")
    jobs = read_jobs(a.jobs, dict(a.set))
    if a.dry_run:
        print("\n".join(f"{job.name}: {' '.join(job.command.split())}" for job in jobs))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the jobs too
    if not Queue(jobs, a.gpus, a.seconds, a.logs).run():
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
