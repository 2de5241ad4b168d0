"""Tensors of one call of a gated mask, laid out as other packages take them: tokens before heads.

The ops hold q (B, G, J, T, K), k (B, G, T, K), v (B, G, T, V), beta and log-gates (B, G, T) and states (R, G, K, V): B
rows of the batch, G groups of J query heads, T tokens, R sequences with a state of their own. Packages take q and k (B,
T, N, K), v (B, T, H, V), beta and log-gates (B, T, H) and states (R, H, K, V) with H = G J heads. With J > 1 every
query head gets a copy of its group's keys, values and state.

N = H, or 1 where all groups share q and k (both are expanded along G, with stride 0, or have one group).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from surgery.kernels.kernel_tensors import reduce_shared


class RowTensors(NamedTuple):
    """Inputs of a gated mask: beta is None for SSD, first for states of zeros."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    gates: Tensor
    first: Tensor | None

    @property
    def groups(self) -> int:
        """G."""
        return self.v.shape[1]

    @property
    def per_group(self) -> int:
        """J."""
        return self.q.shape[2]

    @property
    def is_shared(self) -> bool:
        """Whether all groups have the same q and k, and each has one query head."""
        return self.per_group == 1 and all(x.shape[1] == 1 or x.stride(1) == 0 for x in (self.q, self.k))


class HeadsLast(NamedTuple):
    """The same tensors for a package; see the module. beta, gates and first are float32."""

    q_BTNK: Tensor
    k_BTNK: Tensor
    v_BTHV: Tensor
    beta_BTH: Tensor | None
    gates_BTH: Tensor
    first_RHKV: Tensor | None


def to_heads_last(rows: RowTensors, shared: bool) -> HeadsLast:
    """Return the tensors of a call, contiguous. shared: whether q and k keep one head for all groups (`is_shared`)."""
    groups, per_group = rows.groups, rows.per_group
    N = 1 if shared else groups
    q, k = (x[:, :1] if shared else x.expand(-1, groups, *x.shape[2:]) for x in (rows.q, rows.k))
    heads = lambda x: _join_heads(x.unsqueeze(2).expand(-1, -1, per_group, *x.shape[2:]))  # noqa: E731
    first = rows.first
    if first is not None:
        first = first.float().unsqueeze(2).expand(-1, -1, per_group, -1, -1).flatten(1, 2).contiguous()
    return HeadsLast(
        _join_heads(q.expand(-1, N, -1, -1, -1)),
        heads(k),
        heads(rows.v),
        None if rows.beta is None else heads(rows.beta.float()),
        heads(rows.gates.float()),
        first,
    )


def outputs_by_group(rows: RowTensors, out_BTHV: Tensor, last_RHKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return a package's outputs as (out_BGJTV in v's dtype, laid out as `empty_out`; last_RGKV in float32)."""
    split = rows.groups, rows.per_group
    out = out_BTHV.to(rows.v.dtype).contiguous().unflatten(2, split).permute(0, 2, 3, 1, 4)
    return out, last_RHKV.float().unflatten(1, split)[:, :, 0].contiguous()


def output_gradients(rows: RowTensors, d_out_BGJTV: Tensor, d_last_RGKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return (d_out_BTHV, d_last_RHKV): of the copies of a group's state, the first one was returned."""
    d_last = torch.zeros_like(d_last_RGKV).unsqueeze(2).repeat(1, 1, rows.per_group, 1, 1)
    d_last[:, :, 0] = d_last_RGKV
    return _join_heads(d_out_BGJTV), d_last.flatten(1, 2)


def input_gradients(rows: RowTensors, grads: HeadsLast) -> tuple[Tensor | None, ...]:
    """Return the gradients of `rows`, from those of its tensors with heads last."""
    J = rows.per_group
    d_q = reduce_shared(grads.q_BTNK.unflatten(2, (-1, J)).permute(0, 2, 3, 1, 4), rows.q)
    d_k = reduce_shared(_sum_heads(grads.k_BTNK, J), rows.k)
    d_beta = None if grads.beta_BTH is None else _sum_heads(grads.beta_BTH, J)
    d_first = None if grads.first_RHKV is None else grads.first_RHKV.unflatten(1, (-1, J)).sum(2)
    return d_q, d_k, _sum_heads(grads.v_BTHV, J), d_beta, _sum_heads(grads.gates_BTH, J), d_first


def _join_heads(x_BGJT: Tensor) -> Tensor:
    """Return (B, T, G J, ..), contiguous, of (B, G, J, T, ..)."""
    return x_BGJT.movedim(3, 1).flatten(2, 3).contiguous()


def _sum_heads(d_BTH: Tensor, per_group: int) -> Tensor:
    """Return (B, G, T, ..), the sum over the query heads of each group, of (B, T, G J, ..)."""
    split = d_BTH.unflatten(2, (-1, per_group))
    return (split.squeeze(3) if per_group == 1 else split.sum(3)).movedim(2, 1)
