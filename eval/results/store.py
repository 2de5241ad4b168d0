"""Result files of `surgery eval --out DIR`; each suite of each model is complete or absent:

DIR/<model>-<fingerprint>/<suite>/result.json    measurements and the options they depend on; arrays.safetensors beside it
                                  samples.jsonl  one line per sample
                                  lm_eval.json   lm-eval's own results, for suites that run through it
DIR/results.json, table.md, *.png                the comparison

A suite is not run again if its result.json was written by the same version, with the same options, dtype and kind of
device. Model files and data must also have the same content.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from surgery.checkpoint.safetensors_io import TensorSource, write_shard
from surgery.core.errors import SurgeryError
from surgery.core.files import atomic_write, check_not_dangling
from surgery.core.version import __version__
from surgery.eval.results.data_read import is_unchanged
from surgery.eval.suite import EvalMetric, EvalOptions, Sample, SuiteResult

RESULT, SAMPLES, ARRAYS = "result.json", "samples.jsonl", "arrays.safetensors"
MAX_LINE, MAX_SAMPLES = 2**26, 2**20  # bytes of a sample with its prompt, and samples of a suite, in samples.jsonl
MAX_KEPT, NUMBER_BYTES = 2**29, 32  # bytes of all names and numbers, counting as many for each number with its name
LM_EVAL = "lm_eval.json"  # same schema as lm-eval's results file, for tools that read it


class StoredResult(BaseModel):
    """Schema of result.json."""

    key: dict[str, Any]
    metrics: dict[str, EvalMetric]
    floors: dict[str, dict[str, float]]
    notes: list[str]
    info: dict[str, Any]
    seconds: float
    reads: dict[str, str] | None = None  # None: written by a version that did not record it
    provenance: dict[str, Any] = {}


def read_stored_result(folder: Path) -> StoredResult:
    """Read result.json of one suite of one model. Raises ValueError if it is damaged."""
    try:
        stored = StoredResult.model_validate_json((folder / RESULT).read_bytes(), strict=True)
    except ValidationError as error:
        raise ValueError(f"{RESULT}: {describe(error)}") from None
    if not all(name == metric.name for name, metric in stored.metrics.items()):
        raise ValueError(f"{RESULT}: its metrics have other names than their keys")
    return stored


def describe(error: ValidationError) -> str:
    """Return pydantic's first complaint in one line, without its URL."""
    first = error.errors()[0]
    return ": ".join([*([".".join(map(str, first["loc"]))] if first["loc"] else []), first["msg"]])


def read_samples(folder: Path, stored: StoredResult, shown: bool = True) -> SuiteResult:
    """Read the samples and arrays that belong to a result.json. Raises ValueError if they are damaged.

    shown: keep prompts and outputs. Without them memory holds only the numbers of each sample, however long the file
    is.
    """
    from safetensors import SafetensorError

    read, samples, characters = TypeAdapter(Sample), [], 0
    for number, line in enumerate(_sample_lines(folder / SAMPLES), 1):
        try:
            sample = read.validate_json(line, strict=True)
        except ValidationError as error:
            raise ValueError(f"{SAMPLES}, line {number}: {describe(error)}") from None
        samples.append(sample if shown else replace(sample, shown={}))
        characters += len(sample.task) + len(sample.id) + NUMBER_BYTES * (len(sample.metrics) + len(sample.group))
        if characters > MAX_KEPT:
            raise ValueError(f"{SAMPLES} must have at most {MAX_KEPT:,} bytes of names and numbers, without prompts")
    if not all(0 <= sample.weight < math.inf for sample in samples):
        raise ValueError(f"{SAMPLES} has a weight that is negative or not finite")
    result = SuiteResult(
        samples, **{name: getattr(stored, name) for name in StoredResult.model_fields if name != "key"}
    )
    try:
        result.arrays = _load_arrays(folder / ARRAYS)
    except SafetensorError as error:
        raise ValueError(f"{ARRAYS}: {error}") from None
    return result


def _sample_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file of samples.

    Raises ValueError for a line or a number of lines beyond all that suites write.
    """
    with open(path, "rb") as file:
        for number in range(MAX_SAMPLES + 1):
            line = file.readline(MAX_LINE + 1)
            if not line:
                return
            if len(line) > MAX_LINE:
                raise ValueError(f"{SAMPLES}, line {number + 1} must have at most {MAX_LINE:,} bytes")
            if number == MAX_SAMPLES:
                raise ValueError(f"{SAMPLES} must have at most {MAX_SAMPLES:,} samples")
            yield line.rstrip(b"\n")


class ResultStore:
    """The folder of results; with folder None nothing is read or written."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.created = False

    def open(self) -> None:
        """Create the folder. Raises SurgeryError if it is a file or its parent does not exist."""
        if self.folder is None:
            return
        check_not_dangling(self.folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise SurgeryError(f"--out {self.folder} is a file. Give a folder for results.")
        if not self.folder.absolute().parent.is_dir():
            raise SurgeryError(
                f"--out {self.folder}: {self.folder.absolute().parent} is not a folder. Create it first."
            )
        self.created = not self.folder.exists()
        self.folder.mkdir(exist_ok=True)

    def close(self) -> None:
        """Remove the folder if it was created here and is empty: nothing was measured."""
        if self.folder is not None and self.created:
            with suppress(OSError):  # it has files
                self.folder.rmdir()

    def result_folder(self, name: str, fingerprint: str, suite: str) -> Path | None:
        """Return the folder of one suite of one model."""
        if self.folder is None:
            return None
        plain = re.sub(r"[^\w.-]+", "-", Path(name).name) or "model"
        return self.folder / f"{plain}-{fingerprint[:8]}" / re.sub(r"[^\w.-]+", "-", suite)

    def load(self, folder: Path | None, key: dict[str, Any], options: EvalOptions | None = None) -> SuiteResult | None:
        """Return the stored result if it was measured with the same key and its data is unchanged; otherwise None."""
        if folder is None or not (folder / RESULT).is_file():
            return None
        try:
            stored = read_stored_result(folder)
            if stored.key != key or stored.reads is None or not is_unchanged(stored.reads, options or EvalOptions()):
                return None
            return read_samples(folder, stored)
        except (ValueError, RecursionError, OSError):
            return None  # damaged: measure again

    def save(self, folder: Path | None, key: dict[str, Any], result: SuiteResult) -> SuiteResult:
        """Write a result to a temporary folder, then rename it.

        Return the result as a later run reads it, whose numbers have the types of the files' schema: a run that was
        interrupted must write the same comparison as one that was not.
        """
        if folder is None:
            return result
        new = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(new, ignore_errors=True)
        try:
            new.mkdir(parents=True)
            self._write_files(new, key, result)
            if folder.exists():
                shutil.rmtree(folder)
            new.rename(folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        try:
            return read_samples(folder, read_stored_result(folder))
        except (ValueError, RecursionError):
            return result  # not readable, so that a later run measures again

    def _write_files(self, new: Path, key: dict[str, Any], result: SuiteResult) -> None:
        with atomic_write(new / SAMPLES, "w") as file:
            for sample in result.samples:
                file.write(json.dumps(sample.to_dict(), ensure_ascii=False, default=str) + "\n")
        if result.arrays:
            write_shard(new / ARRAYS, [TensorSource.from_tensor(name, array) for name, array in result.arrays.items()])
        stored = {"key": key, "metrics": {name: asdict(metric) for name, metric in result.metrics.items()}}
        stored |= {
            name: getattr(result, name) for name in ("floors", "notes", "info", "seconds", "reads", "provenance")
        }
        for name, data in {RESULT: stored, **({LM_EVAL: result.info} if "results" in result.info else {})}.items():
            with atomic_write(new / name, "w") as file:
                file.write(json.dumps(data, indent=1, ensure_ascii=False, default=str))

    def write(self, name: str, text: str, model: Mapping[str, Any] | None = None) -> None:
        """Write one file directly in the folder; or in that of a model (name and fingerprint), if it has results."""
        target = self.folder
        if target is not None and model is not None:
            suite = self.result_folder(model["name"], model["fingerprint"], "suite")
            target = None if suite is None or not suite.parent.is_dir() else suite.parent
        if target is not None:
            with atomic_write(target / name, "w") as file:
                file.write(text)


def result_key(
    fingerprint: str, suite: str, options: EvalOptions, device: str, dtype: str, *, version: int = 1
) -> dict[str, Any]:
    """Return what a result depends on, compared before it is used again. The suite's version is there from 2 on."""
    return {
        "surgery": __version__,
        "fingerprint": fingerprint,
        "suite": suite,
        "options": options.digest(),
        "device": device,
        "dtype": dtype,
        **({"version": version} if version > 1 else {}),
    }


def _load_arrays(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    from safetensors.torch import load_file

    return load_file(path)
