"""What mixers keep and cost, against softmax attention, at several contexts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from surgery.mixers import MIXERS, AttentionShape, MixerConfig
from surgery.mixers.masks.base import MASKS

CONTEXTS = (1024, 8192, 65536)


def softmax_cache(shape: AttentionShape, length: int) -> int:
    """Numbers of keys and values that softmax attention keeps for one sequence."""
    return shape.groups * (shape.key + shape.value) * min(length, shape.window or length)


def softmax_macs(shape: AttentionShape, length: int) -> int:
    """Multiply-accumulates of the scores and the mixing for the next token."""
    return shape.heads * (shape.key + shape.value) * min(length, shape.window or length)


def mixer_rows(found: Iterable[tuple[str, MixerConfig, AttentionShape]]) -> list[dict[str, Any]]:
    """One row for the layers of one mixer: (path, config, shape) of each in; numbers kept and multiply-accumulates for
    the next token at each of CONTEXTS, summed over the layers, before and after."""
    rows: dict[str, dict[str, Any]] = {}
    for path, config, shape in found:
        row = rows.setdefault(
            describe_mixer(config),
            {
                "mixer": describe_mixer(config),
                "paths": [],
                "params": 0,
                "cache": {},
                "macs": {},
                "notes": notes(config),
            },
        )
        row["paths"].append(path)
        for length in CONTEXTS:
            cost = MIXERS[config].cost(config, shape, length)
            _add(row["cache"], length, softmax_cache(shape, length), cost.cache)
            _add(row["macs"], length, softmax_macs(shape, length), cost.macs)
        row["params"] += cost.params
    return list(rows.values())


def _add(sums: dict[str, list[int]], length: int, before: int, after: int) -> None:
    total = sums.setdefault(str(length), [0, 0])
    total[0] += before
    total[1] += after


def describe_mixer(config: Any) -> str:
    """linear, gates mask, hedgehog features; mlr 32|16|16 sliding."""
    if not hasattr(config, "mask"):
        words = [config.name]
        if ranks := getattr(config, "ranks", None):
            words.append("|".join(str(r) for r in ranks))
        return " ".join([*words, *([config.form] if hasattr(config, "form") else [])])
    scores = "delta rule" if config.scores == "delta" else f"{config.features.name} features"
    extras = [f"{name} {getattr(config, name)}" for name in ("window", "sinks", "convolution") if getattr(config, name)]
    return ", ".join(
        [f"{config.name}: {config.mask.name} mask", scores, *(["normalised"] if config.normalise else []), *extras]
    )


def notes(config: Any) -> list[str]:
    """What a user should know of a mixer's state."""
    mask = getattr(config, "mask", None)
    if mask is not None and not MASKS[mask].bounded:
        return [f"a {mask.name} mask has no bounded state: each step keeps and reads all tokens so far"]
    return []
