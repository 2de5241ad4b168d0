"""Warnings about scored text that a checkpoint's own report names as calibration or training text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME, read_json
from surgery.eval.model import OpenedModel

MAX_REPORT_BYTES = 200_000_000


def fitted_text_warnings(opened: list[OpenedModel], text: str | None) -> list[str]:
    """Return a warning for each model that was calibrated or trained on the scored text.

    Paths in a report may be anyone's words: they are compared with `text` as names and never opened. A copy under
    another name is not found.
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


def _fitted_texts(one: OpenedModel) -> Iterator[tuple[str, str]]:
    """Yield ("calibrated" or "trained", path) of the texts in the model's report, as far as it is well formed."""
    report_path = one.folder / REPORT_NAME
    try:
        if one.live is not None or not report_path.is_file() or report_path.stat().st_size > MAX_REPORT_BYTES:
            return
        report = read_json(report_path)
    except (OSError, SurgeryError):
        return
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
