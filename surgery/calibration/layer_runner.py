"""Run a meta-device model one layer at a time, with transformers' own forward.

The model is called once on all calibration windows; each layer's forward (of that instance, not of its
class) is replaced by a hook, which fills the layer with its weights, lets a visitor work on it window by
window, and empties it again. So masks, rotary tables, position biases and cross attention are the
library's own, whatever the family, and never more than one layer is in memory.

Rows of a layer's call run through it in turns, in whatever state a context puts the layer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.calibration.data import check_model_inputs
from surgery.calibration.partition import Round, RowPartition, Segment
from surgery.checkpoint.meta_model import MetaModel, set_module_tensor
from surgery.checkpoint.safetensors_io import read_rows
from surgery.core.device import trim_memory
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError

CHUNK_TOKENS = {"cpu": 2048, "cuda": 16384}


def default_buffer_limit(device: torch.device) -> int:
    """Two GiB of hidden states; on a GPU as much as a quarter of what is free there."""
    return max(2 << 30, torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 0)


NO_PERIOD = 2**62


class StopForward(Exception):
    """Leaves a forward once what was wanted has been seen."""


@dataclass
class LayerCall:
    """One call of a layer on all rows (windows) at once; `apply` runs some of them.

    hidden_BTD may lie elsewhere than the layer (spilled to disk); rows travel to `device` and back.
    """

    path: str
    layer: nn.Module
    forward: Callable[..., Any]
    hidden_BTD: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device

    def rows(self, first: int, last: int) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
        """Return (hidden states, args, kwargs) for rows first:last; tensors whose first axis is the batch are sliced."""
        batch = self.hidden_BTD.shape[0]

        def slice_rows(value: Any) -> Any:
            if isinstance(value, Tensor):
                if value.dim() > 1 and value.shape[0] == batch > 1:
                    value = value[first:last]
                return value.to(self.device)
            if isinstance(value, (tuple, list)):
                return type(value)(slice_rows(v) for v in value)
            return {k: slice_rows(v) for k, v in value.items()} if isinstance(value, dict) else value

        return (
            slice_rows(self.hidden_BTD),
            tuple(slice_rows(a) for a in self.args),
            {k: slice_rows(v) for k, v in self.kwargs.items()},
        )

    def apply(self, first: int, last: int) -> Any:
        """Run the layer on rows first:last."""
        hidden, args, kwargs = self.rows(first, last)
        return self.forward(hidden, *args, **kwargs)


LayerFn = Callable[[LayerCall], Any]


class LayerRunner:
    """inputs: the model's keyword arguments, batch first. Hidden states larger than `limit` bytes leave the GPU,
    and on the CPU go to a file under `scratch`, which the operating system can write out. Of rows shared by `ranks` a
    process runs its own; its buffers have room for all."""

    def __init__(
        self,
        meta_model: MetaModel,
        layers: tuple[str, ...],
        head: str,
        device: torch.device,
        *,
        limit: int | None = None,
        scratch: Path | None = None,
        ranks: DistContext | None = None,
    ):
        self.meta_model, self.layers, self.head, self.device = meta_model, layers, head, device
        self.limit, self.scratch, self.ranks = limit or default_buffer_limit(device), scratch, ranks or DistContext()
        self.partition, self.row = (
            RowPartition(self.ranks, 1, (), 1),
            0,
        )  # row: where the chunk begins that is run right now
        self.hidden_bytes = self.moment_bytes = 0  # the most held at once
        self._buffers: list[Tensor] = []
        self.buffer_device = torch.device("cpu")

    def single_process(self) -> LayerRunner:
        """Return a runner in which this process runs all rows."""
        return LayerRunner(self.meta_model, self.layers, self.head, self.device, limit=self.limit, scratch=self.scratch)

    def chunk_rows(self, length: int) -> int:
        """Return how many rows of `length` tokens run through a layer at a time."""
        return max(1, CHUNK_TOKENS.get(self.device.type, 2048) // max(1, length))

    def run(
        self,
        inputs: dict[str, Tensor],
        visit: LayerFn,
        segments: Sequence[Segment] = (),
        period: int = NO_PERIOD,
    ) -> Tensor:
        """What reaches the head (or, without one, the model's first output), (B, T, D). segments, period: how rows
        are shared (surgery.calibration.partition); of those of others the result is meaningless until `gather_rows`."""
        check_model_inputs(inputs, self.meta_model.model)
        assert segments or self.ranks.count == 1
        rows = next(iter(inputs.values()))
        self.partition = RowPartition(self.ranks, rows.shape[1] if rows.dim() == 2 else 256, segments, period)
        self.buffer_device = self._choose_buffer_device(inputs)
        restore = self._prepare(inputs)
        try:
            for path in self.layers:
                restore.append(self._hook_layer(path, visit))
            caught: list[Tensor] = []
            if self.head:
                restore.append(capture_input(self.meta_model.module(self.head), caught))
            out = self._call({k: v.to(self.buffer_device) for k, v in inputs.items()})
            return caught[-1] if caught else out[0]
        finally:
            for undo in reversed(restore):
                undo()
            self._buffers.clear()

    def gather_rows(self, x_BTD: Tensor) -> Tensor:
        """Fill in the rows of the other processes, in place."""
        for first, last, owner in self.partition.row_owners(len(x_BTD)) if self.ranks.count > 1 else ():
            self.ranks.broadcast_(x_BTD[first:last], owner)
        return x_BTD

    def rounds(self, first: int, last: int) -> list[Round]:
        """Return the rounds in which processes run rows first:last."""
        return self.partition.rounds(first, last)

    def _call(self, inputs: dict[str, Tensor]) -> Any:
        try:
            return self.meta_model.model(**inputs, use_cache=False)
        except TypeError:
            return self.meta_model.model(**inputs)  # encoders that know no cache

    def _choose_buffer_device(self, inputs: dict[str, Tensor]) -> torch.device:
        """Where the hidden states of all rows live between layers."""
        config = self.meta_model.config.get_text_config()
        width: int = getattr(config, "hidden_size", None) or getattr(config, "d_model", None) or 1024
        rows = next(iter(inputs.values()))
        tokens = rows.shape[0] * (rows.shape[1] if rows.dim() == 2 else 1024)
        self.hidden_bytes = max(self.hidden_bytes, tokens * width * 4)
        return self.device if tokens * width * 4 <= self.limit else torch.device("cpu")

    def _prepare(self, inputs: dict[str, Tensor]) -> list[Callable[[], None]]:
        """Fill everything but layers, head and large embeddings; those get only the rows that occur."""
        model, meta_model, restore = self.meta_model.model, self.meta_model, []
        large = [p for p, m in model.named_modules() if isinstance(m, nn.Embedding) and m.weight.numel() > 2**20]
        outside = [*self.layers, *large, *([self.head] if self.head else [])]
        meta_model.load_module("", self.buffer_device, skip=outside)
        for path in large:
            restore.append(self._compact_embedding(path, inputs))
        for module in model.modules():  # rotary tables and the like, computed at construction
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(self.buffer_device)
        return restore

    def _compact_embedding(self, path: str, inputs: dict[str, Tensor]) -> Callable[[], None]:
        """Keep the embedding's own forward, with a table of only the rows that occur and ids renumbered."""
        module: Any = self.meta_model.module(path)
        info = self.meta_model.tensor_info(f"{path}.weight")
        rows = torch.unique(torch.cat([t.flatten() for t in inputs.values() if t.dtype == torch.int64]).cpu())
        # Ids made up by the model (a decoder's start, a padding id, positions) may occur as well.
        extra = [
            0,
            1,
            2,
            3,
            *(v for v in vars(self.meta_model.config).values() if type(v) is int and 0 <= v < info.shape[0]),
        ]
        rows = torch.unique(torch.cat([rows, torch.tensor(extra)]))
        rows = rows[(rows >= 0) & (rows < info.shape[0])]
        set_module_tensor(module, "weight", read_rows(info, rows).float().to(self.buffer_device))
        rows, padding, module.padding_idx = rows.to(self.buffer_device), module.padding_idx, None

        def renumber(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            found = torch.searchsorted(rows, args[0]).clamp_max(len(rows) - 1)
            if not torch.equal(rows[found], args[0]):
                raise SurgeryError(
                    f"{path}: the model looks up ids that are not in its input; give input tensors instead of text"
                )
            return (found, *args[1:])

        handle = module.register_forward_pre_hook(renumber)

        def undo() -> None:
            handle.remove()
            module.padding_idx = padding
            set_module_tensor(module, "weight", torch.empty(info.shape, device="meta"))

        return undo

    def _hook_layer(self, path: str, visit: LayerFn) -> Callable[[], None]:
        layer = self.meta_model.module(path)
        forward = layer.forward

        def hook(*args: Any, **kwargs: Any) -> Any:
            hidden, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
            call = LayerCall(path, layer, forward, hidden, rest, kwargs, self.device)
            self.meta_model.load_module(path, self.device)
            try:
                return visit(call)
            finally:
                self.meta_model.unload_module(path)
                trim_memory()

        layer.forward = hook  # of this instance only
        return lambda: layer.__dict__.pop("forward", None)

    def record_moment_bytes(self, tensors: Iterable[Tensor | None]) -> None:
        """What visitors hold of second moments, for the report."""
        self.moment_bytes = max(self.moment_bytes, sum(t.numel() * t.element_size() for t in tensors if t is not None))

    def writable_buffer(self, hidden_BTD: Tensor) -> Tensor:
        """A buffer that a layer's output may overwrite: ours already, or a copy."""
        if any(hidden_BTD is buffer for buffer in self._buffers):
            return hidden_BTD
        buffer = self.copy_hidden(hidden_BTD)
        self._buffers.append(buffer)
        return buffer

    def copy_hidden(self, hidden_BTD: Tensor, copies: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
        """A copy, in a file where `copies` of them would exceed the limit."""
        size = hidden_BTD.numel() * dtype.itemsize
        self.hidden_bytes = max(self.hidden_bytes, size * copies)
        if size * copies <= self.limit:
            return hidden_BTD.to(self.buffer_device, dtype, copy=True)
        file = tempfile.NamedTemporaryFile(dir=self.scratch, prefix="hidden-", delete=True)  # noqa: SIM115
        with file:  # unlinked at the end: the mapping keeps it, and a kill leaves nothing behind
            _allocate_file(file.fileno(), size)
            flat = torch.from_file(file.name, shared=True, size=hidden_BTD.numel(), dtype=dtype)
        return flat.view(hidden_BTD.shape).copy_(hidden_BTD)


def _allocate_file(descriptor: int, size: int) -> None:
    """Every byte, now: where the disk is full when a mapped page is written, the system kills the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def capture_input(module: nn.Module, caught: list[Tensor]) -> Callable[[], None]:
    """Give `module` a forward that keeps its input and returns a sliver of it."""

    def forward(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        caught.append(hidden)
        return hidden[..., :1]

    module.forward = forward
    return lambda: module.__dict__.pop("forward", None)


Phase = tuple[int, int, AbstractContextManager[Any]]


def run_phases(call: LayerCall, phases: list[Phase], runner: LayerRunner) -> Any:
    """Run rows first:last of each phase through the layer, in steps, inside the phase's context, writing over
    their hidden states; what the context gives is called after each turn (surgery.calibration.partition). The layer's output, whole,
    in the shape it gave it; tensors besides the hidden states are joined along the batch where they have one."""
    step, found = runner.chunk_rows(call.hidden_BTD.shape[1]), LayerOutputs(len(call.hidden_BTD))
    for first, last, context in phases:
        with context as after:
            for round_ in runner.rounds(first, last):
                for start, stop in round_.chunks(step):
                    runner.row = start
                    hidden = found.add(call.apply(start, stop), start, stop)
                    call.hidden_BTD[start:stop] = hidden.to(call.hidden_BTD.device)
                if after is not None:
                    after(round_)
    if not found.slices:  # more processes than parts: the model goes on with the shape of an output
        found.add(call.apply(0, 1), 0, 1)
    return found.join(call.hidden_BTD)


class LayerOutputs:
    """Outputs of a layer besides hidden states, collected chunk by chunk of `batch` rows; none if it returns a tensor."""

    def __init__(self, batch: int):
        self.batch, self.kind = batch, Tensor
        self.slices: list[slice] = []
        self.extras: list[tuple[Any, ...]] = []

    def add(self, out: Any, start: int, stop: int) -> Tensor:
        """Record the outputs of rows start:stop and return their hidden states."""
        self.slices.append(slice(start, stop))
        if isinstance(out, Tensor):
            return out
        self.kind = type(out)
        self.extras.append(tuple(out[1:]))
        return out[0]

    def join(self, hidden_BTD: Tensor) -> Any:
        """Return the layer's whole output with these hidden states."""
        if self.kind is Tensor:
            return hidden_BTD
        return self.kind([hidden_BTD, *(self._join_values(values) for values in zip(*self.extras))])

    def _join_values(self, values: tuple[Any, ...]) -> Any:
        one, rows = values[0], self.slices[0]
        if not (isinstance(one, Tensor) and one.dim() > 1 and one.shape[0] == rows.stop - rows.start):
            return one
        whole = one.new_zeros(self.batch, *one.shape[1:])  # rows of others stay so
        for rows, value in zip(self.slices, values):
            whole[rows] = value
        return whole
