"""Hybrids of linear and softmax attention with `near_tokens: chunks`: softmax over the query's own aligned block and
the one before it.

Blocks of `window` tokens are counted from the first token behind the sinks, so token t is in block b = (t - sinks) //
window.

Softmax branch: query t attends to the sinks, to block b - 1 and to its own block up to itself: window + 1 to 2 window
tokens besides the sinks. Linear branch: query t reads the state after block b - 2 (masks/base.py, `by_block`). No token
is in both branches or in neither.

A block enters the linear branch once the last token of the next block has come: n tokens leave a state of n_far =
window max(0, (n - sinks) // window - 1) tokens. The others are part of the mixer's state, in rings of 2 window slots.
The mask's positions count the tokens behind the sinks, as in window_hybrid.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.mixers.base import AttentionShape
from surgery.mixers.common.window_hybrid import (
    LocalOutput,
    RecentAndSinks,
    Tensors,
    WindowBuffer,
    attend_visible_slots,
)
from surgery.mixers.masks.base import MaskInputs
from surgery.mixers.padding import gather_rowwise, shift_rows


@dataclass(frozen=True)
class ChunkBuffer(WindowBuffer):
    """Sizes of a block (`window`) and of the sinks in tokens, and the operations on rings and sinks."""

    @property
    def slots(self) -> int:
        """Slots of a ring: two blocks."""
        return 2 * self.window

    def far_tokens(self, seen: int) -> int:
        """Return how many tokens the linear branch has after `seen` tokens."""
        return self.window * max(0, (seen - self.sinks) // self.window - 1)

    def far_tokens_of_rows(self, seen_B: Tensor) -> Tensor:
        """Return `far_tokens` of each row."""
        return self.window * (torch.div(seen_B - self.sinks, self.window, rounding_mode="floor") - 1).clamp_min(0)

    def recent_tokens(self, queue: Tensors) -> Tensors:
        """Return the last 2 window - 1 tokens before the call and its own, (B, 2 window - 1 + T, ..) each."""
        return {name: t[:, 1:] for name, t in queue.items()}

    def written_tokens(self, queue: Tensors, seen_B: Tensor, length: int) -> tuple[Tensors, Tensor]:
        """Return (the next `length` tokens of the linear branch, complete blocks or not, and their positions (B,
        length)).
        """
        next_B1 = (self.sinks + self.far_tokens_of_rows(seen_B)).unsqueeze(1)
        position_BL = next_B1 + torch.arange(length, device=seen_B.device)
        index_BL = position_BL - seen_B.unsqueeze(1) + self.slots
        return {
            name: gather_rowwise(t, index_BL.clamp(0, t.shape[1] - 1), dim=1) for name, t in queue.items()
        }, position_BL

    def align_queries(self, rows: MaskInputs, query_signals: Sequence[str]) -> tuple[MaskInputs, Tensor]:
        """Return (rows whose entry i holds the query that the window delays to the place of token i; the entry of query
        0).

        rows: start_B and count_B of the call; T queries with their signals, and L >= T + window - 1 entries of k, v,
        beta and written signals from `written_tokens`, or T entries if no token came before the call. Queries without a
        place read nothing.
        """
        before_B, after_B = (self.far_tokens_of_rows(n_B) for n_B in (rows.start_B, rows.start_B + rows.count_B))
        place_B = rows.start_B - self.sinks - self.window - before_B
        more = rows.v_BGTV.shape[2] - rows.q_BGJTF.shape[3]
        q_BGJLF = shift_rows(F.pad(rows.q_BGJTF, (0, 0, 0, more)), -place_B, dim=3)
        signals = dict(rows.signals)
        for name in query_signals:
            t = signals[name]
            signals[name] = shift_rows(F.pad(t, (0, 0) * (t.dim() - 2) + (0, more)), -place_B, dim=1)
        max_far = None if rows.max_seen is None else self.far_tokens(rows.max_seen)
        moved = replace(
            rows, q_BGJTF=q_BGJLF, start_B=before_B, count_B=after_B - before_B, signals=signals, max_seen=max_far
        )
        return moved, place_B


def chunk_attention(
    q_BGJTK: Tensor,
    keys: RecentAndSinks,
    values: RecentAndSinks,
    seen_B: Tensor,
    shape: AttentionShape,
    block: int,
    *,
    with_largest: bool = False,
) -> LocalOutput:
    """Return the output of the softmax branch.

    Arguments as in `local_attention`, with the last 2 window - 1 tokens before the call in place of the last `window`.
    It has no kernel.
    """
    length, sinks = q_BGJTK.shape[3], keys.sinks.shape[2]
    reach = keys.recent.shape[2] - length
    block = min(length, block)
    count = -(-length // block)
    seen_BNCX = _visible_slots(seen_B, reach, sinks, count, block)
    return attend_visible_slots(q_BGJTK, keys, values, seen_BNCX, shape, with_largest=with_largest)


def _visible_slots(seen_B: Tensor, reach: int, sinks: int, count: int, block: int) -> Tensor:
    """Return whether query c of call block n attends to each of the S sinks and reach + C recent tokens, (B, N, C, S +
    reach + C).
    """
    device, window = seen_B.device, (reach + 1) // 2
    start_BN11 = (seen_B.unsqueeze(1) + block * torch.arange(count, device=device))[:, :, None, None]
    query_BNC1 = start_BN11 + torch.arange(block, device=device).unsqueeze(1)
    key_BN1X = start_BN11 - reach + torch.arange(reach + block, device=device)
    number_BNC1 = torch.div(query_BNC1 - sinks, window, rounding_mode="floor")
    first_BNC1 = sinks + window * (number_BNC1 - 1).clamp_min(0)  # a sink within the blocks counts once
    sink_BNCS = torch.arange(sinks, device=device) <= query_BNC1
    return torch.cat([sink_BNCS, (key_BN1X >= first_BNC1) & (key_BN1X <= query_BNC1)], dim=-1)
