"""M_ts = W[block(t), block(s)], a free matrix for each query head: dense block mixing (MHLA, Zhang et al. 2026).

Rows of W are nonnegative and sum to one, over the blocks so far where attention is causal (s <= t inside a block too).
W has `count` rows: what lies beyond is refused. In both directions W is full and sequences begin at position 0.

The state is `blocks` (B, A, G, F, V): the sum of k v^T of every block reached, of the delta rule as carried by now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS, Mask, Rows
from surgery.mixers.masks.frame import inverse_softplus, widened
from surgery.mixers.masks.grid import Grid, blocks_both_ways, blocks_from_zero, grown, rows_of
from surgery.mixers.masks.semiseparable import carried_by_one

State = dict[str, Tensor]


@dataclass(frozen=True)
class Blocks:
    """block: tokens in a block; count: blocks. weights: learned, or frozen as they start. normalise: rows of W are a
    softmax of what is learned, or softplus of it over its sum."""

    name: ClassVar[str] = "blocks"
    block: int = 64
    count: int = 32
    weights: Literal["learned", "frozen"] = "learned"
    normalise: Literal["softmax", "sum"] = "softmax"

    def __post_init__(self) -> None:
        if self.block < 1 or self.count < 1:
            raise SurgeryError(
                f"blocks: {self.count} blocks of {self.block} tokens hold none; use say block=64, count=32"
            )
        for option, valid in (("weights", ("learned", "frozen")), ("normalise", ("softmax", "sum"))):
            if getattr(self, option) not in valid:
                raise SurgeryError(f"blocks: {option}={getattr(self, option)!r} is neither of {valid}")


@MASKS.register(Blocks)
class BlocksMask(Mask):
    """`weight_GJMM` is W before it is normalised; it starts falling linearly with the distance of blocks, as MHLA's."""

    weight_GJMM: Tensor

    def __init__(self, config: Any, shape: AttentionShape):
        super().__init__(config, shape)
        at_M = torch.arange(config.count)
        near_MM = 1 - (at_M.unsqueeze(1) - at_M).abs() / config.count
        raw_GJMM = self._raw(near_MM).repeat(shape.groups, shape.heads // shape.groups, 1, 1)
        if config.weights == "learned":
            self.weight_GJMM = nn.Parameter(raw_GJMM)
        else:
            self.register_buffer("weight_GJMM", raw_GJMM)

    @classmethod
    def refuse(cls, config: Any, shape: AttentionShape, delta: bool) -> None:
        if delta and not shape.causal:
            raise SurgeryError(
                "blocks in both directions needs kernel scores: the delta rule has an order of tokens; "
                "use scores: kernel, or a causal attention"
            )

    @classmethod
    def kept(cls, config: Any, shape: AttentionShape, features: int, values: int, length: int) -> int:
        return -(-length // config.block) * features * values

    def matrix(self) -> Tensor:
        """W_GJMM, zero above the diagonal where attention is causal."""
        raw = self.weight_GJMM.to(torch.promote_types(self.weight_GJMM.dtype, torch.float32))
        hidden = torch.ones_like(raw, dtype=torch.bool).triu(1 if self.shape.causal else self.config.count)
        if self.config.normalise == "softmax":
            return raw.masked_fill(hidden, -torch.inf).softmax(-1)
        positive = F.softplus(raw).masked_fill(hidden, 0)
        return positive / positive.sum(-1, keepdim=True)

    @torch.no_grad()
    def start(self, matrix_GJMM: Tensor) -> None:
        """Set W to the nonnegative matrix given, its rows normalised."""
        self.weight_GJMM.copy_(self._raw(matrix_GJMM))

    def _raw(self, matrix: Tensor) -> Tensor:
        matrix = matrix.clamp_min(1e-12)
        return matrix.log() if self.config.normalise == "softmax" else inverse_softplus(matrix)

    def _check(self, tokens: int) -> None:
        block, count = self.config.block, self.config.count
        if tokens > block * count:
            raise SurgeryError(
                f"blocks: token {tokens:,} lies beyond the {count} blocks of {block} tokens that W has rows for "
                f"({block * count:,} tokens); convert with count={-(-tokens // block)} or more, or with "
                "toeplitz_blocks, which has no last block"
            )

    def empty(self, rows: int, features: int, values: int, device: Any) -> State:
        return {"blocks": torch.zeros(rows, 0, self.shape.groups, features, values, device=device)}

    def dense(self, start_B: Tensor, length: int, signals: State) -> Tensor:
        self._check(int(start_B.max()) + length)
        block_BT = (start_B.unsqueeze(1) + torch.arange(length, device=start_B.device)) // self.config.block
        mask = self.matrix()[:, :, block_BT.unsqueeze(2), block_BT.unsqueeze(1)].movedim(2, 0)
        return mask.tril() if self.shape.causal else mask

    def chunked(self, rows: Rows, state: State | None, chunk: int) -> tuple[Tensor, State | None]:
        end, furthest = torch.stack([rows.start_B + rows.count_B, rows.start_B]).amax(1).tolist()
        self._check(end)
        qkv, block = (rows.q_BGJTF, rows.k_BGTF, rows.v_BGTV), self.config.block
        if not self.shape.causal:
            return blocks_both_ways(*qkv, self.matrix(), block), state
        behind = 0 if state is None else state["blocks"].shape[1]
        if rows.beta_BGT is None and furthest == behind == 0:
            out, sums_BAGFV = blocks_from_zero(*qkv, self.matrix(), block, chunk, state is not None)
        else:
            out, sums_BAGFV = self._further(widened(rows), state, chunk)
        if state is None or sums_BAGFV is None:
            return out, None
        return out, {"blocks": sums_BAGFV[:, : max(-(-end // block), behind)]}

    def _further(self, rows: Rows, state: State | None, chunk: int) -> tuple[Tensor, Tensor]:
        grid = Grid.of(rows, self.matrix().to(rows.v_BGTV.dtype), chunk, self.config.block)
        before = grid.v_BGNCV.new_zeros(0) if state is None else state["blocks"].to(rows.v_BGTV.dtype)
        return (grid.mixed if rows.beta_BGT is None else grid.passed)(before)

    def step(self, rows: Rows, state: State) -> tuple[Tensor, State]:
        rows, block = widened(rows), self.config.block
        end = int((rows.start_B + rows.count_B).max())
        self._check(end)
        write_BGF1 = (rows.k_BGTF if rows.beta_BGT is None else rows.beta_BGT.unsqueeze(-1) * rows.k_BGTF).mT
        sums_BAGFV = carried_by_one(rows, write_BGF1, grown(state["blocks"].to(write_BGF1.dtype), -(-end // block)))
        here_B = rows.start_B // block
        place = torch.arange(len(here_B), device=here_B.device), here_B
        sums_BAGFV = sums_BAGFV.index_put(place, sums_BAGFV[place] + write_BGF1 * rows.v_BGTV)
        weight_BGJA = rows_of(self.matrix().to(write_BGF1.dtype), here_B.unsqueeze(1), sums_BAGFV.shape[1]).squeeze(3)
        mixed_BGJFV = torch.einsum("bgja,bagfv->bgjfv", weight_BGJA, sums_BAGFV)
        return rows.q_BGJTF @ mixed_BGJFV, {"blocks": sums_BAGFV}
