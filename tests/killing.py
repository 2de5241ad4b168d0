"""Conversions killed with SIGKILL at random moments and resumed, in children of one process, so that each starts
at once instead of waking an interpreter.

killing.run(convert, out, kills) -> how many were killed; convert(resume) writes into out, or is killed at it.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path


def _child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def _finished(pid: int, seconds: float | None) -> bool:
    """Whether the child ended by itself, well, within that time; else it is killed."""
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


def run(convert: Callable[[Path, bool], None], folder: Path, kills: int = 10, seed: int = 0) -> list[Path]:
    """Every finished output; the first was not interrupted, the others were, `kills` times in all."""
    chance, began = random.Random(seed), time.monotonic()
    outs = [folder / "whole"]
    _finished(_child(lambda: convert(outs[0], False)), None)
    whole = time.monotonic() - began
    killed, spared, out = 0, 0, folder / "out-0"
    while killed < kills and spared < 20:
        resume = out.with_name(out.name + ".partial").exists()
        done = _finished(_child(lambda out=out, resume=resume: convert(out, resume)), whole * chance.uniform(0, 0.5))
        if done or out.exists():  # killed when all was written: it had finished
            spared += 1
            outs += [out] if resume else []
            out = folder / f"out-{spared}"
        else:
            killed += 1
            print("killed", flush=True)
    resume = out.with_name(out.name + ".partial").exists()
    _finished(_child(lambda: convert(out, resume)), None)
    return [*outs, out]
