"""Which files of a converted checkpoint go up: a known set, and nothing else.

A folder that a person has worked in gathers things that are nobody else's business: caches, notes, tokens in a
`.env`. So what goes up is listed by name here, and whatever else lies there is refused rather than left out in silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from surgery.checkpoint import SHIM
from surgery.conversion import REPORT
from surgery.errors import SurgeryError
from surgery.remote_code import named_code
from surgery.source import COPIED, INDEX, Source
from surgery.storage import read_json

CARD = "README.md"
PAGE = "report.html"
WRITTEN = ("config.json", "generation_config.json", INDEX, REPORT, SHIM, CARD, PAGE)
# Beside the weights: healing's log and curve, a kept adapter, what was measured. Samples stay here: they quote data sets.
BESIDE = (
    *("training/log.jsonl", "training/curve.png"),
    *("adapter/adapter_config.json", "adapter/adapter_model.safetensors", "adapter/README.md"),
    *("eval/results.json", "eval/*.png", "eval/table.md"),
)
STAYS = ("eval/*/**", "eval/lock", "training/tensorboard/**", ".cache/huggingface/**", ".gitattributes")
# A token of the Hub, of GitHub, of OpenAI; a key of Amazon, of Google; a private key.
SECRET = re.compile(
    rb"\bhf_[A-Za-z0-9]{30,}|\bgh[pousr]_[A-Za-z0-9]{36}|\bgithub_pat_[A-Za-z0-9_]{60,}|\bsk-[A-Za-z0-9_-]{32,}"
    rb"|\bAKIA[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_-]{35}\b|-----BEGIN [A-Z ]*PRIVATE KEY"
)
LOCAL = re.compile(r"^(?:/|~|\.{1,2}/|[A-Za-z]:[\\/])")


@dataclass(frozen=True)
class Item:
    """`name` in the repository; its bytes are those of `path`, or `text` where we write them."""

    name: str
    path: Path | None = None
    text: str | None = None

    @property
    def nbytes(self) -> int:
        return len(self.text.encode()) if self.text is not None else self.path.stat().st_size  # type: ignore[union-attr]


def items_of(source: Source, measured: Path | None = None) -> list[Item]:
    """What goes up of a checkpoint, sorted by name.

    measured: a folder of `surgery eval --out`, whose table, figures and plots go into eval/; by default OUT/eval.
    Refused: files outside the known set, links that lead out of the folder, texts with a token in them.
    """
    folder = source.folder
    weights = {info.file.name for info in source.tensors.values()}
    code = {"*.py"} if named_code(folder, source.config) else set()
    known = {*WRITTEN, *weights, *COPIED, *BESIDE, *code}
    found: list[Item] = []
    unknown: list[str] = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file() or p.is_symlink()):
        name = path.relative_to(folder).as_posix()
        if matches(name, STAYS):
            continue
        if not matches(name, known):
            unknown.append(name)
            continue
        _stays_inside(path, folder, source.revision)
        found.append(Item(name, path))
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise SurgeryError(
            f"{source.name} holds files that are no part of a checkpoint: {', '.join(unknown[:5])}{more}; move them "
            "elsewhere, then push again (a push takes weights, config, tokenizer, report, card, plots, and nothing else)"
        )
    if measured is not None:
        found = [item for item in found if not item.name.startswith("eval/")] + _measured(measured)
    for item in found:
        _refuse_secrets(item)
    return [_without_local_paths(item) for item in found]


def _measured(folder: Path) -> list[Item]:
    if not (folder / "results.json").is_file():
        raise SurgeryError(f"{folder} has no results.json; `surgery eval OUT --compare SRC --out {folder}` writes one")
    files = [folder / "results.json", folder / "table.md", *sorted(folder.glob("*.png"))]
    return [Item(f"eval/{path.name}", path) for path in files if path.is_file()]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """A pattern has as many parts as the name, or ends in **: all that lies below."""
    path = PurePosixPath(name)
    for pattern in patterns:
        depth = pattern.count("/")
        if pattern.endswith("/**"):
            if len(path.parts) > depth and PurePosixPath(*path.parts[:depth]).match(pattern[:-3]):
                return True
        elif len(path.parts) == depth + 1 and path.match(pattern):
            return True
    return False


def _stays_inside(path: Path, folder: Path, revision: str | None) -> None:
    """The cache of the Hub is made of links; a folder of one's own has none."""
    if path.is_symlink() and revision is None and not path.resolve().is_relative_to(folder.resolve()):
        raise SurgeryError(f"{path} is a link to {path.resolve()}, outside the checkpoint; put the file itself there")


def _refuse_secrets(item: Item) -> None:
    if item.path is None or item.name.endswith((".safetensors", ".png")):
        return
    if found := SECRET.search(item.path.read_bytes()):
        kind = found[0][:3].decode(errors="replace")
        raise SurgeryError(f"{item.name} has what looks like a secret in it ({kind}...); remove it, then push again")


def _without_local_paths(item: Item) -> Item:
    """JSON that we wrote names files as the person who ran the conversion did; only the last part of such a path goes up."""
    if item.name not in (REPORT, "eval/results.json") or item.path is None:
        return item
    data = read_json(item.path)
    cleaned = cleaned_paths(data)
    return item if cleaned == data else Item(item.name, text=json.dumps(cleaned, indent=2) + "\n")


def cleaned_paths(value: Any) -> Any:
    """/home/me/models/llama -> llama, wherever a string of the data is a path of this machine."""
    if isinstance(value, dict):
        return {cleaned_paths(k): cleaned_paths(v) for k, v in value.items()}
    if isinstance(value, list):
        return [cleaned_paths(v) for v in value]
    if isinstance(value, str) and LOCAL.match(value) and "\n" not in value:
        return re.split(r"[\\/]", value.rstrip("\\/"))[-1] or value
    return value
