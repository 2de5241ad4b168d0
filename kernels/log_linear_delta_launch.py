"""Log-linear Gated DeltaNet, launch after launch: forward, and backward from the inputs alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.kernels import gated_delta_wy as wy
from surgery.kernels import log_linear_delta_chunks as chunks
from surgery.kernels import log_linear_delta_gather as gather
from surgery.kernels import log_linear_delta_levels as levels
from surgery.kernels import log_linear_delta_low as low
from surgery.kernels.gated_delta_rows import Sizes

KEPT = 2**31  # bytes of the states that chunks read, kept at once for the backward; levels are taken in groups

FUSED = True


@dataclass
class Call:
    """One call's inputs and sizes. levels: above chunks; top: see `first_chunk`; bucket_lRGKV: what rows bring along,
    end_R: the position behind their tokens, where the buckets there are wanted; extra_RGKV: what the first chunks have
    besides their tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    gates: Tensor
    level: Tensor
    bucket_lRGKV: Tensor | None
    extra_RGKV: Tensor | None
    end_R: Tensor | None
    s: Sizes
    levels: int
    top: int

    @property
    def options(self) -> dict[str, Any]:
        return {**self.s.kernel, "LOG_C": self.s.C.bit_length() - 1, "LAMBDAS": self.level.shape[-1]}

    @property
    def l_strides(self) -> tuple[int, ...]:
        return self.level.stride()

    def state(self, level: int) -> Tensor:
        s = self.s
        return torch.empty(s.most[level], s.G, s.V, s.K, dtype=torch.float32, device=self.k.device)

    def grid(self, level: int) -> tuple[tuple[int, int, int], int]:
        """(the grid of a level, its pairs in a row at most)."""
        pairs = ((self.s.N - 1) >> (level + 1)) + 2
        return (self.s.R * pairs, self.s.G, self.s.blocks), pairs

    def prepared(self, out: bool, alone: bool = True) -> tuple[Tensor, ...]:
        """(c, Y, w, u, read, the chunks' own states if `alone`, what chunks read of themselves if `out`)."""
        s, options = self.s, self.options
        own = self.state(0) if alone else None
        c, y, w, u = wy.forward(self.k, self.v, self.beta, self.gates, s, own)
        if self.extra_RGKV is not None and own is not None:
            own[s.table[:, 4]] += self.extra_RGKV.mT
        read = s.buffer(s.J, s.C, s.K)
        acc = torch.empty(*self.q.shape[:4], s.V, dtype=torch.float32, device=self.k.device) if out else read
        strides = (*self.q.stride()[:4], *self.k.stride()[:3], *self.v.stride()[:3], *self.beta.stride())
        chunks._forward[(s.R * s.N, s.G * s.J)](
            self.q, self.k, self.v, self.beta, self.level, s.table, c, y, w, read, acc, *strides, *self.l_strides,
            self.q.shape[3], s.N, s.J, **options, READ=True, OUT=out, num_warps=s.warps(16384),
        )  # fmt: skip
        return c, y, w, u, read, w if own is None else own, acc

    def up(
        self, level: int, c: Tensor, w: Tensor, state: Tensor, read: Tensor | None = None, acc: Tensor | None = None,
        after: Tensor | None = None, kept: Tensor | None = None, parent: Tensor | None = None,
    ) -> None:  # fmt: skip
        s, (grid, pairs) = self.s, self.grid(level)
        bucket = None if self.bucket_lRGKV is None else self.bucket_lRGKV[level]
        other = (parent, bucket, after, self.end_R, kept)
        flags = {
            "READ": acc is not None, "KEEP": kept is not None, "BUCKET": bucket is not None,
            "AFTER": after is not None, "PARENT": parent is not None,
        }  # fmt: skip
        levels._up[grid](
            self.k, w, w if read is None else read, c, self.level, c if acc is None else acc, s.table, state,
            *(state if t is None else t for t in other), *self.k.stride()[:3], *self.l_strides, level, self.top,
            self.q.shape[3], pairs, s.J, **self.options, **flags, num_warps=s.warps(8192), num_stages=2,
        )  # fmt: skip

    def down(
        self, level: int, c: Tensor, w: Tensor, read: Tensor, do: Tensor, dparent: Tensor | None, dstate: Tensor,
        dbucket: Tensor | None, dafter: Tensor | None, dkept: Tensor,
    ) -> None:  # fmt: skip
        s, (grid, pairs) = self.s, self.grid(level)
        other = (self.end_R if dafter is not None else None, dkept)
        grads = tuple(dstate if t is None else t for t in (dparent, dstate, dbucket, dafter, *other))
        flags = {"BUCKET": dbucket is not None, "AFTER": dafter is not None, "PARENT": dparent is not None}
        levels._down[grid](
            self.k, w, read, do, c, self.level, s.table, *grads, *self.k.stride()[:3], *do.stride()[:4],
            *self.l_strides, level, self.top, self.q.shape[3], pairs, s.J, **self.options, **flags,
            num_warps=s.warps(8192), num_stages=2,
        )  # fmt: skip

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """(out_BGJTV, the buckets behind the tokens)."""
        fused = 2 if FUSED and self.bucket_lRGKV is None and self.levels > 2 else 0
        c, _, w, u, read, state, acc = self.prepared(out=True, alone=not fused)
        if fused:
            state = self.low(c, w, u, read, acc)
        after = None if self.bucket_lRGKV is None else torch.zeros_like(self.bucket_lRGKV)
        for level in range(fused, self.levels):
            parent = self.state(level + 1) if level + 1 < self.levels else None
            self.up(level, c, w, state, read, acc, None if after is None else after[level], None, parent)
            state = parent
        return acc.to(self.v.dtype), after

    def low(self, c: Tensor, w: Tensor, u: Tensor, read: Tensor, acc: Tensor) -> Tensor:
        """Levels 0 and 1 where rows bring nothing along: the states of level 2."""
        s, groups, state = self.s, ((self.s.N - 1) >> 2) + 2, self.state(2)
        low._low[(s.R * groups, s.G, s.blocks)](
            self.k, w, u, read, c, self.level, acc, s.table, state, *self.k.stride()[:3], *self.l_strides, self.top,
            self.q.shape[3], groups, s.J, **self.options, READ=True, num_warps=s.warps(4096), num_stages=1,
        )  # fmt: skip
        return state

    def backward(self, do: Tensor, dafter: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, beta, gates, level, bucket, extra."""
        s = self.s
        c, y, w, u, read, own, _ = self.prepared(out=False)
        states = [own]
        for level in range(self.levels - 1):
            states.append(self.state(level + 1))
            self.up(level, c, w, states[level], parent=states[level + 1])
        dbucket = None if self.bucket_lRGKV is None else torch.zeros_like(self.bucket_lRGKV)
        terms, sums, group = (c, w, u, read), self._sums(), self._group(own)
        down = torch.zeros_like(own) if self.levels == 0 else None
        for high in range(self.levels, 0, -group) or [0]:
            low = max(0, high - group)
            down = self._group_down(low, high, terms, states, down, do, dbucket, dafter, sums)
        dk, dw, du, dread, dlevel, dc = sums
        dq, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (self.q, self.v))
        dt = s.buffer(s.C, s.C, dtype=torch.float32)
        self._chunks(do, c, y, w, dread, dq, dk, dv, dw, dt, dlevel, dc)
        dk, dv, dbeta, dgates = wy.backward(self.k, self.v, self.beta, c, y, dw, du, dt, dk, dc, dv, s)
        dextra = None if self.extra_RGKV is None or down is None else down[s.table[:, 4]].mT
        return dq, dk, dv, dbeta, dgates, dlevel, dbucket, dextra

    def _group(self, own: Tensor) -> int:
        """Levels whose states are kept at once."""
        return max(1, KEPT // (own.numel() * self.v.element_size()))

    def _sums(self) -> tuple[Tensor, ...]:
        """Of all levels: dk, dw, du, dread, dlevel, dc."""
        s, wide = self.s, torch.float32
        batch, length, G, J, lambdas = self.level.shape
        dlevel = torch.zeros(batch, length, G, J, lambdas, dtype=wide, device=self.k.device)
        matrices = s.buffer(s.C, s.K, dtype=wide), s.buffer(s.C, s.K), s.buffer(s.V, s.C)
        return *matrices, s.buffer(s.J, s.C, s.K), dlevel, s.buffer(s.C, dtype=wide)

    def _group_down(self, low, high, terms, states, down, do, dbucket, dafter, sums):  # type: ignore[no-untyped-def]
        """Levels high - 1 .. low: what comes down to level `low`."""
        c, w, _, read = terms
        kept, dkept = (
            self.s.buffer(high - low, self.s.V, self.s.K).view(high - low, *states[0].shape) for _ in range(2)
        )
        for level in range(high - 1, low - 1, -1):
            self.up(level, c, w, states[level], kept=kept[level - low])
            above, down = down, torch.empty_like(states[level])
            into, out = (None if t is None else t[level] for t in (dbucket, dafter))
            self.down(level, c, w, read, do, above, down, into, out, dkept[level - low])
        self._gather(low, high, terms, kept, dkept, down, do, sums)
        return down

    def _gather(self, low, high, terms, kept, dkept, down, do, sums):  # type: ignore[no-untyped-def]
        s, (c, w, u, read), options = self.s, terms, self.options
        options["BX"] = min(options["BK"], 16384 // options["BK"])
        flags = {"BUCKET": self.bucket_lRGKV is not None, "ADD": high < self.levels, "OWN": low == 0}
        gather._gather[(s.R * s.N, s.G)](
            self.k, do, self.level, s.table, c, w, u, read, kept, dkept, down, *sums, *self.k.stride()[:3],
            *do.stride()[:4], *self.l_strides, low, high, self.top, self.q.shape[3], s.N, s.J, s.most[0], **options,
            **flags, num_warps=8, num_stages=1,
        )  # fmt: skip

    def _chunks(self, do, c, y, w, dread, dq, dk, dv, dw, dt, dlevel, dc):  # type: ignore[no-untyped-def]
        s = self.s
        strides = (*self.q.stride()[:4], *self.k.stride()[:3], *self.v.stride()[:3], *self.beta.stride())
        chunks._backward[(s.R * s.N, s.G)](
            self.q, self.k, self.v, self.beta, self.level, do, s.table, c, y, w, dread, dq, dk, dv, dw, dt, dlevel, dc,
            *strides, *self.l_strides, *do.stride()[:4], self.q.shape[3], s.N, s.J, **self.options,
            BX=s.features, num_warps=8,
            num_stages=1,
        )  # fmt: skip
