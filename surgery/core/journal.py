"""The journal of an unfinished conversion: OUT.partial/journal.jsonl, one JSON entry per finished step, flushed to
disk.

An entry is written after the files of its step are on disk, so every recorded step is complete. An entry that is
truncated or damaged is dropped together with all later ones. Resuming requires the same source, recipe, version, seed
and calibration text. Checksums detect accidents, not tampering: anyone who can write to the folder can write an entry.
Every entry is therefore checked against the plan before use, and no path is taken from an entry.

With several processes, each records the files it writes (OWN_STEPS) in its own journal file (journal-1.jsonl ..). Rank
0 records all other steps, and reads all files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any, NoReturn, TextIO

from surgery.core.distributed import DistContext
from surgery.core.errors import Interrupted, SurgeryError
from surgery.core.files import (
    LOCK_NAME,
    REPORT_NAME,
    acquire_lock,
    atomic_write,
    check_no_links,
    check_no_unknown_files,
    check_not_link,
    checksum,
    no_link,
    partial_path,
)

JOURNAL_NAME, CHECKSUM_KEY = "journal.jsonl", "crc32"
ADDED = ("weights_digest", "data_digest")  # keys of a fingerprint that journals written before 0.1.0 lack
OWN_STEPS = (
    "piece",
    "fitted",
    "aligned",
)  # steps of one layer (key `piece`), recorded by the process that wrote its file
MAX_START_BYTES = 2**24  # of the first entry, which holds a recipe
FOREIGN = ("wandb",)  # subfolders of a work folder in which other programs create links


class Journal:
    """The journal of a work folder. As a context manager it also locks the folder against a second process.

    folder: the work folder, created unless it exists. fingerprint: values that must be equal on resuming. resume:
    whether the folder may exist already. ranks: the processes of the run. what: the kind of work, for messages. renew:
    returns the fingerprint of a journal that an older version began in the words of this one.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: dict[str, Any],
        resume: bool,
        ranks: DistContext | None = None,
        what: str = "conversion",
        renew: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ):
        self.folder, self.fingerprint, self.ranks, self.what = folder, fingerprint, ranks or DistContext(), what
        self.renew = renew
        self.path = folder / (JOURNAL_NAME if self.ranks.main else f"journal-{self.ranks.index}.jsonl")
        self.entries: list[dict[str, Any]] = []
        self.created = self.ranks.on_main(lambda: self._create_folder(resume))

    def _create_folder(self, resume: bool) -> bool:
        check_no_links(self.folder, FOREIGN)
        try:
            self.folder.mkdir(parents=True)  # atomic: only one of two processes succeeds
            return True
        except FileExistsError:
            if not resume:
                raise_unfinished(self.folder, self.what)
            return False

    def __enter__(self) -> Journal:
        self._lock: TextIO | None = None
        try:
            self.ranks.together_or_raise(lambda: self._open() if self.ranks.main else None)
            self.entries = self.ranks.broadcast_object(self.entries)
            self.ranks.together_or_raise(self._check_shared_folder)
        except BaseException:  # another conversion in this Python session must find the folder free
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        if self._lock is not None:
            self._lock.close()

    def files(self) -> list[Path]:
        """Return the paths of the journal files of all processes."""
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
            if self.created:  # no space for the first entry
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _check_shared_folder(self) -> None:
        if not (self.folder / JOURNAL_NAME).is_file():
            raise SurgeryError(
                f"{self.folder}: process {self.ranks.index} does not see the files that process 0 writes there. Choose "
                "an --out on "
                "a file system that all machines of the run share, under the same path on all of them"
            )

    def _write_header(self) -> None:
        self.add("start", **self.fingerprint)

    def _read(self, path: Path) -> None:
        if path.exists() and not path.is_file():
            raise SurgeryError(f"{path} must be a regular file. Remove it")
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
        if start and self.renew is not None:
            start = self.renew(start)
        for key, value in self.fingerprint.items():
            if start and start.get(key) != value and not (key in ADDED and key not in start):
                raise SurgeryError(
                    f"{self.folder} was begun with another {key.replace('_', ' ')} "
                    f"({_difference(start.get(key), value)}). "
                    "Resume with the original settings, or remove that folder to start again"
                )

    def add(self, step: str, **what: Any) -> None:
        """Append an entry. Called by all processes; rank 0 writes it to disk, except OWN_STEPS, which the rank that
        calls this writes.
        """
        line = {"step": step, **what}
        if not (self.ranks.main or step in OWN_STEPS):
            self.entries.append(line)
            return
        with open(self.path, "ab", opener=no_link) as file:
            file.write(_encode_entry(line))
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(line)

    def keep(self, lines: list[dict[str, Any]]) -> None:
        """Remove all entries except `lines`, also on disk. All processes must pass the same entries."""
        if self.ranks.main and lines != self.entries:
            with atomic_write(self.folder / JOURNAL_NAME) as file:
                file.writelines(_encode_entry(line) for line in lines)
            for path in self.files()[1:]:
                path.unlink()
        self.entries = list(lines)
        self.ranks.together_or_raise(lambda: None)  # no process adds an entry before the files are rewritten

    def merge(self) -> None:
        """Make the entries of OWN_STEPS of all processes known to every process."""
        for lines in self.ranks.gather([line for line in self.entries if line["step"] in OWN_STEPS]):
            self.entries += [line for line in lines if self.find(line["step"], piece=line["piece"]) is None]

    def move(self, out: Path, delivered: Iterable[str]) -> None:
        """Rename the finished work folder to `out`, without the journal and the lock.

        delivered: the files that the command wrote for the result; any other file is refused, and the work kept.
        """
        check_absent(out)
        check_no_links(self.folder)
        work = (*(path.name for path in self.files()), LOCK_NAME)
        check_no_unknown_files(self.folder, {escape(name) for name in (*delivered, *work)}, Interrupted)
        for leftover in (*self.files(), self.folder / LOCK_NAME):
            leftover.unlink(missing_ok=True)
        os.replace(self.folder, out)

    def find(self, step: str, **what: Any) -> dict[str, Any] | None:
        """Return the first entry of a step with these values, or None."""
        for line in self.entries:
            if line["step"] == step and all(line.get(k) == v for k, v in what.items()):
                return line
        return None


def _encode_entry(line: dict[str, Any]) -> bytes:
    return json.dumps({**line, CHECKSUM_KEY: checksum(line)}).encode() + b"\n"


def _parse_entry(raw: bytes) -> dict[str, Any] | None:
    """Return a journal entry, or None if the line is truncated or its checksum is wrong."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    written = raw.endswith(b"\n") and isinstance(line, dict) and isinstance(line.get("step"), str)
    return line if written and line.pop(CHECKSUM_KEY, None) == checksum(line) else None


def read_start(folder: Path) -> dict[str, Any] | None:
    """Return the first entry of the journal in a work folder, with the values that it was begun with; None without a
    valid one.
    """
    try:
        with open(folder / JOURNAL_NAME, "rb", opener=no_link) as file:
            line = _parse_entry(file.readline(MAX_START_BYTES))
    except OSError:
        return None
    return line if line is not None and line["step"] == "start" else None


OVERWRITE = " (--overwrite replaces what a conversion wrote)"


def check_output_path(out: Path, resume: bool, what: str = "conversion") -> None:
    """Raise SurgeryError unless work that can be resumed and ends in `out` can begin: `out` is free, and there is
    unfinished work only for `resume` (--resume was given).
    """
    if resume and (out / REPORT_NAME).is_file() and not partial_path(out).exists():
        raise SurgeryError(f"{out} is complete, so there is nothing to resume. To run it again, choose another --out")
    check_free(out, what)
    if partial_path(out).exists() and not resume:
        raise_unfinished(partial_path(out), what)


def check_free(out: Path, what: str = "conversion") -> None:
    """Raise SurgeryError unless `out` is absent and its parent is a folder and no checkpoint."""
    check_absent(out, what)
    check_no_links(partial_path(out), FOREIGN)
    check_parent(out)


def check_parent(out: Path) -> None:
    """Raise SurgeryError unless the parent of `out` is a folder and no checkpoint."""
    if not out.parent.is_dir():
        raise SurgeryError(f"{out.parent} is not a folder; make it first")
    if (out.parent / "config.json").is_file() and any(out.parent.glob("*.safetensors")):
        raise SurgeryError(
            f"{out.parent} is a checkpoint, and {out} would lie inside it, where programs that copy or upload the "
            "checkpoint would take it "
            f"along. Choose an --out beside it, for example {out.parent}-{out.name}"
        )


def check_absent(out: Path, what: str = "") -> None:
    """Raise SurgeryError if `out` exists or is a symbolic link. what: the work that writes there."""
    check_not_link(out)
    if out.exists():
        raise SurgeryError(
            f"{out} exists; choose another --out, or remove it{OVERWRITE if what == 'conversion' else ''}"
        )


def raise_unfinished(folder: Path, what: str = "conversion") -> NoReturn:
    """Raise the SurgeryError for an existing work folder: wait if a process is running there, resume if it was
    interrupted.
    """
    if (folder / LOCK_NAME).is_file():
        acquire_lock(folder, what).close()
    raise SurgeryError(
        f"{folder} holds an interrupted {what}; continue it with --resume, or remove that folder to start again"
        f"{OVERWRITE if what == 'conversion' else ''}"
    )


def _difference(before: Any, now: Any) -> str:
    """Say how two values of a fingerprint differ: of JSON mappings, in which keys, for example stages.0.rate."""
    with suppress(TypeError, ValueError):
        first, second = (json.loads(value) if isinstance(value, str) else value for value in (before, now))
        if isinstance(first, dict) and isinstance(second, dict):
            return "; ".join(f"{key}: {_truncate(a)}, now {_truncate(b)}" for key, a, b in _changes(first, second))
    return f"{_truncate(before)}, now {_truncate(now)}"


def _changes(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, value before, value now) of the innermost values that differ. Lists of two lengths are one value."""
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(key, before.get(key), now.get(key)) for key in {**before, **now}]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(str(i), *values) for i, values in enumerate(zip(before, now))]
    else:
        if before != now:
            yield path, before, now
        return
    for key, first, second in pairs:
        yield from _changes(first, second, f"{path}.{key}" if path else key)


def _truncate(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else text[:57] + "..."
