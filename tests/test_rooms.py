"""Who may import whom, by reading the files; and that `import surgery` is light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from surgery.anatomy import known_families

ROOT = Path(__file__).resolve().parents[1]

# From the ground up: a module imports from its own floor and those below it. A new module is added to the
# lowest floor that serves it.
FLOORS = [
    "errors storage remote_code companions locks version ranks registry op hooks memory digests devices precision progress options console data recipes",
    "structures",
    "mixers",
    "anatomy",
    # opening checkpoints, ours and others'
    "shards standins tensor_names checkpoint quantizer heads cache captured cache_file attention shims lora source skeleton",
    "ranges attention_recipe mlr_start recipe walk seats planning",
    # conversion and back
    "allocate weights batch parts calibrate stream phases windows starts head fit goingback curvature score text_check grafts sharing layerwise headcut trial hybrid arrange datafree budget"
    " journal admission seating report_shape pieces assemble conversion rewrite densifying toeplitz",
    "mixer_report reports tables",
    "share page",
    "eval papers kernels bench training",
    "demo api cli __main__",
]
FLOOR = {name: height for height, names in enumerate(FLOORS) for name in names.split()}
TIGHTER = {  # rooms that may use less than their floor allows
    "structures": {"structures", "registry", "op", "errors"},
    "mixers": {"mixers", "structures", "registry", "op", "errors"},
    "anatomy": {"anatomy", "registry", "errors"},
    "kernels": {"kernels", "structures", "mixers", "registry", "op", "errors"},
}
HEAVY = {"triton", "lm_eval", "datasets", "matplotlib"}  # imported inside the function that needs them
LINES, LONGER = 420, {}


FILES = sorted(p for room in ("surgery", "kernels", "eval", "recipes") for p in (ROOT / room).rglob("*.py"))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room(parts: Sequence[str]) -> str:
    """surgery.planning -> planning, surgery.structures.btt -> structures; papers stand apart from the recipes' YAML."""
    return "papers" if parts[1:3] == ["recipes", "papers"] else parts[1]


def room_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return room(parts if parts[0] == "surgery" else ["surgery", *parts])


def imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names = [alias.name for alias in node.names]
            yield from (f"surgery.{name}" for name in names) if node.module == "surgery" else [str(node.module)]


def of_ours(path: Path) -> set[str]:
    """Rooms and modules of ours that a file imports, wherever in it."""
    names = [name.split(".") for name in imported(ast.walk(tree(path)))]
    return {room(name) for name in names if name[0] == "surgery" and len(name) > 1}


def test_every_module_stands_on_a_floor():
    """A new one is added to FLOORS above."""
    assert {room_of(path) for path in FILES} <= {*FLOOR, "__init__"}


def test_imports_point_down():
    wrong = []
    for path in FILES:
        here, used = room_of(path), of_ours(path)
        if here == "__init__":
            allowed = {"checkpoint", "version", "api"}
        else:
            allowed = TIGHTER.get(here) or {name for name in FLOOR if FLOOR[name] <= FLOOR[here]}
        wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in used - allowed]
    assert not wrong


def test_kernels_are_not_imported_by_name():
    """They register themselves; only the command line and benchmarks may call for one."""
    below = [path for path in FILES if room_of(path) not in ("cli", "bench", "kernels")]
    assert not [path for path in below if "kernels" in of_ours(path)]


def test_heavy_modules_wait_for_their_function():
    """Kernels are imported where Triton is; they wait as files."""
    for path in FILES:
        heavy = HEAVY - {"triton"} if room_of(path) == "kernels" else HEAVY
        at_once = {name.split(".")[0] for name in imported(iter(tree(path).body))}
        assert not heavy & at_once, path


def test_small():
    for path in FILES:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= LONGER.get(str(path.relative_to(ROOT)), LINES), f"{path} has {lines} lines"
        assert path.stem != "utils"


def test_no_branch_on_a_model_s_name():
    """What differs between families is data, in anatomy/."""
    for path in FILES:
        compared = [n for n in ast.walk(tree(path)) if isinstance(n, (ast.Compare, ast.MatchValue))]
        words = {n.value for c in compared for n in ast.walk(c) if isinstance(n, ast.Constant)}
        assert room_of(path) == "anatomy" or not words & set(known_families()), path


def test_anatomies_are_data():
    """A docstring, imports, and assignments."""
    families = [p for p in (ROOT / "surgery/anatomy").glob("*.py") if p.stem not in ("__init__", "base")]
    assert len(families) >= 13
    for path in families:
        kinds = {type(node) for node in tree(path).body}
        assert kinds <= {ast.Import, ast.ImportFrom, ast.Assign, ast.Expr}, path.name


@pytest.mark.parametrize("name", ["kernels", "eval", "recipes", "recipes/papers"])
def test_root_rooms_are_no_packages_of_their_own(name):
    """With an __init__.py, `kernels` would hide the library of that name from the repository's root."""
    assert (ROOT / name).is_dir() and not (ROOT / name / "__init__.py").exists()


def in_a_new_interpreter(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    ).stdout


def test_importing_is_light():
    """Past torch nothing but a few modules of ours and of Python's, some hundredths of a second; a second is allowed."""
    code = (
        "import torch, time, sys; there, before = set(sys.modules), time.perf_counter(); import surgery; "
        "print(time.perf_counter() - before, *(set(sys.modules) - there))"
    )
    seconds, *new = in_a_new_interpreter(code).split()
    others = {name.partition(".")[0] for name in new} - {"surgery"} - sys.stdlib_module_names
    assert float(seconds) < 1.0 and not others, others
    assert len([name for name in new if name.startswith("surgery")]) < 10, sorted(new)


def test_the_command_line_starts_before_torch():
    """Its help is quick, and what it tells torch's threads comes in time."""
    said = in_a_new_interpreter("import surgery.cli, sys; print('torch' in sys.modules)")
    assert said.strip() == "False"


def test_rooms_are_found_from_a_checkout():
    """Where surgery is not installed, the repository's root on the path is enough."""
    said = in_a_new_interpreter(
        "import surgery.eval, surgery.recipes, surgery.kernels, surgery.recipes.papers; print('found')"
    )
    assert said.strip() == "found"
