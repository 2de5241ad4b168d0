"""Commands of the docs that no test runs (```console blocks and code within sentences) name commands, options and
recipes that exist.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from surgery.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GROUP: Any = typer.main.get_command(app)
FOLDERS = {
    "finetune": ("healing",),
    "pretrain": ("pretrain",),
    "teacher-cache": ("healing",),
}  # of recipes; others: convert


def quoted_commands(text: str) -> list[str]:
    """Return every command in a page's console blocks and inline code that begins with `surgery`, without comments, one
    line each.
    """
    blocks = re.findall(r"^```console\n(.*?)^```$", text, re.M | re.S)
    lines = [line for block in blocks for line in re.sub(r"\\\n", " ", block).splitlines()]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    lines += re.findall(r"`(surgery [a-z-]+ [^`\n]*)`", prose)
    parts = [part for line in lines for part in re.sub(r"\s#.*", "", line).split(" && ")]
    found = (re.search(r"(?:^|[ /])surgery ([a-z].*)", part) for part in parts)
    return [match.group(1) for match in found if match]


def problems(command: str) -> list[str]:
    """Return what is wrong with a command of the docs: an unknown name, unknown options, an unknown recipe."""
    name, *words = command.partition(" -- ")[0].split()  # the options behind -- are those of another program
    if name not in GROUP.commands:
        return [f"there is no command {name}"]
    params = GROUP.commands[name].params
    known = {"--help"} | {option for p in params for option in (*p.opts, *p.secondary_opts)}
    given = [word.partition("=")[0].rstrip(".,;") for word in words if re.match(r"--?[a-z]", word)]
    wrong = [f"{name} has no option {option}" for option in given if option not in known]
    recipe = dict(pairwise(words)).get("--recipe", "").rstrip(".,;")
    folders = FOLDERS.get(name, ("convert",))
    if re.fullmatch(r"[a-z][a-z0-9-]+", recipe) and not any(
        (ROOT / "recipes" / f / f"{recipe}.yaml").is_file() for f in folders
    ):
        wrong.append(f"{name} has no recipe {recipe}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_quoted_commands_exist(page):
    found = {command: problems(command) for command in quoted_commands(page.read_text(encoding="utf-8"))}
    assert not {command: wrong for command, wrong in found.items() if wrong}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("```console\nsurgery convert SRC --recipe btt-half --out OUT   # --wrong\n```\n", 0),
        ("```console\nsurgery convert SRC \\\n  --server x\n```\n", 1),
        ("Run `surgery finetune OUT --recipe btt-half`.", 1),
        ("Run `surgery convrt SRC --out OUT`.", 1),
    ],
)
def test_the_check_finds_what_does_not_exist(text, wrong):
    (command,) = quoted_commands(text)
    assert len(problems(command)) == wrong
