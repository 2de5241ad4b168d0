"""Error curves corrected by probes (recipes/papers/quality/curve_probes.py), over all structures: they never rise, meet
the fits at the probes, and closed forms keep theirs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from conversion.test_estimate import INFO
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from structures.test_structures import DIMS, NAMES, moments, resolve_config

from recipes.papers.quality import curve_probes
from recipes.papers.quality.curve_probes import Probe, correct_curve, fit_error, probe_curve, probed_points
from surgery.conversion.fisher import cost_points
from surgery.planning.allocate import CostPoint
from surgery.planning.targets import LinearTarget
from surgery.structures import STRUCTURES

LAWS = settings(max_examples=8, deadline=None)
POINTS = st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=20).map(
    lambda errors: [CostPoint(10 * (i + 1), error) for i, error in enumerate(sorted(errors, reverse=True))]
)


def make_target(name, dims, keep):
    return LinearTarget(replace(INFO, out=dims[0], in_=dims[1]), dims[0], keep, (STRUCTURES.config_type(name)(),))


@pytest.mark.parametrize("name", NAMES)
@LAWS
@given(dims=DIMS, keep=st.sampled_from([0.3, 0.5, 0.8]), seed=st.integers(0, 99), probes=st.sampled_from([2, 3]))
def test_a_corrected_curve_meets_the_fits_at_the_probes(name, dims, keep, seed, probes):
    assume(resolve_config(name, *dims) is not None)
    target, (weight, metric) = make_target(name, dims, keep), moments(*dims, seed)
    cls, config = STRUCTURES[target.configs[0]], target.configs[0]
    curve = cls.rank_error_curve(weight, cls.resolve(config, *dims), metric)
    measured = probe_curve(target, curve, weight, metric, 1, probes)
    points = [CostPoint(cls.params(step, *dims), error) for step, error in curve]
    found = correct_curve(points, measured)
    if not measured:
        assert found == points
        return
    assert all(b.error <= a.error for a, b in itertools.pairwise(found))
    configs, least = {cls.params(step, *dims): step for step, _ in curve}, math.inf
    for probe in measured:
        error = fit_error(configs[probe.params], weight, metric, 1)
        least = min(least, error)
        assert dict(found)[probe.params] == pytest.approx(least, rel=1e-5, abs=1e-5 * dict(points)[probe.params])


@pytest.mark.parametrize("name", ["low_rank", "pivoted_low_rank"])
def test_closed_forms_are_not_probed(name, monkeypatch):
    monkeypatch.setattr(curve_probes, "fit_error", lambda *_: pytest.fail("a closed form was fitted"))
    weight, metric = moments(48, 64, 0)
    target = make_target(name, (48, 64), 0.5)
    assert probed_points(target, weight, metric, 1, 2) == cost_points(target, weight, metric)


def test_sweeps_lower_the_curve_of_correlated_inputs():
    weight, metric = moments(64, 64, 1)
    target = make_target("btt", (64, 64), 0.5)
    plain, probed = cost_points(target, weight, metric), probed_points(target, weight, metric, 1, 2)
    assert [p.params for p in probed] == [p.params for p in plain] and probed[0] == plain[0] == (64 * 64, 0.0)
    assert all(after.error < before.error for before, after in zip(plain[1:], probed[1:]))


@settings(max_examples=200, deadline=None)
@given(points=POINTS, ratios=st.lists(st.floats(-8, 2), min_size=1, max_size=3), data=st.data())
def test_corrected_errors_never_rise(points, ratios, data):
    assume(len(ratios) <= len(points))
    places = data.draw(st.permutations(range(len(points))))[: len(ratios)]
    probes = [Probe(points[place].params, ratio) for place, ratio in zip(sorted(places), ratios)]
    found, least = correct_curve(points, probes), math.inf
    assert all(b.error <= a.error for a, b in itertools.pairwise(found))
    for probe in probes:
        least = min(least, dict(points)[probe.params] * math.exp(probe.ratio))
        assert dict(found)[probe.params] == pytest.approx(least)
    assert [p.params for p in found] == [p.params for p in points] and correct_curve(points, []) is points
