"""`surgery fetch-eval-data DIR`: a mirror of the data sets that suites read, from the Hub, for --data-root.

A data set is whole or absent: it is written beside its place and renamed. Nothing of it is run, for `datasets` no longer
loads code; its commit is written down, so that a mirror says what it holds.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from surgery.errors import SurgeryError, nearest
from surgery.eval.harness import mirror
from surgery.eval.harness.long import ESSAYS, HOTPOT, SQUAD
from surgery.eval.harness.longbench import PATH as LONGBENCH
from surgery.eval.harness.longbench_prompts import TASKS as LONG_TASKS
from surgery.eval.harness.names import ZEROSHOT, data_of
from surgery.eval.harness.retrieval import TASKS as CLOZES
from surgery.progress import Progress
from surgery.recipe import read_yaml
from surgery.storage import disk_errors, is_disk

NAME = re.compile(r"^\w[\w.-]*/\w[\w.-]*$")


@dataclass(frozen=True)
class Source:
    """splits: these; empty: all."""

    path: str
    config: str | None = None
    splits: tuple[str, ...] = ()


def sources_of(suites: Sequence[str], tasks: Sequence[str] = ()) -> list[Source]:
    """suites: ours that read data sets, or tasks of lm-eval by name; tasks: of longbench, these only."""
    found: dict[Source, None] = {}
    for suite in suites:
        known = OURS.get(suite)
        each = known(tasks) if known else [Source(*data) for data in data_of([suite])]
        if not each:
            raise SurgeryError(
                f"{suite!r} reads no data set, or is neither a suite nor a task of lm-eval{nearest(suite, OURS)}"
            )
        found |= dict.fromkeys(each)
    return list(found)


def _long(tasks: Sequence[str]) -> list[Source]:
    names = [name for name in LONG_TASKS if name in tasks] if tasks and tuple(tasks) != ("all",) else list(LONG_TASKS)
    return [Source(LONGBENCH, name, ("test",)) for name in names]


OURS: dict[str, Any] = {
    "niah": lambda tasks: [Source(ESSAYS[0], None, ("train",))],
    "ruler": lambda tasks: [Source(path, config, (split,)) for path, config, split in (ESSAYS, SQUAD, HOTPOT)],
    "longbench": _long,
    "retrieval": lambda tasks: [Source(path, None, ("validation",)) for one in CLOZES.values() for path in one.paths],
    "zeroshot": lambda tasks: [Source(*data) for data in data_of(ZEROSHOT)],
}


def fetch(root: Path, sources: Iterable[Source], progress: Progress) -> dict[str, list[str]]:
    """{fetched: [..], kept: [..]}; a data set that is there is kept, unless a configuration is missing."""
    by_path: dict[str, list[Source]] = {}
    for source in sources:
        if not NAME.match(source.path):
            raise SurgeryError(f"{source.path!r} is no data set of the Hub; one is called org/name")
        by_path.setdefault(source.path, []).append(source)
    done: dict[str, list[str]] = {"fetched": [], "kept": []}
    with disk_errors(root), progress.bar("data sets", len(by_path)) as tick:
        root.mkdir(parents=True, exist_ok=True)
        for path, wanted in by_path.items():
            header = _header(root / path)
            missing = [each for each in wanted if (each.config or "default") not in {c["config_name"] for c in header}]
            if missing:
                progress.say(f"{path}: {', '.join(each.config or 'default' for each in missing)}")
                _fetch(root / path, path, header, missing)
            done["fetched" if missing else "kept"].append(path)
            tick()
    return done


def _fetch(place: Path, path: str, header: list[dict[str, Any]], wanted: list[Source]) -> None:
    from huggingface_hub import HfApi

    beside = place.with_name(f"{place.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    if header:
        shutil.copytree(place, beside)
    beside.mkdir(parents=True, exist_ok=True)
    try:
        commit = HfApi().dataset_info(path).sha
        configs = header + [_config(beside, source, commit) for source in wanted]
        written = yaml.safe_dump({"configs": configs}, sort_keys=False, allow_unicode=True)
        text = f"---\n{written}---\n\nFetched by `surgery fetch-eval-data` from {path} at {commit}.\n"
        (beside / "README.md").write_text(text, encoding="utf-8")
        _swapped(beside, place)
    except Exception as error:
        shutil.rmtree(beside, ignore_errors=True)
        if isinstance(error, SurgeryError) or is_disk(error):
            raise
        said = (str(error).strip().splitlines() or [""])[0][:200]
        raise SurgeryError(
            f"{path} could not be fetched ({type(error).__name__}: {said}); what came before it is kept, and the same command "
            "goes on. Data sets that ask for it need `hf auth login` first"
        ) from None


def _swapped(beside: Path, place: Path) -> None:
    """The new one in the place of the old one, which comes back where that fails."""
    before = place.with_name(f"{place.name}.before")
    if not place.exists():
        beside.rename(place)
        return
    place.rename(before)
    try:
        beside.rename(place)
    except BaseException:
        before.rename(place)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _config(folder: Path, source: Source, commit: str | None) -> dict[str, Any]:
    from datasets import get_dataset_split_names, load_dataset

    splits = source.splits or tuple(get_dataset_split_names(source.path, source.config, revision=commit))
    name, files = source.config or "default", []
    inner = re.sub(r"[^\w-]+", "-", name)
    (folder / inner).mkdir(exist_ok=True)
    for split in splits:
        with mirror.without_bars():
            data = load_dataset(source.path, source.config, split=split, revision=commit)
            data.to_json(folder / inner / f"{split}.jsonl", lines=True, force_ascii=False)
        files.append({"split": split, "path": f"{inner}/{split}.jsonl"})
    return {"config_name": name, "data_files": files}


def _header(place: Path) -> list[dict[str, Any]]:
    """What a mirror's README says that it holds."""
    readme = place / "README.md"
    if not readme.is_file():
        return []
    parts = readme.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    try:
        found = read_yaml(parts[1]) if len(parts) == 3 else None
    except ValueError as error:
        raise SurgeryError(f"the head of {readme} is not YAML: {error}; remove {place}, then fetch it again") from None
    configs = found.get("configs", []) if isinstance(found, dict) else []
    if not isinstance(configs, list) or not all(
        isinstance(c, dict) and isinstance(c.get("config_name"), str) for c in configs
    ):
        raise SurgeryError(
            f"the head of {readme} lists no configs, each with a config_name; remove {place}, then fetch it again"
        )
    return configs
