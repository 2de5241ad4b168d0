"""What a wheel contains, and that it works where there is no checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("surgery", "kernels", "eval", "recipes", "pyproject.toml", "README.md", "LICENSE")
WORKS = """
import surgery, surgery.eval.run, surgery.kernels, surgery.recipes.papers.tiny
from surgery.recipe import shipped_recipes
assert "site" in surgery.__file__, surgery.__file__
print(*shipped_recipes())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, for setuptools leaves its traces where it builds."""
    place = tmp_path_factory.mktemp("wheel")
    (place / "source").mkdir()
    for name in SHIPPED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place / "source" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(place)]
    done = subprocess.run([*command, str(place / "source")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = place.glob("transformer_surgery-*.whl")
    return built


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_every_module_and_every_recipe(wheel):
    ours = [p.relative_to(ROOT) for p in (ROOT / "surgery").rglob("*.py")]
    ours += [
        Path("surgery") / p.relative_to(ROOT)
        for room in ("eval", "recipes", "kernels")
        for p in (ROOT / room).rglob("*.py")
    ]
    ours += [Path("surgery") / p.relative_to(ROOT) for p in (ROOT / "recipes").glob("*.yaml")]
    assert len(ours) > 50 and {str(p) for p in ours} <= names_in(wheel)


def test_data_marker_and_licence(wheel):
    files = names_in(wheel)
    tiny = {f"surgery/data/tiny/{p.name}" for p in (ROOT / "surgery/data/tiny").iterdir() if p.is_file()}
    assert len(tiny) >= 9 and tiny <= files
    assert {"surgery/py.typed", "surgery/kernels/README.md"} <= files
    assert [name for name in files if name.endswith("licenses/LICENSE")]
    assert not [name for name in files if name.split("/")[0] in ("kernels", "eval", "recipes", "tests")]


def test_it_works_without_a_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{WORKS}"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {"btt-half", "low-rank-half", "monarch-half", "auto-half"} <= set(done.stdout.split())


def test_triton_is_an_extra(wheel):
    """A CPU-only machine or a Mac installs and runs without it."""
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    needs = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist:")]
    assert len(needs) > 10
    assert all("extra ==" in line for line in needs if "triton" in line or "lm_eval" in line)
