"""Masks of gates: M_ts = sum_r a_r exp(g_r,s+1 + .. + g_r,t), log-gates g <= 0. Linear time, a state of fixed size.

For each component r, S_t = e^(g_t) carry_t S_t-1 + k_t v_t^T and o_t = sum_r a_r q_t S_r,t. In chunks (Dao and Gu
2024, "Transformers are SSMs", section 6 and listing 1): inside a chunk the mask is written out, between chunks states
pass, each chunk adding its own. No exp of a positive number anywhere.   R components; states are (B, R, G, F, V).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import Mask, Rows
from surgery.mixers.masks.frame import Frame, log_products, spans, to_end, widened
from surgery.mixers.scores import Chunk, chunk_scores

State = dict[str, Tensor]


class Semiseparable(Mask):
    """A subclass says its log-gates and, where it mixes several, the weights."""

    def log_gates(self, start_B: Tensor, count_B: Tensor, length: int, signals: State) -> Tensor:
        """g_BRGT <= 0 of tokens at start .. start + length, 0 from the count-th on; B, R, G may be 1."""
        raise NotImplementedError

    def amplitudes(self) -> Tensor | None:
        """a_RGJ, None for one component of weight 1."""
        return None

    @classmethod
    def components(cls, config: Any) -> int:
        return 1

    @classmethod
    def kept(cls, config: Any, shape: AttentionShape, features: int, values: int, length: int) -> int:
        return cls.components(config) * features * values

    def empty(self, rows: int, features: int, values: int, device: Any) -> State:
        shape = (rows, self.components(self.config), self.shape.groups, features, values)
        return {"sum": torch.zeros(shape, device=device)}

    def dense(self, start_B: Tensor, length: int, signals: State) -> Tensor:
        gates_BRGT = self.log_gates(start_B, torch.full_like(start_B, length), length, signals)
        return self._mixed(gates_BRGT.unsqueeze(3)).squeeze(2).expand(len(start_B), -1, -1, -1, -1)

    def chunked(self, rows: Rows, state: State | None, chunk: int) -> tuple[Tensor, State | None]:
        outs, after = [], state
        for span in spans(widened(rows), chunk):
            out, after = self._span(span, after, chunk)
            outs.append(out)
        return torch.cat(outs, 3), None if state is None else after

    def _span(self, rows: Rows, state: State | None, chunk: int) -> tuple[Tensor, State]:
        length = rows.v_BGTV.shape[2]
        frame = Frame.plain(rows.start_B, length, chunk)
        q_BGNJCF = frame.cut(rows.q_BGJTF, 3).transpose(2, 3)
        k_BGNCF, v_BGNCV = frame.cut(rows.k_BGTF, 2), frame.cut(rows.v_BGTV, 2)
        beta_BGNC = None if rows.beta_BGT is None else frame.cut(rows.beta_BGT, 2)
        gates_BRGT = self.log_gates(rows.start_B, rows.count_B, length, rows.signals)
        gates_BRGNC = frame.cut(gates_BRGT.to(v_BGNCV.dtype), 3)
        scores = chunk_scores(q_BGNJCF, k_BGNCF, beta_BGNC)
        inside_BGNJCV = (scores.inner_xJCC * self._mixed(gates_BRGNC)) @ v_BGNCV.unsqueeze(3)
        passed_BGNJCV, after = self._passed(scores, v_BGNCV, gates_BRGNC, state)
        return frame.joined((inside_BGNJCV + passed_BGNJCV).transpose(2, 3), 3), {"sum": after}

    def step(self, rows: Rows, state: State) -> tuple[Tensor, State]:
        rows = widened(rows)
        gate_BRG = self.log_gates(rows.start_B, rows.count_B, 1, rows.signals).squeeze(-1).to(rows.v_BGTV.dtype)
        beta_BG11 = 1 if rows.beta_BGT is None else rows.beta_BGT.unsqueeze(-1)
        write_BGF1 = (beta_BG11 * rows.k_BGTF).mT
        sum_BRGFV = carried_by_one(rows, write_BGF1, state["sum"].to(rows.v_BGTV.dtype))
        sum_BRGFV = gate_BRG.exp()[..., None, None] * sum_BRGFV + (write_BGF1 * rows.v_BGTV).unsqueeze(1)
        out_BRGJV = rows.q_BGJTF.squeeze(3).unsqueeze(1) @ sum_BRGFV
        weight_RGJ = self.amplitudes()
        out_BGJV = out_BRGJV.sum(1) if weight_RGJ is None else (weight_RGJ.unsqueeze(-1) * out_BRGJV).sum(1)
        return out_BGJV.unsqueeze(3), {"sum": sum_BRGFV}

    def _mixed(self, gates_BRGNC: Tensor) -> Tensor:
        """M_BGNJCC inside chunks, a component at a time."""
        weight_RGJ = self.amplitudes()
        if weight_RGJ is None:
            return log_products(gates_BRGNC.squeeze(1)).exp().unsqueeze(3)
        terms = (
            weight_GJ[:, None, :, None, None] * log_products(gates_BGNC).exp().unsqueeze(3)
            for weight_GJ, gates_BGNC in zip(weight_RGJ, gates_BRGNC.unbind(1))
        )
        return sum(terms, torch.zeros((), dtype=gates_BRGNC.dtype, device=gates_BRGNC.device))

    def _passed(
        self, scores: Chunk, v_BGNCV: Tensor, gates_BRGNC: Tensor, state: State | None
    ) -> tuple[Tensor, Tensor]:
        """What chunks read of earlier ones, (B, G, N, J, C, V), and the state behind the last."""
        weight_RGJ = self.amplitudes()
        out, after = torch.zeros_like(v_BGNCV[:, :, :, None]), []
        for r, gates_BGNC in enumerate(gates_BRGNC.unbind(1)):
            fade_BGNJC = gates_BGNC.cumsum(-1).exp().unsqueeze(3)  # from the chunk's start to a token
            added_BGNFV = (scores.write_xCF * to_end(gates_BGNC).exp().unsqueeze(-1)).mT @ v_BGNCV
            first = torch.zeros_like(added_BGNFV[:, :, 0]) if state is None else state["sum"][:, r]
            before_BGNFV, last = states(scores, added_BGNFV, fade_BGNJC[:, :, :, 0, -1], first)
            if weight_RGJ is not None:
                fade_BGNJC = weight_RGJ[r, :, None, :, None] * fade_BGNJC
            out = out + fade_BGNJC.unsqueeze(-1) * (scores.read_xJCF @ before_BGNFV.unsqueeze(3))
            after.append(last)
        return out, torch.stack(after, 1)


def states(scores: Chunk, added_BGNFV: Tensor, total_BGN: Tensor, first_BGFV: Tensor) -> tuple[Tensor, Tensor]:
    """S_n+1 = total_n carry_n S_n + added_n from S_0 = first: (every S_n, the last one)."""
    before, state = [], first_BGFV.to(added_BGNFV.dtype)
    factors = None if scores.keys_xCF is None else (scores.write_xCF.mT.unbind(2), scores.keys_xCF.unbind(2))
    for n, (added, total) in enumerate(zip(added_BGNFV.unbind(2), total_BGN[..., None, None].unbind(2))):
        before.append(state)
        passed = state if factors is None else state - factors[0][n] @ (factors[1][n] @ state)
        state = torch.addcmul(added, total, passed)
    return torch.stack(before, 2), state


def carried_by_one(rows: Rows, write_BGF1: Tensor, sum_BRGFV: Tensor) -> Tensor:
    """(I - beta k k^T) S."""
    if rows.beta_BGT is None:
        return sum_BRGFV
    return sum_BRGFV - write_BGF1.unsqueeze(1) @ (rows.k_BGTF.unsqueeze(1) @ sum_BRGFV)
