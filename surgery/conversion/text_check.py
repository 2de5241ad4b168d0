"""Whether a calibration text suits the model: its loss beside that of samples drawn from the model itself.

A text that the model might have written scores about what its own samples score. Another language's bytes, or one letter
repeated, score far above or below, and matrices fitted to such a text are fitted to inputs that will not occur again.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import LayerCall, LayerRunner
from surgery.calibration.lm_head import ChunkedLMHead
from surgery.checkpoint.meta_model import MetaModel
from surgery.conversion.score import predicts_next_token
from surgery.planning.plan import Plan

ROWS, LENGTH, SHORTEST = 8, 16, 8  # samples, tokens of each, and the fewest that say anything
TEXT_ROWS = 32  # windows of the text
READ = 4 * 10**9  # bytes of weights read for samples, at most: the checkpoint is read once for each token
ABOVE, BELOW = 2.0, 1 / 3  # nats over the samples' loss, share of it: beyond these a text is warned of
FEW = 32  # distinct tokens


@dataclass(frozen=True)
class TextFit:
    """Mean loss in nats per token, over the second half of the first `length` tokens of a few windows: of the text, and of
    samples drawn from the model (None where the checkpoint is too large to draw any); distinct: tokens in the text."""

    loss: float
    own_samples: float | None
    length: int
    distinct: int
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def text_fit(
    meta_model: MetaModel, plan: Plan, batch: CalibrationSet, runner: LayerRunner, seed: int
) -> TextFit | None:
    """None where the model does not predict the next token of a text."""
    ids = batch.inputs.get("input_ids")
    if ids is None or set(batch.inputs) != {"input_ids"} or not (plan.layout.head and predicts_next_token(meta_model)):
        return None
    length = min(LENGTH, ids.shape[1])
    if length < SHORTEST:
        return None
    alone, head = (
        runner.single_process(),
        ChunkedLMHead(meta_model, plan.layout.head, plan.layout.architecture, runner.device),
    )
    loss = _loss(alone, head, ids[:TEXT_ROWS, :length])
    drawn = _drawn(meta_model, alone, head, length, seed)
    own = None if drawn is None else _loss(alone, head, drawn)
    distinct, vocabulary = len(torch.unique(ids)), head.weight.shape[0]
    return TextFit(loss, own, length, distinct, _warnings(loss, own, distinct, vocabulary))


def _hidden(runner: LayerRunner, ids_BT: Tensor) -> Tensor:
    """What reaches the head, (B, T, D)."""

    def visit(call: LayerCall) -> Any:
        return call.apply(0, len(ids_BT))

    return runner.run({"input_ids": ids_BT}, visit)


def _loss(runner: LayerRunner, head: ChunkedLMHead, ids_BT: Tensor) -> float:
    half = ids_BT.shape[1] // 2
    hidden_BTD = _hidden(runner, ids_BT)[:, half - 1 : -1]
    return round(float(head.losses(hidden_BTD.flatten(0, 1), ids_BT[:, half:].flatten()).double().mean()), 4)


def _drawn(meta_model: MetaModel, runner: LayerRunner, head: ChunkedLMHead, length: int, seed: int) -> Tensor | None:
    """(ROWS, length) ids, each drawn from what the model expects after those before it."""
    if meta_model.source.nbytes * length > READ:
        return None
    config, generator = meta_model.config.get_text_config(), torch.Generator().manual_seed(seed)
    starts = [getattr(config, name, None) for name in ("bos_token_id", "eos_token_id")]
    first = next((s for s in starts if isinstance(s, int) and 0 <= s < head.weight.shape[0]), 0)
    ids_BT = torch.full((ROWS, 1), first)
    while ids_BT.shape[1] < length:
        last_BD = _hidden(runner, ids_BT)[:, -1].to(head.device)
        ids_BT = torch.cat([ids_BT, head.output_gradient(last_BD, generator)[2].cpu()[:, None]], dim=1)
    return ids_BT


def _warnings(loss: float, own: float | None, distinct: int, vocabulary: int) -> list[str]:
    beside = "" if own is None else f", samples drawn from the model itself {own:.2f}"
    told = f"the calibration text scores {loss:.2f} nats per token{beside}"
    advice = "give text of the kind that the model is used on (--calibration)"
    found = []
    if not loss <= (own + ABOVE if own is not None else 0.75 * math.log(vocabulary)):
        found.append(
            f"{told}: it is unlike what the model was trained on (another language, another encoding?); {advice}"
        )
    elif own is not None and loss < own * BELOW:
        found.append(f"{told}: it repeats itself, so that most directions are never seen; {advice}")
    if distinct < min(FEW, vocabulary // 8):
        found.append(f"the calibration text has {distinct} distinct tokens of {vocabulary:,}; {advice}")
    return found
