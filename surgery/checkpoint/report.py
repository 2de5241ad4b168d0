"""Schema of surgery_report.json, which `surgery convert` writes and tables, the HTML page and the model card read.

The order of the fields is the order of the keys in the file. Unknown keys are kept. Values are checked strictly, so
that an edited report is refused with the place of the error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surgery.core.errors import SurgeryError

Count = Annotated[int, Field(ge=0, lt=2**62)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)] | None  # None: not measured, or NaN
Text = Annotated[str, Field(max_length=10_000)]
Positive = Annotated[float, Field(gt=0, le=1e30)]
Ratio = Annotated[float, Field(ge=1, le=1e30)]


class ReportModel(BaseModel):
    """Base of the report's parts: strict types, unknown keys are kept."""

    model_config = ConfigDict(extra="allow", strict=True)


class SourceReport(ReportModel):
    """The source checkpoint: its name, its Hub revision, and a fingerprint of its files."""

    name: Text
    revision: Text | None = None
    fingerprint: Any = None


class StructureReport(ReportModel):
    """A structure's config."""

    structure: Text
    blocks: list[Count] | Count | Text | None = None
    rank: Count | Text | None = None
    parts: dict[str, StructureReport] | None = None


class ModuleReport(ReportModel):
    """One fitted matrix (surgery.conversion.fit.FitRecord)."""

    name: Text
    roles: list[Text]
    structure: StructureReport
    shape: Annotated[list[Annotated[Count, Field(ge=1)]], Field(min_length=2, max_length=2)] = [1, 1]
    params_before: Count
    params_after: Count
    macs_before: Count
    macs_after: Count
    error: Number
    start: Number = None
    sweeps: Count | Number = None
    refit: bool = False
    seconds: Number = None
    rows: Count | None = None
    shared_rows: Count | None = None
    outputs: Annotated[list[Annotated[Count, Field(ge=1)]], Field(max_length=64)] | None = None


class MixerReport(ReportModel):
    """One mixer; errors: stage of its initialization -> relative error of the heads' outputs."""

    name: Text
    errors: dict[str, Annotated[float, Field(ge=0, le=1e30)]] = {}


class TrialReport(ReportModel):
    """The held-out score of a trial; for a hybrid softmax: the layers that keep softmax attention, or heads: the
    key/value heads by layer.
    """

    softmax: list[Text] = []
    heads: dict[str, list[Count]] | None = None
    unit: Text = ""
    original: Number = None
    converted: Annotated[float, Field(ge=-1e30, le=1e30)]
    difference_se: Number = None
    tokens: Count = 0
    samples: Count = 0


class MlpsReport(ReportModel):
    """Whether MLPs and routed experts were pruned or their linears structured, and the score of each with the better
    allocation. pruned_mlps, pruned_experts: of a model with both, one of the two pruned.
    """

    kept: Literal["pruned", "pruned_mlps", "pruned_experts", "linears"]
    pruned: TrialReport
    pruned_mlps: TrialReport | None = None
    pruned_experts: TrialReport | None = None
    linears: TrialReport


class AllocationReport(ReportModel):
    """Which allocation of the budget was kept, why, and the scores of those that were tried.

    mlps: what a trial chose for the MLPs, where the recipe's candidates have `pruned`.

    Reports of older versions are read by surgery.planning.renamed.renew_report.
    """

    kept: Text | None = None
    why: Text | None = None
    uniform: TrialReport | None = None
    measured: TrialReport | None = None
    mlps: MlpsReport | None = None


class HybridReport(ReportModel):
    """Which layers keep softmax attention, and the scores of the two choices that were compared.

    measured: the choice by measurements; every: evenly spaced ones. Of a choice of layers, order: the layers in the
    order in which they were chosen; rounds: in each round, the divergence with each candidate restored; aligned: the
    divergence without softmax layers; alignment: layer -> its error before and after the alignment; weights: of the
    tokens; repeated_rows: number of scored rows with a repeated part. Of a hybrid by heads, heads: the key/value heads
    that keep softmax, by layer; head_errors: the error of each head's replacement at the output of its layer; softmax:
    layers that keep it in all heads.
    """

    kept: Text
    softmax: list[Text]
    heads: dict[str, list[Count]] | None = None
    head_errors: dict[str, list[Annotated[float, Field(ge=0, le=1e30)]]] | None = None
    order: list[Text] | None = None
    rounds: list[dict[str, Annotated[float, Field(ge=0, le=1e30)]]] | None = None
    aligned: TrialReport | None = None
    alignment: dict[str, dict[str, Annotated[float, Field(ge=0, le=1e30)]]] | None = None
    weights: Text | None = None
    repeated_rows: Count | None = None
    measured: TrialReport
    every: TrialReport


class TuningReport(ReportModel):
    """One training (surgery.conversion.tune.TuningRecord); start, end: losses on the held-out rows."""

    unit: Text
    start: Number
    end: Number
    rate: Number
    epoch: Count
    epochs: Count


class TuneReport(ReportModel):
    """The tuning of a conversion. layers, model: epochs; norms: whether norms and biases were trained too; by_layer: of
    each layer; whole: of the model."""

    layers: Count
    model: Count
    norms: bool = False
    by_layer: dict[str, TuningReport] = {}
    whole: TuningReport | None = None


class SpeedReport(ReportModel):
    """Predicted milliseconds of the replaced linears, dense (before) and as converted, from times measured on a device.

    phase: prefill or decode, with tokens. target: the recipe's ratio; ratio: before / after. matrices: replaced by the
    recipe; dense: of these, how many stay dense. share: time of these linears / time of all linears of the original;
    None if not all were measured.
    """

    device: Text
    dtype: Text
    phase: Literal["prefill", "decode"]
    tokens: Annotated[int, Field(ge=1, lt=2**62)]
    target: Ratio
    before: Positive
    after: Positive
    ratio: Ratio
    matrices: Count
    dense: Count
    share: Annotated[float, Field(ge=0, le=1)] | None = None


class HeldOutReport(ReportModel):
    """Held-out score of the original and of the converted model (surgery.conversion.score.HeldOutScore)."""

    unit: Text
    original: Annotated[float, Field(ge=-1e30, le=1e30)]
    converted: Annotated[float, Field(ge=-1e30, le=1e30)]
    difference_se: Number
    tokens: Count = 0
    samples: Count = 0


class DepthReport(ReportModel):
    """The layers that were removed (surgery.conversion.depth).

    layers: their number before. removed: numbers of the removed ones, from 0. macs: multiply-accumulates per token of
    their linears. angle: d of the block, in [0, 1]. candidates: held-out loss without each block that was tried, by its
    first layer. held_out: score of the model without them. refit: path of the linear that was fitted again, in the model
    with all layers; without_refit: the held-out loss without that.
    """

    layers: Count
    removed: list[Count]
    macs: Count
    angle: Number = None
    candidates: dict[str, Number] = {}
    held_out: HeldOutReport | None = None
    refit: Text | None = None
    without_refit: Number = None


class ExpertsReport(ReportModel):
    """The routed experts that were removed (surgery.conversion.fewer_experts).

    experts: their number in each layer before. kept: numbers of those that stay, from 0, by path. scores: of all of
    them. kept_tokens: share of the experts' calibration tokens that was routed to those that stay. macs:
    multiply-accumulates per token that the routers lost. held_out: score of the model with fewer experts.
    """

    experts: Count
    kept: dict[str, list[Count]]
    scores: dict[str, list[Number]] = {}
    kept_tokens: Number = None
    macs: Count = 0
    held_out: HeldOutReport | None = None


class NativeReport(ReportModel):
    """The change by level weights of 1, before they are trained (surgery.conversion.level_weights): the largest absolute
    difference of the logits / the largest logit, on so many random tokens.
    """

    change: Annotated[float, Field(ge=0, le=1e30)]
    tokens: Annotated[Count, Field(ge=1)]


class StockReport(ReportModel):
    """A conversion into a stock class of transformers (surgery.planning.stock).

    linear_layers, softmax_layers: their numbers, from 0. change: the largest absolute difference of a kept layer's output
    / its largest entry, on one row of the calibration text.
    """

    stock_class: Text
    linear: Text = "Gated DeltaNet"
    linear_layers: list[Count]
    softmax_layers: list[Count]
    state_bytes: Count
    token_bytes: dict[str, Count]
    neutral_qk_norm: bool
    change: Annotated[float, Field(ge=0, le=1e30)]


class TotalsReport(ReportModel):
    """Parameters, bytes and multiply-accumulates per token, of the replaced weights and of the whole checkpoint."""

    replaced_params_before: Count
    replaced_params_after: Count
    kept: Annotated[float, Field(ge=0, le=1e30)]
    macs_before: Count
    macs_after: Count
    params_before: Count
    params_after: Count
    bytes_before: Count
    bytes_after: Count


class CalibrationReport(ReportModel):
    """The calibration samples; loss and own_samples_loss in nats per token (surgery.conversion.text_check).

    tokens: in all; generated_tokens: of these, sampled from the original.
    """

    tokens: Count
    generated_tokens: Count = 0
    held_out_windows: Count = 0
    windows: Count = 0
    loss: Number = None
    own_samples_loss: Number = None
    warnings: list[str] = []


class StorageReport(ReportModel):
    """Quantization of the linears: how many, bits, inputs that share a scale (None: all of an output, or by the bits
    if these differ), bytes of all tensors.
    """

    linears: Count
    bits: Count | Literal["4 or 8"]
    group: Count | None
    format: Literal["int", "fp8"] = "int"
    bytes_before: Count
    bytes_after: Count


class TimeReport(ReportModel):
    """Seconds of each step and of each layer."""

    seconds: dict[str, Annotated[float, Field(ge=0, le=1e30)]]
    layers: dict[str, Annotated[float, Field(ge=0, le=1e30)]]
    device: Text = ""
    threads: Count = 1
    processes: Count = 1


class MemoryReport(ReportModel):
    """Bytes: peak resident set, largest calibration buffers, largest layer in float32."""

    peak_rss: Count | None
    calibration: dict[str, Count] = {}
    largest_layer: Count = 0


class StageReport(ReportModel):
    """One training stage: its kind, and the tokens it was trained on."""

    kind: Text
    tokens: Count


class PerplexityReport(ReportModel):
    """Perplexity on validation text."""

    perplexity: Number


class TrainingReport(ReportModel):
    """One training run: its stages, and the perplexity at named points of the run ("before", "after", ..)."""

    stages: list[StageReport] = []
    validation: dict[str, PerplexityReport | None] = {}


class Report(ReportModel):
    """The whole of surgery_report.json.

    unreached: linears left dense, because the calibration inputs do not reach them. files: SHA-256 of every other file
    that the conversion wrote, by path; those of a checkpoint that was healed or quantized afterwards differ.
    """

    surgery: Text
    versions: dict[str, Text] = {}
    source: SourceReport
    model_type: Text | None = None
    recipe: dict[str, Any]
    seed: int
    notes: list[Text] = []
    unreached: list[Text] = []
    companions: list[str] = []
    files: dict[str, Text] = {}
    calibration: CalibrationReport | None
    allocation: AllocationReport
    held_out: HeldOutReport | None
    totals: TotalsReport
    modules: list[ModuleReport]
    mixers: list[MixerReport] = []
    time: TimeReport
    memory: MemoryReport
    depth: DepthReport | None = None
    experts: ExpertsReport | None = None
    native: NativeReport | None = None
    stock: StockReport | None = None
    hybrid: HybridReport | None = None
    tune: TuneReport | None = None
    speed: SpeedReport | None = None
    storage: StorageReport | None = None
    training: list[TrainingReport] = []

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON data; optional fields that were not set are left out."""
        return self.model_dump(exclude_unset=True)


@contextmanager
def report_errors(where: str) -> Iterator[None]:
    """Turn a ValidationError of a report into a SurgeryError that names the report and up to three places in it."""
    try:
        yield
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg'].lower()}" for e in error.errors()[:3]]
        raise SurgeryError(f"{where} is not a valid surgery report: {'; '.join(wrong)}"[:1000]) from None


def validate_report(data: Any, where: str) -> None:
    """Raise SurgeryError unless `data` is a valid report. where: the file's name for the message."""
    with report_errors(where):
        report = Report.model_validate(data)
    if "total" not in report.time.seconds:
        raise SurgeryError(f"{where} is not a valid surgery report: time.seconds.total is missing")
