"""The generated sections of docs/papers.md: experiments with their verdicts, computed from the rows of the repository,
all figures and tables of the five papers, and what is out of reach.

python -m recipes.papers.experiments.page            print the sections
python -m recipes.papers.experiments.page --write docs/papers.md
"""

from __future__ import annotations

import argparse
import math
import textwrap
from pathlib import Path

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
from recipes.papers.experiments.driver import MEMORY, Experiment, load_rows, markdown
from recipes.papers.experiments.figures import costs_section, figures_section
from recipes.papers.experiments.sweep import gpu_minutes, is_complete, stack_size
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


def section() -> str:
    """Return the section in Markdown."""
    lines = [["experiment", "source", "command", "verdict"]]
    tables = []
    for experiment in EXPERIMENTS:
        rows = load_rows(experiment, [])
        for setting in experiment.settings:
            verdict = experiment.judge(rows, setting)
            command = f"`{experiment.run_command(setting)}`"
            lines.append(
                [f"{experiment.title}, `{setting.name}`", experiment.source, command, str(verdict).replace("|", "\\|")]
            )
            if is_complete(rows, setting):
                tables.append(f"`{experiment.name}`, setting `{setting.name}` ({_size(experiment, setting.name)}):")
                tables.append(markdown(experiment.table(rows, setting)))
    rules = [f"- {e.title}: {e.rule}" for e in EXPERIMENTS]
    return "\n\n".join(["Rules of the verdicts:", "\n".join(rules), markdown(lines), *tables])


def _size(experiment: Experiment, name: str) -> str:
    setting = experiment.setting(name)
    counted = f"{setting.steps:,} steps of {setting.rows} rows of {setting.length} tokens, {setting.seeds} seeds"
    if setting.where == "cpu":
        return counted
    minutes = gpu_minutes(setting, experiment.heads, stack_size(setting, experiment.heads, MEMORY["gpu"]))
    return f"{counted}, forecast {math.ceil(minutes)} GPU minutes"


def judge(experiment: Experiment) -> list[tuple[str, str]]:
    """Return (setting, word of the verdict) of each setting, from the rows of the repository."""
    rows = load_rows(experiment, [])
    return [(setting.name, experiment.judge(rows, setting).word) for setting in experiment.settings]


def sections() -> dict[str, str]:
    """Return marker -> section in Markdown, with its prose at 120 columns."""
    contents = {
        "experiments": section(),
        "speed": speed.section(),
        "figures": figures_section(EXPERIMENTS, judge, speed.measured()),
        "costs": costs_section(),
    }
    return {name: "\n".join(map(_wrapped, content.split("\n"))) for name, content in contents.items()}


def _wrapped(line: str) -> str:
    """Return a line of Markdown at 120 columns. Rows of tables stay as they are."""
    if line.startswith("|"):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def replace_section(text: str) -> str:
    """Return the page with each section between its markers. Raises SurgeryError if the page lacks markers."""
    for name, content in sections().items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise SurgeryError(
                f"the page must contain {begin} and {end} once each, in this order. Add them where the table belongs."
            )
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    """Print the sections, or write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="Replace the sections of this page.")
    given = parser.parse_args()
    if given.write is None:
        print("\n\n".join(sections().values()))
    else:
        given.write.write_text(replace_section(given.write.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
