"""One writer at a time: a lock that the system lets go of when its process ends, however it ends.

On NFS Linux makes it a lock of the server's, so that machines exclude each other too; where a file system has none,
nobody is kept out.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from surgery.errors import SurgeryError

LOCK = "lock"
BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


def no_link(path: str, flags: int) -> int:
    """An opener for `open` that refuses a symbolic link: what it points to would be written."""
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise SurgeryError(f"{path} is a symbolic link; surgery does not write through links. Remove it") from None


def locked(folder: Path, what: str, name: str = LOCK) -> TextIO:
    """An open file: until it is closed, nobody else has the folder's lock. what: who says so to others."""
    path = folder / name
    try:
        file = open(path, "a+", encoding="utf-8", opener=no_link)  # noqa: SIM115
    except FileNotFoundError:  # finished, and moved to its place
        raise _busy(folder, what) from None
    if not _taken(file, path):
        file.seek(0)
        holder, _, where = file.read(200).partition(", ")
        file.close()
        raise _busy(folder, holder or what, f" ({where})" if where else "")
    file.truncate(0)
    file.write(f"{what}, process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


@contextmanager
def alone(folder: Path, what: str, name: str = LOCK) -> Iterator[None]:
    """Nobody else meanwhile; the file goes at the end."""
    file = locked(folder, what, name)
    try:
        yield
    finally:
        (folder / name).unlink(missing_ok=True)
        file.close()


def _taken(file: TextIO, path: Path) -> bool:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # no such locks on this system
        return True
    except OSError as error:
        return error.errno not in BUSY  # else this file system has none
    try:
        return os.fstat(file.fileno()).st_ino == os.stat(path).st_ino
    except OSError:  # removed by one that finished between the two lines above
        return False


def _busy(folder: Path, what: str, where: str = "") -> SurgeryError:
    return SurgeryError(f"another {what} is writing into {folder}{where}; wait for it, or choose another --out")
