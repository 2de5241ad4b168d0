"""States of masks of gates between chunks (Dao and Gu 2024, "Transformers are SSMs", section 6), and their gradients.

    S_n+1 = exp(gates of chunk n) S_n + sum of k v^T of chunk n, as it stands at the chunk's end

One program walks through all chunks of a sequence with its tile of a state in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.ssd.chunk import chunk_state, load_gate_sums, load_gate_total, load_sequence, program_tile
from surgery.kernels.ssd.layout import ChunkTable, TokenTensors, power_of_two, product_options, state_dtype

# Tiles and pipelining: the fastest on one H200, 2026-11-21, B = 2, 48 heads, K = 128, V = 64, T = 8192.
BLOCK_K, BLOCK_V, STAGES = 64, 32, 3


@triton.jit(do_not_specialize=["count", "T", "M"])
def pass_forward(
    k, v, sums, slots, first_state, last_state, start, ends, seq_of, first_of,
    count, T, M, G, skb, skg, skt, svb, svg, svt,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FIRST: tl.constexpr,
    VARLEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """slots (G, M, F, V): the state before each chunk; first_state, last_state (seqs, G, F, V) float32."""
    seq = tl.program_id(0)
    row, begin, length, _, _, base = load_sequence(seq, start, ends, first_of, count, T, C, VARLEN)
    g = tl.program_id(1).to(tl.int64)
    kk_K, vv_V, tile_KV, inside_KV = program_tile(F, V, BK, BV)
    wide, at = row.to(tl.int64), begin.to(tl.int64)
    k += wide * skb + g * skg + at * skt
    v += wide * svb + g * svg + at * svt
    here = g * M + base
    state_KV = tl.zeros([BK, BV], tl.float32)
    if FIRST:
        state_KV += tl.load(first_state + (seq * G + g) * F * V + tile_KV, mask=inside_KV, other=0.0)
    for n in tl.range(0, (length + C - 1) // C, num_stages=STAGES):
        tl.store(slots + (here + n) * F * V + tile_KV, state_KV.to(slots.dtype.element_ty), mask=inside_KV)
        x_KV, total = chunk_state(
            k, v, sums, here + n, True, n * C, length, skt, svt, kk_K, vv_V, F, V, C, DOT, PRECISION
        )  # fmt: skip
        state_KV = tl.exp(total) * state_KV + x_KV
    tl.store(last_state + (seq * G + g) * F * V + tile_KV, state_KV, mask=inside_KV)


@triton.jit(do_not_specialize=["count", "T", "M"])
def pass_backward(
    q, sums, d_out, d_slots, d_first, d_last, start, ends, seq_of, first_of,
    count, T, M, G, J, sqb, sqg, sqj, sqt, sob, sog, soj, sot,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    VARLEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """d_slots (G, M, F, V): gradients of the state behind each chunk; d_first, d_last (seqs, G, F, V) float32."""
    seq = tl.program_id(0)
    row, begin, length, _, _, base = load_sequence(seq, start, ends, first_of, count, T, C, VARLEN)
    g = tl.program_id(1).to(tl.int64)
    x_C = tl.arange(0, C)
    kk_K, vv_V, tile_KV, inside_KV = program_tile(F, V, BK, BV)
    wide, at = row.to(tl.int64), begin.to(tl.int64)
    q += wide * sqb + g * sqg + at * sqt
    d_out += wide * sob + g * sog + at * sot
    here = g * M + base
    state_KV = tl.load(d_last + (seq * G + g) * F * V + tile_KV, mask=inside_KV, other=0.0)
    chunks = (length + C - 1) // C
    for i in tl.range(0, chunks * J, num_stages=STAGES):
        n = chunks - 1 - i // J
        j = (i % J).to(tl.int64)
        t_C = (n * C + x_C).to(tl.int64)
        ok_C = t_C < length
        q_CK = tl.load(
            q + j * sqj + t_C[:, None] * sqt + kk_K[None, :], mask=ok_C[:, None] & (kk_K < F)[None, :], other=0.0
        )
        do_CV = tl.load(
            d_out + j * soj + t_C[:, None] * sot + vv_V[None, :], mask=ok_C[:, None] & (vv_V < V)[None, :], other=0.0
        )
        coarse_C, fine_C = load_gate_sums(sums, here + n, C)
        if i % J == 0:
            tl.store(d_slots + (here + n) * F * V + tile_KV, state_KV.to(d_slots.dtype.element_ty), mask=inside_KV)
            coarse, fine = load_gate_total(sums, here + n, C)
            state_KV = tl.exp(coarse + fine) * state_KV
        do_CV = (do_CV.to(tl.float32) * tl.exp(coarse_C + fine_C)[:, None]).to(DOT)
        state_KV += tl.dot(tl.trans(q_CK.to(DOT)), do_CV, input_precision=PRECISION)
    tl.store(d_first + (seq * G + g) * F * V + tile_KV, state_KV, mask=inside_KV)


def _state_tiles(tokens: TokenTensors) -> tuple[int, int, int]:
    features, values = tokens.sizes[2:]
    block_k, block_v = min(power_of_two(features), BLOCK_K), min(power_of_two(values), BLOCK_V)
    return block_k, block_v, triton.cdiv(features, block_k) * triton.cdiv(values, block_v)


def launch_pass_forward(table: ChunkTable, tokens: TokenTensors, first_SGFV: Tensor | None) -> tuple[Tensor, Tensor]:
    """(slots_GMFV, last_SGFV), see `pass_forward`."""
    groups, _, features, values = tokens.sizes
    slots = tokens.v.new_empty(groups, table.places, features, values, dtype=state_dtype(tokens.v.dtype))
    last = tokens.sums.new_empty(table.seqs, groups, features, values)
    block_k, block_v, tiles = _state_tiles(tokens)
    pass_forward[(table.seqs, groups, tiles)](
        tokens.k, tokens.v, tokens.sums, slots, last if first_SGFV is None else first_SGFV, last, *table.tables(), table.count,
        table.length, table.places, groups, *tokens.k.stride()[:3], *tokens.v.stride()[:3], F=features,
        V=values, C=table.chunk, BK=block_k, BV=block_v, FIRST=first_SGFV is not None, VARLEN=table.varlen,
        **product_options(tokens.v.dtype), STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return slots, last


def launch_pass_backward(
    table: ChunkTable, tokens: TokenTensors, d_out: Tensor, d_last: Tensor
) -> tuple[Tensor, Tensor]:
    """(d_slots_GMFV, d_first_SGFV), see `pass_backward`."""
    groups, per_group, features, values = tokens.sizes
    d_slots = tokens.v.new_empty(groups, table.places, features, values, dtype=state_dtype(tokens.v.dtype))
    d_first = torch.empty_like(d_last)
    block_k, block_v, tiles = _state_tiles(tokens)
    pass_backward[(table.seqs, groups, tiles)](
        tokens.q, tokens.sums, d_out, d_slots, d_first, d_last, *table.tables(), table.count, table.length, table.places, groups,
        per_group, *tokens.q.stride()[:4], *d_out.stride()[:4], F=features, V=values, C=table.chunk,
        BK=block_k, BV=block_v, VARLEN=table.varlen, **product_options(tokens.v.dtype), STAGES=STAGES,
        num_warps=4,
    )  # fmt: skip
    return d_slots, d_first
