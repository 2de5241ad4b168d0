"""States of linear mixers in a server's cache, and a mixer's output for a batch of tokens of several requests.

Needs no vLLM.

A server keeps one row of numbers for each request. What a mixer remembers of a sequence (sums, rings, sinks, inputs of
a convolution) lies side by side in that row, in float32 and in the size of the longest sequence:

    layout = StateLayout(mixer, longest=4096)
    rows = torch.zeros(requests, layout.size)
    out_NHV = mix_batch(mixer, layout, rows, batch, tokens)      updates the rows of the batch's requests

How many tokens a row has seen is not stored: the server tells it. What a request has not yet written of its row is what
another request left, NaN perhaps: `StateLayout.read` and the kernels take it as empty. A first piece may be one token
long (a prompt of one token, or one token of a step's budget left), and may then come among the decodes.

On a GPU a kernel computes the decodes of a call in place, from the rows and lengths on the device (kernels/window_step).
Mixers that it does not know are gathered, advanced and scattered, for which lengths are read from the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers.base import MixerInputs, MixerState
from surgery.mixers.common.packed_pieces import PackedPieces
from surgery.mixers.linear import LinearMixer, step_in_pool
from surgery.mixers.masks.log_linear import Hierarchical, bucket_plan, count_sums

ROW_NUMBERS = 16
BUCKETS = "mask.buckets"  # the sums of log-linear attention, of which there are more the longer a sequence is


class StateLayout:
    """Where each tensor of a mixer's state lies in a row. longest: tokens of the longest sequence.

    size: numbers in a row. Raises SurgeryError if the state grows with the sequence in another way than log-linear
    attention's.
    """

    def __init__(self, mixer: LinearMixer, longest: int):
        self.mask, self.longest = mixer.config.mask, longest
        self.delay = mixer.config.window + mixer.config.sinks
        device = next(mixer.parameters()).device  # the ring of a window asks the layers of its gates for their sizes
        self.shapes = {name: tuple(t.shape[1:]) for name, t in mixer.empty_state(1, device).tensors.items()}
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
        return count_sums(max(0, seen - self.delay), self.mask.block_bits)

    def check_length(self, seen: int) -> None:
        """Raise SurgeryError if a row has too few sums of log-linear attention for a request of that many tokens."""
        if BUCKETS in self.shapes and self.count_buckets(seen) > self.shapes[BUCKETS][0]:
            raise SurgeryError(
                f"a request is longer than the {self.shapes[BUCKETS][0]} sums of log-linear attention that were allocated"
            )

    def read(self, rows_BS: Tensor, seen: Sequence[int], seen_B: Tensor) -> MixerState:
        """Return the state of the rows, (B, size), whose requests have seen that many tokens; zeros, which an empty state
        is, where they have not written. seen_B: the same numbers on the rows' device.
        """
        tensors = self.views(rows_BS)
        if BUCKETS in tensors:
            tensors[BUCKETS] = tensors[BUCKETS][:, : self.count_buckets(max(seen))]
        # Not a product: the rows may hold NaN.
        tensors = {n: t.masked_fill(~self.is_written(n, t, seen_B), 0) for n, t in tensors.items()}
        return MixerState(seen_B, tensors, max(seen))

    def is_written(self, name: str, t: Tensor, seen_B: Tensor) -> Tensor:
        """Return where the requests of rows have written a tensor of the state, in a shape that broadcasts with it."""
        start_B = (seen_B - self.delay).clamp_min(0)  # tokens that have entered the mask's state
        if name.startswith(("ring.", "sink.")):
            written = torch.arange(t.shape[1], device=t.device) < seen_B.unsqueeze(1)
        elif name == BUCKETS and isinstance(self.mask, Hierarchical) and not self.mask.strong:
            written, _ = bucket_plan(start_B, torch.ones_like(start_B), self.mask.block_bits, t.shape[1])
        else:
            written = (start_B if name.startswith("mask.") else seen_B) > 0
        return written[(...,) + (None,) * (t.dim() - written.dim())]

    def views(self, cache_SN: Tensor) -> dict[str, Tensor]:
        """Return each tensor of the state for all rows of a cache, (rows, ..): views, so that a row is updated in
        place.
        """
        views, start = {}, 0
        for name, shape in self.shapes.items():
            views[name] = cache_SN[:, start : start + prod(shape)].unflatten(1, shape)
            start += prod(shape)
        return views

    def write(self, state: MixerState, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the rows, (B, size) in that dtype, of a state."""
        batch, parts = len(state.seen_B), []
        for name, shape in self.shapes.items():
            t = state.tensors[name].to(dtype)
            if name == BUCKETS and t.shape[1] < shape[0]:
                t = torch.cat([t, t.new_zeros(batch, shape[0] - t.shape[1], *shape[1:])], dim=1)
            elif (
                name == BUCKETS
            ):  # more if the longest row and the longest piece are not of one request; these are dead
                t = t[:, : shape[0]]
            parts.append(t.reshape(batch, prod(shape)))
        return torch.cat(parts, dim=1)


def row_size(layouts: Sequence[StateLayout]) -> int:
    """Return the numbers of a row that holds any of the layouts: a multiple of ROW_NUMBERS, for which kernels are compiled."""
    return -(-max(layout.size for layout in layouts) // ROW_NUMBERS) * ROW_NUMBERS


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

    @cached_property
    def pieces(self) -> PackedPieces:
        """The pieces of prompts behind the decodes, with tables that all mixers share."""
        borders = self.starts[self.decodes :]
        counts = [stop - start for start, stop in pairwise(borders)]
        seen = [length - count for length, count in zip(self.lengths[self.decodes :], counts, strict=True)]
        return PackedPieces(counts, seen, self.rows_R.device)

    @cached_property
    def piece_rows_R(self) -> Tensor:
        """The rows of the pieces, int64, in a tensor of their own: kernels are compiled again for an address that 16 does
        not divide."""
        return self.rows_R[self.decodes :].to(torch.int64, copy=True)

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

    def from_token(self, first: int) -> Tokens:
        """Return the tokens from this number on."""
        rope = None if self.rope is None else (self.rope[0][first:], self.rope[1][first:])
        q_NHK, k_NGK, v_NGV, x_ND = (t[first:] for t in self[:4])
        return Tokens(q_NHK, k_NGK, v_NGV, x_ND, rope)

    def as_rows(self, count: int) -> MixerInputs:
        """Return the tokens as rows of equal length."""
        if count == 1:
            q, k, v, x = (t.unsqueeze(0) for t in self[:4])
            turned = None if self.rope is None else (self.rope[0].unsqueeze(0), self.rope[1].unsqueeze(0))
            return MixerInputs(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), x, rope=turned)
        q, k, v = (t.unflatten(0, (count, -1)).transpose(1, 2) for t in self[:3])
        rope = self.rope
        if rope is not None:
            rope = rope[0].unflatten(0, (count, -1)), rope[1].unflatten(0, (count, -1))
        return MixerInputs(q, k, v, self.x_ND.unflatten(0, (count, -1)), rope=rope)

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
    out_BHV = mix_decodes(mixer, layout, cache_SN, batch, tokens.one_each(n)).squeeze(2) if n else None
    if out_BHV is not None and n == len(batch.lengths):
        return out_BHV
    layout.check_length(max(batch.lengths))
    if out_BHV is None:
        return mix_pieces(mixer, layout, cache_SN, batch, tokens)
    out_NHV = tokens.v_NGV.new_empty(len(tokens.x_ND), shape.heads, shape.value)
    out_NHV[:n] = out_BHV
    first = batch.starts[n]
    out_NHV[first:] = mix_pieces(mixer, layout, cache_SN, batch, tokens.from_token(first))
    return out_NHV


def mix_pieces(mixer: LinearMixer, layout: StateLayout, cache_SN: Tensor, batch: Batch, tokens: Tokens) -> Tensor:
    """Return the outputs of the batch's pieces of prompts, (N, H, V), and write the states after them to the cache: one
    call of the mixer for all of them.

    tokens: those of the pieces, which lie one after another in the only row of the call.
    """
    if not cache_SN.is_cuda and 0 in batch.pieces.seen:  # steps on a CPU need pages of zeros before the first token
        cache_SN[batch.piece_rows_R[batch.pieces.is_first_R], : layout.size] = 0
    pool = layout.views(cache_SN)
    out_BHTV = mixer.mix_packed_in_pool(tokens.as_rows(1), batch.pieces, pool, batch.piece_rows_R)
    return out_BHTV.squeeze(0).transpose(0, 1)


def has_kernel(*step: Any) -> bool:
    """Return whether a kernel computes a call of `step_in_pool` with these arguments."""
    op: Any = step_in_pool
    return op.select_kernel(*step) is not None


def steps_in_place(mixer: LinearMixer, layout: StateLayout, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Return whether a kernel computes the decodes of tokens in that dtype, in place and without waiting for the
    GPU."""
    shape, zeros = mixer.shape, torch.zeros(2, layout.size, device=device)  # of one page strides mean nothing
    sizes = (shape.heads, shape.key), (shape.groups, shape.key), (shape.groups, shape.value), (shape.dim,)
    q, k, v, x = (torch.zeros(1, *size, dtype=dtype, device=device) for size in sizes)
    inputs, zero_B = Tokens(q, k, v, x, None).one_each(1), torch.zeros(1, dtype=torch.int32, device=device)
    with torch.no_grad():
        return has_kernel(inputs.q_BHTK, mixer, inputs, zero_B, layout.views(zeros), zero_B)


def mix_decodes(mixer: LinearMixer, layout: StateLayout, cache_SN: Tensor, batch: Batch, inputs: MixerInputs) -> Tensor:
    """Return out_BHTV of the batch's decodes, one token each (T = 1), and write the states after them to the cache."""
    n = batch.decodes
    page_B, seen_B = batch.rows_R[:n], batch.seen_R[:n]
    pool = layout.views(cache_SN)
    step = (inputs.q_BHTK, mixer, inputs, seen_B, pool, page_B)
    if has_kernel(*step):
        return step_in_pool(*step)
    page_B, seen_B, seen = page_B.long(), seen_B.long(), [length - 1 for length in batch.lengths[:n]]
    if cache_SN.is_cuda:  # kernels of other mixers compute the step, and take the rows apart from the cache
        out_BH1V, after = mixer(inputs, layout.read(cache_SN[page_B], seen, seen_B))
        cache_SN[page_B, : layout.size] = layout.write(after)
        return out_BH1V
    if 0 in seen:
        cache_SN[page_B[seen_B == 0], : layout.size] = 0
    return step_in_pool(inputs.q_BHTK, mixer, inputs, seen_B, pool, page_B)
