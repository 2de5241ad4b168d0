"""Launch plan of log-linear Gated DeltaNet: forward, and backward from the inputs alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from surgery.kernels.gated_delta.layout import SMALL_FEATURES, DeltaPlan
from surgery.kernels.gated_delta.wy import WYOutputGradients, WYTerms, launch_wy_backward, launch_wy_forward
from surgery.kernels.kernel_tensors import GroupTensor, HeadTensor, LevelTensor
from surgery.kernels.log_linear_delta.chunk import (
    chunk_backward,
    chunk_backward_features,
    chunk_forward,
    query_reads,
)
from surgery.kernels.log_linear_delta.levels import (
    GatheredGradients,
    LevelStates,
    PairEnds,
    gather_gradients,
    level_down,
    level_up,
    lowest_levels,
)
from surgery.kernels.log_linear_delta.slot_gradients import (
    SegmentGradients,
    chunk_gradients,
    read_backward,
    slot_gradients,
    split_gradients,
)
from surgery.kernels.log_linear_delta.slots import LOG_GROUP, Segments, group_slots, join_slots, read_slots

# Shares of the free memory for the states S that chunks read at one level. Levels whose states do not fit together are
# taken in groups. The backward keeps S, dS', x and dx, so its share of S is smaller.
FORWARD_MEMORY_SHARE, BACKWARD_MEMORY_SHARE = 1 / 6, 1 / 24


# Bytes of a transition (K, K) up to which `read_slots` holds it in shared memory beside its other tiles, on any GPU.
MOST_TRANSITION_BYTES = 32 * 1024
# The most query heads of a group in the backward through slots. With them the products of a read grow from 5 to 5 J, where
# those of a level grow from 8 to 6 + 2 J.
MOST_SLOT_HEADS = 2
# Share of the free memory that the reads of slots may take. They grow with n log2(n) for n chunks, and no part of them is
# done without the others: where they take more, the backward goes level by level, in groups that fit.
SLOTS_MEMORY_SHARE = 1 / 4


@dataclass(frozen=True)
class PairBuffers:
    """Buffers of `PairEnds`, or their gradients, None if absent."""

    state: Tensor
    parent: Tensor | None = None
    bucket: Tensor | None = None
    after: Tensor | None = None

    def arguments(self, end_R: Tensor | None) -> PairEnds:
        """Return the kernel argument, with `state` in place of absent buffers, which are not read."""
        end = None if self.after is None else end_R
        parent, bucket, after, end = (
            self.state if x is None else x for x in (self.parent, self.bucket, self.after, end)
        )
        return PairEnds(self.state, parent, bucket, after, end)

    @property
    def flags(self) -> dict[str, bool]:
        """Constants that say which buffers there are."""
        return {
            "BUCKET": self.bucket is not None, "AFTER": self.after is not None, "PARENT": self.parent is not None
        }  # fmt: skip


@dataclass(frozen=True)
class LogLinearDeltaPlan(DeltaPlan):
    """Inputs of one call and their sizes.

    Attributes:
        level: lambdas (B, T, G, J, L).
        bucket_lRGKV: states of the levels above chunks that rows resume from, None for rows without a past.
        extra_RGKV: added to the state of each row's first chunk, None for nothing.
        end_R: position behind each row's tokens, if the buckets there are wanted.
        levels: levels above chunks.
        top: first bit of a chunk's number that is dropped (`first_chunk`).
    """

    level: Tensor
    bucket_lRGKV: Tensor | None
    extra_RGKV: Tensor | None
    end_R: Tensor | None
    levels: int
    top: int

    def state(self, level: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialized buffer (entries, G, V, K) for the states of a level's segments."""
        s = self.sizes
        return torch.empty(s.most[level], s.G, s.V, s.K, dtype=dtype, device=self.k.device)

    def grid(self, level: int, blocks: int) -> tuple[tuple[int, int], int]:
        """Return (the grid of a level with `blocks` programs for each pair, its pairs in a row at most)."""
        s = self.sizes
        pairs = ((s.N - 1) >> (level + 1)) + 2
        return (s.R * pairs * blocks, s.G), pairs

    @property
    def fused(self) -> bool:
        """Whether levels 0 and 1 are one launch (`lowest_levels`): for rows without a past, if two states fit into
        registers.
        """
        return self.bucket_lRGKV is None and self.levels >= 2 and not self.sizes.is_large

    @property
    def parts(self) -> int:
        """Parts in which dc is stored: one for each block of features, and one."""
        return -(-self.sizes.K // self.sizes.features) + 1

    @property
    def level_options(self) -> dict[str, Any]:
        """Constants of kernels that read lambdas."""
        return {**self.sizes.kernel, "LOG_C": self.sizes.C.bit_length() - 1, "LAMBDAS": self.level.shape[-1]}

    @property
    def is_wide(self) -> bool:
        """Whether keys have 129 to 256 features of 16 bits, as heads of 64 with both forms of RoPE and Hedgehog have: sizes
        with tiles of their own, measured on an H200 for 8 groups of 4 heads, 64 values and 8,192 tokens."""
        return 128 < self.sizes.block_k <= SMALL_FEATURES and self.sizes.dtype != torch.float32

    @property
    def read_options(self) -> dict[str, Any]:
        """Constants and options of `chunk_forward`.

        Wide keys: 275 us with two heads of a group in a program, 301 with one and all features at once, 421 with 32 values
        and all features.
        """
        s = self.sizes
        options = {**self.level_options, **s.wide_kernel, "BX": s.tile_features, "HEADS": 1, "maxnreg": s.max_registers}
        options |= s.tile_options(4)
        if not self.is_wide:
            return options
        values, heads = min(64, max(16, triton.next_power_of_2(s.V))), 2 if s.J % 2 == 0 else 1
        return options | {"HEADS": heads, "BV": values, "BX": 64 if heads == 2 else s.block_k, "num_stages": 2}

    @property
    def up_options(self) -> dict[str, Any]:
        """Constants and options of `level_up`. Wide keys: all levels take 397 us with 16 values in a program, 452 with 32."""
        s = self.sizes
        options = {**s.state_kernel, "num_warps": s.warps(8192), "num_stages": s.stages(3)}
        return options | {"BV": 16} if self.is_wide else options

    def read_grid(self, options: dict[str, Any]) -> tuple[int, int, int]:
        """Return the grid of `chunk_forward` with these options."""
        s = self.sizes
        return s.R * s.N, s.G * (s.J // options["HEADS"]), -(-s.V // options["BV"])

    @property
    def inputs(self) -> tuple[HeadTensor | GroupTensor | LevelTensor, ...]:
        """q, k, v, beta and level as kernel arguments."""
        return *self.queries_keys, *self.values_beta, LevelTensor.from_tensor(self.level)

    @property
    def free_memory(self) -> int:
        """Bytes of the device that no tensor takes."""
        if not self.k.is_cuda:
            return 2**34
        total: int = torch.cuda.get_device_properties(self.k.device).total_memory
        return total - torch.cuda.memory_allocated(self.k.device)

    def groups(self, share: float) -> list[tuple[int, int]]:
        """Return (low, high) of the groups of levels whose states fit together into this share of the free memory."""
        s = self.sizes
        size = max(2, int(self.free_memory * share) // (s.most[0] * s.G * s.K * s.V * self.v.element_size()))
        return [(low, min(low + size, self.levels)) for low in range(0, max(self.levels, 1), size)]

    def allocate_kept(self, groups: list[tuple[int, int]], size: int) -> Tensor:
        """Return an uninitialized buffer (levels, chunks, G, V, size), large enough for each group of levels."""
        s = self.sizes
        most = max(high - low for low, high in groups)
        return torch.empty(most, s.most[0], s.G, s.V, size, dtype=s.dtype, device=self.k.device)

    # -- forward -------------------------------------------------------------------------------------------
    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Return (out_BGJTV, the buckets behind the tokens, None without buckets)."""
        if self.has_slots:
            t = launch_wy_forward(self)
            return self.read_slots(t, self.build_slots(t)[0]), None
        t, state = self.prepare()
        after = None if self.bucket_lRGKV is None else torch.zeros_like(self.bucket_lRGKV)
        groups = self.groups(FORWARD_MEMORY_SHARE)
        states = self.allocate_kept(groups, self.sizes.K)
        wide = self.v.dtype if len(groups) == 1 else torch.float32  # several groups add to the output
        out = torch.empty(*self.q.shape[:4], self.sizes.V, dtype=wide, device=self.k.device)
        for group in groups:
            state = self.climb(t, group, state, states, after=after)
            self.read(t, group, states, out)
        return out.to(self.v.dtype), after

    @property
    def has_slots(self) -> bool:
        """Whether the forward reads slots (kernels/log_linear_delta/slots.py) instead of passing states through every
        level: for rows without a past, where a transition (K, K) fits into a program and is at most twice a state.

        Beyond twice a state, the products with transitions outweigh the passes through chunks that they save.
        """
        s = self.sizes
        size = s.block_k**2 * self.v.element_size()
        return self.bucket_lRGKV is None and size <= MOST_TRANSITION_BYTES and s.K <= 2 * s.V

    def segments(self, entries: int, dtype: torch.dtype, rows: int) -> Segments:
        """Return uninitialized `Segments` with so many rows of X^T."""
        s, device = self.sizes, self.k.device
        x = torch.empty(entries, s.G, rows, s.K, dtype=dtype, device=device)
        return Segments(x, torch.empty(entries, s.G, dtype=torch.float32, device=device))

    def build_slots(self, t: WYTerms, with_rights: bool = False) -> tuple[Segments, Segments]:
        """Return (the slots of all chunks, F^T of the right segments of level 1 and more by borders): those of groups of
        chunks in one launch, then one launch for each level. with_rights False: the slots again in place of these.
        """
        s = self.sizes
        every = s.V + s.K
        slots = self.segments(s.most[0], s.dtype, every)
        rights = self.segments(s.most[0], s.dtype, s.K) if with_rights else slots
        if self.levels == 0:
            return slots, rights
        blocks = s.blocks + -(-s.K // s.block)
        groups, is_whole = ((s.N - 1) >> LOG_GROUP) + 2, self.levels > LOG_GROUP + 1
        whole = self.segments(s.most[LOG_GROUP], torch.float32, every) if is_whole else slots
        group_slots[(s.R * groups * blocks, s.G)](
            GroupTensor.from_tensor(self.k), (t.w, t.u, t.c), s.table, slots, whole, rights, self.top, groups,
            **s.kernel, LOG_GROUP=LOG_GROUP, WHOLE=is_whole, RIGHTS=with_rights, num_warps=4, num_stages=2,
        )  # fmt: skip
        for level in range(LOG_GROUP, self.levels - 1):
            grid, pairs = self.grid(level, blocks)
            parents = self.segments(s.most[level + 1], torch.float32, every)
            join_slots[grid](
                s.table, whole, parents, slots, rights, level, self.top, pairs, **s.kernel, RIGHTS=with_rights,
                num_warps=4, num_stages=1,
            )  # fmt: skip
            whole = parents
        return slots, rights

    def read_slots(self, t: WYTerms, slots: Segments) -> Tensor:
        """Return out_BGJTV."""
        s = self.sizes
        out = torch.empty(*self.q.shape[:4], s.V, dtype=self.v.dtype, device=self.k.device)
        block = min(128, max(16, triton.next_power_of_2(s.V)))  # all values, since each block repeats the queries' way
        read_slots[(s.R * s.N, s.G * s.J, -(-s.V // block))](
            *self.inputs, s.table, (t.c, t.y, t.w), slots, out, self.top, self.q.shape[3], s.N, s.J,
            **self.level_options | {"BV": block}, num_warps=4, num_stages=1,
        )  # fmt: skip
        return out

    def prepare(self) -> tuple[WYTerms, Tensor | None]:
        """Return (the WY form of every chunk, the chunks' own states, None if `lowest_levels` computes them)."""
        chunk_states = None if self.fused else self.state(0)
        terms = launch_wy_forward(self, chunk_states)
        if self.extra_RGKV is not None and chunk_states is not None:
            # A sum, not an assignment by index: a row without chunks has the first chunk of the next row, and adds zeros.
            chunk_states.index_add_(0, self.sizes.table[:, 4], self.extra_RGKV.mT.to(chunk_states.dtype))
        return terms, chunk_states

    def climb(
        self, t: WYTerms, group: tuple[int, int], state: Tensor | None, states: Tensor, *, after: Tensor | None = None,
        passed: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Run levels low .. high - 1 from the states of level `low`; return those of level `high`.

        Fills `states` and `passed` (`LevelStates`) from index 0, and the levels of `after`.
        """
        low, high = group
        for level in range(low, high):
            if self.fused and level < 2:
                state = self.lowest(t, states, passed) if level == 0 else state
                continue
            assert state is not None
            bucket, ending = (None if x is None else x[level] for x in (self.bucket_lRGKV, after))
            parent = self.state(level + 1) if level + 1 < self.levels else None
            buffers = PairBuffers(state, parent, bucket, ending)
            self.up(level, t, buffers, states[level - low], None if passed is None else passed[level - low])
            state = parent
        return state

    def up(self, level: int, t: WYTerms, buffers: PairBuffers, states: Tensor, passed: Tensor | None) -> None:
        """Run `level_up` on all pairs of a level."""
        options = self.up_options
        grid, pairs = self.grid(level, -(-self.sizes.V // options["BV"]))
        level_up[grid](
            GroupTensor.from_tensor(self.k), t.w, t.c, self.sizes.table, buffers.arguments(self.end_R), states,
            buffers.state if passed is None else passed, level, self.top, pairs, **options, **buffers.flags,
            PASSED=passed is not None,
        )  # fmt: skip

    def lowest(self, t: WYTerms, states: Tensor, passed: Tensor | None) -> Tensor:
        """Run levels 0 and 1 in one launch; return the states of level 2."""
        s, groups, state = self.sizes, ((self.sizes.N - 1) >> 2) + 2, self.state(2)
        second = states if passed is None else passed
        lowest_levels[(s.R * groups * s.blocks, s.G)](
            GroupTensor.from_tensor(self.k), (t.w, t.u, t.c), s.table, state, (states[0], states[1]), (second[0], second[1]),
            self.top, groups, **s.kernel, PASSED=passed is not None, num_warps=4, num_stages=1,
        )  # fmt: skip
        return state

    def read(self, t: WYTerms, group: tuple[int, int], states: Tensor, out: Tensor) -> None:
        """Add what chunks read of these levels to `out`; for the lowest group, set `out` to that and what chunks read
        of themselves."""
        s, (low, high) = self.sizes, group
        options = self.read_options
        chunk_forward[self.read_grid(options)](
            *self.inputs, s.table, (t.c, t.y, t.w), states, out, low, high, self.top, self.q.shape[3], s.N, s.J, s.most[0],
            **options, BUCKET=self.bucket_lRGKV is not None, INNER=low == 0,
        )  # fmt: skip

    # -- backward ------------------------------------------------------------------------------------------
    def backward(self, do: Tensor, dafter: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v, beta, gates, level, bucket and extra from those of `forward`."""
        if self.has_slots_backward:
            return *self.slots_backward(do), None, None
        s = self.sizes
        t, state = self.prepare()
        read = self.reads(t)
        groups, starts = self.groups(BACKWARD_MEMORY_SHARE), []
        entry_states, passed = self.allocate_kept(groups, s.K), self.allocate_kept(groups, s.C)
        for group in groups:
            starts.append(state)
            state = self.climb(t, group, state, entry_states, passed=passed)
        dbucket = None if self.bucket_lRGKV is None else torch.zeros_like(self.bucket_lRGKV)
        sums = self._empty_sums()
        states = LevelStates(entry_states, passed, torch.empty_like(entry_states), torch.empty_like(passed))
        # The gradients of chunks' own states are only operands of products, unless a row's first one is returned.
        own = s.dtype if self.extra_RGKV is None else torch.float32
        down = None if self.levels else torch.zeros_like(self.state(0))
        for (low, high), start in zip(reversed(groups), reversed(starts)):
            if high < self.levels:  # the states of the last group are still there
                self.climb(t, (low, high), start, entry_states, passed=passed)
            for level in range(high - 1, low - 1, -1):
                above, down = down, self.state(level, torch.float32 if level else own)
                into, ending = (None if x is None else x[level] for x in (dbucket, dafter))
                store = states.dkept[level - low], states.dpassed[level - low]
                self.down(level, t, (read, do), PairBuffers(down, above, into, ending), store)
            assert down is not None
            self._gather((low, high), t, (read, do), states, down, sums)
        sums = sums._replace(dlevel=sums.dlevel.sum(4))
        dq, dv, dt = self._chunk_gradients(do, t, sums)
        gradients = WYOutputGradients(sums.dw, sums.du, sums.dk, sums.dc, dt, dv)
        dk, dv, dbeta, dgates = launch_wy_backward(self, t, gradients)
        dextra = None
        if self.extra_RGKV is not None and down is not None:
            has_chunk_R = s.table[:, 3] % s.C + s.table[:, 2] > 0
            dextra = torch.where(has_chunk_R[:, None, None, None], down[s.table[:, 4]].mT, 0)
        return dq, dk, dv, dbeta, dgates, sums.dlevel, dbucket, dextra

    @property
    def has_slots_backward(self) -> bool:
        """Whether the backward goes through slots (kernels/log_linear_delta/slot_gradients.py) instead of every level:
        where the forward reads slots and there is more than one chunk, for features up to the values and few query
        heads of a group, if the reads of slots fit into memory.

        With twice as many features as values, the products with transitions are a third more than those of the levels.
        Each query head takes its rows through every slot that it reads, where states pass through levels once for all.
        """
        s = self.sizes
        if not (self.has_slots and self.levels > 0 and s.K <= s.V and s.J <= MOST_SLOT_HEADS):
            return False
        size = 2 * self.most_reads * s.G * s.J * s.C * s.K * self.v.element_size()
        return size <= self.free_memory * SLOTS_MEMORY_SHARE

    @property
    def most_reads(self) -> int:
        """A bound of all reads of slots by chunks. A row of n chunks from number 0 on has at most n log2(n) / 2 reads; from
        another number on, n more.
        """
        s = self.sizes
        return (s.most[0] * (s.N - 1).bit_length() + 1) // 2 + s.most[0] * (self.levels > self.top)

    def slots_backward(self, do: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, beta, gates and level."""
        s = self.sizes
        t = launch_wy_forward(self)
        slots, rights = self.build_slots(t, with_rights=True)
        dlevel = torch.zeros(self.level.shape, dtype=torch.float32, device=do.device)
        dread, dc = s.buffer(s.J, s.C, s.K), s.buffer(2, s.C, dtype=torch.float32)
        grads = self.read_slots_backward(do, t, slots, dread, dlevel)
        blocks = s.blocks + 2 * -(-s.K // s.block)
        for level in range(self.levels - 1, 0, -1):
            grid, pairs = self.grid(level, blocks)
            split_gradients[grid](
                s.table, slots, rights, grads, level, self.levels, self.top, pairs, s.most[0], **s.kernel,
                num_warps=4, num_stages=2,
            )  # fmt: skip
        products, dv, dt = self._chunk_backward(do, t, dread, dlevel, dc)
        dq = torch.empty(self.q.shape, dtype=self.q.dtype, device=do.device)
        dk, dw, du = s.buffer(s.C, s.K, dtype=torch.float32), s.buffer(s.C, s.K), s.buffer(s.V, s.C)
        grid, pairs = self.grid(0, 1)
        chunk_gradients[grid](
            *self.queries_keys, s.table, (t.w, t.u, t.c), slots, grads, (*products, dread), (dq, dk, dw, du, dc),
            self.levels, self.top, self.q.shape[3], pairs, s.J, s.most[0], **s.kernel, num_warps=4, num_stages=1,
        )  # fmt: skip
        del slots, rights, grads
        return dq, *launch_wy_backward(self, t, WYOutputGradients(dw, du, dk, dc, dt, dv)), dlevel

    def read_slots_backward(
        self, do: Tensor, t: WYTerms, slots: Segments, dread: Tensor, dlevel: Tensor
    ) -> SegmentGradients:  # fmt: skip
        """Return the gradients of slots from what reads them, as those of left segments; fill dread, add to dlevel."""
        s, J = self.sizes, self.sizes.J
        firsts = self.first_reads()
        reads, dreads = (
            torch.empty(self.most_reads, s.G, J, s.C, s.K, dtype=s.dtype, device=do.device) for _ in range(2)
        )
        wide = {"BV": min(128, max(16, triton.next_power_of_2(s.V)))}
        outputs, level = HeadTensor.from_tensor(do), LevelTensor.from_tensor(self.level)
        read_backward[(s.R * s.N, s.G * J)](
            *self.queries_keys, outputs, level, s.table, (t.c, t.w), slots, firsts, reads, dreads, dread, dlevel,
            self.top, self.q.shape[3], s.N, J, **self.level_options | wide, num_warps=4, num_stages=1,
        )  # fmt: skip
        phi = torch.empty(2, s.most[0], s.G, s.K, s.K, dtype=s.dtype, device=do.device)
        grads = SegmentGradients(s.buffer(s.V, s.K), phi)
        # Large tiles, since each block reads all of R, and two programs on a multiprocessor.
        block, warps, registers = (128, 8, 128) if s.block_k == 128 else (s.block, 4, None)
        blocks = -(-s.V // block) + -(-s.K // block)
        slot_gradients[(s.R * s.N * blocks, s.G)](
            outputs, level, s.table, firsts, reads, dreads, grads, self.top, s.N, J,
            **self.level_options | {"BV": block}, num_warps=warps, num_stages=3, maxnreg=registers,
        )  # fmt: skip
        return grads

    def first_reads(self) -> Tensor:
        """Return the reads of slots before those of each border's slot, (R, N).

        The slot of border n, of chunk number e, is read by as many chunks as the lowest set bit of e says, if the row
        has them.
        """
        s, table = self.sizes, self.sizes.table
        start_R1, tokens_R1 = table[:, 3:4], table[:, 2:3]
        chunks_R1 = (start_R1 % s.C + tokens_R1 + s.C - 1) // s.C
        n_N = torch.arange(s.N, device=table.device)
        e_RN = (start_R1 // s.C & ((1 << self.top) - 1)) + n_N
        reads_RN = torch.minimum(e_RN & -e_RN, chunks_R1 - n_N).clamp_min_(0).mul_(n_N > 0)
        every_RN = reads_RN.flatten().cumsum(0).view_as(reads_RN)
        return every_RN - reads_RN

    def reads(self, t: WYTerms) -> Tensor:
        """Return R (chunks, G, J, C, K) of every chunk and query head."""
        s = self.sizes
        read = s.buffer(s.J, s.C, s.K)
        query_reads[(s.R * s.N, s.G * s.J)](
            *self.queries_keys,
            s.table,
            t.c,
            t.w,
            read,
            s.N,
            s.J,
            **s.wide_kernel,
            BX=s.tile_features,
            **s.tile_options(4),
        )
        return read

    def down(
        self, level: int, t: WYTerms, reads: tuple[Tensor, Tensor], grads: PairBuffers, store: tuple[Tensor, Tensor]
    ) -> None:
        """Run `level_down` on all pairs of a level. reads: (R, d_out). store: dkept and dpassed of the level
        (`LevelStates`).
        """
        s, (grid, pairs), (read, do) = self.sizes, self.grid(level, self.sizes.blocks), reads
        level_down[grid](
            GroupTensor.from_tensor(self.k), t.w, read, HeadTensor.from_tensor(do), t.c,
            LevelTensor.from_tensor(self.level), s.table, grads.arguments(self.end_R), *store, level, self.top,
            self.q.shape[3], pairs, s.J, **self.level_options | s.state_kernel, **grads.flags, num_warps=s.warps(8192), num_stages=s.stages(2),
        )  # fmt: skip

    @property
    def gather_block(self) -> int:
        """Features in a block of `gather_gradients`."""
        s = self.sizes
        if s.block_k == 128 and s.dtype != torch.float32:  # x, y and d_out are read once
            return 128
        return s.features

    def _empty_sums(self) -> GatheredGradients:
        s, wide = self.sizes, torch.float32
        shape = *self.level.shape[:4], -(-s.K // self.gather_block), self.level.shape[4]
        dlevel = torch.zeros(shape, dtype=wide, device=self.k.device)
        matrices = s.buffer(s.C, s.K, dtype=wide), s.buffer(s.C, s.K), s.buffer(s.V, s.C)
        dc = s.buffer(self.parts, s.C, dtype=wide).zero_()  # `gather_gradients` may store fewer parts
        return GatheredGradients(*matrices, s.buffer(s.J, s.C, s.K), dlevel, dc)

    def _gather(
        self, group: tuple[int, int], t: WYTerms, reads: tuple[Tensor, Tensor], states: LevelStates, down: Tensor,
        sums: GatheredGradients,
    ) -> None:  # fmt: skip
        """Run `gather_gradients` on all chunks. reads: (R, d_out)."""
        s, (low, high), (read, do) = self.sizes, group, reads
        flags = {"BUCKET": self.bucket_lRGKV is not None, "ADD": high < self.levels, "OWN": low == 0}
        block = self.gather_block
        tiles = {"BX": block, "BV": min(32, s.wide_block), "num_warps": 8 if block == 128 else 4}
        gather_gradients[(s.R * s.N, s.G, -(-s.K // block))](
            GroupTensor.from_tensor(self.k), HeadTensor.from_tensor(do), LevelTensor.from_tensor(self.level), s.table,
            t.c, t.u, read, states, sums, down, low, high, self.top, self.q.shape[3], s.N, s.J, s.most[0],
            **self.level_options | tiles, PARTS=self.parts, **flags, num_stages=1,
        )  # fmt: skip

    def _chunk_backward(
        self, do: Tensor, t: WYTerms, dread: Tensor, dlevel: Tensor, dc: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """Return ((P, dP . M), the part of dv from inside chunks, dT) of what chunks read of themselves; add to dlevel
        and store the last part of dc."""
        s = self.sizes
        dv = torch.empty(self.v.shape, dtype=self.v.dtype, device=do.device)
        dt = s.buffer(s.C, s.C, dtype=torch.float32)
        ps, dps = s.buffer(s.J, s.C, s.C), s.buffer(s.J, s.C, s.C)
        chunk_backward[(s.R * s.N, s.G)](
            *self.inputs, HeadTensor.from_tensor(do), s.table, (t.c, t.y, t.w), dread, ps, dps, dv, dt, dlevel, dc,
            self.q.shape[3], s.N, s.J, **self.level_options | s.wide_kernel, BX=s.features, PARTS=dc.shape[2],
            num_warps=s.loop_warps, num_stages=1,
        )  # fmt: skip
        return (ps, dps), dv, dt

    def _chunk_gradients(self, do: Tensor, t: WYTerms, sums: GatheredGradients) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, the part of dv from inside chunks, dT), and add to `sums` what chunks read of themselves."""
        s, parts = self.sizes, self.parts
        products, dv, dt = self._chunk_backward(do, t, sums.dread, sums.dlevel, sums.dc)
        dq = torch.empty(self.q.shape, dtype=self.q.dtype, device=do.device)
        chunk_backward_features[(s.R * s.N, s.G, parts - 1)](
            *self.queries_keys, s.table, t.c, *products, sums.dread, dq, sums.dk, sums.dw, sums.dc, self.q.shape[3],
            s.N, s.J, **s.kernel, BX=s.features, PARTS=parts, num_warps=4, num_stages=1,
        )  # fmt: skip
        return dq, dv, dt
