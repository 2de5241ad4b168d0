"""Run a meta-device model one layer at a time, with transformers' own forward.

The model is called once on all calibration rows. The forward of each layer instance is replaced by a hook that loads
the layer's weights, passes the call to a function (`LayerFn`), and unloads the weights. So masks, rotary tables,
position biases and cross attention are computed by transformers for every family, and only one layer is in memory at a
time.

`run_phases` runs groups of rows through one layer, each group inside its own context manager (original weights, or
converted weights swapped in).
"""

from __future__ import annotations

import inspect
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.architectures.towers import TEXT, tower_name
from surgery.calibration.data import check_model_inputs, token_embedding
from surgery.calibration.partition import Round, RowPartition, Segment
from surgery.checkpoint.meta_model import MetaModel, set_module_tensor
from surgery.checkpoint.safetensors_io import read_rows
from surgery.core.device import trim_memory
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError

CHUNK_TOKENS = {"cpu": 2048, "cuda": 16384}  # tokens in one forward of a layer


def default_buffer_limit(device: torch.device) -> int:
    """Return the bytes of hidden states to hold on the device: 2 GiB, or a quarter of the free GPU memory if that is
    more.
    """
    return max(2 << 30, torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 0)


NO_PERIOD = 2**62  # a period that no batch reaches: the partition is not repeated


class StopForward(Exception):
    """Raised by a hook to end a forward pass early."""


@dataclass
class LayerCall:
    """The arguments of a layer's forward for all rows; `apply` runs the forward on some of them.

    hidden_BTD may be stored on another device or in a file; rows are moved to `device` for the forward.

    A vision tower may call its layers with several entries of the batch axis for each row: k images (B k, P, D), or the
    patches of all images in one sequence (B P, D). hidden_BTD then has the entries of a row side by side, (B, k P, D)
    or (B, P, D). entries: k or P; shape: the axes after the batch axis in the layer's forward, (P, D) or (D,).
    """

    path: str
    layer: nn.Module
    forward: Callable[..., Any]
    hidden_BTD: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    entries: int = 1
    shape: tuple[int, ...] = ()

    def rows(self, first: int, last: int) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for rows first:last. Tensors with the batch as leading axis are sliced."""
        batch, entries = self.hidden_BTD.shape[0], self.entries

        def slice_rows(value: Any, name: str = "") -> Any:
            if isinstance(value, Tensor):
                if batch == 1:
                    return value.to(self.device)
                if "cu_seqlens" in name and value.dim() == 1:
                    return _slice_borders(value, first * entries, last * entries, name).to(self.device)
                if (name == "alibi" or name.endswith("states")) and value.dim() == 3 and value.shape[0] % batch == 0:
                    per_row = value.shape[0] // batch  # entries of a row: heads (BLOOM), tiles of an image (Mllama)
                    return value[first * per_row : last * per_row].to(self.device)
                if value.dim() > 1 and value.shape[0] == batch * entries:
                    value = value[first * entries : last * entries]
                elif (
                    value.dim() > 2 and value.shape[0] in (3, 4) and value.shape[1] == batch
                ):  # axes of multimodal RoPE
                    value = value[:, first:last]
                return value.to(self.device)
            if isinstance(value, (tuple, list)):
                return type(value)(slice_rows(v) for v in value)
            return {k: slice_rows(v, k) for k, v in value.items()} if isinstance(value, dict) else value

        return (
            self.hidden_BTD[first:last].to(self.device),
            tuple(slice_rows(a) for a in self.args),
            slice_rows(self.kwargs),
        )

    def apply(self, first: int, last: int) -> Any:
        """Return the output of the layer's forward for rows first:last."""
        return self.run(*self.rows(first, last))

    def run(self, hidden_BTD: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of the layer's forward for some rows; its hidden states have the shape of `hidden_BTD`."""
        out = self.forward(self.unfold(hidden_BTD), *args, **kwargs)
        if isinstance(out, Tensor):
            return self._fold(out, hidden_BTD)
        return type(out)([self._fold(out[0], hidden_BTD), *out[1:]])

    def unfold(self, hidden_BTD: Tensor) -> Tensor:
        """Return hidden states with the axes of the layer's forward, (B k, P, D) or (B P, D)."""
        return hidden_BTD.reshape(-1, *self.shape) if self.shape else hidden_BTD

    def _fold(self, out: Tensor, hidden_BTD: Tensor) -> Tensor:
        if out.numel() != hidden_BTD.numel():
            raise SurgeryError(
                f"calibration: {self.path} returns hidden states of shape {list(out.shape)} for "
                f"{list(self.unfold(hidden_BTD).shape)}; a "
                "layer must keep their shape. Leave its tower as it is (towers), or its list of layers dense (rules), "
                "or convert without "
                "calibration"
            )
        return out.reshape(hidden_BTD.shape) if self.shape else out


def _slice_borders(borders: Tensor, first: int, last: int, name: str) -> Tensor:
    """Return the borders of the sequences in first:last, from 0. borders: cumulative lengths of the sequences in one
    row of tokens.
    """
    row_borders = borders[(borders >= first) & (borders <= last)]
    if len(row_borders) < 2 or int(row_borders[0]) != first or int(row_borders[-1]) != last:
        raise SurgeryError(
            f"calibration: {name} {borders[:6].tolist()}.. has no border at {first} and {last}, where rows of the "
            "calibration inputs begin and "
            "end. Give images of one size, the same number in every row"
        )
    return row_borders - first


LayerFn = Callable[[LayerCall], Any]


class LayerRunner:
    """Runs a meta-device model one layer at a time on a batch of rows.

    layers, head: module paths. limit: bytes of hidden states above which they are kept on the CPU, and there in a
    memory-mapped file in the folder `scratch`. ranks: the processes that share the rows; each runs its own rows, but
    its buffers hold all rows. Attributes set later: skip: paths of modules that the inputs do not reach, whose weights
    are not loaded. packed: see CalibrationSet. hidden_bytes, moment_bytes: the peak memory of hidden states and second
    moments.
    """

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
        self.skip: tuple[str, ...] = ()
        self.packed: frozenset[str] = frozenset()
        self.count = 0  # rows of the current batch
        self.limit, self.scratch, self.ranks = limit or default_buffer_limit(device), scratch, ranks or DistContext()
        self.partition = RowPartition(self.ranks, 1, (), 1)
        self.row = 0  # the first row of the current chunk
        self.hidden_bytes = self.moment_bytes = 0
        self._buffers: list[Tensor] = []
        self.buffer_device = torch.device("cpu")

    def single_process(self) -> LayerRunner:
        """Return a runner with the same settings that runs all rows in this process."""
        return self._like(self.layers, self.skip, DistContext())

    def with_layers(self, layers: tuple[str, ...], skip: tuple[str, ...]) -> LayerRunner:
        """Return a runner with the same settings for some of the layers. skip: modules that the inputs do not reach."""
        return self._like(layers, skip, self.ranks)

    def with_model(self, meta_model: MetaModel) -> LayerRunner:
        """Return a runner with the same settings for another model, whose layers have the same paths."""
        return self._like(self.layers, self.skip, self.ranks, meta_model)

    def _like(
        self,
        layers: tuple[str, ...],
        skip: tuple[str, ...],
        ranks: DistContext,
        meta_model: MetaModel | None = None,
    ) -> LayerRunner:
        runner = LayerRunner(
            meta_model or self.meta_model,
            layers,
            self.head,
            self.device,
            limit=self.limit,
            scratch=self.scratch,
            ranks=ranks,
        )
        runner.skip, runner.packed = skip, self.packed
        return runner

    def chunk_rows(self, length: int) -> int:
        """Return the number of rows of `length` tokens in one forward of a layer."""
        return max(1, CHUNK_TOKENS.get(self.device.type, 2048) // max(1, length))

    def run(
        self,
        inputs: dict[str, Tensor],
        visit: LayerFn,
        segments: Sequence[Segment] = (),
        period: int = NO_PERIOD,
    ) -> Tensor:
        """Run the model with `visit` in place of each layer's forward, and return the head's input (B, T, D).

        Without a head, the model's first output is returned. inputs: keyword arguments of the model, batch axis first.
        segments, period: how rows are divided over processes (see `surgery.calibration.partition`). Rows of other
        processes are undefined in the result until `gather_rows` is called.
        """
        check_model_inputs({k: self._unpack(k, v) for k, v in inputs.items()}, self.meta_model.model)
        assert segments or self.ranks.count == 1
        rows = next(iter(inputs.values()))
        self.count = len(rows)
        self.partition = RowPartition(self.ranks, rows.shape[1] if rows.dim() == 2 else 256, segments, period)
        self.buffer_device = self._choose_buffer_device(inputs)
        restore = self._prepare(inputs)
        try:
            for path in self.layers:
                restore.append(self._hook_layer(path, visit))
            caught: list[Tensor] = []
            if self.head:
                restore.append(capture_input(self.meta_model.module(self.head), caught))
            out = self._call({k: self._unpack(k, v).to(self.buffer_device) for k, v in inputs.items()})
            return caught[-1] if caught else output_features(out)
        finally:
            for undo in reversed(restore):
                undo()
            self._buffers.clear()

    def _unpack(self, name: str, value: Tensor) -> Tensor:
        """Return an input as the model takes it: (B k, ..) for a packed one, which is stored as (B, k, ..)."""
        return value.flatten(0, 1) if name in self.packed else value

    def gather_rows(self, x_BTD: Tensor) -> Tensor:
        """Fill in the rows of the other processes, in place, and return x."""
        for first, last, owner in self.partition.row_owners(len(x_BTD)) if self.ranks.count > 1 else ():
            self.ranks.broadcast_(x_BTD[first:last], owner)
        return x_BTD

    def rounds(self, first: int, last: int) -> list[Round]:
        """Return the rounds in which the processes work through rows first:last."""
        return self.partition.rounds(first, last)

    def _call(self, inputs: dict[str, Tensor]) -> Any:
        try:
            return self.meta_model.model(**inputs, use_cache=False)
        except TypeError as error:
            if "use_cache" not in str(error):
                raise
            return self.meta_model.model(**inputs)  # encoders whose forward has no use_cache

    def _choose_buffer_device(self, inputs: dict[str, Tensor]) -> torch.device:
        """Return the device that holds the hidden states of all rows between layers."""
        config = self.meta_model.config.get_text_config()
        width: int = getattr(config, "hidden_size", None) or getattr(config, "d_model", None) or 1024
        rows = next(iter(inputs.values()))
        tokens = rows.shape[0] * (rows.shape[1] if rows.dim() == 2 else 1024)
        self.hidden_bytes = max(self.hidden_bytes, tokens * width * 4)
        return self.device if tokens * width * 4 <= self.limit else torch.device("cpu")

    def _prepare(self, inputs: dict[str, Tensor]) -> list[Callable[[], None]]:
        """Load all weights but those of layers, head and large embeddings; load large embeddings with only the rows in
        use.
        """
        model, meta_model, restore = self.meta_model.model, self.meta_model, []
        tokens = token_embedding(model)
        vocabulary = None if tokens is None else tokens.num_embeddings
        large = [
            p
            for p, m in model.named_modules()
            if isinstance(m, nn.Embedding) and m.weight.numel() > 2**20 and m.num_embeddings == vocabulary
        ]
        large = [
            p for p in large if not any(p.startswith(f"{layer}.") for layer in self.layers)
        ]  # a layer loads its own
        outside = [*self.layers, *self.skip, *large, *([self.head] if self.head else [])]
        meta_model.load_module("", self.buffer_device, skip=outside)
        for path in large:
            restore.append(self._compact_embedding(path, inputs))
        for module in model.modules():  # rotary tables and the like, computed at construction
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(self.buffer_device)
        return restore

    def _compact_embedding(self, path: str, inputs: dict[str, Tensor]) -> Callable[[], None]:
        """Give the embedding a table of only the rows in use, and renumber its input ids in a forward pre-hook."""
        module: Any = self.meta_model.module(path)
        info = self.meta_model.tensor_info(f"{path}.weight")
        rows = torch.unique(torch.cat([t.flatten() for t in inputs.values() if t.dtype == torch.int64]).cpu())
        # The model may look up ids of its config, too (decoder start, padding, end of text).
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
            new_ids = torch.searchsorted(rows, args[0].contiguous()).clamp_max(len(rows) - 1)
            if not torch.equal(rows[new_ids], args[0]):
                raise SurgeryError(
                    f"{path}: the model looks up ids that are not in its input, which calibration on text does not "
                    "support. "
                    "Give input tensors (.safetensors) instead of text"
                )
            return (new_ids, *args[1:])

        handle = module.register_forward_pre_hook(renumber)

        def undo() -> None:
            handle.remove()
            module.padding_idx = padding
            set_module_tensor(module, "weight", torch.empty(info.shape, device="meta"))

        return undo

    def _hook_layer(self, path: str, visit: LayerFn) -> Callable[[], None]:
        layer = self.meta_model.module(path)
        forward = layer.forward
        first = next(iter(inspect.signature(forward).parameters))
        read_later = tower_name(self.meta_model.model, path) not in ("", TEXT)

        def hook(*args: Any, **kwargs: Any) -> Any:
            hidden, rest = (args[0], args[1:]) if args else (kwargs.pop(first), ())
            call = self._fold_call(LayerCall(path, layer, forward, hidden, rest, kwargs, self.device))
            if (
                read_later
            ):  # LLaVA and Mllama read hidden states of earlier layers of the vision tower: do not overwrite them
                self._buffers.clear()
            self.meta_model.load_module(path, self.device)
            try:
                out = visit(call)
                if not call.shape:
                    return out
                return call.unfold(out) if isinstance(out, Tensor) else type(out)([call.unfold(out[0]), *out[1:]])
            finally:
                self.meta_model.unload_module(path)
                trim_memory()

        layer.forward = hook  # of this instance only
        return lambda: layer.__dict__.pop("forward", None)

    def _fold_call(self, call: LayerCall) -> LayerCall:
        """Return the call with one entry of the batch axis for each row of the inputs, see LayerCall."""
        hidden = call.hidden_BTD
        if len(hidden) == self.count and hidden.dim() > 2:
            return call
        if len(hidden) % self.count:
            raise SurgeryError(
                f"calibration: {call.path} gets hidden states of shape {list(hidden.shape)} for {self.count} rows of "
                "inputs, whose number must "
                "divide the first axis. Give the same number of images, of one size, in every row; or leave its tower "
                "as it is (towers)"
            )
        shape, entries = tuple(hidden.shape[1:]), len(hidden) // self.count
        return replace(call, hidden_BTD=hidden.reshape(self.count, -1, shape[-1]), entries=entries, shape=shape)

    def record_moment_bytes(self, tensors: Iterable[Tensor | None]) -> None:
        """Update the peak memory of second moments, for the report."""
        self.moment_bytes = max(self.moment_bytes, sum(t.numel() * t.element_size() for t in tensors if t is not None))

    def writable_buffer(self, hidden_BTD: Tensor) -> Tensor:
        """Return a buffer that may be overwritten: the tensor itself if it is one of this runner's buffers, else a
        copy.
        """
        layout = hidden_BTD.data_ptr(), hidden_BTD.shape, hidden_BTD.stride()
        if any(layout == (buffer.data_ptr(), buffer.shape, buffer.stride()) for buffer in self._buffers):
            return hidden_BTD
        buffer = self.copy_hidden(hidden_BTD)
        self._buffers.append(buffer)
        return buffer

    def copy_hidden(self, hidden_BTD: Tensor, copies: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a copy of the hidden states, in a memory-mapped file if `copies` of them would exceed the limit."""
        size = hidden_BTD.numel() * dtype.itemsize
        self.hidden_bytes = max(self.hidden_bytes, size * copies)
        if size * copies <= self.limit:
            return hidden_BTD.to(self.buffer_device, dtype, copy=True)
        return self.file_tensor(hidden_BTD.shape, dtype).copy_(hidden_BTD)

    def file_tensor(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialized CPU tensor in a memory-mapped file in the folder `scratch`."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        file = tempfile.NamedTemporaryFile(dir=self.scratch, prefix="hidden-", delete=True)  # noqa: SIM115
        with file:  # unlinked at the end: the mapping keeps its contents, and a killed run leaves no file
            _allocate_file(file.fileno(), size)
            flat = torch.from_file(file.name, shared=True, size=count, dtype=dtype)
        return flat.view(*shape)


def _allocate_file(descriptor: int, size: int) -> None:
    """Allocate all bytes now: if the disk is full when a mapped page is written, the system kills the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def capture_input(module: nn.Module, caught: list[Tensor]) -> Callable[[], None]:
    """Replace the forward of `module` by one that appends its input to `caught`; return a function that undoes it.

    The new forward returns the first feature of the first row of its input, so that no logits are computed.
    """

    def forward(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        caught.append(hidden)
        return hidden[:1, ..., :1]

    module.forward = forward
    return lambda: module.__dict__.pop("forward", None)


def output_features(out: Any) -> Tensor:
    """Return the output that conversions compare, with the rows as first axis: the first tensor of a model's output.

    A model of image and text (CLIP, SigLIP) returns the similarities of all pairs of rows first; its embeddings of
    images and texts, side by side, are used instead.
    """
    pair = [getattr(out, name, None) for name in ("text_embeds", "image_embeds")]
    if all(isinstance(x, Tensor) and x.dim() == 2 for x in pair) and len(pair[0]) == len(pair[1]):  # type: ignore[arg-type]
        return torch.cat(pair, dim=-1)[:, None]  # type: ignore[arg-type]
    features: Tensor = out[0]
    return features


Phase = tuple[int, int, AbstractContextManager[Any]]


def run_phases(call: LayerCall, phases: list[Phase], runner: LayerRunner, step: int | None = None) -> Any:
    """Run the rows of each phase through the layer inside the phase's context manager, and return the layer's output.

    phases: (first, last, context) for rows first:last. They run in chunks of `step` rows (None: as many as suit the
    device), and their hidden states are overwritten. If the context yields a function, it is called after each round
    (see `surgery.calibration.partition`). The output has the form that the layer returns; its further tensors are
    concatenated along the batch axis if they have one.
    """
    step = step or runner.chunk_rows(call.hidden_BTD.shape[1])
    outputs = LayerOutputs(len(call.hidden_BTD))
    for first, last, context in phases:
        with context as after:
            for round_ in runner.rounds(first, last):
                for start, stop in round_.chunks(step):
                    runner.row = start
                    hidden = outputs.add(call.apply(start, stop), start, stop)
                    call.hidden_BTD[start:stop] = hidden.to(call.hidden_BTD.device)
                if after is not None:
                    after(round_)
    if not outputs.slices:  # more processes than row shards: one row gives the form of the output
        outputs.add(call.apply(0, 1), 0, 1)
    return outputs.join(call.hidden_BTD)


class LayerOutputs:
    """Outputs of a layer besides the hidden states, collected over chunks of `batch` rows; empty if it returns a
    tensor.
    """

    def __init__(self, batch: int):
        self.batch, self.kind = batch, Tensor
        self.slices: list[slice] = []
        self.extras: list[tuple[Any, ...]] = []

    def add(self, out: Any, start: int, stop: int) -> Tensor:
        """Store the output of rows start:stop and return its hidden states."""
        self.slices.append(slice(start, stop))
        if isinstance(out, Tensor):
            return out
        self.kind = type(out)
        self.extras.append(tuple(out[1:]))
        hidden: Tensor = out[0]
        return hidden

    def join(self, hidden_BTD: Tensor) -> Any:
        """Return the output of all rows, in the form that the layer returns."""
        if self.kind is Tensor:
            return hidden_BTD
        return self.kind([hidden_BTD, *(self._join_values(values) for values in zip(*self.extras))])

    def _join_values(self, values: tuple[Any, ...]) -> Any:
        first, rows = values[0], self.slices[0]
        if not (isinstance(first, Tensor) and first.dim() > 1 and first.shape[0] == rows.stop - rows.start):
            return first
        joined = first.new_zeros(self.batch, *first.shape[1:])  # rows of other processes stay zero
        for rows, value in zip(self.slices, values):
            joined[rows] = value
        return joined
