"""Run tests/versions in environments at both ends of the versions that pyproject.toml promises, and print a table of
the results.

    python tests/versions/environments.py                              (make test-versions)
    python tests/versions/environments.py --end newest --python python3     (make test-newest)

An end is `lowest`, the lowest version of each direct requirement, or `newest`, the newest tested versions:
constraints-newest.txt. Each runs with the oldest and the newest Python of this machine, or with the one that --python
names, in a folder .venvs/END-pyX.Y. An environment is made again when its requirements change. Only the standard
library is used here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venvs"
ENDS = ("lowest", "newest")
OLDEST = (3, 10)
TOOLS = ("pytest>=8.2", "pytest-timeout>=2.3", "hypothesis>=6.100")
REQUIREMENT = re.compile(r'^\s+"([\w.-]+)>=([\w.]+)[^;"]*(;[^"]*)?",$', re.M)
LOOK = "import sys; print(*sys.version_info[:2], sys.executable)"
VERSIONS = "import importlib.metadata as m; print(*(m.version(name) for name in ('torch', 'transformers')))"


@dataclass(frozen=True)
class Result:
    """A row of the table. summary: the last line that pytest printed, or what failed before it."""

    end: str
    python: str
    torch: str
    transformers: str
    summary: str
    passed: bool


def lowest_constraints() -> str:
    """Return constraints that pin every direct requirement of pyproject.toml to its lowest version, one a line."""
    found = REQUIREMENT.findall(direct_requirements())
    if len(found) != len(direct_requirements().splitlines()):
        raise SystemExit("pyproject.toml: each line of `dependencies` must be a requirement with >=")
    return "".join(f"{name}=={lowest}{marker}\n" for name, lowest, marker in found)


def direct_requirements() -> str:
    """Return the lines of `dependencies` in pyproject.toml (as text: tomllib is 3.11's)."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return text.split("\ndependencies = [\n")[1].split("\n]\n")[0] + "\n"


def find_pythons() -> dict[tuple[int, int], str]:
    """Return the interpreters of PATH and of pyenv, by (major, minor), the lowest first."""
    paths = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [*sorted(pyenv.glob("*/bin/python3")), *(p for path in paths for p in sorted(path.glob("python3.[0-9]*")))]
    found: dict[tuple[int, int], str] = {}
    for place in [Path(sys.executable), *places]:
        if re.fullmatch(r"python[\d.]*", place.name):
            version, executable = look_at(str(place))
            if version >= OLDEST:
                found.setdefault(version, executable)
    return dict(sorted(found.items()))


def look_at(python: str) -> tuple[tuple[int, int], str]:
    """Return ((major, minor), path) of an interpreter; (0, 0) if it does not run, as a shim of pyenv's may not."""
    try:
        done = subprocess.run([python, "-c", LOOK], capture_output=True, text=True)
    except OSError:
        return (0, 0), python
    if done.returncode:
        return (0, 0), python
    major, minor, executable = done.stdout.strip().split(" ", 2)
    return (int(major), int(minor)), executable


def make_environment(end: str, python: str, folder: Path) -> Path:
    """Return the interpreter of the environment, made if it does not exist or if its requirements changed."""
    constraints = lowest_constraints() if end == "lowest" else (ROOT / "constraints-newest.txt").read_text("utf-8")
    wanted = hashlib.sha256("\n".join((direct_requirements(), constraints, *TOOLS)).encode()).hexdigest()
    made, inside = folder / "requirements.sha256", folder / "bin" / "python"
    if made.is_file() and made.read_text() == wanted:
        return inside
    shutil.rmtree(folder, ignore_errors=True)
    print(f"Making {folder.relative_to(ROOT)} with {python}; this downloads up to several gigabytes.", flush=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    file = folder / "constraints.txt"
    file.write_text(constraints, encoding="utf-8")
    pip = [str(inside), "-m", "pip", "install", *os.environ.get("PIP_FLAGS", "-qq").split(), "--no-compile"]
    subprocess.run([*pip, "pip==26.3"], check=True)
    subprocess.run([*pip, "-c", str(file), "-e", str(ROOT), *TOOLS], check=True)
    made.write_text(wanted)
    return inside


def run_end(end: str, version: tuple[int, int], python: str, pytest_args: list[str]) -> Result:
    """Run tests/versions at one end with one Python."""
    name = ".".join(map(str, version))
    folder = FOLDER / f"{end}-py{name}"
    try:
        inside = make_environment(end, python, folder)
        torch, transformers = subprocess.check_output([str(inside), "-c", VERSIONS], text=True).split()
    except (subprocess.CalledProcessError, OSError) as error:
        return Result(end, name, "", "", f"no environment: {error}", False)
    print(f"{end}: Python {name}, torch {torch}, transformers {transformers}", flush=True)
    command = [str(inside), "-m", "pytest", "-m", "", *pytest_args, str(Path(__file__).parent)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    lines = []
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines += [line.strip(" =\n")]
    counts = [line for line in lines if re.search(r"\d+ (passed|failed|error|skipped)", line)]
    passed = process.returncode == 0 and bool(counts) and "skipped" not in counts[-1]
    return Result(end, name, torch, transformers, counts[-1] if counts else "pytest ended early", passed)


def table(results: list[Result]) -> str:
    """Return the results as a table."""
    rows = [("versions", "Python", "torch", "transformers", "result", "")]
    rows += [(r.end, r.python, r.torch, r.transformers, "ok" if r.passed else "FAILED", r.summary) for r in results]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def newer_releases(python: str) -> list[str]:
    """Return "name version" of each direct requirement that has a newer release than the environment; [] without a
    network.
    """
    direct = {name.lower().replace("_", "-") for name, _, _ in REQUIREMENT.findall(direct_requirements())}
    command = [python, "-m", "pip", "list", "--outdated", "--format=json"]
    done = subprocess.run(command, capture_output=True, text=True)
    listed = json.loads(done.stdout) if done.returncode == 0 else []
    return [
        f"{one['name']} {one['latest_version']}" for one in listed if one["name"].lower().replace("_", "-") in direct
    ]


def main() -> int:
    """Return 0 if all environments passed, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--end", choices=ENDS, help="one end only")
    parser.add_argument("--python", help="one interpreter only, in place of the oldest and the newest of this machine")
    options, pytest_args = parser.parse_known_args()
    found = find_pythons()
    if options.python:
        version, path = look_at(options.python)
        if version < OLDEST:
            parser.error(f"{options.python} must run, and be Python {'.'.join(map(str, OLDEST))} or later")
        chosen = {version: path}
    else:
        chosen = {version: found[version] for version in (min(found), max(found))}
    ends = [options.end] if options.end else ENDS
    results = [run_end(end, version, path, pytest_args) for end in ends for version, path in chosen.items()]
    print(f"\n{table(results)}")
    if left := [".".join(map(str, version)) for version in found if version not in chosen]:
        print(f"not tried: Python {', '.join(left)}")
    newest = FOLDER / f"newest-py{results[-1].python}" / "bin" / "python"
    if results[-1].end == "newest" and not options.python and (newer := newer_releases(str(newest))):
        print(f"not tried: newer releases ({', '.join(newer)})")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
