"""Atomic file writes, locks, JSON parsing, and readable messages for disk errors.

A lock allows one writer at a time; the operating system releases it when its process ends. On NFS, Linux makes it a
server lock, which excludes other machines too. A file system without locks excludes nobody.
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
    """Return the folder in which the output `out` is built before it is renamed to `out`."""
    return out.with_name(out.name + ".partial")


REPORT_NAME = "surgery_report.json"


DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ACCESS_DENIED_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM)
# How Rust libraries (safetensors, tokenizers) print system errors. ("error code: 30" of torch.linalg is a column, not
# an errno.)
OS_ERROR_NUMBER = re.compile(r"\bos error (\d+)|\bOs \{ code: (\d+)")


# -- writing -----------------------------------------------------------------------------------------
def check_not_link(path: Path) -> None:
    """Raise SurgeryError if a path to be written is a symbolic link, through which a write would land elsewhere."""
    if path.is_symlink():
        raise SurgeryError(
            f"{path} is a symbolic link (to {os.readlink(path)}); surgery does not write through links. "
            "Remove the link, or choose another --out"
        )


def check_not_dangling(path: Path) -> None:
    """Raise SurgeryError if a results folder is a symbolic link whose target does not exist."""
    if path.is_symlink() and not path.exists():
        check_not_link(path)


def check_no_links(folder: Path, skipped: tuple[str, ...] = ()) -> None:
    """Raise SurgeryError if a work folder, or anything in it, is a symbolic link.

    skipped: names of subfolders that belong to other programs, which are not searched.
    """
    check_not_link(folder)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            check_not_link(Path(parent, name))
        for name in files:
            if not stat.S_ISREG(os.lstat(Path(parent, name)).st_mode):  # opening a FIFO would wait forever
                raise SurgeryError(
                    f"{Path(parent, name)} is not a regular file; surgery works with regular files. Remove it"
                )
        folders[:] = [name for name in folders if name not in skipped]


def check_no_unknown_files(folder: Path, known: Iterable[str], kind: type[SurgeryError] = SurgeryError) -> None:
    """Raise an error if a work folder holds files or folders that the command does not write, because all of it is
    delivered.

    known: as in `unknown_files`. kind: the class of the error.
    """
    if (path := next(unknown_files(folder, known), None)) is not None:
        raise kind(
            f"{path} was not written by this command, and would be delivered with its result. Remove it if nothing "
            "else needs it, or give another folder"
        )


def unknown_files(folder: Path, known: Iterable[str]) -> Iterator[Path]:
    """Yield the files and folders below a folder that are not known.

    known: paths in the folder. Each part may have the wildcards of fnmatch; `name/**` is everything below a folder.
    """
    patterns = [pattern.split("/") for pattern in known]
    for parent, folders, files in os.walk(folder):
        for name in sorted(files):
            parts = Path(parent, name).relative_to(folder).parts
            if not any(_matches(parts, pattern) for pattern in patterns) and not name.startswith(".nfs"):
                yield Path(parent, name)
        for name in sorted(folders):
            parts = Path(parent, name).relative_to(folder).parts
            if not any(
                (len(parts) < len(pattern) and _begins(parts, pattern))
                or (_matches(parts, pattern) and pattern[-1] == "**")
                for pattern in patterns
            ):
                yield Path(parent, name)


def _matches(parts: tuple[str, ...], pattern: list[str]) -> bool:
    if pattern[-1] == "**":
        return len(parts) >= len(pattern) and _begins(parts, pattern[:-1])
    return len(parts) == len(pattern) and _begins(parts, pattern)


def _begins(parts: tuple[str, ...], pattern: list[str]) -> bool:
    return all(fnmatch(name.removesuffix(".tmp"), glob) or fnmatch(name, glob) for name, glob in zip(parts, pattern))


def size_text(count: float) -> str:
    """Return a number of bytes with a decimal unit: 512 bytes, 12.3 kB, 4.5 MB, 6.7 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.99995 * size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} bytes"


@contextmanager
def atomic_write(path: Path, mode: str = "wb") -> Iterator[Any]:
    """Yield an open file that replaces `path` when the context ends: written beside it, flushed to disk, renamed.

    If an error occurs, the temporary file is removed and `path` is unchanged.
    """
    created = mode.replace("w", "x")  # fails if the file exists, and does not follow links
    with atomic_path(path) as partial, open(partial, created, encoding=None if "b" in mode else "utf-8") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a library to write; the file is renamed to `path` at the end, or removed after an
    error.
    """
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.unlink(missing_ok=True)
        yield partial
        follow_umask(partial)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def follow_umask(*paths: Path) -> None:
    """Give files that only their owner may read the permissions of newly created ones. safetensors (from 0.6 on) and
    other libraries that write through a temporary name leave such files."""
    private = [path for path in paths if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o600]
    for path in private:
        path.chmod(0o666 & ~_umask())


def _umask() -> int:
    """Return the process's umask. Where the system does not show it, it is set for a moment, to the strictest one."""
    with suppress(OSError):
        if match := re.search(
            r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(encoding="ascii", errors="replace"), re.M
        ):
            return int(match[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write_json(path: Path, data: Any) -> None:
    """Write indented JSON atomically."""
    with atomic_write(path, "w") as file:
        json.dump(data, file, indent=2)
        file.write("\n")


@contextmanager
def explain_disk_errors(path: Path, again: str = "run the same command again") -> Iterator[None]:
    """Turn a full disk, a read-only disk or missing permissions into a SurgeryError with free and total size.

    path: the path reported if the error names none. again: what to do after freeing space.
    """
    try:
        yield
    except SurgeryError:
        raise
    except Exception as error:
        number = os_error_number(error)
        if number not in (*DISK_FULL_ERRNOS, *ACCESS_DENIED_ERRNOS):
            raise
        where = getattr(error, "filename", None)
        raise Interrupted(_disk_error_message(number, Path(os.fsdecode(where)) if where else path, again)) from error


def os_error_number(error: BaseException) -> int | None:
    """Return the errno of an operating system error, also of one reported by a Rust library; None for other errors."""
    if isinstance(error, OSError):
        return error.errno
    match = OS_ERROR_NUMBER.search(str(error))
    return int(match[1] or match[2]) if match else None


def is_disk_error(error: BaseException) -> bool:
    """Return whether an error is a full disk, a read-only disk or missing permissions."""
    return os_error_number(error) in (*DISK_FULL_ERRNOS, *ACCESS_DENIED_ERRNOS)


def _disk_error_message(number: int, path: Path, again: str) -> str:
    if number not in DISK_FULL_ERRNOS:
        return f"{path} cannot be written: {os.strerror(number)}; choose an --out that you may write to"
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    usage = shutil.disk_usage(existing)
    return (
        f"{path} cannot be written: {os.strerror(number)}; its disk has {size_text(usage.free)} free of "
        f"{size_text(usage.total)}. Free some space, then {again}. Finished work is kept; no partly written file is "
        "left"
    )


def explain_path_error(error: BaseException, words: Iterable[str]) -> str | None:
    """Return the message of a SurgeryError if an operating system error is about a path that one of `words` names; None
    for others.

    words: of the command line. The error may be about the file beside the path that is renamed to it, or about a folder
    above it.
    """
    where = (
        os.fsdecode(error.filename) if isinstance(error, OSError) and isinstance(error.filename, (str, bytes)) else ""
    )
    if not isinstance(error, OSError) or not where:
        return None
    reasons = {
        errno.EEXIST: "it is a file, and a folder is needed",
        errno.EISDIR: "it is a folder, and a file is needed",
        errno.ENOTDIR: "a part of the path is a file",
        errno.ENOENT: "it does not exist, or cannot be created there",
        errno.ENAMETOOLONG: "the name is too long",
    }
    for word in words:
        for named in {word, word.partition("=")[2]} - {""}:
            named = os.path.normpath(named)
            too_long = (
                error.errno == errno.ENAMETOOLONG and named in where
            )  # also a name that is looked up in a folder of ours
            itself = where in (named, f"{named}.tmp", f"{named}.partial")
            if itself or too_long or named.startswith(f"{where.rstrip('/')}/"):
                shown = named if len(named) <= 200 else f"{named[:200]}[..]"
                reason = reasons.get(error.errno or 0, error.strerror)
                return f"{shown} cannot be used: {reason}. Give another path."
    return None


# -- JSON --------------------------------------------------------------------------------------------
def read_json(path: Path) -> Any:
    """Parse a JSON file. Raise SurgeryError if it cannot be read or is not JSON."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SurgeryError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise SurgeryError(f"{path} is not JSON") from None


def parse_json(text: str, **hooks: Any) -> Any:
    """Parse JSON. Raise ValueError if it is invalid, nested too deeply, or contains a lone surrogate."""
    try:
        data = json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\u" in text:  # only an escape can produce one
        check_surrogates(data)
    return data


def check_surrogates(data: Any) -> None:
    """Raise ValueError for a lone UTF-16 surrogate: JSON and YAML escapes can write one, but no file or terminal can
    store it.
    """
    values = [data]
    while values:
        value = values.pop()
        if isinstance(value, str):
            value.encode()
        elif isinstance(value, dict):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            values += value


def checksum(data: Any) -> int:
    """Return the CRC-32 of data as JSON, equal before writing and after reading."""
    return zlib.crc32(json.dumps(data).encode())


LOCK_NAME = "lock"
LOCK_BUSY_ERRNOS = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


def no_link(path: str, flags: int) -> int:
    """Open a path without following symbolic links (an opener for `open`). Raise SurgeryError for a link."""
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise SurgeryError(f"{path} is a symbolic link; surgery does not write through links. Remove it") from None


def acquire_lock(folder: Path, what: str, name: str = LOCK_NAME) -> TextIO:
    """Lock a folder and return the open lock file; closing it releases the lock.

    what: the kind of work, for the message of the SurgeryError that another process gets.
    """
    path = folder / name
    try:
        file = open(path, "a+", encoding="utf-8", opener=no_link)  # noqa: SIM115
    except FileNotFoundError:  # the other command finished and renamed the folder
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
    """Hold a folder's lock while the context is active, and remove the lock file at the end."""
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
    except ImportError:  # not a POSIX system
        return True
    except OSError as error:
        return error.errno not in LOCK_BUSY_ERRNOS  # otherwise the file system does not support locks
    try:
        return os.fstat(file.fileno()).st_ino == os.stat(path).st_ino
    except OSError:  # removed by a command that finished between the two statements above
        return False


def _busy_error(folder: Path, what: str, where: str = "") -> SurgeryError:
    return SurgeryError(f"another {what} is writing into {folder}{where}; wait for it, or choose another --out")
