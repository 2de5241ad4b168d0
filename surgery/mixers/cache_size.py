"""Bytes of the cache of one attention module, counted from its mixer's config and its shape.

    bytes(T) = itemsize (cache(T) - float32(T)) + max(4, itemsize) float32(T)

cache, float32: elements of the state after T tokens (`MixerCost`). itemsize: bytes of an element of the model's dtype.
Keys and values have the model's dtype; recurrent sums and other computed tensors have float32, or float64 in a float64
model.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from surgery.mixers.base import MIXERS, AttentionShape, MixerConfig, MixerCost
from surgery.mixers.softmax import Softmax


def mixer_cost(config: MixerConfig, shape: AttentionShape, length: int) -> MixerCost:
    """Return the cost of a mixer for a context of `length` tokens.

    Some mixers build a module to count it, and the layers of a model are mostly equal, so what was counted is kept.
    """
    try:
        hash((config, shape))
    except TypeError:  # a plugin's config with a list
        return MIXERS[config].cost(config, shape, length)
    return _kept_cost(config, shape, length)


@lru_cache(maxsize=1024)
def _kept_cost(config: MixerConfig, shape: AttentionShape, length: int) -> MixerCost:
    return MIXERS[config].cost(config, shape, length)


def cache_bytes(config: MixerConfig | None, shape: AttentionShape, length: int, dtype: torch.dtype) -> int:
    """Return the bytes that the cache of one sequence holds for one attention module after `length` tokens, as
    `generate` fills it.

    config: of its mixer; None: softmax attention. dtype: of the model. The count equals the bytes of the live cache: of
    MixerCacheLayer.nbytes(), or of the keys and values of a DynamicCache. Bidirectional attention caches nothing.
    """
    if not shape.causal:
        return 0
    config = Softmax() if config is None else config
    cost = mixer_cost(config, shape, length)
    return dtype.itemsize * (cost.cache - cost.float32) + max(4, dtype.itemsize) * cost.float32
