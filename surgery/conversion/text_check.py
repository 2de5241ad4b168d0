"""Check that a calibration text suits the model: compare its loss with the loss of samples drawn from the model.

Text like the training data has about the same loss as the model's own samples. Text in a wrong encoding or another
language has a far higher loss, a repeated letter a far lower one. Matrices fitted to such hidden states fit no other
text.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import LayerRunner
from surgery.calibration.lm_head import ChunkedLMHead
from surgery.checkpoint.meta_model import MetaModel
from surgery.conversion.context import ConversionContext
from surgery.conversion.score import predicts_next_token
from surgery.conversion.streams import Contexts, Layer, Stream, Streams

SAMPLES, LENGTH, MIN_LENGTH = 8, 16, 8  # samples to draw, tokens of each, and the shortest length that is checked
TEXT_ROWS = 32  # windows of the text that are scored
MAX_READ_BYTES = 4 * 10**9  # of weights, to draw samples: the checkpoint is read once for each token
MAX_EXCESS, MIN_RATIO = 2.0, 1 / 3  # warn if loss > samples' loss + MAX_EXCESS nats, or < MIN_RATIO * samples' loss
MIN_DISTINCT = 32  # warn below this many distinct tokens


@dataclass(frozen=True)
class TextScore:
    """Mean losses in nats per token, over the second half of the first `length` tokens of a few windows.

    loss: of the text. own_samples: of samples drawn from the model, None if the checkpoint is too large to draw any.
    distinct: number of distinct tokens in the text. warnings: sentences for the user.
    """

    loss: float
    own_samples: float | None
    length: int
    distinct: int
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)


@torch.no_grad()
def score_text(ctx: ConversionContext) -> TextScore | None:
    """Score the calibration text; None if the model does not predict the next token of a text."""
    model, layout, samples = ctx.model, ctx.plan.layout, ctx.samples
    ids = samples.inputs.get("input_ids")
    if ids is None or set(samples.inputs) != {"input_ids"} or not (layout.head and predicts_next_token(model)):
        return None
    length = min(LENGTH, ids.shape[1])
    if length < MIN_LENGTH:
        return None
    runner = ctx.runner.single_process()
    head = ChunkedLMHead(model, layout.head, layout.architecture, ctx.device)
    loss = _mean_loss(runner, head, ids[:TEXT_ROWS, :length])
    drawn = _draw_samples(model, runner, head, length, ctx.recipe.seed)
    sample_loss = None if drawn is None else _mean_loss(runner, head, drawn)
    distinct, vocabulary = len(torch.unique(ids)), head.weight.shape[0]
    return TextScore(loss, sample_loss, length, distinct, _warnings(loss, sample_loss, distinct, vocabulary))


class _Unchanged:
    """A pass of the original model."""

    def visit(self, layer: Layer) -> Contexts:
        return {"text": nullcontext()}


def _final_hidden(runner: LayerRunner, ids_BT: Tensor) -> Tensor:
    """Return the input of the LM head, (B, T, D)."""
    text = CalibrationSet({"input_ids": ids_BT}, len(ids_BT), len(ids_BT))
    return Streams(runner, text, {"text": Stream(text.fit)}).run(_Unchanged())["text"]


def _mean_loss(runner: LayerRunner, head: ChunkedLMHead, ids_BT: Tensor) -> float:
    """Return the mean loss of the second half of each row, in nats per token."""
    half = ids_BT.shape[1] // 2
    hidden_BTD = _final_hidden(runner, ids_BT)[:, half - 1 : -1]
    return round(float(head.losses(hidden_BTD.flatten(0, 1), ids_BT[:, half:].flatten()).double().mean()), 4)


def _draw_samples(
    meta_model: MetaModel, runner: LayerRunner, head: ChunkedLMHead, length: int, seed: int
) -> Tensor | None:
    """Return ids (SAMPLES, length) drawn from the model token by token; None if that reads over MAX_READ_BYTES."""
    if meta_model.source.nbytes * length > MAX_READ_BYTES:
        return None
    config, generator = meta_model.config.get_text_config(), torch.Generator().manual_seed(seed)
    starts = [getattr(config, name, None) for name in ("bos_token_id", "eos_token_id")]
    first = next((s for s in starts if isinstance(s, int) and 0 <= s < head.weight.shape[0]), 0)
    ids_BT = torch.full((SAMPLES, 1), first)
    while ids_BT.shape[1] < length:
        last_BD = _final_hidden(runner, ids_BT)[:, -1].to(head.device)
        ids_BT = torch.cat([ids_BT, head.output_gradient(last_BD, generator)[2].cpu()[:, None]], dim=1)
    return ids_BT


def _warnings(loss: float, sample_loss: float | None, distinct: int, vocabulary: int) -> list[str]:
    compared = "" if sample_loss is None else f", samples drawn from the model itself {sample_loss:.2f}"
    score = f"the calibration text scores {loss:.2f} nats per token{compared}"
    advice = "give text of the kind that the model is used on (--calibration)"
    warnings = []
    if not math.isfinite(loss):
        warnings.append(
            f"the original model has a loss of {loss} on the calibration text: its weights or its config are damaged, for "
            "example rope_theta in config.json. What is fitted to its outputs is worthless"
        )
    elif not loss <= (sample_loss + MAX_EXCESS if sample_loss is not None else 0.75 * math.log(vocabulary)):
        warnings.append(
            f"{score}: it is unlike what the model was trained on (another language, another encoding?); {advice}"
        )
    elif sample_loss is not None and loss < sample_loss * MIN_RATIO:
        warnings.append(f"{score}: it repeats itself, so that most directions of the inputs do not occur; {advice}")
    if distinct < min(MIN_DISTINCT, vocabulary // 8):
        warnings.append(f"the calibration text has {distinct} distinct tokens of {vocabulary:,}; {advice}")
    return warnings
