"""lm-eval's own tasks by name: find them, and check that their data sets are present before a model is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from surgery.core.digests import content_digest
from surgery.core.errors import SurgeryError, suggestion
from surgery.core.files import is_disk_error
from surgery.eval import offline_data as mirror
from surgery.eval.lm_eval.bridge import require_lm_eval, run_tasks
from surgery.eval.local_records import (
    LocalRecords,
    check_documents,
    explain_unreadable,
    read_task_records,
    records_mirror,
)
from surgery.eval.long_context.longbench.prompts import TASKS as LONGBENCH
from surgery.eval.long_context.ruler import TASKS as RULER
from surgery.eval.results.data_read import note_read
from surgery.eval.suite import EvalModel, EvalOptions, Suite, SuiteResult

# Log-Linear Attention, table 6 (arXiv:2506.04761)
ZEROSHOT = ("wikitext", "lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge")
PREFIXES = ("longbench2", "babilong", "infinitebench")  # folders of lm-eval whose tasks are called FOLDER_TASK
TASK_FOLDERS = {
    "lambada_openai": "lambada",
    "arc_easy": "arc",
    "arc_challenge": "arc",
    "boolq": "super_glue/boolq",
    "copa": "super_glue/copa",
}
LM_EVAL_NAMES = {"qa_squad": "qa_1", "qa_hotpot": "qa_2"}  # lm-eval's names, after ruler_
MANAGERS: dict[tuple[str, ...], Any] = {}


def run_zeroshot(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
    """Run the suite `zeroshot`: --tasks, or the seven tasks of Log-Linear Attention, table 6."""
    return run_tasks(eval_model, options.tasks or ZEROSHOT, options, load_tasks)


def run_named(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
    """Run the suite `lm-eval`: the tasks, groups or tags of --tasks, those of --include-path included."""
    named_tasks(options)
    return run_tasks(eval_model, options.tasks, options, load_tasks)


def zeroshot_tasks(options: EvalOptions) -> tuple[str, ...]:
    """Return the tasks of `zeroshot` that are run."""
    return _resolve(options.tasks, options) if options.tasks else ZEROSHOT


def named_tasks(options: EvalOptions) -> tuple[str, ...]:
    """Return the tasks of `lm-eval` that are run; raise SurgeryError without --tasks."""
    if not options.tasks:
        raise SurgeryError("--suite lm-eval needs names of lm-eval tasks. Give for example --tasks boolq,openbookqa.")
    return _resolve(options.tasks, options)


def _resolve(names: Sequence[str], options: EvalOptions) -> tuple[str, ...]:
    """Return the tasks that lm-eval has under these names, of groups and tags their members.

    Raises SurgeryError for an unknown name.
    """
    _check_not_ours(names)
    require_lm_eval()
    manager = _find_manager(names, options)
    members = [str(config.get("task")) for name in names for config in task_configs(manager, name)]
    return tuple(dict.fromkeys([*names, *members]))


def find_lm_eval_suite(name: str) -> Suite | None:
    """Return a suite of one lm-eval task, group or tag; None if lm-eval has none of that name."""
    _check_not_ours([name])
    require_lm_eval()
    if _task_manager([name], None) is None:
        return None

    def run(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
        return run_tasks(eval_model, options.tasks or (name,), options, load_tasks)

    return Suite(name, f"lm-eval's {name}", run, tasks=lambda options: _resolve(options.tasks or (name,), options))


def _check_not_ours(names: Sequence[str]) -> None:
    """Raise SurgeryError for lm-eval's copies of RULER and LongBench.

    They differ from the originals (docs/benchmarks.md), and RULER's also downloads data; our suites replace them.
    """
    for name in names:
        task = name.removeprefix("ruler_")
        task = LM_EVAL_NAMES.get(task, task)
        if task in RULER:
            raise SurgeryError(f"{name} is run by surgery's own suite. Use --suite ruler --tasks {task}.")
        short = name.removeprefix("longbench_").removesuffix("_e")
        if name.startswith("longbench_") and name.endswith("_e") and short in LONGBENCH:
            raise SurgeryError(f"{name} is run by surgery's own suite. Use --suite longbench-e --tasks {short}.")
        if name.startswith("longbench_") and (task := name.removeprefix("longbench_")) in LONGBENCH:
            raise SurgeryError(f"{name} is run by surgery's own suite. Use --suite longbench --tasks {task}.")


def load_tasks(names: Sequence[str], options: EvalOptions) -> dict[str, Any]:
    """Load tasks with their data from the mirror; return {"tasks": {name: task}, "groups": {name: group}}."""
    _check_not_ours(names)
    manager = _find_manager(names, options)
    local = {name: read_task_records(list(task_configs(manager, name)), options) for name in names}
    elsewhere = [name for name in names if not local[name]]
    paths = sorted({path for path, _ in iterate_datasets(manager, elsewhere)})
    if elsewhere:
        mirror.check_datasets(options.data_root, _suite_of(elsewhere), paths, _data_hint(elsewhere))
    manager.metadata = manager._factory._meta = dict(options.metadata)
    mirror.note_datasets(options.data_root, paths)
    note_read("package", "lm_eval")
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}}
    for name in names:  # one Arrow cache per task, shared by all selections that include it
        tasks = (
            _load_local(manager, name, local[name], options) if local[name] else _load(manager, name, options, names)
        )
        loaded = {kind: {**loaded[kind], **tasks[kind]} for kind in loaded}
    return loaded


def _load(manager: Any, name: str, options: EvalOptions, names: Sequence[str]) -> dict[str, Any]:
    """Load a task, or the tasks of a group, with data from the mirror or from Hugging Face's cache. names: of all tasks
    that are loaded.
    """
    paths = sorted({path for path, _ in iterate_datasets(manager, [name])})
    try:
        with mirror.use_mirror(options.data_root, paths, list(find_local_files(manager, [name]))):
            tasks: dict[str, Any] = _load_typed(manager, name, paths) or manager.load([name])
            return tasks
    except Exception as error:
        if isinstance(error, SurgeryError) or is_disk_error(error):
            raise
        where, suite = ", ".join(paths) or "its data", _suite_of(names)
        raise mirror.explain_read_error(
            error, options.data_root, suite, f"{name} of lm-eval: {where}", where, _data_hint([name])
        ) from error


def _load_local(manager: Any, name: str, records: dict[str, LocalRecords], options: EvalOptions) -> dict[str, Any]:
    """Load a task, or the tasks of a group, with local records in place of their data set."""
    configs = list(task_configs(manager, name))
    paths = sorted({config["dataset_path"] for config in configs})
    with records_mirror(configs, records) as root, mirror.use_mirror(root, paths):
        try:
            tasks: dict[str, Any] = manager.load([name])
        except Exception as error:
            if is_disk_error(error):
                raise
            task = str(configs[0]["task"])
            raise explain_unreadable(task, records[task], error) from error
    for task in tasks["tasks"].values():
        check_documents(task, records[task.config.task], options.num_fewshot)
    return tasks


def _data_hint(names: Sequence[str]) -> str:
    return f" Records of a task in a file of your own need neither: --data {names[0]}=FILE.jsonl."


def _suite_of(names: Sequence[str]) -> str:
    """Return the suite, for `surgery fetch-eval-data --suite`, that has all tasks; else the tasks, separated by
    commas.
    """
    if set(names) == set(ZEROSHOT):
        return "zeroshot"
    return next((p for p in PREFIXES if all(name.startswith(p) for name in names)), ",".join(names))


def _load_typed(manager: Any, name: str, paths: Sequence[str]) -> dict[str, Any] | None:
    """Load a task, or the tasks of a group, whose data set needs types of its columns (offline_data.COLUMNS); None if
    it needs none.

    lm-eval 0.4.13 writes the types of InfiniteBench in a form that `datasets` does not read.
    """
    if not paths or not all(path in mirror.COLUMNS for path in paths):
        return None
    from lm_eval.api.task import ConfigurableTask

    tasks = {}
    for config in task_configs(manager, name):
        typed = {**(config.get("dataset_kwargs") or {}), "features": mirror.column_types(config["dataset_path"])}
        metadata = {**(config.get("metadata") or {}), **manager.metadata}
        tasks[config["task"]] = ConfigurableTask(config={**config, "dataset_kwargs": typed, "metadata": metadata})
    return {"tasks": tasks, "groups": {}}


def find_local_files(manager: Any, names: Sequence[str]) -> Iterator[Path]:
    """Yield existing local files that tasks name as `dataset_kwargs: {data_files: ..}`."""
    for name in names:
        for config in task_configs(manager, name):
            told = (config.get("dataset_kwargs") or {}).get("data_files") or ()
            for entry in told.values() if isinstance(told, dict) else [told]:
                for file in [entry] if isinstance(entry, str) else entry:
                    if Path(file).is_file():
                        yield Path(file)


def find_datasets(names: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return (data set, configuration) of tasks, for download; empty if lm-eval does not know one of them."""
    require_lm_eval()
    manager = _task_manager(names, None)
    return sorted(set(iterate_datasets(manager, names)), key=str) if manager is not None else []


def iterate_datasets(manager: Any, names: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield (data set, configuration) that tasks read, without loading them."""
    for name in names:
        for config in task_configs(manager, name):
            of_class = config.get("class")
            path = config.get("dataset_path") or getattr(of_class, "DATASET_PATH", None)
            if path:
                config_name = config.get("dataset_name") or getattr(of_class, "DATASET_NAME", None)
                yield path, None if config_name in ("default", "") else config_name


def task_configs(manager: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the configs of a task, or of all tasks in a group or tag."""
    from lm_eval.tasks._index import Kind
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = manager.task_index.get(name)
    if entry is None:
        return
    if entry.kind is Kind.TAG:  # a tag's entry lists its tasks; a task's entry lists its tags
        for member in sorted(entry.tags):
            yield from task_configs(manager, member)
        return
    config = load_yaml(entry.yaml_path, resolve_func=True) if entry.yaml_path else dict(entry.cfg or {})
    members = config.get("task")
    if isinstance(members, list):
        for member in members:
            if isinstance(member, str):
                yield from task_configs(manager, member)
            elif isinstance(member, dict):
                yield member
                yield from task_configs(manager, member.get("task", "")) if isinstance(member.get("task"), str) else ()
        return
    yield config


def _find_manager(names: Sequence[str], options: EvalOptions) -> Any:
    """Return lm-eval's TaskManager that knows all names.

    Raises SurgeryError for an unknown name, with the nearest one.
    """
    manager = _task_manager(names, options)
    if manager is None:
        known = _full_manager(options).all_tasks
        wrong = next(name for name in names if name not in known)
        raise SurgeryError(f"neither a suite nor a task of lm-eval: {wrong!r}{suggestion(wrong, known)}")
    return manager


def _task_manager(names: Sequence[str], options: EvalOptions | None) -> Any:
    """Return lm-eval's TaskManager that knows all names; None if some name is unknown.

    Indexing all of lm-eval's files takes seconds to a minute. If each name has a folder of its own, only those are
    indexed.
    """
    few = _partial_manager(names, options)
    if few is not None and all(name in few.task_index for name in names):
        return few
    every = _full_manager(options)
    return every if all(name in every.task_index for name in names) else None


def _partial_manager(names: Sequence[str], options: EvalOptions | None) -> Any:
    """Return a TaskManager over the folders named like the tasks; None if a task has no such folder."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    prefixes = {name: next((p for p in PREFIXES if name.startswith(f"{p}_")), name) for name in names}
    folders = {root / TASK_FOLDERS.get(name, prefixes[name]) for name in names}
    if not all(folder.is_dir() for folder in folders):
        return None
    return _build_manager(sorted(map(str, folders)), False, options)


def _full_manager(options: EvalOptions | None) -> Any:
    return _build_manager([], True, options)


def _build_manager(folders: list[str], defaults: bool, options: EvalOptions | None) -> Any:
    """Return a TaskManager over the folders, --include-path included; cached by their content."""
    from lm_eval.tasks import TaskManager

    if options is not None and options.include_path is not None:
        folders = [*folders, os.path.abspath(options.include_path)]
    key = (
        *folders,
        str(defaults),
        "" if options is None or options.include_path is None else content_digest(options.include_path),
    )
    if key not in MANAGERS:
        MANAGERS[key] = TaskManager(include_path=folders or None, include_defaults=defaults)
    return MANAGERS[key]
