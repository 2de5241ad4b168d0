"""How many tokens a model's positions allow in one row."""

from __future__ import annotations

from typing import Any

from torch import nn


def longest_input(model: Any) -> int | None:
    """Return the tokens of the longest row, or None if the config names no limit.

    This is the config's max_position_embeddings, less the rows of a position table up to its padding index: RoBERTa and
    its kin count positions from padding_idx + 1, so that 514 rows serve 512 tokens.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return None
    limit: Any = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    for name, module in model.named_modules():
        table = name.rpartition(".")[2] == "position_embeddings" and isinstance(module, nn.Embedding)
        if table and module.padding_idx is not None:
            limit = min(limit, module.num_embeddings - module.padding_idx - 1)
    return limit
