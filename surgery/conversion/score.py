"""The held-out verdict on a whole conversion: both streams' final hidden states on the windows that nothing
was fitted to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surgery.calibration.data import CalibrationSet
from surgery.calibration.fisher import has_lm_head
from surgery.calibration.lm_head import ChunkedLMHead
from surgery.checkpoint.meta_model import MetaModel
from surgery.planning.plan import Plan


@dataclass(frozen=True)
class HeldOutScore:
    """unit "nats per token": mean loss of the original and of the converted model, and the standard error of
    their difference over windows; unit "relative output error": 0 and |f0 - f| / |f0|."""

    unit: str
    original: float
    converted: float
    difference_se: float | None
    tokens: int

    @property
    def rise(self) -> float:
        """Relative to the original's loss; the relative output error itself."""
        return self.converted / self.original - 1 if self.original else self.converted

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def predicts_next_token(meta_model: MetaModel) -> bool:
    """Whether the head's logits at t are about the token at t + 1."""
    name = type(meta_model.model).__name__
    generates = "CausalLM" in name or "LMHead" in name or getattr(meta_model.config, "is_encoder_decoder", False)
    return generates and has_lm_head(meta_model)


@torch.no_grad()
def held_out_score(
    meta_model: MetaModel,
    plan: Plan,
    batch: CalibrationSet,
    final_BTD: Tensor,
    linear: nn.Module | None,
    device: torch.device,
) -> HeldOutScore:
    """final_BTD: what reaches the head, original rows then converted; linear: the head's stand-in or None."""
    held = slice(batch.n_fit, batch.rows)
    streams, mask_BT = (final_BTD[: batch.rows][held], final_BTD[batch.rows :][held]), batch.head_mask()
    real_BT = None if mask_BT is None else mask_BT[held].bool()
    if not (predicts_next_token(meta_model) and plan.layout.head):
        before, after = (s if real_BT is None else s[real_BT.to(s.device)] for s in streams)
        gap = float((before - after).norm() / before.norm().clamp_min(1e-30))
        return HeldOutScore("relative output error", 0.0, gap, None, before[..., 0].numel())
    head = ChunkedLMHead(meta_model, plan.layout.head, plan.layout.architecture, device)
    ids_BT = batch.inputs.get("decoder_input_ids", batch.inputs["input_ids"])[held]
    # A loss counts where both the token and the one it predicts are real; a window, where any does.
    counts_BT = torch.ones_like(ids_BT[:, 1:]) if real_BT is None else (real_BT[:, 1:] & real_BT[:, :-1]).long()
    used_B = counts_BT.sum(1) > 0
    losses = []
    for stream_BTD, standin in zip(streams, (None, linear)):
        flat = head.losses(stream_BTD[:, :-1].reshape(-1, stream_BTD.shape[-1]), ids_BT[:, 1:].reshape(-1), standin)
        sums_B = (flat.view(len(ids_BT), -1).double().cpu() * counts_BT).sum(1)
        losses.append((sums_B / counts_BT.sum(1).clamp_min(1))[used_B])
    difference_B = losses[1] - losses[0]
    spread = float(difference_B.std() / len(difference_B) ** 0.5) if len(difference_B) > 1 else None
    return HeldOutScore(
        "nats per token", float(losses[0].mean()), float(losses[1].mean()), spread, int(counts_BT.sum())
    )
