"""How mixers start close to the softmax attention they replace: one file for each family of them."""

from surgery.conversion.mixer_init.base import STARTS, Start, Started, relative_error

__all__ = ["STARTS", "Start", "Started", "relative_error"]
