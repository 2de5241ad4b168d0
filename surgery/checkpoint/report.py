"""The schema of surgery_report.json: all fields that tables, the HTML page and the model card read.

Unknown fields are allowed. A report edited by hand fails with the path of each invalid field.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surgery.core.errors import SurgeryError

Count = Annotated[int, Field(ge=0, lt=2**62)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)] | None  # None: not measured, or NaN
Text = Annotated[str, Field(max_length=10_000)]


class _ReportModel(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class SourceReport(_ReportModel):
    """The source checkpoint."""

    name: Text
    revision: Text | None = None


class StructureReport(_ReportModel):
    """The structure of one matrix; `parts` for a split linear."""

    structure: Text
    rank: Count | Text | None = None
    blocks: list[Count] | Text | None = None
    parts: dict[str, StructureReport] | None = None


class ModuleReport(_ReportModel):
    """One replaced linear: its structure, relative error, parameters, and multiply-accumulates per token."""

    name: Text
    roles: list[Text]
    structure: StructureReport
    shape: Annotated[list[Annotated[Count, Field(ge=1)]], Field(min_length=2, max_length=2)] = [1, 1]
    error: Number
    start: Number = None
    sweeps: Number = None
    params_before: Count
    params_after: Count
    macs_before: Count
    macs_after: Count


class MixerReport(_ReportModel):
    """One replaced attention module: its path and its errors by name."""

    name: Text
    errors: dict[str, Annotated[float, Field(ge=0, le=1e30)]] = {}


class TrialReport(_ReportModel):
    """The held-out loss of a trial conversion."""

    converted: Annotated[float, Field(ge=-1e30, le=1e30)]
    unit: Text = ""


class AllocationReport(_ReportModel):
    """The budget allocation that was kept, the reason, and the trials compared."""

    kept: Text | None = None
    why: Text | None = None
    uniform: TrialReport | None = None
    spread: TrialReport | None = None


class HybridReport(_ReportModel):
    """The layers that keep softmax attention, and the trials that chose them."""

    softmax: list[Text]
    kept: Text
    sensitivity: TrialReport
    every: TrialReport


class HeldOutReport(_ReportModel):
    """The held-out loss before and after the conversion, and the standard error of the difference."""

    unit: Text
    tokens: Count = 0
    original: Annotated[float, Field(ge=-1e30, le=1e30)]
    converted: Annotated[float, Field(ge=-1e30, le=1e30)]
    difference_se: Number


class TotalsReport(_ReportModel):
    """Parameters, bytes and multiply-accumulates per token of the whole model and of the replaced weights."""

    params_before: Count
    params_after: Count
    bytes_before: Count
    bytes_after: Count
    macs_before: Count
    macs_after: Count
    replaced_params_before: Count
    replaced_params_after: Count
    kept: Annotated[float, Field(ge=0, le=1e30)]


class CalibrationReport(_ReportModel):
    """The calibration data."""

    tokens: Count


class TimeReport(_ReportModel):
    """Wall time in seconds per step and per layer."""

    seconds: dict[str, Annotated[float, Field(ge=0, le=1e30)]]
    layers: dict[str, Annotated[float, Field(ge=0, le=1e30)]]
    device: Text = ""


class MemoryReport(_ReportModel):
    """Peak resident memory in bytes."""

    peak_rss: Count | None


class StageReport(_ReportModel):
    """One training stage."""

    kind: Text
    tokens: Count


class PerplexityReport(_ReportModel):
    """One perplexity measured on validation text."""

    perplexity: Number


class TrainingReport(_ReportModel):
    """One finished training run: its stages and validation results."""

    stages: list[StageReport] = []
    validation: dict[str, PerplexityReport | None] = {}


class Report(_ReportModel):
    """The whole report of a conversion, with later training runs."""

    surgery: Text
    versions: dict[str, Text] = {}
    source: SourceReport
    model_type: Text | None = None
    recipe: dict[str, Any]
    seed: int
    notes: list[Text] = []
    calibration: CalibrationReport | None
    allocation: AllocationReport
    held_out: HeldOutReport | None
    totals: TotalsReport
    modules: list[ModuleReport]
    mixers: list[MixerReport] = []
    hybrid: HybridReport | None = None
    time: TimeReport
    memory: MemoryReport
    training: list[TrainingReport] = []


def validate_report(data: Any, where: str) -> None:
    """Raise SurgeryError, with the paths of invalid fields, unless `data` is a surgery report. `where` names it in the message."""
    try:
        report = Report.model_validate(data)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg'].lower()}" for e in error.errors()[:3]]
        raise SurgeryError(
            f"{where} is not a surgery report as surgery writes one: {'; '.join(wrong)}"[:1000]
        ) from None
    if "total" not in report.time.seconds:
        raise SurgeryError(f"{where} is not a surgery report as surgery writes one: time.seconds.total is missing")
