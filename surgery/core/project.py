"""Where the project is published: the repository's address and the package's name. Defined here only.

The metadata of the package (setup.py), generated model cards and the report page follow these constants.
"""

from __future__ import annotations

PACKAGE_NAME = "transformer-surgery"
REPOSITORY_URL: str | None = None  # e.g. "https://host/owner/name"; None: there is no public repository
PACKAGE_IS_PUBLISHED = False  # whether `pip install transformer-surgery` finds a release


def install_command(extra: str = "") -> str:
    """Return how a reader of a model card or message installs surgery: the released package, the repository, or a
    clone. extra: "vllm", "eval".
    """
    if extra:
        return (
            f"pip install '{PACKAGE_NAME}[{extra}]'"
            if PACKAGE_IS_PUBLISHED
            else f"pip install '.[{extra}]' in a clone of surgery"
        )
    if PACKAGE_IS_PUBLISHED:
        return f"pip install {PACKAGE_NAME}"
    if REPOSITORY_URL is not None:
        return f"pip install git+{REPOSITORY_URL}"
    return "pip install .  (in a clone of the source; no package is published)"


def project_link(label: str = "surgery") -> str:
    """Return the project's name as a Markdown link to the repository; without a repository the name alone."""
    return label if REPOSITORY_URL is None else f"[{label}]({REPOSITORY_URL})"


def project_urls() -> dict[str, str]:
    """Return label -> URL for the metadata of the package; empty without a repository."""
    if REPOSITORY_URL is None:
        return {}
    return {
        "Repository": REPOSITORY_URL,
        "Issues": f"{REPOSITORY_URL}/issues",
        "Changelog": f"{REPOSITORY_URL}/blob/main/CHANGELOG.md",
    }
