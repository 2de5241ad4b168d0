"""The verdict on a conversion: one sentence, for the report page, the model card, `surgery inspect`, `surgery run`
and the demo.

It begins with what the conversion is for: the cache if attention was replaced, the weights if linears were. Weights and
bytes are counted in the stored tensors, the cache in its layout. Perplexity, agreement, needles, prefill and decoding
are rows of `surgery eval`. Without such rows the perplexity is that of the last healing run on its validation text,
else that of the conversion on its held-out text. What was not measured is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.core.tables import format_count, format_tokens
from surgery.publish.figures import CACHE_TOKENS, Figure, checkpoint_figures, speed_in_words
from surgery.publish.measured import other_base
from surgery.publish.ratios import Ratio, before_storage, held_out_ratio

SAME = 0.0005  # shares that differ from 100% by less are "the same"


def verdict(report: Mapping[str, Any], results: Mapping[str, Any] | None = None) -> str:
    """Return the verdict, e.g. "Cache 38.2% at 8K tokens, perplexity x 1.01 [1.005, 1.02], needles 98% of 100
    (original 99%), 101.3% of the bytes; healed on 3M tokens."

    report: surgery_report.json, with the costs of attention as `surgery inspect` adds them. results: results.json of
    `surgery eval OUT --compare SRC`; None: not measured. A base that is not the original is named.
    """
    figures = checkpoint_figures(report)
    rows = [row for row in (results or {}).get("rows", ()) if {"base", "converted"} <= row["values"].keys()]
    base, equal = other_base(report, results), measured_agreement(results)
    measured = [
        _perplexity(report, results),
        *_agreement(equal),
        *_needles(rows, base or "original"),
        *_speed(rows),
    ]
    lead, size = _purpose(figures), _size(figures["bytes"])
    parts = [*lead, *(clause for clause in measured if clause), size] if lead else [size, *filter(None, measured)]
    unmeasured = [] if measured[0] else ["quality not measured"]
    against = f"; measured against {base}, not the original" if base and (rows or equal) else ""
    sentence = ", ".join([*parts, *unmeasured]) + against + _healing(report.get("training") or []) + "."
    return sentence[0].upper() + sentence[1:]


def _purpose(figures: Mapping[str, Figure]) -> list[str]:
    """Return what became of the cache and of the weights of the replaced linears; [] if neither changed."""
    said, cache, replaced = [], figures.get("cache"), figures.get("replaced")
    if cache and not _is_same(cache):
        said.append(f"cache {cache.share} at {format_tokens(CACHE_TOKENS)} tokens")
    if replaced and not _is_same(replaced):
        said.append(f"{replaced.share} of the weights of the replaced linears")
    return said


def _size(size: Figure) -> str:
    return "same bytes" if _is_same(size) else f"{size.share} of the bytes"


def _is_same(figure: Figure) -> bool:
    return abs(figure.after - figure.before) < SAME * figure.before


def measured_ratio(results: Mapping[str, Any] | None) -> Ratio | None:
    """Return the ratio of the perplexities in results.json of `surgery eval OUT --compare SRC`, with its interval; None
    if it has none.
    """
    for row in (results or {}).get("rows", ()):
        both = {"base", "converted"} <= row["values"].keys()
        if both and row.get("suite") == "ppl" and row["metric"].get("kind") == "ppl" and not row["group"]:
            ratio = row.get("ratio") or {"change": row["values"]["converted"] / row["values"]["base"]}
            return Ratio(float(ratio["change"]), ratio.get("low"), ratio.get("high"))
    return None


def _perplexity(report: Mapping[str, Any], results: Mapping[str, Any] | None) -> str:
    if (measured := measured_ratio(results)) is not None:
        return f"perplexity {measured}"
    run = (report.get("training") or [{}])[-1].get("validation") or {}
    original, healed = ((run.get(key) or {}).get("perplexity") for key in ("original", "after"))
    if original and healed:
        return f"perplexity {Ratio(healed / original)} on validation text{before_storage(report)}"
    ratio = held_out_ratio(report.get("held_out"))
    when = f"{' before healing' if run else ''}{before_storage(report)}"
    return f"perplexity {ratio} on held-out text{when}" if ratio else ""


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
    """Return the share of needles that were found; [] if the original does no better than guessing, which is no
    evidence.
    """
    for row in rows:
        if (row.get("suite", row["task"]), row["task"], row["metric"]["name"]) == (
            "needle",
            "needle",
            "accuracy",
        ) and not row["group"]:
            shares = {role: 100 * row["values"][role] / row["metric"]["scale"] for role in ("base", "converted")}
            guessed = any("guessing" in str(flag) for flag in row.get("flags", ()))
            said = f"needles {shares['converted']:.4g}% of {row['samples']} ({base} {shares['base']:.4g}%)"
            return [] if guessed or not shares["base"] else [said]
    return []


def _speed(rows: list[Any]) -> list[str]:
    """Return prefill and decoding at the longest measured length, beside the base on the same device."""
    timed = [row for row in rows if row.get("suite") == "speed" and set(row["group"]) == {"length"}]
    if not timed:
        return []
    longest = max(row["group"]["length"] for row in timed)
    values = {row["metric"]["name"]: row["values"] for row in timed if row["group"]["length"] == longest}
    said = []
    for name, label in (("prefill_ms", f"prefill of {format_tokens(longest)} tokens"), ("decode_ms", "decoding")):
        if name in values and min(values[name].values()) > 0:
            said.append(f"{label} {speed_in_words(values[name]['base'], values[name]['converted'])}")
    return said


def _healing(runs: list[Any]) -> str:
    if not runs:
        return "; not healed"
    tokens = sum(int(stage["tokens"]) for run in runs for stage in run.get("stages", []))
    unchanged = " without improvement" if (runs[-1].get("delivered") or {}).get("state") == "start" else ""
    return f"; healed on {format_count(tokens)} tokens{unchanged}"
