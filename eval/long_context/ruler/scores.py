"""RULER's scores: what a prediction says, in any case, anywhere. 0 to 1; shown times 100."""

from __future__ import annotations

import re
from collections.abc import Sequence

CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f]")


def clean_prediction(prediction: str) -> str:
    return CONTROL_CHARACTERS.sub("\n", prediction.strip()).strip()


def score_answers(prediction: str, answers: Sequence[str], rule: str) -> float:
    """rule all: the share of the answers that are said; any: full marks for one of them (questions with aliases)."""
    text = clean_prediction(prediction).lower()
    found = [answer.lower() in text for answer in answers]
    return float(any(found)) if rule == "any" else sum(found) / len(found)
