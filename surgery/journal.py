"""The journal of a conversion under way: OUT.partial/journal.jsonl, one durable line a finished step.

A line is written after its files are on disk, so what the journal says is there is there; a line cut short
by a kill is dropped. A journal of another source, recipe, version, seed or text is refused.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn, TextIO

from surgery.errors import SurgeryError

NAME, LOCK = "journal.jsonl", "lock"


class Journal:
    """Use as a context manager: the folder is locked against a second conversion meanwhile."""

    def __init__(self, folder: Path, fingerprint: dict[str, Any], resume: bool):
        self.folder, self.fingerprint = folder, fingerprint
        self.path = folder / NAME
        self.lines: list[dict[str, Any]] = []
        try:
            folder.mkdir(parents=True)  # of two that try, one makes it
            self.made = True
        except FileExistsError:
            self.made = False
            if not resume:
                refuse_begun(folder)

    def __enter__(self) -> Journal:
        self._lock = locked(self.folder, "conversion")
        self._read()
        if not self.lines:
            self._start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._lock.close()

    def _start(self) -> None:
        self.add("start", **self.fingerprint)

    def _read(self) -> None:
        if not self.path.is_file():
            return
        good = 0
        for raw in self.path.read_bytes().splitlines(keepends=True):
            try:
                line = json.loads(raw)
            except ValueError:
                break
            if not raw.endswith(b"\n") or not isinstance(line, dict) or "step" not in line:
                break
            self.lines.append(line)
            good += len(raw)
        with open(self.path, "r+b") as file:
            file.truncate(good)
        self._refuse_other()

    def _refuse_other(self) -> None:
        start = self.lines[0] if self.lines else {}
        for key, value in self.fingerprint.items():
            if start and start.get(key) != value:
                raise SurgeryError(
                    f"{self.folder} was begun with another {key} ({_short(start.get(key))}, now {_short(value)}); "
                    "resume with what it was begun with, or remove that folder to start anew"
                )

    def add(self, step: str, **what: Any) -> None:
        line = {"step": step, **what}
        with open(self.path, "ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(line)

    def find(self, step: str, **what: Any) -> dict[str, Any] | None:
        """The line of a step done earlier."""
        for line in self.lines:
            if line["step"] == step and all(line.get(k) == v for k, v in what.items()):
                return line
        return None


def refuse_begun(folder: Path) -> NoReturn:
    """A conversion lies there: one that is running is to be waited for, one that was interrupted resumed."""
    if (folder / LOCK).is_file():
        locked(folder, "conversion").close()
    raise SurgeryError(
        f"{folder} holds an interrupted conversion; continue it with --resume, or remove that folder to start anew"
    )


def locked(folder: Path, what: str) -> TextIO:
    """An open file: until it is closed, nobody else has the folder's lock. The system lets go of it when a process
    ends, however it ends."""
    busy = SurgeryError(f"another {what} is writing into {folder}; wait for it, or choose another --out")
    try:
        file = open(folder / LOCK, "w")  # noqa: SIM115
    except FileNotFoundError:  # finished, and moved to its place
        raise busy from None
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_ino != os.stat(folder / LOCK).st_ino:
            raise OSError  # removed by one that finished between the two lines above
    except ImportError:  # no such locks on this system
        pass
    except OSError:
        file.close()
        raise busy from None
    return file


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else text[:57] + "..."
