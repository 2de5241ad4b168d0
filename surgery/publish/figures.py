"""The figures of a converted checkpoint: parameters, bytes and cache before and after.

The last lines of `surgery convert`, `surgery inspect`, the page, the model card and the verdict take them from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgery.core.files import size_text
from surgery.core.tables import format_count, format_tokens

CACHE_TOKENS = 8192  # length of the sequence whose cache is the figure of a checkpoint
# What results say of the size of each model, and the labels of tables and charts.
SIZES = {
    "parameters": "stored parameters",
    "stored_bytes": "stored bytes",
    "cache_bytes": f"cache bytes at {format_tokens(CACHE_TOKENS)} tokens",
}
KEPT = "parameters of replaced matrices kept"


@dataclass(frozen=True)
class Figure:
    """A number of parameters or bytes before and after a conversion. of: what is counted."""

    of: str
    before: float
    after: float
    in_bytes: bool = False

    @property
    def share(self) -> str:
        """What is left, in percent."""
        return format_share(self.after, self.before)

    @property
    def texts(self) -> tuple[str, str]:
        """Before and after, with a unit and three digits."""
        before, after = (size_text(n) if self.in_bytes else format_count(round(n)) for n in (self.before, self.after))
        return before, after


def checkpoint_figures(report: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the figures "replaced" (parameters of the replaced matrices), "parameters" and "bytes" of the checkpoint,
    and "cache" of one sequence of CACHE_TOKENS tokens.

    A figure that a report does not have is left out: no matrix was replaced, or no attention. report:
    surgery_report.json, for the cache with the costs of `summary.attention_costs`.
    """
    total = report["totals"]
    found = {
        "parameters": Figure("parameters of the checkpoint", total["params_before"], total["params_after"]),
        "bytes": Figure("bytes on disk", total["bytes_before"], total["bytes_after"], in_bytes=True),
    }
    if before := total["replaced_params_before"]:
        found["replaced"] = Figure("parameters of replaced matrices", before, total["replaced_params_after"])
    if costs := ((report.get("attention_totals") or {}).get("cache_bytes") or {}).get(str(CACHE_TOKENS)):
        before, after = costs
        dtype = report["cache_dtype"]
        label = f"cache of one sequence of {format_tokens(CACHE_TOKENS)} tokens, keys and values in {dtype}"
        found["cache"] = Figure(label, before, after, in_bytes=True)
    return found


def size_rows(models: Sequence[Mapping[str, Any]], base: str | None) -> dict[str, list[tuple[str, float]]]:
    """Return the rows of a comparison's table that are about sizes, by label: a cell (text, value to sort by) for each
    model. Sizes have their share of the base's in parentheses. models: those of comparison.json.
    """
    of_base = next((model for model in models if model["name"] == base), {})
    rows = {}
    for key, label in {"kept": KEPT, **SIZES}.items():
        cells = []
        for model in models:
            size, whole = model.get(key), None if model["name"] == base else of_base.get(key)
            if size is None:
                cells.append(("", -1.0))
            elif key == "kept":
                cells.append((format_share(size, 1), float(size)))
            else:
                text = format_count(int(size)) if key == "parameters" else size_text(size)
                cells.append((f"{text} ({format_share(size, whole)})" if whole else text, float(size)))
        if any(text for text, _ in cells):
            rows[label] = cells
    return rows


def format_share(share: float, whole: float) -> str:
    """Format share / whole in percent, "-" if `whole` is 0."""
    return f"{share / whole:.1%}" if whole else "-"


def speed_in_words(before: float, after: float) -> str:
    """Return "1.4x faster", "1.7x slower" or "as fast"."""
    ratio = before / after
    if max(ratio, 1 / ratio) < 1.05:
        return "as fast"
    return f"{ratio:.1f}x faster" if ratio > 1 else f"{1 / ratio:.1f}x slower"
