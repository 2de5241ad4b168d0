"""Dense block mixing, M_ts = W[block(t), block(s)] with a learned matrix W per query head (MHLA, Zhang et al. 2026).

Rows of W are nonnegative and sum to one. If attention is causal, they sum over the blocks up to the query's, and s <= t
holds inside a block too. W has `count` rows; longer sequences raise an error. In bidirectional attention W is full and
sequences begin at position 0.

The state is `blocks` (B, A, G, F, V): the sum of k v^T of every block so far, under the delta rule after the
transitions of all later tokens. Algorithms:

    mix         kernel scores: the sums of earlier blocks are mixed once per block, (T / block)^2 F V, and the block's own
                tokens are added
    mix_delta   delta rule: every token changes every sum, so the sums are kept separate and pass the chunks in order

A block is a whole number of chunks. I blocks of the call, m chunks per block, N = I m chunks, A blocks from position 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.core.dispatch import dispatched
from surgery.core.errors import SurgeryError
from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS, Mask, MaskInputs, MaskState, Signals
from surgery.mixers.masks.chunking import ChunkLayout, inverse_softplus, upcast_inputs
from surgery.mixers.masks.delta_rule import ChunkScores, chunk_scores
from surgery.mixers.masks.semiseparable import apply_carry


@dispatched
def blocks_from_zero(
    q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, matrix_GJMM: Tensor, block: int, *, chunk: int, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return (out_BGJTV, sums of all blocks (B, A, G, F, V), or None unless `keep`) of causal block mixing.

    Sequences begin at position 0. matrix_GJMM: W. block, chunk: tokens. The output is float32 or float64; kernels may
    return v's dtype.
    """
    wide = torch.promote_types(v_BGTV.dtype, torch.float32)
    zero_B = torch.zeros(len(v_BGTV), dtype=torch.int64, device=v_BGTV.device)
    rows = MaskInputs(q_BGJTF.to(wide), k_BGTF.to(wide), v_BGTV.to(wide), None, zero_B, zero_B, {})
    out, sums_BAGFV = BlockChunks.from_inputs(rows, matrix_GJMM.to(wide), chunk, block).mix(None)
    return out, sums_BAGFV if keep else None


@dispatched
def blocks_bidirectional(q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, matrix_GJMM: Tensor, block: int) -> Tensor:
    """Return out_BGJTV of bidirectional block mixing, where W is full. Sequences begin at position 0."""
    wide = torch.promote_types(v_BGTV.dtype, torch.float32)
    layout = ChunkLayout.unaligned(torch.zeros(len(v_BGTV), dtype=torch.int64), v_BGTV.shape[2], block)
    sums_BGNFV = layout.to_chunks(k_BGTF.to(wide), 2).mT @ layout.to_chunks(v_BGTV.to(wide), 2)
    weight_GJNN = matrix_GJMM[:, :, : layout.count, : layout.count].to(wide)
    mixed_BGJNFV = torch.einsum("gjnm,bgmfv->bgjnfv", weight_GJNN, sums_BGNFV)
    return layout.from_chunks(layout.to_chunks(q_BGJTF.to(wide), 3) @ mixed_BGJNFV, 3)


def is_recording(tensor: Tensor) -> bool:
    """Return whether a CUDA graph is being recorded, which cannot read a tensor on the host."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def pad_blocks(sums_BAGFV: Tensor, blocks: int) -> Tensor:
    """Return the sums padded with zeros to at least `blocks` blocks."""
    missing = blocks - sums_BAGFV.shape[1]
    return F.pad(sums_BAGFV, (0, 0, 0, 0, 0, 0, 0, missing)) if missing > 0 else sums_BAGFV


def scatter_to_block(here_B: Tensor, blocks: int, sum_BGFV: Tensor) -> Tensor:
    """Return (B, A, G, F, V) with the sum of each row at block here_B and zeros at the other blocks."""
    here_BA = here_B.unsqueeze(1) == torch.arange(blocks, device=here_B.device)
    return torch.where(here_BA[..., None, None, None], sum_BGFV.unsqueeze(1), 0)


def mixing_rows(matrix_GJMM: Tensor, block_BI: Tensor, blocks: int) -> Tensor:
    """Return the rows of W for the blocks block_BI, (B, G, J, I, A), A = `blocks` columns.

    A row past the end of W belongs to a block without tokens and repeats the last row.
    """
    count = matrix_GJMM.shape[-1]
    rows_GJBIM = matrix_GJMM[:, :, block_BI.clamp_max(count - 1)]
    return F.pad(rows_GJBIM.movedim(2, 0), (0, max(blocks - count, 0)))[..., :blocks]


@dataclass
class BlockChunks:
    """The chunks of one call, (B, G, N, ..) each, and the rows of W for its blocks.

    per_block: chunks per block. block_BI: numbers of the blocks. weight_BGJIA: rows of W, see `mixing_rows`.
    """

    layout: ChunkLayout
    per_block: int
    scores: ChunkScores
    v_BGNCV: Tensor
    block_BI: Tensor
    weight_BGJIA: Tensor

    @classmethod
    def from_inputs(cls, rows: MaskInputs, matrix_GJMM: Tensor, chunk: int, block: int) -> BlockChunks:
        """Lay the tokens of one call out in chunks."""
        layout = ChunkLayout.block_aligned(rows.start_B, rows.v_BGTV.shape[2], min(chunk, block), block)
        per_block = -(-block // layout.chunk)
        beta = None if rows.beta_BGT is None else layout.to_chunks(rows.beta_BGT, 2)
        scores = chunk_scores(layout.to_chunks(rows.q_BGJTF, 3).transpose(2, 3), layout.to_chunks(rows.k_BGTF, 2), beta)
        block_BI = layout.base_B.unsqueeze(1) + torch.arange(layout.count // per_block, device=layout.base_B.device)
        weight_BGJIA = mixing_rows(matrix_GJMM, block_BI, int(block_BI.max()) + 1)
        return cls(layout, per_block, scores, layout.to_chunks(rows.v_BGTV, 2), block_BI, weight_BGJIA)

    def initial_sums(self, sums_BAGFV: Tensor | None) -> Tensor:
        """Return the sums before the call, padded to all blocks of the call. sums_BAGFV None: no state."""
        if sums_BAGFV is None:
            batch, groups, _, _, values = self.v_BGNCV.shape
            sums_BAGFV = self.v_BGNCV.new_zeros(batch, 0, groups, self.scores.write_xCF.shape[-1], values)
        return pad_blocks(sums_BAGFV, self.weight_BGJIA.shape[-1])

    def mix(self, before_BAGFV: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (out_BGJTV, sums of all blocks) for kernel scores. before_BAGFV: sums before the call, None: no
        state.
        """
        sums_BAGFV = self.initial_sums(before_BAGFV)
        row_B1 = torch.arange(len(self.block_BI), device=self.block_BI.device)[:, None]
        chunk_BGImFV = (self.scores.write_xCF.mT @ self.v_BGNCV).unflatten(2, (-1, self.per_block))
        # The first block of a row may be partly in the state; that sum comes before the block's chunks.
        open_BGIFV = sums_BAGFV[row_B1, self.block_BI].transpose(1, 2)
        own_BGImFV = torch.cat([open_BGIFV.unsqueeze(3), chunk_BGImFV], 3).cumsum(3)
        sums_BAGFV = sums_BAGFV.index_put((row_B1, self.block_BI), own_BGImFV[:, :, :, -1].transpose(1, 2))
        at_A = torch.arange(self.weight_BGJIA.shape[-1], device=row_B1.device)
        earlier_BGJIA = self.weight_BGJIA * (at_A < self.block_BI.unsqueeze(2))[:, None, None]
        mixed_BGJIFV = torch.einsum("bgjia,bagfv->bgjifv", earlier_BGJIA, sums_BAGFV[:, : len(at_A)])
        read_BGImJCF = self.scores.read_xJCF.unflatten(2, (-1, self.per_block))
        out = read_BGImJCF @ mixed_BGJIFV.transpose(2, 3).unsqueeze(3)
        near = (read_BGImJCF @ own_BGImFV[:, :, :, :-1].unsqueeze(4)).flatten(2, 3)
        near = near + self.scores.inner_xJCC @ self.v_BGNCV.unsqueeze(3)
        out = out.flatten(2, 3) + self._own_weights()[..., None, None] * near
        return self.layout.from_chunks(out.transpose(2, 3), 3), sums_BAGFV

    def mix_delta(self, before_BAGFV: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (out_BGJTV, sums of all blocks) for the delta rule. before_BAGFV: sums before the call, None: no
        state.
        """
        sums_BAGFV, out, own_BGNJ = self.initial_sums(before_BAGFV), [], self._own_weights()
        inside = own_BGNJ[..., None, None] * (self.scores.inner_xJCC @ self.v_BGNCV.unsqueeze(3))
        added_BGNFV = self.scores.write_xCF.mT @ self.v_BGNCV
        keys_BGNCF = self.scores.keys_xCF
        assert keys_BGNCF is not None  # the scores are the delta rule's
        blocks = self.weight_BGJIA.shape[-1]
        for n in range(self.layout.count):
            weight_BGJA = self.weight_BGJIA[:, :, :, n // self.per_block]
            mixed_BGJFV = torch.einsum("bgja,bagfv->bgjfv", weight_BGJA, sums_BAGFV[:, :blocks])
            out.append(inside[:, :, n] + self.scores.read_xJCF[:, :, n] @ mixed_BGJFV)
            seen_BAGCV = keys_BGNCF[:, None, :, n] @ sums_BAGFV
            sums_BAGFV = sums_BAGFV - self.scores.write_xCF[:, None, :, n].mT @ seen_BAGCV
            here_B = self.block_BI[:, n // self.per_block]
            sums_BAGFV = sums_BAGFV + scatter_to_block(here_B, sums_BAGFV.shape[1], added_BGNFV[:, :, n])
        return self.layout.from_chunks(torch.stack(out, 3), 3), sums_BAGFV

    def _own_weights(self) -> Tensor:
        """Return W[block, block] of the block of every chunk, (B, G, N, J)."""
        index = self.block_BI[:, None, None, :, None].expand(*self.weight_BGJIA.shape[:4], 1)
        own_BGJI = self.weight_BGJIA.gather(-1, index).squeeze(-1)
        return own_BGJI.transpose(2, 3).repeat_interleave(self.per_block, 2)


@dataclass(frozen=True)
class Blocks:
    """Config of dense block mixing.

    block: tokens per block. count: number of blocks. weights: "learned", or "frozen" at their initial values.
    normalise: rows of W are a softmax of the parameters, or their softplus divided by its sum.
    """

    name: ClassVar[str] = "blocks"
    block: int = 64
    count: int = 32
    weights: Literal["learned", "frozen"] = "learned"
    normalise: Literal["softmax", "sum"] = "softmax"

    def __post_init__(self) -> None:
        if self.block < 1 or self.count < 1:
            raise SurgeryError(
                f"blocks: block and count must be 1 or more (got block={self.block}, count={self.count}); for example "
                "block=64, count=32"
            )
        for option, valid in (("weights", ("learned", "frozen")), ("normalise", ("softmax", "sum"))):
            if getattr(self, option) not in valid:
                raise SurgeryError(f"blocks: {option} must be one of {valid} (got {getattr(self, option)!r})")


@MASKS.register(Blocks)
class BlocksMask(Mask):
    """Dense block mixing. weight_GJMM: W before normalisation; initially it falls linearly with the distance of blocks,
    as in MHLA."""

    config: Blocks
    weight_GJMM: Tensor

    def __init__(self, config: Blocks, shape: AttentionShape):
        super().__init__(config, shape)
        at_M = torch.arange(config.count)
        near_MM = 1 - (at_M.unsqueeze(1) - at_M).abs() / config.count
        raw_GJMM = self._raw(near_MM).repeat(shape.groups, shape.heads // shape.groups, 1, 1)
        if config.weights == "learned":
            self.weight_GJMM = nn.Parameter(raw_GJMM)
        else:
            self.register_buffer("weight_GJMM", raw_GJMM)

    @classmethod
    def check_config(cls, config: Any, shape: AttentionShape, delta: bool) -> None:
        """Raise SurgeryError if the mask cannot serve this attention."""
        if delta and not shape.causal:
            raise SurgeryError(
                "blocks: bidirectional attention cannot use the delta rule, which depends on the order of tokens; "
                "use scores: kernel"
            )

    @classmethod
    def state_size(cls, config: Blocks, shape: AttentionShape, features: int, values: int, length: int) -> int:
        """Return the number of elements in the state after `length` tokens, per key/value head."""
        return -(-length // config.block) * features * values

    def matrix(self) -> Tensor:
        """Return W_GJMM, zero above the diagonal if attention is causal."""
        raw = self.weight_GJMM.to(torch.promote_types(self.weight_GJMM.dtype, torch.float32))
        hidden = torch.ones_like(raw, dtype=torch.bool).triu(1 if self.shape.causal else self.config.count)
        if self.config.normalise == "softmax":
            return raw.masked_fill(hidden, -torch.inf).softmax(-1)
        positive = F.softplus(raw).masked_fill(hidden, 0)
        return positive / positive.sum(-1, keepdim=True)

    @torch.no_grad()
    def initialize(self, matrix_GJMM: Tensor) -> None:
        """Set the parameters so that W is matrix_GJMM (nonnegative) with normalised rows."""
        self.weight_GJMM.copy_(self._raw(matrix_GJMM))

    def _raw(self, matrix: Tensor) -> Tensor:
        matrix = matrix.clamp_min(1e-12)
        return matrix.log() if self.config.normalise == "softmax" else inverse_softplus(matrix)

    def _check_length(self, tokens: int) -> None:
        block, count = self.config.block, self.config.count
        if tokens > block * count:
            raise SurgeryError(
                f"blocks: the sequence has {tokens:,} tokens, and W has {count} blocks of {block} tokens "
                f"({block * count:,} tokens); convert with count={-(-tokens // block)} or more, or with "
                "toeplitz_blocks, which has no maximum length"
            )

    def empty_state(self, rows: int, features: int, values: int, device: torch.device | str) -> MaskState:
        """Return the state of `rows` sequences before their first token."""
        return {"blocks": torch.zeros(rows, 0, self.shape.groups, features, values, device=device)}

    def dense(self, start_B: Tensor, length: int, signals: Signals) -> Tensor:
        """Return M_BGJTT of tokens at start .. start + length."""
        if not is_recording(start_B):  # a graph is recorded after a step of the same shapes that was checked
            self._check_length(int(start_B.max()) + length)
        block_BT = (start_B.unsqueeze(1) + torch.arange(length, device=start_B.device)) // self.config.block
        mask = self.matrix()[:, :, block_BT.unsqueeze(2), block_BT.unsqueeze(1)].movedim(2, 0)
        return mask.tril() if self.shape.causal else mask

    def chunked(self, rows: MaskInputs, state: MaskState | None, chunk: int) -> tuple[Tensor, MaskState | None]:
        """Return (out_BGJTV, state after the rows' tokens, or None without a state)."""
        end, furthest = torch.stack([rows.start_B + rows.count_B, rows.start_B]).amax(1).tolist()
        self._check_length(end)
        qkv, block = (rows.q_BGJTF, rows.k_BGTF, rows.v_BGTV), self.config.block
        if not self.shape.causal:
            return blocks_bidirectional(*qkv, self.matrix(), block), state
        n_before = 0 if state is None else state["blocks"].shape[1]
        if rows.beta_BGT is None and furthest == n_before == 0:
            keep = state is not None
            out, sums_BAGFV = blocks_from_zero(*qkv, self.matrix(), block, chunk=chunk, keep=keep)
        else:
            out, sums_BAGFV = self._mix_chunks(upcast_inputs(rows), state, chunk)
        if state is None or sums_BAGFV is None:
            return out, None
        return out, {"blocks": sums_BAGFV[:, : max(-(-end // block), n_before)]}

    def _mix_chunks(self, rows: MaskInputs, state: MaskState | None, chunk: int) -> tuple[Tensor, Tensor]:
        """Return (out_BGJTV, sums of all blocks) for rows at any position, with any scores."""
        chunks = BlockChunks.from_inputs(rows, self.matrix().to(rows.v_BGTV.dtype), chunk, self.config.block)
        before_BAGFV = None if state is None else state["blocks"].to(rows.v_BGTV.dtype)
        return chunks.mix(before_BAGFV) if rows.beta_BGT is None else chunks.mix_delta(before_BAGFV)

    def step(self, rows: MaskInputs, state: MaskState) -> tuple[Tensor, MaskState]:
        """Return (out_BGJTV, state) for one token of each row."""
        rows, block = upcast_inputs(rows), self.config.block
        end = int((rows.start_B + rows.count_B).max())
        self._check_length(end)
        write_BGF1 = (rows.k_BGTF if rows.beta_BGT is None else rows.beta_BGT.unsqueeze(-1) * rows.k_BGTF).mT
        blocks = max(-(-end // block), state["blocks"].shape[1])
        # Before the first token has left the window there is no block: the token writes zeros to one that is not kept.
        before_BAGFV = pad_blocks(state["blocks"].to(write_BGF1.dtype), max(blocks, 1))
        sums_BAGFV = apply_carry(rows, write_BGF1, before_BAGFV)
        # A padding token behind a full last block belongs to a block that does not exist; it writes zeros, to the last
        # one that does.
        here_B = (rows.start_B // block).clamp_max(sums_BAGFV.shape[1] - 1)
        slot_of_row = torch.arange(len(here_B), device=here_B.device), here_B
        sums_BAGFV = sums_BAGFV.index_put(slot_of_row, sums_BAGFV[slot_of_row] + write_BGF1 * rows.v_BGTV)
        return rows.q_BGJTF @ self._mixed_sums(here_B, sums_BAGFV), {"blocks": sums_BAGFV[:, :blocks]}

    def read(self, q_BGJTF: Tensor, start_B: Tensor, signals: Signals, state: MaskState) -> Tensor:
        """Return out_BGJTV of queries that all read the state as one in the block of the last token written."""
        q_BGJTF = q_BGJTF.to(torch.promote_types(q_BGJTF.dtype, torch.float32))
        here_B = (start_B - 1).clamp_min(0) // self.config.block
        return q_BGJTF @ self._mixed_sums(here_B, state["blocks"].to(q_BGJTF.dtype))

    def _mixed_sums(self, here_B: Tensor, sums_BAGFV: Tensor) -> Tensor:
        """Return sum_m W[here, m] X_m (B, G, J, F, V)."""
        matrix_GJMM = self.matrix().to(sums_BAGFV.dtype)
        weight_BGJA = mixing_rows(matrix_GJMM, here_B.unsqueeze(1), sums_BAGFV.shape[1]).squeeze(3)
        return torch.einsum("bgja,bagfv->bgjfv", weight_BGJA, sums_BAGFV)
