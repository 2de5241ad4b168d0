"""Where data sets come from: a local mirror (`--data-root DIR`), never the network.

    DIR/org/name/README.md      YAML header: configs: [{config_name, data_files: [{split, path}]}]
    DIR/org/name/<config>/<split>.jsonl

That is what `datasets.load_dataset("org/name")` reads where a folder of that name lies in the working directory, so lm-eval's
own tasks find it without a change. `surgery fetch-eval-data DIR` builds one. Every folder is read through an Arrow cache that
belongs to its contents: `datasets` by itself does not tell two mirrors with equal README headers apart.
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

from surgery.core.digests import arrow_cache, refuse_outside_files
from surgery.core.errors import SurgeryError
from surgery.eval.results.data_read import note_read

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def load_rows(root: Path | None, suite: str, path: str, config: str | None, split: str) -> Any:
    """A data set's split, as `datasets` gives it."""
    check_datasets(root, suite, [path])
    place = Path(root) / path if root is not None else Path(path)
    try:
        found = load_folder_rows(place, config, split) if place.is_dir() else _load_hub_rows(path, config, split)
    except SurgeryError:
        raise
    except Exception as error:
        raise SurgeryError(
            f"{place}: {config or 'default'}, {split} could not be read ({type(error).__name__}: {_first_line(error)}); fetch it "
            f"again: surgery fetch-eval-data {root or 'DATA'} --suite {suite}"
        ) from None
    note_datasets(root, [path])
    return found


def load_folder_rows(place: Path, config: str | None, split: str) -> Any:
    """A split of one data set's folder."""
    from datasets import load_dataset

    with hide_progress_bars(), arrow_cache([place]) as cache:
        return load_dataset(str(place), config, split=split, cache_dir=str(cache), trust_remote_code=False)


def _load_hub_rows(path: str, config: str | None, split: str) -> Any:
    from datasets import load_dataset

    with hide_progress_bars():
        return load_dataset(path, config, split=split, trust_remote_code=False)


def note_datasets(root: Path | None, paths: Sequence[str]) -> None:
    """Note which data sets a suite reads."""
    for path in paths:
        local = ((root or Path()) / path).is_dir()
        note_read("mirror" if local else "hub", path, root)


def check_datasets(root: Path | None, suite: str, paths: list[str]) -> None:
    """Before anything is loaded: all is there, or one message names what is missing."""
    if root is None:
        if any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in OFFLINE_VARIABLES):
            return  # what Hugging Face's cache holds
        raise SurgeryError(
            f"--suite {suite} reads {', '.join(paths[:4])}{' ..' if len(paths) > 4 else ''} and downloads nothing by itself. "
            f"Fetch once: surgery fetch-eval-data DATA --suite {suite}; then --data-root DATA (or set HF_HUB_OFFLINE=1 to "
            "use what Hugging Face's cache holds)"
        )
    missing = [path for path in paths if not (Path(root) / path).is_dir()]
    if missing:
        raise SurgeryError(
            f"--data-root {root} has no {', '.join(missing)}: surgery fetch-eval-data {root} --suite {suite}"
        )
    for path in paths:
        refuse_outside_files(Path(root) / path)


@contextlib.contextmanager
def use_mirror(root: Path | None, paths: Sequence[str], files: Sequence[Path] = ()) -> Iterator[None]:
    """The mirror as working directory, and an Arrow cache of its contents, while others open data sets.

    paths: data sets that will be read; files: local files that will be read. Where neither is known (a task that opens its data
    by its own code), the cache lasts as long as this process. Without a mirror and local files, what Hugging Face's cache holds
    is read.
    """
    import datasets

    places = [place for path in paths if (place := Path(root or "", path).absolute()).is_dir()]
    places += [file.absolute() for file in files]
    if not places and root is None:
        yield
        return
    directory, before = os.getcwd(), datasets.config.HF_DATASETS_CACHE
    with arrow_cache(places) if places else contextlib.nullcontext(_temporary_cache()) as cache:
        try:
            os.chdir(root or directory)
            datasets.config.HF_DATASETS_CACHE = cache  # a setting: lm-eval passes no cache_dir on
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
    """An empty working directory: `datasets` prefers a folder org/name here to the Hub's data set of that name."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        try:
            yield
        finally:
            os.chdir(before)


@contextlib.contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Those of `datasets`, a dozen for every suite."""
    import datasets

    silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not silent:
            datasets.enable_progress_bars()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
