"""Sequence mixers, one file each, with their masks and feature maps.

`MIXERS[config]` is the mixer class of a config.
"""

from surgery.mixers.base import (
    MIXERS,
    AttentionShape,
    Mixer,
    MixerConfig,
    MixerCost,
    MixerInputs,
    MixerState,
    mixer_config,
)

__all__ = ["MIXERS", "AttentionShape", "Mixer", "MixerConfig", "MixerCost", "MixerInputs", "MixerState", "mixer_config"]
