"""The held-out score of a whole conversion, from the final hidden states of the original and of the converted model
on samples that nothing was fitted to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surgery.architectures.towers import tower_names
from surgery.calibration.data import placeholder_tokens, unpadded_rows
from surgery.calibration.lm_head import ChunkedLMHead
from surgery.checkpoint.meta_model import MetaModel
from surgery.conversion.context import ConversionContext
from surgery.conversion.fisher import has_lm_head
from surgery.core.errors import SurgeryError

ID_INPUTS = ("decoder_input_ids", "input_ids")  # the first that is given has the tokens that are predicted


@dataclass(frozen=True)
class HeldOutScore:
    """Score of the original and of the converted model on held-out samples.

    unit "nats per token": original and converted are mean losses, difference_se the standard error of their
    difference over samples (None for a single sample). unit "relative output error", for models that predict no next
    token and for samples without token ids: original is 0 and converted is |f0 - f| / |f0|. tokens, samples: how many
    were scored; samples 0: unknown.
    """

    unit: str
    original: float
    converted: float
    difference_se: float | None
    tokens: int
    samples: int = 0

    @property
    def rise(self) -> float:
        """The rise of the loss relative to the original's, or the relative output error itself."""
        return self.converted / self.original - 1 if self.original else self.converted

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as they stand in the report."""
        return asdict(self)


def predicts_next_token(meta_model: MetaModel) -> bool:
    """Return whether the head's logits at position t predict the token at t + 1."""
    model = meta_model.model
    name = type(model).__name__
    generates = "CausalLM" in name or "LMHead" in name or getattr(meta_model.config, "is_encoder_decoder", False)
    writes_text = tower_names(model) and hasattr(model, "can_generate") and model.can_generate()  # of images and text
    return bool(generates or writes_text) and has_lm_head(meta_model)


def check_held_out(ctx: ConversionContext) -> None:
    """Raise SurgeryError if the held-out samples are scored by their next tokens and have none."""
    if ctx.data is not None and _is_scored_by_loss(ctx) and not _scored_tokens(ctx)[1].any():
        held = ctx.samples.rows - ctx.samples.n_fit
        raise SurgeryError(
            f"calibration: the last {held} of {ctx.samples.rows} rows are held out to score the conversion, and no row "
            "of them has two tokens, one to predict the other. Give longer rows"
        )


def _is_scored_by_loss(ctx: ConversionContext) -> bool:
    """Return whether the score is of next tokens: not without a head, and not of embeddings in place of token ids."""
    return bool(predicts_next_token(ctx.model) and ctx.plan.layout.head and {*ID_INPUTS} & {*ctx.samples.inputs})


def _scored_tokens(ctx: ConversionContext) -> tuple[Tensor, Tensor]:
    """Return the token ids of the held-out samples (B, T), and for ids[:, 1:] 1 where the loss counts, else 0."""
    data = ctx.samples
    held, mask_BT = slice(data.n_fit, data.rows), data.head_mask()
    real_BT = None if mask_BT is None else mask_BT[held].bool()
    ids_BT = next(data.inputs[name] for name in ID_INPUTS if name in data.inputs)[held]
    # A loss counts if the token and the one it predicts are both real; a sample counts if any of its losses does.
    counts_BT = torch.ones_like(ids_BT[:, 1:]) if real_BT is None else (real_BT[:, 1:] & real_BT[:, :-1]).long()
    for token in placeholder_tokens(ctx.model.config):  # stands for a part of an image, which is not predicted
        counts_BT = counts_BT * (ids_BT[:, 1:] != token)
    return ids_BT, counts_BT


@torch.no_grad()
def held_out_score(
    ctx: ConversionContext, original_BTD: Tensor, converted_BTD: Tensor, head_module: nn.Module | None = None
) -> HeldOutScore:
    """Score the held-out samples, given what reaches the head in the original and in the converted model (B, T, D).

    head_module: the replacement of the LM head; None where the head is not replaced.
    """
    data, layout = ctx.samples, ctx.plan.layout
    held = slice(data.n_fit, data.rows)
    hidden_BTDs, mask_BT = (original_BTD, converted_BTD), data.head_mask()
    real_BT = None if mask_BT is None else mask_BT[held].bool()
    if not _is_scored_by_loss(ctx) or layout.head is None:
        before, after = (unpadded_rows(x, real_BT) if x.dim() > 1 else x[:, None] for x in hidden_BTDs)
        error = float((before - after).norm() / before.norm().clamp_min(1e-30))
        return HeldOutScore("relative output error", 0.0, error, None, before[..., 0].numel(), data.rows - data.n_fit)
    head = ChunkedLMHead(ctx.model, layout.head, layout.architecture, ctx.device)
    ids_BT, counts_BT = _scored_tokens(ctx)
    ids_BT = ids_BT.clamp_max(head.weight.shape[0] - 1)
    used_B = counts_BT.sum(1) > 0
    losses = []
    for hidden_BTD, module in zip(hidden_BTDs, (None, head_module)):
        flat = head.losses(hidden_BTD[:, :-1].reshape(-1, hidden_BTD.shape[-1]), ids_BT[:, 1:].reshape(-1), module)
        sums_B = (flat.view(len(ids_BT), -1).double().cpu() * counts_BT).sum(1)
        losses.append((sums_B / counts_BT.sum(1).clamp_min(1))[used_B])
    difference_B = losses[1] - losses[0]
    standard_error = float(difference_B.std() / len(difference_B) ** 0.5) if len(difference_B) > 1 else None
    means = float(losses[0].mean()), float(losses[1].mean())
    return HeldOutScore("nats per token", *means, standard_error, int(counts_BT.sum()), len(difference_B))
