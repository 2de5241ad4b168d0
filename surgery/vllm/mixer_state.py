"""States of linear mixers in a server's cache, and a mixer's output for a batch of tokens of several requests.

Needs no vLLM.

A server keeps one row of numbers for each request. What a mixer remembers of a sequence (sums, rings, sinks, inputs of
a convolution) lies side by side in that row, in float32 and in the size of the longest sequence:

    layout = StateLayout(mixer, longest=4096)
    rows = torch.zeros(requests, layout.size)
    out_NHV = mix_batch(mixer, layout, rows, batch, tokens)      updates the rows of the batch's requests

How many tokens a row has seen is not stored: the server tells it. A row whose request has seen none holds what another
request left: `StateLayout.read` takes it as empty. A first piece may be one token long (a prompt of one token, or one
token of a step's budget left), and may then come among the decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers.base import MixerInputs, MixerState
from surgery.mixers.linear import LinearMixer
from surgery.mixers.masks.log_linear import Hierarchical

BUCKETS = "mask.buckets"  # the sums of log-linear attention, of which there are more the longer a sequence is


class StateLayout:
    """Where each tensor of a mixer's state lies in a row. longest: tokens of the longest sequence.

    size: numbers in a row. Raises SurgeryError if the state grows with the sequence in another way than log-linear
    attention's.
    """

    def __init__(self, mixer: LinearMixer, longest: int):
        self.mask = mixer.config.mask
        self.delay = mixer.config.window + mixer.config.sinks
        self.shapes = {name: tuple(t.shape[1:]) for name, t in mixer.empty_state(1, "cpu").tensors.items()}
        if BUCKETS in self.shapes:
            self.shapes[BUCKETS] = (self.count_buckets(longest), *self.shapes[BUCKETS][1:])
        for name, shape in self.shapes.items():
            if 0 in shape and name.startswith("mask."):
                raise SurgeryError(
                    f"the state {name!r} of mask {self.mask.name!r} grows with the sequence and cannot be served"
                )
        self.size = sum(prod(shape) for shape in self.shapes.values())

    def count_buckets(self, seen: int) -> int:
        """Return how many sums of log-linear attention are in use after `seen` tokens."""
        if not isinstance(self.mask, Hierarchical):
            return 0
        bits = self.mask.block_bits
        return max(0, max(0, seen - self.delay).bit_length() - bits) + (bits > 0)

    def read(self, rows_BS: Tensor, seen: Sequence[int], seen_B: Tensor) -> MixerState:
        """Return the state of the rows, (B, size), whose requests have seen that many tokens; zeros, which an empty state
        is, for those that have seen none. seen_B: the same numbers on the rows' device.
        """
        if 0 in seen:
            rows_BS = rows_BS.masked_fill((seen_B == 0).unsqueeze(1), 0)  # not a product: the rows may hold NaN
        parts = rows_BS.split([prod(shape) for shape in self.shapes.values()], dim=1)
        tensors = {
            n: flat.unflatten(1, shape) if shape else flat for (n, shape), flat in zip(self.shapes.items(), parts)
        }
        if BUCKETS in tensors:
            tensors[BUCKETS] = tensors[BUCKETS][:, : self.count_buckets(max(seen))]
        return MixerState(seen_B, tensors, max(seen))

    def views(self, cache_SN: Tensor) -> dict[str, Tensor]:
        """Return each tensor of the state for all rows of a cache, (rows, ..): views, so that a row is updated in
        place.
        """
        views, start = {}, 0
        for name, shape in self.shapes.items():
            views[name] = cache_SN[:, start : start + prod(shape)].unflatten(1, shape)
            start += prod(shape)
        return views

    def write(self, state: MixerState) -> Tensor:
        """Return the rows, (B, size) in float32, of a state."""
        batch, parts = len(state.seen_B), []
        for name, shape in self.shapes.items():
            t = state.tensors[name].float()
            if name == BUCKETS and t.shape[1] != shape[0]:
                if t.shape[1] > shape[0]:
                    raise SurgeryError(
                        f"a request is longer than the {shape[0]} sums of log-linear attention that were allocated"
                    )
                t = torch.cat([t, t.new_zeros(batch, shape[0] - t.shape[1], *shape[1:])], dim=1)
            parts.append(t.reshape(batch, prod(shape)))
        return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class Batch:
    """The requests of one call, those that decode one token first.

    decodes: their number. starts: first token of each request in the call, and the number of all tokens. lengths:
    tokens of each request, those of this call included. rows_R: the row of each request in the cache. seen_R: tokens of
    each request before this call, on the cache's device.
    """

    decodes: int
    starts: list[int]
    lengths: list[int]
    rows_R: Tensor
    seen_R: Tensor

    @classmethod
    def of(cls, decodes: int, starts: list[int], lengths: list[int], rows_R: Tensor) -> Batch:
        """Return the batch, with seen_R computed here and moved to the device of rows_R."""
        seen = [length - (stop - start) for length, start, stop in zip(lengths, starts, starts[1:], strict=False)]
        return cls(decodes, starts, lengths, rows_R, torch.tensor(seen, device=rows_R.device))


class Tokens(NamedTuple):
    """Tokens of a call, of one request after another. rope: (cos, sin) of each token, (N, rotary), or None."""

    q_NHK: Tensor
    k_NGK: Tensor
    v_NGV: Tensor
    x_ND: Tensor
    rope: tuple[Tensor, Tensor] | None

    def of_request(self, start: int, stop: int) -> MixerInputs:
        """Return the tokens start .. stop - 1 as one sequence."""
        q, k, v = (t[start:stop].transpose(0, 1).unsqueeze(0) for t in self[:3])
        rope = None if self.rope is None else (self.rope[0][None, start:stop], self.rope[1][None, start:stop])
        return MixerInputs(q, k, v, self.x_ND[None, start:stop], rope=rope)

    def one_each(self, count: int) -> MixerInputs:
        """Return the first `count` tokens as sequences of one token."""
        q, k, v = (t[:count].unsqueeze(2) for t in self[:3])
        rope = None if self.rope is None else (self.rope[0][:count, None], self.rope[1][:count, None])
        return MixerInputs(q, k, v, self.x_ND[:count, None], rope=rope)


def mix_batch(mixer: LinearMixer, layout: StateLayout, cache_SN: Tensor, batch: Batch, tokens: Tokens) -> Tensor:
    """Return the mixer's output for every token, (N, H, V), and write the states after them to the cache (rows,
    layout.size).
    """
    shape, n = mixer.shape, batch.decodes
    out_NHV = tokens.v_NGV.new_zeros(len(tokens.x_ND), shape.heads, shape.value)
    rows_R, seen_R = batch.rows_R.long(), batch.seen_R.long()
    if n:
        seen = [length - 1 for length in batch.lengths[:n]]
        if cache_SN.is_cuda:  # a kernel computes the step, and takes the rows apart from the cache
            state = layout.read(cache_SN[rows_R[:n]], seen, seen_R[:n])
            out_BH1V, after = mixer(tokens.one_each(n), state)
            cache_SN[rows_R[:n]] = layout.write(after)
        else:
            if 0 in seen:
                cache_SN[rows_R[:n][seen_R[:n] == 0], : layout.size] = 0
            out_BH1V = mixer.step_in_pool(tokens.one_each(n), seen_R[:n], layout.views(cache_SN), rows_R[:n])
        out_NHV[:n] = out_BH1V.squeeze(2)
    for request in range(n, len(batch.lengths)):
        start, stop = batch.starts[request], batch.starts[request + 1]
        before = batch.lengths[request] - (stop - start)
        one = slice(request, request + 1)
        state = layout.read(cache_SN[rows_R[one]], [before], seen_R[one])
        out_1HTV, after = mixer(tokens.of_request(start, stop), state)
        cache_SN[rows_R[one]] = layout.write(after)
        out_NHV[start:stop] = out_1HTV[0].transpose(0, 1)
    return out_NHV
