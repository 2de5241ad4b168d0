"""The config object of the contents of a config.json."""

from __future__ import annotations

import copy
import math
from typing import Any

SPECIAL_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def config_object(config_type: type[Any], config: dict[str, Any]) -> Any:
    """Return an object of a transformers config class with the values of a config.json, which is not changed.

    transformers writes infinity and NaN as {"__float__": "Infinity"}, and reads that from files only.
    """
    return config_type.from_dict(_decode(copy.deepcopy(config)))


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"__float__"} and isinstance(tag := value["__float__"], str) and tag in SPECIAL_FLOATS:
            return SPECIAL_FLOATS[tag]
        return {key: _decode(entry) for key, entry in value.items()}
    return [_decode(entry) for entry in value] if isinstance(value, list) else value
