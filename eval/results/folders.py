"""Read finished results, folders of `surgery eval --out`, which someone else may have written.

Everything is checked: only regular files below the folders are read, up to a size; every line has the type that
`surgery eval` writes; names are plain text; numbers that become axes are finite. A suite's result that breaks a rule is
left out, and a sentence names the file and the rule.
"""

from __future__ import annotations

import math
import stat
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.core.files import read_json
from surgery.eval.results.store import ARRAYS, RESULT, SAMPLES, StoredResult, read_samples, read_stored_result
from surgery.eval.suite import SuiteResult
from surgery.planning.recipe import FrontRecipe
from surgery.publish.figures import SIZES
from surgery.publish.front import check_front

RESULTS, COMPARISON = "results.json", "comparison.json"
MAX_BYTES = {RESULT: 2**28, SAMPLES: 2**32, ARRAYS: 2**30, RESULTS: 2**28, COMPARISON: 2**28}
MAX_WHY = 500  # characters of a reason that quotes a file
MAX_NAME = 300  # characters of a name of a task, metric or group
AXES = ("length", "depth", "position")  # groups that are axes of figures
KEY_TYPES = {"fingerprint": str, "suite": str, "options": str, "device": str, "dtype": str, "surgery": str}


@dataclass
class StoredSuite:
    """The result of a suite of one model. key: what it depends on, see `store.result_key`."""

    key: dict[str, Any]
    result: SuiteResult
    place: Path

    @property
    def version(self) -> int:
        """Version of the suite."""
        return int(self.key.get("version", 1))


@dataclass
class StoredModel:
    """A model with finished results.

    Attributes:
        name: unique among the models that are compared.
        parameters, stored_bytes, cache_bytes, kept: number of stored parameters, bytes of the stored tensors, bytes in
            the cache of one sequence, and share of the parameters of replaced matrices that is stored; None if its
            results do not say.
        front: of the search that its recipe was chosen from; None if its results have none.
        healed: whether it was trained after the conversion; None if its results do not say.
        suites: by name.
    """

    name: str
    fingerprint: str
    dtype: str
    parameters: int | None = None
    stored_bytes: int | None = None
    cache_bytes: int | None = None
    kept: float | None = None
    front: FrontRecipe | None = None
    healed: bool | None = None
    suites: dict[str, StoredSuite] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """What identifies a model: its content, and the precision it ran in."""
        return self.fingerprint, self.dtype

    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the model, None where its results do not say."""
        return {name: getattr(self, name) for name in (*SIZES, "kept")}

    def to_dict(self) -> dict[str, Any]:
        """Return the model as JSON data, without its results."""
        return {"name": self.name, "fingerprint": self.fingerprint, "dtype": self.dtype, **self.sizes()}

    def take_sizes(self, sizes: dict[str, Any]) -> None:
        """Set the sizes that are not known yet."""
        for name, size in sizes.items():
            if getattr(self, name) is None:
                setattr(self, name, size)


def read_models(folders: Sequence[Path]) -> tuple[list[StoredModel], list[str]]:
    """Return the models of all folders, and the results that are left out because they break a rule, one sentence each.

    Each model is returned once: its results in several folders are put together. A folder is one of `surgery eval
    --out`, with all models in it, or one model's folder in it. Raises SurgeryError for a folder without results.
    """
    models_by_key: dict[tuple[str, str], StoredModel] = {}
    damaged: dict[str, None] = {}
    for folder in folders:
        for model_folder in model_folders(folder):
            models, broken = _read_model(model_folder)
            damaged |= dict.fromkeys(broken)
            for model in models:
                known = models_by_key.setdefault(model.key, model)
                for suite, stored in model.suites.items():
                    known.suites.setdefault(suite, stored)
                known.take_sizes(model.sizes())
                known.front = known.front or model.front
                known.healed = model.healed if known.healed is None else known.healed
    models = list(models_by_key.values())
    _make_names_unique(models)
    return models, list(damaged)


def model_folders(folder: Path) -> list[Path]:
    """Return the folders of models in a results folder, or the folder itself if it is one.

    Raises SurgeryError without any.
    """
    if not folder.is_dir():
        raise SurgeryError(f"{folder} is not a folder. Give a folder that `surgery eval MODEL --out DIR` wrote.")
    if _suite_folders(folder):
        return [folder]
    folders_with_results = [
        subfolder for subfolder in sorted(folder.iterdir()) if _is_folder(subfolder) and _suite_folders(subfolder)
    ]
    if not folders_with_results:
        _check_summaries(folder)
        raise SurgeryError(f"{folder} has no results. Write them with `surgery eval MODEL --out {folder}`.")
    return folders_with_results


def _check_summaries(folder: Path) -> None:
    """Raise SurgeryError for a results.json or comparison.json that is damaged, or that lies there without the folders
    of models.
    """
    for name in (RESULTS, COMPARISON):
        if (folder / name).exists() or (folder / name).is_symlink():
            _read_summary(folder / name, name)
            raise SurgeryError(
                f"{folder} has a {name}, but no folder of a model with the {RESULT} of its suites, which `surgery compare` "
                "reads. Give the whole folder that `surgery eval MODEL --out DIR` wrote."
            )


def _read_summary(path: Path, name: str) -> dict[str, Any]:
    """Return what a results.json or comparison.json holds. Raises SurgeryError unless it is a JSON object."""
    check_file(path, name)
    read = read_json(path)
    if not isinstance(read, dict):
        raise SurgeryError(
            f"{path} must hold a JSON object, as `surgery eval` and `surgery compare` write it (got a "
            f"{type(read).__name__}). Write it again with the same command, or remove it."
        )
    return read


def named_base(folders: Sequence[Path]) -> tuple[str | None, list[str]]:
    """Return the fingerprint of the model that all folders' results.json or comparison.json name as their base, and why
    files are left out.

    The fingerprint is None unless exactly one is named.
    """
    fingerprints: set[str | None] = set()
    damaged = []
    for folder in folders:
        try:
            fingerprints.add(_role_fingerprint(folder, "base"))
        except SurgeryError as error:
            damaged.append(
                f"which model is the base is not read from {printable(folder.name)}: {printable(str(error))}"
            )
    fingerprints -= {None}
    return (fingerprints.pop() if len(fingerprints) == 1 else None), damaged


def base_of_folder(folder: Path) -> str:
    """Return the fingerprint of the model that `--base FOLDER` means: the only one in it, or the one that it was
    written for.
    """
    read = [_read_model(model_folder) for model_folder in model_folders(folder)]
    models = {model.fingerprint for stored, _ in read for model in stored}
    if len(models) == 1:
        return models.pop()
    if damaged := [why for _, broken in read for why in broken if not models]:
        raise SurgeryError(f"--base {folder} has no result that can be read. {' '.join(damaged)}")
    if (meant := _role_fingerprint(folder, "converted")) in models and meant is not None:
        return meant
    raise SurgeryError(f"--base {folder} has {len(models)} models. Give the folder of one of them, a subfolder of it.")


def _role_fingerprint(folder: Path, role: str) -> str | None:
    """Return the fingerprint of a role's model in results.json, or of the base in comparison.json; None if neither
    says.
    """
    for name in (RESULTS, COMPARISON):
        path = folder / name
        if not path.exists():
            continue
        read = _read_summary(path, name)
        try:
            models = read["models"]
            if name == COMPARISON:
                named = [m for m in models if m["name"] == read["base"]] if role == "base" else []
                models = {role: named[0]} if named else {}
            fingerprint = models[role]["fingerprint"]
        except (KeyError, TypeError, IndexError):
            continue
        if isinstance(fingerprint, str):
            return fingerprint
    return None


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not path.name.startswith(".")


def _suite_folders(model_folder: Path) -> list[Path]:
    return [
        subfolder
        for subfolder in sorted(model_folder.iterdir())
        if _is_folder(subfolder) and (subfolder / RESULT).exists()
    ]


def _read_model(model_folder: Path) -> tuple[list[StoredModel], list[str]]:
    """Return the model of a folder, several if its suites were measured in several precisions; and why suites are left
    out.
    """
    models: dict[tuple[str, str], StoredModel] = {}
    damaged: list[str] = []
    for folder in _suite_folders(model_folder):
        try:
            stored = _read_suite(folder)
            key, told = stored.key, stored.result.provenance
            name = told.get("name")
            shown = (
                name if isinstance(name, str) and name else model_folder.name.rpartition("-")[0] or model_folder.name
            )
            model = StoredModel(checked_name(Path(shown).name or shown, folder), key["fingerprint"], key["dtype"])
        except SurgeryError as error:
            damaged.append(
                f"{printable(folder.name)} of {printable(model_folder.name)} is left out: {printable(str(error))}"
            )
            continue
        model = models.setdefault(model.key, model)
        model.take_sizes({**{name: _count(told.get(name)) for name in SIZES}, "kept": _share(told.get("kept"))})
        if isinstance(told.get("healed"), bool):
            model.healed = told["healed"]
        try:
            model.front = model.front or (check_front(told["front"]) if told.get("front") is not None else None)
        except SurgeryError as error:
            damaged.append(f"the front of {model.name} is left out: {printable(str(error))[:MAX_WHY]}")
        model.suites[key["suite"]] = stored
    return list(models.values()), damaged


def _share(value: Any) -> float | None:
    """Return a share from a file, or None if it is none."""
    return float(value) if type(value) in (int, float) and 0 <= value < 1e6 else None


def _count(value: Any) -> int | None:
    """Return a number of parameters or bytes from a file, or None if it is none."""
    return value if type(value) is int and 0 < value < 2**63 else None


def printable(text: str) -> str:
    """Return the text on one line without control characters: names of folders may come from someone else."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _read_suite(folder: Path) -> StoredSuite:
    for name in (RESULT, SAMPLES):
        check_file(folder / name, name)
    if (folder / ARRAYS).exists() or (folder / ARRAYS).is_symlink():
        check_file(folder / ARRAYS, ARRAYS)
    try:
        stored = read_stored_result(folder)
        _check_key(stored)
        result = read_samples(folder, stored, shown=False)
        _check_result(result, folder)
    except (ValueError, RecursionError, OSError) as error:
        why = " ".join(str(error).split())[:300]
        raise SurgeryError(
            f"{folder} is not a result of `surgery eval`, or is damaged: {why}. Measure it again with the same command."
        ) from None
    return StoredSuite(stored.key, result, folder)


def check_file(path: Path, name: str) -> None:
    """Raise SurgeryError unless the path is a regular file of at most MAX_BYTES."""
    try:
        status = path.lstat()
    except OSError as error:
        raise SurgeryError(f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise SurgeryError(f"{path} is not a regular file (links are not followed). Copy the results themselves.")
    if status.st_size > MAX_BYTES[name]:
        raise SurgeryError(f"{path} must have at most {MAX_BYTES[name]:,} bytes (got {status.st_size:,})")


def _check_key(stored: StoredResult) -> None:
    for name, kind in KEY_TYPES.items():
        if not isinstance(stored.key.get(name), kind):
            raise ValueError(f"the key of {RESULT} has no {name}")
        checked_name(stored.key[name], Path(RESULT))
    if not isinstance(stored.key.get("version", 1), int):
        raise ValueError(f"the version in {RESULT} must be a whole number")
    for metric in stored.metrics.values():
        for text in (metric.name, metric.title, metric.unit):
            checked_name(text, Path(RESULT), empty=True)
        numbers = [metric.scale, *(x for x in (metric.top, metric.floor) if x is not None)]
        if not all(math.isfinite(x) for x in numbers) or metric.scale <= 0 or (metric.top or 1) <= 0:
            raise ValueError(
                f"the metric {metric.name} needs a finite scale above 0, and a finite top above 0 and floor"
            )


def _check_result(result: SuiteResult, folder: Path) -> None:
    if not result.samples:
        raise ValueError(f"{SAMPLES} is empty")
    for sample in result.samples:
        checked_name(sample.task, folder)
        for name, value in sample.group.items():
            checked_name(name, folder)
            if isinstance(value, str) and name not in AXES:
                checked_name(value, folder)
            elif isinstance(value, (str, bool)) or not math.isfinite(value):
                raise ValueError(f"a sample has the {name} {value!r}, which must be a finite number")
        unknown = [name for name in sample.metrics if name not in result.metrics]
        if unknown:
            raise ValueError(f"a sample has the metric {unknown[0]!r}, which {RESULT} does not describe")
        for name, value in sample.metrics.items():
            if result.metrics[name].kind == "accuracy" and value not in (0, 1):
                raise ValueError(f"{sample.task}: {name} is declared as an accuracy, so its values must be 0 or 1")
    if not sum(sample.weight for sample in result.samples) > 0:
        raise ValueError("the weights of its samples add up to 0")
    losses = result.arrays.get("loss_NT")
    if losses is not None and (losses.ndim != 2 or 0 in losses.shape or not losses.is_floating_point()):
        raise ValueError(f"loss_NT in {ARRAYS} must be a matrix of losses (got {losses.dtype} {tuple(losses.shape)})")


def checked_name(text: str, path: Path, empty: bool = False) -> str:
    """Return a name that is printed in tables; raise SurgeryError if it is empty, long or has control characters."""
    plain = all(unicodedata.category(c)[0] != "C" for c in text)
    if not plain or len(text) > MAX_NAME or not (text or empty):
        raise SurgeryError(
            f"{path}: a name in the results must be plain text of 1 to {MAX_NAME} characters (got {text[:40]!r})"
        )
    return text


def _make_names_unique(models: Iterable[StoredModel]) -> None:
    """Add the precision, then the beginning of the fingerprint, to names that several models have."""
    held = list(models)
    for added in (lambda m: m.dtype, lambda m: m.fingerprint[:8]):
        counts: dict[str, list[StoredModel]] = {}
        for model in held:
            counts.setdefault(model.name, []).append(model)
        for same in (models_of_name for models_of_name in counts.values() if len(models_of_name) > 1):
            if len({added(m) for m in same}) > 1:
                for model in same:
                    model.name += f" ({added(model)})"
    for i, model in enumerate(held):  # a stranger may give two models equal digests' beginnings and names
        if any(model.name == other.name for other in held[:i]):
            model.name += f" ({i + 1})"
