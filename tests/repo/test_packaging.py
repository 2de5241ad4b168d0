"""Contents of the source distribution and the wheel, and that the wheel works without a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("surgery", "kernels", "eval", "recipes")
LAB = ROOT / "recipes" / "papers"  # scripts of a checkout, which are not installed
BESIDE = (
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "THIRD_PARTY_NOTICES",
    "CHANGELOG.md",
    "Makefile",
    "constraints-cpu.txt",
    "build_backend.py",
    "setup.py",
    "surgery_startup.py",
)
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
BUILD = """
import os, pathlib, build_backend
build_backend.build_sdist("dist")
for folder in ("editable", "direct"):
    pathlib.Path(folder).mkdir()
build_backend.build_editable("editable")
for path in pathlib.Path("surgery").rglob("*.py"):  # another checkout has other times and modes
    os.utime(path, (1e9, 1e9))
    path.chmod(0o600)
build_backend.build_sdist("again")
build_backend.build_wheel("direct")
"""
WORKS = """
import site, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "__module__", "") != "surgery_startup"]
sys.modules.pop("surgery_startup", None)  # of an install in this environment
site.addsitedir(sys.argv[1])  # as Python does at its start: reads the .pth files
assert "surgery_startup" in sys.modules and "surgery" not in sys.modules
import transformers.quantizers.auto as auto
assert "surgery" in auto.AUTO_QUANTIZER_MAPPING, "nobody imported surgery"
import surgery, surgery.eval.run, surgery.kernels, surgery.recipes.tiny.train
from surgery.planning.recipe import shipped_recipes
assert "site" in surgery.__file__, surgery.__file__
print(*shipped_recipes())
"""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Built from a copy, for setuptools leaves its traces where it builds."""
    place = tmp_path_factory.mktemp("sdist")
    for name in (*PACKAGES, *BESIDE, "docs", "tests"):
        if (ROOT / name).is_dir():  # other test processes may be writing their caches
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, place / name)
    for name in (*PACKAGES, "tests"):  # caches, which are left out of what is built
        (place / name / "__pycache__").mkdir()
        (place / name / "__pycache__" / "module.cpython-311.pyc").write_bytes(b"")
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr  # they are hundreds of lines where a newcomer installs
    (built,) = (place / "dist").glob("transformer_surgery-*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Built from the source distribution, as pip does where it finds no wheel."""
    place = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(place)]
    done = subprocess.run([*command, str(sdist)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = place.glob("transformer_surgery-*.whl")
    return built


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def in_the_checkout(room: str) -> set[str]:
    """Every file of a room but those of the lab, as it is called where it is installed."""
    files = [p for p in (ROOT / room).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    files = [p for p in files if not p.is_relative_to(LAB)]
    return {str(p.relative_to(ROOT) if room == "surgery" else Path("surgery") / p.relative_to(ROOT)) for p in files}


def test_everything_is_in_the_wheel(wheel):
    """Modules, recipes, the embedded checkpoint, the page's style, timings, the small mirror of data sets."""
    ours = {"surgery_startup.py", "surgery_startup.pth"}.union(*(in_the_checkout(room) for room in PACKAGES))
    assert len(ours) > 300 and ours <= names_in(wheel), ours - names_in(wheel)
    assert not [name for name in names_in(wheel) if "papers/" in name], "recipes/papers is for a checkout"


def test_the_source_distribution_can_be_read_and_tested(sdist):
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    rooms = (ROOT / "tests", ROOT / "docs", LAB)
    beside = {str(p.relative_to(ROOT)) for room in rooms for p in room.rglob("*") if p.is_file()}
    beside = {name for name in beside if "__pycache__" not in name} | set(BESIDE)
    assert beside <= files, beside - files
    assert not [name for name in files if name.endswith(".pyc")]


def test_the_source_distribution_is_reproducible(sdist):
    """Times, modes and owners of the checkout do not matter."""
    assert (sdist.parents[1] / "again" / sdist.name).read_bytes() == sdist.read_bytes()
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert [m.name for m in members] == sorted(m.name for m in members)
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in members} == {(315_532_800, 0, 0, "", "")}
    assert {m.mode for m in members} <= {0o644, 0o755}


def test_the_wheel_is_reproducible(sdist, wheel):
    """Built in a checkout and from the source distribution elsewhere: the same bytes."""
    assert (sdist.parents[1] / "direct" / wheel.name).read_bytes() == wheel.read_bytes()
    members = zipfile.ZipFile(wheel).infolist()
    assert {m.date_time for m in members} == {(1980, 1, 1, 0, 0, 0)}
    assert {m.external_attr >> 16 for m in members} == {0o100644}
    assert members[-1].filename.endswith(".dist-info/RECORD")


@pytest.mark.slow
def test_two_builds_of_the_wheel_with_a_date_are_equal(sdist, tmp_path):
    """SOURCE_DATE_EPOCH is the time of all members; hash seeds, time zones and the place of the checkout do not matter."""
    pytest.importorskip("setuptools", reason="the build backend, setuptools, is not installed")
    built = []
    for number, zone in enumerate(("UTC", "Asia/Tokyo")):
        place = tmp_path / str(number)
        with tarfile.open(sdist) as archive:
            archive.extractall(place, filter="data")
        (checkout,) = place.iterdir()
        settings = {"SOURCE_DATE_EPOCH": "1700000001", "PYTHONHASHSEED": str(number), "TZ": zone}
        done = subprocess.run(
            [sys.executable, "-c", "import build_backend; print(build_backend.build_wheel('.'))"],
            cwd=checkout, capture_output=True, text=True, env={**ENVIRONMENT, **settings},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        built.append(next(checkout.glob("*.whl")))
    assert built[0].name == built[1].name and built[0].read_bytes() == built[1].read_bytes()
    assert {m.date_time for m in zipfile.ZipFile(built[0]).infolist()} == {(2023, 11, 14, 22, 13, 20)}


def test_data_marker_and_licence(wheel):
    files = names_in(wheel)
    tiny = {
        f"surgery/recipes/tiny/checkpoint/{p.name}" for p in (ROOT / "recipes/tiny/checkpoint").iterdir() if p.is_file()
    }
    assert len(tiny) >= 9 and tiny <= files
    assert {"surgery/py.typed", "surgery/kernels/README.md"} <= files
    for notice in ("LICENSE", "THIRD_PARTY_NOTICES"):
        (installed,) = (name for name in files if name.endswith(f"licenses/{notice}"))
        assert zipfile.ZipFile(wheel).read(installed) == (ROOT / notice).read_bytes()
    assert not [name for name in files if name.split("/")[0] in ("kernels", "eval", "recipes", "tests")]


def test_an_editable_install_is_a_path(sdist):
    """Not a finder, which a folder called surgery in the working directory (a clone) would come before."""
    place = sdist.parents[1]
    (built,) = (place / "editable").glob("*.whl")
    archive = zipfile.ZipFile(built)
    inside = {name: archive.read(name).decode() for name in archive.namelist() if "dist-info" not in name}
    first, second = inside.items()
    assert Path(first[1].strip()) == place and first[0].endswith(".pth")
    assert second == ("surgery_startup.pth", "import surgery_startup\n") and first[0] < second[0]


def test_a_folder_of_that_name_does_not_hide_an_editable_install(sdist, tmp_path):
    """A script beside a clone called "surgery" imports the package in the checkout, not the clone's folder."""
    place = sdist.parents[1]
    (built,) = (place / "editable").glob("*.whl")
    site, clone = tmp_path / "site", tmp_path / "work" / "surgery"
    with zipfile.ZipFile(built) as archive:
        archive.extractall(site)
    clone.mkdir(parents=True)
    (clone / "README.md").write_text("a clone")
    code = f"import site; site.addsitedir({str(site)!r}); import surgery; print(surgery.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=clone.parent, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_file()


def test_it_works_without_a_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{WORKS}", str(site)],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True,
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
