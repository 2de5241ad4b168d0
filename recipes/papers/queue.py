"""Run a list of commands on the GPUs of one machine, side by side, until a time is over.

python -m recipes.papers.queue recipes/papers/quality/public_rows.yaml --gpus 4 --seconds 1500 --logs LOGS [--set source=SRC ..]

The YAML file has `set`, the default values of the words in braces of its commands, and `jobs`, in order of importance:

    name      of the job and of its log, LOGS/NAME.log
    command   for bash, run in the working directory; sees only its own GPUs (CUDA_VISIBLE_DEVICES)
    gpus      that it takes for itself. Default: 1; 0: none
    on        the numbers of the GPUs that it may take. Default: all
    after     jobs that must have ended with exit status 0
    needs     a path that must exist before it starts
    seconds   it starts only if this much time is left. Default: 0
    limit     it is ended after this many seconds. Default: none

The first job that can start takes the lowest free GPUs; for one that waits for several, they are kept free as they become
so. All are ended when the time is over. LOGS/jobs.jsonl gets a line for
each job that ended. Jobs that ended with status 0 in an earlier call with the same LOGS are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from recipes.papers.quality.quantized import run_script
from surgery.core.errors import SurgeryError

ENDED = "jobs.jsonl"
GRACE = 3.0  # seconds between asking a job to end and ending it


class Job(BaseModel):
    """A job of the file; see the fields above."""

    model_config = ConfigDict(extra="forbid")
    name: str
    command: str
    gpus: int = 1
    on: list[int] | None = None
    after: list[str] = []
    needs: str = ""
    seconds: float = 0.0
    limit: float | None = None


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
        self.waiting, self.free, self.logs = list(jobs), set(range(gpus)), logs
        self.until = time.monotonic() + seconds
        logs.mkdir(parents=True, exist_ok=True)
        path = logs / ENDED
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.done = {line["name"] for line in lines if line["status"] == 0}
        self.waiting = [job for job in jobs if job.name not in self.done]
        self.running: list[Running] = []

    def run(self) -> None:
        """Run the jobs until none is left that can start, or the time is over."""
        while self.waiting or self.running:
            late = time.monotonic() > self.until
            for one in list(self.running):
                status = one.process.poll()
                if status is None and (late or one.is_over_limit()):
                    one.end()
                    status = 124
                if status is not None:
                    self.finish(one, status)
            if late or not (self.start_all() or self.running or any(job.needs for job in self.waiting)):
                break
            time.sleep(0.2)
        for job in self.waiting:
            print(f"{job.name}: not started", flush=True)

    def start_all(self) -> bool:
        """Start every job that can start; return whether there was one."""
        kept: set[int] = set()  # free GPUs of earlier jobs that wait for more of them
        started = False
        for job in [job for job in self.waiting if self.is_ready(job)]:
            free = self.free - kept
            gpus = sorted(free if job.on is None else free & set(job.on))[: job.gpus]
            if len(gpus) == job.gpus:
                self.start(job, gpus)
                started = True
            elif job.gpus > 1:
                kept |= set(gpus)
        return started

    def is_ready(self, job: Job) -> bool:
        """Return whether what a job waits for is there, and enough time is left."""
        there = set(job.after) <= self.done and (not job.needs or Path(job.needs).exists())
        return there and time.monotonic() + job.seconds <= self.until

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
        if status == 0:
            self.done.add(one.job.name)
        seconds = round(time.monotonic() - one.began, 1)
        with (self.logs / ENDED).open("a") as file:
            file.write(json.dumps({"name": one.job.name, "status": status, "seconds": seconds}) + "\n")
        print(f"{one.job.name}: status {status} after {seconds:.0f} s", flush=True)


def read_jobs(path: Path, values: dict[str, str]) -> list[Job]:
    """Return the jobs of a file with the values in place of the words in braces. Raises SurgeryError."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        jobs = [Job.model_validate(job) for job in content["jobs"]]
        words = {**content.get("set", {}), **values}
    except (ValidationError, KeyError, TypeError) as error:
        raise SurgeryError(f"{path} is no file of jobs ({error})") from None
    names = [job.name for job in jobs]
    for job in jobs:
        if unknown := sorted(set(job.after) - set(names)):
            raise SurgeryError(f"{path}: {job.name} comes after {unknown[0]}, which is no job of the file")
        if names.count(job.name) > 1 or "/" in job.name:
            raise SurgeryError(f"{path}: {job.name!r} must be the name of one job, without /")
        for word, value in words.items():
            job.command = job.command.replace("{" + word + "}", str(value))
            job.needs = job.needs.replace("{" + word + "}", str(value))
    return jobs


def main(given: list[str] | None = None) -> None:
    """Run the jobs of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("jobs", type=Path, help="YAML file of jobs.")
    add("--gpus", type=int, required=True, help="Number of GPUs.")
    add("--seconds", type=float, required=True, help="End after this time.")
    add("--logs", type=Path, required=True, help="Folder of the logs.")
    add("--set", action="append", default=[], metavar="WORD=VALUE", help="Value of a word in braces. Repeatable.")
    add("--dry-run", action="store_true", help="Print the commands and end.")
    a = parser.parse_args(given)
    jobs = read_jobs(a.jobs, dict(word.split("=", 1) for word in a.set))
    if a.dry_run:
        print("\n".join(f"{job.name}: {' '.join(job.command.split())}" for job in jobs))
        return
    Queue(jobs, a.gpus, a.seconds, a.logs).run()


if __name__ == "__main__":
    run_script(main)
