"""The journal of a conversion under way: OUT.partial/journal.jsonl, one durable line a finished step.

A line is written after its files are on disk, so what the journal says is there is there; a line cut short
by a kill, or damaged, is dropped with all that follow it. A journal of another source, recipe, version, seed or text is refused.
The checksums find accidents, not intent: whoever can write the folder can write any line. A line is therefore checked
against the plan before it is used (pieces.py), and no path is taken from it.
Of several processes each has its own file for the layers it writes (journal-1.jsonl ..); the first one's holds all
other steps, and it reads them all.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn, TextIO

from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.core.files import (
    LOCK_NAME,
    acquire_lock,
    atomic_write,
    checksum,
    no_link,
    partial_path,
    refuse_link,
    refuse_links_in,
)

JOURNAL_NAME, CHECKSUM_KEY = "journal.jsonl", "crc32"
ADDED = ("weights_digest", "data_digest")  # keys of a fingerprint that journals written before 0.1.0 lack
FOREIGN = ("wandb",)  # subfolders of a work folder in which other programs make links of their own


class Journal:
    """Use as a context manager: the folder is locked against a second conversion meanwhile."""

    def __init__(
        self,
        folder: Path,
        fingerprint: dict[str, Any],
        resume: bool,
        ranks: DistContext | None = None,
        what: str = "conversion",
    ):
        self.folder, self.fingerprint, self.ranks, self.what = folder, fingerprint, ranks or DistContext(), what
        self.path = folder / (JOURNAL_NAME if self.ranks.main else f"journal-{self.ranks.index}.jsonl")
        self.entries: list[dict[str, Any]] = []
        self.created = self.ranks.on_main(lambda: self._create_folder(resume))

    def _create_folder(self, resume: bool) -> bool:
        refuse_links_in(self.folder, FOREIGN)
        try:
            self.folder.mkdir(parents=True)  # of two that try, one makes it
            return True
        except FileExistsError:
            if not resume:
                raise_unfinished(self.folder, self.what)
            return False

    def __enter__(self) -> Journal:
        self._lock: TextIO | None = None
        self.ranks.together_or_raise(lambda: self._open() if self.ranks.main else None)
        self.entries = self.ranks.broadcast_object(self.entries)
        self.ranks.together_or_raise(self._check_shared_folder)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._lock is not None:
            self._lock.close()

    def files(self) -> list[Path]:
        return [self.folder / JOURNAL_NAME, *sorted(self.folder.glob("journal-*.jsonl"))]

    def _open(self) -> None:
        try:
            self._lock = acquire_lock(self.folder, self.what)
            for path in self.files():
                self._read(path)
            self._check_fingerprint()
            if not self.entries:
                self._write_header()
        except OSError:
            if self.created:  # a disk that has no room for the first line
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _check_shared_folder(self) -> None:
        if not (self.folder / JOURNAL_NAME).is_file():
            raise SurgeryError(
                f"{self.folder}: process {self.ranks.index} does not see what process 0 writes there; give an --out on "
                "a file system that all machines of the run share, by a path that is the same on all of them"
            )

    def _write_header(self) -> None:
        self.add("start", **self.fingerprint)

    def _read(self, path: Path) -> None:
        if not path.is_file():
            return
        good = 0
        for raw in path.read_bytes().splitlines(keepends=True):
            line = _parse_entry(raw)
            if line is None:
                break
            self.entries.append(line)
            good += len(raw)
        with open(path, "r+b") as file:
            file.truncate(good)

    def _check_fingerprint(self) -> None:
        start = self.entries[0] if self.entries else {}
        for key, value in self.fingerprint.items():
            if start and start.get(key) != value and not (key in ADDED and key not in start):
                raise SurgeryError(
                    f"{self.folder} was begun with another {key.replace('_', ' ')} ({_truncate(start.get(key))}, now {_truncate(value)}); "
                    "resume with what it was begun with, or remove that folder to start anew"
                )

    def add(self, step: str, **what: Any) -> None:
        """By all processes, of which the first one writes it down; a piece, by the one that has written the piece."""
        line = {"step": step, **what}
        if not (self.ranks.main or step == "piece"):
            self.entries.append(line)
            return
        with open(self.path, "ab", opener=no_link) as file:
            file.write(_written(line))
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(line)

    def keep(self, lines: list[dict[str, Any]]) -> None:
        """Forget all other lines, on disk too; called by all processes with the same lines."""
        if self.ranks.main and lines != self.entries:
            with atomic_write(self.folder / JOURNAL_NAME) as file:
                file.writelines(_written(line) for line in lines)
            for path in self.files()[1:]:
                path.unlink()
        self.entries = list(lines)
        self.ranks.together_or_raise(lambda: None)  # nobody writes a line before the files are in order

    def merge(self) -> None:
        """Everybody's pieces are known to all."""
        for lines in self.ranks.gather([line for line in self.entries if line["step"] == "piece"]):
            self.entries += [line for line in lines if self.find("piece", piece=line["piece"]) is None]

    def move(self, out: Path) -> None:
        """The folder to its place, without what was of the work alone."""
        check_absent(out)
        for leftover in (*self.files(), self.folder / LOCK_NAME):
            leftover.unlink(missing_ok=True)
        os.replace(self.folder, out)

    def find(self, step: str, **what: Any) -> dict[str, Any] | None:
        """The line of a step done earlier."""
        for line in self.entries:
            if line["step"] == step and all(line.get(k) == v for k, v in what.items()):
                return line
        return None


def _written(line: dict[str, Any]) -> bytes:
    return json.dumps({**line, CHECKSUM_KEY: checksum(line)}).encode() + b"\n"


def _parse_entry(raw: bytes) -> dict[str, Any] | None:
    """A line as it was written, by its checksum; None: cut short or damaged, and all after it is done again."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    written = raw.endswith(b"\n") and isinstance(line, dict) and isinstance(line.get("step"), str)
    return line if written and line.pop(CHECKSUM_KEY, None) == checksum(line) else None


def check_output_path(out: Path, resume: bool, what: str = "conversion") -> None:
    """Before anything is begun that ends in `out`."""
    check_absent(out)
    refuse_links_in(partial_path(out), FOREIGN)
    if partial_path(out).exists() and not resume:
        raise_unfinished(partial_path(out), what)
    if not out.parent.is_dir():
        raise SurgeryError(f"{out.parent} is not a folder; make it first")


def check_absent(out: Path) -> None:
    refuse_link(out)
    if out.exists():
        raise SurgeryError(f"{out} exists; choose another --out, or remove it")


def raise_unfinished(folder: Path, what: str = "conversion") -> NoReturn:
    """Something lies there: one that is running is to be waited for, one that was interrupted resumed."""
    if (folder / LOCK_NAME).is_file():
        acquire_lock(folder, what).close()
    raise SurgeryError(
        f"{folder} holds an interrupted {what}; continue it with --resume, or remove that folder to start anew"
    )


def _truncate(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else text[:57] + "..."
