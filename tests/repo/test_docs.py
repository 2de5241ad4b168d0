"""Tests of the documentation: the ```bash and ```python blocks of every page run in order, in a folder per page.

A python block whose first line is `# NAME.py` is a file: it is saved in that folder instead. In that folder `SRC` is
the first layers, heads and columns of the embedded checkpoint, `DATA` is the miniature mirror of data sets, and calibration.txt and
heldout.txt are the first characters of the embedded texts. Pages in NEED_OUT also find a converted checkpoint, `OUT`.
Blocks marked
```console are not run; the pages of docs/measurements/ contain no others.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from helpers import picture
from helpers.embedded_part import EMBEDDED, TEXTS, save_part
from helpers.quick_python import QuickPython

from surgery.conversion.convert import convert
from surgery.planning.recipe import ConversionRecipe, Rule, load_recipe
from surgery.structures import STRUCTURES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MEASUREMENTS = DOCS / "measurements"  # results, whose commands take hours
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TAUGHT = [page for page in PAGES if page.parent != MEASUREMENTS]
NEED_OUT = {
    "heal.md",
    "publish.md",
    "serving.md",
    "benchmarks.md",
    "checkpoint.md",
    "compare.md",
    "evaluate.md",
    "finetune.md",
    "push.md",
    "report.md",
    "serve.md",
    "speculation.md",
}
# The commands of these pages take 90 s of CPU time together: `make test-all` runs them.
LONG = {"attention.md", "benchmarks.md", "compare.md", "performance.md", "pretrain.md", "search.md", "speculation.md"}
LONG |= {"api.md", "bench.md", "convert.md", "evaluate.md", "extend.md", "finetune.md", "quality.md", "run.md"}
LONG |= {"stock.md", "structures.md", "tutorial.md", "upgrade.md"}
LONG |= {"data.md", "key_cache.md", "linear_time.md", "recipes.md", "report.md"}
# Enough to run every command, in little time: sizes of the checkpoint, tokens that it reads, and of each text over two
# windows of them.
LAYERS, POSITIONS, CHARACTERS = 4, 640, 6_500
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def without_tuning(text: str) -> str:
    """A block whose calibrated `surgery convert` commands have `--set tune=false`, unless they set tune: 20 epochs take
    minutes.
    """

    def untuned(command: re.Match[str]) -> str:
        is_short = "tune" in command[0] or "--calibration" not in command[0]
        return command[0] if is_short else f"{command[0].rstrip()} --set tune=false"

    return re.sub(r"^surgery convert (?:[^\n\\]|\\\n)*", untuned, text, flags=re.M)


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    return save_part(tmp_path_factory.mktemp("docs") / "SRC", LAYERS, max_position_embeddings=POSITIONS)


@pytest.fixture(scope="session")
def converted(source):
    quick = [
        f"calibration={EMBEDDED / 'calibration.txt'}",
        "tokens=1024",
        "length=128",
        "allocate=uniform",
        "tune=false",
    ]
    convert(str(source), load_recipe("low-rank-half", [*quick, "curvature=none"]), source.parent / "OUT")
    return source.parent / "OUT"


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    python = QuickPython(tmp_path_factory.mktemp("quick"), ENVIRONMENT)
    yield python
    python.close()


@pytest.fixture
def desk(tmp_path, source, quick):
    """Where a page's commands run, and their environment; `surgery` and `python` are this checkout's."""
    (tmp_path / "desk").mkdir()
    (tmp_path / "desk" / "SRC").symlink_to(source)
    (tmp_path / "desk" / "DATA").symlink_to(ROOT / "eval" / "mirror")
    for text in TEXTS:
        (tmp_path / "desk" / text).write_text((EMBEDDED / text).read_text(encoding="utf-8")[:CHARACTERS])
    commands = tmp_path / "bin"
    commands.mkdir()
    quick.write(commands / "surgery", "-m surgery")
    quick.write(commands / "python")
    path = os.pathsep.join([str(commands), os.environ.get("PATH", "")])
    return tmp_path / "desk", {**ENVIRONMENT, "PATH": path}


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.name, marks=[pytest.mark.slow] * (p.name in LONG)) for p in TAUGHT]
)
def test_commands_run(page, desk, request):
    place, environment = desk
    if page.name in NEED_OUT:
        (place / "OUT").symlink_to(request.getfixturevalue("converted"))
    shells = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": ["python", "-c"]}
    runnable = [(language, text) for language, text in blocks(page) if language in shells]
    assert runnable, f"{page.name} has no command that a test runs"
    for language, text in runnable:
        if language == "python" and (file := re.match(r"# (\w+\.py)\n", text)):
            (place / file[1]).write_text(text, encoding="utf-8")
            continue
        done = subprocess.run(
            [*shells[language], without_tuning(text)], cwd=place, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{page.name}:\n{text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_blocks_are_of_a_known_kind(page):
    assert {language for language, _ in blocks(page)} <= {"bash", "python", "console", "text", "yaml"}
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks(page))


def links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for link in links(page):
        target = (page.parent / link.partition("#")[0]).resolve()
        assert target.exists(), f"{page.name} points at {link}"


def test_the_readme_leads_to_every_page():
    assert {page.relative_to(ROOT).as_posix() for page in PAGES[1:]} <= set(links(ROOT / "README.md"))


def test_the_site_has_every_page_once():
    """mkdocs.yml; `mkdocs build --strict` itself needs an extra that is not installed here."""
    listed = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    groups = [[entry] if isinstance(entry, str) else next(iter(entry.values())) for entry in listed]
    assert sorted(page for group in groups for page in group) == sorted(
        page.relative_to(DOCS).as_posix() for page in PAGES[1:]
    ), "every page of docs/ is in mkdocs.yml's nav, once"


def test_pages_stay_within_the_site():
    for page in PAGES[1:]:
        out = [link for link in links(page) if not (page.parent / link).resolve().is_relative_to(DOCS)]
        assert not out, f"{page.name}: {out} work on GitHub, not on the site; name the file instead"


def test_the_tree_names_every_package():
    (tree,) = (text for language, text in blocks(ROOT / "CONTRIBUTING.md") if language == "text")
    named = set(re.findall(r"^ *(\w+)/ ", tree, re.M))
    there = {path.parent.name for path in (ROOT / "surgery").glob("*/__init__.py")}
    assert named == there | {"surgery", "kernels", "eval", "recipes", "tests"} and len(tree.splitlines()) <= 30


def rows(page: str) -> set[str]:
    """First cells of a page's tables."""
    return set(re.findall(r"^\| `(\w+)`", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M))


def test_every_key_and_every_structure_is_explained():
    assert rows("recipes.md") == set(ConversionRecipe.model_fields)
    text = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in text for key in Rule.model_fields)
    assert rows("structures.md") == set(STRUCTURES.names())


def test_defaults_are_as_documented():
    text = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    for key, field in ConversionRecipe.model_fields.items():
        if isinstance(field.default, (int, float, str)) and key not in ("description", "aim", "cost"):
            cell = re.search(rf"^\| `{key}` \| (.*?) \|", text, re.M)
            assert cell and cell.group(1).strip('`"') == str(field.default), key


def test_the_picture_is_what_its_script_draws():
    for theme in picture.COLORS:
        drawn = (DOCS / "img" / f"surgery-{theme}.svg").read_text(encoding="utf-8")
        assert drawn == picture.draw(theme), "run python tests/helpers/picture.py"
