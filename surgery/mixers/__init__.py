"""Sequence mixers: one file each, beside the masks and feature maps they are made of. `MIXERS[config]` is the module
of that config."""

from surgery.mixers.base import MIXERS, AttentionShape, Inputs, Mixer, MixerConfig, MixerCost, State, mixer_config

__all__ = ["MIXERS", "AttentionShape", "Inputs", "Mixer", "MixerConfig", "MixerCost", "State", "mixer_config"]
