"""How mixers start close to the softmax attention they replace: one file for each family of them."""

from surgery.conversion.mixer_init.base import MIXER_INITS, InitializedMixer, MixerInit, relative_error

__all__ = ["MIXER_INITS", "InitializedMixer", "MixerInit", "relative_error"]
