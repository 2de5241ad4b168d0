"""What the masks share: arithmetic in float32 or more, and chunks of the time axis.

A `ChunkLayout` lays the tokens of every row on a grid of chunks: `Frame.unaligned` from the row's first token on, `Frame.block_aligned`
so that chunks lie alike in all rows, each inside one block of absolute positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.mixers.masks.base import MaskInputs

# Numbers that a temporary of one span may hold; more is slower on a CPU, whose caches they leave.
SPAN_ELEMENTS = {"cpu": 2**19, "cuda": 2**28}


def upcast_inputs(rows: MaskInputs) -> MaskInputs:
    """With everything in float32, or float64 where the values are."""
    wide = torch.promote_types(rows.v_BGTV.dtype, torch.float32)
    return replace(
        rows,
        q_BGJTF=rows.q_BGJTF.to(wide),
        k_BGTF=rows.k_BGTF.to(wide),
        v_BGTV=rows.v_BGTV.to(wide),
        beta_BGT=None if rows.beta_BGT is None else rows.beta_BGT.to(wide),
        signals={name: signal.to(wide) for name, signal in rows.signals.items()},
    )


def token_spans(v_BGTV: Tensor, per_group: int, chunk: int) -> Iterator[slice]:
    """The tokens, some whole chunks at a time, so that temporaries of T x chunk numbers for each of the `per_group`
    query heads of a group stay small."""
    batch, groups, length, _ = v_BGTV.shape
    max_elements = SPAN_ELEMENTS.get(v_BGTV.device.type, SPAN_ELEMENTS["cuda"])
    span = max(1, max_elements // max(1, batch * groups * per_group * chunk**2)) * chunk
    yield from (slice(a, a + span) for a in range(0, length, span))


def inverse_softplus(y: Tensor) -> Tensor:
    """x with softplus(x) = y > 0."""
    return y + torch.log(-torch.expm1(-y))


def segsum(gate_xC: Tensor) -> Tensor:
    """log_xCC[t, s] = gate_s+1 + .. + gate_t where s <= t, -inf elsewhere.

    Summed column by column, as in the SSD paper's `segsum`: differences of one long cumulative sum would lose the
    small gates behind a large one.
    """
    size = gate_xC.shape[-1]
    square = torch.ones(size, size, dtype=torch.bool, device=gate_xC.device)  # [s, t]
    sums_xSC = torch.where(square.triu(1), gate_xC.unsqueeze(-2), 0).cumsum(-1)
    return sums_xSC.masked_fill(square.tril(-1), -torch.inf).mT


def log_decay_to_end(gate_xC: Tensor) -> Tensor:
    """gate_s+1 + .. + gate_C-1: the last row of `segsum`."""
    return F.pad(gate_xC[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)


@dataclass
class ChunkLayout:
    """N chunks of C slots for the T tokens of each row. Slots without a token are zeros.

    source_BM: the token in a slot, T where there is none; slot_BT: where token t lies; both None where the row's
    tokens fill the slots in order. base_B: the block that the first slot belongs to.
    """

    length: int
    count: int
    chunk: int
    base_B: Tensor
    source_BM: Tensor | None = None
    slot_BT: Tensor | None = None

    @classmethod
    def unaligned(cls, start_B: Tensor, length: int, chunk: int) -> ChunkLayout:
        """Return chunks that begin at the first token of each row."""
        chunk = max(1, min(chunk, length))
        return cls(length, -(-length // chunk), chunk, start_B)

    @classmethod
    def block_aligned(cls, start_B: Tensor, length: int, chunk: int, block: int) -> ChunkLayout:
        """Each block of `block` positions takes up a whole number of chunks; one more block than tokens reach, so
        that the place of the next token is there too."""
        stride = -(-block // chunk) * chunk
        first_B, base_B = start_B % block, start_B // block
        if torch.compiler.is_compiling():  # asks the device nothing
            furthest = block - 1
        else:
            furthest = int(first_B.max()) if first_B.numel() else 0
        blocks = (furthest + length) // block + 1
        layout = cls(length, blocks * stride // chunk, chunk, base_B)
        if furthest == 0 and stride == block:
            return layout
        slot_M = torch.arange(blocks * stride, device=start_B.device)
        offset_M = slot_M % stride
        token_BM = slot_M // stride * block + offset_M - first_B.unsqueeze(1)
        outside_BM = (offset_M >= block) | (token_BM < 0) | (token_BM >= length)
        place_BT = first_B.unsqueeze(1) + torch.arange(length, device=start_B.device)
        slot_BT = place_BT // block * stride + place_BT % block
        return replace(layout, source_BM=token_BM.masked_fill(outside_BM, length), slot_BT=slot_BT)

    def to_chunks(self, x: Tensor, dim: int) -> Tensor:
        """(.., T, ..) -> (.., N, C, ..), axis `dim` >= 0 being T and axis 0 the rows."""
        slots = self.count * self.chunk
        zeros = slots - self.length if self.source_BM is None else 1
        x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, zeros))
        if self.source_BM is not None:
            x = _gather_rowwise(x.expand(len(self.source_BM), *x.shape[1:]), self.source_BM, dim)
        return x.unflatten(dim, (self.count, self.chunk))

    def from_chunks(self, x: Tensor, dim: int) -> Tensor:
        """Back again: (.., N, C, ..) -> (.., T, ..), `dim` being N."""
        x = x.flatten(dim, dim + 1)
        return x.narrow(dim, 0, self.length) if self.slot_BT is None else _gather_rowwise(x, self.slot_BT, dim)


def _gather_rowwise(x: Tensor, index_BT: Tensor, dim: int) -> Tensor:
    """Of each row (axis 0) the entries of that index along `dim`."""
    row_B1 = torch.arange(len(index_BT), device=x.device).unsqueeze(1)
    return x.movedim(dim, 1)[row_B1, index_BT].movedim(1, dim)
