"""Ranges of layers as recipes write them: "2:-2", ":8", "3"."""

from __future__ import annotations

import re
from typing import Any

from surgery.errors import SurgeryError


def slice_text(text: Any) -> Any:
    # YAML takes an unquoted 2:4 for two minutes and four seconds: what is not text was not meant so.
    if text is not None and not (
        isinstance(text, str) and re.fullmatch(r"-?\d+|(-?\d+)?:(-?\d+)?", text.strip(), re.ASCII)
    ):
        raise SurgeryError(f'layers: {text!r} is not a range; write "2:-2", ":8" or "3", in quotes')
    return text


def layer_selected(text: str, index: int, count: int) -> bool:
    """Whether layer `index` of `count` lies in a range such as "2:-2"."""
    if ":" not in text:
        return int(text) in (index, index - count)
    start, stop = (int(part) if part.strip() else None for part in text.split(":"))
    return index in range(count)[start:stop]
