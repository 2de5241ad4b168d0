"""Initialization of mixers from the softmax attention that they replace: one file for each family."""

from surgery.conversion.mixer_init.base import MIXER_INITS, InitializedMixer, MixerInit, relative_error

__all__ = ["MIXER_INITS", "InitializedMixer", "MixerInit", "relative_error"]
