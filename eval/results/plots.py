"""Figures of comparisons: curves, and heat maps side by side. The colors are distinguishable in gray and with color
blindness.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surgery.eval.suite import EvalMetric, SuiteResult

MAX_TASKS = 4  # a suite with more tasks gets one figure for all

COLORS = {"base": "#0072b2", "converted": "#d55e00"}
Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def _figure(columns: int = 1, width: float = 7.0) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _save_figure(figure: Any, path: Path) -> Path:
    new = path.with_name(f".{path.name}")
    figure.savefig(new, dpi=150, format="png")
    new.replace(path)
    return path


def plot_lines(path: Path, series: Series, x: str, y: str, title: str, log: bool = False) -> Path:
    """Draw one curve per model and return the path."""
    figure, (axes,) = _figure()
    for role, (xs, ys) in series.items():
        style = "--" if role == "base" else "-"
        axes.plot(xs, ys, style, color=COLORS.get(role), label=role, marker="o" if len(xs) < 20 else None)
    if log:
        axes.set_xscale("log", base=2)
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    return _save_figure(figure, path)


def plot_heat_maps(
    path: Path,
    tables: Mapping[str, Mapping[tuple[float, float], float]],
    x: str,
    y: str,
    title: str,
    longest: int | None = None,
) -> Path:
    """Draw one heat map per model with a common scale, 0 to 1, and return the path.

    tables[role][x, y] is the value; x values beyond `longest` are marked with *.
    """
    figure, every = _figure(len(tables), 1.0 + 4.5 * len(tables))
    image = None
    for axes, (role, table) in zip(every, tables.items()):
        xs, ys = (sorted({key[i] for key in table}) for i in (0, 1))
        grid = [[table.get((a, b), float("nan")) for a in xs] for b in ys]
        image = axes.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        axes.set_xticks(range(len(xs)), [f"{a:,g}" + ("*" if longest and a > longest else "") for a in xs])
        axes.set_yticks(range(len(ys)), [f"{b:g}" for b in ys])
        axes.set(xlabel=x, ylabel=y, title=role)
        for i, row in enumerate(grid):
            for j, value in enumerate(row):
                colour = "black" if value > 0.6 else "white"
                axes.text(j, i, f"{100 * value:.0f}", ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image, ax=list(every))
    figure.suptitle(title + (f" (*: beyond the model's longest input, {longest:,} tokens)" if longest else ""))
    return _save_figure(figure, path)


def plot_by_group(suite: str, results: Mapping[str, SuiteResult], folder: Path) -> list[Path]:
    """Draw per task heat maps (length x depth) and curves by length, where samples have these groups; return the paths."""
    first = next(iter(results.values()))
    longest = first.info.get("longest")
    tasks: list[str | None] = list(dict.fromkeys(s.task for s in first.samples))
    metrics = [m for i, m in enumerate(first.metrics.values()) if i == 0 or not m.pooled]
    written = []
    for task in tasks if len(tasks) <= MAX_TASKS else [None]:
        for metric in metrics:
            name = (task or suite) + (f"-{metric.name}" if len(metrics) > 1 else "")
            cells = {role: _cell_means(r, task, metric, ("length", "depth")) for role, r in results.items()}
            if all(cells.values()) and (metric.kind == "accuracy" or metric.top == 1):
                beyond = longest if any(x > (longest or x) for table in cells.values() for x, _ in table) else None
                title = f"{name}, {metric.label}, percent"
                written.append(plot_heat_maps(folder / f"{name}.png", cells, "length, tokens", "depth", title, beyond))
            curves = {role: _cell_means(r, task, metric, ("length",)) for role, r in results.items()}
            if all(len(curve) > 1 for curve in curves.values()):
                series = {role: ([k[0] for k in sorted(c)], [c[k] for k in sorted(c)]) for role, c in curves.items()}
                label = metric.label + (f", {metric.unit}" if metric.unit else "")
                written.append(
                    plot_lines(folder / f"{name}-length.png", series, "length, tokens", label, name, log=True)
                )
    return written


def _cell_means(result: SuiteResult, task: str | None, metric: EvalMetric, names: tuple[str, ...]) -> dict[Any, float]:
    """Return weighted means by cell; scaled for display, except for shares."""
    cells: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for sample in result.samples:
        if task in (None, sample.task) and all(n in sample.group for n in names) and metric.name in sample.metrics:
            key = tuple(sample.group[name] for name in names)
            cells[key].append((sample.weight, sample.metrics[metric.name]))
    scale = 1.0 if len(names) > 1 else metric.scale
    return {k: scale * sum(w * v for w, v in each) / sum(w for w, _ in each) for k, each in cells.items()}
