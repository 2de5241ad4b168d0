"""Kernels of pieces of several sequences in one row: outputs and states against the references in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from helpers.kernel_rows import DEVICE, gpu
from helpers.slow import slow_where

from surgery.core.dispatch import record_dispatch, use_kernels
from surgery.mixers import MIXERS, AttentionShape, MixerInputs, mixer_config
from surgery.mixers.common.packed_pieces import PackedPieces
from surgery.mixers.common.window_hybrid import gather_window, store_window
from surgery.mixers.masks.log_linear import bucket_plan, count_sums, log_linear_in_pool, log_linear_packed
from surgery.mixers.masks.semiseparable import semiseparable_packed

pytestmark = pytest.mark.usefixtures("loops_of_tensors")

# tokens of each piece, and of its sequence before it: none, within a chunk, at its border, and over several chunks
SMALL = [
    ((1, 0, 35, 3, 32, 40), (0, 5, 30, 64, 33, 100)),
    ((2, 31, 9), (0, 0, 0)),
    ((0, 35, 0, 3, 4), (0, 2, 0, 23, 1)),  # pieces without a chunk, before others that go on within one
]
LARGE = [((1, 2, 63, 64, 65, 200, 1000), (0, 8_191, 7, 64, 0, 100, 3_000))]


def draw(pieces: PackedPieces, delta: bool, G=2, J=2, F=16, V=17):
    """q, k, v, beta or None, log-gates of the row, in float64."""
    torch.manual_seed(0)
    tokens = pieces.length
    q, k, v = (
        torch.randn(1, *shape, dtype=torch.float64) for shape in ((G, J, tokens, F), (G, tokens, F), (G, tokens, V))
    )
    k = torch.nn.functional.normalize(k, dim=-1)
    beta = torch.rand(1, G, tokens, dtype=torch.float64) if delta else None
    gates = -0.1 * torch.rand(1, G, tokens, dtype=torch.float64)
    return [None if t is None else t.to(DEVICE) for t in (q, k, v, beta, gates)]


def check(op, tokens, name: str, **state) -> None:
    """Check that a kernel computes the call in float32, and the error of its outputs relative to float64."""
    wanted = op.reference(*tokens, **state)
    single = [t.float() if isinstance(t, torch.Tensor) else t for t in tokens]
    state = {n: t.float() if isinstance(t, torch.Tensor) else t for n, t in state.items()}
    with use_kernels("kernel"), record_dispatch() as names:
        found = op(*single, **state)
    assert name in names
    for got, right in zip(found, wanted, strict=True):
        error = (got.double() - right).abs().max() / right.abs().max()
        assert error < 1e-5


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(("counts", "seen"), [*SMALL, *(pytest.param(*case, marks=gpu) for case in LARGE)])
def test_gated_masks(counts, seen, delta):
    pieces = PackedPieces(counts, seen, DEVICE)
    *tokens, gates = draw(pieces, delta)
    first = torch.randn(len(counts), 1, 2, 16, 17, dtype=torch.float64, device=DEVICE)
    tokens = (*tokens, gates.unsqueeze(1), None)
    check(semiseparable_packed, tokens, "semiseparable_packed", first_SRGFV=first, pieces=pieces, chunk=64)


@pytest.mark.parametrize(
    ("counts", "seen", "chunk"),
    [
        *slow_where(
            lambda counts, seen, chunk: chunk == 32 and (counts, seen) == SMALL[0],
            [(*case, chunk) for case in SMALL for chunk in (32, 64)],
        ),
        *(pytest.param(*case, chunk, marks=gpu) for case in LARGE for chunk in (32, 64)),
    ],
)
def test_log_linear_masks_of_the_delta_rule(counts, seen, chunk):
    pieces = PackedPieces(counts, seen, DEVICE)
    tokens = draw(pieces, True)
    levels = pieces.max_seen.bit_length()
    bucket_L = torch.arange(levels, device=DEVICE)
    alive_SL = (pieces.seen_R.unsqueeze(1) >> bucket_L) & 1  # a bucket for each set bit; the others are zeros
    buckets = torch.randn(len(counts), levels, 2, 16, 17, dtype=torch.float64, device=DEVICE)
    buckets *= alive_SL[..., None, None, None]
    level = torch.rand(1, pieces.length, 2, 2, 12, dtype=torch.float64, device=DEVICE)
    state = {"buckets_SLGFV": buckets, "pieces": pieces, "chunk": chunk, "levels": levels}
    check(log_linear_packed, (*tokens, level), "log_linear_packed", **state)


BITS = (0, 2, 5, 7)


def is_long(counts, seen, block_bits):
    """Return whether a case takes seconds. Each number of bits is in one of the long cases, and in all of one sequence."""
    return ((counts, seen) == SMALL[0] and block_bits in (2, 7)) or (
        (counts, seen) == SMALL[2] and block_bits in (0, 5)
    )


@pytest.mark.parametrize(
    ("counts", "seen", "block_bits"),
    [
        *slow_where(is_long, [(*case, bits) for case in SMALL for bits in BITS]),
        *(pytest.param(*case, bits, marks=gpu) for case in LARGE for bits in BITS),
    ],
)
def test_log_linear_masks_in_pages(counts, seen, block_bits):
    """Pages in any order, NaN where a sequence has nothing; a sum for each bit from block_bits on and one for the others."""
    pieces = PackedPieces(counts, seen, DEVICE)
    tokens = draw(pieces, True)
    level = torch.rand(1, pieces.length, 2, 2, 3 if block_bits == 2 else 8, dtype=torch.float64, device=DEVICE)
    tokens, sums = (*tokens, level), count_sums(pieces.max_seen, block_bits) + 1
    alive_RN, _ = bucket_plan(pieces.seen_R, pieces.count_R, block_bits, sums)
    page_R = torch.randperm(len(counts) + 1, device=DEVICE)[:-1]
    pool = torch.full((len(counts) + 1, sums, 2, 16, 17), torch.nan, dtype=torch.float64, device=DEVICE)
    pool[page_R] = torch.randn_like(pool[1:]).masked_fill(~alive_RN[..., None, None, None], torch.nan)
    given = {"page_R": page_R, "pieces": pieces, "chunk": 64, "block_bits": block_bits}
    pools = pool.clone(), pool.float()
    wanted = log_linear_in_pool.reference(*tokens, pool_PNGFV=pools[0], **given)
    with use_kernels("kernel"), record_dispatch() as names:
        got = log_linear_in_pool(*(t.float() for t in tokens), pool_PNGFV=pools[1], **given)
    assert "log_linear_in_pool" in names
    assert (got.double() - wanted).abs().max() / wanted.abs().max() < 1e-5
    left_RN, _ = bucket_plan(pieces.end_R, pieces.count_R, block_bits, sums)
    exact, found = (t[page_R][left_RN] for t in pools)
    assert not exact.isnan().any() and (found.double() - exact).abs().max() / exact.abs().max() < 1e-5
    other = [page for page in range(len(pool)) if page not in page_R.tolist()]
    assert pools[1][other].isnan().all()


# rows as wide as a tile, and narrower or wider than its columns
ROWS = [
    {"k": (2, 8), "v": (2, 4), "gate": (2,), "linear_k": (2, 8)},
    {"k": (3, 5), "v": (2, 700), "gate": (3,), "beta": (1,)},
]


@pytest.mark.parametrize("shapes", ROWS, ids=["even", "odd"])
@pytest.mark.parametrize(("window", "sinks"), [(8, 2), (0, 2), (8, 0)])
@pytest.mark.parametrize(
    ("counts", "seen"), [((20,), (0,)), ((20,), (3,)), ((5, 5), (0, 30)), ((2, 0, 9), (0, 4, 7)), SMALL[0]]
)
def test_windows_in_pages(counts, seen, window, sinks, shapes):
    """Copies of tokens, rings and sinks, bit for bit; what no sequence has written to its page is not read."""
    pieces, slots, generator = (
        PackedPieces(counts, seen, DEVICE),
        window + (window > 0),
        torch.Generator().manual_seed(0),
    )
    plan = pieces.window_plan(window, sinks, slots, 64)
    new = {name: torch.randn(pieces.length, *shape, generator=generator).to(DEVICE) for name, shape in shapes.items()}
    page_R = torch.randperm(len(counts) + 1, generator=generator)[:-1]
    pool = {
        f"ring.{name}": torch.randn(len(counts) + 1, slots, *shape, generator=generator)
        for name, shape in shapes.items()
    }
    pool |= {f"sink.{name}": torch.randn(len(counts) + 1, sinks, *shapes[name], generator=generator) for name in "kv"}
    for t in pool.values():
        unwritten_RS = torch.arange(t.shape[1]) >= torch.tensor(seen).unsqueeze(1)
        t[page_R] = t[page_R].masked_fill(unwritten_RS.view(*unwritten_RS.shape, *[1] * (t.dim() - 2)), torch.nan)
    page_R, pools = page_R.to(DEVICE), [{name: t.to(DEVICE, copy=True) for name, t in pool.items()} for _ in range(2)]
    wanted = gather_window.reference(new["k"], new, pools[0], page_R, plan, list(shapes))
    store_window.reference(new["k"], new, pools[0], page_R, plan)
    with use_kernels("kernel"), record_dispatch() as names:
        found = gather_window(new["k"], new, pools[1], page_R, plan, list(shapes))
        store_window(new["k"], new, pools[1], page_R, plan)
    assert names == {"gather_window", "store_window"}
    for got, right in zip(found, wanted, strict=True):
        assert got.keys() == right.keys()
        assert all(torch.equal(got[name], t) and t.isfinite().all() for name, t in right.items())
    assert all(torch.equal(pools[1][name].nan_to_num(7), t.nan_to_num(7)) for name, t in pools[0].items())


WINDOW = {"window": 8, "sinks": 2, "rope": "both", "features": "hedgehog", "scores": "delta"}


def mixer_and_pieces(mask: dict, counts, seen):
    """A mixer with random parameters, inputs of its pieces, and the states before them."""
    config = mixer_config({"mixer": "linear", "mask": mask, **WINDOW})
    shape = AttentionShape(dim=24, heads=4, groups=2, key=8, value=16, scaling=0.35, rotary=8)
    torch.manual_seed(0)
    mixer: Any = MIXERS[config](config, shape).requires_grad_(False).eval().to(DEVICE)

    def inputs(tokens):
        heads = (torch.randn(1, n, tokens, d, device=DEVICE) for n, d in ((4, 8), (2, 8), (2, 16)))
        angle = torch.randn(1, tokens, 8, device=DEVICE)
        return MixerInputs(*heads, torch.randn(1, tokens, 24, device=DEVICE), rope=(angle.cos(), angle.sin()))

    pieces = PackedPieces(counts, seen, DEVICE)
    state = mixer.empty_state(len(seen), DEVICE)
    if any(seen):
        state = mixer.mix_packed(inputs(sum(seen)), PackedPieces(seen, [0] * len(seen), DEVICE), state)[1]
    return mixer, inputs(pieces.length), pieces, state


MASKS = [{"name": "gates"}, {"name": "hierarchical", "block": 4}]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask["name"])
def test_a_mixer_with_a_window(mask):
    mixer, inputs, pieces, state = mixer_and_pieces(mask, (1, 35, 3, 12), (5, 12, 33, 2))
    out, after = mixer.mix_packed(inputs, pieces, state)
    with use_kernels("kernel"), record_dispatch() as names:
        got, got_after = mixer.mix_packed(inputs, pieces, state)
    assert {"local_attention", "gather_window", "store_window"} < names
    assert names & {"semiseparable_packed", "log_linear_in_pool"}
    torch.testing.assert_close(got, out, rtol=0, atol=1e-4)
    for name, t in after.tensors.items():
        torch.testing.assert_close(got_after.tensors[name], t, rtol=0, atol=1e-4)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask["name"])
def test_nothing_waits_for_the_gpu(mask):
    mixer, inputs, pieces, state = mixer_and_pieces(mask, (100, 35, 3, 12), (5, 12, 33, 2))
    mixer.mix_packed(inputs, pieces, state)  # compiles the kernels
    pieces = PackedPieces(pieces.counts, pieces.seen, DEVICE)  # whose tables are not on the GPU yet
    torch.cuda.set_sync_debug_mode("error")
    try:
        mixer.mix_packed(inputs, pieces, state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
