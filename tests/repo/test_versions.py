"""The promised versions: constraints at both ends fit pyproject.toml, the table of tests/versions, and what .ci/run
prints and returns.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from versions import environments

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def pins(text: str, python: str) -> dict[str, str]:
    """Return the pinned version of each distribution for a Python.

    Raise AssertionError if a line is no pin or a name has two.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        requirement = None if line.startswith("#") else Requirement(line)
        if requirement and holds(requirement, python):
            (pin,) = requirement.specifier
            assert pin.operator == "==" and canonicalize_name(requirement.name) not in found, line
            found[canonicalize_name(requirement.name)] = pin.version
    return found


def holds(requirement: Requirement, python: str) -> bool:
    environment = {**default_environment(), "python_version": python, "sys_platform": "linux"}
    return requirement.marker is None or requirement.marker.evaluate(environment)


def direct(python: str) -> list[Requirement]:
    lines = environments.direct_requirements().splitlines()
    return [r for r in (Requirement(line.strip(' ",')) for line in lines) if holds(r, python)]


@pytest.mark.parametrize("python", PYTHONS)
def test_each_end_pins_every_direct_requirement_within_its_range(python):
    lowest = pins(environments.lowest_constraints(), python)
    newest = pins((ROOT / "constraints-newest.txt").read_text(encoding="utf-8"), python)
    for requirement in direct(python):
        name = canonicalize_name(requirement.name)
        (floor,) = (one.version for one in requirement.specifier if one.operator == ">=")
        assert lowest[name] == floor and newest[name] in requirement.specifier, name
    assert {"torch", "transformers"} <= {r.name for r in direct(python)} and set(lowest) <= set(newest)


def test_the_tested_pythons_are_those_of_the_classifiers_and_of_the_workflows():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'"Programming Language :: Python :: {python}"' in text for python in PYTHONS)
    assert f'requires-python = ">={PYTHONS[0]}"' in text and environments.OLDEST == (3, 10)
    read = lambda name: yaml.safe_load((ROOT / ".github/workflows" / name).read_text(encoding="utf-8"))["jobs"]  # noqa: E731
    assert tuple(read("tests.yml")["test"]["strategy"]["matrix"]["python"]) == PYTHONS
    assert read("weekly.yml")["newest"]["strategy"]["matrix"]["python"] == [PYTHONS[0], PYTHONS[-1]]


def test_the_weekly_run_has_no_pins():
    weekly = (ROOT / ".github/workflows/weekly.yml").read_text(encoding="utf-8")
    installs = [line for line in weekly.splitlines() if "make .venv" in line or "make tests" in line]
    assert len(installs) == 2 and all(line.endswith("CONSTRAINTS=") for line in installs)
    words = ["make", "-n", "-B", ".venv/installed-test"]
    shown = [subprocess.check_output([*words, *more], cwd=ROOT, text=True) for more in ((), ("CONSTRAINTS=",))]
    assert ["-c constraints-cpu.txt" in text for text in shown] == [True, False]


def test_the_table_names_versions_and_results():
    results = [
        environments.Result("lowest", "3.10", "2.7.0", "5.10.1", "14 passed in 60.0s", True),
        environments.Result("newest", "3.13", "2.13.0", "5.24.0", "1 failed, 13 passed in 60.0s", False),
    ]
    head, first, second = environments.table(results).splitlines()
    assert head.split() == ["versions", "Python", "torch", "transformers", "result"]
    assert first.split()[:5] == ["lowest", "3.10", "2.7.0", "5.10.1", "ok"] and second.split()[4] == "FAILED"


MAKE = """#!/usr/bin/env bash
for word; do target=$word; done
echo "$target runs"
if [ "$target" = test ]; then echo "== 7 passed, 1 skipped in 3.21s =="; exit "$TEST_STATUS"; fi
echo "9 passed in 0.50s"
exit "$NEWEST_STATUS"
"""


@pytest.mark.parametrize("statuses", [(0, 0), (2, 0), (0, 2), (1, 2)])
def test_ci_ends_with_the_summary_of_the_suite_and_fails_if_either_part_fails(statuses, tmp_path):
    repository, commands = tmp_path / "repository", tmp_path / "commands"
    (repository / ".ci").mkdir(parents=True)
    commands.mkdir()
    shutil.copy(ROOT / ".ci" / "run", repository / ".ci" / "run")
    (commands / "make").write_text(MAKE)
    (commands / "make").chmod(0o755)
    subprocess.run(["git", "init", "--quiet", str(repository)], check=True)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    environment |= {"TEST_STATUS": str(statuses[0]), "NEWEST_STATUS": str(statuses[1])}
    done = subprocess.run(["bash", str(repository / ".ci/run")], env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert {"test runs", "test-newest runs"} <= set(lines)
    assert lines[-1] == "== 7 passed, 1 skipped in 3.21s ==" and (done.returncode == 0) == (statuses == (0, 0))
