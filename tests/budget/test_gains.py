"""What healing gives back: the fit, its file, and files that are refused."""

from __future__ import annotations

import json
import math

import pytest

from recipes.papers.quality.gains import ROWS, main, rank_correlations
from surgery.budget.gains import FLOOR, Gain, HealedRun, Term, fit_gains, gains_data, interval, read_gains, read_runs
from surgery.core.errors import SurgeryError


def run(family: str, damage: float, healed: float) -> HealedRun:
    return HealedRun(
        family=family,
        model="m",
        conversion="c",
        text="t",
        tokens=1,
        measure="KL",
        damage=damage,
        healed=healed,
        source="s",
    )


def test_a_gain_is_the_geometric_mean():
    gains = fit_gains([run("a", 1.0, 0.25), run("a", 2.0, 2.0), run("b", 0.1, 0.01)])
    assert gains["a"].gain == 0.5 and gains["a"].runs == 2 and gains["b"].gain == pytest.approx(0.1)
    assert all(g.low < g.gain <= g.high <= 1 for g in gains.values())
    # s^2 = 2 ln(2)^2 with one degree of freedom, whose 97.5% quantile is 12.706.
    half = 12.7062 * math.sqrt(2) * math.log(2) * math.sqrt(1.5)
    assert gains["a"].low == pytest.approx(0.5 * math.exp(-half), abs=1e-4)


def test_losses_below_the_original_count_as_the_floor():
    gains = fit_gains([run("a", 0.2, -0.1), run("a", 0.2, FLOOR)])
    assert gains["a"].gain == pytest.approx(FLOOR / 0.2)


def test_the_gains_of_the_package_are_those_of_the_rows(capsys):
    """python -m recipes.papers.quality.gains --write surgery/budget/gains.json"""
    assert read_gains() == fit_gains(read_runs(ROWS))
    main([])
    printed = capsys.readouterr().out
    assert all(f"{family}: gain " in printed for family in read_gains()) and "rank correlation" in printed
    assert all(
        -1 <= value <= 1 for *_, first, second in rank_correlations(read_runs(ROWS)) for value in (first, second)
    )


def test_gains_are_written_and_read(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{run('a', 1.0, x).model_dump_json()}\n" for x in (0.3, 0.4)))
    main([str(rows), "--write", str(tmp_path / "gains.json")])
    assert read_gains(tmp_path / "gains.json") == fit_gains(read_runs(rows))


def test_the_interval_of_a_sum():
    """Choices of a family err alike, those of two families independently."""
    gain = Gain(0.5, 0.3, 0.8, 2)
    assert interval([Term("a", 1.0, 0.0, gain), Term("a", 2.0, 0.0, gain)]) == pytest.approx((0.9, 2.4))
    low, high = interval([Term("a", 1.0, 0.0, gain), Term("b", 1.0, 0.0, gain)])
    assert (low, high) == pytest.approx((1 - 0.2 * math.sqrt(2), 1 + 0.3 * math.sqrt(2)))
    assert interval([Term("c", 0.1, 1.0, Gain())])[0] == 0 and interval([]) == (0, 0)


@pytest.mark.parametrize(
    "text, says",
    [
        ("[]", "must be a mapping of families to gains"),
        ('{"a": {"gain": -1, "low": 0, "high": 1, "runs": 1}}', "a: gain: must be greater than 0"),
        ('{"a": {"gain": 1e999, "low": 0, "high": 1, "runs": 1}}', "gain"),
        ('{"a": {"gain": 1.0}}', "low is missing"),
        ("{", "is not JSON"),
    ],
)
def test_damaged_gains_are_refused(text, says, tmp_path):
    (tmp_path / "gains.json").write_text(text)
    with pytest.raises(SurgeryError, match=says):
        read_gains(tmp_path / "gains.json")


def test_damaged_rows_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"family": "a"}))
    with pytest.raises(SurgeryError, match="line 1: model is missing"):
        read_runs(path)
    with pytest.raises(SurgeryError, match="more healed runs than families"):
        fit_gains([run("a", 1.0, 0.5)])
    assert gains_data({"a": Gain(0.5, 0.1, 0.9, 3)}) == {"a": {"gain": 0.5, "low": 0.1, "high": 0.9, "runs": 3}}
