"""The engine of a conversion: the rows of several versions of the model run through its layers together, once.

A stream is what one version of the model computes on some calibration samples: the original, the model as converted so
far, a variant on trial. The rows of all streams lie in one batch, one stream behind the other. A pass visits one layer
after the other; it may fit matrices or measure errors there, and returns the context in which each stream's rows run
through the layer: unchanged, or with modules replaced.

    class Divergence:
        def visit(self, layer):
            return {"original": nullcontext(), "converted": replaced_attention(layer.path)}

    streams = Streams(runner, samples, {"original": Stream(held_out), "converted": Stream(held_out)})
    final = streams.run(Divergence())    # by stream, what reaches the head, (B, T, D)

One layer is in memory at a time, and the rows of all streams between two layers. Passes that need gradients (Fisher
information, tuning of the whole model) are `surgery.conversion.gradients.GradientPass`es.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import NO_PERIOD, LayerCall, LayerFn, LayerRunner, run_phases
from surgery.calibration.partition import Segment

if TYPE_CHECKING:
    from surgery.architectures.linears import ModelLayout
    from surgery.conversion.gradients import GradientPass

Contexts = Mapping[str, AbstractContextManager[Any]]  # of the streams that run through a layer, in order


@dataclass(frozen=True)
class Stream:
    """The rows of one version of the model.

    samples: the calibration samples that it runs. shards: the most row shards that processes divide it into; 0 where
    each process runs all rows by itself. beside: the stream of the same samples whose rows run in the same processes,
    row by row; "" if there is none.
    """

    samples: range
    shards: int = 0
    beside: str = ""


class Pass(Protocol):
    """What happens at each layer."""

    def visit(self, layer: Layer) -> Contexts:
        """Return the context in which each stream's rows run through the layer.

        A stream that is left out does not run there.

        If a context yields a function, it is called after each round of rows (see `surgery.calibration.partition`).
        """


@dataclass(frozen=True)
class Visitor:
    """A pass made of one function."""

    visit: Callable[[Layer], Contexts]


@dataclass(frozen=True)
class Layer:
    """A layer in memory, and the rows that reach it. call: its forward, with the rows of all streams."""

    call: LayerCall
    streams: Streams

    @property
    def path(self) -> str:
        """The layer's module path."""
        return self.call.path

    def hidden(self, name: str) -> Tensor:
        """Return a view of the hidden states of a stream, (B, T, D)."""
        return rows_of(self.call.hidden_BTD, self.streams.rows[name])

    def branch(self, source: str, target: str) -> None:
        """Let the stream `target` go on from the hidden states of `source`."""
        self.hidden(target).copy_(self.hidden(source))


@dataclass(frozen=True)
class FinalStates:
    """What reaches the head in each stream. x_BTD: of all streams. rows: of each stream in it."""

    x_BTD: Tensor
    rows: Mapping[str, range]

    def __getitem__(self, name: str) -> Tensor:
        """Return a view of a stream's states, (B, T, D)."""
        return rows_of(self.x_BTD, self.rows[name])

    def through(self, first: str, last: str) -> Tensor:
        """Return a view of the states of several streams that follow each other in the batch, (B, T, D)."""
        return rows_of(self.x_BTD, range(self.rows[first].start, self.rows[last].stop))


class Streams:
    """Named streams of rows, and their run through the layers.

    rows: the rows of each stream in the batch. offset: the distance of the streams with `beside` from those they stand
    beside. rows_at_once: rows in one forward of a layer; None for as many as suit the device.

    Streams with `beside` come last and stand beside all the others, in the same order.
    """

    def __init__(
        self,
        runner: LayerRunner,
        samples: CalibrationSet,
        streams: Mapping[str, Stream],
        *,
        rows_at_once: int | None = None,
    ):
        self.runner, self.samples, self.streams, self.rows_at_once = runner, samples, dict(streams), rows_at_once
        self.rows: dict[str, range] = {}
        first = 0
        for name, stream in streams.items():
            self.rows[name] = range(first, first + len(stream.samples))
            first += len(stream.samples)
        offsets = {
            self.rows[name].start - self.rows[stream.beside].start for name, stream in streams.items() if stream.beside
        }
        assert len(offsets) <= 1, "streams stand beside all others, in the same order"
        self.offset = offsets.pop() if offsets else 0

    @classmethod
    def of_trial(
        cls, runner: LayerRunner, samples: CalibrationSet, variants: Mapping[str, Any] | None = None
    ) -> Streams:
        """Return the streams of a trial in one process: "original" with all samples, and the held-out ones for each
        variant.
        """
        variants = variants or {}
        assert "original" not in variants
        held_out = {name: Stream(samples.held_out) for name in variants}
        return cls(runner, samples, {"original": Stream(range(samples.rows)), **held_out})

    def inputs(self) -> dict[str, Tensor]:
        """Return the model's keyword arguments for the whole batch."""
        samples = [stream.samples for stream in self.streams.values()]
        return {
            name: torch.cat([x[rows.start : rows.stop] for rows in samples]) for name, x in self.samples.inputs.items()
        }

    def step(self, length: int) -> int:
        """Return the number of rows of `length` tokens in one forward of a layer."""
        return self.rows_at_once or self.runner.chunk_rows(length)

    def sample(self, row: int) -> int:
        """Return the calibration sample of a row of the batch, in the streams of a conversion."""
        return row - self.offset if self.offset and row >= self.offset else row

    @torch.no_grad()
    def run(self, visitor: Pass, done: Callable[[], None] = lambda: None) -> FinalStates:
        """Run all streams through all layers, and return what reaches the head, with the rows of all processes. done:
        called after each layer.
        """

        def visit(call: LayerCall) -> Any:
            call.hidden_BTD = self.runner.writable_buffer(call.hidden_BTD)
            contexts = visitor.visit(Layer(call, self))
            phases = [(self.rows[name].start, self.rows[name].stop, context) for name, context in contexts.items()]
            out = run_phases(call, phases, self.runner, self.rows_at_once)
            done()
            return out

        final_BTD = self.runner.gather_rows(self._run_model(visit))
        return FinalStates(final_BTD, self.rows)

    def run_with_gradients(self, gradient_pass: GradientPass) -> Tensor:
        """Return what reaches the head for all rows (B, T, D), connected to the inputs by autograd.

        Rows of other processes are undefined.
        """
        with torch.enable_grad():
            return self._run_model(lambda call: gradient_pass.run_layer(Layer(call, self)))

    def _run_model(self, visit: LayerFn) -> Tensor:
        segments: list[Segment] = [
            (self.rows[name].start, self.rows[name].stop, stream.shards)
            for name, stream in self.streams.items()
            if stream.shards
        ]
        return self.runner.run(self.inputs(), visit, segments, self.offset or NO_PERIOD)


def waits_for(layout: ModelLayout, path: str, first: str) -> bool:
    """Return whether a stream that begins at the layer `first` skips the layer `path`, because it will begin above it.

    An encoder runs for all streams: decoders read its output.
    """
    layers = layout.layers
    if not first or layers.index(path) >= layers.index(first):
        return False
    return layout.tower(path) == layout.tower(first)


def rows_of(x_BTD: Tensor, rows: range) -> Tensor:
    """Return a view of these rows of the batch, (B, T, D)."""
    return x_BTD[rows.start : rows.stop]
