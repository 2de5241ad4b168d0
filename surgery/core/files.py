"""Files that are whole or absent, JSON that is what it says, and what a disk refuses, in words.

One writer at a time: a lock that the system lets go of when its process ends, however it ends.

On NFS Linux makes it a lock of the server's, so that machines exclude each other too; where a file system has none,
nobody is kept out.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path
from typing import Any, TextIO

from surgery.core.errors import Interrupted, SurgeryError


def partial_path(out: Path) -> Path:
    """Where it is worked on."""
    return out.with_name(out.name + ".partial")


REPORT_NAME = "surgery_report.json"


DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ACCESS_DENIED_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM)
# What libraries written in Rust (safetensors, tokenizers) say of the system's errors.
# (torch.linalg counts columns in "error code: 30", which is no number of the system's.)
OS_ERROR_NUMBER = re.compile(r"\bos error (\d+)|\bOs \{ code: (\d+)")


# -- writing -----------------------------------------------------------------------------------------
def refuse_link(path: Path) -> None:
    """A symbolic link at a path that will be written would lead the writing somewhere else."""
    if path.is_symlink():
        raise SurgeryError(
            f"{path} is a symbolic link (to {os.readlink(path)}); surgery does not write through links. "
            "Remove the link, or choose another --out"
        )


def refuse_dangling(path: Path) -> None:
    """A folder of results may be reached by a link, but not by one whose target does not exist."""
    if path.is_symlink() and not path.exists():
        refuse_link(path)


def refuse_links_in(folder: Path, skipped: tuple[str, ...] = ()) -> None:
    """Neither the work folder nor anything in it may be a symbolic link. skipped: names of subfolders whose contents
    belong to other programs."""
    refuse_link(folder)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            refuse_link(Path(parent, name))
        for name in files:
            if not stat.S_ISREG(os.lstat(Path(parent, name)).st_mode):  # opening a FIFO would wait forever
                raise SurgeryError(
                    f"{Path(parent, name)} is no regular file; surgery works with regular files. Remove it"
                )
        folders[:] = [name for name in folders if name not in skipped]


def refuse_unknown_files(folder: Path, known: Iterable[str], kind: type[SurgeryError] = SurgeryError) -> None:
    """Neither files nor folders may lie in a work folder but those that the command itself writes: all of it is delivered.
    known: their paths in the folder, with the wildcards of fnmatch in each part; `name/**` is all below a folder. kind: of the
    error."""
    patterns = [pattern.split("/") for pattern in known]
    for parent, folders, files in os.walk(folder):
        for name in sorted(files):
            parts = Path(parent, name).relative_to(folder).parts
            if not any(_matches(parts, pattern) for pattern in patterns) and not name.startswith(".nfs"):
                raise _unknown_error(Path(parent, name), kind)
        for name in sorted(folders):
            parts = Path(parent, name).relative_to(folder).parts
            if not any(
                (len(parts) < len(pattern) and _begins(parts, pattern))
                or (_matches(parts, pattern) and pattern[-1] == "**")
                for pattern in patterns
            ):
                raise _unknown_error(Path(parent, name), kind)


def _unknown_error(path: Path, kind: type[SurgeryError]) -> SurgeryError:
    return kind(f"{path} was not written by this command, and would be delivered with its result. Remove it")


def _matches(parts: tuple[str, ...], pattern: list[str]) -> bool:
    if pattern[-1] == "**":
        return len(parts) >= len(pattern) and _begins(parts, pattern[:-1])
    return len(parts) == len(pattern) and _begins(parts, pattern)


def _begins(parts: tuple[str, ...], pattern: list[str]) -> bool:
    return all(
        fnmatch(part.removesuffix(".tmp"), wanted) or fnmatch(part, wanted) for part, wanted in zip(parts, pattern)
    )


def size_text(count: float) -> str:
    """A number of bytes in the unit that suits it: 512 bytes, 12.3 kB, 4.5 MB, 6.7 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.99995 * size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} bytes"


@contextmanager
def atomic_write(path: Path, mode: str = "wb") -> Iterator[Any]:
    """A file to be written: beside its place, flushed to disk, then renamed; gone where anything fails."""
    created = mode.replace("w", "x")  # never through a link, or into a file that lay there before
    with atomic_path(path) as partial, open(partial, created, encoding=None if "b" in mode else "utf-8") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path for a library to write a file to, which then takes its place; gone where anything fails."""
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.unlink(missing_ok=True)
        yield partial
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_json(path: Path, data: Any) -> None:
    """Whole or absent."""
    with atomic_write(path, "w") as file:
        json.dump(data, file, indent=2)
        file.write("\n")


@contextmanager
def explain_disk_errors(place: Path, again: str = "run the same command again") -> Iterator[None]:
    """Around all that writes to `place`: a full disk, a read-only one and missing rights as SurgeryError, with the sizes.
    again: what to do once there is room."""
    try:
        yield
    except SurgeryError:
        raise
    except Exception as error:
        number = os_error_number(error)
        if number not in (*DISK_FULL_ERRNOS, *ACCESS_DENIED_ERRNOS):
            raise
        where = getattr(error, "filename", None)
        raise Interrupted(_disk_error_message(number, Path(os.fsdecode(where)) if where else place, again)) from error


def os_error_number(error: BaseException) -> int | None:
    """The system's number of what went wrong, where it was the system."""
    if isinstance(error, OSError):
        return error.errno
    found = OS_ERROR_NUMBER.search(str(error))
    return int(found[1] or found[2]) if found else None


def is_disk_error(error: BaseException) -> bool:
    """Whether it is the disk that refuses, and not what was read or asked."""
    return os_error_number(error) in (*DISK_FULL_ERRNOS, *ACCESS_DENIED_ERRNOS)


def _disk_error_message(number: int, path: Path, again: str) -> str:
    if number not in DISK_FULL_ERRNOS:
        return f"{path} cannot be written: {os.strerror(number)}; choose an --out that you may write to"
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    usage = shutil.disk_usage(there)
    return (
        f"{path} cannot be written: {os.strerror(number)}; its disk has {size_text(usage.free)} free of "
        f"{size_text(usage.total)}. Free some, then {again}: what is done is kept, nothing half-written is left"
    )


# -- JSON --------------------------------------------------------------------------------------------
def read_json(path: Path) -> Any:
    """What lies there; SurgeryError where that is not JSON."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SurgeryError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise SurgeryError(f"{path} is not JSON") from None


def parse_json(text: str, **hooks: Any) -> Any:
    """JSON; ValueError where it is none, is nested too deeply, or holds half a character."""
    try:
        data = json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\u" in text:  # or none can be there
        check_surrogates(data)
    return data


def check_surrogates(data: Any) -> None:
    """ValueError for half of a pair of UTF-16, which a JSON or YAML escape can write and no file or terminal can hold."""
    found = [data]
    while found:
        value = found.pop()
        if isinstance(value, str):
            value.encode()
        elif isinstance(value, dict):
            found += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            found += value


def checksum(data: Any) -> int:
    """Of JSON, before it is written and after it was read alike."""
    return zlib.crc32(json.dumps(data).encode())


LOCK_NAME = "lock"
LOCK_BUSY_ERRNOS = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


def no_link(path: str, flags: int) -> int:
    """An opener for `open` that refuses a symbolic link: what it points to would be written."""
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise SurgeryError(f"{path} is a symbolic link; surgery does not write through links. Remove it") from None


def acquire_lock(folder: Path, what: str, name: str = LOCK_NAME) -> TextIO:
    """An open file: until it is closed, nobody else has the folder's lock. what: who says so to others."""
    path = folder / name
    try:
        file = open(path, "a+", encoding="utf-8", opener=no_link)  # noqa: SIM115
    except FileNotFoundError:  # finished, and moved to its place
        raise _busy_error(folder, what) from None
    if not _try_lock(file, path):
        file.seek(0)
        holder, _, where = file.read(200).partition(", ")
        file.close()
        raise _busy_error(folder, holder or what, f" ({where})" if where else "")
    file.truncate(0)
    file.write(f"{what}, process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


@contextmanager
def exclusive_lock(folder: Path, what: str, name: str = LOCK_NAME) -> Iterator[None]:
    """Nobody else meanwhile; the file goes at the end."""
    file = acquire_lock(folder, what, name)
    try:
        yield
    finally:
        (folder / name).unlink(missing_ok=True)
        file.close()


def _try_lock(file: TextIO, path: Path) -> bool:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # no such locks on this system
        return True
    except OSError as error:
        return error.errno not in LOCK_BUSY_ERRNOS  # else this file system has none
    try:
        return os.fstat(file.fileno()).st_ino == os.stat(path).st_ino
    except OSError:  # removed by one that finished between the two lines above
        return False


def _busy_error(folder: Path, what: str, where: str = "") -> SurgeryError:
    return SurgeryError(f"another {what} is writing into {folder}{where}; wait for it, or choose another --out")
