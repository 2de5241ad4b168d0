"""Files, modules and names cited in docstrings, comments, messages and pages exist.

A path is relative to the root, to the folder of the citing file, or to a folder above that. A name without a folder is
that of any file of the repository. The last part of a module's name may be a function, a class or a constant of the
module.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("surgery", "kernels", "eval", "recipes", "tests")
BESIDE = ("kernels", "eval", "recipes")  # folders of the checkout that are imported as surgery.kernels and so on
PATH = re.compile(r"(?<![\w/.:<>~-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|yaml))\b")
NAME = re.compile(r"`(\w*_\w+)`")
MODULE = re.compile(r"(?<![\w./-])(surgery(?:\.\w+)+|recipes\.papers(?:\.\w+)+)")
ELSEWHERE = {
    "metrics.py",  # in LongBench's repository
    "zoology/data/multiquery_ar.py",  # in Zoology's
    "DIR/org/name/README.md",  # files that a command of the text writes
    "DIR/table.md",
    "DEMO/report.md",
    "surgery-demo/report.md",
    "BITS/bits-1.yaml",
    "BITS/recipe-1.yaml",
    "SEARCH/recipe-1.yaml",
    "bits-1.yaml",
    "recipe-1.yaml",
    *("recipe-2.yaml", "recipe-5.yaml", "recipe-7.yaml"),
    "FILE.py",  # examples of names
    "NAME.py",
    "r.yaml",
    "torch.py",
    "aft.py",
    "aft.yaml",
    "grouped.yaml",
    "grouped_rows.py",
    "mine.py",
    "depth.yaml",
    "stock.yaml",
    "moe.yaml",
    "heal.yaml",
    "mine.yaml",
    "mohawk.yaml",
    "surgery/kernels/README.md",  # where it is installed
    "surgery.plugins",  # a group of entry points
}


def python_files() -> list[Path]:
    found = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return [path for path in found if path != Path(__file__)]


def pages() -> list[Path]:
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile")]
    found = [path for folder in ("docs", *PACKAGES) for path in (ROOT / folder).rglob("*.md")]
    recipes = (ROOT / "recipes").rglob("*.yaml")
    return [path for path in (*top, *sorted(found), *sorted(recipes)) if "mirror" not in path.parts]


@cache
def read_code(path: Path) -> tuple[str, set[str]]:
    """Return the prose of a Python file and the identifiers in it.

    Prose: docstrings, comments (all that follows a #, in strings too), and strings that name a file of the docs, of the
    recipes or of the package. Identifiers: names, and the words of strings of one line.
    """
    source = path.read_text(encoding="utf-8")
    parts, names = re.findall("#.*", source), {path.stem}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and "\n" not in node.value:
                parts += [n for n in PATH.findall(node.value) if n.startswith(("docs/", "recipes/", "surgery/"))]
                names.update(re.findall(r"\w+", node.value))
            continue
        for field in ("name", "id", "attr", "arg", "asname"):
            if isinstance(value := getattr(node, field, 0), str):
                names.add(value)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            parts.append(ast.get_docstring(node, clean=False) or "")
    return "\n".join(parts), names


def prose(path: Path) -> str:
    """Return the text of a page, or the prose of a Python file."""
    return read_code(path)[0] if path.suffix == ".py" else path.read_text(encoding="utf-8")


@cache
def file_names() -> set[str]:
    below = (path for folder in ("docs", *PACKAGES) for path in (ROOT / folder).rglob("*.*"))
    return {path.name for path in (*ROOT.glob("*.*"), *below)}


def has_file(name: str, citing: Path) -> bool:
    if "/" not in name:
        return name in file_names()
    return any((folder / name).is_file() for folder in (citing.parent, *citing.parents) if folder.is_relative_to(ROOT))


@cache
def global_names(file: Path) -> set[str]:
    """Names that a module defines or imports at its top level, and strings there, from which names may be made."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found


def has_module(name: str) -> bool:
    """Whether `name` is a package, a module, or something that a module has."""
    if name.startswith("surgery.recipes.papers"):  # it is called recipes.papers, in a checkout alone
        return False
    parts = name.split(".")
    place = {"recipes": ROOT / "recipes", "surgery": ROOT if parts[1] in BESIDE else ROOT / "surgery"}[parts[0]]
    for i, part in enumerate(parts[1:], 1):
        if (place / part).is_dir():
            place = place / part
            continue
        file = place / f"{part}.py"
        if file.is_file():
            return i + 1 == len(parts) or parts[i + 1] in global_names(file)
        start = place / "__init__.py"
        return start.is_file() and part in global_names(start)
    return True


def stale(path: Path, text: str) -> list[str]:
    files = [name for name in PATH.findall(text) if not has_file(name, path)]
    modules = [name for name in MODULE.findall(text) if not has_module(name)]
    return sorted({name for name in (*files, *modules) if name not in ELSEWHERE})


def test_cited_names_exist():
    """A name with an underscore in backticks is an identifier, or a word of a one-line string, anywhere in the code."""
    known = set().union(*(read_code(path)[1] for path in python_files()))
    cited = {path.relative_to(ROOT).as_posix(): set(NAME.findall(prose(path))) for path in python_files()}
    assert not {path: names - known for path, names in cited.items() if names - known}


@pytest.mark.parametrize("kind", ["python", "pages"])
def test_cited_files_and_modules_exist(kind):
    paths = python_files() if kind == "python" else pages()
    wrong = {path.relative_to(ROOT).as_posix(): stale(path, prose(path)) for path in paths}
    assert not {path: names for path, names in wrong.items() if names}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("see surgery/mixers/base.py, mixers/base.py and base.py", []),
        ("see surgery/mixers/gone.py and gone.py", ["gone.py", "surgery/mixers/gone.py"]),
        ("`surgery.mixers.base.Mixer`, surgery.kernels.tuning, surgery.plan(..), surgery.core", []),
        ("surgery.mixers.base.Gone, surgery.gone.Mixer", ["surgery.gone.Mixer", "surgery.mixers.base.Gone"]),
        ("recipes.papers.quality.linears, recipes.papers.gone.linears", ["recipes.papers.gone.linears"]),
        ("surgery.recipes.papers.quality.linears", ["surgery.recipes.papers.quality.linears"]),
        ("https://example.org/a/b.py", []),
    ],
)
def test_a_stale_reference_is_found(text, names):
    assert stale(ROOT / "surgery/mixers/linear.py", text) == names
