"""SHA-256 digests of file contents, the keys of caches and saved results that depend on files.

A digest is cached under the file's device, inode, size, mtime and ctime (ctime cannot be set back). Digests of large
files are also cached on disk under $XDG_CACHE_HOME/surgery/digests, so that a large model is hashed once. The digest of
a file modified in the last two seconds is not cached: a second write within the resolution of the file system's clock
would go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from surgery.core.errors import SurgeryError

BLOCK = 2**22  # bytes read at a time
LARGE = 2**26  # bytes; digests of files of at least this size are also cached on disk
SETTLED = 2.0  # seconds since the last modification before a digest is cached
THREADS = 4
HEX = re.compile(r"[0-9a-f]{64}")
_known: dict[str, tuple[list[int], str]] = {}  # resolved path -> (signature, digest)


def hash_file(path: str | Path) -> str:
    """Read the whole file and return its SHA-256 as hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits; a file whose digest is known and that has not changed is not read
    again.
    """
    real_path = os.path.realpath(path)
    signature = _signature(real_path)
    cached = _cached_digest(real_path, signature)
    if cached is not None:
        return cached
    began, digest = time.time(), hash_file(real_path)
    if _signature(real_path) == signature and began - max(signature[3:]) / 1e9 > SETTLED:
        _cache_digest(real_path, signature, digest)
    return digest


def files_digest(files: Iterable[tuple[str, Path]]) -> str:
    """Return one SHA-256 over the (name, content) pairs of several files, sorted by name."""
    named = sorted(files)
    with ThreadPoolExecutor(THREADS) as threads:
        digests = list(threads.map(file_digest, [path for _, path in named]))
    entries = [[name, digest] for (name, _), digest in zip(named, digests)]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def files_in(root: Path) -> list[tuple[str, Path]]:
    """Return (relative name, path) of every regular file below a folder, hidden ones excluded; for a file, the file
    itself.
    """
    if not root.is_dir():
        return [(root.name, root)]
    files, seen = [], set()
    for folder, inner, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        inner[:] = [] if real in seen else [name for name in inner if not name.startswith(".")]
        paths = [] if real in seen else [Path(folder, name) for name in names if not name.startswith(".")]
        seen.add(real)
        files += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return files


def content_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, or of the names and contents of all files below a folder."""
    return files_digest(files_in(path)) if path.is_dir() else file_digest(path)


def check_no_outside_files(folder: Path) -> None:
    """Raise SurgeryError if `datasets` would read files for a folder that its content digest does not cover.

    These are a hidden settings file, links to files outside the folder, and README entries (data_files, data_dir) that
    name hidden files or paths outside the folder.
    """
    from datasets.config import REPOYAML_FILENAME
    from huggingface_hub import DatasetCard

    if (folder / REPOYAML_FILENAME).exists():
        raise SurgeryError(
            f"{folder / REPOYAML_FILENAME} would choose the data files, but surgery reads that choice only from "
            "README.md. Move its configs "
            "to the head of README.md"
        )
    for name, path in _entries(folder):
        if path.is_symlink() and not any(path.resolve().is_relative_to(home) for home in _homes(folder)):
            raise SurgeryError(
                f"{folder}: {name} is a link to {path.resolve()}, outside the data set's folder; put the file itself "
                "there"
            )
    readme = folder / "README.md"
    if not readme.is_file():
        return
    try:  # the parser that `datasets` uses
        configs = DatasetCard.load(readme, ignore_metadata_errors=True).data.to_dict().get("configs")
    except Exception as error:  # errors of many kinds: YAML, encoding, types
        reason = " ".join(str(error).split())[:200]
        raise SurgeryError(f"the head of {readme} cannot be read ({type(error).__name__}: {reason})") from None
    for config in configs if isinstance(configs, list) else [configs]:
        for key in ("data_files", "data_dir") if isinstance(config, dict) else ():
            for value in _texts(config.get(key)):
                if not _is_inside(value):
                    raise SurgeryError(
                        f"{readme}: {key} names {value!r}; data files must be relative paths inside the data set's "
                        "folder, not "
                        "hidden, absolute, above it, or URLs. Put the file in the folder and name it there"
                    )


def _texts(value: Any) -> Iterator[str]:
    """Yield every path in a data_files entry: a string, a list, split -> path, or [{split, path}]."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key != "split":
                yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _is_inside(path: str) -> bool:
    parts = path.replace("\\", "/").split("/")
    hidden = any(name.startswith(".") and name != "." for name in parts)  # ".." too
    return not (hidden or os.path.isabs(path) or path.startswith(("~", "\\")) or ":" in path)


def _entries(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (relative name, path) of all files and folders below that are not hidden; links to folders are not
    followed.
    """
    for here, inner, names in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        for name in (*inner, *names):
            if not name.startswith("."):
                path = Path(here, name)
                yield path.relative_to(folder).as_posix(), path


def _homes(folder: Path) -> list[Path]:
    """Return the folder, and the blob folder to which a snapshot in the Hub's cache links."""
    home = folder.resolve()
    return [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]


@contextmanager
def arrow_cache(places: Sequence[Path]) -> Iterator[Path]:
    """Yield a cache folder for `datasets.load_dataset` whose name depends on the contents of local files or folders.

    `datasets` (5.2) keys its Arrow files by the README header for a folder, and by path and mtime for files, so on its
    own it can return rows of other files. Raises SurgeryError, and removes the cache, if the files change while they
    are read.
    """
    import datasets

    for path in places:
        if path.is_dir():
            check_no_outside_files(path)
    digest = _digest_of(places)
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "surgery" / digest[:32]
    yield cache
    if _digest_of(places) != digest:
        shutil.rmtree(cache, ignore_errors=True)
        raise SurgeryError(f"{', '.join(map(str, places))} changed while it was read; run the same command again")


def _digest_of(places: Sequence[Path]) -> str:
    return files_digest((f"{number}/{name}", path) for number, p in enumerate(places) for name, path in files_in(p))


def _signature(path: str) -> list[int]:
    """Device, inode, size, mtime and ctime (nanoseconds)."""
    stat = os.stat(path)
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


# -- cache of digests ---------------------------------------------------------------------
def _cache_file(path: str) -> Path:
    """Return the path of the file that stores the digest of the file at `path`."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    name = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return Path(home, "surgery", "digests", f"{name}.json")


def _cached_digest(path: str, signature: list[int]) -> str | None:
    """Return the cached digest if the file's signature is unchanged, else None."""
    entry = _known.get(path)
    if entry is None and signature[2] >= LARGE:
        with suppress(OSError, ValueError, TypeError, RecursionError):
            cached = json.loads(_cache_file(path).read_text(encoding="utf-8"))
            if isinstance(cached, dict) and HEX.fullmatch(sha256 := str(cached.get("sha256"))):
                entry = list(cached.get("signature") or ()), sha256
    return entry[1] if entry is not None and entry[0] == signature else None


def _cache_digest(path: str, signature: list[int], digest: str) -> None:
    """Cache a digest, for large files also on disk. Disk errors are ignored: the file is only hashed again."""
    _known[path] = signature, digest
    if signature[2] < LARGE:
        return
    note = _cache_file(path)
    partial = note.with_name(f"{note.name}.{os.getpid()}")
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"signature": signature, "sha256": digest}), encoding="utf-8")
        os.replace(partial, note)
