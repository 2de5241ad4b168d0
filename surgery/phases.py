"""Rows of a layer's call run through it in turns, in whatever state a context puts the layer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from surgery.stream import LayerCall, Stream

Phase = tuple[int, int, AbstractContextManager[Any]]


def run_phases(call: LayerCall, phases: list[Phase], stream: Stream) -> Any:
    """Run rows first:last of each phase through the layer, in steps, inside the phase's context, writing over
    their hidden states; what the context gives is called after each turn (surgery.parts). The layer's output, whole,
    in the shape it gave it; tensors besides the hidden states are joined along the batch where they have one."""
    step, found = stream.chunk_rows(call.hidden_BTD.shape[1]), Outputs(len(call.hidden_BTD))
    for first, last, context in phases:
        with context as after:
            for turn in stream.turns(first, last):
                for start, stop in turn.spans(step):
                    stream.row = start
                    hidden = found.add(call.apply(start, stop), start, stop)
                    call.hidden_BTD[start:stop] = hidden.to(call.hidden_BTD.device)
                if after is not None:
                    after(turn)
    if not found.rows:  # more processes than parts: the model goes on with the shape of an output
        found.add(call.apply(0, 1), 0, 1)
    return found.joined(call.hidden_BTD)


class Outputs:
    """What a layer gives besides hidden states, chunk by chunk of `batch` rows; nothing, where it gives a tensor."""

    def __init__(self, batch: int):
        self.batch, self.kind = batch, Tensor
        self.rows: list[slice] = []
        self.extras: list[tuple[Any, ...]] = []

    def add(self, out: Any, start: int, stop: int) -> Tensor:
        """The hidden states among it."""
        self.rows.append(slice(start, stop))
        if isinstance(out, Tensor):
            return out
        self.kind = type(out)
        self.extras.append(tuple(out[1:]))
        return out[0]

    def joined(self, hidden_BTD: Tensor) -> Any:
        if self.kind is Tensor:
            return hidden_BTD
        return self.kind([hidden_BTD, *(self._joined(values) for values in zip(*self.extras))])

    def _joined(self, values: tuple[Any, ...]) -> Any:
        one, rows = values[0], self.rows[0]
        if not (isinstance(one, Tensor) and one.dim() > 1 and one.shape[0] == rows.stop - rows.start):
            return one
        whole = one.new_zeros(self.batch, *one.shape[1:])  # rows of others stay so
        for rows, value in zip(self.rows, values):
            whole[rows] = value
        return whole
