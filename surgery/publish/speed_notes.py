"""Notes on replacements that were measured to be slower than the original layers, shown with plans and reports."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from surgery.kernels.tuning import (
    IMPLEMENTATIONS,
    DeviceKey,
    NamedSizes,
    Pass,
    named_sizes,
    nearby_rows,
    tables,
)
from surgery.planning.measured_times import MeasuredTimes, Predicted, decoding_call, same_alignment
from surgery.publish.figures import speed_in_words

TOKEN_COUNTS = (1, 16, 512, 8192)
MEASURED_LANES = {
    "forward": 96,
    "backward": 96,
    "step": 32,
    "captured step": 32,
}  # batch size times heads of the measurements
NOTE_ON_SPEED = "note: speed on one"
PREDICTION = "all linears of the model, "
DEFAULT_CONTEXT = 4096  # for models whose config has no context length
UNMEASURED = ("near chunks", "strong admissibility", " lambda", " Lambda")  # words of `describe_mixer`
PASS_LABELS: dict[Pass, str] = {"forward": "prefill", "backward": "training", "step": "decoding"}


def speed_notes(
    structures: Iterable[tuple[dict[str, Any], list[int]]], mixers: Iterable[str], context: int | None
) -> list[str]:
    """Return one line per kind of linear (config, (out, in)) and per mixer (as `describe_mixer` formats it) that was
    measured to be slower than the original. context: tokens; None: DEFAULT_CONTEXT."""
    if not any(table["rows"] for table in tables()):
        return []
    # Once for each kind: a mixture of experts has thousands of equal linears.
    kinds = {json.dumps([config, list(shape)], sort_keys=True): (config, shape) for config, shape in structures}
    notes = {_linear_note(config, *shape) for config, shape in kinds.values()}
    if any(config.get("order") == "strided" for config, _ in kinds.values()):
        notes.add(
            "order: strided copies the outputs of each such linear once more; the ratios of speed leave this copy out"
        )
    notes |= {_attention_note(mixer, context or DEFAULT_CONTEXT) for mixer in mixers}
    device = tables()[0]["device"]
    return [f"{NOTE_ON_SPEED} {device}, launches of kernels included: {note}" for note in sorted(notes - {""})]


def plan_notes(plan: dict[str, Any], context: int | None = None) -> list[str]:
    """Return the notes for a plan (see `plan_dict`)."""
    linears = ((entry["first"], entry["shape"]) for entry in plan["targets"] if entry["first"])
    return speed_notes(linears, (row["mixer"] for row in plan["mixers"]), context)


def predict_linears(
    plan: dict[str, Any], context: int | None = None, table: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the predicted milliseconds of all linears of a planned model, before and after, for a prompt of `context`
    tokens and for a decoding step of one token in a CUDA graph; None without measurements or with routed experts.

    table: measured times, as `read_measured_times` returns them; None: those of kernels/tuning.json.
    {"device", "dtype", "prefill": {"tokens", "before", "after", "measured", "interpolated"}, "decode": {..}}. A linear
    that stays as it is, such as a large head, may be far from all measured sizes: its time is then extrapolated, and
    "extrapolated" names its shape. A phase with a replaced linear that was not measured has {"tokens", "unknown": the
    linear} instead.
    """
    table = table or next((known for known in tables() if known["rows"]), None)
    if table is None or plan.get("unchanged") is None or not plan["targets"]:
        return None
    times = MeasuredTimes(table)
    prediction: dict[str, Any] = {"device": table["device"], "dtype": table["dtype"]}
    kinds = Counter(json.dumps([target["first"], target["shape"], target.get("outputs")]) for target in plan["targets"])
    for phase, tokens in (("prefill", context or DEFAULT_CONTEXT), ("decode", 1)):
        prediction[phase] = _predict_phase(times, phase, tokens, kinds, plan["unchanged"])
    return prediction


def _predict_phase(
    times: MeasuredTimes, phase: str, context: int, kinds: Counter[str], unchanged: list[dict[str, Any]]
) -> dict[str, Any]:
    sums, counts = {"before": 0.0, "after": 0.0}, {True: 0, False: 0}
    far: list[str] = []
    linears = [(None, e["shape"], None, e["count"], 1 if e.get("last") else context) for e in unchanged]
    for kind, count in kinds.items():
        config, (out, in_), outputs = json.loads(kind)
        if config is None:  # joined linears that stay dense are linears of their own
            linears += [(None, (rows, in_), None, count, context) for rows in outputs or [out]]
        else:
            linears.append((config, (out, in_), outputs, count, context))
    for config, (out, in_), outputs, count, tokens in linears:
        before = _dense_time(times, phase, tokens, outputs or [out], in_)
        if before is None and config is None:
            before = times.dense(phase, tokens, out, in_, farthest=math.inf)
            far.append(f"{in_:,} -> {out:,}")
        after = before if config is None else times.structured(phase, tokens, config, (out, in_))
        if before is None or after is None:
            name = "dense" if before is None or config is None else config["structure"]
            return {"tokens": context, "unknown": f"{name} for {in_:,} -> {out:,}"}
        sums = {"before": sums["before"] + count * before.ms, "after": sums["after"] + count * after.ms}
        if config is not None or f"{in_:,} -> {out:,}" not in far:
            for one in (before,) if config is None else (before, after):
                counts[one.measured] += 1
    known = {"tokens": context, **sums, "measured": counts[True], "interpolated": counts[False]}
    return {**known, "extrapolated": far} if far else known


def _dense_time(times: MeasuredTimes, phase: str, tokens: int, outs: list[int], in_: int) -> Predicted | None:
    """Return the time of dense linears of one input, None if one was not measured."""
    times_of_outs = [times.dense(phase, tokens, out, in_) for out in outs]
    known = [time for time in times_of_outs if time is not None]
    if len(known) < len(times_of_outs):
        return None
    return Predicted(sum(time.ms for time in known), all(time.measured for time in known))


def predicted_lines(predicted: dict[str, Any] | None) -> list[str]:
    """Return the predicted times as lines in rich's markup, with "1.4x faster" or "1.7x slower" in words."""
    from rich.markup import escape

    if predicted is None:
        return []
    lines = []
    for phase, name in (("prefill", "prompt of {tokens:,} tokens"), ("decode", decoding_call(predicted["device"]))):
        one = predicted[phase]
        where = escape(f"{predicted['device']} ({predicted['dtype']})")
        what = f"{PREDICTION}{name.format(**one)}, {where}"
        if "unknown" in one:
            lines.append(
                f"{what}: no prediction, {one['unknown']} was not measured. Measure it: surgery bench linear --model "
                "SRC --out FILE"
            )
            continue
        lines.append(
            f"{what}, predicted: {one['before']:.3g} -> {one['after']:.3g} ms, "
            f"{speed_in_words(one['before'], one['after'])} (of the times of "
            f"each shape, {one['measured']} measured and {one['interpolated']} interpolated{_extrapolated(one)})"
        )
    return lines


def _extrapolated(phase: dict[str, Any]) -> str:
    shapes = ", ".join(phase.get("extrapolated", ()))
    return f"; extrapolated from smaller shapes, because it stays dense: {shapes}" if shapes else ""


def report_notes(report: dict[str, Any], context: int | None = None) -> list[str]:
    """Return the notes for a report, after the predicted times of all linears where these were measured.

    Kinds of linears whose ranks differ are noted at their median rank.
    """
    kinds: dict[str, list[dict[str, Any]]] = {}
    for module in report.get("modules", ()):
        if "shape" in module and module["structure"]["structure"] != "dense":
            kind = {name: value for name, value in module["structure"].items() if name != "rank"}
            kinds.setdefault(json.dumps([kind, module["shape"]]), []).append(module)
    middle = [sorted(kind, key=lambda m: m["structure"].get("rank") or 0)[len(kind) // 2] for kind in kinds.values()]
    linears = ((module["structure"], module["shape"]) for module in middle)
    mixers = (row["mixer"] for row in report.get("mixer_rows", ()))
    return [*report_times(report.get("linears"), context), *speed_notes(linears, mixers, context)]


def report_times(linears: dict[str, Any] | None, context: int | None = None) -> list[str]:
    """Return the predicted times of all linears of a converted checkpoint, as `predicted_lines` of a plan; [] where one
    was not measured.

    linears: as `surgery.publish.summary.report_linears` returns them.
    """
    if linears is None:
        return []
    dense = {"structure": "dense"}
    targets = [
        {"first": None if kind["structure"] == dense else kind["structure"], "shape": kind["shape"]}
        for kind in linears["replaced"]
        for _ in range(kind["count"])
    ]
    prediction = predict_linears({"targets": targets, "unchanged": linears["unchanged"]}, context)
    return [line for line in predicted_lines(prediction) if "no prediction" not in line]


def notes_for_device(notes: Iterable[str], device: str, asked: bool = False) -> list[str]:
    """Return notes without advice on a GPU's speed if `device` ("cpu", "cuda:1") is a CPU.

    asked: whether a prediction of times was asked for, by a file of measured times or the recipe's `speed`; it stays
    then.
    """
    left_out = (NOTE_ON_SPEED,) if asked else (NOTE_ON_SPEED, PREDICTION)
    return [note for note in notes if not (device.startswith("cpu") and note.startswith(left_out))]


def speed_ratio(op: str, pass_: Pass, at: NamedSizes) -> float | None:
    """Return time of the original / time of the fastest implementation, interpolated between measured sizes; None if no
    nearby size was measured."""
    table = tables()[0]
    rows = nearby_rows(op, pass_, at, DeviceKey(tuple(table["capability"]), table["dtype"]))
    if "rank" in (sizes := dict(at)):
        rows = same_alignment(rows, sizes, table["dtype"])
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
    known = {n: r for n, r in ratios.items() if r is not None}
    if all(r >= 1 for r in known.values()):
        return ""
    words = [f"{speed_in_words(r, 1)} at {n:,} token{'s' if n > 1 else graph}" for n, r in known.items()]
    return f"{name} for {in_:,} -> {out:,} compared with dense: {', '.join(words)}"


def graph_note(ratio: float | None) -> str:
    """Format the ratio inside a CUDA graph, where launches cost nothing."""
    return "" if ratio is None else f" ({speed_in_words(ratio, 1)} in a CUDA graph)"


def _attention_note(mixer: str, context: int) -> str:
    """mixer: "mlr 32|32 sliding", "linear: gates mask, delta rule". The tables have no rows with a window."""
    words = mixer.replace(",", "").split()
    op = words[0] if words[0] != "linear:" else words[1] + (" delta" if "delta rule" in mixer else "")
    levels = {"levels": words[1].count("|") + 1} if op == "mlr" else {}
    if any(words in mixer for words in UNMEASURED):  # runs without the kernels that were measured
        return ""
    here = {pass_: _ratio_to_softmax(op, pass_, context, levels) for pass_ in PASS_LABELS}
    if not any(r is not None and r < 1 for r in here.values()):
        return ""
    graph = graph_note(_ratio_to_softmax(op, "captured step", context, levels))
    known = {pass_: r for pass_, r in here.items() if r is not None}
    ratios = ", ".join(
        f"{PASS_LABELS[p]} {speed_in_words(r, 1)}{graph if p == 'step' else ''}" for p, r in known.items()
    )
    ahead = ", ".join(
        f"{PASS_LABELS[pass_]} {_break_even(op, pass_, levels)}" for pass_, r in here.items() if r and r < 1
    )
    without = ", measured without window and sinks," if op != "mlr" and {"window", "sinks"} & set(words[1:]) else ""
    return (
        f"{mixer}{without} compared with SDPA at a context of {context:,} tokens: {ratios}; faster than SDPA: {ahead}; "
        "this is attention alone, not the whole model"
    )


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
    return f"from {min(since):,} tokens on" if since else f"at no length up to {max(lengths):,} tokens"
