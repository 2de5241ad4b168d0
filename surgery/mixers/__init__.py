"""Sequence mixers: one file each, beside the masks and feature maps they are made of. `MIXERS[config]` is the module
of that config."""

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
