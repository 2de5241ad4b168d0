"""Where data sets come from: a local mirror (`--data-root DIR`), never the network.

    DIR/org/name/README.md      YAML header: configs: [{config_name, data_files: [{split, path}]}]
    DIR/org/name/<config>/<split>.jsonl

That is what `datasets.load_dataset("org/name")` reads where a folder of that name lies in the working directory, so lm-eval's
own tasks find it without a change. `surgery fetch-eval-data DIR` builds one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surgery.errors import SurgeryError

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def rows(root: Path | None, suite: str, path: str, config: str | None, split: str) -> Any:
    """A data set's split, as `datasets` gives it."""
    from datasets import load_dataset

    check(root, suite, [path])
    place = str(Path(root) / path) if root is not None else path
    try:
        with without_bars():
            return load_dataset(place, config, split=split, trust_remote_code=False)
    except Exception as error:
        raise SurgeryError(
            f"{place}: {config or 'default'}, {split} could not be read ({type(error).__name__}: {_first_line(error)}); fetch it "
            f"again: surgery fetch-eval-data {root or 'DATA'} --suite {suite}"
        ) from None


def check(root: Path | None, suite: str, paths: list[str]) -> None:
    """Before anything is loaded: all is there, or one message names what is missing."""
    if root is None:
        if any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in OFFLINE):
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


@contextlib.contextmanager
def inside(root: Path | None) -> Iterator[None]:
    """In the mirror's folder while data sets are opened."""
    if root is None:
        yield
        return
    before = os.getcwd()
    os.chdir(root)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
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
