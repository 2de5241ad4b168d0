"""`surgery fetch-eval-data DIR`: download the data sets that suites read from the Hub into a mirror for --data-root.

A data set is complete or absent: it is written to a temporary folder and renamed. No code of the data set runs, because
`datasets` no longer loads any. All files of a data set are of one commit, which its README records: configurations and
splits that are added later come from the same commit. DIR/commits.json lists the commits of all data sets; given as
`commits`, it makes the same mirror elsewhere.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from surgery.core.config import read_front_matter
from surgery.core.errors import SurgeryError, suggestion
from surgery.core.files import check_not_dangling, explain_disk_errors, is_disk_error, read_json, write_json
from surgery.core.hub_errors import explain_hub_error, first_line, hub_failure
from surgery.core.progress import Progress
from surgery.eval import offline_data as mirror
from surgery.eval.averages import BABILONG_TASKS, INFINITEBENCH_TASKS, LONGBENCH2, LONGBENCH_E_TASKS
from surgery.eval.document_suites import BABILONG, BABILONG_LENGTHS, BABILONG_SHORT, INFINITEBENCH
from surgery.eval.long_context import ESSAYS, HOTPOT, SQUAD
from surgery.eval.long_context.longbench import DATASET as LONGBENCH
from surgery.eval.long_context.longbench.prompts import TASKS as LONG_TASKS
from surgery.eval.long_context.retrieval import TASKS as CLOZES
from surgery.eval.results.data_read import mirror_commit
from surgery.eval.task_names import ZEROSHOT, find_datasets

DATASET_NAME = re.compile(r"^\w[\w.-]*/\w[\w.-]*$")
COMMIT = re.compile(r"^[0-9a-f]{40}$")
COMMITS = "commits.json"
COMMIT_KEY = "surgery_commit"  # keys in the header of a mirror's README
COMPLETE_KEY = "surgery_whole"
# Data sets published as loading scripts, which `datasets` no longer runs, and the copies without code that lm-eval
# 0.4.13 reads.
SCRIPT_ONLY = {
    "THUDM/LongBench": "Xnhyacinth/LongBench",
    "ybisk/piqa": "baber/piqa",
    "allenai/social_i_qa": "lighteval/siqa",
    "ErnestSDavis/winograd_wsc": "lighteval/winograd_wsc",
}


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
        tasks: restrict longbench, longbench-e, longbench2 and babilong to these tasks.
    """
    sources: dict[DatasetSource, None] = {}
    for suite in suites:
        known = SUITE_SOURCES.get(suite)
        suite_sources = known(tasks) if known else [DatasetSource(*data) for data in find_datasets([suite])]
        if not suite_sources:
            raise SurgeryError(
                f"{suite!r} is not a suite or lm-eval task that reads a data set{suggestion(suite, SUITE_SOURCES)}"
            )
        sources |= dict.fromkeys(suite_sources)
    return list(sources)


def _longbench_sources(tasks: Sequence[str]) -> list[DatasetSource]:
    names = [name for name in LONG_TASKS if name in tasks] if tasks and tuple(tasks) != ("all",) else list(LONG_TASKS)
    return [DatasetSource(LONGBENCH, name, ("test",)) for name in names]


def _longbench_e_sources(tasks: Sequence[str]) -> list[DatasetSource]:
    names = [name for name in LONGBENCH_E_TASKS if not tasks or name in tasks]
    return [DatasetSource(LONGBENCH, f"{name}_e", ("test",)) for name in names]


def _longbench2_sources(tasks: Sequence[str]) -> list[DatasetSource]:
    names = [name for group in LONGBENCH2.values() for name in group if not tasks or name in tasks]
    return [
        DatasetSource(path, config, ("train",)) for path, config in find_datasets([f"longbench2_{n}" for n in names])
    ]


def _babilong_sources(tasks: Sequence[str]) -> list[DatasetSource]:
    long = tuple(name for name in BABILONG_TASKS if not tasks or name in tasks)
    every = tuple(name for name in (*BABILONG_TASKS, *BABILONG_SHORT) if not tasks or name in tasks)
    sources = [DatasetSource(BABILONG, "0k", every)] if every else []
    return sources + [DatasetSource(BABILONG, config, long) for config in BABILONG_LENGTHS.values() if long]


SUITE_SOURCES: dict[str, Any] = {
    "niah": lambda tasks: [DatasetSource(ESSAYS[0], None, ("train",))],
    "ruler": lambda tasks: [DatasetSource(path, config, (split,)) for path, config, split in (ESSAYS, SQUAD, HOTPOT)],
    "longbench": _longbench_sources,
    "longbench-e": _longbench_e_sources,
    "longbench2": _longbench2_sources,
    "babilong": _babilong_sources,
    "infinitebench": lambda tasks: [DatasetSource(INFINITEBENCH, None, INFINITEBENCH_TASKS)],
    "retrieval": lambda tasks: [
        DatasetSource(path, None, ("validation",)) for one in CLOZES.values() for path in one.paths
    ],
    "zeroshot": lambda tasks: [DatasetSource(*data) for data in find_datasets(ZEROSHOT)],
}


def read_commits(path: Path) -> dict[str, str]:
    """Read a file of commits, {"org/name": commit}.

    Raises SurgeryError unless every commit has forty hexadecimal digits.
    """
    commits = read_json(path)
    if not isinstance(commits, dict) or not all(isinstance(c, str) and COMMIT.match(c) for c in commits.values()):
        raise SurgeryError(
            f"{path} must be a JSON object of data sets and their commits, forty hexadecimal digits each. Give the "
            f"{COMMITS} of a mirror."
        )
    return commits


def fetch(
    root: Path, sources: Iterable[DatasetSource], progress: Progress, commits: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """Download data sets into the mirror `root`; return {"fetched": [..], "kept": [..]}.

    A data set that is present is kept unless a configuration or a split is missing; those come from the commit of the
    others. commits: the commits to download; a data set that they do not name is downloaded at its newest commit.
    Raises SurgeryError if the mirror has another commit than `commits` says.
    """
    check_not_dangling(root)
    pinned = dict(commits or {})
    by_path: dict[str, list[DatasetSource]] = {}
    for source in sources:
        if not DATASET_NAME.match(source.path):
            raise SurgeryError(f"{source.path!r} is not the name of a Hub data set. Write it as org/name.")
        by_path.setdefault(source.path, []).append(source)
    done: dict[str, list[str]] = {"fetched": [], "kept": []}
    with explain_disk_errors(root), progress.bar("data sets", len(by_path)) as tick:
        root.mkdir(parents=True, exist_ok=True)
        for path, named in by_path.items():
            head = _read_readme(root / path)
            if path in pinned and head.configs and head.commit != pinned[path]:
                raise SurgeryError(
                    f"{root / path} is of commit {head.commit or 'unknown'}, not {pinned[path]}. Remove that folder, "
                    "or fetch into another."
                )
            missing = [lacking for lacking in _merge_sources(named) if head.lacks(lacking)]
            if missing:
                progress.say(f"{path}: {', '.join(lacking.name for lacking in missing)}")
                _fetch_dataset(root / path, path, head, missing, pinned.get(path))
            done["fetched" if missing else "kept"].append(path)
            tick()
        write_commits(root)
    return done


def write_commits(root: Path) -> None:
    """Write commits.json, the commits of all data sets of the mirror."""
    write_json(root / COMMITS, _all_commits(root))


def _all_commits(root: Path) -> dict[str, str]:
    """Return the commits of all data sets of a mirror whose README names one; users may have added others."""
    commits = {}
    for readme in sorted(root.glob("*/*/README.md")):
        with suppress(SurgeryError):
            if commit := _read_readme(readme.parent).commit:
                commits[readme.parent.relative_to(root).as_posix()] = commit
    return commits


def _merge_sources(sources: list[DatasetSource]) -> list[DatasetSource]:
    """Merge sources of one data set so that each configuration appears once, with the union of the splits."""
    merged: dict[str | None, DatasetSource] = {}
    for one in sources:
        other = merged.get(one.config, one)
        both = tuple(dict.fromkeys((*other.splits, *one.splits))) if other.splits and one.splits else ()
        merged[one.config] = replace(one, splits=both)
    return list(merged.values())


@dataclass
class MirrorReadme:
    """Content list of a mirrored data set, from the header of its README.

    Attributes:
        configs: configurations and their files.
        complete: configurations of which every split is present; None: the mirror was made by other means and is taken
            as it is.
        commit: the Hub's commit of all files; None if unknown.
    """

    configs: list[dict[str, Any]]
    complete: list[str] | None
    commit: str | None = None

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
        header: dict[str, Any] = {"configs": self.configs}
        header |= {} if self.complete is None else {COMPLETE_KEY: self.complete}
        header |= {} if commit is None else {COMMIT_KEY: commit}
        written = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
        return f"---\n{written}---\n\nFetched by `surgery fetch-eval-data` from {path} at {commit}.\n"


def _fetch_dataset(
    folder: Path, path: str, head: MirrorReadme, lacking: list[DatasetSource], commit: str | None
) -> None:
    """Add configurations and splits to a mirrored data set. commit: None takes the mirror's own, else the newest."""
    from huggingface_hub import HfApi

    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    if head.configs:
        shutil.copytree(folder, partial)
    partial.mkdir(parents=True, exist_ok=True)
    try:
        commit = commit or head.commit or HfApi().dataset_info(path).sha
        for source in lacking:
            head.add(
                source, _write_splits(partial, source, commit, {file["split"] for file in head.files(source.name)})
            )
        (partial / "README.md").write_text(head.text(path, commit), encoding="utf-8")
        replace_folder(partial, folder)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, SurgeryError) or is_disk_error(error):
            raise
        if "scripts are no longer supported" in first_line(error):
            raise SurgeryError(_script_message(path)) from None
        reason = _explain_fetch_error(error, path) or f"{type(error).__name__}: {first_line(error)}"
        raise SurgeryError(
            f"{path} could not be fetched ({reason}). Data sets fetched before it are kept; run the same "
            "command again to continue. Gated data sets need `hf auth login` first."
        ) from None


def _explain_fetch_error(error: Exception, path: str) -> str | None:
    """Return why the Hub could not be read, where a name alone would leave the reader to guess; None for the error's
    own words.
    """
    if hub_failure(error) == "offline":
        return "HF_HUB_OFFLINE is set; unset it to download"
    if hub_failure(error) in ("missing", "gated"):
        return explain_hub_error(error, path, "", kinds=("a mirrored data set", "a Hub data set"))
    return None


def _script_message(path: str) -> str:
    """Return why a data set that is a loading script cannot be fetched, and where its copy is, if one is known."""
    copy = SCRIPT_ONLY.get(path)
    what = f"{path} is published as a loading script, which `datasets` no longer runs. "
    if copy is not None:
        return what + f"lm-eval reads the copy {copy}: name that one in the task's dataset_path."
    return what + (
        "Write its records as JSON lines into the mirror yourself, with a README.md that lists them, as in "
        "docs/benchmarks.md."
    )


def replace_folder(partial: Path, folder: Path) -> None:
    """Rename `partial` to `folder`; if that fails, restore the old folder."""
    before = folder.with_name(f"{folder.name}.before")
    if not folder.exists():
        partial.rename(folder)
        return
    folder.rename(before)
    try:
        partial.rename(folder)
    except BaseException:
        before.rename(folder)
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
            types = {"features": mirror.column_types(source.path)} if source.path in mirror.COLUMNS else {}
            data = load_dataset(
                source.path, source.config, split=split, revision=commit, trust_remote_code=False, **types
            )
            data.to_json(folder / inner / f"{split}.jsonl", lines=True, force_ascii=False)
        files.append({"split": split, "path": f"{inner}/{split}.jsonl"})
    return files


def _read_readme(folder: Path) -> MirrorReadme:
    readme = folder / "README.md"
    if not readme.is_file():
        return MirrorReadme([], [])
    try:
        header = read_front_matter(readme.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        raise SurgeryError(
            f"the header of {readme} is not YAML: {error}. Remove {folder}, then fetch it again."
        ) from None
    configs, whole = header.get("configs", []), header.get(COMPLETE_KEY)
    if not isinstance(configs, list) or not all(
        isinstance(c, dict) and isinstance(c.get("config_name"), str) for c in configs
    ):
        raise SurgeryError(
            f"the header of {readme} must list configs, each with a config_name. Remove {folder}, then fetch it again."
        )
    if whole is not None and not (_is_list_of(whole, str) and all(_is_file_list(c.get("data_files")) for c in configs)):
        raise SurgeryError(
            f"the header of {readme} is not the one that fetch-eval-data wrote. Remove {folder}, then fetch it again."
        )
    commit = header.get(COMMIT_KEY) or mirror_commit(folder)
    return MirrorReadme(configs, whole, commit if isinstance(commit, str) else None)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _is_file_list(files: Any) -> bool:
    return _is_list_of(files, dict) and all(isinstance(file.get("split"), str) for file in files)
