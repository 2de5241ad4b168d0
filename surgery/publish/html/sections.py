"""Sections of the report page: HTML, or "" without data. All text from files is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from surgery.core.tables import command_line, format_interval, format_number, format_tokens
from surgery.planning.measured_times import decoding_call
from surgery.publish.figures import CACHE_TOKENS, checkpoint_figures, format_share, speed_in_words
from surgery.publish.html.data import SOFTMAX, PageData, layer_index, module_role, structure_class, structure_text
from surgery.publish.html.svg import Axis, MatrixBox, Series, heat_map, layer_diagram, line_chart
from surgery.publish.measured import last_part, measured_model, other_base
from surgery.publish.ratios import Z_95, Ratio, before_storage, format_ratio, held_out_ratio
from surgery.publish.summary import is_dense
from surgery.publish.verdict import measured_agreement, measured_ratio

NOTHING_FOUND = "No model found anything at any length and depth, so no map is drawn."
LOSSES = "Training loss of the stage, and loss on validation text where it was measured."
ERROR_STEPS = (0.05, 0.1, 0.2, 0.4)  # relative errors between the colors of matrices


def figure_html(picture: str, caption: str, extra: str = "") -> str:
    """Return a figure; "" without a picture. extra: HTML between picture and caption, e.g. a legend."""
    return f"<figure>{picture}{extra}<figcaption>{caption}</figcaption></figure>" if picture else ""


def table_html(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[Any]], text_columns: int = 1, *, stacked: bool = False
) -> str:
    """Return a table with sortable columns.

    A cell is text or (text, sort key); the first `text_columns` are left-aligned. stacked: on small screens each row
    becomes a list with a line per cell, which names its column.
    """
    kinds = (' class="text"' if i < text_columns else "" for i in range(len(heads)))
    head = "".join(
        f'<th scope="col"{k} data-name="{escape(n)}"><button type="button">{escape(n)}</button></th>'
        for n, k in zip(heads, kinds)
    )
    body = "".join(
        "<tr>"
        + "".join(_cell_html(c, i, text_columns, heads[i] if stacked else "") for i, c in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="sorts{" stacked" if stacked else ""}">'
        f"<caption><span>{escape(caption)}</span></caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell_html(cell: Any, column: int, text_columns: int, label: str) -> str:
    text, value = cell if isinstance(cell, tuple) else (cell, None)
    data = "" if value is None else f' data-value="{escape(str(value))}"'
    data += f' data-label="{escape(label)}"' if label and column else ""
    kind = ' class="text"' if column < text_columns else ""
    return (
        f'<th scope="row"{kind}{data}>{escape(str(text))}</th>'
        if column == 0
        else f"<td{kind}{data}>{escape(str(text))}</td>"
    )


def headline_figures(data: PageData) -> str:
    """Return the headline: shares of the replaced matrices, of the model, its bytes, cache and FLOPs, and the change of
    perplexity or loss.
    """
    figures = checkpoint_figures(data.report)
    what = {
        "replaced": "of {} parameters in the replaced matrices are kept",
        "parameters": "of the model's {} parameters are stored",
        "bytes": "of {} on disk",
        "cache": f"of the cache of one sequence of {format_tokens(CACHE_TOKENS)} tokens, {{}} before",
    }
    text = [(figures[key].share, words.format(figures[key].texts[0])) for key, words in what.items() if key in figures]
    if data.costs:
        macs = data.costs[CACHE_TOKENS]["macs"]
        text.append((format_share(macs[1], macs[0]), f"of the FLOPs per token at {format_tokens(CACHE_TOKENS)} tokens"))
    if speed := data.report.get("speed"):
        call = (
            f"prompt of {speed['tokens']:,} tokens" if speed["phase"] == "prefill" else decoding_call(speed["device"])
        )
        where = f"{speed['device']} ({speed['dtype']})"
        text.append(
            (speed_in_words(speed["before"], speed["after"]), f"predicted of the replaced linears, {call}, {where}")
        )
    run = (data.report.get("training") or [{}])[-1].get("validation") or {}
    scores = [(run.get(key) or {}).get("perplexity") for key in ("original", "before", "after")]
    results = data.measured.beside_original()
    if (measured := measured_ratio(results)) is not None:
        base = other_base(data.report, results) or "the original"
        text.append((str(measured), f"perplexity, measured by surgery eval, relative to {base}"))
        if (equal := measured_agreement(results).get("top1")) is not None:
            text.append((f"{equal:.1f}%", f"of next tokens are most likely the same as those of {base}"))
    elif scores[0] and scores[2]:
        text.append(
            (
                str(Ratio(scores[2] / scores[0])),
                f"perplexity after healing, relative to the original{before_storage(data.report)}",
            )
        )
    elif held := data.report.get("held_out"):
        ratio = held_out_ratio(held)
        change = (
            f"{held['converted'] - held['original']:+.4f}",
            f"{held['unit']} on held-out text{before_storage(data.report)}",
        )
        text.append(
            change
            if ratio is None
            else (str(ratio), f"perplexity on held-out text, before any healing{before_storage(data.report)}")
        )
    return (
        '<ul class="figures">'
        + "".join(f"<li><b>{_small_interval(a)}</b><span>{escape(b)}</span></li>" for a, b in text)
        + "</ul>"
    )


def _small_interval(figure: str) -> str:
    """Return the HTML of a headline figure, its interval "[low, high]" in small letters."""
    value, bracket, rest = escape(figure).partition(" [")
    return f"{value} <small>[{rest}</small>" if bracket else value


def model_section(data: PageData) -> str:
    """Return the diagram of all layers: token mixing, and the kept share of each replaced matrix."""
    by_place: dict[tuple[int | None, str], list[dict[str, Any]]] = {}
    for record in data.report["modules"]:
        by_place.setdefault((layer_index(record["name"]), module_role(record)), []).append(record)
    mixing = {layer_index(path): names for path, names in data.mixing.items()}
    rows = [
        (
            str(layer),
            mixing.get(layer, ("", "")),
            [_matrix_box(by_place.get((layer, role)), role, (layer, role) in data.kept) for role in data.roles],
        )
        for layer in data.layers
    ]
    if not rows:
        return ""
    kinds = _legend_of_model(rows)
    keys = "".join(f'<li><span class="key {kind}"></span>{escape(label)}</li>' for kind, label in kinds.items())
    names = [role.replace("attention.", "").replace("mlp.", "mlp ") for role in data.roles]
    drawn = layer_diagram("Attention and matrices of each layer", names, rows)
    caption = (
        "Each box is an original matrix. The filled part is the share of its parameters that is kept, its color the "
        "relative error. Grey: not replaced. Hover for details."
    )
    return "<h2 id=model>The model, before and after</h2>" + figure_html(
        drawn, caption, f'<ul class="legend">{keys}</ul>'
    )


def _legend_of_model(rows: Sequence[tuple[str, tuple[str, str], Sequence[MatrixBox | None]]]) -> dict[str, str]:
    """Return the label of every color in the diagram of the model, by CSS class; of errors the whole scale."""
    boxes = [box for *_, boxes in rows for box in boxes if box is not None]
    mixing = {name for _, (name, _), _ in rows if name}
    found, scale = dict.fromkeys(box.kind for box in boxes), {f"e{i}": name for i, name in enumerate(error_labels())}
    kinds = scale if found.keys() & scale.keys() else {}
    kinds |= {kind: kind.replace("_", " ") for kind in found if kind not in (*scale, "unchanged")}
    kinds |= {"unchanged": "not replaced"} if "unchanged" in found else {}
    kinds |= {"original": "removed"} if any(box.fraction < 1 for box in boxes) else {}
    kinds |= {"softmax": "softmax attention"} if SOFTMAX[0] in mixing else {}
    return kinds | ({"replaced": "attention that was replaced"} if mixing - {SOFTMAX[0]} else {})


def _matrix_box(records: list[dict[str, Any]] | None, role: str, is_kept: bool) -> MatrixBox | None:
    """Return the box of a role of a layer; None if the layer has no such matrix."""
    if not records:
        return MatrixBox(1.0, "unchanged", f"{role}: not replaced") if is_kept else None
    before, after = (sum(int(r[key]) for r in records) for key in ("params_before", "params_after"))
    first = records[0]
    more = f" and {len(records) - 1} more" if len(records) > 1 else ""
    error = (
        "" if first["error"] is None else f", error {first['error']:.3f}"
    )  # models trained from scratch have no error
    text = f"{first['name']}{more}: {structure_text(first)}, {after:,} of {before:,} parameters{error}"
    errors = [float(r["error"]) for r in records if r["error"] is not None and not is_dense(r)]
    return MatrixBox(after / max(before, 1), error_class(max(errors)) if errors else structure_class(first), text)


def error_labels() -> list[str]:
    """Return the labels of the color classes e0 to e4, from the smallest error to the largest."""
    between = [f"{low:g} to {high:g}" for low, high in pairwise(ERROR_STEPS)]
    return [f"error under {ERROR_STEPS[0]:g}", *between, f"{ERROR_STEPS[-1]:g} and more"]


def error_class(error: float) -> str:
    """Return the CSS class of a relative error, e0 (small) to e4 (large)."""
    return f"e{sum(error >= step for step in ERROR_STEPS)}"


def error_section(data: PageData) -> str:
    """Return charts of the error and rank of each replaced matrix by layer."""
    kinds = ("converted", "healed", "third", "m3")  # not "base", whose dashes mean the original
    by_role: dict[str, list[dict[str, Any]]] = {}
    for record in data.report["modules"]:
        if layer_index(record["name"]) is not None:
            by_role.setdefault(module_role(record), []).append(record)
    if not by_role:
        return ""
    shown = list(by_role.items())
    parts: list[str] = []
    for start in range(0, len(shown), 4):
        group = shown[start : start + 4]
        worth = [Series(role, kind, _layer_points(records, "error")) for kind, (role, records) in zip(kinds, group)]
        of = shared_family([role for role, _ in group])
        picture = line_chart(f"Relative error by layer{of}", worth, Axis("layer"), Axis("relative error"))
        parts.append(
            figure_html(picture, "Error of the outputs on held-out text, or of the weights if there was no text.")
        )
        ranked = [Series(role, kind, _layer_points(records, "rank")) for kind, (role, records) in zip(kinds, group)]
        parts.append(
            figure_html(
                line_chart(f"Rank by layer{of}", ranked, Axis("layer"), Axis("rank")),
                "Rank of each matrix, as allocated.",
            )
        )
    drawn = "".join(parts)
    return f'<h2 id=errors>Errors and ranks, layer by layer</h2><div class="pair">{drawn}</div>' if drawn else ""


def shared_family(roles: list[str]) -> str:
    """Return ", attention" for roles that all begin with `attention.`, and likewise for others; "" for mixed roles."""
    families = {role.partition(".")[0] for role in roles}
    return f", {families.pop()}" if len(families) == 1 else ""


def _layer_points(records: list[dict[str, Any]], what: str) -> list[tuple[float, float]]:
    points = []
    for record in records:
        value = record["structure"].get("rank") if what == "rank" else record["error"]
        if isinstance(value, (int, float)):
            points.append((float(layer_index(record["name"]) or 0), float(value)))
    return sorted(points)


def cost_section(data: PageData) -> str:
    """Return charts of the FLOPs per token and the cache size against the context length."""
    if not data.costs:
        return ""
    drawn = []
    held = f"The cache of one sequence: keys and values in {escape(data.dtype)}, recurrent states in float32."
    for what, scale, y, caption in (
        ("macs", 2, "FLOPs per token", "Linears and attention for the next token; two FLOPs per multiply-accumulate."),
        ("cache_bytes", 1, "bytes", held),
    ):
        series = [
            Series(name, kind, [(float(c), float(scale * data.costs[c][what][i])) for c in data.costs])
            for i, (name, kind) in enumerate((("original", "base"), ("converted", "converted")))
        ]
        title = "FLOPs by context length" if what == "macs" else "Cache by context length"
        drawn.append(
            figure_html(
                line_chart(title, series, Axis("context length in tokens", log=True, tokens=True), Axis(y, log=True)),
                caption,
            )
        )
    return '<h2 id=costs>Costs by context length</h2><div class="pair">' + "".join(drawn) + "</div>"


def training_section(data: PageData) -> str:
    """Return charts of training and validation loss per stage, and a table of the training runs."""
    stages: dict[str, list[dict[str, Any]]] = {}
    for line in data.log:
        stages.setdefault(f"{line.get('stage', 0)}: {line.get('kind', '')}", []).append(line)
    drawn = []
    for name, lines in stages.items():
        loss = _step_points(lines, "loss")
        held = _step_points(lines, "validation")
        series = [Series("training loss", "converted", loss), Series("validation, nats per token", "healed", held)]
        drawn.append(figure_html(line_chart(f"Stage {name}", series, Axis("step"), Axis("loss")), LOSSES))
    runs = data.report.get("training") or []
    rows = []
    for number, run in enumerate(runs, 1):
        scores = [
            ((run.get("validation") or {}).get(key) or {}).get("perplexity") for key in ("original", "before", "after")
        ]
        tokens = sum(int(stage["tokens"]) for stage in run.get("stages", []))
        kinds = ", ".join(str(stage["kind"]) for stage in run.get("stages", []))
        rows.append([str(number), kinds, (f"{tokens:,}", tokens), *("-" if s is None else f"{s:.4f}" for s in scores)])
    if not rows and not any(drawn):
        return ""
    heads = ["run", "stages", "tokens", "perplexity, original", "converted", "healed"]
    run_table = table_html("Healing runs", heads, rows, text_columns=2) if rows else ""
    charts = f'<div class="pair">{"".join(drawn)}</div>' if any(drawn) else ""
    return f"<h2 id=training>Healing</h2>{charts}{run_table}"


def _step_points(lines: list[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    pairs: list[tuple[Any, Any]] = [(line.get("step"), line.get(key)) for line in lines]
    return [(float(s), float(v)) for s, v in pairs if isinstance(s, (int, float)) and isinstance(v, (int, float))]


def eval_section(data: PageData) -> str:
    """Return the results of `surgery eval`: a table of tasks, needle maps, and loss by position."""
    results = data.measured.results
    if results is None:
        return ""
    rows = [row for row in results["rows"] if not row["group"]]
    names = {role: last_part(measured_model(results, role)["name"]) for role in ("base", "converted")}
    original = "base" if other_base(data.report, results) else "original"
    titles = {
        role: f"{kind}: {names[role]}" if names[role] not in ("", None, kind) else kind
        for role, kind in (("base", original), ("converted", "converted"))
    }
    roles = [role for role in ("base", "converted") if any(role in row["values"] for row in rows)]
    body = []
    for row in rows:
        cells = [_format_value(row, role) for role in roles]
        interval, moved = _change_cells(row)
        text = "; ".join(str(flag) for flag in row.get("flags", []))
        measure = str(row["metric"]["title"] or row["metric"]["name"])
        body.append([str(row["task"]), measure, *cells, moved, interval, str(row["samples"]), text])
    heads = [
        "task",
        "measure",
        *(titles[role] for role in roles),
        "difference",
        "95% interval",
        "samples",
        "remarks",
    ]
    parts = [
        "<h2 id=measured>Before and after</h2>",
        table_html(
            "Original and converted: value, and its 95% interval [low, high] or standard error (±)",
            heads,
            body,
            text_columns=2,
        ),
    ]
    parts.append(averages_table(results.get("averages") or [], roles))
    provenance = results.get("provenance")
    if line := command_line(provenance.get("command") if isinstance(provenance, dict) else None):
        parts.append(f'<p class="note">reproduce with: {escape(line)}</p>')
    return "".join([*parts, needle_maps(results["rows"], roles), position_chart(results["rows"], roles)])


def _change_cells(row: dict[str, Any]) -> tuple[str, Any]:
    """Return the cells (95% interval, change) of a row: a ratio for perplexities, as in the table of `surgery eval`,
    else a difference.
    """
    ratio = row.get("ratio") if row["metric"].get("kind") == "ppl" else None
    change, sign = (ratio, "") if ratio else (row.get("difference") or {}, "+")
    low, high, moved = (change.get(key) for key in ("low", "high", "change"))
    interval = format_interval(low, high, sign) or "-"
    if moved is None:
        return interval, "-"
    return interval, (format_ratio(moved) if ratio else f"{moved:+.4g}", moved)


def generation_section(data: PageData) -> str:
    """Return the continuations of a few prompts by the original and by the converted model, side by side."""
    parts = []
    for entry in data.generations:
        texts = (("prompt", "Prompt"), ("original", "Original"), ("converted", "Converted"))
        cells = (f"<div><h3>{label}</h3><p>{escape(str(entry[key]))}</p></div>" for key, label in texts)
        parts.append(f'<div class="samples">{"".join(cells)}</div>')
    note = '<p class="note">Greedy continuations, from the most likely token each time.</p>'
    return f"<h2 id=generations>The same prompts, before and after</h2>{note}{''.join(parts)}" if parts else ""


def averages_table(rows: list[dict[str, Any]], roles: Sequence[str]) -> str:
    """Return the table of averages over tasks, with 95% intervals; "" without averages."""
    body = []
    for row in rows:
        tokens = row.get("unit") == "tokens"
        change = (row.get("differences") or {}).get("converted") or {}
        low, high = change.get("low"), change.get("high")
        where = "" if row["length"] is None else f", {format_tokens(row['length'])} tokens"
        body.append(
            [
                f"{row['suite']}, {row['name']}{where}",
                *(average_cell(row, role, tokens) for role in roles),
                "-" if change.get("change") is None else (f"{change['change']:+.4g}", change["change"]),
                format_interval(low, high, "+") or "-",
                f"without {', '.join(map(str, row['missing']))}" if row["missing"] else str(row.get("source") or ""),
            ]
        )
    if not body:
        return ""
    names = ("original" if role == "base" else role for role in roles)
    return table_html("Averages over tasks", ["average", *names, "difference", "95% interval", "remarks"], body)


def average_cell(row: dict[str, Any], model: str, tokens: bool) -> Any:
    """Return the cell of an average: value and interval, and the value to sort by."""
    value, interval = row["values"].get(model), row["intervals"].get(model)
    if value is None:
        return "-"
    show = format_tokens if tokens else "{:.4g}".format
    return (show(value) + ("" if interval is None else f" [{show(interval[0])}, {show(interval[1])}]"), value)


def _format_value(row: dict[str, Any], role: str) -> Any:
    value, error = row["values"].get(role), (row.get("errors") or {}).get(role)
    if value is None:
        return "-"
    return (format_number(value, error, (row.get("intervals") or {}).get(role)), value)


def needle_maps(rows: list[dict[str, Any]], roles: list[str]) -> str:
    """Return needle maps (accuracy by length and depth) of each task that has them, for original and converted."""
    rows_by_task: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if set(row["group"]) == {"depth", "length"} and row["metric"]["name"] == "accuracy":
            rows_by_task.setdefault(str(row["task"]), []).append(row)
    parts = []
    for task, cells in rows_by_task.items():
        if not any(row["values"].get(role) for row in cells for role in roles):
            parts.append(f"<h3>{escape(task)}</h3><p>{NOTHING_FOUND}</p>")
            continue
        lengths = sorted({row["group"]["length"] for row in cells})
        depths = sorted({row["group"]["depth"] for row in cells})
        parts.append(f'<h3>{escape(task)}</h3><div class="pair">')
        for role in roles:
            known = {(r["group"]["length"], r["group"]["depth"]): r["values"].get(role) for r in cells}
            scale = float(cells[0]["metric"].get("scale") or 1.0)
            shares = [[None if (v := known.get((n, d))) is None else v / scale for d in depths] for n in lengths]
            name = "original" if role == "base" else role
            drawn = heat_map(
                f"{task}, {name}", [format_tokens(n) for n in lengths], [f"{100 * d:.3g}%" for d in depths], shares
            )
            parts.append(
                figure_html(
                    drawn, f"{escape(name)}: accuracy in percent by length in tokens and depth (0%: start, 100%: end)"
                )
            )
        parts.append("</div>")
    return "".join(parts)


def row_band(rows: list[dict[str, Any]], axis: str, name: str) -> list[tuple[float, float, float]]:
    """Return the 95% band (x, low, high) of a model's values along `axis`: their intervals, or 1.96 standard errors."""
    band = []
    for row in rows:
        value, error = row["values"].get(name), (row.get("errors") or {}).get(name)
        low_high = (row.get("intervals") or {}).get(name)
        if low_high is None and value is not None and error is not None:
            low_high = (value - Z_95 * error, value + Z_95 * error)
        if low_high is not None:
            band.append((float(row["group"][axis]), float(low_high[0]), float(low_high[1])))
    return sorted(band)


def position_chart(rows: list[dict[str, Any]], roles: list[str]) -> str:
    """Return the chart of loss by position in the text, in nats per token; "" without such results."""
    position_rows = [row for row in rows if set(row["group"]) == {"position"} and row["metric"]["name"] == "nll"]
    series = [
        Series(
            "original" if role == "base" else role,
            role,
            sorted(
                (float(r["group"]["position"]), float(r["values"][role])) for r in position_rows if role in r["values"]
            ),
            row_band(position_rows, "position", role),
        )
        for role in roles
    ]
    drawn = line_chart(
        "Loss by position", series, Axis("position in the text", log=True, tokens=True), Axis("nats per token")
    )
    return (
        '<h3>By position</h3><div class="pair">'
        + figure_html(drawn, "Mean loss around each position, with 95% bands; lower is better.")
        + "</div>"
        if drawn
        else ""
    )


def matrix_section(data: PageData) -> str:
    """Return the table of all replaced matrices."""
    rows = []
    for record in data.report["modules"]:
        before, after = int(record["params_before"]), int(record["params_after"])
        rows.append(
            [
                record["name"],
                module_role(record),
                structure_text(record),
                (f"{before:,}", before),
                (f"{after:,}", after),
                (format_share(after, before), after / max(before, 1)),
                *("-" if (e := record.get(what)) is None else f"{e:.4f}" for what in ("error", "start")),
            ]
        )
    if not rows:
        return ""
    heads = ["matrix", "role", "structure", "parameters before", "after", "kept", "error", "initial error"]
    return "<h2 id=matrices>Matrices</h2>" + table_html("Replaced matrices", heads, rows, text_columns=3)
