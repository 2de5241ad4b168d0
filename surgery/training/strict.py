"""Settings that are checked whole before anything runs, with messages for people."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from surgery.errors import SurgeryError, nearest
from surgery.recipe import read_yaml

UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def whole(value: Any) -> Any:
    """100M, 2.5B and 512k as numbers; anything else as it is."""
    found = (
        re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?)([kmb]?)", value.strip().lower()) if isinstance(value, str) else None
    )
    return round(float(found[1]) * UNITS[found[2]]) if found else value


def number(value: Any) -> Any:
    """1e-3, which YAML takes for a word, as a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


Count = Annotated[int, BeforeValidator(whole)]
Real = Annotated[float, BeforeValidator(number)]


def said(error: ValidationError, where: str, known: Iterable[str] = ()) -> SurgeryError:
    """One sentence for each place that is wrong."""
    sentences = []
    for e in error.errors():
        place = ".".join(str(part) for part in e["loc"]) or "it"
        if e["type"] == "extra_forbidden":
            sentences.append(f"unknown key {place!r}{nearest(str(e['loc'][-1]), known) if known else ''}")
        elif e["type"] == "missing":
            sentences.append(f"{place} is missing")
        else:
            sentences.append(f"{place}: {e['msg']} (got {e['input']!r})")
    return SurgeryError(f"{where}: " + "; ".join(dict.fromkeys(sentences)))


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, mappings key by key."""
    both = dict(below)
    for key, value in above.items():
        inside = both.get(key)
        both[key] = merged(inside, value) if isinstance(inside, dict) and isinstance(value, dict) else value
    return both


def put(data: dict[str, Any], path: str, value: Any) -> None:
    """data["stages"][0]["rate"] = value for the path stages.0.rate; "stages.*.rate" is all of them."""
    first, _, rest = path.partition(".")
    place: Any = data
    keys: list[Any] = list(range(len(place))) if first == "*" and isinstance(place, list) else [first]
    try:
        for key in keys:
            key = int(key) if isinstance(place, list) else key
            if not rest:
                place[key] = value
            else:
                if isinstance(place, dict) and not isinstance(place.get(key), (dict, list)):
                    place[key] = {}
                put(place[key], rest, value)
    except (IndexError, ValueError, TypeError, AttributeError):
        raise SurgeryError(f"--set {path}: no such place in the recipe") from None


def put_text(data: dict[str, Any], text: str) -> None:
    """key.path=value, the value read as YAML."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise SurgeryError(f"--set {text!r}: write key=value, for example --set stages.0.tokens=20M")
    try:
        read = read_yaml(value)
    except ValueError:
        raise SurgeryError(f"--set {text[:100]!r}: not a YAML value") from None
    put(data, path.strip(), read)
