"""Bytes that a decoding step reads, and the bound on the speedup of drafting that follows from them.

    step(B, T) = W + B C(T)                                         bytes per step, W: weights, C: cache of one row
    tokens(a, k) = (1 - a^(k+1)) / (1 - a)                          expected tokens per round (Leviathan et al. 2023, eq. 1)
    speedup(a, k) <= tokens(a, k) step / (k draft_step + step)      a: probability that a draft is accepted, k: drafts per round

A round is k steps of the drafter and one forward of the original over k + 1 tokens, which reads what one step reads.
The bound holds where decoding is limited by memory traffic; it leaves out activations, launches and the compute of k +
1 tokens. A drafter with the same weights therefore gains only from a shorter cache: at long contexts and large batches.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from surgery.mixers.cache_size import cache_bytes as attention_cache_bytes
from surgery.modeling.cache import mixer_modules
from surgery.speculation.slots import Sight, attention_windows

LONGEST_DRAFT = 16


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights that a step reads; an input embedding that is no output head is looked up, not
    read.
    """
    table = model.get_input_embeddings()  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    tied = head is not None and getattr(head, "weight", None) is getattr(table, "weight", None)
    left_out = set() if tied or table is None else {id(table.weight)}
    every = {id(t): t for t in (*model.parameters(), *model.buffers()) if id(t) not in left_out}
    return sum(t.numel() * t.element_size() for t in every.values())


def cache_bytes(model: Any, context: int, sight: Sight | None = None) -> int:
    """Return the bytes of one row's cache that a step reads at a context of `context` tokens. sight: what a drafter
    sees of it.
    """
    config = model.config.get_text_config(decoder=True)
    mixers = {m.layer_idx: m.mixer for _, m in mixer_modules(model)}
    windows = attention_windows(model)
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    key = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    total = 0
    for index, window in enumerate(windows):
        if index in mixers:
            total += attention_cache_bytes(mixers[index].config, mixers[index].shape, context, model.dtype)
            continue
        tokens = context if window is None else min(context, window)
        if sight is not None and sight.window is not None:
            tokens = min(tokens, sight.window + sight.sinks)
        total += 2 * groups * key * tokens * model.dtype.itemsize
    return total


def expected_tokens(accept: float, k: int) -> float:
    """Return the expected number of tokens of a round with k drafts, each accepted with probability `accept`."""
    return k + 1.0 if accept >= 1 else (1 - accept ** (k + 1)) / (1 - accept)


def speedup(accept: float, k: int, cost: float) -> float:
    """Return the bound on the speedup. cost: bytes of a drafter's step over those of the original's."""
    return expected_tokens(accept, k) / (k * cost + 1)


def best_length(accept: float, cost: float, longest: int = LONGEST_DRAFT) -> int:
    """Return the number of drafts per round with the highest bound; 0: drafting does not pay."""
    return max(range(longest + 1), key=lambda k: (speedup(accept, k, cost), -k))
