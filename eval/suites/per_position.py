"""Suite `per-position`: loss by position in the window, averaged over windows.

It shows whether a model uses distant context (log-linear attention, Guo et al. 2025, Figure 5). The plot shows a running mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.eval.batching import score_in_batches
from surgery.eval.losses import check_lm_head, max_batch_tokens, token_losses
from surgery.eval.suite import EvalMetric, EvalModel, EvalOptions, Sample, Suite, SuiteResult, register
from surgery.eval.text import TextWindow, load_text_windows, window_length_notes

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
            f"per-position: the text has {len(read)} complete windows of {longest} tokens, and 2 are needed. Use a shorter --length."
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


def running_mean(values_T: Tensor, width: int) -> Tensor:
    """Return the mean over `width` positions around each position, over fewer at the ends."""
    ones_T = torch.ones_like(values_T)[None, None]
    kernel = torch.ones(1, 1, width, dtype=values_T.dtype)
    sums, counts = (torch.nn.functional.conv1d(x, kernel, padding=width // 2) for x in (values_T[None, None], ones_T))
    return (sums / counts)[0, 0, : len(values_T)]


def plot(results: Mapping[str, SuiteResult], folder: Path) -> list[Path]:
    """Draw the running mean of the losses of each model."""
    from surgery.eval.results.plots import plot_lines

    count = next(iter(results.values())).arrays["loss_NT"].shape[1]
    width = max(1, count // 32) | 1
    series = {}
    for role, result in results.items():
        mean_T = running_mean(result.arrays["loss_NT"].double().mean(0), width)
        series[role] = (list(range(1, count + 1)), mean_T.tolist())
    title = f"loss by position, running mean of {width}"
    return [plot_lines(folder / "per-position.png", series, "position in the window", "nats per token", title)]


register(Suite("per-position", "loss by position in the window", run, plot=plot))
