"""Old words of recipes and reports, with the words that replaced them after version 0.2. No other module knows the old ones.

refine: auto                                  tune: {model: 20}
refine: {..}                                  tune: {..}; epochs that it did not give were 20, and are 0 now
allocate: auto, best, spread, depth           allocate: measured
attention.hybrid keep, by, of                 attention.hybrid softmax, choose_by, unit
by: sensitivity, restored, gates              choose_by: measured
align_steps, gate_steps, weights, repeated    left out: constants of surgery.conversion.aligned and .restored
keep of a healing recipe                      checkpoints
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from surgery.core.errors import RenamedWarning, SurgeryError

TUNE_AUTO = {"model": 20}
OLD_EPOCHS = {"layers": 20, "model": 20}  # of a `refine` mapping that did not give them
OLD_ALLOCATIONS = ("auto", "best", "spread", "depth")
OLD_CHOICES = ("sensitivity", "restored", "gates")
HYBRID_KEYS = {"keep": "softmax", "by": "choose_by", "of": "unit"}
# Options of choices of softmax layers, and the values that have become constants.
HYBRID_CONSTANTS = {"align_steps": 100, "gate_steps": 200, "weights": "far", "repeated": 0.5}


def renew_recipe(data: Mapping[str, Any], *, is_whole: bool = True) -> tuple[dict[str, Any], list[str]]:
    """Return (a conversion recipe in today's words, a line for each old word in it).

    is_whole: whether a `refine` mapping had its old defaults; a single epoch of an override leaves the other one to the recipe.

    Raises SurgeryError for a key that is given under both names.
    """
    notes: list[str] = []
    renewed: dict[str, Any] = {}
    for key, value in data.items():
        if key == "refine":
            key, value = "tune", _tune(value, notes, is_whole)
        elif key == "allocate" and value in OLD_ALLOCATIONS:
            reason = ": moving parameters between early and late layers is gone" if value == "depth" else ""
            notes.append(f"allocate: {value} is now allocate: measured{reason}")
            value = "measured"
        elif key == "attention" and isinstance(value, Mapping) and isinstance(value.get("hybrid"), Mapping):
            value = {**value, "hybrid": _hybrid(value["hybrid"], notes)}
        _add(renewed, key, value, "refine", "")
    return renewed, notes


def renew_override(path: Sequence[str], value: Any) -> tuple[list[str], Any, list[str]]:
    """Return (path, value, lines on old words) of an override such as `refine.model=3`; the path is empty if its key is gone."""
    nested: Any = value
    for key in reversed(path):
        nested = {key: nested}
    nested, notes = renew_recipe(nested, is_whole=len(path) == 1)
    renewed: list[str] = []
    while len(renewed) < len(path):
        if not nested:
            return [], None, notes
        ((key, nested),) = nested.items()
        renewed.append(key)
    return renewed, nested, notes


def renew_healing_recipe(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return (the keys of a healing recipe in today's words, a line for each old word in it)."""
    renewed: dict[str, Any] = {}
    for key, value in data.items():
        _add(renewed, "checkpoints" if key == "keep" else key, value, "keep", "")
    return renewed, ["keep is now checkpoints"] if "keep" in data else []


def warn_renamed(notes: Sequence[str]) -> None:
    """Warn of the old words in a recipe."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "surgery":
        frame, level = frame.f_back, level + 1
    for note in notes:  # the warning names the line of the user's program, not one of ours
        warnings.warn(f"recipe: {note}", RenamedWarning, stacklevel=level - 1)


def changed_choice(data: Mapping[str, Any]) -> str | None:
    """Return the setting of an old recipe whose choice today's conversion would make in another way, None if there is none."""
    if data.get("refine") == "auto":
        return "refine: auto"
    if data.get("allocate") in OLD_ALLOCATIONS:
        return f"allocate: {data['allocate']}"
    attention = data.get("attention") or {}
    hybrid = attention.get("hybrid") or {}
    if hybrid.get("keep") is None or hybrid.get("by") == "every":
        return None
    by, of_heads = hybrid.get("by", "sensitivity"), hybrid.get("of") == "heads"
    unchanged = by == ("sensitivity" if of_heads else "restored")
    unchanged &= all(hybrid.get(key, value) == value for key, value in HYBRID_CONSTANTS.items())
    return None if unchanged else f"attention.hybrid by: {by}"


def renew_report(report: dict[str, Any]) -> dict[str, Any]:
    """Return a surgery_report.json in today's words. Scores of ways that are gone are left out."""
    renewed = {("tune" if key == "refine" else key): value for key, value in report.items()}
    if isinstance(recipe := report.get("recipe"), dict):
        renewed["recipe"] = renew_recipe(recipe)[0]
    if isinstance(allocation := report.get("allocation"), dict):
        renewed["allocation"] = _chosen(allocation, ("spread", "depth"), ("expected", "tilt", "tilts"))
    if isinstance(hybrid := report.get("hybrid"), dict):
        renewed["hybrid"] = _chosen(hybrid, OLD_CHOICES, ("alone", "gate_values", "gate_losses"))
    return renewed


def _tune(value: Any, notes: list[str], is_whole: bool) -> Any:
    if value == "auto":
        notes.append("refine: auto is now tune: {model: 20}, epochs in place of a budget of time")
        return dict(TUNE_AUTO)
    if isinstance(value, Mapping) and is_whole:
        value = {**OLD_EPOCHS, **value}
        epochs = f"{{layers: {value['layers']}, model: {value['model']}}}"
        notes.append(f"refine is now tune: write {epochs}; epochs that tune does not give are 0")
        return value
    notes.append("refine is now tune" if is_whole else "refine is now tune, whose epochs are 0 unless they are given")
    return value


def _hybrid(hybrid: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    renewed: dict[str, Any] = {}
    for key, value in hybrid.items():
        if key in HYBRID_CONSTANTS:
            notes.append(f"attention.hybrid.{key} is gone; choose_by: measured works as with its default")
            continue
        new = HYBRID_KEYS.get(key, key)
        if key == "by" and value in OLD_CHOICES:
            notes.append(f"attention.hybrid by: {value} is now choose_by: measured")
            value = "measured"
        elif new != key:
            notes.append(f"attention.hybrid.{key} is now attention.hybrid.{new}")
        _add(renewed, new, value, key, "attention.hybrid.")
    return renewed


def _add(renewed: dict[str, Any], key: str, value: Any, old: str, where: str) -> None:
    if key in renewed:
        raise SurgeryError(f"{where}{old} is the old name of {where}{key}, and both are given. Leave out {where}{old}")
    renewed[key] = value


def _chosen(entry: dict[str, Any], old: Sequence[str], gone: Sequence[str]) -> dict[str, Any]:
    """Return a report's entry of a choice. old: names of ways that are `measured` today. gone: keys that are left out."""
    renewed = {("measured" if key in old else key): value for key, value in entry.items() if key not in gone}
    return {**renewed, "kept": "measured"} if renewed.get("kept") in old else renewed
