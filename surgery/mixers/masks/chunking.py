"""Chunks of the time axis, and log-space sums of gates. Used by all masks.

`ChunkLayout.unaligned` cuts each row into chunks from its first token on. `ChunkLayout.block_aligned` aligns chunks to
blocks of absolute positions, so that every chunk lies inside one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.mixers.masks.base import MaskInputs

# Maximum elements of a temporary tensor per span. Larger ones are slower on a CPU, because they exceed its caches.
SPAN_ELEMENTS = {"cpu": 2**19, "cuda": 2**28}


def upcast_inputs(rows: MaskInputs) -> MaskInputs:
    """Return the rows with all tensors in float32, or float64 if the values are float64."""
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
    """Yield slices of the token axis, whole chunks each, that bound temporaries of T x chunk elements per query head.

    per_group: query heads per key/value head.
    """
    batch, groups, length, _ = v_BGTV.shape
    max_elements = SPAN_ELEMENTS.get(v_BGTV.device.type, SPAN_ELEMENTS["cuda"])
    span = max(1, max_elements // max(1, batch * groups * per_group * chunk**2)) * chunk
    yield from (slice(a, a + span) for a in range(0, length, span))


def inverse_softplus(y: Tensor) -> Tensor:
    """Return x with softplus(x) = y, for y > 0."""
    return y + torch.log(-torch.expm1(-y))


def segsum(gate_xC: Tensor) -> Tensor:
    """Return log_xCC with [t, s] = gate_s+1 + .. + gate_t for s <= t and -inf elsewhere.

    Each column is summed separately, as in `segsum` of the SSD paper: differences of one cumulative sum would cancel
    small gates after a large one.
    """
    size = gate_xC.shape[-1]
    square = torch.ones(size, size, dtype=torch.bool, device=gate_xC.device)  # [s, t]
    sums_xSC = torch.where(square.triu(1), gate_xC.unsqueeze(-2), 0).cumsum(-1)
    return sums_xSC.masked_fill(square.tril(-1), -torch.inf).mT


def log_decay_to_end(gate_xC: Tensor) -> Tensor:
    """Return gate_s+1 + .. + gate_C-1 for every s (x, C): the last row of `segsum`."""
    return F.pad(gate_xC[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)


@dataclass
class ChunkLayout:
    """Layout of the T tokens of each row in N chunks of C slots; slots without a token hold zeros.

    length, count, chunk: T, N, C. base_B: number of the block that the first slot belongs to.
    source_BM: token in each of the M = N C slots, T if empty. slot_BT: slot of each token. Both are None if the tokens
    fill the slots in order.
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
        """Return chunks aligned to blocks of `block` positions, each block a whole number of chunks.

        The layout extends to the block of the next token, the one after the last.
        """
        stride = -(-block // chunk) * chunk
        first_B, base_B = start_B % block, start_B // block
        if torch.compiler.is_compiling():  # the true maximum needs a device synchronization, which breaks the graph
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
        """Return x (B, .., T, ..) in chunks, (B, .., N, C, ..). dim: axis of T, not negative."""
        slots = self.count * self.chunk
        zeros = slots - self.length if self.source_BM is None else 1
        x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, zeros))
        if self.source_BM is not None:
            x = index_rowwise(x.expand(len(self.source_BM), *x.shape[1:]), self.source_BM, dim)
        chunks: Tensor = x.unflatten(dim, (self.count, self.chunk))
        return chunks

    def from_chunks(self, x: Tensor, dim: int) -> Tensor:
        """Return chunks (B, .., N, C, ..) as tokens, (B, .., T, ..). dim: axis of N."""
        x = x.flatten(dim, dim + 1)
        return x.narrow(dim, 0, self.length) if self.slot_BT is None else index_rowwise(x, self.slot_BT, dim)


def index_rowwise(x: Tensor, index_BT: Tensor, dim: int = 1) -> Tensor:
    """Return the entries index_BT of each row (axis 0) along `dim`."""
    row_B1 = torch.arange(len(index_BT), device=x.device).unsqueeze(1)
    return x.movedim(dim, 1)[row_B1, index_BT].movedim(1, dim)
