"""`surgery fetch-eval-data DIR`: a mirror of the data sets that suites read, from the Hub, for --data-root.

A data set is whole or absent: it is written beside its place and renamed. Nothing of it is run, for `datasets` no longer
loads code; its commit is written down, so that a mirror says what it holds.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from surgery.core.config import head_of
from surgery.core.errors import SurgeryError, nearest
from surgery.core.files import disk_errors, is_disk, refuse_dangling
from surgery.core.progress import Progress
from surgery.eval import offline_data as mirror
from surgery.eval.long_context import ESSAYS, HOTPOT, SQUAD
from surgery.eval.long_context.longbench import PATH as LONGBENCH
from surgery.eval.long_context.longbench.prompts import TASKS as LONG_TASKS
from surgery.eval.long_context.retrieval import TASKS as CLOZES
from surgery.eval.task_names import ZEROSHOT, data_of

NAME = re.compile(r"^\w[\w.-]*/\w[\w.-]*$")
WHOLE = "surgery_whole"  # in the head of a mirror's README


@dataclass(frozen=True)
class Source:
    """splits: these; empty: all."""

    path: str
    config: str | None = None
    splits: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the configuration."""
        return self.config or "default"


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
    """{fetched: [..], kept: [..]}; a data set that is there is kept, unless a configuration or a split is missing."""
    refuse_dangling(root)
    by_path: dict[str, list[Source]] = {}
    for source in sources:
        if not NAME.match(source.path):
            raise SurgeryError(f"{source.path!r} is no data set of the Hub; one is called org/name")
        by_path.setdefault(source.path, []).append(source)
    done: dict[str, list[str]] = {"fetched": [], "kept": []}
    with disk_errors(root), progress.bar("data sets", len(by_path)) as tick:
        root.mkdir(parents=True, exist_ok=True)
        for path, wanted in by_path.items():
            head = _head(root / path)
            missing = [each for each in _joined(wanted) if head.lacks(each)]
            if missing:
                progress.say(f"{path}: {', '.join(each.name for each in missing)}")
                _fetch(root / path, path, head, missing)
            done["fetched" if missing else "kept"].append(path)
            tick()
    return done


def _joined(sources: list[Source]) -> list[Source]:
    """One of each configuration, with what any of them wants of it."""
    found: dict[str | None, Source] = {}
    for one in sources:
        other = found.get(one.config, one)
        both = tuple(dict.fromkeys((*other.splits, *one.splits))) if other.splits and one.splits else ()
        found[one.config] = replace(one, splits=both)
    return list(found.values())


@dataclass
class Head:
    """What a mirror's README says that it holds. whole: configurations of which it has every split; None: somebody else
    made it, who knows what belongs to it."""

    configs: list[dict[str, Any]]
    whole: list[str] | None

    def files(self, name: str) -> list[dict[str, str]]:
        return next((c["data_files"] for c in self.configs if c["config_name"] == name), [])

    def lacks(self, source: Source) -> bool:
        if self.whole is None:
            return not any(c["config_name"] == source.name for c in self.configs)
        if source.name in self.whole:
            return False
        there = {file["split"] for file in self.files(source.name)}
        return not source.splits or not there.issuperset(source.splits)

    def add(self, source: Source, files: list[dict[str, str]]) -> None:
        others = [c for c in self.configs if c["config_name"] != source.name]
        self.configs = [*others, {"config_name": source.name, "data_files": self.files(source.name) + files}]
        if not source.splits and self.whole is not None:
            self.whole.append(source.name)

    def text(self, path: str, commit: str | None) -> str:
        told = {"configs": self.configs} | ({} if self.whole is None else {WHOLE: self.whole})
        written = yaml.safe_dump(told, sort_keys=False, allow_unicode=True)
        return f"---\n{written}---\n\nFetched by `surgery fetch-eval-data` from {path} at {commit}.\n"


def _fetch(place: Path, path: str, head: Head, wanted: list[Source]) -> None:
    from huggingface_hub import HfApi

    beside = place.with_name(f"{place.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    if head.configs:
        shutil.copytree(place, beside)
    beside.mkdir(parents=True, exist_ok=True)
    try:
        commit = HfApi().dataset_info(path).sha
        for source in wanted:
            head.add(source, _files(beside, source, commit, {file["split"] for file in head.files(source.name)}))
        (beside / "README.md").write_text(head.text(path, commit), encoding="utf-8")
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


def _files(folder: Path, source: Source, commit: str | None, there: set[str]) -> list[dict[str, str]]:
    """What is wanted and not there, written."""
    from datasets import get_dataset_split_names, load_dataset

    folder = folder.absolute()
    with mirror.in_empty_folder():
        splits = source.splits or tuple(
            get_dataset_split_names(source.path, source.config, revision=commit, trust_remote_code=False)
        )
    inner, files = re.sub(r"[^\w-]+", "-", source.name), []
    (folder / inner).mkdir(exist_ok=True)
    for split in (s for s in splits if s not in there):
        with mirror.without_bars(), mirror.in_empty_folder():
            data = load_dataset(source.path, source.config, split=split, revision=commit, trust_remote_code=False)
            data.to_json(folder / inner / f"{split}.jsonl", lines=True, force_ascii=False)
        files.append({"split": split, "path": f"{inner}/{split}.jsonl"})
    return files


def _head(place: Path) -> Head:
    readme = place / "README.md"
    if not readme.is_file():
        return Head([], [])
    try:
        told = head_of(readme.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        raise SurgeryError(f"the head of {readme} is not YAML: {error}; remove {place}, then fetch it again") from None
    configs, whole = told.get("configs", []), told.get(WHOLE)
    if not isinstance(configs, list) or not all(
        isinstance(c, dict) and isinstance(c.get("config_name"), str) for c in configs
    ):
        raise SurgeryError(
            f"the head of {readme} lists no configs, each with a config_name; remove {place}, then fetch it again"
        )
    if whole is not None and not (_are(whole, str) and all(_of_files(c.get("data_files")) for c in configs)):
        raise SurgeryError(
            f"the head of {readme} is not what fetch-eval-data wrote; remove {place}, then fetch it again"
        )
    return Head(configs, whole)


def _are(found: Any, kind: type) -> bool:
    return isinstance(found, list) and all(isinstance(each, kind) for each in found)


def _of_files(found: Any) -> bool:
    return _are(found, dict) and all(isinstance(file.get("split"), str) for file in found)
