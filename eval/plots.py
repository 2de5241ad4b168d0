"""Pictures of comparisons: curves and pairs of heat maps. Colours are told apart in grey and by the colour-blind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {"base": "#0072b2", "converted": "#d55e00"}
Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def _figure(columns: int = 1, width: float = 7.0) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _saved(figure: Any, path: Path) -> Path:
    new = path.with_name(f".{path.name}")
    figure.savefig(new, dpi=150, format="png")
    new.replace(path)
    return path


def lines(path: Path, series: Series, x: str, y: str, title: str, log: bool = False) -> Path:
    """One curve for each model."""
    figure, (axes,) = _figure()
    for role, (xs, ys) in series.items():
        style = "--" if role == "base" else "-"
        axes.plot(xs, ys, style, color=COLOURS.get(role), label=role, marker="o" if len(xs) < 20 else None)
    if log:
        axes.set_xscale("log", base=2)
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    return _saved(figure, path)


def heat_maps(
    path: Path,
    tables: Mapping[str, Mapping[tuple[float, float], float]],
    x: str,
    y: str,
    title: str,
    longest: int | None = None,
) -> Path:
    """A map for each model on one scale, 0 to 1; tables[role][x, y]. longest: what lies beyond it in x is marked."""
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
    figure.suptitle(title + (f" (*: beyond the {longest:,} tokens it was made for)" if longest else ""))
    return _saved(figure, path)
