"""The generated sections of docs/papers.md and docs/measurements/papers.md, computed from the rows of the repository:
results with their verdicts and how many there are of each, what is not run to the end, all other figures and tables of
the five papers, and what is out of reach.

python -m recipes.papers.experiments.page            print the sections
python -m recipes.papers.experiments.page --write docs/papers.md docs/measurements/papers.md
"""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from recipes.papers.experiments import (
    block_mixing,
    characters,
    cores,
    forecasting,
    language,
    needles,
    rate_transfer,
    recall,
    regression,
    scaling,
    series_tokens,
    speed,
    structured_head,
    tuned_rates,
    two_orders,
    updates,
    vision,
    weight_norm,
)
from recipes.papers.experiments.driver import COUNTED, GPU_TIME, MEMORY, Experiment, load_rows, markdown
from recipes.papers.experiments.figures import FAR, HOLDS, PLACES, costs_section, figures_section, other_places
from recipes.papers.experiments.sweep import Setting, gpu_minutes, is_complete, stack_size
from recipes.papers.experiments.verdicts import OPEN, combine, count
from recipes.papers.script import run_script
from surgery.core.errors import SurgeryError

EXPERIMENTS = (
    recall.EXPERIMENT,
    block_mixing.EXPERIMENT,
    regression.EXPERIMENT,
    scaling.EXPERIMENT,
    cores.EXPERIMENT,
    vision.EXPERIMENT,
    updates.EXPERIMENT,
    tuned_rates.EXPERIMENT,
    weight_norm.EXPERIMENT,
    structured_head.EXPERIMENT,
    rate_transfer.EXPERIMENT,
    characters.EXPERIMENT,
    language.EXPERIMENT,
    needles.EXPERIMENT,
    forecasting.EXPERIMENT,
    series_tokens.EXPERIMENT,
    two_orders.EXPERIMENT,
)


MANY = 5  # differences
WAITING = f"Settings that are not run to the end, of each experiment: how many, and the forecast in minutes{COUNTED}"


class Result(NamedTuple):
    """A line of the table of results. found: differences and the size of the runs. why: of the verdict. module: the
    module of recipes/papers/experiments whose commands print it.
    """

    source: str
    claim: str
    found: str
    word: str
    why: str
    module: str


def results() -> list[Result]:
    """Return the results of all experiments, and of the measured times, by paper."""
    lines = [_result(experiment) for experiment in EXPERIMENTS]
    for claim in speed.claims(speed.read_tables()):
        source, verdict = f"{claim.paper}, {claim.place}", claim.verdict
        lines.append(Result(source, claim.what, verdict.why, verdict.word, "", "speed"))
    papers = list(PLACES)
    return sorted(lines, key=lambda line: papers.index(line.source.split(",")[0]))


def _result(experiment: Experiment) -> Result:
    """Return the line of an experiment: the figures of the largest setting that is run to the end, and the verdicts of
    all that are."""
    rows, found, words, reasons = load_rows(experiment, []), "not run to the end", [], []
    for setting in experiment.settings_of(rows):
        verdict = experiment.judge(rows, setting)
        words.append(verdict.word)
        if is_complete(rows, setting):
            found = f"`{setting.name}`, {_runs(setting)}: {_short(verdict.found, setting)}"
            reasons.append((f"`{setting.name}` {verdict.word}", verdict.why))
    why = "".join(why for _, why in reasons)  # of one setting
    if len(reasons) > 1:
        why = "; ".join([*(word for word, _ in reasons[:-1]), ": ".join(filter(None, reasons[-1]))])
    return Result(experiment.source, experiment.claim, found, combine(words), why, experiment.name)


def _short(found: str, setting: Setting) -> str:
    """Return the differences of a verdict, without the number of pairs where there is one for each seed; of more than
    MANY, the least and the largest.
    """
    parts = found.replace(f", {setting.seeds} pairs", "").split("; ")
    if len(parts) > MANY and all(re.search(r": [+-]\d", part) for part in parts):
        ranked = sorted(parts, key=lambda part: float(part.split(": ")[1].split()[0]))
        return f"{len(parts)} differences, the least and the largest: {ranked[0]}; {ranked[-1]}"
    return "; ".join(parts)


def _runs(setting: Setting) -> str:
    """Return the size of the runs in words. One step: nothing is trained."""
    tokens = setting.steps * setting.rows * setting.length
    trained = f" of {tokens:,} tokens" if setting.steps > 1 else ""
    return f"{setting.seeds} seeds{trained}"


def results_section() -> str:
    """Return the number of results of each verdict, and the table of all, in Markdown."""
    lines = [["result", "what the paper says", "what was found", "verdict", "module"]]
    for result in results():
        why = re.sub(f"(?:; |: )?{OPEN}", "", result.why)
        verdict = f"{result.word} ({why})" if why else result.word
        cells = (result.source, result.claim, result.found, verdict, f"`{result.module}`")
        lines.append([cell.replace("|", "\\|") for cell in cells])
    return f"{counts()}\n\n{markdown(lines)}"


def counts() -> str:
    """Return how many results have each verdict, in words."""
    words = [result.word for result in results()]
    others = [place.verdict for _, place in other_places(EXPERIMENTS)]
    hold, far = (sum(verdict.startswith(word) for verdict in others) for word in (HOLDS, FAR))
    return (
        f"Of {len(words)} results: {count(words)}. Of the other figures and tables {hold} hold by tests or a "
        f"measurement, and {far} are out of reach."
    )


def rows_section() -> str:
    """Return how many settings of each experiment are not run to the end, and their forecast. `show` prints the rest."""
    waiting = []
    for experiment in EXPERIMENTS:
        rows, left = load_rows(experiment, []), []
        for setting in experiment.settings_of(rows):
            if not is_complete(rows, setting):
                is_forecast = experiment.judge(rows, setting).word == GPU_TIME
                left.append(_minutes(experiment, setting) if is_forecast else 0)
        if left:
            waiting.append(f"`{experiment.name}` {len(left)}, {sum(left)}")
    return f"{WAITING}: {'; '.join(waiting)}."


def _minutes(experiment: Experiment, setting: Setting) -> int:
    return math.ceil(gpu_minutes(setting, experiment.heads, stack_size(setting, experiment.heads, MEMORY["gpu"])))


def sections() -> dict[str, str]:
    """Return marker -> section in Markdown, with its prose at 120 columns."""
    contents = {
        "results": results_section(),
        "figures": figures_section(EXPERIMENTS),
        "costs": costs_section(),
        "rows": rows_section(),
        "speed": speed.section(),
    }
    return {name: "\n".join(map(_wrapped, content.split("\n"))) for name, content in contents.items()}


def _wrapped(line: str) -> str:
    """Return a line of Markdown at 120 columns. Rows of tables stay as they are."""
    if line.startswith("|"):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def replace_sections(text: str) -> str:
    """Return the page with the sections whose markers it has. Raises SurgeryError if it has none, or half a pair."""
    found = 0
    for name, content in sections().items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if begin not in text and end not in text:
            continue
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise SurgeryError(
                f"the page must contain {begin} and {end} once each, in this order. Add them where the table belongs."
            )
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"
        found += 1
    if not found:
        raise SurgeryError(f"the page has no markers of {', '.join(sections())}. Add <!-- NAME --> and <!-- /NAME -->.")
    return text


def main() -> None:
    """Print the sections, or write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, nargs="+", help="Replace the sections of these pages.")
    given = parser.parse_args()
    if given.write is None:
        print("\n\n".join(sections().values()))
    for path in given.write or ():
        path.write_text(replace_sections(path.read_text(encoding="utf-8")), encoding="utf-8")
    if given.write:
        print(counts())


if __name__ == "__main__":
    run_script(main)
