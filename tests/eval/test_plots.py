"""Figures: ticks as people write them, percent, error bands, and one color for a model."""

from __future__ import annotations

import math

import pytest
import torch
from matplotlib.figure import Figure

from surgery.eval.results import plots
from surgery.eval.results.pareto import CostPoint, ParetoChart
from surgery.eval.results.plots import Curve, model_styles, plot_by_group, plot_heat_maps, plot_lines, plot_pareto
from surgery.eval.suite import EvalMetric, Sample, SuiteResult
from surgery.eval.suites.per_position import position_curve

PHONE_PIXELS, LEGIBLE_PIXELS = 390, 7.5
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)


@pytest.fixture
def drawn(monkeypatch):
    """Figures that were drawn, in order, instead of files."""
    found: list[Figure] = []

    def keep(figure, path):
        plots._set_font_sizes(figure)
        figure.canvas.draw()
        found.append(figure)
        return path

    monkeypatch.setattr(plots, "_save_figure", keep)
    return found


def labels(axis) -> list[str]:
    return [text.get_text() for text in axis.get_ticklabels() if text.get_text()]


def smallest_text(figure) -> float:
    """Height in pixels of the smallest text when the figure is as wide as a phone."""
    texts = [
        t for axes in figure.axes for t in (axes.title, *axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels())
    ]
    points = min(t.get_fontsize() for t in texts if t.get_text())
    return points / 72 / figure.get_figwidth() * PHONE_PIXELS


def test_curves_have_bands_and_lengths_as_people_write_them(drawn, tmp_path):
    ys = [90, 88, 85, 80, 70, 50]
    curve = Curve(LENGTHS, ys, [y - 3 for y in ys], [y + 3 for y in ys])
    plot_lines(tmp_path / "a.png", {"base": curve, "converted": curve}, "length, tokens", "score", "t", log=True)
    (axes,) = drawn[0].axes
    assert labels(axes.xaxis) == ["4K", "8K", "16K", "32K", "64K", "128K"] and len(axes.collections) == 2
    assert smallest_text(drawn[0]) >= LEGIBLE_PIXELS
    plot_lines(tmp_path / "a.png", {"m": Curve(range(1, 8192), range(8191))}, "position", "nats", "t")
    assert labels(drawn[1].axes[0].xaxis) == ["0", "1K", "2K", "3K", "4K", "5K", "6K", "7K"]


def test_heat_maps_are_in_percent(drawn, tmp_path):
    table = {(n, d): d for n in LENGTHS for d in (0.0, 0.5, 1.0)}
    plot_heat_maps(tmp_path / "a.png", {"base": table, "converted": table}, "length, tokens", "depth", "t", 65536)
    left, right, bar = drawn[0].axes
    assert labels(left.xaxis)[-2:] == ["64K", "128K*"] and labels(left.yaxis) == ["0%", "50%", "100%"]
    assert labels(bar.yaxis) == ["0%", "25%", "50%", "75%", "100%"] and {t.get_text() for t in left.texts} == {
        "0",
        "50",
        "100",
    }
    assert right.get_title() == "converted" and smallest_text(drawn[0]) >= LEGIBLE_PIXELS


def test_a_model_has_one_style_in_all_figures():
    styles = model_styles(["base", *"abcdefghij"], "base")
    assert len({(s.color, s.line, s.marker) for s in styles.values()}) == 11
    assert model_styles(["a", "b"], None)["a"] == styles["a"] and styles["base"].color == plots.BASE_COLOR


def test_colors_are_those_of_the_report_page():
    import importlib.resources

    css = importlib.resources.files("surgery.publish.html").joinpath("page.css").read_text(encoding="utf-8")
    assert all(f"--m{i}:{color}" in css for i, color in enumerate(plots.COLORS)) and f"--base:{plots.BASE_COLOR}" in css


def test_pareto_labels_every_point_and_marks_the_front(drawn, tmp_path):
    points = {
        "base": CostPoint(3e6, None, 2.4, (2.3, 2.5)),
        "$a_b$": CostPoint(2e6, (1.9e6, 2.1e6), 2.6, None),
        "worse": CostPoint(4e6, None, 2.7, None),
    }
    chart = ParetoChart("stored parameters", "perplexity", False, points, ["$a_b$", "base"])
    plot_pareto(tmp_path / "a.png", chart, list(points), "base")
    (axes,) = drawn[0].axes
    assert {t.get_text() for t in axes.texts} == {"base", r"\$a_b\$", "worse"}
    (front,) = (line for line in axes.lines if line.get_label() == "Pareto front")
    assert list(front.get_xdata()) == [2e6, 3e6] and "lower is better" in axes.get_ylabel()


def test_a_front_of_one_point_is_drawn_to_the_borders(drawn, tmp_path):
    points = {"best": CostPoint(2.0, None, 2.4, None), "worse": CostPoint(4.0, None, 2.7, None)}
    for higher, worst in ((False, 1), (True, 0)):
        chart = ParetoChart("bytes", "quality", higher, points, ["best"])
        plot_pareto(tmp_path / "a.png", chart, list(points), None)
        (axes,) = drawn[-1].axes
        down, right = (line for line in axes.lines if line.get_label() == "_" and line.get_color() == plots.FRONT_COLOR)
        assert list(down.get_xdata()) == [2.0, 2.0] and down.get_ydata()[1] == axes.get_ylim()[worst]
        assert list(right.get_ydata()) == [2.4, 2.4] and right.get_xdata()[1] == axes.get_xlim()[1]


def test_curves_of_many_points_are_told_apart_in_gray(drawn, tmp_path):
    curve = Curve(range(1, 300), [1.0] * 299)
    plot_lines(tmp_path / "a.png", dict.fromkeys(("base", "a", "b"), curve), "position", "nats", "t")
    lines = drawn[0].axes[0].lines
    assert len({line.get_marker() for line in lines}) == 3 and len({line.get_markevery() for line in lines}) == 3


def test_labels_of_points_at_one_place_do_not_cover_each_other(drawn, tmp_path):
    points = {f"model number {i}": CostPoint(3e6 + i, None, 2.4 + 0.01 * i, None) for i in range(6)}
    plot_pareto(
        tmp_path / "a.png", ParetoChart("bytes", "perplexity", False, points, ["model number 0"]), list(points), None
    )
    (axes,) = drawn[0].axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 6 and not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_panels_share_colors_and_have_ticks_that_people_write(drawn, tmp_path):
    curve = Curve([2048, 131072], [1.5, 900.0], [1.0, 800.0], [2.0, 1000.0])
    panels = [plots.Panel("ms", {"original": curve, "new": curve}), plots.Panel("MB", {"new": curve})]
    plots.plot_panels(tmp_path / "a.png", panels, ["original", "new"], "context", "title", base="original")
    first, second = drawn[0].axes
    colors = {line.get_label(): line.get_color() for line in first.lines}
    assert (
        colors == {"original": plots.BASE_COLOR, "new": plots.COLORS[0]}
        and second.lines[0].get_color() == plots.COLORS[0]
    )
    assert [t.get_text() for t in first.get_xticklabels()] == ["2K", "128K"]
    assert {"1", "10", "100", "1k"} <= {t.get_text() for t in first.get_yticklabels()}


def test_bands_of_accuracies_are_wilson_s(drawn, tmp_path):
    metric = EvalMetric("accuracy", "accuracy", scale=100)
    samples = [Sample("t", f"{n} {i}", {"accuracy": 1.0}, {"length": n}) for n in (64, 128) for i in range(10)]
    plot_by_group("s", {"base": SuiteResult(samples, {"accuracy": metric})}, tmp_path)
    band = drawn[0].axes[0].collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(72.2, abs=0.1) and band[:, 1].max() == 100


def test_band_of_positions_counts_documents():
    """Windows of one document are one unit: copying each window into its document leaves the band."""
    losses_NT = torch.rand(6, 50, generator=torch.Generator().manual_seed(0))

    def result(rows, units):
        samples = [Sample("p", str(i), {"nll": 0.0}, {"position": 50}, unit=u) for i, u in enumerate(units)]
        return SuiteResult(samples, {"nll": EvalMetric("nll")}, arrays={"loss_NT": rows})

    one = position_curve(result(losses_NT, list("abcdef")), 1)
    twice = position_curve(result(losses_NT.repeat_interleave(2, 0), list("aabbccddeeff")), 1)
    assert twice.lows == pytest.approx(one.lows) and twice.highs == pytest.approx(one.highs)
    se = float(losses_NT[:, 7].double().std()) / math.sqrt(6)
    assert one.highs[7] - one.ys[7] == pytest.approx(1.96 * se, rel=1e-3)
