"""Where a conversion writes, and what it may replace there: `--resume` and `--overwrite`.

With `--overwrite` OUT is replaced if its surgery_report.json lists the files that the conversion wrote, with their
SHA-256, and OUT holds exactly these. OUT.partial is replaced if a conversion began its journal, and all of its files
are those of an unfinished conversion. Anything else is refused by name.

OUT stays until its successor is complete: it is then renamed to OUT.replaced, and deleted file by file once the
successor has its name. OUT.partial is deleted when the preflight checks of the new conversion have passed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from surgery.checkpoint.report import validate_report
from surgery.checkpoint.source import CheckpointSource
from surgery.checkpoint.writer import known_work_files
from surgery.core.digests import hash_file
from surgery.core.errors import Interrupted, SurgeryError
from surgery.core.files import (
    LOCK_NAME,
    REPORT_NAME,
    acquire_lock,
    check_no_links,
    check_not_link,
    partial_path,
    read_json,
    unknown_files,
)
from surgery.core.journal import (
    FOREIGN,
    JOURNAL_NAME,
    Journal,
    check_absent,
    check_free,
    check_output_path,
    check_parent,
    read_start,
)

REPLACES_KEY = (
    "replaces"  # in the journal's first entry: SHA-256 of the report in the OUT that this conversion will replace
)
ONLY_OURS = "--overwrite deletes what a conversion wrote, and nothing else"
START_KEYS = {"recipe", "seed", "calibration", "weights_digest"}  # only a conversion's journal begins with all of them


@dataclass(frozen=True)
class Output:
    """The folder of a conversion's result.

    path: OUT. resume: whether OUT.partial holds the conversion to continue. overwrite: whether OUT and OUT.partial may
    hold conversions to be replaced. replaced: SHA-256 of the report of the finished conversion in OUT that will be
    replaced, None without one.
    """

    path: Path
    resume: bool = False
    overwrite: bool = False
    replaced: str | None = None

    @classmethod
    def checked(cls, path: Path, resume: bool, overwrite: bool) -> Output:
        """Return the output; raise SurgeryError, before anything is written or deleted, if a conversion cannot begin
        there.
        """
        return cls(path, resume, overwrite, find_replaced(path, resume, overwrite))

    @property
    def start(self) -> dict[str, str]:
        """What the journal's first entry says of the output."""
        return {} if self.replaced is None else {REPLACES_KEY: self.replaced}

    def check_source(self, source: CheckpointSource) -> None:
        """Raise SurgeryError if the source, or a file of something else, would be deleted."""
        if self.overwrite:
            check_not_source(self.path, source)
            check_leftovers(self.path, source)

    def remove_interrupted(self, source: CheckpointSource) -> None:
        """Delete OUT.partial if it is to be replaced."""
        if self.overwrite and partial_path(self.path).exists():
            remove_interrupted(self.path, source)

    def check_free(self) -> None:
        """Raise SurgeryError if another conversion has finished there since `checked`."""
        if self.replaced is None:
            check_free(self.path)

    def deliver(self, journal: Journal, delivered: Iterable[str]) -> None:
        """Rename the finished work folder to OUT, in place of the conversion that is replaced. delivered: names of its
        files.
        """
        with set_aside(self.path, self.replaced):
            journal.move(self.path, delivered)


def find_replaced(out: Path, resume: bool, overwrite: bool) -> str | None:
    """Return the SHA-256 of the report of the finished conversion in `out` that this conversion will replace, None
    without one.

    A resumed conversion replaces what it was begun to replace. Raises SurgeryError if the conversion cannot begin.
    """
    if overwrite and resume:
        raise SurgeryError(
            "--overwrite starts again, and --resume continues an interrupted conversion. Give one of them"
        )
    if overwrite:
        _check_not_in_use(out)
    if out.name in ("", ".."):  # a folder that exists, and beside which nothing can be written
        check_absent(out)
    work = partial_path(out)
    check_no_links(work, FOREIGN)
    if resume:
        _check_begun(work)
    if not overwrite:
        begun = (read_start(work) or {}).get(REPLACES_KEY) if resume else None
        if not isinstance(begun, str) or not out.exists():
            check_output_path(out, resume)
            return None
        if check_finished(out) != begun:
            raise SurgeryError(
                f"{out} is another conversion than the one that {work} was begun to replace. Move {out} elsewhere, "
                "then continue with "
                "--resume"
            )
        return begun
    check_not_link(out)
    _check_not_in_use(work)
    check_parent(out)
    if out.exists() and aside_path(out).exists():
        raise SurgeryError(
            f"{aside_path(out)} exists, and --overwrite needs that name. It may be left from an interrupted "
            "--overwrite: "
            "look into it, then remove or rename it"
        )
    if work.exists():
        _check_interrupted(work)
    return check_finished(out) if out.exists() else None


def _check_begun(work: Path) -> None:
    """Raise SurgeryError for a work folder with files in it, but no journal and no report: no conversion began there."""
    if (
        not work.is_dir() or (work / JOURNAL_NAME).exists() or (work / REPORT_NAME).exists()
    ):  # complete, but not renamed
        return
    if any(path.name != LOCK_NAME for path in work.iterdir()):
        raise SurgeryError(
            f"{work} exists and holds no interrupted conversion. Remove it yourself, or choose another --out"
        )


def aside_path(out: Path) -> Path:
    """Return the name under which a replaced OUT is deleted."""
    return out.with_name(f"{out.name}.replaced")


def check_not_source(out: Path, source: CheckpointSource) -> None:
    """Raise SurgeryError if a folder that may be deleted is the source, or holds it."""
    for source_path in (source.folder, Path(source.name)):
        if source_path.exists():
            for folder in (out, partial_path(out)):
                _check_not_around(folder, "the source", source_path)


def _check_not_in_use(folder: Path) -> None:
    """Raise SurgeryError for a folder that other programs rely on."""
    _check_not_around(folder, "the working directory", Path.cwd())
    with suppress(RuntimeError):  # no home folder
        _check_not_around(folder, "the home folder", Path.home())
    if os.path.ismount(folder):
        raise SurgeryError(
            f"{folder} is the root of a file system, which --overwrite cannot replace. Choose another --out"
        )


def _check_not_around(folder: Path, what: str, path: Path) -> None:
    if path.resolve().is_relative_to(folder.resolve()):
        is_same = path.resolve() == folder.resolve()
        raise SurgeryError(
            f"{folder} {'is' if is_same else 'holds'} {what} ({path}), and --overwrite would delete it. Choose "
            "another --out"
        )


def check_finished(out: Path) -> str:
    """Return the SHA-256 of the report of a finished conversion whose files are all as it wrote them; raise
    SurgeryError otherwise.
    """
    report_path = out / REPORT_NAME
    if not report_path.is_file():
        raise SurgeryError(
            f"{out} holds no {REPORT_NAME}, so that no conversion wrote it. {ONLY_OURS}. Choose another --out"
        )
    check_no_links(out)
    report = read_json(report_path)
    validate_report(report, str(report_path))
    written = report.get("files")
    if not written:
        raise SurgeryError(
            f"{report_path} does not list the files of the conversion: an older version or save_pretrained wrote it. "
            f"Remove {out} "
            "yourself, or choose another --out"
        )
    folders = {parent.as_posix() for name in written for parent in Path(name).parents}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if name not in folders if path.is_dir() else name not in {*written, REPORT_NAME}:
            raise _foreign_error(path)
    for path in _files(out):
        name = path.relative_to(out).as_posix()
        if name != REPORT_NAME and hash_file(path) != written[name]:
            raise SurgeryError(
                f"{path} was changed after the conversion (edited, healed or quantized). {ONLY_OURS}. Move it "
                "elsewhere, or choose "
                "another --out"
            )
    return hash_file(report_path)


def _foreign_error(path: Path) -> SurgeryError:
    return SurgeryError(
        f"{path} was not written by the conversion. {ONLY_OURS}. Move it elsewhere, or choose another --out"
    )


def _check_interrupted(work: Path) -> None:
    """Raise SurgeryError unless a folder was begun by a conversion, and no process works in it."""
    check_no_links(work)
    start = read_start(work)
    if start is None or not start.keys() >= START_KEYS:
        raise SurgeryError(
            f"{work} holds no interrupted conversion. {ONLY_OURS}. Remove it yourself, or choose another --out"
        )
    if (work / LOCK_NAME).is_file():
        acquire_lock(work, "conversion").close()


def check_leftovers(out: Path, source: CheckpointSource) -> None:
    """Raise SurgeryError if OUT.partial holds files that no conversion of the source writes."""
    for path in unknown_files(partial_path(out), known_work_files(source)):
        raise _foreign_error(path)


def remove_interrupted(out: Path, source: CheckpointSource) -> None:
    """Delete OUT.partial of an interrupted conversion, after checking it again while no other process can work in
    it.
    """
    work = partial_path(out)
    _check_interrupted(work)
    lock = acquire_lock(work, "conversion")
    try:
        files = _files(work)
        check_leftovers(out, source)
        _remove(work, files)
    finally:
        lock.close()


@contextmanager
def set_aside(out: Path, replaced: str | None) -> Iterator[None]:
    """Give the name `out` to another folder inside the context, and delete the conversion that had it behind the
    context.

    replaced: SHA-256 of its report, as `find_replaced` returned it; None: there was none. After an error `out` is as
    before.

    Raises Interrupted, with nothing changed, if `out` is no longer the conversion that was checked.
    """
    if replaced is None or not out.exists():
        yield
        return
    aside, files = aside_path(out), _files(out)
    changed = f"{aside} exists" if aside.exists() else None
    try:
        if check_finished(out) != replaced:
            changed = f"{out} is another conversion than the one that was to be replaced"
    except SurgeryError as error:
        changed = str(error)
    if changed is not None:
        raise Interrupted(
            f"{changed}. The new conversion is complete in {partial_path(out)}: move "
            f"{aside if aside.exists() else out} elsewhere, then run "
            "the same command with --resume in place of --overwrite"
        )
    os.rename(out, aside)
    try:
        yield
    except BaseException:
        if not out.exists():
            os.rename(aside, out)
        raise
    _remove(aside, [aside / path.relative_to(out) for path in files])


def _files(folder: Path) -> list[Path]:
    return sorted(Path(parent, name) for parent, _, names in os.walk(folder) for name in names)


def _remove(folder: Path, files: Iterable[Path]) -> None:
    """Delete these files of a folder, and all folders in it, itself included, that are empty then."""
    for path in files:
        path.unlink(missing_ok=True)
    for parent, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):  # a file that came meanwhile stays
            Path(parent).rmdir()
