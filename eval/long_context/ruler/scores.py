"""RULER's scores: what a prediction says, in any case, anywhere. 0 to 1; shown times 100."""

from __future__ import annotations

import re
from collections.abc import Sequence

CONTROL = re.compile(r"[\x00-\x1f]")


def cleaned(prediction: str) -> str:
    return CONTROL.sub("\n", prediction.strip()).strip()


def said(prediction: str, answers: Sequence[str], rule: str) -> float:
    """rule all: the share of the answers that are said; any: full marks for one of them (questions with aliases)."""
    text = cleaned(prediction).lower()
    found = [answer.lower() in text for answer in answers]
    return float(any(found)) if rule == "any" else sum(found) / len(found)
