"""Protocol of the masks M of linear attention, O = (A . M) V (Guo et al. 2025, "Log-Linear Attention", section 2).

A mask has three implementations that agree up to rounding: `dense` (the definition, quadratic), `chunked` (training and
prefill) and `step` (one token with a state). Tokens come as `MaskInputs`: real tokens first in each row, padding behind
them, and the absolute position of each row's first token, because some masks depend on absolute positions.

With softmax over chunks (common/near_chunks.py) the queries of a block all read the state at its start. These are
`dense_by_block`, `by_block` and `read`. A query then counts as one at the last token written; with the hierarchical
mask its levels are those of the first token after it. A tensor that is the same for all J query heads of a group may
have size 1 in axis J.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from surgery.core.registry import Registry
from surgery.mixers.base import AttentionShape, MethodModule

if TYPE_CHECKING:
    from surgery.mixers.common.packed_pieces import PackedPieces

MaskState = dict[str, Tensor]  # state of a mask by name, float32, batch first
Signals = dict[str, Tensor]  # tensors (B, T, ..) that a mask computes from the hidden states, by name


@dataclass
class MaskInputs:
    """Inputs of a mask for one call. Token t is written to the state before query t reads it.

    q_BGJTF, k_BGTF: features of queries and keys. v_BGTV: values.
    beta_BGT: step sizes of the delta rule, or None for kernel scores.
    start_B: absolute position of each row's first token. count_B: number of real tokens per row; k, v, beta and the
    written signals of later tokens must be 0, and outputs of those tokens are arbitrary.
    signals: result of `Mask.signals`. max_seen: upper bound of start_B + count_B that needs no device synchronization,
    or None if no bound is known.
    """

    q_BGJTF: Tensor
    k_BGTF: Tensor
    v_BGTV: Tensor
    beta_BGT: Tensor | None
    start_B: Tensor
    count_B: Tensor
    signals: Signals
    max_seen: int | None = None


class Mask(MethodModule):
    """Base class of structured masks. Parameters and signals are float32.

    written_signals: names of the signals that belong to the written token (gates); the others belong to the query.
    has_bounded_state: False if a step needs all earlier keys and values.
    """

    config_type: ClassVar[type]
    written_signals: tuple[str, ...] = ()
    has_bounded_state: ClassVar[bool] = True

    def __init__(self, config: Any, shape: AttentionShape):
        super().__init__()
        self.config, self.shape = config, shape

    @classmethod
    def check_config(cls, config: Any, shape: AttentionShape, delta: bool) -> None:
        """Raise SurgeryError if the mask cannot be used for this attention. delta: whether scores are the delta
        rule's.
        """

    @classmethod
    def reach(cls, config: Any) -> int | None:
        """Return the first distance from which on M is 0, or None."""
        return None

    def signals(self, x_BTD: Tensor, length: int | None = None) -> Signals:
        """Return the tensors (B, T, ..) that the mask computes from the hidden states.

        length: bound on the positions of all tokens that are read and written, None if there is none. A mask may leave
        out what such rows do not read.
        """
        return {}

    def expand_queries(self, q_BGJTF: Tensor, signals: Signals) -> tuple[Tensor, Signals]:
        """Return (queries (B, G, J n, T, F), signals) of a mask that reads its states with n queries in place of each
        one.

        The other methods take these, and `sum_queries` is applied to their outputs.
        """
        return q_BGJTF, signals

    def sum_queries(self, out_BGJTV: Tensor) -> Tensor:
        """Return the outputs of expanded queries, (B, G, J n, T, V), summed over the n queries, (B, G, J, T, V)."""
        return out_BGJTV

    @classmethod
    def query_macs(cls, config: Any, shape: AttentionShape, features: int) -> int:
        """Return multiply-accumulates of `expand_queries` per token and query head."""
        return 0

    def empty_state(self, rows: int, features: int, values: int, device: torch.device | str) -> MaskState:
        """Return the state of `rows` sequences before their first token."""
        raise NotImplementedError

    def dense(self, start_B: Tensor, length: int, signals: Signals) -> Tensor:
        """Return M_BGJTT of `length` tokens from position start_B on (G or J may be 1); lower triangular if causal."""
        raise NotImplementedError

    def diagonal(self, start_B: Tensor, length: int, signals: Signals) -> Tensor:
        """Return M_tt of `length` tokens (B, G, J, T), each as a sequence of length 1; G or J may be 1."""
        position_BT = start_B.unsqueeze(1) + torch.arange(length, device=start_B.device)
        each = {name: t.flatten(0, 1).unsqueeze(1) for name, t in signals.items()}
        m_XGJ: Tensor = self.dense(position_BT.flatten(), 1, each)[..., 0, 0]
        m_BTGJ: Tensor = m_XGJ.expand(position_BT.numel(), -1, -1).unflatten(0, position_BT.shape)
        return m_BTGJ.permute(0, 2, 3, 1)

    def chunked(self, rows: MaskInputs, state: MaskState | None, chunk: int) -> tuple[Tensor, MaskState | None]:
        """Return (out_BGJTV, state after the rows' tokens, or None without a state). chunk: tokens per chunk."""
        raise NotImplementedError

    def packed(self, row: MaskInputs, pieces: PackedPieces, state: MaskState, chunk: int) -> tuple[Tensor, MaskState]:
        """Return (out_BGJTV, state after the pieces (R, ..)) of pieces of several sequences in one row (B = 1).

        row: start_B is 0 and count_B the number of all tokens; where each sequence is, the pieces say. This method takes
        them as rows of a batch, in groups of similar length.
        """
        outs, states = [], []
        for group in pieces.groups:
            rows = group.mask_rows(row, self.written_signals)
            out_BGJTV, after = self.chunked(rows, {n: t[group.index_D] for n, t in state.items()}, chunk)
            outs.append(out_BGJTV)
            states.append(after or {})
        return pieces.join_tokens(outs, 3), {n: pieces.join_states([s[n] for s in states], t) for n, t in state.items()}

    def packed_in_pool(
        self, row: MaskInputs, pieces: PackedPieces, pool: MaskState, page_R: Tensor, chunk: int
    ) -> Tensor:
        """Return out_BGJTV of `packed`, and update the state of each sequence in place.

        pool: as in `step_in_pool`; sequence r has page_R[r], which holds anything before its first token.
        """
        out_BGJTV, after = self.packed(row, pieces, self.read_pages(pieces, pool, page_R), chunk)
        for name, t in after.items():
            pool[name][page_R] = t.to(pool[name].dtype)
        return out_BGJTV

    def read_pages(self, pieces: PackedPieces, pool: MaskState, page_R: Tensor) -> MaskState:
        """Return the states before the pieces, zeros before the first token of a sequence."""
        if pieces.begins:
            return {name: t.new_zeros(len(page_R), *t.shape[1:]) for name, t in pool.items()}
        first_R = pieces.is_first_R
        return {n: t[page_R].masked_fill(first_R.view(-1, *[1] * (t.dim() - 1)), 0) for n, t in pool.items()}

    def allocate(self, state: MaskState, seen: int) -> MaskState:
        """Return the state with room for what it holds after so many tokens."""
        return state

    def step(self, rows: MaskInputs, state: MaskState) -> tuple[Tensor, MaskState]:
        """Return (out_BGJTV, state after the token) for one token per row (T = 1)."""
        raise NotImplementedError

    def step_in_pool(self, rows: MaskInputs, pool: MaskState, page_B: Tensor) -> Tensor:
        """Return out_BGJTV of one token per row (T = 1), and update the state of each row in place.

        pool: the tensors of `empty_state`, with a page for each sequence of a server, of which row b has page_B[b]; no
        two rows share one. Log-linear masks have all buckets that the longest sequence needs; dead ones are zeros.
        """
        out_BGJTV, after = self.step(rows, {name: t[page_B] for name, t in pool.items()})
        for name, t in after.items():
            pool[name][page_B] = t.to(pool[name].dtype)
        return out_BGJTV

    def dense_by_block(self, start_B: Tensor, length: int, signals: Signals, block: int) -> Tensor:
        """Return M_BGJTT of queries that read the state at the start of their block of `block` tokens.

        start_B: multiples of `block`.
        """
        m_BGJTT = self.dense(start_B, length, signals)
        last_T = torch.arange(length, device=start_B.device) // block * block - 1
        return m_BGJTT[..., last_T.clamp_min(0), :].masked_fill((last_T < 0).unsqueeze(1), 0)

    def by_block(self, rows: MaskInputs, state: MaskState | None, block: int) -> tuple[Tensor, MaskState | None]:
        """Return (out_BGJTV, state after the rows' tokens, or None without a state) of queries that read the state at
        the start of their block of `block` tokens.

        start_B and count_B of the rows: multiples of `block`.
        """
        size = rows.k_BGTF.shape[-1], rows.v_BGTV.shape[-1]
        now = self.empty_state(len(rows.v_BGTV), *size, rows.v_BGTV.device) if state is None else state
        tokens, outs = int(rows.count_B.max()), []
        for start in range(0, rows.v_BGTV.shape[2], block):
            block_rows = slice_tokens(rows, start, start + block)
            outs.append(self.read(block_rows.q_BGJTF, block_rows.start_B, block_rows.signals, now))
            if start < tokens:
                now = self.chunked(block_rows, now, block)[1] or now
        return torch.cat(outs, 3), None if state is None else now

    def read(self, q_BGJTF: Tensor, start_B: Tensor, signals: Signals, state: MaskState) -> Tensor:
        """Return out_BGJTV of queries that all read the state after the first start_B tokens."""
        raise NotImplementedError

    @classmethod
    def state_size(cls, config: Any, shape: AttentionShape, features: int, values: int, length: int) -> int:
        """Return the number of elements in the state after `length` tokens, per key/value head."""
        raise NotImplementedError

    @classmethod
    def state_size_by_block(cls, config: Any, shape: AttentionShape, features: int, values: int, length: int) -> int:
        """Return the number of elements in the state that `by_block` leaves after `length` tokens, per key/value
        head.
        """
        return cls.state_size(config, shape, features, values, length)


def slice_tokens(rows: MaskInputs, start: int, stop: int) -> MaskInputs:
    """Return entries start .. stop - 1 of the rows, as rows of a call of their own."""
    return replace(
        rows,
        q_BGJTF=rows.q_BGJTF[:, :, :, start:stop],
        k_BGTF=rows.k_BGTF[:, :, start:stop],
        v_BGTV=rows.v_BGTV[:, :, start:stop],
        beta_BGT=None if rows.beta_BGT is None else rows.beta_BGT[:, :, start:stop],
        start_B=rows.start_B + rows.count_B.clamp_max(start),
        count_B=(rows.count_B - start).clamp(0, stop - start),
        signals={name: t[:, start:stop] for name, t in rows.signals.items()},
    )


ELSEWHERE = {"hierarchical": "log_linear", "blocks": "block_mixing", "toeplitz_blocks": "toeplitz_block_mixing"}
MASKS: Registry[Mask] = Registry("mask", "surgery.mixers.masks", ELSEWHERE)
