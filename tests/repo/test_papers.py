"""docs/papers.md: the listed files exist and name their papers; every equation, figure and table has a row."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest

from recipes.papers.experiments import figures
from recipes.papers.quality import mlr_partitions
from recipes.papers.script import run_script
from recipes.papers.training import values  # noqa: F401  registers the stages of its command
from surgery.training.pretrain.recipe import load_pretrain_recipe

ROOT = Path(__file__).resolve().parents[2]


def test_each_file_names_its_paper():
    author, missing, rows = "", [], 0
    for line in (ROOT / "docs/papers.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 3 or cells[0] in ("paper", "---"):
            continue
        rows += 1
        author = author if cells[0].startswith("the same") else re.split(r" et al\.| and | \d{4}", cells[0])[0]
        for file in re.findall(r"`([^`]+)`", cells[2]):
            path = ROOT / file
            if not path.is_file() or author not in path.read_text(encoding="utf-8"):
                missing.append(f"{file} does not name {author}")
    assert rows > 30 and not missing


def equation_rows():
    """Return (author, cells) of each row of the table of equations."""
    author, found = "", []
    text = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
    for line in text.split("## Equations of the five papers")[1].split("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[0] not in ("paper", "---"):
            author = author if cells[0] == "the same" else cells[0].split()[0]
            found.append((author, cells[1:]))
    return found


def has_test(name):
    path, _, function = name.partition("::")
    file = ROOT / path
    return file.is_file() and (not function or f"def {function}(" in file.read_text(encoding="utf-8"))


# Numbered equations of each paper.
NUMBERED = {"Kuang": (1, 40), "Qiu": (1, 18), "Guo": (1, 5), "FARS": (1, 6), "Dao": (9, 15)}


def test_each_equation_has_a_file_and_a_test():
    numbers = {author: set() for author in NUMBERED}
    for author, (equations, files, tests) in equation_rows():
        listed = re.findall(r"`([^`]+)`", files)
        assert listed and all((ROOT / file).is_file() for file in listed), (author, equations)
        named = re.findall(r"`([^`]+)`", tests)
        assert named and all(has_test(name) for name in named), (equations, named)
        for part in equations.partition(":")[0].split(", "):
            if found := re.fullmatch(r"(\d+)(?: to (\d+))?", part):
                numbers[author] |= set(range(int(found[1]), int(found[2] or found[1]) + 1))
    for author, (first, last) in NUMBERED.items():
        assert numbers[author] == set(range(first, last + 1)), author


# Figures and tables of each paper.
PRINTED = {"Customizing": (15, 3), "Compute Better Spent": (12, 2), "Log-Linear Attention": (10, 8), "Toeplitz Block Mixing": (3, 3)}  # fmt: skip


def test_each_figure_and_table_has_a_row():
    for paper, (last_figure, last_table) in PRINTED.items():
        found = [name for place in figures.PLACES[paper] for name in figures.places_in(place.name)]
        printed = [f"Figure {n}" for n in range(1, last_figure + 1)] + [f"Table {n}" for n in range(1, last_table + 1)]
        assert sorted(found) == sorted(printed), paper
    for places in figures.PLACES.values():
        for place in places:
            assert all(has_test(name) for name in re.findall(r"`(tests/[^`]+)`", place.how)), place.how
    assert figures.places_in("Log-Linear Attention, Table 2, Figure 9") == {"Table 2", "Figure 9"}
    assert figures.places_in("Figures 1b, 1c, 4 to 6") == {f"Figure {n}" for n in (1, 4, 5, 6)}


def test_commands_of_larger_runs_have_valid_recipes():
    shown = [place.how.strip("`") for places in figures.PLACES.values() for place in places]
    commands = [text for text in [*shown, *(cost.command for cost in figures.OUT_OF_REACH)] if "pretrain" in text]
    for command in commands:
        first = command.split(" && ")[0].replace("python -m recipes.papers.training.pretrain", "surgery pretrain")
        words = shlex.split(first)
        overrides = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
        assert words[:3] == ["surgery", "pretrain", "--recipe"] and "--out" in words
        load_pretrain_recipe(words[3], overrides)
    assert len(commands) > 6


def test_hours_are_counted_from_parameters_and_tokens():
    cost = figures.Cost("", "", "", parameters=1e9, tokens=1e9)
    assert cost.hours() == pytest.approx(6e18 / (0.4 * 990e12) / 3600)


# -- how the programs end ----------------------------------------------------------------------------
def test_every_program_ends_by_run_script():
    ends = {}
    for path in sorted((ROOT / "recipes" / "papers").rglob("*.py")):
        if 'if __name__ == "__main__":' in (text := path.read_text(encoding="utf-8")):
            ends[path.name] = text.rpartition('if __name__ == "__main__":')[2].strip()
    assert len(ends) > 45 and not {name: end for name, end in ends.items() if not end.startswith("run_script(")}


def lacks_weights(folder):
    """Measure a checkpoint that is a config alone."""
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (folder / "text.txt").write_text("a text")
    with mock.patch.object(sys, "argv", ["program", str(folder), "--calibration", str(folder / "text.txt")]):
        mlr_partitions.main()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda folder: (folder / "nowhere").read_text(), "cannot open .*nowhere: No such file or directory"),
        (lambda folder: folder.read_text(), "cannot open .*: Is a directory"),
        (lacks_weights, "safetensors"),
    ],
)
def test_what_a_user_can_correct_is_one_line_and_exit_code_2(wrong, says, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_script(lambda: wrong(tmp_path))
    said = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2 and re.search(says, said[-1]) and "Traceback" not in "\n".join(said)


def test_other_errors_stay_and_codes_are_those_of_the_program():
    with pytest.raises(OSError, match="No space left"):
        run_script(lambda: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(SystemExit) as stopped:
        run_script(lambda: 1)
    assert stopped.value.code == 1 and run_script(lambda: None) is None
