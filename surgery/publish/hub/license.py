"""Under which licence a converted checkpoint is shared: its source's, and under no other without being told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.checkpoint.source import Source
from surgery.core.config import head_of
from surgery.core.errors import SurgeryError
from surgery.core.version import __version__
from surgery.publish.hub.files import cleaned_paths

LIKELY = "apache-2.0, mit, llama3.1, gemma, cc-by-4.0, other"


@dataclass(frozen=True)
class Licence:
    """`id` of the Hub's list (`other` with a name and a link where it is none of them); `origin` says who named it."""

    id: str
    origin: str
    name: str | None = None
    link: str | None = None

    def metadata(self) -> dict[str, str]:
        told = {"license": self.id, "license_name": self.name, "license_link": self.link}
        return {key: value for key, value in told.items() if value is not None}


def licence_of(source: Source, report: dict[str, Any], given: str | None, base: str | None) -> Licence:
    """What the user says, else what the source's card says, else the licence file that travelled with it.

    base: Hub id of the source where the user names one.
    """
    if given is not None:
        return Licence(given, "given with --license")
    name = base or report["source"]["name"]
    revision = None if base else report["source"].get("revision")
    card = local_card(Path(name)) if Path(name).is_dir() else hub_card(name, revision)
    if card.get("license"):
        told = card.get("license_name"), card.get("license_link")
        return Licence(str(card["license"]), f"of {shown(name)}", *(None if t is None else str(t) for t in told))
    files = sorted(p.name for p in source.folder.glob("LICENSE*"))
    if files:
        return Licence("other", f"{files[0]}, which came with {shown(name)}", "as in the file", files[0])
    raise SurgeryError(
        f"{shown(name)}, which {source.name} was converted from, names no licence that can be read from here; what is "
        f"derived from a model falls under its licence. Look it up and say it: --license apache-2.0 (others: {LIKELY})"
    )


def shown(name: str) -> str:
    """A Hub id as it is; of a path on this machine the last part."""
    return str(cleaned_paths(name))


def is_hub_id(name: str) -> bool:
    return shown(name) == name and name.count("/") <= 1 and not Path(name).exists()


def local_card(folder: Path) -> dict[str, Any]:
    """The head of README.md in a folder; empty where there is none."""
    path = folder / "README.md"
    return _head(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else {}


def hub_card(name: str, revision: str | None) -> dict[str, Any]:
    """The head of a model's card; empty where the Hub cannot be asked."""
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
    return _head(Path(path).read_text(encoding="utf-8", errors="replace"))


def _head(text: str) -> dict[str, Any]:
    try:
        return head_of(text)
    except ValueError:
        return {}
