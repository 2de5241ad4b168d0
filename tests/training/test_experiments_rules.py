"""Rules of the verdicts of recipes/papers/experiments, on made-up differences: what counts after the correction for the
number of comparisons, and which word follows.
"""

from __future__ import annotations

import math

import pytest

from recipes.papers.experiments import page
from recipes.papers.experiments.driver import load_rows
from recipes.papers.experiments.sweep import Setting, difference, is_complete
from recipes.papers.experiments.verdicts import (
    ANY,
    WORDS,
    Comparison,
    above,
    below,
    combine,
    correct,
    count,
    decide,
)
from surgery.eval.results.statistics import student_quantile, student_tail

SETTING = Setting("cpu", "cpu", (16,), ("ours", "theirs"), (1e-3, 1e-2, 1e-1), 3, 500, 8, 64, 2, {})
BEST = {(m, 16, s): {"loss": 1.0, "edge": False, "chosen_on": 2} for m in SETTING.methods for s in range(3)}


def shifted(p, pairs=3):
    """Return a difference above 0 whose two-sided p-value is p."""
    noise = [0.01 * (i - (pairs - 1) / 2) for i in range(pairs)]
    error = difference(noise).error
    return difference([student_quantile(pairs - 1.0, 1 - p) * error + x for x in noise])


def flipped(found):
    """Return the difference with the other sign."""
    return found._replace(mean=-found.mean, low=-found.high, high=-found.low)


def states(*values):
    return [outcome.state for outcome in correct([Comparison(str(p), shifted(p), above(0.0)) for p in values])]


def test_holm():
    """The smallest p is compared with 0.05 / k, the next with 0.05 / (k - 1), and so on until one fails."""
    assert states(0.049) == ["holds"]
    assert states(0.049, 0.049) == ["open", "open"]
    assert states(0.049, 0.024) == ["holds", "holds"]
    assert states(0.02, 0.04, 0.016) == ["holds", "holds", "holds"]
    assert states(0.03, 0.04, 0.016) == ["open", "open", "holds"]  # 0.04 would count alone: 0.03 fails before it
    assert states(0.017, 0.001, 0.5) == ["holds", "holds", "open"]


@pytest.mark.parametrize("values", [(0.049,), (0.049, 0.049), (0.03, 0.04, 0.016), (0.2, 0.001), (0.02, 0.04, 0.016)])
def test_an_interval_excludes_the_bound_where_the_comparison_counts(values):
    for outcome in correct([Comparison("a", shifted(p), above(0.0)) for p in values]):
        found = outcome.comparison.found
        assert (found.at_level(outcome.level).low > 0) == (outcome.state == "holds"), outcome
        assert found.pairs == 3 and outcome.level >= 0.95
    assert "no common compute" in str(correct([Comparison("a", None, above(0.0))])[0])


def test_student():
    for freedom in (1.0, 2.0, 3.5, 29.0, 1e5):
        for level in (0.5, 0.95, 0.999):
            assert student_tail(student_quantile(freedom, level), freedom) == pytest.approx(1 - level, abs=1e-6)
    assert student_tail(0.0, 4.0) == 1.0 and student_tail(math.inf, 4.0) == 0.0
    assert student_tail(-2.0, 4.0) == student_tail(2.0, 4.0) == pytest.approx(0.116117, abs=1e-5)
    assert student_tail(1.0, 1.0) == pytest.approx(0.5)


def word(*comparisons, best=BEST, setting=SETTING, **reasons):
    return decide(setting, best, comparisons, SETTING.methods, **reasons).word


SURE, UNSURE = shifted(0.001), shifted(0.3)
HOLDS, OPEN = Comparison("holds", SURE, above(0.0)), Comparison("open", UNSURE, above(0.0))
AGAINST = Comparison("against", flipped(SURE), above(0.0))


def test_words():
    assert word(HOLDS, HOLDS) == "reproduced" and word(HOLDS, OPEN) == "in part" and word(OPEN, OPEN) == "undecided"
    assert word(HOLDS, lacking="no trend") == "in part" and word(OPEN, lacking="no trend") == "undecided"
    assert word(HOLDS, invalid="too short") == word(HOLDS, OPEN, invalid="too short") == "undecided"
    assert word(Comparison("one pair", difference([1.0]), above(0.0))) == "undecided"
    assert word(Comparison("nothing", None, above(0.0))) == "undecided"
    assert word(Comparison("equal", difference([1.0, 1.0]), above(0.0))) == "reproduced"


def test_refuted_needs_the_baseline_or_the_paper_s_setting():
    assert word(AGAINST) == word(AGAINST, HOLDS) == word(AGAINST, invalid="too short") == "refuted"
    missed = decide(SETTING, BEST, [AGAINST], SETTING.methods, missed=["softmax answers 47.3%"])
    assert missed.word == "not seen at this size"
    assert missed.why == "T = 64, 500 steps, 3 seeds; softmax answers 47.3%"
    printed = Setting(**{**vars(SETTING), "as_printed": True})
    assert word(AGAINST, setting=printed, missed=["smaller than the paper's"]) == "refuted"
    assert word(Comparison("never against", AGAINST.found, above(0.0), ANY)) == "undecided"


def test_one_interval_of_four_beside_zero_decides_nothing():
    """As in `language`, `cpu`: +0.018 [+0.0005, +0.036] at the last octave of one family."""
    against = Comparison("gdn, last octave", flipped(shifted(0.047)), above(0.0))
    assert word(against) == "refuted" and word(against, OPEN, OPEN, OPEN) == "undecided"


def test_rates():
    one_seed = {key: {**row, "chosen_on": 1} for key, row in BEST.items()}
    assert word(HOLDS, best=one_seed) == word(HOLDS, OPEN, best=one_seed) == "undecided"
    assert word(AGAINST, best=one_seed) == "not seen at this size"
    at_end = {key: {**row, "edge": key[0] == "ours"} for key, row in BEST.items()}
    for comparison in (HOLDS, AGAINST):
        verdict = decide(SETTING, at_end, [comparison], SETTING.methods)
        assert verdict.word == "undecided" and verdict.why == "the best rate of ours 16 lies at an end of the grid"
        assert decide(SETTING, at_end, [comparison], ["theirs"]).word != "undecided"


def test_ranges():
    """Within ±0.5; against the claim only beyond ±1."""
    near, between, far = (difference([m - 0.01, m, m + 0.01]) for m in (0.2, 0.7, -1.5))
    kinds = [Comparison("a", found, (-0.5, 0.5), (-1.0, 1.0)) for found in (near, between, far)]
    assert [outcome.state for outcome in correct(kinds)] == ["holds", "open", "contradicts"]
    assert word(Comparison("a", near, below(0.1), below(0.3))) == "undecided"


def test_settings_are_combined_and_counted():
    assert combine(["undecided: GPU time", "reproduced", "undecided"]) == "reproduced"
    assert combine(["undecided: GPU time"]) == combine([]) == "undecided"
    assert combine(["reproduced", "not seen at this size"]) == combine(["in part", "refuted"]) == "in part"
    assert combine(["refuted", "not seen at this size"]) == "refuted"
    assert combine(["in part", "reproduced", "undecided"]) == "in part"
    assert count(["refuted", "undecided", "undecided"]) == (
        "reproduced 0, in part 0, refuted 1, not seen at this size 0, undecided 2"
    )


def test_rows_of_the_repository():
    """No verdict of the repository is stronger than its rows: none refutes at a size that cannot."""
    found = {}
    for experiment in page.EXPERIMENTS:
        rows = load_rows(experiment, [])
        for setting in experiment.settings:
            if is_complete(rows, setting):
                found[experiment.name, setting.name] = experiment.judge(rows, setting).word
    assert set(found.values()) <= set(WORDS) and len(found) >= 16
    assert found["two_orders", "cpu"] == "reproduced"
    assert found["language", "cpu"] == "undecided" and found["characters", "cpu"] == "not seen at this size"
