"""Tiles of local attention's kernels: rows of queries, the band of keys that they see, scores and their gradients.

Query t of a call (position seen + t) sees the recent slots s with t < s <= t + window and position seen - window + s >=
sinks, and the sinks j <= seen + t. A sink inside of the window is seen as a sink only.

Queries lie in rows r = t J + j, so that all J heads of a token share the tiles of their key/value head. Scores are in
base 2: log2(e) times the scaled, capped score. `slot` numbers all keys of a query: j for sinks, S + s for recent slots.

Suffixes: M rows of queries, N keys, K and V dimensions of keys and values, padded to the powers of two BK and BV.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.mlr_attention.tiles import softcap

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
SINKS, EDGES, WHOLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of tiles
MIN_SCORE = tl.constexpr(-1e30)


@triton.jit
def query_rows(start, T, J: tl.constexpr, M: tl.constexpr):
    """Return (head in its group, token, whether there is such a row) of rows start .. start + M."""
    r_M = start + tl.arange(0, M)
    return (r_M % J).to(tl.int64), r_M // J, r_M < T * J


@triton.jit
def load_rows(base, at_N, ok_N, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return x_ND, rows that begin at offsets at_N; zeros where not ok and from SIZE on."""
    dim_D = tl.arange(0, BLOCK)
    return tl.load(base + at_N[:, None] + dim_D[None, :], mask=ok_N[:, None] & (dim_D < SIZE)[None, :], other=0.0)


@triton.jit
def store_rows(base, at_N, x_ND, ok_N, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store x_ND in rows that begin at offsets at_N, in the dtype of `base`."""
    dim_D = tl.arange(0, BLOCK)
    mask = ok_N[:, None] & (dim_D < SIZE)[None, :]
    tl.store(base + at_N[:, None] + dim_D[None, :], x_ND.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_queries(x, b, g, j_M, t_M, ok_M, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the rows (head j, token t) of a `HeadTensor`."""
    return load_rows(x.ptr + b * x.b + g * x.g, j_M * x.j + t_M.to(tl.int64) * x.t, ok_M, SIZE, BLOCK)


@triton.jit
def load_keys(x, b, g, s_N, ok_N, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the rows s of a `GroupTensor`."""
    return load_rows(x.ptr + b * x.b + g * x.g, s_N.to(tl.int64) * x.t, ok_N, SIZE, BLOCK)


@triton.jit
def band_of(t_first, t_last, seen, window, S: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr):
    """Return (first, whole, behind, end) of the slots first .. end that queries t_first .. t_last see.

    Of the tiles of N slots from `first` on, those from `whole` to `behind` are whole: every query sees all their keys.
    No tile is whole unless SPLIT.
    """
    first = tl.maximum(t_first + 1, S + window - seen)
    end = t_last + window + 1
    if not SPLIT:
        return first, end, end, end
    whole = first + (tl.maximum(t_last + 1 - first, 0) + N - 1) // N * N
    behind = whole + tl.maximum(t_first + window + 1 - whole, 0) // N * N
    return first, whole, behind, end


@triton.jit
def tile_range(band, kind: tl.constexpr, S: tl.constexpr, N: tl.constexpr):
    """Return (start, stop, gap, shift, end) of the tiles of a kind: a tile at x, start <= x < stop, begins at slot x,
    or x + shift from x = gap on. Slots from `end` on are not read. The tiles at the band's edges lie on both sides of
    the whole ones.
    """
    first, whole, behind, end = band
    if kind == SINKS:
        return 0, S, S, 0, S
    if kind == WHOLE:
        return whole, behind, behind, 0, end
    return first, end - (behind - whole), whole, behind - whole, end


@triton.jit
def base2_score(product, scale, CAP: tl.constexpr):
    """Return the score in base 2 from the product of query and key."""
    if CAP > 0:
        return softcap(product * (scale / CAP), CAP) * LOG2_E
    return product * (scale * LOG2_E)


@triton.jit
def softcap_slope(score, CAP: tl.constexpr):
    """Return the derivative of the soft cap at a score in base 2: 1 - (score / CAP)^2."""
    ratio = score * (LN_2 / CAP)
    return 1 - ratio * ratio
