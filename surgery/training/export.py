"""What a run leaves in the checkpoint's report.

The healed checkpoint: the student's own folder with the trained tensors in place of the old ones.

Trained tensors are read from the run's last checkpoint, never from a model in memory, so that a run which went on after
a kill writes what one that was never stopped writes. The result is read again and compared with that checkpoint before it
gets its name.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint.meta_model import _parameter_keys
from surgery.checkpoint.rewrite import rewrite_checkpoint
from surgery.checkpoint.safetensors_io import DTYPES, TensorInfo, TensorSource, read_tensor, write_shard
from surgery.checkpoint.source import CheckpointSource, open_converted_checkpoint
from surgery.checkpoint.table import SHIM_NAME
from surgery.core.device import device_name
from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME, write_json
from surgery.core.version import __version__
from surgery.training.best_state import better
from surgery.training.checkpoints import TrainPosition
from surgery.training.distributed.accelerator import precision_name, sharding_name
from surgery.training.logging import CURVE_NAME, LOG_NAME
from surgery.training.recipe import HealingRecipe
from surgery.training.teacher_cache.index import file_sha256
from surgery.training.validation import perplexity


def stage_record(kind: str, at: TrainPosition) -> dict[str, Any]:
    """tokens: trained on, exactly; positions: rows times length."""
    speed = at.notes["positions"] / max(at.notes["seconds"], 1e-9)
    record = {"kind": kind, "steps": at.step, "tokens": at.tokens, "positions": at.notes["positions"]}
    record |= {"first_loss": at.notes["first_loss"], "last_loss": at.notes["last_loss"]}
    return {**record, "seconds": round(at.notes["seconds"], 2), "tokens_per_second": round(speed, 1)}


def delivered(recipe: HealingRecipe, start: float | None, notes: dict[str, Any]) -> dict[str, Any]:
    """Which state a run handed back. state: "start", "last", or that of a step; start, loss, last: nats per token of
    validation text, of what the run began with, of what it handed back, and of the state after the last step; worse:
    whether it handed back something worse than it began with. notes: of the last checkpoint."""
    chosen, loss, last = notes["delivered"], notes["after"], notes["last"]
    worse = start is not None and loss is not None and better(start, loss)
    record = {"asked": recipe.deliver, "state": chosen, "start": start, "loss": loss, "last": last, "worse": worse}
    if chosen not in ("start", "last"):
        number, step = (int(part) for part in chosen.split("-")[1::2])
        record["state"] = f"step {step:,} of stage {number + 1}" if step else f"end of stage {number}"
    return {**record, "says": _sentence(record)}


def _sentence(record: dict[str, Any]) -> str:
    if record["loss"] is None:
        return (
            "the state after the last step: there is no validation text to judge states by; keep some with data.validation, "
            "for example 0.02"
        )
    figures = f"{record['loss']:.4f} nats per token of validation text"
    began = "" if record["start"] is None else f"the start {record['start']:.4f}, "
    if record["state"] == "start":
        return (
            f"the start, unchanged: no state of this run was better than its {figures} (the last step "
            f"{record['last']:.4f}); lower the rate, or train on other text"
        )
    if record["worse"]:
        why = "deliver: last was asked for; " if record["asked"] == "last" else ""
        return (
            f"the state after the last step, WORSE than what the run began with: {figures}, the start {record['start']:.4f}; {why}"
            "lower the rate, or train on other text"
        )
    if record["state"] == "last":
        return f"the state after the last step: {figures} ({began.removesuffix(', ')})".replace(" ()", "")
    return f"the best state, {record['state']}: {figures} ({began}the last step {record['last']:.4f})"


def loss_records(losses: dict[str, float | None]) -> dict[str, Any]:
    return {k: None if v is None else {"loss": v, "perplexity": perplexity(v)} for k, v in losses.items()}


def run_environment(recipe: HealingRecipe, accelerator: Any) -> dict[str, Any]:
    import torch
    import transformers

    return {
        "surgery": __version__,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "recipe": recipe.model_dump(mode="json"),
        "processes": accelerator.num_processes,
        "spread": sharding_name(accelerator) or accelerator.distributed_type.value,
        "device": device_name(accelerator.device),
        "precision": precision_name(accelerator, recipe.precision),
    }


ADAPTER = "adapter"


def tensor_keys(student: Any, source: CheckpointSource, trained: set[str]) -> dict[str, str]:
    """Parameter -> name of its tensor in the file, a tied one's that of its twin."""
    keys = _parameter_keys(student, source)
    twins: dict[str, str] = dict(getattr(student, "all_tied_weights_keys", None) or {})
    for first, second in list(twins.items()):
        twins.setdefault(second, first)
    found = {}
    for name in trained:
        key = keys.get(name) or keys.get(twins.get(name, ""))
        if key is None:
            raise SurgeryError(
                f"{source.name} has no tensor for {name!r}, which was trained; it cannot be written back"
            )
        found[name] = key
    return found


@torch.no_grad()
def round_to_stored_dtype(trained: dict[str, Tensor], keys: dict[str, str], source: CheckpointSource) -> None:
    """In place, so that what is measured last is what is written."""
    for name, tensor in trained.items():
        tensor.copy_(tensor.to(DTYPES[source.tensors[keys[name]].dtype]).to(tensor.dtype))


def write_result(
    source: CheckpointSource, new: dict[str, TensorInfo], work: Path, record: dict[str, Any], adapter: bool
) -> Path:
    """A whole checkpoint in WORK/healed, in the dtypes of the student's file. new: name of a tensor in that file -> where
    the trained numbers are stored; adapter: whether WORK/adapter belongs to it."""
    target = work / "healed"
    shutil.rmtree(target, ignore_errors=True)
    rewrite_checkpoint(
        source,
        target,
        lambda folder: _write_shards(source, new, folder),
        source.config,
        extra_files=(SHIM_NAME, REPORT_NAME),
    )
    write_json(target / REPORT_NAME, _append_record(target / REPORT_NAME, record))
    logs = target / "training"
    logs.mkdir()
    for name in (LOG_NAME, CURVE_NAME):
        if (work / name).is_file():
            shutil.copyfile(work / name, logs / name)
    if adapter:
        (target / ADAPTER).mkdir()
        for name in adapter_digests(work):  # the files whose digests the last checkpoint holds, and no sub-folder
            shutil.copyfile(work / ADAPTER / name, target / ADAPTER / name)
    return target


def _write_shards(source: CheckpointSource, new: dict[str, TensorInfo], folder: Path) -> list[Path]:
    """One for each of the source's files."""
    files: dict[Path, list[TensorInfo]] = {}
    for info in source.tensors.values():
        files.setdefault(info.file, []).append(info)
    pieces = []
    for number, infos in enumerate(files.values()):
        pieces.append(folder / f"{number:05d}.safetensors")
        write_shard(pieces[-1], [_output_entry(info, new.get(info.name)) for info in infos])
    return pieces


def _output_entry(info: TensorInfo, trained: TensorInfo | None) -> TensorSource:
    if trained is None:
        return TensorSource.from_file(info.name, info)
    return TensorSource.from_tensor(info.name, read_tensor(trained, DTYPES[info.dtype]))


def refuse_difference(target: Path, source: CheckpointSource, new: dict[str, TensorInfo]) -> None:
    """SurgeryError unless every tensor of the result is, bit by bit, the last checkpoint's where it was trained, and the
    source's everywhere else."""
    written = open_converted_checkpoint(str(target)).tensors
    if strange := sorted(set(written) ^ set(source.tensors)):
        raise _differs(target, strange[0], source, new)
    for name, info in source.tensors.items():
        found, trained = written[name], new.get(name)
        expected = _stored(info) if trained is None else _bytes(read_tensor(trained, DTYPES[info.dtype]))
        if (found.dtype, found.shape) != (info.dtype, info.shape) or not torch.equal(_stored(found), expected):
            raise _differs(target, name, source, new)


def _stored(info: TensorInfo) -> Tensor:
    return read_tensor(replace(info, dtype="U8", shape=(info.nbytes,)), check=False)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _differs(target: Path, name: str, source: CheckpointSource, new: dict[str, TensorInfo]) -> SurgeryError:
    kept = new[name].file.parent if name in new else source.folder
    return SurgeryError(
        f"{target}: tensor {name!r} is not the one in {kept}; the result must hold the numbers of the run's last checkpoint. "
        "Nothing was renamed or removed: run the same command with --resume to write it again"
    )


def _append_record(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """The conversion's report and what was trained after it, one record a run."""
    report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {**report, "training": [*report.get("training", []), record]}


def adapter_digests(work: Path) -> dict[str, str]:
    """File -> sha256, of what is kept in WORK/adapter; nothing where no adapter is."""
    return {path.name: file_sha256(path) for path in sorted((work / ADAPTER).glob("*")) if path.is_file()}


def publish_result(target: Path, out: Path, work: Path) -> None:
    """The result in its place, then the work folder gone."""
    os.replace(target, out)
    shutil.rmtree(work, ignore_errors=True)
