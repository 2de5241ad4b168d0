"""Log-linear Gated DeltaNet of pieces of sequences whose states lie in a server's cache, without gradients.

A state has one sum for each bit of its number of tokens from BITS on, and one for all lower bits
(surgery/mixers/masks/log_linear.py: `bucket_plan`). `enter_pages` takes the buckets that a row goes on from out of its
page. Those of at least a chunk go to the levels of the tree (kernels/log_linear_delta/levels.py). Smaller ones lie in the
row's first chunk: they pass through it as a state at its start does (kernels/gated_delta/wy.py), and are part of what it
leaves; `read_low_buckets` adds what its queries read of them to the output. `leave_pages` writes the sums behind the row:
those of the levels, and sums over tokens of its last chunk,

    S_b = K^T e Y (m_b beta V)      m_b: the tokens that a query at the next position reads at level b

which, with one sum for all bits below a chunk, is what the chunk itself leaves. Reference: the plain torch of
kernels/log_linear_delta/boundary.py, which has gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.gated_delta.layout import (
    MAX_LEVELS,
    DeltaSizes,
    chunk_tokens,
    decay_from_start,
    decay_to_end,
    load_matrix,
    load_row,
    load_tile,
    packed_sizes,
    store_matrix,
    store_tile,
)
from surgery.kernels.gated_delta.wy import launch_wy_forward
from surgery.kernels.kernel_tensors import GroupTensor, HeadTensor, LevelTensor
from surgery.kernels.launch import OpenLaunch, open_launch
from surgery.kernels.log_linear_delta.chunk import chunk_forward, query_key_products, read_tile
from surgery.kernels.log_linear_delta.levels import PairEnds, level_up, program_part
from surgery.kernels.log_linear_delta.plan import FORWARD_MEMORY_SHARE, LogLinearDeltaPlan
from surgery.mixers.common.packed_pieces import PackedPieces


@triton.jit
def is_full(n, bit, BITS: tl.constexpr):
    """Return whether bucket `bit` holds anything after n tokens, if the sum of all bits below BITS is in that of the
    lowest set bit (`expand_buckets`)."""
    return (((n >> bit) & 1) == 1) & ((bit >= BITS) | ((n & ((1 << bit) - 1)) == 0))


@triton.jit
def bits_of(x_C, LOG_C: tl.constexpr):
    """Return the bit lengths of numbers below 2^LOG_C."""
    bits_C = x_C * 0
    for bit in tl.static_range(LOG_C):
        bits_C += ((x_C >> bit) > 0).to(bits_C.dtype)
    return bits_C


@triton.jit
def carry_through(
    s_VK, k_CK, w, c, at, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """Return the state S^T behind the tokens of a chunk, of that at its start. k: keys of the chunk; at: its place."""
    to_end_C, total = decay_to_end(c, at, C)
    w_CK = load_matrix(w + at * C * K, C, K, 0, C, BK)
    x_VC = tl.dot(s_VK.to(k_CK.dtype), tl.trans(w_CK), input_precision=P) * -to_end_C[None, :]
    return tl.dot(x_VC.to(k_CK.dtype), k_CK, s_VK * total, input_precision=P)


@triton.jit(do_not_specialize=["LEVELS", "SUMS"])
def enter_pages(
    k, w, c, rows, pages, pool, stride, buckets, state, LEVELS, SUMS,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    BITS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Take one bucket of a row out of its page, or pass those below a chunk through the row's first one. Grid: (R x
    (LEVELS + 1) x blocks of values, G).

    k: `GroupTensor`; pool: the pages, `stride` elements apart, of SUMS sums each; pages (R,): the rows' pages. Stores
    buckets (LEVELS, R, G, K, V), from bit LOG_C on with zeros for empty ones, and adds to `state`, S^T of the chunks.
    """
    r, part, block = program_part(LEVELS + 1, (V + BV - 1) // BV)
    g, at_v = tl.program_id(1).to(tl.int64), block * BV
    row = load_row(rows, r, WIDTH)
    start = row.start
    here = pool + tl.load(pages + r).to(tl.int64) * stride + g * K * V
    if part < LEVELS:
        bit = part
        full = is_full(start, bit, BITS)
        if full | (bit >= LOG_C):
            at = tl.minimum(tl.where(bit < BITS, 0, bit - BITS + (1 if BITS > 0 else 0)), SUMS - 1).to(tl.int64)
            x_KV = load_matrix(here + at * G * K * V, tl.where(full, K, 0), V, at_v, BK, BV)
            to = (
                buckets
                + ((bit.to(tl.int64) * (tl.num_programs(0) // ((LEVELS + 1) * ((V + BV - 1) // BV))) + r) * G + g)
                * K
                * V
            )
            store_matrix(to, K, V, at_v, x_KV, BK, BV)
    elif start % C > 0:
        s_VK = tl.zeros([BV, BK], tl.float32)
        for bit in range(LOG_C):
            if is_full(start, bit, BITS):
                at = tl.where(bit < BITS, start * 0, start * 0 + bit - BITS + (1 if BITS > 0 else 0))
                s_VK += tl.trans(load_matrix(here + at * G * K * V, K, V, at_v, BK, BV))
        at = row.base * G + g
        t_C, here_C = chunk_tokens(0, row, C)
        k_CK = load_tile(k.ptr + row.batch * k.b + g * k.g, t_C, k.t, here_C, K, 0, BK)
        s_VK = carry_through(s_VK, k_CK, w, c, at, K, C, BK, P)
        own = state + (at * V + at_v) * K
        s_VK += load_matrix(own, V - at_v, K, 0, BV, BK)
        store_matrix(own, V - at_v, K, 0, s_VK, BV, BK)


@triton.jit(do_not_specialize=["T"])
def read_low_buckets(
    q, k, level, rows, buckets, terms, out, T, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    BITS: tl.constexpr, LAMBDAS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Add to `out` what the queries of a row's first chunk read of the buckets below a chunk. Grid: (R, G x J, blocks of
    values).

    q: `HeadTensor`; k: `GroupTensor`; level: `LevelTensor`; buckets: of `enter_pages`; terms: (c, w).
    """
    c, w = terms
    r, head, at_v = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * BV
    g, j = head // J, head % J
    row = load_row(rows, r, WIDTH)
    start = row.start
    if (start % C == 0) | (row.length == 0):
        return
    at = row.base * G + g
    t_C, here_C = chunk_tokens(0, row, C)
    half = k.ptr.dtype.element_ty
    lane = row.batch, g, j
    p_CC = query_key_products(q, k, lane, t_C, here_C, c, at, K, C, BX, P)
    fade_C = decay_from_start(c, at, C)
    differs_C = bits_of(tl.arange(0, C) ^ (start % C).to(tl.int32), LOG_C)
    at_l = level.ptr + row.batch * level.b + g * level.g + j * level.j
    out_head = out + ((row.batch * G + g) * J + j) * T * V
    out_CV = load_tile(out_head, t_C, V, here_C, V, at_v, BV).to(tl.float32)
    for first in range(0, K, BX):
        read_CX = read_tile(q, w, p_CC, fade_C, lane, t_C, here_C, at, first, K, C, BX, P).to(half)
        at_X = first + tl.arange(0, BX)
        for bit in range(LOG_C):
            if is_full(start, bit, BITS):
                bucket = buckets + ((start * 0 + bit) * tl.num_programs(0) + r) * G * K * V + g * K * V
                s_XV = load_tile(bucket, at_X, V, at_X < K, V, at_v, BV).to(half)
                which_C = tl.maximum(tl.minimum(tl.maximum(differs_C, bit + 1) - BITS, LAMBDAS - 1), 0)
                lambda_C = tl.load(at_l + t_C * level.t + which_C * level.l, mask=here_C, other=0.0)
                out_CV += lambda_C[:, None] * tl.dot(read_CX, s_XV, input_precision=P)
    store_tile(out_head, t_C, V, here_C, V, at_v, out_CV, BV)


@triton.jit(do_not_specialize=["SUMS"])
def leave_pages(
    k, v, beta, rows, terms, buckets, after, state, pages, pool, stride, SUMS,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    BITS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Store one sum behind a row in its page, zeros for an empty one. Grid: (R x SUMS x blocks of values, G).

    k, v, beta: `GroupTensor`; terms: (c, Y, w); buckets: of `enter_pages`; after (levels, R, G, K, V): buckets of the
    levels behind the rows; state: S^T that the chunks leave; pool: as in `enter_pages`.
    """
    c, y, w = terms
    r, i, block = program_part(SUMS, (V + BV - 1) // BV)
    rows_R = tl.num_programs(0) // (SUMS * ((V + BV - 1) // BV))
    g, at_v = tl.program_id(1).to(tl.int64), block * BV
    row = load_row(rows, r, WIDTH)
    start, end = row.start, row.start + row.length
    first = start * 0 + tl.where(i == 0, 0, i + (BITS - 1 if BITS > 0 else 0))  # bits of the sum: first .. last
    last = start * 0 + i + (BITS - 1 if BITS > 0 else 0)
    s_VK = tl.zeros([BV, BK], tl.float32)
    n = end // C - start // C  # the chunk of the next position, if it has tokens
    at = (row.base + n) * G + g
    if (first < LOG_C) & (end % C > 0):
        if BITS >= LOG_C:
            s_VK += load_matrix(state + (at * V + at_v) * K, V - at_v, K, 0, BV, BK)
        else:
            t_C, here_C = chunk_tokens(n, row, C)
            to_end_C, _total = decay_to_end(c, at, C)
            differs_C = bits_of(tl.arange(0, C) ^ (end % C).to(tl.int32), LOG_C)
            mine_C = here_C & (differs_C > first) & (differs_C <= last + 1)
            beta_C = tl.load(beta.ptr + row.batch * beta.b + g * beta.g + t_C * beta.t, mask=mine_C, other=0.0)
            k_CK = load_tile(k.ptr + row.batch * k.b + g * k.g, t_C, k.t, here_C, K, 0, BK)
            v_CV = load_tile(v.ptr + row.batch * v.b + g * v.g, t_C, v.t, mine_C, V, at_v, BV)
            v_CV = (v_CV * beta_C.to(tl.float32)[:, None]).to(k_CK.dtype)
            u_CV = tl.dot(load_matrix(y + at * C * C, C, C, 0, C, C), v_CV, input_precision=P) * to_end_C[:, None]
            s_VK = tl.dot(tl.trans(u_CV.to(k_CK.dtype)), k_CK, s_VK, input_precision=P)
            if (n == 0) & (start % C > 0):
                differs = bits_of(((start ^ end) % C).to(tl.int32), LOG_C)
                old_VK = tl.zeros([BV, BK], tl.float32)
                for bit in range(LOG_C):
                    into = tl.maximum(differs, bit + 1) - 1
                    if is_full(start, bit, BITS) & (into >= first) & (into <= last):
                        bucket = buckets + (((start * 0 + bit) * rows_R + r) * G + g) * K * V
                        old_VK += tl.trans(load_matrix(bucket, K, V, at_v, BK, BV))
                s_VK += carry_through(old_VK, k_CK, w, c, at, K, C, BK, P)
    for bit in range(tl.maximum(first, LOG_C), last + 1):
        if ((end >> bit) & 1) == 1:
            bucket = after + ((bit - LOG_C) * rows_R + r) * G * K * V + g * K * V
            s_VK += tl.trans(load_matrix(bucket, K, V, at_v, BK, BV))
    here = pool + tl.load(pages + r).to(tl.int64) * stride + (i.to(tl.int64) * G + g) * K * V
    store_matrix(here, K, V, at_v, tl.trans(s_VK), BK, BV)


@dataclass(frozen=True)
class PagesPlan:
    """Sizes and launches that all layers of a step share.

    log_c: bits of a chunk. levels: buckets of a row, of which those from bit log_c on lie above chunks. groups: see
    `LogLinearDeltaPlan.groups`. sums: sums of a page that are written. ups: `level_up` without and with a parent, with
    `up_blocks` blocks of values. reads: `chunk_forward` of further groups and of the lowest, on `read_grid`. low:
    `read_low_buckets`, None if no row goes on within a chunk.
    """

    sizes: DeltaSizes
    log_c: int
    levels: int
    groups: list[tuple[int, int]]
    sums: int
    enter: OpenLaunch
    ups: tuple[OpenLaunch, OpenLaunch]
    up_blocks: int
    reads: tuple[OpenLaunch, OpenLaunch]
    read_grid: tuple[int, int, int]
    low: OpenLaunch | None
    leave: OpenLaunch

    @property
    def high(self) -> int:
        """Levels above chunks."""
        return self.levels - self.log_c

    def grid(self, level: int) -> tuple[tuple[int, int], int]:
        """Return (the grid of `level_up`, its pairs in a row)."""
        pairs = ((self.sizes.N - 1) >> (level + 1)) + 2
        return (self.sizes.R * pairs * self.up_blocks, self.sizes.G), pairs


def make_pages_plan(plan: LogLinearDeltaPlan, pieces: PackedPieces, block_bits: int, page: int) -> PagesPlan:
    """Return the plan of a step. plan: of its first layer. page: sums of a page."""
    s, lambdas, longest = plan.sizes, plan.level.shape[-1], pieces.max_seen.bit_length()
    log_c = s.C.bit_length() - 1
    options: dict[str, Any] = {
        **s.kernel,
        "LOG_C": log_c,
        "BITS": block_bits,
        "num_warps": s.warps(8192),
        "num_stages": 1,
    }
    up = {**plan.up_options, "PASSED": False, "BUCKET": True, "AFTER": True}
    read = {**plan.read_options, "BUCKET": True, "SHARED": block_bits}
    low = {**options, **s.wide_kernel, "LAMBDAS": lambdas, "BX": s.tile_features, "num_warps": 4}
    return PagesPlan(
        sizes=s,
        log_c=log_c,
        levels=log_c + plan.levels,
        groups=plan.groups(FORWARD_MEMORY_SHARE),
        sums=min(max(0, longest - block_bits) + (block_bits > 0), page),
        enter=open_launch(enter_pages, options),
        ups=(open_launch(level_up, {**up, "PARENT": False}), open_launch(level_up, {**up, "PARENT": True})),
        up_blocks=-(-s.V // up["BV"]),
        reads=(
            open_launch(chunk_forward, {**read, "INNER": False}),
            open_launch(chunk_forward, {**read, "INNER": True}),
        ),
        read_grid=plan.read_grid(read),
        low=open_launch(read_low_buckets, low) if any(seen % s.C for seen in pieces.seen) else None,
        leave=open_launch(leave_pages, options),
    )


def run_in_pages(
    tokens: tuple[Tensor, ...], pool_PNGKV: Tensor, page_R: Tensor, pieces: PackedPieces, chunk: int, block_bits: int
) -> Tensor:
    """Return out_BGJTV of pieces in one row, and update the sums in their pages. tokens: q (1, G, J, T, K), k, v, beta,
    log-gates (1, G, T) and lambdas (1, T, G, J, L), of which levels 0 .. block_bits have the first, q, k and v with unit
    strides along the last axis."""
    q, k, v, beta, gates, level = tokens
    s = packed_sizes(q, v, chunk, pieces, resumes=True)
    high, page = max(0, pieces.max_seen.bit_length() - s.C.bit_length() + 1), pool_PNGKV.shape[1]
    call = LogLinearDeltaPlan(
        q, k, v, beta, gates, s, level=level, bucket_lRGKV=None, extra_RGKV=None, end_R=pieces.end_R, levels=high,
        top=MAX_LEVELS,
    )  # fmt: skip
    key = "log-linear pages", q.shape, v.shape, v.dtype, level.shape[-1], chunk, block_bits, page
    plan = pieces.once(key, lambda: make_pages_plan(call, pieces, block_bits, page))
    float32: dict[str, Any] = {"dtype": torch.float32, "device": k.device}
    buckets = torch.empty(plan.levels, s.R, s.G, s.K, s.V, **float32)
    own = call.state(0)
    t = launch_wy_forward(call, own)
    keys, values_beta = GroupTensor.from_tensor(k), call.values_beta
    queries, lambdas = HeadTensor.from_tensor(q), LevelTensor.from_tensor(level)
    pages = page_R, pool_PNGKV, pool_PNGKV.stride(0)
    plan.enter(
        (s.R * (plan.levels + 1) * s.blocks, s.G), keys, t.w, t.c, s.table, *pages, buckets, own, plan.levels, page
    )
    wide = v.dtype if len(plan.groups) == 1 else torch.float32  # several groups add to the output
    out = torch.empty(*q.shape[:4], s.V, dtype=wide, device=k.device)
    after = torch.empty(high, s.R, s.G, s.K, s.V, **float32)
    kept = call.allocate_kept(plan.groups, s.K)
    above, ends, keeps = buckets[plan.log_c :].unbind(), after.unbind(), kept.unbind()
    above_sizes = s.most[1 : max(high, 1)]
    parents = torch.empty(sum(above_sizes), s.G, s.V, s.K, **float32).split(above_sizes) if above_sizes else ()
    state = own
    for low, stop in plan.groups:
        for at in range(low, stop):
            grid, pairs = plan.grid(at)
            parent = parents[at] if at + 1 < high else None
            pair = PairEnds(state, state if parent is None else parent, above[at], ends[at], pieces.end_R)
            up = plan.ups[parent is not None]
            up(grid, keys, t.w, t.c, s.table, pair, keeps[at - low], state, at, MAX_LEVELS, pairs)
            state = state if parent is None else parent
        plan.reads[low == 0](
            plan.read_grid, queries, keys, *values_beta, lambdas, s.table, (t.c, t.y, t.w), kept, out, low, stop,
            MAX_LEVELS, q.shape[3], s.N, s.J, s.most[0],
        )  # fmt: skip
    if plan.low is not None:
        low_grid = s.R, s.G * s.J, s.wide_blocks
        plan.low(low_grid, queries, keys, lambdas, s.table, buckets, (t.c, t.w), out, q.shape[3], s.J)
    plan.leave(
        (s.R * plan.sums * s.blocks, s.G), keys, *values_beta, s.table, (t.c, t.y, t.w), buckets, after, own, *pages,
        plan.sums,
    )  # fmt: skip
    return out.to(v.dtype)
