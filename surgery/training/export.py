"""Write the healed checkpoint (the student's folder with the trained tensors replaced) and the record of the run.

Trained tensors are read from the run's last checkpoint, never from a model in memory, so that a resumed run writes the
same files as an uninterrupted one. The result is read back and compared with that checkpoint before it is renamed.
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

from surgery.checkpoint.meta_model import _parameter_keys, build_unconverted_model
from surgery.checkpoint.rewrite import rewrite_checkpoint
from surgery.checkpoint.safetensors_io import DTYPES, TensorInfo, TensorSource, read_header, read_tensor, write_shard
from surgery.checkpoint.source import CheckpointSource, open_converted_checkpoint
from surgery.checkpoint.table import SHIM_NAME, renew_table
from surgery.conversion.expert_tensors import merge_entries
from surgery.core.device import device_name
from surgery.core.digests import hash_file
from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME, write_json
from surgery.core.version import __version__
from surgery.training.best_state import better
from surgery.training.checkpoints import TrainPosition
from surgery.training.distributed.accelerator import precision_name, sharding_name
from surgery.training.logging import CURVE_NAME, LOG_NAME
from surgery.training.recipe import HealingRecipe
from surgery.training.validation import perplexity


def stage_record(kind: str, at: TrainPosition) -> dict[str, Any]:
    """Return the record of one stage. tokens: trained on, exactly; positions: rows x length, with padding.

    memory: how activations were held and rows per forward, where the run chose them. full_speed: seconds from the start
    of the run until its steps ran at full speed, on a GPU.
    """
    speed = at.notes["positions"] / max(at.notes["seconds"], 1e-9)
    record = {"kind": kind, "steps": at.step, "tokens": at.tokens, "positions": at.notes["positions"]}
    record |= {"first_loss": at.notes["first_loss"], "last_loss": at.notes["last_loss"]}
    record |= {key: at.notes[key] for key in ("memory", "full_speed") if key in at.notes}
    return {**record, "seconds": round(at.notes["seconds"], 2), "tokens_per_second": round(speed, 1)}


def delivery_record(recipe: HealingRecipe, start: float | None, notes: dict[str, Any]) -> dict[str, Any]:
    """Return the record of the delivered state. notes: those of the last checkpoint.

    state: "start", "last", or a description of the step; start, loss, last: validation losses in nats per token, before
    training, of the delivered state, and after the last step; worse: whether loss is above start; says: a sentence.
    """
    chosen, loss, last = notes["delivered"], notes["after"], notes["last"]
    worse = start is not None and loss is not None and better(start, loss)
    record = {"asked": recipe.deliver, "state": chosen, "start": start, "loss": loss, "last": last, "worse": worse}
    if chosen not in ("start", "last"):
        number, step = (int(number_text) for number_text in chosen.split("-")[1::2])
        record["state"] = f"step {step:,} of stage {number + 1}" if step else f"end of stage {number}"
    return {**record, "says": _sentence(record)}


def _sentence(record: dict[str, Any]) -> str:
    if record["loss"] is None:
        return (
            "the state after the last step: there is no validation text to compare states on. Set data.validation, "
            "for example 0.02."
        )
    figures = f"{record['loss']:.4f} nats per token of validation text"
    began = "" if record["start"] is None else f"the start {record['start']:.4f}, "
    if record["state"] == "start":
        return (
            f"the start, unchanged: no state of this run was better than its {figures} (the last step "
            f"{record['last']:.4f}). Lower the rate, or train on other text."
        )
    if record["worse"]:
        why = "The recipe has deliver: last. " if record["asked"] == "last" else ""
        return (
            f"the state after the last step, WORSE than the start: {figures}, the start {record['start']:.4f}. {why}"
            "Lower the rate, or train on other text."
        )
    if record["state"] == "last":
        return f"the state after the last step: {figures} ({began.removesuffix(', ')})".replace(" ()", "")
    return f"the best state, {record['state']}: {figures} ({began}the last step {record['last']:.4f})"


def loss_records(losses: dict[str, float | None]) -> dict[str, Any]:
    """Add the perplexity to each loss (nats per token)."""
    return {k: None if v is None else {"loss": v, "perplexity": perplexity(v)} for k, v in losses.items()}


def run_environment(recipe: HealingRecipe, accelerator: Any) -> dict[str, Any]:
    """Return versions, recipe, devices and precision of a run, for the record."""
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


ADAPTER = "adapter"  # folder of a LoRA adapter that could not be merged
MERGED = "experts"  # folder of the merged tensors of experts, in families whose files hold these


def stored_parameters(student: Any, source: CheckpointSource) -> dict[str, TensorInfo]:
    """Return parameter -> where the source files have it, without parameters that they lack under a name of their own."""
    keys = _parameter_keys(student, source)
    return {name: source.tensors[key] for name, key in keys.items() if key in source.tensors}


def tensor_keys(student: Any, source: CheckpointSource, trained: set[str]) -> dict[str, str]:
    """Return parameter -> name of its tensor in the source files; tied parameters share one."""
    keys = _parameter_keys(student, source)
    twins: dict[str, str] = dict(getattr(student, "all_tied_weights_keys", None) or {})
    for first, second in list(twins.items()):
        twins.setdefault(second, first)
    key_of_name = {}
    for name in trained:
        key = keys.get(name) or keys.get(twins.get(name, ""))
        if key is None:
            raise SurgeryError(
                f"{source.name} has no tensor for {name!r}, which was trained. It cannot be written back."
            )
        key_of_name[name] = key
    return key_of_name


@torch.no_grad()
def round_to_stored_dtype(trained: dict[str, Tensor], keys: dict[str, str], source: CheckpointSource) -> None:
    """Round parameters in place to the dtype in which they are stored, so that the final loss is that of the written
    file.
    """
    for name, tensor in trained.items():
        tensor.copy_(tensor.to(DTYPES[source.tensors[keys[name]].dtype]).to(tensor.dtype))


def merge_trained(
    source: CheckpointSource, split: CheckpointSource, new: dict[str, TensorInfo], folder: Path
) -> dict[str, TensorInfo]:
    """Return `new` for the tensors of the source: of experts that its files hold merged, the merged ones.

    split: the source with a tensor for each linear of an expert (see split_stored_experts), of which `new` has those
    that were trained. folder: where merged tensors are written.
    """
    linears = {name: info for name, info in split.tensors.items() if name not in source.tensors}
    if not linears:
        return new
    folder.mkdir(exist_ok=True)
    merged = {name: info for name, info in new.items() if name not in linears}
    entries = (_output_entry(info, new.get(name)) for name, info in linears.items())
    for number, entry in enumerate(merge_entries(build_unconverted_model(source), entries)):
        write_shard(folder / f"{number:05d}.safetensors", [entry])
        merged |= read_header(folder / f"{number:05d}.safetensors")
    return merged


def write_result(
    source: CheckpointSource, new: dict[str, TensorInfo], work: Path, record: dict[str, Any], adapter: bool
) -> Path:
    """Write a complete checkpoint to WORK/healed, in the dtypes of the source, and return its folder.

    new: name of a tensor -> where its trained values are stored; record: of the run; adapter: whether to include
    WORK/adapter.
    """
    target = work / "healed"
    shutil.rmtree(target, ignore_errors=True)
    rewrite_checkpoint(
        source,
        target,
        lambda folder: _write_shards(source, new, folder),
        renew_table(source.config, source.name),
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
    """Write one shard for each file of the source."""
    files: dict[Path, list[TensorInfo]] = {}
    for info in source.tensors.values():
        files.setdefault(info.file, []).append(info)
    shards = []
    for number, infos in enumerate(files.values()):
        shards.append(folder / f"{number:05d}.safetensors")
        write_shard(shards[-1], [_output_entry(info, new.get(info.name)) for info in infos])
    return shards


def _output_entry(info: TensorInfo, trained: TensorInfo | None) -> TensorSource:
    if trained is None:
        return TensorSource.from_file(info.name, info)
    return TensorSource.from_tensor(info.name, read_tensor(trained, DTYPES[info.dtype]))


def check_exported_tensors(target: Path, source: CheckpointSource, new: dict[str, TensorInfo]) -> None:
    """Raise SurgeryError unless trained tensors equal those of the last checkpoint bit by bit, and all others the
    source's.
    """
    written = open_converted_checkpoint(str(target)).tensors
    if strange := sorted(set(written) ^ set(source.tensors)):
        raise _differs(target, strange[0], source, new)
    for name, info in source.tensors.items():
        stored, trained = written[name], new.get(name)
        expected = _stored_bytes(info) if trained is None else _bytes(read_tensor(trained, DTYPES[info.dtype]))
        if (stored.dtype, stored.shape) != (info.dtype, info.shape) or not torch.equal(_stored_bytes(stored), expected):
            raise _differs(target, name, source, new)


def _stored_bytes(info: TensorInfo) -> Tensor:
    if info.tensor is not None:  # joined from parts on opening
        return _bytes(info.tensor)
    return read_tensor(replace(info, dtype="U8", shape=(info.nbytes,)), check=False)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _differs(target: Path, name: str, source: CheckpointSource, new: dict[str, TensorInfo]) -> SurgeryError:
    folder = new[name].file.parent if name in new else source.folder
    return SurgeryError(
        f"{target}: tensor {name!r} is not the one in {folder}. The result must equal the run's last checkpoint. "
        "Nothing was renamed or removed: run the same command with --resume to write it again."
    )


def _append_record(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Return the report with the record of this run appended under `training`."""
    report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {**report, "training": [*report.get("training", []), record]}


def adapter_digests(work: Path) -> dict[str, str]:
    """Return file name -> SHA-256 for the files in WORK/adapter; empty without an adapter."""
    return {path.name: hash_file(path) for path in sorted((work / ADAPTER).glob("*")) if path.is_file()}


def publish_result(target: Path, out: Path, work: Path) -> None:
    """Move the result to OUT and remove the work folder."""
    os.replace(target, out)
    shutil.rmtree(work, ignore_errors=True)
