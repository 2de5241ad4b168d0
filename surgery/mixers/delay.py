"""The linear part of a hybrid runs behind: at token t it reads the state after token t - window, and the first
`sinks` tokens never enter it. What was not written yet waits in rings, part of the state:

    ring.*    the last `window` tokens' keys, values and written signals, the last slot the latest token
    sink.*    keys and values of the first tokens, zeros until they come

All (B, T, ..), T the axis of the window, the sinks or the call's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surgery.mixers.masks.base import Rows
from surgery.mixers.packing import Packing, shifted, take, zeroed

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Delay:
    window: int
    sinks: int

    def queue(self, new: Tensors, past: Tensors) -> Tensors:
        """The ring, then the call's tokens."""
        return {name: torch.cat([past[f"ring.{name}"].to(t.dtype), t], dim=1) for name, t in new.items()}

    def due(self, queue: Tensors) -> Tensors:
        """What the call's queries find written last: entry i for query i."""
        return {name: t[:, : t.shape[1] - self.window] for name, t in queue.items()}

    def rings(self, queue: Tensors, packing: Packing) -> Tensors:
        return {f"ring.{name}": packing.latest(t, self.window, dim=1) for name, t in queue.items()}

    def filled(self, name: str, new_BTGK: Tensor, past: Tensors, seen_B: Tensor, packing: Packing) -> Tensor:
        """The sinks with the call's tokens taken in: slot j is the token at position j."""
        position_S = torch.arange(self.sinks, device=seen_B.device)
        all_BXGK = torch.cat([past[f"sink.{name}"].to(new_BTGK.dtype), new_BTGK], dim=1)
        late_BS = (self.sinks + position_S - seen_B.unsqueeze(1)).clamp_max(all_BXGK.shape[1] - 1)
        index_BS = torch.where(position_S < seen_B.unsqueeze(1), position_S, late_BS)
        there_BS = position_S < (seen_B + packing.count_B).unsqueeze(1)
        return zeroed(take(all_BXGK, index_BS, dim=1), there_BS, dim=1)

    def aligned(self, rows: Rows) -> tuple[Rows, Tensor]:
        """Rows whose entry i pairs query i with what is due then, as the mask wants them: from the first token written
        on, at its position behind the sinks. And how many queries of each row came before it."""
        offset_B = (self.window + self.sinks - rows.start_B).clamp_min(0)
        beta_BGT = rows.beta_BGT
        moved = replace(
            rows,
            q_BGJTF=shifted(rows.q_BGJTF, offset_B, dim=3),
            k_BGTF=shifted(rows.k_BGTF, offset_B, dim=2),
            v_BGTV=shifted(rows.v_BGTV, offset_B, dim=2),
            beta_BGT=None if beta_BGT is None else shifted(beta_BGT, offset_B, dim=2),
            start_B=(rows.start_B - self.window - self.sinks).clamp_min(0),
            count_B=(rows.count_B - offset_B).clamp_min(0),
            signals={name: shifted(t, offset_B, dim=1) for name, t in rows.signals.items()},
            most=None if rows.most is None else max(0, rows.most - self.window - self.sinks),
        )
        return moved, offset_B
