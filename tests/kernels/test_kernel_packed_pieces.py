"""Kernels of pieces of several sequences in one row: outputs and states against the references in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from helpers.kernel_rows import DEVICE, gpu

from surgery.core.dispatch import record_dispatch, use_kernels
from surgery.mixers import MIXERS, AttentionShape, MixerInputs, mixer_config
from surgery.mixers.common.packed_pieces import PackedPieces
from surgery.mixers.masks.log_linear import log_linear_packed
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


@pytest.mark.parametrize("chunk", [32, 64])
@pytest.mark.parametrize(("counts", "seen"), [*SMALL, *(pytest.param(*case, marks=gpu) for case in LARGE)])
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
    assert {"local_attention"} < names and any(name.endswith("_packed") for name in names)
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
