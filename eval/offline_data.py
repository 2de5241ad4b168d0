"""Read data sets from a local mirror (`--data-root DIR`) without network access.

    DIR/org/name/README.md      YAML header: configs: [{config_name, data_files: [{split, path}]}]
    DIR/org/name/<config>/<split>.jsonl

`datasets.load_dataset("org/name")` reads this layout if a folder of that name lies in the working directory, so
lm-eval's own tasks find it unchanged. `surgery fetch-eval-data DIR` builds a mirror. Every folder is read through an
Arrow cache keyed by the folder's content: the cache of `datasets` alone confuses two mirrors with equal README headers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from surgery.core.digests import arrow_cache, check_no_outside_files
from surgery.core.errors import SurgeryError
from surgery.core.hub_errors import explain_hub_error, first_line
from surgery.eval.results.data_read import note_read

# Types of columns that `datasets` cannot infer: answers are numbers in some files and texts in others. [string]: a list
# of texts.
COLUMNS = {
    "xinrongzhang2022/InfiniteBench": {
        "id": "int64", "context": "string", "input": "string", "answer": "[string]", "options": "[string]",
    },
}  # fmt: skip
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def load_rows(root: Path | None, suite: str, path: str, config: str | None, split: str) -> Any:
    """Load a split of a data set from the mirror `root`, or without one from Hugging Face's cache.

    Raises SurgeryError if the data set is missing or cannot be read.
    """
    check_datasets(root, suite, [path])
    folder = Path(root) / path if root is not None else Path(path)
    try:
        rows = load_folder_rows(folder, config, split) if folder.is_dir() else _load_hub_rows(path, config, split)
    except SurgeryError:
        raise
    except Exception as error:
        raise explain_read_error(error, root, suite, f"{folder}: {config or 'default'}, {split}", path) from None
    note_datasets(root, [path])
    return rows


def explain_read_error(
    error: Exception, root: Path | None, suite: str, what: str, path: str, hint: str = ""
) -> SurgeryError:
    """Return the error for a data set that could not be read, with the command that fetches it.

    what: the part that was read of `path`. hint: a last sentence of the error.
    """
    fetch = f"surgery fetch-eval-data {root or 'DATA'} --suite {suite}"
    instead = f"run {fetch} where there is a network and give --data-root {root or 'DATA'}"
    reason = explain_hub_error(error, path, instead, kinds=("a mirrored data set (--data-root)", "a Hub data set"))
    if reason is not None:
        return SurgeryError(f"{reason}.{hint}" if hint else reason)
    return SurgeryError(
        f"{what} could not be read ({type(error).__name__}: {first_line(error)}). Fetch it again: {fetch}"
    )


def load_folder_rows(folder: Path, config: str | None, split: str) -> Any:
    """Load a split of one data set's folder."""
    from datasets import load_dataset

    with hide_progress_bars(), arrow_cache([folder]) as cache:
        return load_dataset(str(folder), config, split=split, cache_dir=str(cache), trust_remote_code=False)


def _load_hub_rows(path: str, config: str | None, split: str) -> Any:
    from datasets import load_dataset

    with hide_progress_bars():
        return load_dataset(path, config, split=split, trust_remote_code=False)


def column_types(path: str) -> Any:
    """Return the types of a data set's columns as `datasets.Features`; None if they are inferred from its files."""
    from datasets import Features, List, Value

    if path not in COLUMNS:
        return None
    return Features(
        {
            name: List(Value(kind.strip("[]"))) if kind.startswith("[") else Value(kind)
            for name, kind in COLUMNS[path].items()
        }
    )


def note_datasets(root: Path | None, paths: Sequence[str]) -> None:
    """Record which data sets a suite reads (eval/results/data_read.py)."""
    for path in paths:
        local = ((root or Path()) / path).is_dir()
        note_read("mirror" if local else "hub", path, root)


def check_datasets(root: Path | None, suite: str, paths: list[str], hint: str = "") -> None:
    """Raise SurgeryError that names every missing data set, before a model is loaded. hint: a last sentence of the
    error.
    """
    if root is None:
        if any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in OFFLINE_VARIABLES):
            return  # data sets come from Hugging Face's cache
        raise SurgeryError(
            f"--suite {suite} reads {', '.join(paths[:4])}{' ..' if len(paths) > 4 else ''} and downloads nothing by "
            "itself. "
            f"Run surgery fetch-eval-data DATA --suite {suite} once, then give --data-root DATA (or set "
            "HF_HUB_OFFLINE=1 to "
            f"read Hugging Face's cache).{hint}"
        )
    missing = [path for path in paths if not (Path(root) / path).is_dir()]
    if missing:
        raise SurgeryError(
            f"--data-root {root} has no {', '.join(missing)}. Run surgery fetch-eval-data {root} --suite {suite}.{hint}"
        )
    for path in paths:
        check_no_outside_files(Path(root) / path)


@contextlib.contextmanager
def use_mirror(root: Path | None, paths: Sequence[str], files: Sequence[Path] = ()) -> Iterator[None]:
    """Make the mirror the working directory and use an Arrow cache keyed by its content, while lm-eval opens data sets.

    Args:
        root: the mirror; without mirror and local files, Hugging Face's cache is read.
        paths: data sets that will be read.
        files: local files that will be read.

    If neither paths nor files are known (a task that loads data by its own code), the cache is temporary and is deleted
    when the process ends.
    """
    import datasets

    places = [folder for path in paths if (folder := Path(root or "", path).absolute()).is_dir()]
    places += [file.absolute() for file in files]
    if not places and root is None:
        yield
        return
    directory, before = os.getcwd(), datasets.config.HF_DATASETS_CACHE
    with arrow_cache(places) if places else contextlib.nullcontext(_temporary_cache()) as cache:
        try:
            os.chdir(root or directory)
            datasets.config.HF_DATASETS_CACHE = cache  # set globally: lm-eval does not pass cache_dir on
            yield
        finally:
            datasets.config.HF_DATASETS_CACHE = before
            os.chdir(directory)


def _temporary_cache() -> Path:
    folder = tempfile.mkdtemp(prefix="surgery-data-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@contextlib.contextmanager
def use_empty_folder() -> Iterator[None]:
    """Use an empty working directory: `datasets` prefers a local folder org/name to the Hub's data set of that name."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        try:
            yield
        finally:
            os.chdir(before)


@contextlib.contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Disable the progress bars of `datasets`, a dozen per suite."""
    import datasets

    silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not silent:
            datasets.enable_progress_bars()
