"""The build backend: setuptools', with an editable install that is one line in a .pth file.

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

from setuptools.build_meta import *  # noqa: F403
from setuptools.build_meta import prepare_metadata_for_build_wheel

ROOT = Path(__file__).resolve().parent
WHEEL = "Wheel-Version: 1.0\nGenerator: build_backend\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Write a wheel (PEP 660) of the metadata and a .pth file naming the checkout. Return the wheel's file name."""
    with tempfile.TemporaryDirectory() as folder:
        info = prepare_metadata_for_build_wheel(folder, config_settings)
        files = {
            f"{info}/{path.relative_to(Path(folder, info)).as_posix()}": path.read_bytes()
            for path in sorted(Path(folder, info).rglob("*"))
            if path.is_file()
        }
    release = info.removesuffix(".dist-info")
    files[f"__editable__.{release}.pth"] = f"{ROOT}\n".encode()
    files[f"{info}/WHEEL"] = WHEEL.encode()
    record = f"{info}/RECORD"
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    wheel = f"{release}-0.editable-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory, wheel), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


def _digest(content: bytes) -> str:
    """SHA-256 as RECORD has it: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
