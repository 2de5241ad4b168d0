"""Fit what healing gives back (surgery/budget/gains.py) to the healed runs of the repository.

python -m recipes.papers.quality.gains [ROWS.jsonl ..]                                      print the gains
python -m recipes.papers.quality.gains [ROWS.jsonl ..] --write surgery/budget/gains.json    write them for `surgery search`

Without files, the runs are those of recipes/papers/quality/rows/healed.jsonl, which cites where each is reported. The
last lines say how well gains order designs that they were not fitted to: each run is predicted from the others, and
ranked among the runs of the same model, by the prediction and by its damage alone (Spearman's correlation
with the loss after healing).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from recipes.papers.script import run_script
from surgery.budget.gains import FLOOR, Gain, HealedRun, fit_gains, gains_data, read_runs
from surgery.core.files import write_json

LEAST_RUNS = 4  # of a model whose ranks are correlated
ROWS = Path(__file__).parent / "rows" / "healed.jsonl"  # results that belong to the repository


def predictions_left_out(runs: Sequence[HealedRun]) -> list[float]:
    """Return the loss of each run that the others predict. A family without another run has the gain 1."""
    predicted = []
    for index, run in enumerate(runs):
        gains = fit_gains([*runs[:index], *runs[index + 1 :]])
        predicted.append(gains.get(run.family, Gain()).gain * run.damage)
    return predicted


def rank_correlations(runs: Sequence[HealedRun]) -> list[tuple[str, int, float, float]]:
    """Return (model, runs, correlation of the prediction, correlation of the damage alone) for each model with at least
    four runs.
    """
    from scipy.stats import spearmanr

    counts = Counter(run.model for run in runs)
    models, rows = [model for model, count in counts.items() if count >= LEAST_RUNS], []
    predicted = predictions_left_out(runs) if models else []
    for model in models:
        mine = [index for index, run in enumerate(runs) if run.model == model]
        healed = [max(runs[index].healed, FLOOR) for index in mine]
        by_gain = float(spearmanr([predicted[index] for index in mine], healed).statistic)
        by_damage = float(spearmanr([runs[index].damage for index in mine], healed).statistic)
        rows.append((model, len(mine), by_gain, by_damage))
    return rows


def report(runs: Sequence[HealedRun]) -> str:
    """Return the gains and the rank correlations in lines."""
    gains = fit_gains(runs)
    lines = [f"{family}: gain {g.gain:.3f} [{g.low:.3f}, {g.high:.3f}], {g.runs} runs" for family, g in gains.items()]
    for model, count, by_gain, by_damage in rank_correlations(runs):
        lines.append(
            f"{model}, {count} runs, rank correlation: {by_gain:.2f} predicted, {by_damage:.2f} by damage alone"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=Path, default=[ROWS], help="files of healed runs")
    parser.add_argument("--write", type=Path, help="write the gains to this JSON file")
    asked = parser.parse_args(argv)
    runs = [run for path in asked.rows for run in read_runs(path)]
    print(report(runs))
    if asked.write is not None:
        write_json(asked.write, gains_data(fit_gains(runs)))


if __name__ == "__main__":
    run_script(main)
