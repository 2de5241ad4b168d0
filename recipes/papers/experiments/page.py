"""The table of experiments in docs/papers.md: experiment, command and verdict, computed from the rows of the repository.

python -m surgery.recipes.papers.experiments.page            print the section
python -m surgery.recipes.papers.experiments.page --write docs/papers.md
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from surgery.core.errors import SurgeryError
from surgery.recipes.papers.experiments import (
    block_mixing,
    characters,
    language,
    needles,
    recall,
    regression,
    scaling,
    updates,
    weight_norm,
)
from surgery.recipes.papers.experiments.driver import MEMORY, Experiment, load_rows, markdown
from surgery.recipes.papers.experiments.sweep import gpu_minutes, is_complete, stack_size

BEGIN, END = "<!-- experiments -->", "<!-- /experiments -->"
EXPERIMENTS = (
    recall.EXPERIMENT,
    block_mixing.EXPERIMENT,
    regression.EXPERIMENT,
    scaling.EXPERIMENT,
    updates.EXPERIMENT,
    weight_norm.EXPERIMENT,
    characters.EXPERIMENT,
    language.EXPERIMENT,
    needles.EXPERIMENT,
)
OUT_OF_REACH = (  # what no hour of one GPU shows: source, what it needs
    ("Compute Better Spent, Figure 8 (ViT on ImageNet)", "ImageNet, which is not included"),
    ("Log-Linear Attention, Tables 3 to 6 (800M models, LongBench, SWDE, NQ)", "pretraining on 50B tokens"),
)


def section() -> str:
    """Return the section in Markdown."""
    lines = [["experiment", "source", "command", "verdict"]]
    tables = []
    for experiment in EXPERIMENTS:
        rows = load_rows(experiment, [])
        for setting in experiment.settings:
            verdict = experiment.judge(rows, setting)
            command = f"`{experiment.command} run --setting {setting.name}`"
            lines.append(
                [f"{experiment.title}, `{setting.name}`", experiment.source, command, _words(verdict.word, verdict.why)]
            )
            if is_complete(rows, setting):
                tables.append(f"`{experiment.name}`, setting `{setting.name}` ({_size(experiment, setting.name)}):")
                tables.append(markdown(experiment.table(rows, setting)))
    lines += [[source, source.split(",")[0], "none", f"out of reach ({why})"] for source, why in OUT_OF_REACH]
    rules = [f"- {e.title}: {e.rule}" for e in EXPERIMENTS]
    return "\n\n".join(["Rules of the verdicts:", "\n".join(rules), markdown(lines), *tables])


def _words(word: str, why: str) -> str:
    return f"{word} ({why})".replace("|", "\\|")


def _size(experiment: Experiment, name: str) -> str:
    setting = experiment.setting(name)
    counted = f"{setting.steps:,} steps of {setting.rows} rows of {setting.length} tokens, {setting.seeds} seeds"
    if setting.where == "cpu":
        return counted
    minutes = gpu_minutes(setting, experiment.heads, stack_size(setting, experiment.heads, MEMORY["gpu"]))
    return f"{counted}, forecast {math.ceil(minutes)} GPU minutes"


def replace_section(text: str) -> str:
    """Return the page with the section between its markers. Raises SurgeryError if the page has no markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SurgeryError(
            f"the page must contain {BEGIN} and {END} once each, in this order. Add them where the table belongs."
        )
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{section()}\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Print the section, or write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="Replace the section of this page.")
    given = parser.parse_args()
    if given.write is None:
        print(section())
    else:
        given.write.write_text(replace_section(given.write.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
