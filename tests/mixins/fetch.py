"""Take the test mixins out of the source distribution of the installed transformers, into the folder `build/mixins/transformers_mixins`.

    python tests/mixins/fetch.py        (make test-mixins runs it)

The distribution holds the modules of its folder tests, and no folder in it. The module test_modeling_common imports two mixins from such folders,
the tests of generation and of export, so an empty class takes the place of each.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tarfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "mixins"
PACKAGE = FOLDER / "transformers_mixins"
STAND_INS = {"generation/test_utils.py": "GenerationTesterMixin", "exporters/test_export.py": "ExportTesterMixin"}


def fetch() -> Path:
    """Return the folder of the package, which is made if it does not exist or is of another version."""
    version = importlib.metadata.version("transformers")
    made = PACKAGE / "version"
    if made.is_file() and made.read_text() == version:
        return PACKAGE
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
    subprocess.run([*pip, "--no-build-isolation", "-d", str(FOLDER), f"transformers=={version}"], check=True)
    PACKAGE.mkdir(exist_ok=True)
    with tarfile.open(FOLDER / f"transformers-{version}.tar.gz") as archive:
        for member in archive.getmembers():
            below = member.name.partition("/tests/")[2]
            if member.isfile() and below.endswith(".py") and ("/" not in below or below in STAND_INS):
                content = archive.extractfile(member)
                assert content is not None
                write(below, content.read())
    for name, mixin in STAND_INS.items():
        if not (PACKAGE / name).exists():
            print(f"transformers-{version}.tar.gz has no tests/{name}: its tests are not run")
            write(name, f"class {mixin}:\n    pass\n".encode())
    made.write_text(version)
    return PACKAGE


def write(name: str, content: bytes) -> None:
    """Write a module of the package. Raises ValueError if its name leads out of it."""
    path = (PACKAGE / name).resolve()
    if not path.is_relative_to(PACKAGE.resolve()):
        raise ValueError(f"{name} lies outside {PACKAGE}")
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "__init__.py").touch()
    path.write_bytes(content)


if __name__ == "__main__":
    fetch()
