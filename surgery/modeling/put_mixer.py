"""Mixers put into the modules of a model, whatever they replace."""

from __future__ import annotations

from typing import Any

from surgery.mixers import MixerConfig
from surgery.mixers.native_config import Native
from surgery.modeling.attention import replace_attention


def put_mixer(model: Any, path: str, config: MixerConfig) -> None:
    """Put a mixer with this config into the module at `path`: in place of its softmax attention, or as level weights of
    a native linear layer."""
    if isinstance(config, Native):
        # Imported with models that have level weights.
        from surgery.modeling.native import add_level_weights

        add_level_weights(model, path, config)
    else:
        replace_attention(model, path, config)
