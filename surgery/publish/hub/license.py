"""Determine the license of a converted checkpoint: the one given by the user, else that of its source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.checkpoint.source import CheckpointSource
from surgery.core.config import read_front_matter
from surgery.core.errors import SurgeryError, suggestion
from surgery.core.version import __version__
from surgery.publish.hub.files import strip_local_paths

# The identifiers of https://huggingface.co/docs/hub/repositories-licenses; the Hub refuses a model card with any other.
HUB_LICENSES = frozenset(
    [
        "apache-2.0",
        "mit",
        "openrail",
        "bigscience-openrail-m",
        "creativeml-openrail-m",
        "bigscience-bloom-rail-1.0",
        "bigcode-openrail-m",
        "openrail++",
        "deepfloyd-if-license",
        "fair-noncommercial-research-license",
        "intel-research",
        "h-research",
        "apple-ascl",
        "apple-amlr",
        "grok2-community",
        "llama2",
        "llama3",
        "llama3.1",
        "llama3.2",
        "llama3.3",
        "llama4",
        "gemma",
        "openmdw-1.0",
        "afl-3.0",
        "artistic-2.0",
        "bsl-1.0",
        "bsd",
        "bsd-2-clause",
        "bsd-3-clause",
        "bsd-3-clause-clear",
        "c-uda",
        "cc",
        "cc0-1.0",
        "cc-by-2.0",
        "cc-by-2.5",
        "cc-by-3.0",
        "cc-by-4.0",
        "cc-by-sa-3.0",
        "cc-by-sa-4.0",
        "cc-by-nc-2.0",
        "cc-by-nc-3.0",
        "cc-by-nc-4.0",
        "cc-by-nd-4.0",
        "cc-by-nc-nd-3.0",
        "cc-by-nc-nd-4.0",
        "cc-by-nc-sa-2.0",
        "cc-by-nc-sa-3.0",
        "cc-by-nc-sa-4.0",
        "cdla-sharing-1.0",
        "cdla-permissive-1.0",
        "cdla-permissive-2.0",
        "wtfpl",
        "ecl-2.0",
        "epl-1.0",
        "epl-2.0",
        "etalab-2.0",
        "eupl-1.1",
        "eupl-1.2",
        "agpl-3.0",
        "gfdl",
        "gpl",
        "gpl-2.0",
        "gpl-3.0",
        "lgpl",
        "lgpl-2.1",
        "lgpl-3.0",
        "lgpl-lr",
        "isc",
        "lppl-1.3c",
        "ms-pl",
        "mpl-2.0",
        "odc-by",
        "odbl",
        "osl-3.0",
        "postgresql",
        "ofl-1.1",
        "ncsa",
        "unlicense",
        "zlib",
        "pddl",
        "unknown",
        "other",
    ]
)
COMMON_LICENSES = "apache-2.0, mit, llama3.1, gemma, cc-by-4.0, other"


@dataclass(frozen=True)
class License:
    """A license. id: from the Hub's list, or `other` with name and link; origin: where it was found."""

    id: str
    origin: str
    name: str | None = None
    link: str | None = None

    def metadata(self) -> dict[str, str]:
        """Return the license keys of a model card's front matter."""
        fields = {"license": self.id, "license_name": self.name, "license_link": self.link}
        return {key: value for key, value in fields.items() if value is not None}


def find_license(source: CheckpointSource, report: dict[str, Any], choice: str | None, base: str | None) -> License:
    """Return the license given by the user, else that of the source's model card, else the license file next to the
    weights.

    choice: value of --license, or None. base: Hub id of the source, if the user named one.
    Raises SurgeryError if no license is found, or if the Hub does not list the one given.
    """
    if choice is not None:
        if choice not in HUB_LICENSES:
            raise SurgeryError(
                f"--license {choice}: the Hub has no license of that identifier{suggestion(choice, HUB_LICENSES)}. For "
                "a license "
                "that it does not list, use other, and put its text into a file LICENSE beside the weights"
            )
        return License(choice, "given with --license")
    name = base or report["source"]["name"]
    revision = None if base else report["source"].get("revision")
    card = read_local_card(Path(name)) if Path(name).is_dir() else download_hub_card(name, revision)
    if card.get("license"):
        fields = card.get("license_name"), card.get("license_link")
        return License(
            str(card["license"]), f"of {public_name(name)}", *(None if t is None else str(t) for t in fields)
        )
    files = sorted(p.name for p in source.folder.glob("LICENSE*"))
    if files:
        return License("other", f"{files[0]}, which came with {public_name(name)}", "as in the file", files[0])
    raise SurgeryError(
        f"{public_name(name)}, the source of {source.name}, names no license that can be read from here. Its license "
        "also applies "
        f"to a converted model: look it up and pass it, for example --license apache-2.0 (others: {COMMON_LICENSES})."
    )


def public_name(name: str) -> str:
    """Return a Hub id unchanged, and only the last part of a local path."""
    return str(strip_local_paths(name))


def is_hub_id(name: str) -> bool:
    """Return whether `name` looks like a Hub id and is not a local path."""
    return public_name(name) == name and name.count("/") <= 1 and not Path(name).exists()


def read_local_card(folder: Path) -> dict[str, Any]:
    """Return the front matter of README.md in a folder, empty without one."""
    path = folder / "README.md"
    return _parse_front_matter(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else {}


def download_hub_card(name: str, revision: str | None) -> dict[str, Any]:
    """Return the front matter of a model card on the Hub, empty if it cannot be fetched."""
    if not is_hub_id(name):
        return {}
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        path = hf_hub_download(
            name, "README.md", revision=revision, library_name="surgery", library_version=__version__
        )
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError, ValueError):
        return {}
    return _parse_front_matter(Path(path).read_text(encoding="utf-8", errors="replace"))


def _parse_front_matter(text: str) -> dict[str, Any]:
    try:
        return read_front_matter(text)
    except ValueError:
        return {}
