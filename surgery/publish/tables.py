"""Rich tables of plans, reports, measurements and uploads, and their HTML for notebooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape as as_html
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from surgery.checkpoint.table import is_pruned
from surgery.conversion.choices import allocation_lines, hybrid_lines, initialization_lines
from surgery.core.files import size_text
from surgery.core.tables import format_count, format_tokens, new_table
from surgery.planning.depth import number_ranges
from surgery.planning.measured_times import decoding_call
from surgery.publish.figures import checkpoint_figures, format_share, speed_in_words
from surgery.publish.ratios import before_storage, held_out_error, held_out_ratio, held_out_size
from surgery.publish.summary import NOT_REPLACED, describe_structure, inspect_rows, is_behind_mixer, is_dense

ROUNDING = 1e-4  # the largest change of the logits, relative to the largest one, that is taken for rounding in float32
LONG_TUNING = (
    3600.0  # estimated seconds beyond which a plan and the start of a conversion say how to shorten the tuning
)


def plan_table(plan: dict[str, Any]) -> list[Any]:
    """Return the tables and notes of a plan (see `plan_dict`)."""
    table = new_table(
        f"{plan['source']} ({plan['model_type']})",
        "role",
        "modules",
        "out x in",
        "structure",
        "params",
        "after",
        "kept",
        "MACs",
    )
    for row in plan["rows"]:
        shape = " x ".join(str(n) for n in row["shape"])
        table.add_row(
            row["role"], str(row["modules"]), shape, row["structure"], format_count(row["before"]), format_count(row["after"]),
            format_share(row["after"], row["before"]), format_count(row["macs"]),
        )  # fmt: skip
    total = plan["totals"]
    lines = [
        f"{total['modules']} matrices, {total['params_before']:,} -> {total['params_after']:,} parameters "
        f"({format_share(total['params_after'], total['params_before'])})"
    ]
    whole = [f"whole model: {_model_shares(total, _mixer_params(plan))}"] if total.get("model_before") else []
    lines += whole
    mixers = mixer_tables(plan["mixers"], plan)
    if any(row["structure"] == "auto" for row in plan["rows"]):
        lines.append(
            f"auto: each matrix gets the structure with the lowest error, out of {', '.join(plan['candidates'])}"
        )
    speed = plan.get("speed_target")
    if speed:
        lines += speed_lines(speed)
        lines.append(
            "the structures shown give every matrix the same share of the time; a conversion with --calibration "
            "chooses those that save most error"
        )
    elif plan["recipe"]["allocate"] != "uniform" and set(plan["candidates"]) - {"dropped"}:
        lines.append(
            "the ranks shown keep the same share of every matrix; a conversion with --calibration gives more to "
            "matrices whose errors fall most "
            "with rank"
        )
    linears = [table, *lines] if total["modules"] else []
    if not linears:
        mixers = [f"{escape(plan['source'])} ({plan['model_type']})", *mixers, *whole]
    return [*linears, *mixers, *tuning_lines(plan.get("tune")), *(f"note: {note}" for note in plan["notes"])]


def speed_lines(speed: dict[str, Any] | None) -> list[str]:
    """Return a line on the predicted time of the replaced linears and the target of a recipe's `speed`."""
    if not speed:
        return []
    call = f"prompt of {speed['tokens']:,} tokens" if speed["phase"] == "prefill" else decoding_call(speed["device"])
    where = escape(f"{speed['device']} ({speed['dtype']})")
    share = (
        ""
        if speed.get("share") is None
        else f"; before, these linears took {speed['share']:.0%} of the time of all linears"
    )
    return [
        f"replaced linears, {call}, {where}, predicted: {speed['before']:.3g} -> {speed['after']:.3g} ms, "
        f"{speed_in_words(speed['before'], speed['after'])} (target: {speed['target']:g}x); {speed['dense']} of "
        f"{speed['matrices']} "
        f"matrices are not replaced{share}"
    ]


def format_epochs(epochs: int) -> str:
    """Return "1 epoch" or "3 epochs"."""
    return "1 epoch" if epochs == 1 else f"{epochs} epochs"


def tuning_lines(tuning: dict[str, Any] | None) -> list[str]:
    """Return a sentence on the epochs of a tuning and their estimated time, and one more if that is over an hour.
    tuning: of surgery.conversion.estimation.tuning.tuning_dict.
    """
    if tuning is None:
        return []
    parts = (("layers", "of each layer"), ("model", "of the whole model"))
    epochs = [f"{format_epochs(tuning[key])} {of}" for key, of in parts if tuning[key]]
    norms = ", norms and biases too" if tuning.get("norms") else ""
    line = (
        f"tune: at most {' and '.join(epochs)} over the calibration text{norms}, estimated at "
        f"{_time_in_words(tuning['seconds'])} on "
        f"{tuning['where']} (needs --calibration)"
    )
    return [line, *long_tuning_lines(tuning)]


def long_tuning_lines(tuning: dict[str, Any] | None) -> list[str]:
    """Return a note on how to shorten a tuning that is estimated at over an hour. tuning: of
    surgery.conversion.estimation.tuning.tuning_dict.
    """
    if tuning is None or tuning["seconds"] <= LONG_TUNING:
        return []
    return [
        f"note: tuning is estimated at {_time_in_words(tuning['seconds'])} on {tuning['where']}. Fewer epochs take "
        "less time, for example "
        "--set tune.model=2; --set tune=false leaves tuning out"
    ]


def _time_in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def tune_lines(tune: dict[str, Any] | None) -> list[str]:
    """Return lines on what a tuning gained on the held-out rows."""
    if not tune:
        return []
    layers, whole, lines = list(tune.get("by_layer", {}).values()), tune.get("whole"), []
    norms = ", norms and biases too" if tune.get("norms") else ""
    if layers:
        better = [r for r in layers if r["epoch"]]
        lines.append(
            f"tuning of each layer ({format_epochs(tune['layers'])}{norms}): on held-out text {len(better)} of "
            f"{len(layers)} "
            "layers came closer to the "
            "original; kept: the tuned values of these layers"
        )
    if whole:
        outcome = (
            f"epoch {whole['epoch']}, {whole['end']:.4f}"
            if whole["epoch"]
            else "the values before tuning, which no epoch improved"
        )
        lines.append(
            f"tuning of the whole model ({format_epochs(tune['model'])}{norms}), {escape(str(whole['unit']))} on "
            "held-out "
            f"text: before {whole['start']:.4f}; "
            f"kept: {outcome}"
        )
    return lines


def _mixer_params(plan: dict[str, Any]) -> int:
    return round(sum(row["params"] for row in plan["mixers"]))


def _model_shares(total: dict[str, Any], mixers: int) -> str:
    """Format the parameters of the whole model, and with routed experts those of one token, before and after. mixers:
    those of mixers.
    """
    before, after = total["model_before"], total["model_after"] + mixers
    text = f"{before:,} -> {after:,} parameters ({format_share(after, before)})"
    if mixers:
        text += f", {mixers:,} of them in mixers"
    if total.get("active_before"):
        before, after = total["active_before"], total["active_after"] + mixers
        text += f"; active for one token: {before:,} -> {after:,} ({format_share(after, before)})"
    return text


def expert_lines(records: list[dict[str, Any]]) -> list[str]:
    """Return a line on the calibration rows of routed experts, and one on those with too few rows."""
    routed = [record for record in records if record.get("rows") is not None]
    if not routed:
        return []
    rows = sorted(record["rows"] for record in routed)
    few = [record for record in routed if record.get("shared_rows")]
    added = {
        "average rows of all experts of their layer were added": [r for r in few if not is_pruned(r["structure"])],
        "their fit is drawn towards the original": [r for r in few if is_pruned(r["structure"])],
    }
    lines = [
        f"experts: each of {len(routed)} matrices was fitted to the {rows[0]:,} to {rows[-1]:,} calibration rows that "
        "were routed to it, median "
        f"{rows[len(rows) // 2]:,}"
    ]
    lines.append(
        "MACs of expert roles are those of all experts; one token computes only the experts that it is routed to"
    )
    for what, records in added.items():
        if records:
            fewest = min(records, key=lambda record: record["rows"])
            lines.append(
                f"experts: {len(records)} matrices had fewer rows than inputs, so {what} (fewest rows of its own: "
                f"{fewest['name']}, {fewest['rows']:,} of {fewest['rows'] + fewest['shared_rows']:,}). More calibration "
                "text makes such matrices fewer"
            )
    return lines


def mixer_tables(rows: list[dict[str, Any]], costs: dict[str, Any]) -> list[Any]:
    """Return the table of cache sizes (bytes of one sequence, summed over the layers of a row) at several contexts.
    rows, costs: rows and all that `attention_costs` returns."""
    if not rows:
        return []
    totals, contexts = costs["attention_totals"], list(rows[0]["cache_bytes"])
    table = new_table(
        "attention", "mixer", "layers", "params", *(f"cache at {format_tokens(int(c))}" for c in contexts)
    )

    def add_row(label: str, layers: str, params: str, cache: dict[str, list[int]]) -> None:
        changes = (f"{size_text(a)} -> {size_text(b)} ({format_share(b, a)})" for a, b in cache.values())
        table.add_row(label, layers, params, *changes)

    for row in rows:
        possible = len(row["paths"])
        layers = str(possible) if row["layers"] == possible else f"{row['layers']} of {possible}"
        add_row(row["mixer"], layers, format_count(row["params"]), row["cache_bytes"])
    if totals is not None and totals["softmax_layers"]:
        add_row("softmax, not replaced", str(totals["softmax_layers"]), "", totals["softmax"]["cache_bytes"])
    if totals is not None and (totals["softmax_layers"] or len(rows) > 1):
        add_row("all layers", str(totals["layers"]), "", totals["cache_bytes"])
    unit = (
        f"cache: bytes of one sequence, with keys and values in {costs['cache_dtype']} (the model's dtype) and "
        "recurrent states in float32"
    )
    notes = dict.fromkeys(note for row in rows for note in row["notes"])
    return [table, unit, *(f"note: {note}" for note in notes)]


def training_kernel_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line per mixer on the kernels that a training step on a GPU runs. rows: of `training_kernels`."""
    layers: dict[tuple[str, str], int] = {}  # of mixers that differ in sizes only
    for row in rows:
        parts = [f"kernels compute {', '.join(row['kernels'])}"] if row["kernels"] else []
        parts += [f"the PyTorch reference computes {name}, because {why}" for name, why in row["references"].items()]
        key = (row["mixer"], "; ".join(parts))
        layers[key] = layers.get(key, 0) + row["layers"]
    return [
        f"training on a GPU in bfloat16, {mixer} ({count} layer{'s' if count > 1 else ''}): {computed}"
        for (mixer, computed), count in layers.items()
    ]


def toeplitz_lines(r2: dict[str, list[float]] | None) -> list[str]:
    """Return for each layer the R^2 of its block-mixing matrix against the best Toeplitz matrix (1: depends on distance
    only).
    """
    return [
        f"{path}: Toeplitzness R^2 {sum(heads) / len(heads):.4f} (worst head {min(heads):.4f})"
        for path, heads in (r2 or {}).items()
    ]


def large_weight_lines(weights: dict[str, float]) -> list[str]:
    """Return a warning about mixers whose linear branch has a very large weight. weights: of `large_weights`."""
    if not weights:
        return []
    path = max(weights, key=lambda path: weights[path])
    return [
        f"warning: the linear branch of attention has weights up to {weights[path]:.2g} in {len(weights)} of the mixers "
        f"(largest in {path}). They were fitted to a branch that was almost zero on the calibration text; on other text "
        "the outputs may be as large and the model fails. Training does not lower them: convert again with this version"
    ]


def inspect_table(report: dict[str, Any]) -> list[Any]:
    """Return the tables of `surgery inspect`, one row per role."""
    kind = "of the outputs on held-out text" if report["calibration"] else "of the weights (without calibration text)"
    table = new_table(
        report["source"]["name"], "role", "modules", "structures", "params", "after", "kept", "MACs", "error", "worst"
    )
    rows = inspect_rows(report)
    if all(row["is_dense"] for row in rows):
        rows = []
    for row in rows:
        structures = ", ".join(
            f"{n} x {name}" if len(row["structures"]) > 1 else name for name, n in row["structures"].items()
        )
        table.add_row(
            row["role"], str(row["modules"]), structures, format_count(row["before"]), format_count(row["after"]), format_share(row["after"], row["before"]),
            format_count(row["macs_after"]), *(_format_error(row[key], 3) for key in ("median_error", "worst_error")),
        )  # fmt: skip
    error_note = f"error: relative error {kind}, median and worst of the replaced matrices of a role"
    if all(record["error"] is None for record in report["modules"]):
        error_note = "trained from scratch: there are no original weights to compute errors against"
    linears = [table, error_note, *expert_lines(report["modules"])] if rows else [escape(report["source"]["name"])]
    mixers = [
        *mixer_tables(report.get("mixer_rows", []), report),
        *level_weight_lines(report.get("native")),
        *stock_lines(report.get("stock")),
        *map(escape, training_kernel_lines(report.get("training_kernels", []))),
        *map(escape, hybrid_lines(report.get("hybrid"))),
        *map(escape, initialization_lines(report.get("mixers", []))),
        *attention_output_lines(report),
        *toeplitz_lines(report.get("toeplitzness")),
        *map(escape, large_weight_lines(report.get("large_weights", {}))),
        *tune_lines(report.get("tune")),
    ]
    return [
        *linears,
        *structure_lines(report),
        *depth_lines(report),
        *kept_expert_lines(report),
        *mixers,
        *_total_lines(report),
    ]


def kept_expert_lines(report: dict[str, Any]) -> list[str]:
    """Return a line on the routed experts that were removed, with the held-out loss without them."""
    if not (experts := report.get("experts")):
        return []
    numbers = sorted({len(kept) for kept in experts["kept"].values()})
    line = (
        f"{', '.join(map(str, numbers))} of {experts['experts']} experts stay in each of {len(experts['kept'])} layers"
    )
    if (share := experts.get("kept_tokens")) is not None:
        line += f", to which {share:.1%} of the calibration tokens were routed"
    if score := experts.get("held_out"):
        line += f"; {escape(score['unit'])} on held-out text {score['original']:.3f} -> {score['converted']:.3f}"
    return [line]


def stock_lines(stock: dict[str, Any] | None) -> list[str]:
    """Return lines on a conversion into a stock class. stock: the report's entry."""
    if not stock:
        return []
    linear, softmax = len(stock["linear_layers"]), len(stock["softmax_layers"])
    token = stock["token_bytes"]
    return [
        f"{stock['stock_class']}, which loads without surgery: {stock.get('linear', 'Gated DeltaNet')} in {linear} layers, softmax in {softmax}, whose "
        f"outputs changed by up to {stock['change']:.1e} of the largest",
        f"cache of one sequence: {token['before']:,} -> {token['after']:,} bytes per token, and a state of "
        f"{stock['state_bytes']:,} bytes in float32",
    ]


def level_weight_lines(native: dict[str, Any] | None) -> list[str]:
    """Return a line on the change of the logits by level weights at conversion, with a warning if it is no rounding.

    native: the report's entry.
    """
    if not native:
        return []
    more = ". That is more than rounding: convert again with a version of transformers that surgery was tested with (README.md)"
    return [
        f"level weights of 1, at conversion: logits of {native['tokens']} random tokens changed by up to "
        f"{native['change']:.1e} of the largest logit{more if native['change'] > ROUNDING else ''}"
    ]


def depth_lines(report: dict[str, Any]) -> list[str]:
    """Return lines on the layers that were removed: which, how they were chosen, and the linear that was fitted again."""
    if not (depth := report.get("depth")):
        return []
    lines = [f"{len(depth['removed'])} of {depth['layers']} layers removed: {number_ranges(depth['removed'])}"]
    if tried := depth.get("candidates"):
        losses = ", ".join(f"from {first}: {_format_error(loss, 3)}" for first, loss in tried.items())
        lines[0] += f"; held-out loss of each block that was tried: {losses}"
    if depth.get("refit"):
        loss = depth["held_out"]["converted"]
        lines.append(
            f"{escape(depth['refit'])} was fitted again to what these layers added: held-out loss "
            f"{_format_error(depth['without_refit'], 3)} -> {_format_error(loss, 3)}"
        )
    return lines


def structure_lines(report: dict[str, Any]) -> list[str]:
    """Return a line on the structures that the matrices got, if the conversion chose them (structure: auto)."""
    recipe = report["recipe"]
    settings = [recipe, *(recipe.get("rules") or [])]
    if not any(isinstance(entry, dict) and entry.get("structure") == "auto" for entry in settings):
        return []
    counts = Counter(str(record["structure"].get("structure")) for record in report["modules"]).most_common()
    tried = ", ".join(map(str, recipe.get("candidates") or ()))
    names = ", ".join(f"{name} for {count}" for name, count in counts)
    return [
        escape(f"structure: auto, tried for each matrix: {tried}; kept: {names} of {len(report['modules'])} matrices")
    ]


def attention_output_lines(report: dict[str, Any]) -> list[str]:
    """Return a line on the outputs of attention with mixers: their output projections stay dense, fitted to the
    mixers.
    """
    records = [r for r in report["modules"] if is_behind_mixer(r, report) and r["error"] is not None]
    if not records:
        return []
    records.sort(key=lambda record: float(record["error"]))
    median, worst = records[len(records) // 2], records[-1]
    return [
        f"attention.output is not replaced: these {len(records)} matrices stay dense and are fitted to the mixers. "
        "Relative error of the outputs "
        f"of attention on held-out text: median {median['error']:.3f}, worst {worst['error']:.3f} "
        f"({escape(worst['name'])})"
    ]


def _format_error(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:.{places}f}"


# The steps of a conversion, by the names of a report.
STEPS = {
    "start": "start",
    "text check": "check of the text",
    "generate": "sampling text",
    "depth": "choice of layers",
    "experts": "choice of experts",
    "attention": "choices about attention",
    "level weights": "check of the level weights",
    "budgets": "allocation",
    "layers": "layers",
    "tune": "tuning",
    "rest": "other tensors",
    "write": "writing",
}


def _total_lines(report: dict[str, Any]) -> list[str]:
    figures = checkpoint_figures(report)
    count, size = figures["parameters"], figures["bytes"]
    lines = [
        f"checkpoint: {count.before:,} -> {count.after:,} parameters ({count.share}), {' -> '.join(size.texts)} "
        f"({size.share})",
    ]
    if replaced := figures.get("replaced"):
        lines.insert(
            0, f"replaced weights: {replaced.before:,} -> {replaced.after:,} parameters ({replaced.share} kept)"
        )
    if cache := figures.get("cache"):
        lines.append(f"{cache.of}: {' -> '.join(cache.texts)} ({cache.share})")
    if storage := report.get("storage"):
        groups = f"scales of groups of {storage['group']}" if storage["group"] else "one scale per output"
        groups = groups if storage["bits"] in (8, 4) else "groups by their bits"
        groups = f"fp8, {groups}" if storage.get("format") == "fp8" else groups
        lines.append(
            f"{storage['linears']} linears stored in {storage['bits']} bits ({groups}); all tensors: "
            f"{size_text(storage['bytes_before'])} -> "
            f"{size_text(storage['bytes_after'])}; errors above were measured before"
        )
    macs = report.get("macs_per_token")
    if macs and macs["before"] != macs["after"]:
        lines.append(
            f"linears, FLOPs per token: {2 * macs['before']:,} -> {2 * macs['after']:,} "
            f"({format_share(macs['after'], macs['before'])})"
        )
    lines += speed_lines(report.get("speed"))
    lines += map(escape, allocation_lines(report["allocation"]))
    if held := report["held_out"]:
        error, ratio = held_out_error(held), held_out_ratio(held)
        se = "" if error is None else f" ± {error:.4f}"
        change = (
            f"{held['original']:.4f} -> {held['converted']:.4f} (difference "
            f"{held['converted'] - held['original']:.4f}{se})"
        )
        as_ratio = "" if ratio is None else f"perplexity {ratio}, "
        when = f"{', before healing' if report.get('training') else ''}{before_storage(report)}"
        lines.append(f"held-out text{held_out_size(held)}: {as_ratio}{held['unit']} {change}{when}")
    for line in (report.get("calibration") or {}).get("warnings", []):
        lines.append(f"calibration: {escape(str(line))}")
    seconds = report["time"]["seconds"]
    layers = list(report["time"]["layers"].values())
    per_layer = f", {sum(layers) / len(layers):.1f} s per layer" if layers else ""
    steps = {name: value for name, value in seconds.items() if name != "total" and value >= 0.05}
    parts = ", ".join(f"{STEPS.get(name, name)} {value:.1f} s" for name, value in steps.items())
    rss = report["memory"]["peak_rss"]
    lines.append(
        f"time: {seconds['total']:.1f} s on {report['time']['device']}{per_layer}{f' ({parts})' if parts else ''}; "
        f"peak memory {size_text(rss)}"
        if rss
        else f"time: {seconds['total']:.1f} s"
    )
    return [*lines, f"[bold]{escape(report['verdict'])}[/]"] if "verdict" in report else lines


def module_table(report: dict[str, Any]) -> list[Any]:
    """Return the table of all replaced matrices."""
    table = new_table(
        report["source"]["name"], "module", "structure", "params", "after", "kept", "error", "start", "sweeps", "refit"
    )
    for r in report["modules"]:
        if is_dense(r):
            count = format_count(r["params_before"])
            table.add_row(r["name"], NOT_REPLACED, count, count, format_share(1, 1), "-", "-", "-", "-")
            continue
        table.add_row(
            r["name"], describe_structure(r["structure"]), format_count(r["params_before"]), format_count(r["params_after"]),
            format_share(r["params_after"], r["params_before"]), _format_error(r["error"], 4), _format_error(r.get("start"), 4), str(r.get("sweeps", "-")), "yes" if r.get("refit") else "no",
        )  # fmt: skip
    return [table, *attention_output_lines(report), *_total_lines(report)]


def _format_value(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def demo_table(result: dict[str, Any]) -> list[Any]:
    """Return the table of `surgery demo`: original, converted and densified model."""
    table = new_table("before and after", "", "original", "converted", "densified")
    for label, *values in result["rows"]:
        table.add_row(label, *(_format_value(v) if not isinstance(v, str) else v for v in values))
    return [table]


def demo_ending(result: dict[str, Any]) -> list[Any]:
    """Return the last lines of `surgery demo`: each prompt with the continuations of both models, and the verdict."""
    lines: list[Any] = []
    for entry in result["generations"]:
        lines += ["", f"[bold]prompt:[/]    {escape(' '.join(entry['prompt'].split()))}"]
        lines += [f"{f'{role}:':<10} {escape(' '.join(entry[role].split()))}" for role in ("original", "converted")]
    return [*lines, "", f"[bold]{escape(result['verdict'])}[/]"]


def upload_table(upload: dict[str, Any]) -> list[Any]:
    """Return the table of files of an upload to the Hub (see `Upload.to_dict`)."""
    table = new_table(f"to {upload['repo']}", "file", "bytes")
    for item in upload["files"]:
        table.add_row(item["name"], f"{item['bytes']:,}")
    license_ = upload["license"]
    lines = [
        f"{len(upload['files'])} files, {size_text(upload['bytes'])}; license: {license_['id']} ({license_['origin']})"
    ]
    notes = [upload["note"]] if upload["note"] else []
    notes += [
        f"the results in {folder} are not uploaded; --eval {folder} would upload their table and plots in place of "
        "eval/"
        for folder in upload.get("left_out", ())
    ]
    return [table, *lines, *(f"note: {escape(note)}" for note in notes)]


def to_html(parts: Sequence[Any]) -> str:
    """Render tables and lines as HTML for a notebook, with table markup that screen readers understand."""
    return f'<div style="overflow-x:auto">{"".join(map(_part_to_html, parts))}</div>'


def _part_to_html(element: Any) -> str:
    if not isinstance(element, Table):
        return f'<div style="max-width:60em">{_escape_plain(element)}</div>'
    side = [
        f'style="text-align:{"left" if c.justify == "left" else "right"};padding:2px 8px;white-space:nowrap"'
        for c in element.columns
    ]
    head = "".join(f'<th scope="col" {how}>{_escape_plain(c.header)}</th>' for c, how in zip(element.columns, side))
    rows = zip(*([_escape_plain(cell) for cell in column.cells] for column in element.columns))
    body = "".join(f"<tr>{''.join(f'<td {how}>{cell}</td>' for cell, how in zip(row, side))}</tr>" for row in rows)
    caption = (
        f'<caption style="text-align:left;font-weight:bold">{_escape_plain(element.title)}</caption>'
        if element.title
        else ""
    )
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _escape_plain(text: Any) -> str:
    """Remove rich markup and escape for HTML."""
    return as_html(Text.from_markup(text).plain if isinstance(text, str) else str(text))
