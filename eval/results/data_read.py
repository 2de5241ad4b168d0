"""Record which data a suite reads, by content, and check a stored result against it before it is used again.

with record_reads() as reads: suite.run(..)   {"mirror:baber/piqa": SHA-256, "hub:org/name": commit, "package:lm_eval": version}
is_unchanged(reads, options)                  whether all of it is still the same
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.core.digests import content_digest

if TYPE_CHECKING:
    from surgery.eval.suite import EvalOptions

UNKNOWN = "unknown"
PACKAGES = ("surgery", "torch", "transformers", "tokenizers", "triton", "datasets", "lm_eval", "wonderwords")
FETCHED_LINE = re.compile(r"^Fetched by `surgery fetch-eval-data` from \S+ at ([0-9a-f]{40})\.$", re.MULTILINE)
DATASET_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_recordings: list[dict[str, str]] = []


@contextmanager
def record_reads() -> Iterator[dict[str, str]]:
    """Collect what `note_read` reports inside the context."""
    reads: dict[str, str] = {}
    _recordings.append(reads)
    try:
        yield reads
    finally:
        _recordings.remove(reads)


def note_read(kind: str, name: str, root: Path | None = None) -> None:
    """Record a read. kind: mirror (a data set below `root`), records (of a task, in the file `root`), file, hub (a data
    set of the Hub) or package.
    """
    if _recordings:
        _recordings[-1][f"{kind}:{name}"] = current_digest(kind, name, root)


def current_reads() -> dict[str, str]:
    """Return what was recorded so far in the innermost `record_reads`; empty outside."""
    return dict(_recordings[-1]) if _recordings else {}


def is_unchanged(reads: Mapping[str, str], options: EvalOptions) -> bool:
    """Return whether a stored result read the data that would be read today; False if unknown.

    The result may have been written by someone else: only the named text, data sets by name and lm-eval are checked,
    never a path that the file chooses.
    """
    for read, digest in reads.items():
        kind, _, name = read.partition(":")
        records = options.find_records(name) if kind == "records" else None
        known = {
            "mirror": DATASET_NAME.fullmatch(name),
            "hub": DATASET_NAME.fullmatch(name),
            "file": name == options.text,
            "records": records is not None,
        }
        try:
            if not (known.get(kind) or read == "package:lm_eval"):
                return False
            if digest == UNKNOWN or current_digest(kind, name, records or options.data_root) != digest:
                return False
        except (OSError, ValueError):
            return False
    return True


def describe_data(reads: Mapping[str, str], root: Path | None) -> dict[str, dict[str, Any]]:
    """Return the data of a result: name -> digest, and commit where known."""
    described: dict[str, dict[str, Any]] = {}
    for read, digest in reads.items():
        kind, _, name = read.partition(":")
        if kind == "hub":
            described[name] = {"commit": digest}
        elif kind != "package":
            described[name] = {"sha256": digest} | (
                {"commit": mirror_commit(root / name)} if kind == "mirror" and root else {}
            )
    return described


def list_reads(reads: Mapping[str, str]) -> list[dict[str, str]]:
    """Return what was read as {kind, name, digest}, for results.json; names of files are values of their own, which a
    push shortens.
    """
    entries = []
    for read, digest in reads.items():
        kind, _, name = read.partition(":")
        entries.append({"kind": kind, "name": name, "digest": digest})
    return entries


def mirror_commit(folder: Path) -> str | None:
    """Return the Hub commit that a mirrored data set's README names, or None."""
    try:
        match = FETCHED_LINE.search((folder / "README.md").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return match[1] if match else None


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that scores depend on."""
    import platform

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        if (version := package_version(package)) is not None:
            versions[package] = version
    return versions


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    if package == "surgery":
        from surgery.core.version import __version__

        return __version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def current_digest(kind: str, name: str, root: Path | None) -> str:
    """Return what `note_read` records of a read: a SHA-256, version or commit; UNKNOWN if there is none.

    See there for `kind`.
    """
    if kind == "mirror":
        return content_digest((root or Path()) / name)
    if kind == "records":
        return content_digest(root or Path())
    if kind == "file":
        return content_digest(Path(name))
    if kind == "package":
        return package_version(name) or UNKNOWN
    return _hub_commit(name) if kind == "hub" else UNKNOWN


def _hub_commit(name: str) -> str:
    """Return the newest commit of a data set of the Hub; without network, that of the local cache."""
    from huggingface_hub import HfApi, constants

    try:
        return HfApi().dataset_info(name, timeout=10).sha or UNKNOWN
    except Exception:  # no network, no such data set, no permission: many exception types
        ref = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}" / "refs" / "main"
    try:
        return ref.read_text(encoding="utf-8").strip() or UNKNOWN
    except OSError:
        return UNKNOWN
