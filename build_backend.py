"""The build backend: setuptools', with a wheel that registers with transformers, and an editable install by a .pth file.

Every install contains surgery_startup.pth. Python imports the module that it names at every start, and surgery_startup.py says why.
setuptools cannot write a .pth file into a wheel, so it is added to the finished one.

setuptools has three ways to install this layout (kernels/, eval/ and recipes/ are packages inside `surgery`) for
editing. The default is an import hook, which Python asks after the working directory: a script started beside a clone
called "surgery" would import that folder, as an empty namespace package, in place of the package in it. The second, a
tree of links, does not see new files. The third, `compat`, is deprecated. A .pth file puts the checkout on `sys.path`,
where a package comes before a namespace package; surgery/__init__.py finds the other three folders itself.
"""

from __future__ import annotations

import base64
import hashlib
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

STARTUP = {"surgery_startup.pth": b"import surgery_startup\n"}
ROOT = Path(__file__).resolve().parent
WHEEL = "Wheel-Version: 1.0\nGenerator: build_backend\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Write setuptools' wheel with STARTUP. Return its file name."""
    wheel = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    path = Path(wheel_directory, wheel)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    _write_wheel(path, {**files, **STARTUP})
    return wheel


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Write a wheel (PEP 660) of the metadata, STARTUP, and a .pth file naming the checkout. Return the wheel's file name."""
    with tempfile.TemporaryDirectory() as folder:
        info = build_meta.prepare_metadata_for_build_wheel(folder, config_settings)
        files = {
            f"{info}/{path.relative_to(Path(folder, info)).as_posix()}": path.read_bytes()
            for path in sorted(Path(folder, info).rglob("*"))
            if path.is_file()
        }
    release = info.removesuffix(".dist-info")
    # Python reads .pth files in the order of their names, and this one must come before STARTUP.
    files |= {f"__editable__.{release}.pth": f"{ROOT}\n".encode(), **STARTUP, f"{info}/WHEEL": WHEEL.encode()}
    wheel = f"{release}-0.editable-py3-none-any.whl"
    _write_wheel(Path(wheel_directory, wheel), files)
    return wheel


def _write_wheel(path: Path, files: dict[str, bytes]) -> None:
    """Write a wheel of these files, with a new RECORD."""
    record = next(f"{name.removesuffix('WHEEL')}RECORD" for name in files if name.endswith(".dist-info/WHEEL"))
    files = {name: content for name, content in files.items() if name != record}
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def _digest(content: bytes) -> str:
    """SHA-256 as RECORD has it: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
