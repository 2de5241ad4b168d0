"""The build backend: setuptools', with a wheel that registers with transformers, and an editable install by a .pth
file.

Every install contains surgery_startup.pth. Python imports the module that it names at every start, and
surgery_startup.py says why. setuptools cannot write a .pth file into a wheel, so it is added to the finished one.

setuptools has three ways to install this layout (kernels/, eval/ and recipes/ are packages inside `surgery`) for
editing. The default is an import hook, which Python asks after the working directory: a script started beside a clone
called "surgery" would import that folder, as an empty namespace package, in place of the package in it. The second, a
tree of links, does not see new files. The third, `compat`, is deprecated. A .pth file puts the checkout on `sys.path`,
where a package comes before a namespace package; surgery/__init__.py finds the other three folders itself.

Wheels and source distributions are reproducible: the same files give the same bytes. Members are sorted, with the time
of SOURCE_DATE_EPOCH (default: 1980-01-01, the first that zip files can store) and without owners.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

STARTUP = {"surgery_startup.pth": b"import surgery_startup\n"}
ROOT = Path(__file__).resolve().parent
EARLIEST = 315_532_800  # 1980-01-01 in seconds since 1970
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


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    """Write setuptools' source distribution with normalized times, owners, modes and order. Return its file name."""
    sdist = build_meta.build_sdist(sdist_directory, config_settings)
    path = Path(sdist_directory, sdist)
    with tarfile.open(path) as archive:
        members = {member.name: (member, _content(archive, member)) for member in archive.getmembers()}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(members):
            member, content = members[name]
            archive.addfile(_normalized(member), io.BytesIO(content))
    with path.open("wb") as file, gzip.GzipFile("", "wb", mtime=_build_time(), fileobj=file) as packed:
        packed.write(buffer.getvalue())
    return sdist


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member) if member.isfile() else None
    return b"" if file is None else file.read()


def _normalized(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member with the build's time, no owner, and mode 755 (folders, executables) or 644."""
    made = tarfile.TarInfo(member.name)
    made.type, made.linkname, made.size, made.mtime = member.type, member.linkname, member.size, _build_time()
    made.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return made


def _build_time() -> int:
    """Return the time of all members, in seconds since 1970: SOURCE_DATE_EPOCH, at least 1980-01-01."""
    return max(EARLIEST, int(os.environ.get("SOURCE_DATE_EPOCH", EARLIEST)))


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Write a wheel (PEP 660) of the metadata, STARTUP, and a .pth file naming the checkout.

    Return the wheel's file name.
    """
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
    files = {name: files[name] for name in sorted(files) if name != record}
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            member = zipfile.ZipInfo(name, time.gmtime(_build_time())[:6])
            member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            member.create_system = 3  # Unix, also if built elsewhere
            archive.writestr(member, content)


def _digest(content: bytes) -> str:
    """SHA-256 as RECORD has it: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
