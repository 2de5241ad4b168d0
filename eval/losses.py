"""Per-token losses in nats. Shapes: B batch, T tokens, V vocabulary, N flattened tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError

LOGITS_PER_BATCH = 2**28  # elements of the logits of a first batch
LOGITS_PER_SLICE = 2**24  # elements converted to float32 at a time


def max_batch_tokens(model: Any) -> int:
    """Return the number of tokens per batch whose logits have LOGITS_PER_BATCH elements, at least 1."""
    return max(1, LOGITS_PER_BATCH // model.config.get_text_config().vocab_size)


def check_lm_head(model: Any) -> None:
    """Raise SurgeryError unless the model is a decoder whose logits at a position predict the next token."""
    if model.get_output_embeddings() is None:
        raise SurgeryError(
            f"{type(model).__name__} has no language-model head; perplexity needs one (try --suite cosine)"
        )
    if not getattr(model, "can_generate", lambda: True)() or getattr(model.config, "is_encoder_decoder", False):
        raise SurgeryError(
            f"{type(model).__name__} does not predict the next token of its input; this suite needs a decoder such as "
            "LlamaForCausalLM"
        )


@torch.inference_mode()
def token_losses(model: Any, rows: list[tuple[int, ...]]) -> list[Tensor]:
    """Return the loss of each token after the first of every row, given the tokens before it: on the CPU, shape
    (len(row) - 1,).

    Rows are padded on the right, which a causal model does not attend to.
    """
    longest = max(map(len, rows))
    ids_BT = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows], device=model.device)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    step = max(1, LOGITS_PER_SLICE // (len(rows) * logits_BTV.shape[-1]))
    parts = []
    for first in range(0, longest - 1, step):
        last = min(first + step, longest - 1)
        logits_NV = logits_BTV[:, first:last].flatten(0, 1).float()
        labels_N = ids_BT[:, first + 1 : last + 1].flatten()
        each_N = torch.nn.functional.cross_entropy(logits_NV, labels_N, reduction="none")
        parts.append(each_N.view(len(rows), -1))
    losses_BT = torch.cat(parts, dim=1).cpu()
    return [losses_T[: len(row) - 1] for losses_T, row in zip(losses_BT, rows)]
