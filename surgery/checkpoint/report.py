"""What a report says, by type: all that tables, the page and the card read of it. What is read elsewhere as JSON may stand
beside it; whoever edits a report by hand is told which number is none."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surgery.core.errors import SurgeryError

Count = Annotated[int, Field(ge=0, lt=2**62)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)] | None  # None: not measured, or no number
Text = Annotated[str, Field(max_length=10_000)]


class _Said(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class Origin(_Said):
    name: Text
    revision: Text | None = None


class Structure(_Said):
    structure: Text
    rank: Count | Text | None = None
    blocks: list[Count] | Text | None = None
    parts: dict[str, Structure] | None = None


class Module(_Said):
    name: Text
    roles: list[Text]
    structure: Structure
    shape: Annotated[list[Annotated[Count, Field(ge=1)]], Field(min_length=2, max_length=2)] = [1, 1]
    error: Number
    start: Number = None
    sweeps: Number = None
    params_before: Count
    params_after: Count
    macs_before: Count
    macs_after: Count


class Mixer(_Said):
    name: Text
    errors: dict[str, Annotated[float, Field(ge=0, le=1e30)]] = {}


class Tried(_Said):
    converted: Annotated[float, Field(ge=-1e30, le=1e30)]
    unit: Text = ""


class Allocation(_Said):
    kept: Text | None = None
    why: Text | None = None
    uniform: Tried | None = None
    spread: Tried | None = None


class Hybrid(_Said):
    softmax: list[Text]
    kept: Text
    sensitivity: Tried
    every: Tried


class Held(_Said):
    unit: Text
    tokens: Count = 0
    original: Annotated[float, Field(ge=-1e30, le=1e30)]
    converted: Annotated[float, Field(ge=-1e30, le=1e30)]
    difference_se: Number


class Totals(_Said):
    params_before: Count
    params_after: Count
    bytes_before: Count
    bytes_after: Count
    macs_before: Count
    macs_after: Count
    replaced_params_before: Count
    replaced_params_after: Count
    kept: Annotated[float, Field(ge=0, le=1e30)]


class Calibration(_Said):
    tokens: Count


class Time(_Said):
    seconds: dict[str, Annotated[float, Field(ge=0, le=1e30)]]
    layers: dict[str, Annotated[float, Field(ge=0, le=1e30)]]
    device: Text = ""


class Memory(_Said):
    peak_rss: Count | None


class Stage(_Said):
    kind: Text
    tokens: Count


class Score(_Said):
    perplexity: Number


class Healing(_Said):
    stages: list[Stage] = []
    validation: dict[str, Score | None] = {}


class Report(_Said):
    surgery: Text
    versions: dict[str, Text] = {}
    source: Origin
    model_type: Text | None = None
    recipe: dict[str, Any]
    seed: int
    notes: list[Text] = []
    calibration: Calibration | None
    allocation: Allocation
    held_out: Held | None
    totals: Totals
    modules: list[Module]
    mixers: list[Mixer] = []
    hybrid: Hybrid | None = None
    time: Time
    memory: Memory
    training: list[Healing] = []


def refuse_no_report(data: Any, where: str) -> None:
    """SurgeryError, with the places, where it is not as surgery writes it."""
    try:
        report = Report.model_validate(data)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg'].lower()}" for e in error.errors()[:3]]
        raise SurgeryError(
            f"{where} is not a surgery report as surgery writes one: {'; '.join(wrong)}"[:1000]
        ) from None
    if "total" not in report.time.seconds:
        raise SurgeryError(f"{where} is not a surgery report as surgery writes one: time.seconds.total is missing")
