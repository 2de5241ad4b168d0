"""Training checkpoints: trained weights, optimizer state, moving average and random states. Each is complete or absent.

WORK/checkpoints/stage-1-step-000500/
  weights.safetensors      every parameter trained so far, float32, by its name in the model
  optimiser.safetensors    <state>.<parameter>, and ema.<parameter>
  rng-00000.safetensors    one file per process
  state.json               stage, step, examples and tokens consumed, sha256 of weights.safetensors, notes

Written into a temporary folder and renamed. Tensors are stored unsharded, so a run may resume on another number of
devices.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint.safetensors_io import TensorInfo, TensorSource, read_header, read_tensor, write_shard
from surgery.core.digests import hash_file
from surgery.core.errors import SurgeryError
from surgery.core.files import checksum, read_json, write_json
from surgery.training.sharded_tensors import MaybeSharded, copy_full_, full_tensor

STATE_NAME, EMA_KEY, CHECKSUM_KEY = "state.json", "ema", "crc32"
WEIGHTS, DIGEST = "weights.safetensors", "sha256"
StoredStates = dict[str, dict[str, TensorInfo]]  # parameter -> name of a state -> where it is stored


@dataclass
class TrainPosition:
    """Position of a run: stage and step, examples and tokens consumed by the stage. notes: JSON data."""

    stage: int = 0
    step: int = 0
    examples: int = 0
    tokens: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass
class TorchOptimizerState:
    """State of a torch optimizer, by parameter name. names: of the parameters of each group."""

    optimiser: Any
    names: list[list[str]]

    def states(self) -> dict[str, MaybeSharded]:
        """Return <state>.<parameter> -> tensor."""
        states: dict[str, MaybeSharded] = {}
        for name, p in self._named_parameters():
            for key, value in self.optimiser.state.get(p, {}).items():
                states[f"{key}.{name}"] = dequantized(value) if isinstance(value, Tensor) else torch.tensor(value)
        return states

    def restore(self, stored: StoredStates) -> None:
        """Load stored states into the optimizer. Raises SurgeryError if a shape differs from its parameter's."""
        for name, p in self._named_parameters():
            for key, info in stored.get(name, {}).items():
                if info.shape not in ((), tuple(p.shape)):
                    raise SurgeryError(
                        f"{info.file}: {info.name!r} must have its parameter's shape {list(p.shape)} (got "
                        f"{list(info.shape)}). "
                        f"Remove the folder {info.file.parent} to resume from the checkpoint before."
                    )
                state = _state_like(p, read_tensor(info, check=False))
                self.optimiser.state[p][key] = quantized_like(self.optimiser, p, key, state)

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for group, names in zip(self.optimiser.param_groups, self.names):
            yield from zip(names, group["params"])


def dequantized(state: Tensor) -> MaybeSharded:
    """Return an optimizer state as an ordinary tensor. Quantizing the result again may move values by a code: a resumed
    run is not equal to an uninterrupted one in the last digits."""
    local: Any = getattr(state, "_local_tensor", state)  # of a DTensor
    if not hasattr(local, "codes"):
        return state
    values: Tensor = local.dequantize(torch.float32)
    if local is state:
        return values
    from torch.distributed.tensor import DTensor

    mesh, placements = state.device_mesh, state.placements  # type: ignore[attr-defined]
    sharded: Any = DTensor  # its types name the shape alone
    return sharded.from_local(values, mesh, placements, run_check=False, shape=state.shape, stride=state.stride())


def quantized_like(optimiser: Any, parameter: Tensor, key: str, state: Tensor) -> Tensor:
    """Return a state as the optimizer keeps it: torchao's optimizers of few bits quantize the moments of large
    parameters.
    """
    make = getattr(optimiser, "_new_buffer", None)  # torchao has no public function for it
    if make is None or state.dim() == 0:
        return state
    kept: Tensor = make(parameter, key == "exp_avg")
    with torch.no_grad():
        getattr(kept, "_local_tensor", kept).copy_(getattr(state, "_local_tensor", state))
    return kept


@dataclass
class TrainState:
    """What a checkpoint saves, by parameter name: parameters, optimizer state and exponential moving average."""

    parameters: dict[str, Tensor]
    optimizer_state: Any = None
    ema: dict[str, Tensor] = field(default_factory=dict)

    def states(self) -> dict[str, MaybeSharded]:
        """Return <state>.<parameter> -> tensor, and ema.<parameter> -> tensor."""
        means: dict[str, MaybeSharded] = {f"ema.{name}": t for name, t in self.ema.items()}
        return {**means, **(self.optimizer_state.states() if self.optimizer_state is not None else {})}


class CheckpointManager:
    """Saves and restores checkpoints in `folder`, keeping the latest `keep`. rank: of this process, 0 writes; wait: a
    barrier.
    """

    def __init__(self, folder: Path, keep: int, rank: int = 0, wait: Any = lambda: None):
        self.folder, self.keep, self.rank, self.wait = folder, keep, rank, wait

    def list_all(self) -> list[Path]:
        """Return the folders of complete checkpoints, oldest first."""
        return sorted(
            p.parent for p in self.folder.glob(f"stage-*-step-*/{STATE_NAME}") if not p.parent.name.endswith(".tmp")
        )

    def latest(self) -> Path | None:
        """Return the folder of the latest checkpoint, or None."""
        return self.list_all()[-1] if self.list_all() else None

    def save(self, position: TrainPosition, train_state: TrainState) -> Path:
        """Save a checkpoint and return its folder.

        Every process must call; the first writes, each adds its random state.
        """
        target = self.folder / f"stage-{position.stage:02d}-step-{position.step:07d}"
        partial = target.with_name(target.name + ".tmp")
        try:
            self._save(position, train_state, partial, target)
        except OSError:  # on a full disk, remove the incomplete folder
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return target

    def _save(self, position: TrainPosition, train_state: TrainState, partial: Path, target: Path) -> None:
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.wait()
        write_shard(partial / f"rng-{self.rank:05d}.safetensors", _rng_entries())
        self._write_tensors(partial / WEIGHTS, train_state.parameters)
        self._write_tensors(partial / "optimiser.safetensors", train_state.states())
        self.wait()
        if self.rank == 0:
            record = {**position.__dict__, "python": _python_rng(), DIGEST: hash_file(partial / WEIGHTS)}
            write_json(partial / STATE_NAME, {**record, CHECKSUM_KEY: checksum(record)})
            _rename_durably(partial, target)
            self._prune()
        self.wait()

    def _write_tensors(self, path: Path, tensors: Mapping[str, MaybeSharded]) -> None:
        entries = []
        for name in sorted(tensors):
            values = full_tensor(tensors[name])
            if self.rank == 0:
                entries.append(
                    TensorSource.from_tensor(name, values.cpu())
                )  # the device need not hold all of them at once
        if self.rank == 0:
            write_shard(path, entries)

    def _prune(self) -> None:
        for old in self.list_all()[: -self.keep]:
            gone = old.with_name(old.name + ".tmp")
            os.replace(old, gone)
            shutil.rmtree(gone, ignore_errors=True)

    # -- restore --------------------------------------------------------------------------------------
    def read_position(self, folder: Path) -> TrainPosition:
        """Return the position at which the checkpoint was saved."""
        record = _read_state(folder)
        return TrainPosition(**{name: record[name] for name in TrainPosition.__dataclass_fields__})

    def restore_weights(self, folder: Path, parameters: dict[str, Tensor]) -> set[str]:
        """Copy the stored weights into `parameters`, except into those on the meta device; return their names."""
        stored = self.weights(folder)
        for name, info in stored.items():
            if name not in parameters or tuple(parameters[name].shape) != info.shape:
                raise SurgeryError(
                    f"checkpoint {folder} holds {name!r} {list(info.shape)}, but this model has no such parameter."
                )
            if not parameters[name].is_meta:
                copy_full_(parameters[name], read_tensor(info))
        return set(stored)

    def weights(self, folder: Path) -> dict[str, TensorInfo]:
        """Return every trained parameter by name. Raises SurgeryError if the file does not match its SHA-256."""
        path = folder / WEIGHTS
        if not path.is_file() or hash_file(path) != _read_state(folder).get(DIGEST):
            raise _damaged_error(path)
        return read_header(path)

    def restore(self, folder: Path, train_state: TrainState) -> None:
        """Restore optimizer state, moving average and random states. Weights are restored earlier, before sharding."""
        stored = _group_by_parameter(_read_stored(folder / "optimiser.safetensors"))
        for name, mean in train_state.ema.items():
            if (info := stored.get(name, {}).pop(EMA_KEY, None)) is None:
                continue
            try:
                copy_full_(mean, read_tensor(info))
            except RuntimeError:  # of another shape
                raise _damaged_error(info.file) from None
        if train_state.optimizer_state is not None:
            train_state.optimizer_state.restore(stored)
        self._restore_rng(folder)

    def _restore_rng(self, folder: Path) -> None:
        path = folder / f"rng-{self.rank:05d}.safetensors"
        if not path.is_file():  # more processes than before
            return
        stored = _read_stored(path)
        try:
            torch.set_rng_state(read_tensor(stored["cpu"]))
            if "cuda" in stored and torch.cuda.is_available():
                torch.cuda.set_rng_state(read_tensor(stored["cuda"]))
        except (KeyError, TypeError, RuntimeError):
            raise _damaged_error(path) from None
        version, numbers, gauss = _read_state(folder)["python"]
        random.setstate((version, tuple(numbers), gauss))


def _read_state(folder: Path) -> dict[str, Any]:
    """Read state.json. Raises SurgeryError if its checksum is wrong."""
    try:
        record = read_json(folder / STATE_NAME)
    except SurgeryError:
        record = None
    if not isinstance(record, dict) or record.pop(CHECKSUM_KEY, None) != checksum(record):
        raise _damaged_error(folder / STATE_NAME)
    return record


def _read_stored(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a file of a checkpoint. Raises SurgeryError that says how to go on without the file."""
    try:
        return read_header(path)
    except SurgeryError:
        raise _damaged_error(path) from None


def _damaged_error(path: Path) -> SurgeryError:
    return SurgeryError(
        f"{path} is missing or damaged. Remove the folder {path.parent} to resume from the checkpoint before."
    )


def _group_by_parameter(stored: dict[str, TensorInfo]) -> StoredStates:
    """Group <state>.<parameter> keys by parameter: names of states contain no dot."""
    states: StoredStates = {}
    for key, info in stored.items():
        state, _, name = key.partition(".")
        states.setdefault(name, {})[state] = info
    return states


def _state_like(parameter: Tensor, values: Tensor) -> Tensor:
    """Return an optimizer state sharded like its parameter; scalars stay scalars."""
    if values.dim() == 0:
        return values.to(parameter.device)
    state = torch.zeros_like(parameter, dtype=values.dtype).detach()
    copy_full_(state, values)
    return state


def _rng_entries() -> list[TensorSource]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return [TensorSource.from_tensor(name, state) for name, state in states.items()]


def _python_rng() -> list[Any]:
    version, numbers, gauss = random.getstate()
    return [version, list(numbers), gauss]


def _rename_durably(partial: Path, target: Path) -> None:
    """Rename `partial` to `target` and sync the parent folder to disk."""
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
