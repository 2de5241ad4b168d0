"""Limits of a search: `60%` of the original, or a number with a unit."""

from __future__ import annotations

import re
from dataclasses import dataclass

from surgery.core.errors import SurgeryError
from surgery.publish.front import COST_LABELS

SIZES = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "kb": 10**3, "mb": 10**6, "gb": 10**9}
SIZES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}
TIMES = {"": 10**6, "ms": 10**6, "s": 10**9, "us": 10**3}  # in nanoseconds
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
MOST = 2**62 - 1  # largest limit in whole units


@dataclass(frozen=True)
class Measure:
    """What a limit limits. option: of the command line. label: in tables. units: that a number may have."""

    cost: str
    option: str
    label: str
    units: dict[str, int]


MEASURES = {
    "parameters": Measure("parameters", "--max-parameters", COST_LABELS["parameters"], COUNTS),
    "bytes": Measure("bytes", "--max-bytes", COST_LABELS["bytes"], SIZES),
    "cache": Measure("cache", "--max-cache-bytes", COST_LABELS["cache"], SIZES),
    "decode": Measure("decode", "--max-decode-ms", COST_LABELS["decode"], TIMES),
    "prefill": Measure("prefill", "--max-prefill-ms", COST_LABELS["prefill"], TIMES),
}


def parse_limit(measure: Measure, text: str, original: float) -> int:
    """Return a limit in whole units. text: such as 60%, 800M or 1.5GB. original: the value of the unconverted model.

    Raises SurgeryError for anything else, and for a limit of 0 or above MOST.
    """
    units = "|".join(sorted((unit for unit in measure.units if unit), key=len, reverse=True))
    match = re.fullmatch(rf"(\d{{1,15}}(?:\.\d{{1,15}})?)\s*(%|{units})?", text.strip(), re.ASCII | re.IGNORECASE)
    if match is None:
        examples = {id(COUNTS): "60% or 80M", id(TIMES): "60% or 8.5"}.get(id(measure.units), "60%, 80MB or 1.5GiB")
        raise SurgeryError(
            f"{measure.option} must be a share of the original or a number, such as {examples} (got {text!r})"
        )
    number, unit = float(match[1]), (match[2] or "").lower()
    limit = int(number / 100 * original) if unit == "%" else int(number * measure.units[unit])
    if limit < 1:
        raise SurgeryError(f"{measure.option} must be above 0 (got {text!r})")
    if limit > MOST:
        raise SurgeryError(f"{measure.option} is larger than any model (got {text!r}); leave it out for no limit")
    return limit


def parse_bits(text: str | None) -> tuple[int, ...]:
    """Return the numbers of bits of a list such as 8,4. Raises SurgeryError for anything but 8 and 4."""
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    if wrong := [word for word in words if word not in ("8", "4", "16")]:
        raise SurgeryError(f"--bits must be 8, 4 or both, such as 8,4 (got {wrong[0]!r})")
    return tuple(dict.fromkeys(int(word) for word in words if word != "16"))
