"""RULER's scores: whether the output contains the answers, ignoring case. 0 to 1, displayed times 100."""

from __future__ import annotations

import re
from collections.abc import Sequence

CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f]")


def clean_prediction(prediction: str) -> str:
    """Return the prediction with control characters as line breaks, without white space at its ends."""
    return CONTROL_CHARACTERS.sub("\n", prediction.strip()).strip()


def score_answers(prediction: str, answers: Sequence[str], rule: str) -> float:
    """Return the share of the answers in the output (rule "all"), or 1 if it contains one of them (rule "any")."""
    text = clean_prediction(prediction).lower()
    is_present = [answer.lower() in text for answer in answers]
    return float(any(is_present)) if rule == "any" else sum(is_present) / len(is_present)
