"""Warnings from a checkpoint's own report: the scored text is its calibration or training text, or the model that it is
compared with is not the one that it was made from.

A report may be anyone's words: paths in it are compared as names and never opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from surgery.checkpoint.source import open_converted_checkpoint
from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME, read_json
from surgery.eval.model import OpenedModel

MAX_REPORT_BYTES = 200_000_000
MAX_NAME = 200  # characters of a name that are shown


def fitted_text_warnings(opened: list[OpenedModel], text: str | None) -> list[str]:
    """Return a warning for each model that was calibrated or trained on the scored text.

    A copy under another name is not found.
    """
    if text is None or not os.path.exists(text):
        return []
    scored = os.path.realpath(text)
    return [
        f"{one.name} was {use} on {text}, so figures on this text flatter it. Give other text of the same kind with "
        "--text"
        for one in opened
        for use, path in _fitted_texts(one)
        if os.path.realpath(path) == scored
    ]


def other_original_warning(base: OpenedModel, one: OpenedModel) -> str | None:
    """Return a warning if the report of `one` says that it was made from another model than `base`, else None."""
    source = _entry(_read_report(one), "source")
    name, fingerprint = _entry(source, "name"), _entry(source, "fingerprint")
    if base.live is not None or not (isinstance(name, str) and isinstance(fingerprint, str)):
        return None
    if base.fingerprint == one.fingerprint or open_converted_checkpoint(base.name).fingerprint() == fingerprint:
        return None
    return (
        f"the report of {one.name} names {name[:MAX_NAME]!r} as its original, and {base.name} has other weights or another "
        "config: the agreement is with another model. Give the original with --compare"
    )


def _read_report(one: OpenedModel) -> Any:
    """Return the report of a checkpoint; None without one that can be read."""
    report_path = one.folder / REPORT_NAME
    try:
        if one.live is not None or not report_path.is_file() or report_path.stat().st_size > MAX_REPORT_BYTES:
            return None
        return read_json(report_path)
    except (OSError, SurgeryError):
        return None


def _fitted_texts(one: OpenedModel) -> Iterator[tuple[str, str]]:
    """Yield ("calibrated" or "trained", path) of the texts in the model's report, as far as it is well formed."""
    report = _read_report(one)
    calibration = _entry(report, "recipe", "calibration")
    texts = [_entry(text, "path") for text in calibration] if isinstance(calibration, list) else [calibration]
    runs = _entry(report, "training")
    sources = [_entry(run, "recipe", "data", "sources") for run in runs] if isinstance(runs, list) else []
    trained = [_entry(source, "path") for listed in sources if isinstance(listed, list) for source in listed]
    for use, path in [*(("calibrated", path) for path in texts), *(("trained", path) for path in trained)]:
        if isinstance(path, str) and path and "\0" not in path:
            yield use, path


def _entry(value: Any, *keys: str) -> Any:
    """Return the entry of nested mappings; None where there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
