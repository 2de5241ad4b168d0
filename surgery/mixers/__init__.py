"""Sequence mixers: one file each, beside the masks and feature maps they are made of. `MIXERS[config]` is the module
of that config."""

from surgery.mixers.base import MIXERS, AttentionShape, MixerInputs, Mixer, MixerConfig, MixerCost, MixerState, mixer_config

__all__ = ["MIXERS", "AttentionShape", "MixerInputs", "Mixer", "MixerConfig", "MixerCost", "MixerState", "mixer_config"]
