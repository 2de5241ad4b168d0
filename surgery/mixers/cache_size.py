"""Bytes of the cache of one attention module, counted from its mixer's config and its shape.

    bytes(T) = itemsize (cache(T) - float32(T)) + max(4, itemsize) float32(T)

cache, float32: elements of the state after T tokens (`MixerCost`). itemsize: bytes of an element of the model's dtype.
Keys and values have the model's dtype; recurrent sums and other computed tensors have float32, or float64 in a float64
model.
"""

from __future__ import annotations

import torch

from surgery.mixers.base import MIXERS, AttentionShape, MixerConfig
from surgery.mixers.softmax import Softmax


def cache_bytes(config: MixerConfig | None, shape: AttentionShape, length: int, dtype: torch.dtype) -> int:
    """Return the bytes that the cache of one sequence holds for one attention module after `length` tokens, as
    `generate` fills it.

    config: of its mixer; None: softmax attention. dtype: of the model. The count equals the bytes of the live cache: of
    MixerCacheLayer.nbytes(), or of the keys and values of a DynamicCache. Bidirectional attention caches nothing.
    """
    if not shape.causal:
        return 0
    config = Softmax() if config is None else config
    cost = MIXERS[config].cost(config, shape, length)
    return dtype.itemsize * (cost.cache - cost.float32) + max(4, dtype.itemsize) * cost.float32
