"""Old names of mixer options, which recipes, stored configs and Python calls may still use.

linear       gate    output_gate       of the output, unlike the gates of a mask
linear       near    near_tokens
head_hybrid  kept    softmax_heads
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from surgery.core.errors import RenamedWarning, SurgeryError

T = TypeVar("T")
RENAMED_OPTIONS: dict[str, dict[str, str]] = {
    "linear": {"gate": "output_gate", "near": "near_tokens"},
    "head_hybrid": {"kept": "softmax_heads"},
}


def renamed_options(mixer: object, options: Iterable[str]) -> dict[str, str]:
    """Return {old name: new name} of those of `options` that are old names of the mixer's. mixer: its name."""
    names = RENAMED_OPTIONS.get(mixer, {}) if isinstance(mixer, str) else {}
    return {name: names[name] for name in options if name in names}


def renew_options(mixer: object, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mixer's options under today's names.

    Raises SurgeryError for an option that is given under both names.
    """
    names = renamed_options(mixer, options)
    for old, new in names.items():
        if new in options:
            raise SurgeryError(f"{mixer}: {old} is the old name of {new}, and both are given. Leave out {old}")
    return {names.get(name, name): value for name, value in options.items()}


def renew_mixer(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored mixer, {"mixer": its name, option: value}, under today's names, as well as the mixers inside of
    it.

    Raises SurgeryError for an option that is given under both names.
    """
    options = {name: value for name, value in entry.items() if name != "mixer"}
    renewed = renew_options(entry.get("mixer"), options)
    inner = {
        name: renew_mixer(value) for name, value in renewed.items() if isinstance(value, Mapping) and "mixer" in value
    }
    return {**({"mixer": entry["mixer"]} if "mixer" in entry else {}), **renewed, **inner}


def accept_old_options(config_type: type[T]) -> type[T]:
    """Let the constructor of a mixer's config take old names as keywords, with a warning of the new ones
    (decorator).
    """
    made: Any = config_type
    construct = made.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        for old, new in renamed_options(made.name, options).items():
            warnings.warn(f"{config_type.__name__}: {old} is now {new}", RenamedWarning, stacklevel=2)
        construct(self, *args, **renew_options(made.name, options))

    made.__init__ = __init__
    return config_type
