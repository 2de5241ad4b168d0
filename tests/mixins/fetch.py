"""Take the test mixins out of the source distribution of the installed transformers, into the folder
`build/mixins/transformers_mixins`.

    python tests/mixins/fetch.py        (make test-mixins runs it)

The distribution holds the modules of its folder tests, and no folder in it. The module test_modeling_common imports two
mixins from such folders, the tests of generation and of export. They are taken from a checkout of transformers at the
same version, if the environment variable TRANSFORMERS_CHECKOUT names one:

    git clone --depth 1 --branch vVERSION https://github.com/huggingface/transformers CHECKOUT
    TRANSFORMERS_CHECKOUT=CHECKOUT make test-mixins

TRANSFORMERS_CHECKOUT_VERSION names the version of a checkout of another version, whose tests may be of other behavior
than the installed one's. Without a checkout an empty class takes the place of each, and their tests are not run.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
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
    checkout = os.environ.get("TRANSFORMERS_CHECKOUT", "")
    made, wanted = PACKAGE / "version", f"{version} {checkout}".strip()
    if made.is_file() and made.read_text() == wanted:
        return PACKAGE
    if checkout:
        check_version(Path(checkout), os.environ.get("TRANSFORMERS_CHECKOUT_VERSION") or version)
    shutil.rmtree(PACKAGE, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
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
    if checkout:
        for path in sorted((Path(checkout) / "tests").glob("*/*.py")):
            if any(path.match(f"tests/{Path(name).parent}/*.py") for name in STAND_INS):
                write(
                    f"{path.parent.name}/{path.name}",
                    path.read_bytes().replace(b"from tests.", b"from transformers_mixins."),
                )
    for name, mixin in STAND_INS.items():
        if not (PACKAGE / name).exists():
            print(
                f"transformers-{version}.tar.gz has no tests/{name}: the tests of {mixin} are not run (set "
                "TRANSFORMERS_CHECKOUT)"
            )
            write(name, f"class {mixin}:\n    pass\n".encode())
    made.write_text(wanted)
    return PACKAGE


def check_version(checkout: Path, version: str) -> None:
    """Raise SystemExit unless a folder is a checkout of transformers at that version."""
    source = checkout / "src" / "transformers" / "__init__.py"
    if not source.is_file() or f'__version__ = "{version}"' not in source.read_text(encoding="utf-8"):
        raise SystemExit(
            f"TRANSFORMERS_CHECKOUT={checkout} must be a checkout of transformers {version}, the installed version "
            "(or, if it is set, that of "
            "TRANSFORMERS_CHECKOUT_VERSION)"
        )


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
