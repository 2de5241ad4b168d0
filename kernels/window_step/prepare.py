"""RoPE and feature maps of one token of each row in one launch, for mixers that rotate q and k themselves (`rope:
window` and `both`) or have Hedgehog features.

    rotated = x cos + (-x_second, x_first) sin      of the first R dims of each head, in the half-split form
    u = x | [x, rotated]      y = root W u      features = [softmax(y), softmax(-y)], or root u without W

of the queries and of the keys that enter the states: with a window those are read from their slot of the rings, which
`window_step` writes to afterwards, at another slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.kernel_tensors import unit_last_stride
from surgery.kernels.launch import CachedLaunch
from surgery.kernels.ssd.layout import power_of_two

MAX_TILE = 32768  # elements of W that a program holds, columns of one half of u times rows
WANTED_PROGRAMS, MAX_ROWS = 1280, 8  # rows of the batch share a program, which holds W, if there are more programs


@triton.jit
def rotate_head(x_K, at_x, at_cos, at_sin, kk_K, inside_K, K: tl.constexpr, R: tl.constexpr):
    """Return a head after RoPE, rounded to its dtype. x_K: the head, which at_x points to."""
    turns_K = inside_K & (kk_K < R)
    other_K = tl.where(kk_K < R // 2, kk_K + R // 2, kk_K - R // 2)
    y_K = tl.load(at_x + other_K, mask=turns_K, other=0.0).to(tl.float32)
    y_K = tl.where(kk_K < R // 2, -y_K, y_K)
    cos_K = tl.load(at_cos + kk_K, mask=turns_K, other=1.0).to(x_K.dtype).to(tl.float32)
    sin_K = tl.load(at_sin + kk_K, mask=turns_K, other=0.0).to(x_K.dtype).to(tl.float32)
    return (x_K.to(tl.float32) * cos_K + y_K * sin_K).to(x_K.dtype)


@triton.jit
def store_features(
    out, first_K, second_K, first_FK, second_FK, root, ok,
    K: tl.constexpr, BOTH: tl.constexpr, MAP: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Store the features of u = first | [first, second]; first_FK, second_FK: columns of W that meet them."""
    U: tl.constexpr = 2 * K if BOTH else K
    kk_K = tl.arange(0, BK)
    first_K, second_K = root * first_K.to(tl.float32), root * second_K.to(tl.float32)
    if MAP:
        ff_F = tl.arange(0, BF)
        inside_F = ff_F < U
        y_F = tl.sum(first_FK * first_K[None, :], 1)
        if BOTH:
            y_F += tl.sum(second_FK * second_K[None, :], 1)
        up_F = tl.where(inside_F, y_F, float("-inf"))
        up_F = tl.exp(up_F - tl.max(up_F, 0))
        down_F = tl.where(inside_F, -y_F, float("-inf"))
        down_F = tl.exp(down_F - tl.max(down_F, 0))
        tl.store(out + ff_F, up_F / tl.sum(up_F, 0), mask=inside_F & ok)
        tl.store(out + U + ff_F, down_F / tl.sum(down_F, 0), mask=inside_F & ok)
    else:
        tl.store(out + kk_K, first_K, mask=(kk_K < K) & ok)
        if BOTH:
            tl.store(out + K + kk_K, second_K, mask=(kk_K < K) & ok)


@triton.jit(do_not_specialize=["batch"])
def prepare_step(
    q, k, cos, sin, query_w, key_w, ring_far, ring_near, seen, pages, near, query_out, key_out,
    batch, page, sqb, sqh, skb, skg, scb, ssb, root,
    H: tl.constexpr, G: tl.constexpr, COPIES: tl.constexpr, K: tl.constexpr, R: tl.constexpr, TURN: tl.constexpr,
    FEATURES: tl.constexpr, BOTH: tl.constexpr, MAP: tl.constexpr, W: tl.constexpr, PAGED: tl.constexpr, BK: tl.constexpr,
    BF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store near (B, H + KV, K), q and k after RoPE (TURN), and the features query_out (B, H, F) and key_out (B, G, F)
    (FEATURES), in float32. Grid: (blocks of ROWS rows, H + G).

    q (B, H, ..), k (B, KV, ..) with KV = G / COPIES, cos and sin (B, R); s and two letters is a stride along rows (b),
    heads (h) or groups (g). BOTH: u has two halves, in q one behind the other without TURN; it needs rings. query_w (H, U,
    U), key_w (G, U, U): W, with MAP. W > 0: keys enter the states from slot seen + 1 mod W + 1 of ring_far, and with BOTH of
    ring_near, (W + 1, KV, K) each: of row b, or PAGED pages[b] x page numbers behind the pointer. Rows with seen < 0 or
    pages < 0 have no token, and features that nobody reads.
    """
    KV: tl.constexpr = G // COPIES
    U: tl.constexpr = 2 * K if BOTH else K
    F: tl.constexpr = 2 * U if MAP else U
    head = tl.program_id(1)
    is_query = head < H
    g = tl.maximum(head - H, 0)
    kk_K = tl.arange(0, BK)
    ff_F = tl.arange(0, BF)
    inside_K = kk_K < K
    first_FK = tl.zeros([BF, BK], tl.float32)
    second_FK = first_FK
    if MAP:
        at_FK = ff_F[:, None] * U + kk_K[None, :]
        inside_FK = (ff_F < U)[:, None] & inside_K[None, :]
        if is_query:
            at = query_w + head.to(tl.int64) * U * U
            first_FK = tl.load(at + at_FK, mask=inside_FK, other=0.0).to(tl.float32)
            if BOTH:
                second_FK = tl.load(at + K + at_FK, mask=inside_FK, other=0.0).to(tl.float32)
        else:
            at = key_w + g.to(tl.int64) * U * U
            first_FK = tl.load(at + at_FK, mask=inside_FK, other=0.0).to(tl.float32)
            if BOTH:
                second_FK = tl.load(at + K + at_FK, mask=inside_FK, other=0.0).to(tl.float32)
    for r in range(ROWS):
        b = (tl.program_id(0) * ROWS + r).to(tl.int64)
        ok = b < batch
        inside_bK = inside_K & ok
        if is_query:
            at = q + b * sqb + head.to(tl.int64) * sqh
            x_K = tl.load(at + kk_K, mask=inside_bK, other=0.0)
            second_K = x_K
            if TURN:
                second_K = rotate_head(x_K, at, cos + b * scb, sin + b * ssb, kk_K, inside_bK, K, R)
                tl.store(near + (b * (H + KV) + head) * K + kk_K, second_K, mask=inside_bK)
            elif BOTH:
                second_K = tl.load(at + K + kk_K, mask=inside_bK, other=0.0)
            if FEATURES:
                out = query_out + (b * H + head) * F
                store_features(out, x_K, second_K, first_FK, second_FK, root, ok, K, BOTH, MAP, BK, BF)
        else:
            kv = (g // COPIES).to(tl.int64)
            at = k + b * skb + kv * skg
            x_K = tl.load(at + kk_K, mask=inside_bK, other=0.0)
            if TURN:
                turned_K = rotate_head(x_K, at, cos + b * scb, sin + b * ssb, kk_K, inside_bK, K, R)
                to_near = near + (b * (H + KV) + H + kv) * K + kk_K
                tl.store(to_near, turned_K, mask=inside_bK & (g % COPIES == 0))
            if FEATURES:
                out = key_out + (b * G + g) * F
                if W > 0:
                    row, p = b, tl.load(seen + b, mask=ok, other=-1).to(tl.int64)
                    there = p >= W  # before that nothing lies in the slot
                    if PAGED:
                        row = tl.load(pages + b, mask=ok, other=-1).to(tl.int64)
                        there = there & (row >= 0)
                    slot = (row * page if PAGED else b * ((W + 1) * KV * K)) + ((p + 1) % (W + 1) * KV + kv) * K
                    far_K = tl.load(ring_far + slot + kk_K, mask=inside_K & there, other=0.0)
                    also_K = far_K
                    if BOTH:
                        also_K = tl.load(ring_near + slot + kk_K, mask=inside_K & there, other=0.0)
                    store_features(out, far_K, also_K, first_FK, second_FK, root, ok, K, BOTH, MAP, BK, BF)
                else:
                    store_features(out, x_K, x_K, first_FK, second_FK, root, ok, K, BOTH, MAP, BK, BF)


@dataclass(frozen=True)
class KeyRings:
    """Rings from which keys enter the states. far: keys in the states' form. near: their second half. seen: tokens of
    each row. pages: pages of the rows, None if they have a row each. window: tokens before a key leaves the ring."""

    far: Tensor
    near: Tensor
    seen: Tensor
    pages: Tensor | None
    window: int


@dataclass(frozen=True)
class Features:
    """What to compute of u. query_w, key_w: W (H or G, U, U), None for u itself. groups: G. both: u has two halves."""

    query_w: Tensor | None
    key_w: Tensor | None
    root: float
    groups: int
    both: bool
    rings: KeyRings | None


@lru_cache(maxsize=1024)
def _launch(
    grid: tuple[int, int], sizes: tuple[int, ...], names: tuple[str, ...], options: tuple[Any, ...]
) -> CachedLaunch:
    return CachedLaunch(prepare_step, grid, sizes, dict(zip(names, options)))


def prepare_heads(
    q_BHK: Tensor, k_BGK: Tensor, rope: tuple[Tensor, Tensor] | None, features: Features | None
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Return (features of the queries (B, H, F), of the keys (B, G, F), q and k of the softmax (B, H, K), (B, KV, K)).

    rope: cos and sin of the token, (1 or B, 1, R), None if q and k are given after RoPE, as [x, rotated] if u has two
    halves. features: None to rotate alone.
    """
    (batch, heads, given), groups = q_BHK.shape, k_BGK.shape[1]
    both, rings = (features.both, features.rings) if features else (False, None)
    key = given // 2 if both and rope is None else given
    linear_groups = features.groups if features else groups
    cos, sin = (q_BHK, q_BHK) if rope is None else (unit_last_stride(t[:, 0]).expand(batch, -1) for t in rope)
    near = q_BHK if rope is None else torch.empty(batch, heads + groups, key, dtype=q_BHK.dtype, device=q_BHK.device)
    columns = key * (2 if both else 1)
    has_map = features is not None and features.query_w is not None
    query_out = key_out = q_BHK
    if features is not None:
        outs = q_BHK.new_empty(batch, heads + linear_groups, columns * (2 if has_map else 1), dtype=torch.float32)
        query_out, key_out = outs.view(-1).split([batch * n * outs.shape[-1] for n in (heads, linear_groups)])
        query_out, key_out = query_out.view(batch, heads, -1), key_out.view(batch, linear_groups, -1)
    weights = (features.query_w, features.key_w) if features is not None else (None, None)
    query_w, key_w = (q_BHK if w is None else w.contiguous() for w in weights)
    paged = rings is not None and rings.pages is not None
    tensors = (
        q_BHK, k_BGK, cos, sin, query_w, key_w, rings.far if rings else q_BHK, rings.near if rings else q_BHK,
        rings.seen if rings else q_BHK, rings.pages if rings and rings.pages is not None else q_BHK, near, query_out, key_out,
    )  # fmt: skip
    programs = heads + linear_groups
    rows = min(MAX_ROWS, triton.next_power_of_2(max(1, batch * programs // WANTED_PROGRAMS)))
    tile = power_of_two(columns) if has_map else 16
    sizes = (
        batch, rings.far.stride(0) if rings else 0, *q_BHK.stride()[:2], *k_BGK.stride()[:2], cos.stride(0), sin.stride(0),
        features.root if features else 1.0,
    )  # fmt: skip
    options = {
        "H": heads,
        "G": linear_groups,
        "COPIES": linear_groups // groups,
        "K": key,
        "R": 0 if rope is None else cos.shape[-1],
        "TURN": rope is not None,
        "FEATURES": features is not None,
        "BOTH": both,
        "MAP": has_map,
        "W": rings.window if rings else 0,
        "PAGED": paged,
        "BK": power_of_two(key),
        "BF": tile,
        "ROWS": rows,
        "num_warps": 1 if not has_map else 4 if tile * power_of_two(key) <= 8192 else 8,
    }
    _launch((triton.cdiv(batch, rows), programs), sizes, tuple(options), tuple(options.values()))(*tensors)
    if rope is not None:
        q_BHK, k_BGK = near[:, :heads], near[:, heads:]
    return (query_out, key_out, q_BHK, k_BGK) if features is not None else (None, None, q_BHK, k_BGK)


def fits(columns: int, both: bool) -> bool:
    """Return whether a program can hold W, (U, U), of u with that many columns."""
    return power_of_two(columns) * power_of_two(columns // 2 if both else columns) <= MAX_TILE
