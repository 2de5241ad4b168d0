"""The verdict on a conversion: one sentence of measured values, for the report page, `surgery run` and the demo.

Size is counted in the stored tensors. Perplexity, agreement, needles, prefill, decoding and cache are rows of `surgery
eval`.
Without such rows the perplexity is that of the last healing run on its validation text, else that of the conversion on
its held-out text. What was not measured is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.core.tables import format_count, format_tokens
from surgery.publish.measured import other_base
from surgery.publish.ratios import before_storage, format_ratio, perplexity_ratio
from surgery.publish.tables import speed_in_words

SAME = 0.005  # sizes that differ by less are "the same"


def verdict(report: Mapping[str, Any], results: Mapping[str, Any] | None = None) -> str:
    """Return the verdict, e.g. "46% smaller, perplexity x 1.02, same most likely token 93.1%, needles 98 of 100 (original
    99); healed on 3M tokens."

    report: surgery_report.json. results: results.json of `surgery eval OUT --compare SRC`; None: not measured. A base
    that is not the original is named.
    """
    rows = [row for row in (results or {}).get("rows", ()) if {"base", "converted"} <= row["values"].keys()]
    base, equal = other_base(report, results), measured_agreement(results)
    measured = [
        _perplexity(report, results),
        *_agreement(equal),
        *_needles(rows, base or "original"),
        *_speed(rows, base or "the original"),
    ]
    parts = [_size(report["totals"]), *(clause for clause in measured if clause)]
    unmeasured = [] if measured[0] else ["quality not measured"]
    against = f"; measured against {base}, not the original" if base and (rows or equal) else ""
    return ", ".join([*parts, *unmeasured]) + against + _healing(report.get("training") or []) + "."


def _size(totals: Mapping[str, Any]) -> str:
    share = totals["bytes_after"] / max(totals["bytes_before"], 1)
    if abs(1 - share) < SAME:
        return "Same size"
    return f"{abs(1 - share):.0%} {'smaller' if share < 1 else 'larger'}"


def measured_ratio(results: Mapping[str, Any] | None) -> float | None:
    """Return the ratio of the perplexities in results.json of `surgery eval OUT --compare SRC`; None if it has none."""
    for row in (results or {}).get("rows", ()):
        both = {"base", "converted"} <= row["values"].keys()
        if both and row.get("suite") == "ppl" and row["metric"].get("kind") == "ppl" and not row["group"]:
            return float((row.get("ratio") or {}).get("change") or row["values"]["converted"] / row["values"]["base"])
    return None


def _perplexity(report: Mapping[str, Any], results: Mapping[str, Any] | None) -> str:
    if (measured := measured_ratio(results)) is not None:
        return f"perplexity {format_ratio(measured)}"
    run = (report.get("training") or [{}])[-1].get("validation") or {}
    original, healed = ((run.get(key) or {}).get("perplexity") for key in ("original", "after"))
    if original and healed:
        return f"perplexity {format_ratio(healed / original)} on validation text{before_storage(report)}"
    held = report.get("held_out")
    ratio = perplexity_ratio(held["original"], held["converted"], held["unit"]) if held else None
    when = f"{' before healing' if run else ''}{before_storage(report)}"
    return f"perplexity {format_ratio(ratio)} on held-out text{when}" if ratio else ""


def measured_agreement(results: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the values of the suite `agreement` over the whole text, by metric; {} if it was not measured."""
    return {
        row["metric"]["name"]: row["values"]["converted"]
        for row in (results or {}).get("rows", ())
        if row.get("suite") == "agreement" and not row["group"] and "converted" in row["values"]
    }


def _agreement(values: Mapping[str, float]) -> list[str]:
    """Return how often the most likely next token is the base's, the divergence, and the length of equal greedy texts."""
    said = [f"same most likely token {values['top1']:.1f}% (KL {values['kl']:.3g} nats)"] if "top1" in values else []
    if "same_tokens" in values:
        said.append(f"greedy texts equal for {values['same_tokens']:.0f} tokens on average")
    return said


def _needles(rows: list[Any], base: str) -> list[str]:
    """Return the needles that were found; [] if the original does no better than guessing, which is no evidence."""
    for row in rows:
        if (row.get("suite", row["task"]), row["task"], row["metric"]["name"]) == (
            "needle",
            "needle",
            "accuracy",
        ) and not row["group"]:
            counts = {
                role: round(row["values"][role] / row["metric"]["scale"] * row["samples"])
                for role in ("base", "converted")
            }
            guessed = any("guessing" in str(flag) for flag in row.get("flags", ()))
            said = f"needles {counts['converted']} of {row['samples']} ({base} {counts['base']})"
            return [] if guessed or not counts["base"] else [said]
    return []


def _speed(rows: list[Any], base: str) -> list[str]:
    """Return prefill, decoding and cache at the longest measured length, beside the base on the same device."""
    timed = [row for row in rows if row.get("suite") == "speed" and set(row["group"]) == {"length"}]
    if not timed:
        return []
    longest = max(row["group"]["length"] for row in timed)
    values = {row["metric"]["name"]: row["values"] for row in timed if row["group"]["length"] == longest}
    said = []
    for name, label in (("prefill_ms", f"prefill of {format_tokens(longest)} tokens"), ("decode_ms", "decoding")):
        if name in values and min(values[name].values()) > 0:
            said.append(f"{label} {speed_in_words(values[name]['base'], values[name]['converted'])}")
    cache = values.get("cache_mb")
    if cache and cache["base"] and abs(1 - cache["converted"] / cache["base"]) >= SAME:
        said.append(f"cache {cache['converted'] / cache['base']:.0%} of {base}'s")
    return said


def _healing(runs: list[Any]) -> str:
    if not runs:
        return "; not healed"
    tokens = sum(int(stage["tokens"]) for run in runs for stage in run.get("stages", []))
    unchanged = " without improvement" if (runs[-1].get("delivered") or {}).get("state") == "start" else ""
    return f"; healed on {format_count(tokens)} tokens{unchanged}"
