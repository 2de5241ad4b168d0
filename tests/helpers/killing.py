"""Kill conversions at random moments and resume them, in forked processes, which start without import time.

convert_with_kills(convert, folder, kills)     finished outputs; convert(out, resume) writes one, or is killed while writing
copy_states(work, home, folder)                 copies of the files that a kill before each file operation would leave
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path


def _fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def run_child(work: Callable[[], object], cpu_seconds: float = 0.0, killed_by: int = 0) -> tuple[bool, float]:
    """Run `work` in a child process; return (whether it ended by itself, seconds of processor time that it took).

    killed_by: the signal by which `work` kills itself; 0: it does not. cpu_seconds: when the child is killed, in
    seconds of its own processor time, which does not depend on what else runs on the machine; 0: never. The kernel ends
    the process at that moment (SIGPROF without a handler), as it does with SIGKILL.
    """

    def limited() -> None:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        work()

    _, status, usage = os.wait4(_fork(limited), 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGPROF if cpu_seconds else 0, -killed_by), (
        f"the work failed by itself, exit code {code}"
    )
    return code == 0, usage.ru_utime + usage.ru_stime


def convert_with_kills(
    convert: Callable[[Path, bool], None], folder: Path, kills: int = 10, seed: int = 0
) -> list[Path]:
    """Convert repeatedly and return every finished output; the first run is uninterrupted, the others are killed
    `kills` times in all.
    """
    chance = random.Random(seed)
    outs = [folder / "whole"]
    _, whole = run_child(lambda: convert(outs[0], False))
    killed, spared, out = 0, 0, folder / "out-0"
    while killed < kills and spared < 20:
        resume = out.with_name(out.name + ".partial").exists()
        # At least a tick of the kernel's clock: a timer of 0 would never fire.
        limit = max(0.01, whole * chance.uniform(0, 0.5))
        done, _ = run_child(lambda out=out, resume=resume: convert(out, resume), limit)
        if done or out.exists():  # killed when all was written: it had finished
            spared += 1
            outs += [out] if resume else []
            out = folder / f"out-{spared}"
        else:
            killed += 1
            print("killed", flush=True)
    resume = out.with_name(out.name + ".partial").exists()
    run_child(lambda: convert(out, resume))
    return [*outs, out]


CHANGING = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}


def copy_states(work: Callable[[], object], home: Path, folder: Path, since: str = "") -> list[Path]:
    """Copy the states that a SIGKILL would leave of `home` before each of its file operations into `folder`.

    A state is copied only if it differs from the previous one. `work` runs once, in a child process. since: ending of
    the path whose renaming starts the recording.
    """
    run_child(lambda: record_states(work, home, folder, since))
    return sorted(folder.iterdir())


def record_states(work: Callable[[], object], home: Path, folder: Path, since: str) -> None:
    """Run `work` and record the states of `home`."""
    recording, busy, before, place = not since, False, None, os.fspath(home)

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal recording, busy, before
        opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if busy or not (opened or event in CHANGING):
            return
        paths = [os.fsdecode(path) for path in arguments[:2] if isinstance(path, (str, bytes, os.PathLike))]
        if not any(path.startswith(place) for path in paths) and event not in ("os.remove", "os.rmdir"):
            return
        busy = True
        try:
            if recording and (now := _files(home)) != before:
                before = now
                shutil.copytree(home, folder / f"{len(os.listdir(folder)):04d}", symlinks=True)
            recording = recording or (event == "os.rename" and paths[1].endswith(since))
        finally:
            busy = False

    folder.mkdir(parents=True, exist_ok=True)
    sys.addaudithook(audit)
    work()
    recording = False


def _files(home: Path) -> list[tuple[str, bytes]]:
    return [(os.fspath(p), p.read_bytes() if p.is_file() else b"") for p in sorted(home.rglob("*"))]


def at_a_rename(ending: str) -> None:
    """Kill this process when it is about to rename something to a path with this ending."""

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename" and os.fspath(arguments[1]).endswith(ending):  # type: ignore[call-overload]
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
