"""Pieces of several sequences one after another in one row, each going on from a state of its own: prompts that a server
cuts into pieces.

    pieces = PackedPieces(counts=(200, 1, 64), seen=(0, 63, 512), device)
    out_BHTV, after = mixer.mix_packed(inputs, pieces, state)         inputs: one row (B = 1) of 265 tokens; state: 3 rows
    out_BHTV = mixer.mix_packed_in_pool(inputs, pieces, pool, page_R) the same with states in the pages of a server's cache

The numbers of tokens are known on the host. Tables are computed there and sent to the device in one copy, so nothing
waits for the device; the layers of a model share them.

Kernels take the row and `cu_seqlens`. References, and masks without such a kernel, take the pieces as rows of a batch,
in groups of similar length (`PieceGroup`).

R sequences, N tokens of all pieces, D pieces of a group, U slots of each, S slots of a ring, X blocks of C queries.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.mixers.common.packed_documents import group_by_length
from surgery.mixers.padding import Unpadder, zero_outside

if TYPE_CHECKING:
    from surgery.mixers.masks.base import MaskInputs

T = TypeVar("T")
ALIGNED = 16  # numbers
CPU_PADDING = 64  # pieces that share a group on a CPU have fewer padding tokens each


class Places(NamedTuple):
    """Tokens of the pieces that are stored, and where: the token, its sequence and its slot there. table: their number, and
    the three one after another."""

    token_W: Tensor
    request_W: Tensor
    slot_W: Tensor
    table: Tensor

    @classmethod
    def from_table(cls, table: Tensor) -> Places:
        """Return the parts of a table."""
        token_W, request_W, slot_W = table[1:].view(3, -1)
        return cls(token_W, request_W, slot_W, table)


class WindowPlan(NamedTuple):
    """Where a window finds its tokens and stores them. "Stored" numbers count the R x S slots of all rings and then the N
    tokens; without a ring to read they are the tokens' own. A slot that holds no token yet has no number: its place is
    taken by a token of the piece, which the softmax does not see.

    uniform: whether the pieces have one length. A piece is then one block, else a block has at most `block` queries of
    one piece (`PackedPieces.window_plan`). reads_rings, reads_sinks: whether any stored number is one of a ring, or of
    an old sink. query_XC: token of each query of a block, slot_N: its inverse, among the X C places. seen_X: tokens of
    the sequence before the block. near_XY: stored numbers of the keys of a block. sink_XK: numbers of the sinks of its
    sequence, among R x sinks old ones and the N tokens. to_rings, to_sinks: what is stored. far_query_L, far_written_L:
    numbers of the tokens whose queries read a state (`PackedPieces.behind`), and stored numbers of the tokens that are
    written just before, which have the positions far_position_L. far_slice: the far queries, if they lie side by side.

    near_far_T, far_T and sinks_T: the stored numbers of near_XY and then of far_written_L, those of far_written_L, and those
    of sink_XK, flat. Two entries come first: how many numbers follow, and below which number they mean slots of the R
    sequences (0: every number is a token's).
    """

    uniform: bool
    reads_rings: bool
    reads_sinks: bool
    far_slice: slice | None
    query_XC: Tensor
    slot_N: Tensor
    seen_X: Tensor
    near_XY: Tensor
    sink_XK: Tensor
    to_rings: Places
    to_sinks: Places
    far_query_L: Tensor
    far_written_L: Tensor
    far_position_L: Tensor
    near_far_T: Tensor
    far_T: Tensor
    sinks_T: Tensor


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
        self._tables: dict[Hashable, list[Tensor]] = {}
        self._kept: dict[Hashable, Any] = {}

    def tables(
        self,
        key: Hashable,
        make: Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]],
        dtype: torch.dtype = torch.int64,
    ) -> list[Tensor]:
        """Return tables of integers on the device, which `make` computes at the first call with this key.

        make(first_R, seen_R, count_R): returns them on the host, from the first token of each piece, the tokens of its
        sequence before it, and in it. key: what else they depend on.
        """
        if key not in self._tables:
            made = make(self._first_R, self._seen_R, self._count_R)
            self._tables[key] = send([t.to(dtype) for t in made], self.device)
        return self._tables[key]

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what make() returns, which is called once for each key: what the layers of a step share."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: T = self._kept[key]
        return kept

    @property
    def begins(self) -> bool:
        """Whether no sequence has tokens before its piece."""
        return not any(self.seen)

    @cached_property
    def unpadder(self) -> Unpadder:
        """The unpadder of the row, which has no padding."""
        return Unpadder.from_mask(None, 1, self.length, self.device)

    @cached_property
    def zero_1(self) -> Tensor:
        """A zero, (1,)."""
        return torch.zeros(1, dtype=torch.long, device=self.device)

    @cached_property
    def end_R(self) -> Tensor:
        """Tokens of each sequence after its piece."""
        return self.seen_R + self.count_R

    @cached_property
    def is_first_R(self) -> Tensor:
        """Whether a sequence has no tokens before its piece."""
        return self.seen_R == 0

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
            tables = (
                self._behind_inputs(order, offset_M, past),
                place_N,
                self._behind_inputs(_column(count), last_RP, past),
            )
            self._convolutions[past] = ConvolutionPlan(*send(tables, self.device))
        return self._convolutions[past]

    def _behind_inputs(self, request: Tensor, offset: Tensor, past: int) -> Tensor:
        """Return numbers among R x past inputs of earlier pieces and then the N tokens. offset: from the sequence's oldest
        input on."""
        tokens = len(self.counts) * past
        return torch.where(offset < past, request * past + offset, tokens + self._first_R[request] + offset - past)

    def window_plan(self, window: int, sinks: int, slots: int, block: int) -> WindowPlan:
        """Return the tables of a window with rings of that many slots. block: queries per block."""
        key = window, sinks, slots, block
        if key not in self._windows:
            self._windows[key] = self._make_window_plan(*key)
        return self._windows[key]

    def _make_window_plan(self, window: int, sinks: int, slots: int, block: int) -> WindowPlan:
        count, uniform = len(self.counts), len(set(self.counts)) == 1
        most = max(self.counts, default=1)
        block = max(1, most if uniform else min(block, most))
        blocks_R = (self._count_R + block - 1) // block
        request_X = torch.repeat_interleave(torch.arange(count), blocks_R)
        first_R = blocks_R.cumsum(0) - blocks_R
        start_X1 = (block * (torch.arange(len(request_X)) - first_R[request_X])).unsqueeze(1)
        last_X1 = (self._count_R[request_X] - 1).unsqueeze(1)
        query_XC = (start_X1 + torch.arange(block)).minimum(last_X1) + self._first_R[request_X].unsqueeze(1)
        slot_N = block * (first_R[self._request_N] + self._offset_N // block) + self._offset_N % block
        seen_X1 = self._seen_R[request_X].unsqueeze(1)
        rings = slots > 0 and any(self.seen)
        position_XY = seen_X1 + (start_X1 - window + torch.arange(window + block)).minimum(last_X1)
        near_XY = self._stored(request_X.unsqueeze(1), position_XY, slots, rings)
        sink_K, old = torch.arange(sinks), sinks > 0 and any(self.seen)
        sink_XK = self._stored(request_X.unsqueeze(1), sink_K.expand(len(request_X), -1), sinks, old)
        skipped_R = self._skipped(window + sinks)
        far_query_L = (self._offset_N >= skipped_R[self._request_N]).nonzero().squeeze(1)
        position_N = self._seen_R[self._request_N] + self._offset_N
        far_position_L = position_N[far_query_L] - window
        far_written_L = self._stored(self._request_N[far_query_L], far_position_L, slots, rings)
        kept_N = self._offset_N >= (self._count_R - slots)[self._request_N]
        ring_places = self._places(kept_N, position_N % max(slots, 1))
        near_far = torch.cat([near_XY.flatten(), far_written_L])
        in_rings, in_sinks = count * slots if rings else 0, count * sinks if old else 0
        gathered = _with_sizes(near_far, in_rings), _with_sizes(far_written_L, in_rings), _with_sizes(sink_XK, in_sinks)
        tables = query_XC, slot_N, seen_X1.squeeze(1) + start_X1.squeeze(1), far_query_L, far_position_L, *gathered
        sent = send([*tables, ring_places, self._places(position_N < sinks, position_N)], self.device)
        near_far_T, far_T, sinks_T, *places = sent[5:]
        side_by_side = slice(self.length - len(far_query_L), self.length) if count == 1 else None
        return WindowPlan(
            uniform=uniform,
            reads_rings=rings,
            reads_sinks=old,
            far_slice=side_by_side,
            query_XC=sent[0],
            slot_N=sent[1],
            seen_X=sent[2],
            near_XY=near_far_T[2 : 2 + near_XY.numel()].view(near_XY.shape),
            sink_XK=sinks_T[2:].view(sink_XK.shape),
            to_rings=Places.from_table(places[0]),
            to_sinks=Places.from_table(places[1]),
            far_query_L=sent[3],
            far_written_L=far_T[2:],
            far_position_L=sent[4],
            near_far_T=near_far_T,
            far_T=far_T,
            sinks_T=sinks_T,
        )

    def _skipped(self, delay: int) -> Tensor:
        """Return the first tokens of each piece whose queries read no state that tokens enter `delay` tokens late."""
        return (delay - self._seen_R).clamp_min(0).minimum(self._count_R)

    def _places(self, kept_N: Tensor, slot_N: Tensor) -> Tensor:
        """Return `Places.table` of the tokens that are kept."""
        token_W = kept_N.nonzero().squeeze(1)
        return torch.cat([torch.tensor([len(token_W)]), token_W, self._request_N[token_W], slot_N[token_W]])

    def _stored(self, request: Tensor, position: Tensor, slots: int, old: bool) -> Tensor:
        """Return numbers of the tokens at these positions of their sequences, among R x slots old slots, if there are any,
        and then the N tokens. Positions outside of the sequence: its first token of the piece."""
        offset = position - self._seen_R[request]
        there = (position >= 0) & (offset < self._count_R[request])
        new = self._first_R[request] + torch.where(there, offset.clamp_min(0), 0)
        if not old:
            return new
        in_slots = request * slots + position % slots
        return torch.where(there & (offset < 0), in_slots, len(self.counts) * slots + new)

    def behind(self, delay: int) -> PackedPieces:
        """Return the tokens whose queries read a state that tokens enter `delay` tokens late, as pieces."""
        if delay not in self._behind:
            skipped_R = self._skipped(delay)
            seen_R = (self._seen_R - delay).clamp_min(0)
            self._behind[delay] = PackedPieces((self._count_R - skipped_R).tolist(), seen_R.tolist(), self.device)
        return self._behind[delay]

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


def borders_of(ends: Tensor | PackedPieces | None) -> Tensor | None:
    """Return the borders (R + 1,) of sequences in one row, given as they are or by the pieces."""
    return ends.cu_seqlens if isinstance(ends, PackedPieces) else ends


def _with_sizes(numbers: Tensor, old: int) -> Tensor:
    """Return the numbers, flat, behind their count and `old`, the number from which on they mean tokens and not slots."""
    return torch.cat([torch.tensor([numbers.numel(), old]), numbers.flatten()])


def _column(count: int) -> Tensor:
    """Return 0 .. count - 1 as a column, (count, 1)."""
    return torch.arange(count).unsqueeze(1)


def send(tables: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tables of integers on a device, by one copy for which the host does not wait.

    Each begins at a multiple of ALIGNED numbers: kernels are compiled again for pointers of another alignment.
    """
    sizes = [-(-t.numel() // ALIGNED) * ALIGNED for t in tables]
    flat = torch.cat([F.pad(t.flatten(), (0, size - t.numel())) for t, size in zip(tables, sizes)])
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    return [part[: t.numel()].view(t.shape) for part, t in zip(flat.split(sizes), tables)]
