"""Block-diagonal mask: M_ts = 1 if t and s lie in the same block of `block` positions, s <= t if attention is causal.

Dao and Gu 2024, "Transformers are SSMs", section 4.1.4: sparsity patterns of masks "such as banded, dilated, or block
diagonal". The causal mask is semiseparable: its gates are 1, and 0 at the first token of each block, where the state
begins anew. Blocks are counted from position 0, and the state has the size of one of linear attention.

In bidirectional attention a query reads the sum of k v^T of its whole block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS, Mask, MaskInputs, MaskState, Signals
from surgery.mixers.masks.chunking import ChunkLayout, upcast_inputs
from surgery.mixers.masks.semiseparable import Semiseparable

if TYPE_CHECKING:
    from surgery.mixers.common.packed_pieces import PackedPieces

LOG_OF_ZERO = -1e4  # exp of it is 0 also in float64, and sums and differences of it are exact, unlike those of -inf


@dataclass(frozen=True)
class BlockDiagonal:
    """Config of the block-diagonal mask. block: positions of a block."""

    name: ClassVar[str] = "block_diagonal"
    block: int = 256

    def __post_init__(self) -> None:
        if self.block < 1:
            raise SurgeryError(f"block_diagonal: block must be 1 or more tokens (got {self.block}); for example 256")


@MASKS.register(BlockDiagonal)
class BlockDiagonalMask(Semiseparable):
    """Block-diagonal mask, without parameters."""

    config: BlockDiagonal

    @classmethod
    def check_config(cls, config: Any, shape: AttentionShape, delta: bool) -> None:
        """Raise SurgeryError if the mask cannot serve this attention."""
        if delta and not shape.causal:
            raise SurgeryError(
                "block_diagonal: bidirectional attention cannot use the delta rule, which depends on the order of "
                "tokens; use scores: kernel"
            )

    def log_gates(self, start_B: Tensor, count_B: Tensor, length: int, signals: Signals) -> Tensor:
        """Return log-gates g_BRGT <= 0; B, R and G may be 1."""
        token_T = torch.arange(length, device=start_B.device)
        begins_BT = (start_B.unsqueeze(1) + token_T) % self.config.block == 0
        begins_BT = begins_BT & (token_T < count_B.unsqueeze(1))
        return (begins_BT * LOG_OF_ZERO)[:, None, None]

    def dense(self, start_B: Tensor, length: int, signals: Signals) -> Tensor:
        """Return M_BGJTT of tokens at start .. start + length."""
        block_BT = (start_B.unsqueeze(1) + torch.arange(length, device=start_B.device)) // self.config.block
        same_BTT = block_BT.unsqueeze(2) == block_BT.unsqueeze(1)
        return (same_BTT.tril() if self.shape.causal else same_BTT).float()[:, None, None]

    def chunked(self, rows: MaskInputs, state: MaskState | None, chunk: int) -> tuple[Tensor, MaskState | None]:
        """Return (out_BGJTV, state after the rows' tokens, or None without a state)."""
        if self.shape.causal:
            return super().chunked(rows, state, chunk)
        rows = upcast_inputs(rows)
        layout = ChunkLayout.unaligned(rows.start_B, rows.v_BGTV.shape[2], self.config.block)
        sums_BGNFV = layout.to_chunks(rows.k_BGTF, 2).mT @ layout.to_chunks(rows.v_BGTV, 2)
        return layout.from_chunks(layout.to_chunks(rows.q_BGJTF, 3) @ sums_BGNFV.unsqueeze(2), 3), None

    def packed(self, row: MaskInputs, pieces: PackedPieces, state: MaskState, chunk: int) -> tuple[Tensor, MaskState]:
        """Return (out_BGJTV, state after the pieces) of pieces of several sequences in one row: as rows, because gates
        depend on positions in a block."""
        return Mask.packed(self, row, pieces, state, chunk)
