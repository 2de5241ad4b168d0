"""Notes on replacements that were measured to be slower than the original layers, shown with plans and reports."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from surgery.kernels.tuning import IMPLEMENTATIONS, DeviceKey, NamedSizes, Pass, named_sizes, nearby_rows, tables

TOKEN_COUNTS = (1, 16, 512, 8192)
MEASURED_LANES = {
    "forward": 96,
    "backward": 96,
    "step": 32,
    "captured step": 32,
}  # batch size times heads of the measurements
DEFAULT_CONTEXT = 4096  # for models whose config has no context length
PASS_LABELS: dict[Pass, str] = {"forward": "prefill", "backward": "training", "step": "decoding"}


def speed_notes(
    structures: Iterable[tuple[dict[str, Any], list[int]]], mixers: Iterable[str], context: int | None
) -> list[str]:
    """Return one line per kind of linear (config, (out, in)) and per mixer (as `describe_mixer` formats it) that was measured to
    be slower than the original. context: tokens; None: DEFAULT_CONTEXT."""
    if not any(table["rows"] for table in tables()):
        return []
    found = {_linear_note(config, *shape) for config, shape in structures}
    found |= {_attention_note(mixer, context or DEFAULT_CONTEXT) for mixer in mixers}
    device = tables()[0]["device"]
    return [f"note: speed on one {device}, launches counted: {note}" for note in sorted(found - {""})]


def plan_notes(plan: dict[str, Any], context: int | None = None) -> list[str]:
    """Return the notes for a plan (see `plan_dict`)."""
    linears = ((entry["first"], entry["shape"]) for entry in plan["targets"] if entry["first"])
    return speed_notes(linears, (row["mixer"] for row in plan["mixers"]), context)


def report_notes(report: dict[str, Any], context: int | None = None) -> list[str]:
    """Return the notes for a report. Kinds of linears whose ranks differ are noted at their median rank."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for module in report.get("modules", ()):
        if "shape" in module and module["structure"]["structure"] != "dense":
            kind = {name: value for name, value in module["structure"].items() if name != "rank"}
            kinds.setdefault(json.dumps([kind, module["shape"]]), []).append(module)
    middle = [sorted(kind, key=lambda m: m["structure"].get("rank") or 0)[len(kind) // 2] for kind in kinds.values()]
    linears = ((module["structure"], module["shape"]) for module in middle)
    return speed_notes(linears, (row["mixer"] for row in report.get("mixer_rows", ())), context)


def speed_ratio(op: str, pass_: Pass, at: NamedSizes) -> float | None:
    """Return time of the original / time of the fastest implementation, interpolated between measured sizes; None if no nearby
    size was measured."""
    table = tables()[0]
    rows = nearby_rows(op, pass_, at, DeviceKey(tuple(table["capability"]), table["dtype"]))
    log_ratios = [
        (
            weight,
            math.log(
                row["original"]
                / min(row[implementation] for implementation in IMPLEMENTATIONS if row.get(implementation))
            ),
        )
        for weight, row in rows
        if row.get("original")
    ]
    return math.exp(sum(w * r for w, r in log_ratios) / sum(w for w, _ in log_ratios)) if log_ratios else None


def _linear_note(config: dict[str, Any], out: int, in_: int) -> str:
    structure = {"monarch": "btt"}.get(config["structure"], config["structure"])
    named = {"inputs": in_, "outputs": out, "rank": config.get("rank") or 1}
    name = config["structure"]
    if isinstance(config.get("blocks"), (list, tuple)):
        named |= dict(zip(("rows", "columns"), config["blocks"]))
        name += f" {config['blocks'][0]}x{config['blocks'][1]}"
    ratios = {n: speed_ratio(structure, "forward", named_sizes(tokens=n, **named)) for n in TOKEN_COUNTS}
    graph = graph_note(speed_ratio(structure, "captured", named_sizes(tokens=1, **named)))
    lost = [f"{r:.2f}x at {n:,} token{'s' if n > 1 else graph}" for n, r in ratios.items() if r is not None and r < 1]
    return f"{name} for {in_:,} -> {out:,} is slower than dense: {', '.join(lost)}" if lost else ""


def graph_note(ratio: float | None) -> str:
    """Format the ratio inside a CUDA graph, where launches cost nothing."""
    return "" if ratio is None else f" ({ratio:.2f}x in a CUDA graph)"


def _attention_note(mixer: str, context: int) -> str:
    """mixer: "mlr 32|32 sliding", "linear: gates mask, delta rule". The tables have no rows with a window."""
    words = mixer.replace(",", "").split()
    op = words[0] if words[0] != "linear:" else words[1] + (" delta" if "delta rule" in mixer else "")
    levels = {"levels": words[1].count("|") + 1} if op == "mlr" else {}
    here = {pass_: _ratio_to_softmax(op, pass_, context, levels) for pass_ in PASS_LABELS}
    if not any(r is not None and r < 1 for r in here.values()):
        return ""
    graph = graph_note(_ratio_to_softmax(op, "captured step", context, levels))
    known = {pass_: r for pass_, r in here.items() if r is not None}
    ratios = ", ".join(f"{PASS_LABELS[p]} {r:.2f}x{graph if p == 'step' else ''}" for p, r in known.items())
    ahead = ", ".join(
        f"in {PASS_LABELS[pass_]} {_break_even(op, pass_, levels)}" for pass_, r in here.items() if r and r < 1
    )
    without = ", measured without window and sinks," if op != "mlr" and {"window", "sinks"} & set(words[1:]) else ""
    return f"{mixer}{without} beside SDPA at a context of {context:,} tokens: {ratios}; ahead {ahead}"


def _ratio_to_softmax(op: str, pass_: Pass, length: int, levels: dict[str, int]) -> float | None:
    name = "context" if "step" in pass_ else "tokens"
    return speed_ratio(op, pass_, named_sizes(lanes=MEASURED_LANES[pass_], **{name: length}, **levels))


def _break_even(op: str, pass_: Pass, levels: dict[str, int]) -> str:
    """Return the shortest measured length from which on the replacement is faster."""
    name = "context" if pass_ == "step" else "tokens"
    lengths = {row["sizes"].get(name) for row in tables()[0]["rows"] if (row["op"], row["pass"]) == (op, pass_)} - {
        None
    }
    behind = [n for n in lengths if (_ratio_to_softmax(op, pass_, n, levels) or 0) < 1]
    since = [n for n in lengths if n > max(behind, default=0)]
    return f"from {min(since):,}" if since else f"at no length up to {max(lengths):,}"
