"""Check the import contract of pyproject.toml with import-linter: `python tests/helpers/check_imports.py`.

`surgery.kernels`, `surgery.eval` and `surgery.recipes` lie beside the package in the repository, where import-linter
does not look. The contract is therefore checked on a copy of the Python files, laid out as they are installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def copy_package(folder: Path) -> None:
    """Copy every Python file of the package into `folder`/surgery as an installation would have it."""
    for name in ("surgery", "kernels", "eval", "recipes"):
        target = folder / "surgery" / ("" if name == "surgery" else name)
        for path in (ROOT / name).rglob("*.py"):
            if path.is_relative_to(ROOT / "recipes" / "papers"):  # not installed
                continue
            copy = target / path.relative_to(ROOT / name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    for place, _, files in os.walk(folder / "surgery"):
        if "__init__.py" not in files:
            (Path(place) / "__init__.py").touch()


def main() -> int:
    """Run import-linter on the copy; return its exit code."""
    with tempfile.TemporaryDirectory() as made:
        copy_package(Path(made))
        command = [sys.executable, "-m", "importlinter.cli", "lint-imports"]
        command = [
            str(Path(sys.executable).with_name("lint-imports")),
            "--config",
            str(ROOT / "pyproject.toml"),
            "--no-cache",
        ]
        return subprocess.run(command, cwd=made, env={**os.environ, "PYTHONPATH": made}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
