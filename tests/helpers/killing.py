"""Kill conversions with SIGKILL at random moments and resume them, in forked processes, which start without import time.

convert_with_kills(convert, folder, kills)     finished outputs; convert(out, resume) writes one, or is killed while writing
copy_states(work, home, folder)                 copies of the files that a kill before each file operation would leave
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path


def _fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def _wait_or_kill(pid: int, seconds: float | None) -> bool:
    """Return whether the child ended successfully within that time; otherwise kill it."""
    until = time.monotonic() + (seconds if seconds is not None else 1e9)
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, f"a conversion failed by itself, status {status}"
            return True
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def convert_with_kills(
    convert: Callable[[Path, bool], None], folder: Path, kills: int = 10, seed: int = 0
) -> list[Path]:
    """Convert repeatedly and return every finished output; the first run is uninterrupted, the others are killed `kills`
    times in all.
    """
    chance, began = random.Random(seed), time.monotonic()
    outs = [folder / "whole"]
    _wait_or_kill(_fork(lambda: convert(outs[0], False)), None)
    whole = time.monotonic() - began
    killed, spared, out = 0, 0, folder / "out-0"
    while killed < kills and spared < 20:
        resume = out.with_name(out.name + ".partial").exists()
        done = _wait_or_kill(_fork(lambda out=out, resume=resume: convert(out, resume)), whole * chance.uniform(0, 0.5))
        if done or out.exists():  # killed when all was written: it had finished
            spared += 1
            outs += [out] if resume else []
            out = folder / f"out-{spared}"
        else:
            killed += 1
            print("killed", flush=True)
    resume = out.with_name(out.name + ".partial").exists()
    _wait_or_kill(_fork(lambda: convert(out, resume)), None)
    return [*outs, out]


CHANGING = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}


def copy_states(work: Callable[[], object], home: Path, folder: Path, since: str = "") -> list[Path]:
    """Copy the states that a SIGKILL would leave of `home` before each of its file operations into `folder`.

    A state is copied only if it differs from the previous one. `work` runs once, in a child process. since: ending of the path whose
    renaming starts the recording.
    """
    pid = _fork(lambda: record_states(work, home, folder, since))
    assert _wait_or_kill(pid, None)
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
