"""Notes on replacements that were measured to be slower than the original layers, shown with plans and reports."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from surgery.core.errors import SurgeryError
from surgery.kernels.tuning import (
    IMPLEMENTATIONS,
    MAX_DISTANCE,
    DeviceKey,
    NamedSizes,
    Pass,
    distance,
    has_names,
    is_complete_row,
    named_sizes,
    nearby_rows,
    tables,
)

TOKEN_COUNTS = (1, 16, 512, 8192)
MEASURED_LANES = {
    "forward": 96,
    "backward": 96,
    "step": 32,
    "captured step": 32,
}  # batch size times heads of the measurements
MAX_NAME = 200  # characters of a device's name in a file of times
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


class Predicted(NamedTuple):
    """A predicted time in milliseconds. measured: whether a measured row has exactly these sizes."""

    ms: float
    measured: bool


class MeasuredTimes:
    """Times of linears on the GPU of one table, in the format of kernels/tuning.json.

    Between measured sizes, a time is its lower bound times the mean ratio of time and lower bound of the measured rows, weighted by
    distance^-4 in log sizes. The lower bound is the largest of operations / rate, bytes / bandwidth and the shortest measured time; rate
    and bandwidth are the highest that the table's dense linears reached.
    """

    def __init__(self, table: dict[str, Any]):
        self.width = 4 if table["dtype"] == "float32" else 2
        rows = [row for row in table["rows"] if row["op"] in LINEAR_OPS and row["pass"] in PHASES.values()]
        self.rows = rows
        dense = [(row["original"], _dense_sizes(row["sizes"])) for row in rows if row.get("original")]
        self.rate = max((2 * n * i * o / ms for ms, (n, i, o) in dense), default=0.0)
        self.bandwidth = max((self._bytes(n, i, o, i * o) / ms for ms, (n, i, o) in dense), default=0.0)
        self.shortest = {
            pass_: min((t for row in rows if row["pass"] == pass_ for t in _times(row)), default=0.0)
            for pass_ in PHASES.values()
        }

    def _bytes(self, tokens: int, in_: int, out: int, params: int) -> float:
        return float(self.width * (tokens * (in_ + out) + params))

    def _bound(self, pass_: str, sizes: tuple[int, int, int], params: int) -> float:
        """Return the lower bound of a linear's time. sizes: tokens, inputs, outputs."""
        work, moved = 2 * sizes[0] * params / self.rate, self._bytes(*sizes, params) / self.bandwidth
        return max(work, moved, self.shortest[pass_])

    def _nearby(self, ops: tuple[str, ...], phase: str, at: dict[str, int]) -> list[tuple[float, dict[str, Any]]]:
        """Return (weight, row) of every row of the ops; an empty list if all are more than eight times away."""
        rows = [row for row in self.rows if row["op"] in ops and row["pass"] == PHASES[phase] and _times(row)]
        apart = [distance(row["sizes"], at) for row in rows]
        return (
            [((d * d + 1e-6) ** -2, row) for d, row in zip(apart, rows)] if rows and min(apart) <= MAX_DISTANCE else []
        )

    def dense(self, phase: str, tokens: int, out: int, in_: int) -> Predicted | None:
        """Return the time of a dense linear; None if no nearby size was measured."""
        rows = self._nearby(LINEAR_OPS, phase, {"tokens": tokens, "inputs": in_, "outputs": out})
        known = [(w, row["original"], _dense_sizes(row["sizes"])) for w, row in rows if row.get("original")]
        return self._predict(phase, (tokens, in_, out), in_ * out, [(w, ms, s, s[1] * s[2]) for w, ms, s in known])

    def structured(self, phase: str, tokens: int, config: dict[str, Any], shape: tuple[int, int]) -> Predicted | None:
        """Return the time of a structured linear by its fastest implementation; None if its structure or no nearby size was measured."""
        (out, in_), name = shape, {"monarch": "btt"}.get(config["structure"], config["structure"])
        if name not in LINEAR_OPS or not isinstance(config.get("rank", 1) or 1, int):
            return None
        at = {"tokens": tokens, "inputs": in_, "outputs": out, "rank": config.get("rank") or 1}
        if name == "btt":
            at |= dict(zip(("rows", "columns"), config["blocks"]))
        rows = self._nearby((name,), phase, at)
        known = [(w, min(_times(row)), _dense_sizes(row["sizes"]), _stored(row["sizes"])) for w, row in rows]
        return self._predict(phase, (tokens, in_, out), _stored(at), known)

    def _predict(self, phase: str, sizes: tuple[int, int, int], params: int, rows: list[Any]) -> Predicted | None:
        if not rows or not self.rate:
            return None
        ratios = [(w, math.log(ms / self._bound(PHASES[phase], at, stored))) for w, ms, at, stored in rows]
        mean = sum(w * ratio for w, ratio in ratios) / sum(w for w, _ in ratios)
        exact = [ms for _, ms, at, stored in rows if (at, stored) == (sizes, params)]
        return Predicted(exact[0] if exact else math.exp(mean) * self._bound(PHASES[phase], sizes, params), bool(exact))


LINEAR_OPS = ("btt", "low_rank")
LINEAR_SIZES: dict[str, tuple[str, ...]] = {"low_rank": ("tokens", "inputs", "outputs", "rank")}
LINEAR_SIZES["btt"] = (*LINEAR_SIZES["low_rank"], "rows", "columns")
PHASES = {"prefill": "forward", "decode": "captured"}  # decoding steps in a CUDA graph


def _dense_sizes(sizes: dict[str, int]) -> tuple[int, int, int]:
    return sizes["tokens"], sizes["inputs"], sizes["outputs"]


def _stored(sizes: dict[str, int]) -> int:
    """Return the stored elements of a structured linear in the terms of kernels/tuning.json."""
    if "rows" not in sizes:
        return sizes["rank"] * (sizes["inputs"] + sizes["outputs"])
    b, c = sizes["rows"], sizes["columns"]
    return b * c * sizes["rank"] * (-(-sizes["outputs"] // b) + -(-sizes["inputs"] // c))


def _times(row: dict[str, Any]) -> list[float]:
    return [row[name] for name in IMPLEMENTATIONS if row.get(name)]


def predict_linears(
    plan: dict[str, Any], context: int | None = None, table: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the predicted milliseconds of all linears of a planned model, before and after, for a prompt of `context` tokens and for a
    decoding step of one token in a CUDA graph; None without measurements or with routed experts.

    table: measured times, as `read_measured_times` returns them; None: those of kernels/tuning.json.
    {"device", "dtype", "prefill": {"tokens", "before", "after", "measured", "interpolated"}, "decode": {..}}. A phase with a linear that was
    not measured has {"tokens", "unknown": the linear} instead.
    """
    table = table or next((known for known in tables() if known["rows"]), None)
    if table is None or plan.get("unchanged") is None or not plan["targets"]:
        return None
    times = MeasuredTimes(table)
    found: dict[str, Any] = {"device": table["device"], "dtype": table["dtype"]}
    kinds = Counter(json.dumps([target["first"], target["shape"]]) for target in plan["targets"])
    for phase, tokens in (("prefill", context or DEFAULT_CONTEXT), ("decode", 1)):
        found[phase] = _predict_phase(times, phase, tokens, kinds, plan["unchanged"])
    return found


def _predict_phase(
    times: MeasuredTimes, phase: str, tokens: int, kinds: Counter[str], unchanged: list[dict[str, Any]]
) -> dict[str, Any]:
    sums, counts = {"before": 0.0, "after": 0.0}, {True: 0, False: 0}
    linears = [(None, entry["shape"], entry["count"]) for entry in unchanged]
    linears += [(*json.loads(kind), count) for kind, count in kinds.items()]
    for config, (out, in_), count in linears:
        before = times.dense(phase, tokens, out, in_)
        after = before if config is None else times.structured(phase, tokens, config, (out, in_))
        if before is None or after is None:
            name = "dense" if before is None or config is None else config["structure"]
            return {"tokens": tokens, "unknown": f"{name} for {in_:,} -> {out:,}"}
        sums = {"before": sums["before"] + count * before.ms, "after": sums["after"] + count * after.ms}
        for one in (before,) if config is None else (before, after):
            counts[one.measured] += 1
    return {"tokens": tokens, **sums, "measured": counts[True], "interpolated": counts[False]}


def check_measured_times(table: Any, where: str) -> dict[str, Any]:
    """Return a table of times from a file. Raises SurgeryError unless its device and dtype are plain text, and rows of linears
    have whole sizes over 0 and times over 0."""
    if not isinstance(table, dict) or not has_names(table):
        raise SurgeryError(f"{where} has no measured times of linears. Write it with: surgery bench linear --out FILE")
    for name in ("device", "dtype"):
        if not table[name].isprintable() or len(table[name]) > MAX_NAME:
            raise SurgeryError(
                f"{where}: {name} must be plain text of at most {MAX_NAME} characters (got {table[name][:40]!r})"
            )
    for row in table["rows"]:
        sizes = row.get("sizes") if isinstance(row, dict) and row.get("op") in LINEAR_OPS else None
        whole = isinstance(sizes, dict) and all(
            type(sizes.get(name)) is int and 0 < sizes[name] < 2**31 for name in LINEAR_SIZES[row["op"]]
        )
        if not whole or not is_complete_row(row) or not _times(row):
            raise SurgeryError(
                f"{where}: a row of times reads {str(row)[:200]}; sizes must be whole numbers over 0 and times numbers over 0. Measure again"
            )
    if not table["rows"]:
        raise SurgeryError(
            f"{where} has no measured times of structured linears. Write it with: surgery bench linear --out FILE"
        )
    return table


def predicted_lines(predicted: dict[str, Any] | None) -> list[str]:
    """Return the predicted times as lines in rich's markup, with "1.4x faster" or "1.7x slower" in words."""
    from rich.markup import escape

    if predicted is None:
        return []
    lines = []
    for phase, name in (("prefill", "prompt of {tokens:,} tokens"), ("decode", "decoding step in a CUDA graph")):
        one = predicted[phase]
        where = escape(f"{predicted['device']} ({predicted['dtype']})")
        what = f"all linears of the model, {name.format(**one)}, {where}"
        if "unknown" in one:
            lines.append(
                f"{what}: no prediction, {one['unknown']} was not measured. Measure it: surgery bench linear --out FILE"
            )
            continue
        lines.append(
            f"{what}, predicted: {one['before']:.3g} -> {one['after']:.3g} ms, {speed_in_words(one['before'], one['after'])} (of the times of "
            f"each shape, {one['measured']} measured and {one['interpolated']} interpolated)"
        )
    return lines


def speed_in_words(before: float, after: float) -> str:
    """Return "1.4x faster", "1.7x slower" or "as fast"."""
    ratio = before / after
    if max(ratio, 1 / ratio) < 1.05:
        return "as fast"
    return f"{ratio:.1f}x faster" if ratio > 1 else f"{1 / ratio:.1f}x slower"


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
    if structure == "mlr":  # not measured as a linear: the timings of that name are of MLR attention
        return ""
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
    if "near chunks" in mixer:  # runs without the kernels that were measured
        return ""
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
