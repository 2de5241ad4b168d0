"""Log-linear attention of sequences packed into one row. Mixers have no such call; its kernel does."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.log_linear import run_log_linear_op
from surgery.kernels.ssd.layout import limit_chunk


def log_linear_chunks(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    gates_BGT: Tensor,
    level_BTGJL: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    chunk: int = 64,
) -> Tensor:
    """Return out_BGJTV in v's dtype, for rows from position 0 on, without a past.

    q and k may have 1 in place of G: shared by all groups. cu_seqlens: borders (S + 1,) of S sequences packed into one
    row (B = 1), each from position 0 on.
    """
    start = torch.zeros(len(v_BGTV), dtype=torch.int32, device=v_BGTV.device)
    closing, start = (start, start) if cu_seqlens is None else (cu_seqlens[:-1], cu_seqlens)
    geometry = closing, 0, start, cu_seqlens, limit_chunk(chunk), True
    return run_log_linear_op((q_BGJTF, k_BGTF, v_BGTV), gates_BGT, level_BTGJL, geometry)[0]
