"""Suite `per-position`: loss by position in the window, averaged over windows.

It shows whether a model uses distant context (log-linear attention, Guo et al. 2025, Figure 5). The plot shows a
running mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.eval.batching import score_in_batches
from surgery.eval.losses import check_lm_head, max_batch_tokens, token_losses
from surgery.eval.results.statistics import Z_95
from surgery.eval.suite import EvalMetric, EvalModel, EvalOptions, Sample, Suite, SuiteResult, no_tasks, register
from surgery.eval.text import TextWindow, load_text_windows, window_length_notes

if TYPE_CHECKING:
    from surgery.eval.results.plots import Curve

NLL = EvalMetric("nll", "mean", higher_is_better=False, title="loss", unit="nats")
FIRST_STRETCH = 64  # positions in the first range; each later range is as long as all before it


def position_ranges(count: int) -> list[tuple[int, int]]:
    """Return [(0, 64), (64, 128), (128, 256), ..] up to count."""
    cuts = [0]
    while cuts[-1] < count:
        cuts.append(min(count, max(FIRST_STRETCH, 2 * cuts[-1])))
    return list(pairwise(cuts))


def run(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
    """Measure token losses of complete windows; raises SurgeryError with fewer than two."""
    check_lm_head(eval_model.model)
    read = load_text_windows("per-position", eval_model, options)
    longest = max((len(piece.ids) for piece in read), default=0)
    read = [piece for piece in read if len(piece.ids) == longest]  # complete windows only
    if len(read) < 2:
        raise SurgeryError(
            f"per-position: the text has {len(read)} complete windows of {longest} tokens, and 2 are needed. Use a "
            "shorter --length."
        )

    def score(batch: list[TextWindow]) -> list[Tensor]:
        return token_losses(eval_model.model, [piece.ids for piece in batch])

    most, title = max_batch_tokens(eval_model.model), f"loss by position of {eval_model.name}"
    losses_NT = torch.stack(
        score_in_batches(eval_model, options, read, score, lambda p: len(p.ids), title, tokens=most)
    )
    samples = [
        Sample(
            "per-position", piece.id, {"nll": float(losses_T[first:last].double().mean())}, {"position": last}, last - first,
            piece.unit or piece.id,
        )
        for piece, losses_T in zip(read, losses_NT)
        for first, last in position_ranges(longest - 1)
    ]  # fmt: skip
    return SuiteResult(
        samples, {"nll": NLL}, arrays={"loss_NT": losses_NT}, notes=window_length_notes(eval_model, options)
    )


def running_mean(values_NT: Tensor, width: int) -> Tensor:
    """Return the mean over `width` positions around each position, over fewer at the ends. values: (T,) or (N, T)."""
    rows_N1T = values_NT.reshape(-1, 1, values_NT.shape[-1])
    kernel = torch.ones(1, 1, width, dtype=values_NT.dtype)
    sums, counts = (
        torch.nn.functional.conv1d(x, kernel, padding=width // 2) for x in (rows_N1T, torch.ones_like(rows_N1T[:1]))
    )
    return (sums / counts)[..., : values_NT.shape[-1]].reshape(values_NT.shape)


def position_curve(result: SuiteResult, width: int) -> Curve:
    """Return the running mean of the losses with its 95% band: 1.96 standard errors over documents, or windows of one
    document.
    """
    from surgery.eval.results.plots import Curve

    losses_NT = result.arrays["loss_NT"]
    count = len(losses_NT)
    mean_T = running_mean(losses_NT.double().mean(0), width)
    per_window = len(result.samples) // count
    named = [s.unit for s in result.samples[::per_window]] if per_window * count == len(result.samples) else []
    numbers = {unit: i for i, unit in enumerate(dict.fromkeys(named))}
    units_N = torch.tensor([numbers[unit] for unit in named] if named else range(count))
    groups = int(units_N.max()) + 1
    sums_UT = torch.zeros(groups, losses_NT.shape[1], dtype=torch.float64).index_add_(0, units_N, losses_NT.double())
    sizes_U1 = torch.bincount(units_N, minlength=groups).double()[:, None]
    residual_UT = running_mean(sums_UT - sizes_U1 * losses_NT.double().mean(0), width)
    se_T = (groups / max(groups - 1, 1) * residual_UT.square().sum(0)).sqrt() / count
    xs = list(range(1, losses_NT.shape[1] + 1))
    return Curve(xs, mean_T.tolist(), (mean_T - Z_95 * se_T).tolist(), (mean_T + Z_95 * se_T).tolist())


def plot(results: Mapping[str, SuiteResult], folder: Path, base: str | None = "base") -> list[Path]:
    """Draw the running mean of the losses of each model, with its error band."""
    from surgery.eval.results.plots import plot_lines

    count = min(result.arrays["loss_NT"].shape[1] for result in results.values())
    width = max(1, count // 32) | 1
    series = {role: position_curve(result, width) for role, result in results.items()}
    title = f"loss by position, running mean of {width}"
    return [
        plot_lines(folder / "per-position.png", series, "position in the window", "nats per token", title, base=base)
    ]


register(Suite("per-position", "loss by position in the window", run, plot=plot, tasks=no_tasks))
