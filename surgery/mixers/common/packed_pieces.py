"""Pieces of several sequences one after another in one row, each going on from a state of its own: prompts that a server
cuts into pieces.

    pieces = PackedPieces(counts=(200, 1, 64), seen=(0, 63, 512), device)
    out_BHTV, after = mixer.mix_packed(inputs, pieces, state)         inputs: one row (B = 1) of 265 tokens; state: 3 rows

The numbers of tokens are known on the host. Tables are computed there and sent to the device in one copy, so nothing
waits for the device; the layers of a model share them.

Kernels take the row and `cu_seqlens`. References, and masks without such a kernel, take the pieces as rows of a batch,
in groups of similar length (`PieceGroup`).

R sequences, N tokens of all pieces, D pieces of a group, U slots of each, S slots of a ring, X blocks of C queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.mixers.common.packed_documents import group_by_length
from surgery.mixers.padding import zero_outside

if TYPE_CHECKING:
    from surgery.mixers.masks.base import MaskInputs

CPU_PADDING = 64  # pieces that share a group on a CPU have fewer padding tokens each


class WindowPlan(NamedTuple):
    """Where a window finds its tokens. "Stored" numbers count the R x S slots of all rings, oldest token first, and then
    the N tokens.

    query_XC: token of each query of a block, slot_N: its inverse, among the X C places. request_X, seen_X: the sequence of
    a block, and its tokens before the block. recent_XY: stored numbers of the keys of a block. ring_RS: stored numbers of
    the rings after the pieces. sink_RK: numbers of the sinks among R x sinks old ones, the N tokens, and a zero.
    far_query_L, far_written_L: numbers of the tokens whose queries read a state (`PackedPieces.behind`), and stored numbers
    of the tokens that are written just before.
    """

    query_XC: Tensor
    slot_N: Tensor
    request_X: Tensor
    seen_X: Tensor
    recent_XY: Tensor
    ring_RS: Tensor
    sink_RK: Tensor
    far_query_L: Tensor
    far_written_L: Tensor


class ConvolutionPlan(NamedTuple):
    """Where a convolution finds its inputs: numbers of the R x P inputs of earlier pieces and then the N tokens.

    source_M: each piece behind its own P earlier inputs. place_N: of each token among these. last_RP: the last P inputs of
    each sequence.
    """

    source_M: Tensor
    place_N: Tensor
    last_RP: Tensor


@dataclass(frozen=True)
class PieceGroup:
    """Pieces of similar length as rows of a batch. index_D: their sequences. token_DU: token of each slot. real_DU: False
    at padding, None without. start_D, count_D: tokens of each sequence before the piece, and in it. max_start, max_seen:
    the most tokens of a sequence before its piece, and after it.
    """

    index_D: Tensor
    token_DU: Tensor
    real_DU: Tensor | None
    start_D: Tensor
    count_D: Tensor
    max_start: int
    max_seen: int

    def to_rows(self, x: Tensor, dim: int, *, zeros: bool = False) -> Tensor:
        """Return (D, .., U, ..) of the packed row x (1, .., N, ..). dim: axis of N. zeros: at padding; else any token."""
        rows = x.squeeze(0).index_select(dim - 1, self.token_DU.flatten()).unflatten(dim - 1, self.token_DU.shape)
        rows = rows.movedim(dim - 1, 0)
        return zero_outside(rows, self.real_DU, dim) if zeros and self.real_DU is not None else rows

    def mask_rows(self, row: MaskInputs, written_signals: Sequence[str]) -> MaskInputs:
        """Return the inputs of a mask with the pieces as rows."""
        beta = row.beta_BGT
        return replace(
            row,
            q_BGJTF=self.to_rows(row.q_BGJTF, 3),
            k_BGTF=self.to_rows(row.k_BGTF, 2, zeros=True),
            v_BGTV=self.to_rows(row.v_BGTV, 2, zeros=True),
            beta_BGT=None if beta is None else self.to_rows(beta, 2, zeros=True),
            start_B=self.start_D,
            count_B=self.count_D,
            signals={n: self.to_rows(t, 1, zeros=n in written_signals) for n, t in row.signals.items()},
            max_seen=self.max_seen,
        )


class PackedPieces:
    """Pieces in one row. counts: tokens of each piece. seen: tokens of its sequence before it."""

    def __init__(self, counts: Sequence[int], seen: Sequence[int], device: torch.device | str):
        self.counts, self.seen, self.device = tuple(counts), tuple(seen), torch.device(device)
        self.length = sum(self.counts)
        self.max_seen = max((a + b for a, b in zip(self.counts, self.seen, strict=True)), default=0)
        self._count_R, self._seen_R = torch.tensor(self.counts), torch.tensor(self.seen)
        self._first_R = self._count_R.cumsum(0) - self._count_R
        self._request_N = torch.repeat_interleave(torch.arange(len(self.counts)), self._count_R)
        self._offset_N = torch.arange(self.length) - self._first_R[self._request_N]
        self._windows: dict[tuple[int, ...], WindowPlan] = {}
        self._behind: dict[int, PackedPieces] = {}
        self._convolutions: dict[int, ConvolutionPlan] = {}

    @cached_property
    def _device_tables(self) -> list[Tensor]:
        ends_R1 = torch.cat([self._first_R, torch.tensor([self.length])])
        position_N = self._seen_R[self._request_N] + self._offset_N
        return send([ends_R1, self._seen_R, self._count_R, position_N], self.device)

    @property
    def cu_seqlens(self) -> Tensor:
        """Borders of the pieces, (R + 1,)."""
        return self._device_tables[0]

    @property
    def seen_R(self) -> Tensor:
        """Tokens of each sequence before its piece."""
        return self._device_tables[1]

    @property
    def count_R(self) -> Tensor:
        """Tokens of each piece."""
        return self._device_tables[2]

    @property
    def position_N(self) -> Tensor:
        """Position of each token in its sequence."""
        return self._device_tables[3]

    def convolution_plan(self, past: int) -> ConvolutionPlan:
        """Return the tables of a convolution that reads `past` earlier inputs."""
        if past not in self._convolutions:
            count, places = len(self.counts), past * torch.arange(1, len(self.counts) + 1)
            order = torch.repeat_interleave(torch.arange(count), self._count_R + past)
            offset_M = torch.arange(len(order)) - (self._first_R + places - past)[order]
            place_N = torch.arange(self.length) + places[self._request_N]
            last_RP = self._count_R.unsqueeze(1) + torch.arange(past)
            tables = self._stored(order, offset_M, past), place_N, self._stored(_column(count), last_RP, past)
            self._convolutions[past] = ConvolutionPlan(*send(tables, self.device))
        return self._convolutions[past]

    def window_plan(self, window: int, sinks: int, slots: int, block: int) -> WindowPlan:
        """Return the tables of a window with rings of that many slots. block: queries per block."""
        key = window, sinks, slots, block
        if key not in self._windows:
            self._windows[key] = self._make_window_plan(*key)
        return self._windows[key]

    def _make_window_plan(self, window: int, sinks: int, slots: int, block: int) -> WindowPlan:
        count, R1 = len(self.counts), _column(len(self.counts))
        block = max(1, min(block, max(self.counts, default=1)))
        blocks_R = (self._count_R + block - 1) // block
        request_X = torch.repeat_interleave(torch.arange(count), blocks_R)
        first_R = blocks_R.cumsum(0) - blocks_R
        start_X1 = (block * (torch.arange(len(request_X)) - first_R[request_X])).unsqueeze(1)
        last_X1 = (self._count_R[request_X] - 1).unsqueeze(1)
        query_XC = (start_X1 + torch.arange(block)).minimum(last_X1) + self._first_R[request_X].unsqueeze(1)
        slot_N = block * (first_R[self._request_N] + self._offset_N // block) + self._offset_N % block
        recent_XY = slots - window + start_X1 + torch.arange(window + block)
        recent_XY = self._stored(request_X.unsqueeze(1), recent_XY.minimum(last_X1 + slots), slots)
        seen_X = self._seen_R[request_X] + start_X1.squeeze(1)
        count_R1, seen_R1 = self._count_R.unsqueeze(1), self._seen_R.unsqueeze(1)
        ring_RS = torch.arange(slots)
        if slots:
            ring_RS = count_R1 + slots - 1 - (seen_R1 + count_R1 - 1 - ring_RS) % slots
        sink_K = torch.arange(sinks)
        new_RK = count * sinks + self._first_R.unsqueeze(1) + sink_K - seen_R1
        new_RK = torch.where(sink_K < seen_R1 + count_R1, new_RK, count * sinks + self.length)
        sink_RK = torch.where(sink_K < seen_R1, R1 * sinks + sink_K, new_RK)
        skipped_R = (window + sinks - self._seen_R).clamp_min(0).minimum(self._count_R)
        far_query_L = (self._offset_N >= skipped_R[self._request_N]).nonzero().squeeze(1)
        behind_L = self._offset_N[far_query_L] + slots - window
        far_written_L = self._stored(self._request_N[far_query_L], behind_L, slots)
        ring_RS = self._stored(R1, ring_RS.expand(count, -1), slots)
        tables = query_XC, slot_N, request_X, seen_X, recent_XY, ring_RS, sink_RK, far_query_L, far_written_L
        return WindowPlan(*send(tables, self.device))

    def behind(self, delay: int) -> PackedPieces:
        """Return the tokens whose queries read a state that tokens enter `delay` tokens late, as pieces."""
        if delay not in self._behind:
            skipped_R = (delay - self._seen_R).clamp_min(0).minimum(self._count_R)
            seen_R = (self._seen_R - delay).clamp_min(0)
            self._behind[delay] = PackedPieces((self._count_R - skipped_R).tolist(), seen_R.tolist(), self.device)
        return self._behind[delay]

    def _stored(self, request: Tensor, offset: Tensor, slots: int) -> Tensor:
        """Return numbers among R x slots entries of earlier pieces and then the N tokens. offset: from the oldest entry of
        the sequence on."""
        tokens = len(self.counts) * slots
        return torch.where(
            offset < slots, request * slots + offset, tokens + self._first_R[request] + offset - slots
        )  # fmt: skip

    @cached_property
    def _groups(self) -> tuple[tuple[PieceGroup, ...], Tensor]:
        """(groups of the pieces with tokens; slot of each token among those of all groups)."""
        with_tokens = self._count_R.nonzero().squeeze(1)
        count_D = self._count_R[with_tokens]
        if self.device.type == "cuda":
            indices = group_by_length(count_D)
        else:
            chunks_D = (count_D + CPU_PADDING - 1) // CPU_PADDING
            indices = [(chunks_D == n).nonzero().squeeze(1) for n in chunks_D.unique().tolist()]
        indices = [with_tokens[index] for index in indices]
        tables, slot_N, before = [], torch.empty(self.length, dtype=torch.long), 0
        for index_D in indices:
            count_D1 = self._count_R[index_D].unsqueeze(1)
            slot_U = torch.arange(int(count_D1.max()))
            real_DU = slot_U < count_D1
            token_DU = self._first_R[index_D].unsqueeze(1) + slot_U.minimum(count_D1 - 1)
            slot_N[token_DU[real_DU]] = before + real_DU.flatten().nonzero().squeeze(1)
            before += real_DU.numel()
            starts = self._seen_R[index_D], self._count_R[index_D]
            tables += [index_D, token_DU, real_DU.long(), *starts]
        *sent, slot_N = send([*tables, slot_N], self.device)
        groups = []
        for i, index_D in enumerate(indices):
            index, token_DU, real_DU, start_D, count_D = sent[5 * i : 5 * i + 5]
            pads = bool((self._count_R[index_D] < token_DU.shape[1]).any())
            real = real_DU.bool() if pads else None
            most = int(self._seen_R[index_D].max()), int((self._seen_R + self._count_R)[index_D].max())
            groups.append(PieceGroup(index, token_DU, real, start_D, count_D, *most))
        return tuple(groups), slot_N

    @property
    def groups(self) -> tuple[PieceGroup, ...]:
        """The pieces with tokens in groups of similar length: on a GPU at most twice as many slots as tokens, or lengths within
        a factor of two; elsewhere lengths of as many chunks, because more padding costs more than more calls."""
        return self._groups[0]

    def join_tokens(self, outs: Sequence[Tensor], dim: int) -> Tensor:
        """Return the packed row (1, .., N, ..) of the groups' outputs (D, .., U, ..). dim: axis of U."""
        flat = torch.cat([out.movedim(0, dim - 1).flatten(dim - 1, dim) for out in outs], dim - 1)
        return flat.index_select(dim - 1, self._groups[1]).unsqueeze(0)

    def join_states(self, states: Sequence[Tensor], first: Tensor) -> Tensor:
        """Return the states (R, n, ..) after the pieces, of the groups' states (D, n, ..), whose n may differ. first: states
        before, which sequences without tokens keep."""
        most, sums = max(t.shape[1] for t in (first, *states)), [first, *states]
        joined, *grown = (F.pad(t, (0, 0) * (t.dim() - 2) + (0, most - t.shape[1])) for t in sums)
        for group, t in zip(self.groups, grown, strict=True):
            joined = joined.to(t.dtype).index_copy(0, group.index_D, t)
        return joined


def _column(count: int) -> Tensor:
    """Return 0 .. count - 1 as a column, (count, 1)."""
    return torch.arange(count).unsqueeze(1)


def send(tables: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tables of integers on a device, by one copy for which the host does not wait."""
    flat = torch.cat([t.flatten() for t in tables])
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    parts = flat.split([t.numel() for t in tables])
    return [part.view(t.shape) for part, t in zip(parts, tables)]
