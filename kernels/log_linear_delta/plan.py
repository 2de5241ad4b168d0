"""Log-linear Gated DeltaNet, launch after launch: forward, and backward from the inputs alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.kernels.gated_delta import wy
from surgery.kernels.gated_delta.layout import DeltaSizes
from surgery.kernels.log_linear_delta import chunk as chunks
from surgery.kernels.log_linear_delta import levels
from surgery.kernels.log_linear_delta import levels as gather
from surgery.kernels.log_linear_delta import levels as lowest

# Of the memory that is left, for the states S that chunks read, kept at once (levels are taken in groups): forward all
# of it, backward a third of it S, the rest dS', x and dx.
FORWARD_MEMORY_SHARE, BACKWARD_MEMORY_SHARE = 1 / 6, 1 / 24


@dataclass
class WYTerms:
    """c, Y, w, u^T of every chunk (kernels/gated_delta/wy.py)."""

    c: Tensor
    y: Tensor
    w: Tensor
    u: Tensor


@dataclass
class DeltaCall:
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
    s: DeltaSizes
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

    @property
    def fused(self) -> bool:
        """Whether the two lowest levels are one launch: where rows bring nothing along."""
        return self.bucket_lRGKV is None and self.levels >= 2

    def groups(self, share: float) -> list[tuple[int, int]]:
        """(low, high) of the levels whose states are kept at once, in that share of the memory that is left."""
        s, memory = self.s, 2**34
        if self.k.is_cuda:
            memory = torch.cuda.get_device_properties(self.k.device).total_memory
            memory -= torch.cuda.memory_allocated(self.k.device)
        size = max(2, int(memory * share) // (s.most[0] * s.G * s.K * s.V * self.v.element_size()))
        return [(low, min(low + size, self.levels)) for low in range(0, max(self.levels, 1), size)]

    def allocate_kept(self, groups: list[tuple[int, int]], size: int) -> Tensor:
        s = self.s
        most = max(high - low for low, high in groups)
        return torch.empty(most, s.most[0], s.G, s.V, size, dtype=s.dtype, device=self.k.device)

    def prepare(self) -> tuple[WYTerms, Tensor | None]:
        """What there is of each chunk by itself, and the chunks' own states where `climb` takes them."""
        own = None if self.fused else self.state(0)
        terms = WYTerms(*wy.forward(self.k, self.v, self.beta, self.gates, self.s, own))
        if self.extra_RGKV is not None and own is not None:
            own[self.s.table[:, 4]] += self.extra_RGKV.mT
        return terms, own

    def climb(
        self, t: WYTerms, low: int, high: int, state: Tensor | None, kept: Tensor, after: Tensor | None = None,
        passed: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Levels low .. high - 1 from the states of level `low`, to those of level `high`."""
        for level in range(low, high):
            if self.fused and level < 2:
                state = self.lowest(t, kept, passed) if level == 0 else state
                continue
            parent = self.state(level + 1) if level + 1 < self.levels else None
            assert state is not None
            x, ending = (None if y is None else y[i] for y, i in ((passed, level - low), (after, level)))
            self.up(level, t, state, kept[level - low], x, parent, ending)
            state = parent
        return state

    def up(
        self, level: int, t: WYTerms, state: Tensor, kept: Tensor | None, passed: Tensor | None, parent: Tensor | None,
        after: Tensor | None,
    ) -> None:  # fmt: skip
        s, (grid, pairs) = self.s, self.grid(level)
        bucket = None if self.bucket_lRGKV is None else self.bucket_lRGKV[level]
        other = (parent, bucket, after, self.end_R if after is not None else None, kept, passed)
        flags = {
            "KEEP": kept is not None, "PASSED": passed is not None, "BUCKET": bucket is not None, "AFTER": after is not None,
            "PARENT": parent is not None,
        }  # fmt: skip
        levels._up[grid](
            self.k, t.w, t.c, s.table, state, *(state if x is None else x for x in other), *self.k.stride()[:3],
            level, self.top, pairs, **s.kernel, **flags, num_warps=s.warps(8192), num_stages=s.stages(3),
        )  # fmt: skip

    def lowest(self, t: WYTerms, kept: Tensor, passed: Tensor | None) -> Tensor:
        """Levels 0 and 1 at once."""
        s, groups, state = self.s, ((self.s.N - 1) >> 2) + 2, self.state(2)
        lowest._lowest_levels[(s.R * groups, s.G, s.blocks)](
            self.k, t.w, t.u, t.c, s.table, state, kept[0], kept[1], *(kept if passed is None else passed)[:2],
            *self.k.stride()[:3], self.top, groups, **s.kernel, PASSED=passed is not None, num_warps=4, num_stages=1,
        )  # fmt: skip
        return state

    def down(
        self, level: int, t: WYTerms, read: Tensor, do: Tensor, dparent: Tensor | None, dstate: Tensor,
        dbucket: Tensor | None, dafter: Tensor | None, dkept: Tensor, dpassed: Tensor,
    ) -> None:  # fmt: skip
        s, (grid, pairs) = self.s, self.grid(level)
        other = (self.end_R if dafter is not None else None, dkept, dpassed)
        grads = tuple(dstate if x is None else x for x in (dparent, dstate, dbucket, dafter, *other))
        flags = {"BUCKET": dbucket is not None, "AFTER": dafter is not None, "PARENT": dparent is not None}
        levels._down[grid](
            self.k, t.w, read, do, t.c, self.level, s.table, *grads, *self.k.stride()[:3], *do.stride()[:4],
            *self.l_strides, level, self.top, self.q.shape[3], pairs, s.J, **self.options, **flags,
            num_warps=s.warps(8192), num_stages=2,
        )  # fmt: skip

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """(out_BGJTV, the buckets behind the tokens)."""
        t, state = self.prepare()
        after = None if self.bucket_lRGKV is None else torch.zeros_like(self.bucket_lRGKV)
        groups = self.groups(FORWARD_MEMORY_SHARE)
        kept, wide = self.allocate_kept(groups, self.s.K), self.v.dtype if len(groups) == 1 else torch.float32
        out = torch.empty(*self.q.shape[:4], self.s.V, dtype=wide, device=self.k.device)
        for low, high in groups:
            state = self.climb(t, low, high, state, kept, after)
            self.read(t, low, high, kept, out)
        return out.to(self.v.dtype), after

    def reads(self, t: WYTerms) -> Tensor:
        """R of every chunk and query head."""
        s, read = self.s, self.s.buffer(self.s.J, self.s.C, self.s.K)
        chunks._reads[(s.R * s.N, s.G * s.J)](
            self.q, self.k, s.table, t.c, t.w, read, *self.strides[:7], s.N, s.J, **s.kernel, num_warps=4
        )
        return read

    def read(self, t: WYTerms, low: int, high: int, kept: Tensor, out: Tensor) -> None:
        """Adds what chunks read of these levels; with the lowest ones, sets it to that and their own."""
        s = self.s
        chunks._forward[(s.R * s.N, s.G * s.J, s.blocks)](
            self.q, self.k, self.v, self.beta, self.level, s.table, t.c, t.y, t.w, kept, out, *self.strides,
            *self.l_strides, low, high, self.top, self.q.shape[3], s.N, s.J, s.most[0], **self.options,
            BUCKET=self.bucket_lRGKV is not None, INNER=low == 0, num_warps=4,
            maxnreg=168 if s.stages(3) == 3 else None,
        )  # fmt: skip

    @property
    def strides(self) -> tuple[int, ...]:
        return (*self.q.stride()[:4], *self.k.stride()[:3], *self.v.stride()[:3], *self.beta.stride())

    def backward(self, do: Tensor, dafter: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, beta, gates, level, bucket, extra."""
        s = self.s
        t, state = self.prepare()
        read = self.reads(t)
        groups, starts = self.groups(BACKWARD_MEMORY_SHARE), []
        kept, passed = self.allocate_kept(groups, s.K), self.allocate_kept(groups, s.C)
        for low, high in groups:
            starts.append(state)
            state = self.climb(t, low, high, state, kept, None, passed)
        dbucket = None if self.bucket_lRGKV is None else torch.zeros_like(self.bucket_lRGKV)
        sums, dkept, dpassed = self._sums(), torch.empty_like(kept), torch.empty_like(passed)
        down = None if self.levels else torch.zeros_like(self.state(0))
        for (low, high), start in zip(reversed(groups), reversed(starts)):
            if high < self.levels:
                self.climb(t, low, high, start, kept, None, passed)
            for level in range(high - 1, low - 1, -1):
                above, down = down, self.state(level)
                into, out = (None if x is None else x[level] for x in (dbucket, dafter))
                self.down(level, t, read, do, above, down, into, out, dkept[level - low], dpassed[level - low])
            self._gather(low, high, t, read, (kept, passed, dkept, dpassed, down), do, sums)
        dk, dw, du, dread, dlevel, dc = sums
        dv, dt = (
            torch.empty(self.v.shape, dtype=self.v.dtype, device=do.device),
            s.buffer(s.C, s.C, dtype=torch.float32),
        )
        dq = self._chunks(do, t, dread, dk, dv, dw, dt, dlevel, dc)
        dk, dv, dbeta, dgates = wy.backward(self.k, self.v, self.beta, t.c, t.y, dw, du, dt, dk, dc, dv, s)
        dextra = None if self.extra_RGKV is None or down is None else down[s.table[:, 4]].mT
        return dq, dk, dv, dbeta, dgates, dlevel, dbucket, dextra

    def _sums(self) -> tuple[Tensor, ...]:
        """Of all levels: dk, dw, du, dread, dlevel, dc in parts."""
        s, wide = self.s, torch.float32
        dlevel = torch.zeros(self.level.shape, dtype=wide, device=self.k.device)
        matrices = s.buffer(s.C, s.K, dtype=wide), s.buffer(s.C, s.K), s.buffer(s.V, s.C)
        return *matrices, s.buffer(s.J, s.C, s.K), dlevel, s.buffer(self.parts, s.C, dtype=wide)

    @property
    def parts(self) -> int:
        """Blocks of features, and one."""
        return -(-self.s.K // self.s.features) + 1

    def _gather(self, low, high, t, read, kept, do, sums):  # type: ignore[no-untyped-def]
        s = self.s
        flags = {"BUCKET": self.bucket_lRGKV is not None, "ADD": high < self.levels, "OWN": low == 0}
        gather._gather_gradients[(s.R * s.N, s.G, self.parts - 1)](
            self.k, do, self.level, s.table, t.c, t.u, read, *kept, *sums, *self.k.stride()[:3], *do.stride()[:4],
            *self.l_strides, low, high, self.top, self.q.shape[3], s.N, s.J, s.most[0], **self.options,
            BX=s.features, PARTS=self.parts, **flags, num_warps=4, num_stages=1,
        )  # fmt: skip

    def _chunks(self, do, t, dread, dk, dv, dw, dt, dlevel, dc):  # type: ignore[no-untyped-def]
        """dq; and its part of the others."""
        s, grid, parts = self.s, (self.s.R * self.s.N, self.s.G), {"BX": self.s.features, "PARTS": self.parts}
        dq = torch.empty(self.q.shape, dtype=self.q.dtype, device=do.device)
        ps, dps = s.buffer(s.J, s.C, s.C), s.buffer(s.J, s.C, s.C)
        chunks._backward[grid](
            self.q, self.k, self.v, self.beta, self.level, do, s.table, t.c, t.y, t.w, dread, ps, dps, dv, dt, dlevel,
            dc, *self.strides, *self.l_strides, *do.stride()[:4], self.q.shape[3], s.N, s.J, **self.options, **parts,
            num_warps=4, num_stages=1,
        )  # fmt: skip
        chunks._backward_features[(*grid, self.parts - 1)](
            self.q, self.k, s.table, t.c, ps, dps, dread, dq, dk, dw, dc, *self.strides[:7], self.q.shape[3], s.N, s.J,
            **s.kernel, **parts, num_warps=4, num_stages=1,
        )  # fmt: skip
        return dq
