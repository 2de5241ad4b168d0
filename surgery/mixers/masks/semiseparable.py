"""Semiseparable masks, products of gates: M_ts = sum_r a_r exp(g_r,s+1 + .. + g_r,t) with log-gates g <= 0.

Linear time and a state of fixed size. For each component r, S_t = e^(g_t) carry_t S_t-1 + k_t v_t^T, where carry_t is
the identity or the delta rule's I - beta k k^T, and o_t = sum_r a_r q_t S_r,t. Chunked form (Dao and Gu 2024,
"Transformers are SSMs", section 6 and listing 1): the mask is formed inside each chunk, and states pass from chunk to
chunk. exp is never applied to a positive number. R components; states are (B, R, G, F, V).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surgery.core.dispatch import dispatched
from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import Mask, MaskInputs, MaskState, Signals
from surgery.mixers.masks.chunking import ChunkLayout, log_decay_to_end, segsum, token_spans, upcast_inputs
from surgery.mixers.masks.delta_rule import ChunkScores, chunk_scores
from surgery.mixers.masks.states_in_place import read_states, update_states

if TYPE_CHECKING:
    from surgery.mixers.common.packed_pieces import PackedPieces


class Semiseparable(Mask):
    """Base class. A subclass defines its log-gates and, with several components, their amplitudes."""

    def log_gates(self, start_B: Tensor, count_B: Tensor, length: int, signals: Signals) -> Tensor:
        """Return log-gates g_BRGT <= 0 of `length` tokens from position start_B on; B, R and G may be 1.

        Gates of padding (tokens past count_B) must be 0.
        """
        raise NotImplementedError

    def amplitudes(self) -> Tensor | None:
        """Return the amplitudes a_RGJ, or None for one component with amplitude 1."""
        return None

    @classmethod
    def components(cls, config: Any) -> int:
        """Return R, the number of exponential components."""
        return 1

    @classmethod
    def state_size(cls, config: Any, shape: AttentionShape, features: int, values: int, length: int) -> int:
        """Return the number of elements in the state after `length` tokens, per key/value head."""
        return cls.components(config) * features * values

    def empty_state(self, rows: int, features: int, values: int, device: torch.device | str) -> MaskState:
        """Return the state of `rows` sequences before their first token."""
        shape = (rows, self.components(self.config), self.shape.groups, features, values)
        return {"sum": torch.zeros(shape, device=device)}

    def dense(self, start_B: Tensor, length: int, signals: Signals) -> Tensor:
        """Return M_BGJTT of tokens at start .. start + length."""
        gates_BRGT = self.log_gates(start_B, torch.full_like(start_B, length), length, signals)
        return chunk_masks(gates_BRGT.unsqueeze(3), self.amplitudes()).squeeze(2).expand(len(start_B), -1, -1, -1, -1)

    def chunked(self, rows: MaskInputs, state: MaskState | None, chunk: int) -> tuple[Tensor, MaskState | None]:
        """Return (out_BGJTV, state after the rows' tokens, or None without a state)."""
        gates_BRGT = self.log_gates(rows.start_B, rows.count_B, rows.v_BGTV.shape[2], rows.signals)
        first = None if state is None else state["sum"]
        qkv = rows.q_BGJTF, rows.k_BGTF, rows.v_BGTV
        operands = *qkv, rows.beta_BGT, gates_BRGT, self.amplitudes()
        out, last = semiseparable(*operands, first_BRGFV=first, chunk=chunk)
        return out, None if state is None else {"sum": last}

    def packed(self, row: MaskInputs, pieces: PackedPieces, state: MaskState, chunk: int) -> tuple[Tensor, MaskState]:
        """Return (out_BGJTV, state after the pieces) of pieces of several sequences in one row."""
        gates_BRGT = self.log_gates(row.start_B, row.count_B, row.v_BGTV.shape[2], row.signals)
        operands = row.q_BGJTF, row.k_BGTF, row.v_BGTV, row.beta_BGT, gates_BRGT, self.amplitudes()
        out, last = semiseparable_packed(*operands, first_SRGFV=state["sum"], pieces=pieces, chunk=chunk)
        return out, {"sum": last}

    def step(self, rows: MaskInputs, state: MaskState) -> tuple[Tensor, MaskState]:
        """Return (out_BGJTV, state) for one token of each row."""
        gates_BRG = self.log_gates(rows.start_B, rows.count_B, 1, rows.signals).squeeze(-1)
        token = rows.q_BGJTF.squeeze(3), rows.k_BGTF.squeeze(2), rows.v_BGTV.squeeze(2)
        beta_BG = None if rows.beta_BGT is None else rows.beta_BGT.squeeze(2)
        operands = *token, beta_BG, gates_BRG, self.amplitudes()
        out_BGJV, after = semiseparable_step(*operands, sum_BRGFV=state["sum"])
        return out_BGJV.unsqueeze(3), {"sum": after}

    def step_in_pool(self, rows: MaskInputs, pool: MaskState, page_B: Tensor) -> Tensor:
        """Return out_BGJTV of one token per row, and update the rows' pages in place.

        With the state S before the token, k^T S and q^T S come from one product, and the state after it is
        e^g S + write (v - e^g k^T S)^T with write = beta k, or e^g S + k v^T with kernel scores.
        """
        wide = torch.promote_types(rows.v_BGTV.dtype, torch.float32)
        fade_BRG11 = self.log_gates(rows.start_B, rows.count_B, 1, rows.signals).to(wide).exp().unsqueeze(-1)
        q_BGJF, k_BGF, v_BG1V = rows.q_BGJTF.squeeze(3).to(wide), rows.k_BGTF.squeeze(2).to(wide), rows.v_BGTV.to(wide)
        weight_RGJ, (copies, groups, *matrix) = self.amplitudes(), pool["sum"].shape[1:]
        fade_BRG11 = fade_BRG11.expand(len(page_B), copies, groups, 1, 1)
        states = [pool["sum"].select(0, page).view(copies * groups, *matrix) for page in page_B.tolist()]
        write_BGF, token_BRG1V = k_BGF, v_BG1V.unsqueeze(1).expand(-1, copies, -1, -1, -1)
        if rows.beta_BGT is None:
            seen_BRGJV = read_states(q_BGJF.repeat(1, copies, 1, 1), states).unflatten(1, (copies, -1))
        else:
            write_BGF = rows.beta_BGT.to(wide) * k_BGF
            keys_BGXF = torch.cat([k_BGF.unsqueeze(2), q_BGJF], dim=2)
            both_BRGXV = read_states(keys_BGXF.repeat(1, copies, 1, 1), states).unflatten(1, (copies, -1))
            seen_BRGJV, token_BRG1V = both_BRGXV[..., 1:, :], token_BRG1V - fade_BRG11 * both_BRGXV[..., :1, :]
        own_BGJ1 = q_BGJF @ write_BGF.unsqueeze(-1)
        out_BRGJV = fade_BRG11 * seen_BRGJV + own_BGJ1.unsqueeze(1) * token_BRG1V
        write_BGF1 = write_BGF.unsqueeze(-1).repeat(1, copies, 1, 1)
        update_states(states, fade_BRG11.flatten(1, 2), write_BGF1, token_BRG1V.flatten(1, 2))
        out_BRGJV = out_BRGJV if weight_RGJ is None else weight_RGJ.to(wide).unsqueeze(-1) * out_BRGJV
        out_BGJV: Tensor = out_BRGJV.sum(1)
        return out_BGJV.unsqueeze(3)

    def by_block(self, rows: MaskInputs, state: MaskState | None, block: int) -> tuple[Tensor, MaskState | None]:
        """Return (out_BGJTV, state after the rows' tokens, or None without a state) of queries that read the state at
        the start of their block."""
        rows = upcast_inputs(rows)
        length, sizes = rows.v_BGTV.shape[2], (rows.k_BGTF.shape[-1], rows.v_BGTV.shape[-1])
        now = self.empty_state(len(rows.v_BGTV), *sizes, rows.v_BGTV.device) if state is None else state
        layout = ChunkLayout.unaligned(rows.start_B, length, block)
        q_BGNJCF = layout.to_chunks(rows.q_BGJTF, 3).transpose(2, 3)
        k_BGNCF, v_BGNCV = layout.to_chunks(rows.k_BGTF, 2), layout.to_chunks(rows.v_BGTV, 2)
        beta = None if rows.beta_BGT is None else layout.to_chunks(rows.beta_BGT, 2)
        # Queries do not see tokens of their own block, so the scores are formed without queries.
        scores = chunk_scores(q_BGNJCF[..., :0, :], k_BGNCF, beta)
        gates_BRGT = self.log_gates(rows.start_B, rows.count_B, length, rows.signals).to(v_BGNCV.dtype)
        before, last = states_before_chunks(
            scores, v_BGNCV, layout.to_chunks(gates_BRGT, 3), now["sum"].to(v_BGNCV.dtype)
        )
        mixed_BGNJFV = mix_components(before, self.amplitudes())
        out_BGJTV = layout.from_chunks((q_BGNJCF @ mixed_BGNJFV).transpose(2, 3), 3)
        return out_BGJTV, None if state is None else {"sum": last}

    def read(self, q_BGJTF: Tensor, start_B: Tensor, signals: Signals, state: MaskState) -> Tensor:
        """Return out_BGJTV of queries that all read the state."""
        q_BGJTF = q_BGJTF.to(torch.promote_types(q_BGJTF.dtype, torch.float32))
        sum_BRGFV = state["sum"].to(q_BGJTF.dtype)
        out_BGJTV: Tensor = q_BGJTF @ mix_components(list(sum_BRGFV.unbind(1)), self.amplitudes())
        return out_BGJTV


def mix_components(sums: list[Tensor], weight_RGJ: Tensor | None) -> Tensor:
    """Return sum_r a_r S_r (B, G, .., J, F, V) of R states (B, G, .., F, V); J is 1 without amplitudes."""
    if weight_RGJ is None:
        return sums[0].unsqueeze(-3)
    weight_RGJ = weight_RGJ.to(sums[0].dtype)
    terms = (
        weight_GJ.view(weight_GJ.shape[0], *[1] * (sum_r.dim() - 4), weight_GJ.shape[1], 1, 1) * sum_r.unsqueeze(-3)
        for weight_GJ, sum_r in zip(weight_RGJ, sums)
    )
    return sum(terms, torch.zeros((), dtype=weight_RGJ.dtype, device=weight_RGJ.device))


@dispatched
def semiseparable_step(
    q_BGJF: Tensor,
    k_BGF: Tensor,
    v_BGV: Tensor,
    beta_BG: Tensor | None,
    gates_BRG: Tensor,
    weight_RGJ: Tensor | None,
    *,
    sum_BRGFV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return (out_BGJV, sum_BRGFV after the token) for one token per row. Arguments as in `semiseparable`."""
    wide = torch.promote_types(v_BGV.dtype, torch.float32)
    q_BGJF, k_BGF, v_BGV, gates_BRG, sum_BRGFV = (x.to(wide) for x in (q_BGJF, k_BGF, v_BGV, gates_BRG, sum_BRGFV))
    write_BGF, sum_BRGFV = write_token(k_BGF, beta_BG, sum_BRGFV)
    token_BGFV = write_BGF.unsqueeze(-1) * v_BGV.unsqueeze(-2)
    sum_BRGFV = gates_BRG.exp()[..., None, None] * sum_BRGFV + token_BGFV.unsqueeze(1)
    out_BRGJV = q_BGJF.unsqueeze(1) @ sum_BRGFV
    return (out_BRGJV if weight_RGJ is None else weight_RGJ.to(wide).unsqueeze(-1) * out_BRGJV).sum(1), sum_BRGFV


@dispatched
def semiseparable(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor | None,
    gates_BRGT: Tensor,
    weight_RGJ: Tensor | None,
    *,
    first_BRGFV: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return (out_BGJTV, last_BRGFV), output and state after the tokens, in float32 or float64.

    Kernels may return `out` in v's dtype. beta_BGT: step sizes of the delta rule, None for kernel scores.
    gates_BRGT: log-gates; B, R and G may be 1. weight_RGJ: amplitudes, None: ones. first_BRGFV: state before the
    tokens, None: zeros. The sequence is computed in spans of whole chunks to bound temporaries.
    """
    wide = torch.promote_types(v_BGTV.dtype, torch.float32)
    batch, groups, per_group, _, features = q_BGJTF.shape
    components = gates_BRGT.shape[1] if weight_RGJ is None else len(weight_RGJ)
    if first_BRGFV is None:
        first_BRGFV = v_BGTV.new_zeros(batch, components, groups, features, v_BGTV.shape[-1])
    outs, last = [], first_BRGFV.to(wide)
    weight_RGJ = None if weight_RGJ is None else weight_RGJ.to(wide)
    for t in token_spans(v_BGTV, per_group, chunk):
        beta = None if beta_BGT is None else beta_BGT[:, :, t].to(wide)
        qkv = q_BGJTF[:, :, :, t].to(wide), k_BGTF[:, :, t].to(wide), v_BGTV[:, :, t].to(wide)
        out, last = _semiseparable_span(
            *qkv, beta, gates_BRGT[..., t].to(wide), weight_RGJ, first_BRGFV=last, chunk=chunk
        )
        outs.append(out)
    return torch.cat(outs, 3), last


@dispatched
def semiseparable_packed(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor | None,
    gates_BRGT: Tensor,
    weight_RGJ: Tensor | None,
    *,
    first_SRGFV: Tensor,
    pieces: PackedPieces,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return (out_BGJTV, last_SRGFV) of pieces of S sequences in one row (B = 1). Arguments as in `semiseparable`.

    first_SRGFV: state of each sequence before its piece. Pieces without tokens keep it.
    """
    outs, lasts = [], []
    for group in pieces.groups:
        k, v, gates = (group.to_rows(t, dim, zeros=True) for t, dim in ((k_BGTF, 2), (v_BGTV, 2), (gates_BRGT, 3)))
        beta = None if beta_BGT is None else group.to_rows(beta_BGT, 2, zeros=True)
        tokens = group.to_rows(q_BGJTF, 3), k, v, beta, gates, weight_RGJ
        out, last = semiseparable(*tokens, first_BRGFV=first_SRGFV[group.index_D], chunk=chunk)
        outs.append(out)
        lasts.append(last)
    return pieces.join_tokens(outs, 3), pieces.join_states(lasts, first_SRGFV)


def _semiseparable_span(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor | None,
    gates_BRGT: Tensor,
    weight_RGJ: Tensor | None,
    *,
    first_BRGFV: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    layout = ChunkLayout.unaligned(torch.zeros(len(v_BGTV), dtype=torch.int64), v_BGTV.shape[2], chunk)
    q_BGNJCF = layout.to_chunks(q_BGJTF, 3).transpose(2, 3)
    k_BGNCF, v_BGNCV, gates_BRGNC = (
        layout.to_chunks(k_BGTF, 2),
        layout.to_chunks(v_BGTV, 2),
        layout.to_chunks(gates_BRGT, 3),
    )
    scores = chunk_scores(q_BGNJCF, k_BGNCF, None if beta_BGT is None else layout.to_chunks(beta_BGT, 2))
    inside_BGNJCV = (scores.inner_xJCC * chunk_masks(gates_BRGNC, weight_RGJ)) @ v_BGNCV.unsqueeze(3)
    passed_BGNJCV, last_BRGFV = _inter_chunk(scores, v_BGNCV, gates_BRGNC, weight_RGJ, first_BRGFV)
    return layout.from_chunks((inside_BGNJCV + passed_BGNJCV).transpose(2, 3), 3), last_BRGFV


def chunk_masks(gates_BRGNC: Tensor, weight_RGJ: Tensor | None) -> Tensor:
    """Return M_BGNJCC inside each chunk, summed over components."""
    if weight_RGJ is None:
        return segsum(gates_BRGNC.squeeze(1)).exp().unsqueeze(3)
    terms = (
        weight_GJ[:, None, :, None, None] * segsum(gates_BGNC).exp().unsqueeze(3)
        for weight_GJ, gates_BGNC in zip(weight_RGJ, gates_BRGNC.unbind(1))
    )
    return sum(terms, torch.zeros((), dtype=gates_BRGNC.dtype, device=gates_BRGNC.device))


def _inter_chunk(
    scores: ChunkScores, v_BGNCV: Tensor, gates_BRGNC: Tensor, weight_RGJ: Tensor | None, first_BRGFV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (contribution of earlier chunks to the output (B, G, N, J, C, V), state after the last chunk)."""
    out, after = torch.zeros_like(v_BGNCV[:, :, :, None]), []
    for r, gates_BGNC in enumerate(gates_BRGNC.unbind(1)):
        fade_BGNJC = gates_BGNC.cumsum(-1).exp().unsqueeze(3)  # from the chunk's start to a token
        added_BGNFV = (scores.write_xCF * log_decay_to_end(gates_BGNC).exp().unsqueeze(-1)).mT @ v_BGNCV
        before_BGNFV, last = scan_states(scores, added_BGNFV, fade_BGNJC[:, :, :, 0, -1], first_BRGFV[:, r])
        if weight_RGJ is not None:
            fade_BGNJC = weight_RGJ[r, :, None, :, None] * fade_BGNJC
        out = out + fade_BGNJC.unsqueeze(-1) * (scores.read_xJCF @ before_BGNFV.unsqueeze(3))
        after.append(last)
    return out, torch.stack(after, 1)


def states_before_chunks(
    scores: ChunkScores, v_BGNCV: Tensor, gates_BRGNC: Tensor, first_BRGFV: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Return (the state before every chunk (B, G, N, F, V) of each component, the state after the last chunk (B, R, G,
    F, V)).
    """
    before, last = [], []
    for r, gates_BGNC in enumerate(gates_BRGNC.unbind(1)):
        added_BGNFV = (scores.write_xCF * log_decay_to_end(gates_BGNC).exp().unsqueeze(-1)).mT @ v_BGNCV
        before_BGNFV, last_BGFV = scan_states(scores, added_BGNFV, gates_BGNC.sum(-1).exp(), first_BRGFV[:, r])
        before.append(before_BGNFV)
        last.append(last_BGFV)
    return before, torch.stack(last, 1)


def scan_states(
    scores: ChunkScores, added_BGNFV: Tensor, total_BGN: Tensor, first_BGFV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (S_n before every chunk (B, G, N, F, V), the last state) of S_n+1 = total_n carry_n S_n + added_n, S_0 =
    first.
    """
    before, state = [], first_BGFV.to(added_BGNFV.dtype)
    factors = None if scores.keys_xCF is None else (scores.write_xCF.mT.unbind(2), scores.keys_xCF.unbind(2))
    for n, (added, total) in enumerate(zip(added_BGNFV.unbind(2), total_BGN[..., None, None].unbind(2))):
        before.append(state)
        passed = state if factors is None else state - factors[0][n] @ (factors[1][n] @ state)
        state = torch.addcmul(added, total, passed)
    return torch.stack(before, 2), state


def write_token(k_BGF: Tensor, beta_BG: Tensor | None, sum_BRGFV: Tensor) -> tuple[Tensor, Tensor]:
    """Return (beta k, (I - beta k k^T) S) of the delta rule for one token, before its value is added; (k, S) for kernel
    scores."""
    if beta_BG is None:
        return k_BGF, sum_BRGFV
    write_BGF = beta_BG.to(k_BGF.dtype).unsqueeze(-1) * k_BGF
    seen_BRG1V = k_BGF[:, None, :, None] @ sum_BRGFV
    return write_BGF, sum_BRGFV - write_BGF[:, None, :, :, None] * seen_BRG1V


def apply_carry(rows: MaskInputs, write_BGF1: Tensor, sum_BRGFV: Tensor) -> Tensor:
    """Return (I - beta k k^T) S for one token per row; S for kernel scores. write_BGF1: beta k."""
    if rows.beta_BGT is None:
        return sum_BRGFV
    return sum_BRGFV - write_BGF1.unsqueeze(1) @ (rows.k_BGTF.unsqueeze(1) @ sum_BRGFV)
