"""The layout of the code: which package may import which, heavy imports inside functions, and a light `import
surgery`.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from helpers import check_imports
from helpers.embedded_part import save_part
from helpers.syntax import statements

from surgery.architectures import known_families

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("surgery", "kernels", "eval", "recipes")
HEAVY = {"triton", "lm_eval", "datasets", "matplotlib"}  # imported inside the functions that need them
LAB = ROOT / "recipes" / "papers"  # scripts of a checkout, which are not installed
FILES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
INSTALLED = [path for path in FILES if not path.is_relative_to(LAB)]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def with_words(paths: Iterable[Path], words: Iterable[str]) -> list[Path]:
    """Return the files whose text has one of the words: others need not be parsed to look for it."""
    any_word = re.compile("|".join(map(re.escape, words)))
    return [path for path in paths if any_word.search(path.read_text(encoding="utf-8"))]


def is_kernel(path: Path) -> bool:
    return path.relative_to(ROOT).parts[0] == "kernels"


def imported_modules(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names = [alias.name for alias in node.names]
            yield from (f"surgery.{name}" for name in names) if node.module == "surgery" else [str(node.module)]


def test_the_import_contract_holds():
    """The layers of pyproject.toml, no cycles; `make lint` runs the same."""
    assert check_imports.main() == 0


def test_the_package_does_not_know_the_lab():
    """recipes/papers imports the package, never the other way round; and it has one name: no file is imported twice."""
    texts = {path: path.read_text(encoding="utf-8") for path in FILES}
    assert len(INSTALLED) > 300 and any("recipes.papers" in text for text in texts.values())
    assert not [path for path in FILES if "surgery.recipes.papers" in texts[path]]
    knowing = [path for path in INSTALLED if "recipes.papers" in texts[path] and imports_the_lab(tree(path))]
    assert not knowing


def imports_the_lab(module: ast.Module) -> bool:
    """Return whether a module imports recipes.papers, or has its name as a string, by which it could."""
    strings = {str(node.value) for node in ast.walk(module) if isinstance(node, ast.Constant)}
    named = strings | set(imported_modules(ast.walk(module)))
    return any(re.fullmatch(r"recipes\.papers(\.\w+)*", name) for name in named)


def test_kernels_are_not_imported_by_name():
    """Kernels register themselves; only benchmarks and notes on speed may import one by its name."""
    allowed = ("kernels/", "eval/speed/", "surgery/publish/speed_notes.py", "surgery/cli/")
    below = [path for path in FILES if not str(path.relative_to(ROOT)).startswith(allowed)]
    below = with_words(below, ["surgery.kernels", "surgery import"])
    assert below
    wrong = [
        p for p in below if any(name.startswith("surgery.kernels") for name in imported_modules(ast.walk(tree(p))))
    ]
    assert not wrong


# Files that import a module by a string: those that scan a package for entries, and one that imports transformers'
# modules.
BY_NAME = {
    "eval/suite.py": "suites",
    "surgery/architectures/base.py": "model families",
    "surgery/checkpoint/model_classes.py": "the module of transformers that has a config's model class",
    "surgery/core/dispatch.py": "kernels",
    "surgery/core/registry.py": "structures, mixers, masks, feature maps, stages",
}


def imports_by_name(module: ast.Module) -> bool:
    """Return whether a module names import_module or __import__, called or not."""
    nodes = list(ast.walk(module))
    named = {n.attr for n in nodes if isinstance(n, ast.Attribute)} | {n.id for n in nodes if isinstance(n, ast.Name)}
    named |= {alias.name for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}
    return bool({"import_module", "__import__"} & named)


def test_no_module_is_imported_by_a_string():
    """An import statement is what readers, mypy and the import contract see.

    Files of the package are found with importlib.resources.
    """
    texts = {path: path.read_text(encoding="utf-8") for path in FILES}
    maybe = [path for path, text in texts.items() if "import_module" in text or "__import__" in text]
    found = {path.relative_to(ROOT).as_posix() for path in maybe if imports_by_name(tree(path))}
    assert found == set(BY_NAME)
    assert imports_by_name(ast.parse("from importlib import import_module as load; load('surgery.' + name)"))


# Classes that override a private method of a class of ours, which the class may rename without looking for them.
OVERRIDING = {"BestCheckpoint": {"_prune"}, "ZeroOptimizerStep": {"_parameters", "_setup"}}


def test_no_class_overrides_a_private_method():
    """What differs between kinds of one thing is a public method: a conversion has a source and a sink, and no
    subclasses.
    """
    files = with_words(INSTALLED, ["class "])
    classes = {n.name: n for path in files for n in statements(tree(path)) if isinstance(n, ast.ClassDef)}

    def private_methods(node: ast.ClassDef) -> set[str]:
        names = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        return {name for name in names if name.startswith("_") and not name.startswith("__")}

    def inherited(node: ast.ClassDef) -> set[str]:
        names = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
        bases = [classes[name] for name in names if name in classes and classes[name] is not node]
        return set().union(*(private_methods(base) | inherited(base) for base in bases))

    found = {name: private_methods(node) & inherited(node) for name, node in classes.items()}
    assert {name: methods for name, methods in found.items() if methods} == OVERRIDING


def test_heavy_modules_wait_for_their_function():
    """Kernels themselves are only imported where Triton is installed, so they may import it at the top."""
    for path in with_words(FILES, HEAVY):
        heavy = HEAVY - {"triton"} if is_kernel(path) else HEAVY
        at_once = {name.split(".")[0] for name in imported_modules(iter(tree(path).body))}
        assert not heavy & at_once, path


def test_no_branch_on_a_model_s_name():
    """What differs between model families is data, in surgery/architectures."""
    families = set(known_families())
    for path in with_words(FILES, [quote + family + quote for family in families for quote in "'\""]):
        compared = [n for n in ast.walk(tree(path)) if isinstance(n, (ast.Compare, ast.MatchValue))]
        words = {n.value for c in compared for n in ast.walk(c) if isinstance(n, ast.Constant)}
        assert "architectures" in path.parts or not words & families, path


def test_architectures_are_data():
    """A family's file holds a docstring, imports and assignments, no code."""
    families = [
        p for p in (ROOT / "surgery/architectures").glob("*.py") if tree(p).body and "ARCHITECTURE" in p.read_text()
    ]
    families = [p for p in families if p.stem not in ("__init__", "base", "linears", "attention")]
    assert len(families) >= 13
    for path in families:
        kinds = {type(node) for node in tree(path).body}
        assert kinds <= {ast.Import, ast.ImportFrom, ast.Assign, ast.Expr}, path.name


@pytest.mark.parametrize("name", ["kernels", "eval", "recipes", "recipes/papers"])
def test_packages_at_the_root_have_no_init_file(name):
    """With an __init__.py, `kernels` would hide the library of that name from the repository's root."""
    assert (ROOT / name).is_dir() and not (ROOT / name / "__init__.py").exists()


def in_a_new_interpreter(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    ).stdout


def test_importing_is_light():
    """`import surgery` adds a few modules of ours and of Python's to torch."""
    code = "import torch, sys; there = set(sys.modules); import surgery; print(*(set(sys.modules) - there))"
    new = in_a_new_interpreter(code).split()
    others = {name.partition(".")[0] for name in new} - {"surgery"} - sys.stdlib_module_names
    assert not others, others
    assert len([name for name in new if name.startswith("surgery")]) < 15, sorted(new)


@pytest.mark.slow  # it measures time, which a busy machine makes longer
def test_importing_takes_less_than_a_second():
    """Beyond torch, some hundredths of a second."""
    code = "import torch, time; before = time.process_time(); import surgery; print(time.process_time() - before)"
    assert float(in_a_new_interpreter(code)) < 1.0


def test_the_command_line_starts_before_torch():
    """Its help is quick, and what it tells torch's threads comes in time."""
    printed = in_a_new_interpreter("import surgery.cli.main, sys; print('torch' in sys.modules)")
    assert printed.strip() == "False"


UNWANTED = {"torch._dynamo", "matplotlib", "datasets", "lm_eval"}
MODULES = """
import contextlib, io, sys
from surgery.cli.main import main
for words in {commands!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(words)
print(*sys.modules)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A checkpoint of one layer: what is imported does not depend on how many there are."""
    return save_part(tmp_path_factory.mktemp("tiny") / "checkpoint", 1)


def modules_after(*commands: tuple[str, ...]) -> set[str]:
    """Return the modules that commands of `surgery` import, run one after the other in a new interpreter."""
    return set(in_a_new_interpreter(MODULES.format(commands=[list(words) for words in commands])).split())


@pytest.mark.parametrize("words", [("--help",), ("recipes",), ("convert", "--help")])
def test_help_and_recipes_do_without_torch(words):
    assert not {"torch", "transformers", "numpy"} & modules_after(words)


# Whose plans take seconds, and whose structures other recipes have.
SLOW_PLANS = ("btt-3-cores", "low-rank-btt-half", "mlr-monarch-half")


@pytest.mark.parametrize("left_out", [SLOW_PLANS, pytest.param((), marks=pytest.mark.slow)], ids=["quick", "all"])
def test_plan_imports_little_beyond_torch(tiny, left_out):
    """The model class of transformers, which costs more than torch, is not needed for a checkpoint that has an outline,
    and the sizes of mixers are computed without torch._dynamo. A plan of a stock conversion builds models, which it
    compares.
    """
    theirs = in_a_new_interpreter("import sys, torch; print(*sys.modules)")
    recipes = [path.stem for path in (ROOT / "recipes/convert").glob("*.yaml") if not path.stem.startswith("stock")]
    recipes = [name for name in recipes if name not in left_out]
    ours = modules_after(*(("plan", str(tiny), "-r", recipe) for recipe in recipes))
    added = {name.partition(".")[0] for name in ours - set(theirs.split())} - sys.stdlib_module_names
    added = {name for name in added if not name.startswith(("_sysconfigdata", "_cython", "cython"))}
    small = {"surgery", "typer", "shellingham", "rich", "pygments", "markdown_it", "mdurl", "annotated_doc"}
    small |= {"pydantic", "pydantic_core", "annotated_types", "typing_inspection", "yaml", "_yaml", "__mp_main__"}
    assert "surgery.planning.plan" in ours and not added - small, added - small
    assert not {*UNWANTED, "sympy", "scipy"} & ours


CONVERT = """
import sys
import surgery
source, text, out = sys.argv[1:]
surgery.convert(source, "low-rank-half", out, calibration=text, device="cpu", tune=None, tokens=256, length=64)
print(*(name for name in sys.modules if name.startswith("surgery")))
"""


def test_a_conversion_imports_what_its_recipe_needs(tiny, tmp_path):
    """Of structures, families, masks and ways to choose layers those of the recipe and the model alone.

    It was 184 modules before.
    """
    text = ROOT / "recipes/tiny/checkpoint/calibration.txt"
    words = [sys.executable, "-c", CONVERT, str(tiny), str(text), str(tmp_path / "OUT")]
    run = subprocess.run(words, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    names = set(run.stdout.splitlines()[-1].split())
    assert "surgery.structures.low_rank" in names and "surgery.architectures.llama" in names
    unneeded = {
        "surgery.structures.btt",
        "surgery.architectures.gpt2",
        "surgery.mixers.masks.decay",
        "surgery.checkpoint.gguf",
    }
    unneeded |= {"surgery.conversion.restored", "surgery.conversion.live_source", "surgery.publish"}
    assert not unneeded & names
    assert len(names) < 142, sorted(names)


def test_our_modules_do_not_bring_in_the_compiler():
    """Structures, mixers, recipes and training settings import torch, but neither torch._dynamo nor plots or data
    sets.
    """
    names = "surgery.core.dispatch, surgery.structures, surgery.mixers, surgery.api, surgery.training.guard"
    printed = in_a_new_interpreter(
        f"import sys, {names}; from surgery.mixers import MIXERS; from surgery.structures import STRUCTURES; "
        "MIXERS.names(), STRUCTURES.names(); print(*sys.modules)"
    )
    assert not UNWANTED & set(printed.split())


def test_packages_are_found_from_a_checkout():
    """Where surgery is not installed, the repository's root on the path is enough."""
    printed = in_a_new_interpreter(
        "import surgery.eval, surgery.recipes, surgery.kernels, recipes.papers; print('found')"
    )
    assert printed.strip() == "found"


def test_the_lab_runs_in_the_root_of_a_checkout(tmp_path):
    """Where surgery is not installed.

    The folders of the root, which lead the path there, hide no library of their names.
    """
    library = tmp_path / "kernels"
    library.mkdir()
    (library / "__init__.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = (
        "import kernels, runpy; print(kernels.__file__); runpy.run_module('recipes.papers.scale.plan', "
        "run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(str(library)), done.stderr
    assert "hours" in done.stdout
