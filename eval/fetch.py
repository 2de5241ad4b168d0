"""`surgery fetch-eval-data DIR`: download the data sets that suites read from the Hub into a mirror for --data-root.

A data set is complete or absent: it is written to a temporary folder and renamed. No code of the data set runs, because
`datasets` no longer loads any. The README of each data set records its commit.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from surgery.core.config import read_front_matter
from surgery.core.errors import SurgeryError, suggestion
from surgery.core.files import check_not_dangling, explain_disk_errors, is_disk_error
from surgery.core.progress import Progress
from surgery.eval import offline_data as mirror
from surgery.eval.long_context import ESSAYS, HOTPOT, SQUAD
from surgery.eval.long_context.longbench import DATASET as LONGBENCH
from surgery.eval.long_context.longbench.prompts import TASKS as LONG_TASKS
from surgery.eval.long_context.retrieval import TASKS as CLOZES
from surgery.eval.task_names import ZEROSHOT, find_datasets

DATASET_NAME = re.compile(r"^\w[\w.-]*/\w[\w.-]*$")
COMPLETE_KEY = "surgery_whole"  # key in the header of a mirror's README


@dataclass(frozen=True)
class DatasetSource:
    """A data set to download. splits: the splits needed; empty: all."""

    path: str
    config: str | None = None
    splits: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the configuration."""
        return self.config or "default"


def dataset_sources(suites: Sequence[str], tasks: Sequence[str] = ()) -> list[DatasetSource]:
    """Return the data sets that suites read.

    Args:
        suites: our suites that read data sets, or names of lm-eval tasks.
        tasks: restrict longbench to these tasks.
    """
    found: dict[DatasetSource, None] = {}
    for suite in suites:
        known = SUITE_SOURCES.get(suite)
        each = known(tasks) if known else [DatasetSource(*data) for data in find_datasets([suite])]
        if not each:
            raise SurgeryError(
                f"{suite!r} is not a suite or lm-eval task that reads a data set{suggestion(suite, SUITE_SOURCES)}"
            )
        found |= dict.fromkeys(each)
    return list(found)


def _longbench_sources(tasks: Sequence[str]) -> list[DatasetSource]:
    names = [name for name in LONG_TASKS if name in tasks] if tasks and tuple(tasks) != ("all",) else list(LONG_TASKS)
    return [DatasetSource(LONGBENCH, name, ("test",)) for name in names]


SUITE_SOURCES: dict[str, Any] = {
    "niah": lambda tasks: [DatasetSource(ESSAYS[0], None, ("train",))],
    "ruler": lambda tasks: [DatasetSource(path, config, (split,)) for path, config, split in (ESSAYS, SQUAD, HOTPOT)],
    "longbench": _longbench_sources,
    "retrieval": lambda tasks: [
        DatasetSource(path, None, ("validation",)) for one in CLOZES.values() for path in one.paths
    ],
    "zeroshot": lambda tasks: [DatasetSource(*data) for data in find_datasets(ZEROSHOT)],
}


def fetch(root: Path, sources: Iterable[DatasetSource], progress: Progress) -> dict[str, list[str]]:
    """Download data sets into the mirror `root`; return {"fetched": [..], "kept": [..]}.

    A data set that is present is kept unless a configuration or a split is missing.
    """
    check_not_dangling(root)
    by_path: dict[str, list[DatasetSource]] = {}
    for source in sources:
        if not DATASET_NAME.match(source.path):
            raise SurgeryError(f"{source.path!r} is not the name of a Hub data set. Write it as org/name.")
        by_path.setdefault(source.path, []).append(source)
    done: dict[str, list[str]] = {"fetched": [], "kept": []}
    with explain_disk_errors(root), progress.bar("data sets", len(by_path)) as tick:
        root.mkdir(parents=True, exist_ok=True)
        for path, wanted in by_path.items():
            head = _read_readme(root / path)
            missing = [each for each in _merge_sources(wanted) if head.lacks(each)]
            if missing:
                progress.say(f"{path}: {', '.join(each.name for each in missing)}")
                _fetch_dataset(root / path, path, head, missing)
            done["fetched" if missing else "kept"].append(path)
            tick()
    return done


def _merge_sources(sources: list[DatasetSource]) -> list[DatasetSource]:
    """Merge sources of one data set so that each configuration appears once, with the union of the splits."""
    found: dict[str | None, DatasetSource] = {}
    for one in sources:
        other = found.get(one.config, one)
        both = tuple(dict.fromkeys((*other.splits, *one.splits))) if other.splits and one.splits else ()
        found[one.config] = replace(one, splits=both)
    return list(found.values())


@dataclass
class MirrorReadme:
    """Content list of a mirrored data set, from the header of its README.

    Attributes:
        configs: configurations and their files.
        complete: configurations of which every split is present; None: the mirror was made by other means and is taken as it is.
    """

    configs: list[dict[str, Any]]
    complete: list[str] | None

    def files(self, name: str) -> list[dict[str, str]]:
        """Return the files of a configuration."""
        return next((c["data_files"] for c in self.configs if c["config_name"] == name), [])

    def lacks(self, source: DatasetSource) -> bool:
        """Return whether a configuration or split of the source is missing."""
        if self.complete is None:
            return not any(c["config_name"] == source.name for c in self.configs)
        if source.name in self.complete:
            return False
        there = {file["split"] for file in self.files(source.name)}
        return not source.splits or not there.issuperset(source.splits)

    def add(self, source: DatasetSource, files: list[dict[str, str]]) -> None:
        """Add files of a configuration."""
        others = [c for c in self.configs if c["config_name"] != source.name]
        self.configs = [*others, {"config_name": source.name, "data_files": self.files(source.name) + files}]
        if not source.splits and self.complete is not None:
            self.complete.append(source.name)

    def text(self, path: str, commit: str | None) -> str:
        """Return the README's text."""
        header = {"configs": self.configs} | ({} if self.complete is None else {COMPLETE_KEY: self.complete})
        written = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
        return f"---\n{written}---\n\nFetched by `surgery fetch-eval-data` from {path} at {commit}.\n"


def _fetch_dataset(place: Path, path: str, head: MirrorReadme, wanted: list[DatasetSource]) -> None:
    from huggingface_hub import HfApi

    partial = place.with_name(f"{place.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    if head.configs:
        shutil.copytree(place, partial)
    partial.mkdir(parents=True, exist_ok=True)
    try:
        commit = HfApi().dataset_info(path).sha
        for source in wanted:
            head.add(
                source, _write_splits(partial, source, commit, {file["split"] for file in head.files(source.name)})
            )
        (partial / "README.md").write_text(head.text(path, commit), encoding="utf-8")
        _replace_folder(partial, place)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, SurgeryError) or is_disk_error(error):
            raise
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise SurgeryError(
            f"{path} could not be fetched ({type(error).__name__}: {reason}). Data sets fetched before it are kept; run the same "
            "command again to continue. Gated data sets need `hf auth login` first."
        ) from None


def _replace_folder(partial: Path, place: Path) -> None:
    """Rename `partial` to `place`; if that fails, restore the old folder."""
    before = place.with_name(f"{place.name}.before")
    if not place.exists():
        partial.rename(place)
        return
    place.rename(before)
    try:
        partial.rename(place)
    except BaseException:
        before.rename(place)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _write_splits(folder: Path, source: DatasetSource, commit: str | None, there: set[str]) -> list[dict[str, str]]:
    """Download the wanted splits that are missing; return their entries for the README."""
    from datasets import get_dataset_split_names, load_dataset

    folder = folder.absolute()
    with mirror.use_empty_folder():
        splits = source.splits or tuple(
            get_dataset_split_names(source.path, source.config, revision=commit, trust_remote_code=False)
        )
    inner, files = re.sub(r"[^\w-]+", "-", source.name), []
    (folder / inner).mkdir(exist_ok=True)
    for split in (s for s in splits if s not in there):
        with mirror.hide_progress_bars(), mirror.use_empty_folder():
            data = load_dataset(source.path, source.config, split=split, revision=commit, trust_remote_code=False)
            data.to_json(folder / inner / f"{split}.jsonl", lines=True, force_ascii=False)
        files.append({"split": split, "path": f"{inner}/{split}.jsonl"})
    return files


def _read_readme(place: Path) -> MirrorReadme:
    readme = place / "README.md"
    if not readme.is_file():
        return MirrorReadme([], [])
    try:
        header = read_front_matter(readme.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        raise SurgeryError(
            f"the header of {readme} is not YAML: {error}. Remove {place}, then fetch it again."
        ) from None
    configs, whole = header.get("configs", []), header.get(COMPLETE_KEY)
    if not isinstance(configs, list) or not all(
        isinstance(c, dict) and isinstance(c.get("config_name"), str) for c in configs
    ):
        raise SurgeryError(
            f"the header of {readme} must list configs, each with a config_name. Remove {place}, then fetch it again."
        )
    if whole is not None and not (_is_list_of(whole, str) and all(_is_file_list(c.get("data_files")) for c in configs)):
        raise SurgeryError(
            f"the header of {readme} is not the one that fetch-eval-data wrote. Remove {place}, then fetch it again."
        )
    return MirrorReadme(configs, whole)


def _is_list_of(found: Any, kind: type) -> bool:
    return isinstance(found, list) and all(isinstance(each, kind) for each in found)


def _is_file_list(found: Any) -> bool:
    return _is_list_of(found, dict) and all(isinstance(file.get("split"), str) for file in found)
