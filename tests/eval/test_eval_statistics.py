"""Confidence intervals have their nominal coverage, and sums agree with sums by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.slow import slow_where
from hypothesis import given, settings
from hypothesis import strategies as st

from surgery.core.errors import SurgeryError
from surgery.eval.results import statistics
from surgery.eval.results.compare import collect_units, compare_results, shared_metrics
from surgery.eval.results.statistics import Units, estimate, mcnemar, paired_interval, student_quantile, wilson_interval
from surgery.eval.suite import EvalMetric, Sample, SuiteResult, infer_metric_kind

SIMULATIONS = 400


def units(values, weights=None) -> Units:
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, float)
    return Units(np.asarray(values, float) * weights, weights)


# -- by hand ---------------------------------------------------------------------------------------
def test_values_and_errors():
    value, error = estimate(units([1, 2, 6]), None, "mean")
    assert value == 3 and error == pytest.approx(np.std([1, 2, 6], ddof=1) / 3**0.5)
    value, error = estimate(units([1, 3], [3, 1]), None, "mean")
    assert value == 1.5 and error == pytest.approx(math.sqrt(2 * (1.5**2 + 1.5**2)) / 4)
    value, error = estimate(units([1.0, 1.2]), None, "exp")
    assert value == pytest.approx(math.exp(1.1)) and error == pytest.approx(math.exp(1.1) * 0.1)


def test_all_right_is_not_certain():
    """(k + 1) / (n + 2), as for every share."""
    value, error = estimate(units([1] * 8), 1.0, "mean")
    assert value == 1 and error == pytest.approx(math.sqrt(0.9 * 0.1 / 10))


@pytest.mark.parametrize("gained, lost, p", [(0, 0, 1), (1, 5, 14 / 64), (5, 1, 14 / 64), (0, 6, 2 / 64), (3, 3, 1)])
def test_mcnemar(gained, lost, p):
    ours = np.array([1] * gained + [0] * lost + [1, 0])
    base = np.array([0] * gained + [1] * lost + [1, 0])
    assert mcnemar(ours, base) == pytest.approx(p)


def test_documents_are_units():
    """A document cut into ten samples is not ten documents."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=12)
    whole = [Sample("t", str(i), {"m": v}, weight=10, unit=str(i)) for i, v in enumerate(values)]
    cut = [Sample("t", f"{i} {j}", {"m": v}, unit=str(i)) for i, v in enumerate(values) for j in range(10)]
    assert estimate(collect_units(cut, "m"), None, "mean") == pytest.approx(
        estimate(collect_units(whole, "m"), None, "mean")
    )
    assert len(collect_units([Sample("t", str(i), {"m": 0}) for i in range(5)], "m")) == 5


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=40))
def test_of_shares_the_interval_holds_the_change(pairs):
    ours, base = (units([float(pair[i]) for pair in pairs]) for i in (0, 1))
    found = paired_interval(ours, base, 1.0, "mean")
    assert -1 <= found.low <= found.change + 1e-9 and found.change - 1e-9 <= found.high <= 1
    mirrored = paired_interval(base, ours, 1.0, "mean")
    assert mirrored.change == pytest.approx(-found.change)


@settings(deadline=None, max_examples=20)
@given(st.integers(5, 30), st.integers(0, 1000))
def test_equal_scores_change_by_nothing(n, seed):
    rng = np.random.default_rng(seed)
    same = units(rng.normal(size=n), rng.integers(1, 50, n))
    for shape in ("mean", "exp"):
        found = paired_interval(same, same, None, shape)
        assert (found.change, found.low, found.high) == (0, 0, 0)
    assert paired_interval(units(np.ones(n)), units(np.ones(n)), 1.0, "mean").change == 0


def test_few_units_have_no_interval():
    few, base = units([1.0, 1.1, 1.3, 1.2]), units([1.0, 1.0, 1.0, 1.1])
    assert paired_interval(few, base, None, "mean").low is None and paired_interval(few, base, None, "mean").change > 0


# -- simulation ------------------------------------------------------------------------------------
def coverage(draw, truth: float, top: float | None, shape, monkeypatch) -> float:
    monkeypatch.setattr(statistics, "BOOTSTRAP_DRAWS", 400)
    rng = np.random.default_rng(7)
    found = [paired_interval(*draw(rng), top, shape, seed) for seed in range(SIMULATIONS)]
    return sum(i.low <= truth <= i.high for i in found) / SIMULATIONS


def losses(rng, n=60):
    """Documents of many lengths; the harder the document, the more is lost, and few lose much."""
    tokens = rng.integers(50, 500, n)
    base = rng.gamma(4, 0.5, n)
    return units(base + 0.1 * rng.gamma(2, 0.5, n), tokens), units(base, tokens)


def test_interval_of_losses_covers(monkeypatch):
    share = coverage(losses, 0.1, None, "mean", monkeypatch)
    assert 0.92 <= share <= 0.98, share


def test_interval_of_perplexities_covers(monkeypatch):
    share = coverage(losses, math.exp(2.1) - math.exp(2), None, "exp", monkeypatch)
    assert 0.91 <= share <= 0.98, share


def unequal(sigma: float, differences):
    """Return a function that draws documents with lognormal lengths, and what is lost in each."""

    def draw(rng, n):
        tokens = rng.lognormal(5, sigma, n).round() + 1
        base = rng.gamma(4, 0.5, n)
        return units(base + differences(rng, n), tokens), units(base, tokens)

    return draw


DIFFERENCES = {  # each has the mean 0.1
    "gamma": (lambda rng, n: 0.1 * rng.gamma(2, 0.5, n), 0.925),
    "normal": (lambda rng, n: rng.normal(0.1, 0.1, n), 0.935),
    "lognormal": (lambda rng, n: 0.1 * rng.lognormal(-0.5, 1, n), 0.86),
}


@pytest.mark.parametrize("n, sigma", slow_where(lambda n, _: n == 20, [(10, 1.5), (20, 1.0)]))
def test_interval_of_documents_of_unequal_length_covers(n, sigma, monkeypatch):
    """A bootstrap-t interval without leverages covers 0.87 and 0.91."""
    draw = unequal(sigma, DIFFERENCES["gamma"][0])
    share = coverage(lambda rng: draw(rng, n), 0.1, None, "mean", monkeypatch)
    assert 0.92 <= share <= 0.99, share


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENCES)
@pytest.mark.parametrize("n", [10, 20, 50])
@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0, 1.5])
def test_interval_of_documents_of_any_length_covers(name, n, sigma, monkeypatch):
    monkeypatch.setitem(globals(), "SIMULATIONS", 1500)
    differences, least = DIFFERENCES[name]
    share = coverage(lambda rng: unequal(sigma, differences)(rng, n), 0.1, None, "mean", monkeypatch)
    assert least <= share <= 0.99, share


def test_documents_of_very_unequal_length_are_flagged():
    metric = EvalMetric("nll", "ppl", higher_is_better=False)
    samples = [Sample("a", str(i), {"nll": 1.0 + i / 40}, weight=1000.0 if i == 0 else 10.0) for i in range(30)]
    (row,) = compare_results("s", {"base": SuiteResult(samples, {"nll": metric})}, same=False)
    assert row.flags == ["documents of very unequal length count as 2 of equal length: the interval may be too narrow"]


@pytest.mark.parametrize("freedom, expected", [(1, 12.7062), (2, 4.3027), (9, 2.2622), (29, 2.0452), (1e6, 1.95996)])
def test_student_s_quantile(freedom, expected):
    assert student_quantile(freedom) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    "right, n, low, high",
    [(0, 10, 0, 0.2775), (10, 10, 0.7225, 1), (15, 20, 0.5313, 0.8881), (81, 263, 0.2553, 0.3662)],
)
def test_wilson(right, n, low, high):
    """81 of 263 is the example of Newcombe 1998, table I."""
    found = wilson_interval(units([1.0] * right + [0.0] * (n - right)))
    assert found == pytest.approx((low, high), abs=1e-4)


def test_wilson_counts_units():
    """Ten equal answers about one document count as one; answers that vary within documents count each."""
    rng = np.random.default_rng(0)
    right = rng.integers(0, 2, 30)
    copies = [Sample("t", f"{i} {j}", {"m": float(r)}, unit=str(i)) for i, r in enumerate(right) for j in range(10)]
    assert wilson_interval(collect_units(copies, "m")) == pytest.approx(wilson_interval(units(right)))


def test_wilson_never_counts_more_samples_than_there_are():
    """Seven documents of unequal size with one right answer, in the largest: its residual is small, which is no
    evidence of 450 samples.
    """
    sizes = [16, 16, 32, 32, 64, 64, 112]
    samples = [
        Sample("t", f"{i} {j}", {"m": float(i == 6 and j == 0)}, unit=str(i))
        for i, n in enumerate(sizes)
        for j in range(n)
    ]
    found = collect_units(samples, "m")
    assert found.samples == sum(sizes) and wilson_interval(Units(found.sums_U, found.weights_U, 1e9))[1] < 0.0166
    assert wilson_interval(found) == pytest.approx(wilson_interval(units([1.0] + [0.0] * (sum(sizes) - 1))))


@pytest.mark.parametrize("lost, gained", [(0.15, 0.05), (0.04, 0.0)])
def test_interval_of_accuracies_covers(lost, gained, monkeypatch):
    """Where almost all pairs agree it is wider than it must be, never narrower."""

    def draw(rng, n=80):
        u, easy = rng.random(n), rng.random(n) < 0.6
        ours = np.where(u < lost, 0, np.where(u < lost + gained, 1, easy))
        base = np.where(u < lost, 1, np.where(u < lost + gained, 0, easy))
        return units(ours), units(base)

    share = coverage(draw, gained - lost, 1.0, "mean", monkeypatch)
    assert share >= 0.925, share


def test_pairing_is_what_narrows():
    rng = np.random.default_rng(0)
    ours, base = losses(rng)
    paired = paired_interval(ours, base, None, "mean")
    mixed = np.random.default_rng(1).permutation(len(base))
    apart = paired_interval(ours, Units(base.sums_U[mixed], base.weights_U[mixed]), None, "mean")
    assert paired.high - paired.low < 0.3 * (apart.high - apart.low)


# -- rows ------------------------------------------------------------------------------------------
ACCURACY = EvalMetric("accuracy", "accuracy", scale=100)


def result(values: dict[str, list[float]], **more) -> SuiteResult:
    samples = [
        Sample(task, str(i), {"accuracy": v}, {"length": 64 << i % 2})
        for task, each in values.items()
        for i, v in enumerate(each)
    ]
    return SuiteResult(samples, {"accuracy": ACCURACY}, **more)


def test_rows_are_tasks_and_groups():
    base, ours = result({"a": [1] * 20, "b": [1] * 20}), result({"a": [1, 0] * 10, "b": [1] * 20})
    rows = compare_results("s", {"base": base, "converted": ours}, same=False)
    assert [(r.task, r.group) for r in rows][:3] == [("a", {}), ("a", {"length": 64}), ("a", {"length": 128})]
    whole, short, long = rows[:3]
    assert (whole.values, whole.difference.change) == ({"base": 100, "converted": 50}, -50)
    assert short.values["converted"] == 100 and long.values["converted"] == 0
    assert whole.p == pytest.approx(2 / 2**10) and short.p == 1
    assert rows[3].difference.change == 0 and rows[3].difference.high > 0


def test_order_does_not_matter():
    base, ours = result({"a": [1, 0, 1, 1] * 5}), result({"a": [1, 1, 0, 1] * 5})
    mixed = SuiteResult(ours.samples[::-1], ours.metrics)
    one, two = (compare_results("s", {"base": base, "converted": o}, same=False)[0] for o in (ours, mixed))
    assert one.values == two.values and one.difference.change == two.difference.change and one.p == two.p


def test_one_model_is_itself_for_certain():
    rows = compare_results(
        "s", {"base": result({"a": [1, 0] * 10}), "converted": result({"a": [1, 0] * 10})}, same=True
    )
    assert all((r.difference.change, r.difference.low, r.difference.high) == (0, 0, 0) for r in rows)


def test_a_base_that_guesses_is_flagged():
    floors = {"a": {"accuracy": 0.25}}
    guessing = result({"a": [1, 0, 0, 0] * 10}, floors=floors)
    assert "no better than guessing" in compare_results("s", {"base": guessing}, same=False)[0].flags[0]
    knowing = result({"a": [1] * 40}, floors=floors)
    assert compare_results("s", {"base": knowing}, same=False)[0].flags == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 1e6])
def test_a_broken_model_is_flagged_not_fatal(loss):
    metric = EvalMetric("nll", "ppl", higher_is_better=False)
    base, ours = ([Sample("a", str(i), {"nll": v}) for i in range(20)] for v in (1.0, loss))
    ours[3] = Sample("a", "3", {"nll": 2.0})
    results = {role: SuiteResult(s, {"nll": metric}) for role, s in (("base", base), ("converted", ours))}
    row = compare_results("s", results, same=False)[0]
    assert row.values["base"] == pytest.approx(math.e) and ("not a finite number" in row.flags) == (loss != 1e6)
    assert not row.ratio.change <= 2


def test_other_samples_are_no_pairs():
    with pytest.raises(SurgeryError, match=r"different samples \(base 20, converted 10, 10 in common\)"):
        compare_results("s", {"base": result({"a": [1] * 20}), "converted": result({"a": [1] * 10})}, same=False)


@pytest.mark.parametrize("swap", [False, True])
def test_a_model_whose_scores_are_all_0_or_1_is_compared_with_one_whose_are_not(swap):
    """The tasks of a suite with F1 and accuracies: each is what the scores of both models say."""

    def scores(f1: list[float], right: list[float]) -> SuiteResult:
        samples = [Sample("qasper", str(i), {"score": v}) for i, v in enumerate(f1)]
        samples += [Sample("trec", str(i), {"score": v}) for i, v in enumerate(right)]
        values = [*f1, *right]
        return SuiteResult(samples, {"score": infer_metric_kind(EvalMetric("score", top=1.0, title="T"), values)})

    weak, strong = scores([0, 0, 1, 0], [0, 1, 1, 0]), scores([0, 0.5, 1, 0.2], [1, 1, 1, 0])
    assert weak.metrics["score"].kind == "accuracy" and strong.metrics["score"].kind == "mean"
    base, ours = (strong, weak) if swap else (weak, strong)
    qasper, trec = compare_results("longbench", {"base": base, "converted": ours}, same=False)
    assert qasper.metric.kind == "mean" and not qasper.intervals and qasper.p is None
    assert trec.metric.kind == "accuracy" and set(trec.intervals) == {"base", "converted"} and trec.p == 1
    assert trec.metric.label == "T" and shared_metrics([base, ours])["score"].kind == "mean"


def test_accuracies_are_zeros_and_ones():
    with pytest.raises(SurgeryError, match="must be 0 or 1"):
        compare_results("s", {"base": result({"a": [0.5] * 9}), "converted": result({"a": [1] * 9})}, same=False)
