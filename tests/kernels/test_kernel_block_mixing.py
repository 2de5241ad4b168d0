"""Block mixing on a GPU or under Triton's interpreter: outputs and gradients against the definition in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.kernel_rows import patch_tensor_loops
from helpers.mask_rows import dense_output, make_mask, random_rows, relative_error, slice_rows, to_dtype

from surgery.core.dispatch import load_kernels, record_dispatch, use_kernels
from surgery.mixers.masks.block_mixing import Blocks, blocks_bidirectional, blocks_from_zero
from surgery.mixers.masks.toeplitz_block_mixing import (
    ToeplitzBlocks,
    block_scan,
    block_scan_bidirectional,
    toeplitz_bidirectional,
    toeplitz_causal,
    toeplitz_step,
)

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="too large for Triton's interpreter")
TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1.5e-2, 3e-2), torch.float16: (2e-3, 4e-3)}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    patch_tensor_loops(monkeypatch)
    load_kernels()


def relative(x, expected):
    expected = expected.double()
    gap, scale = (x.detach().double() - expected).norm(), expected.norm()
    return (gap / scale.clamp_min(1e-30)).item()


def check_kernels(run, inputs, dtype, kept=(), rounding=0.0):
    """run(*inputs) by kernels against the reference in float64: outputs and gradients of every input that has one.
    kept: positions of inputs that stay float32 (parameters, states). rounding: what exponents miss by, being
    float32.
    """
    exact, quick = [], []
    for n, x in enumerate(inputs):
        if x is None or not x.is_floating_point():
            exact.append(x)
            quick.append(x)
            continue
        rounded = x.to(torch.float32 if n in kept else dtype)
        exact.append(rounded.double().requires_grad_())
        quick.append(rounded.clone().requires_grad_())
    with use_kernels("reference"):
        expected = run(*exact)
    with use_kernels("kernel"):
        outs = run(*quick)
    pairs = [(f"out {n}", out, want) for n, (out, want) in enumerate(zip(outs, expected))]
    wanted = [torch.randn_like(x) for x in outs]
    torch.autograd.backward(expected, [w.double() for w in wanted])
    torch.autograd.backward(outs, wanted)
    grads = [(f"gradient {n}", a.grad, b.grad) for n, (a, b) in enumerate(zip(quick, exact)) if hasattr(b, "grad")]
    grads = [(name, a, b) for name, a, b in grads if b is not None]
    tight, loose = TOLERANCE[dtype]
    for bound, found_pairs in ((max(tight, rounding), pairs), (max(loose, rounding), grads)):
        for name, a, b in found_pairs:
            assert a is not None and torch.isfinite(a).all(), name
            assert relative(a, b) < bound, (name, relative(a, b))


def kernel_of(components, groups, per_group, rates=(1e-3, 2.0)):
    low, high = torch.tensor(rates).log10()
    rate_RG = torch.logspace(float(low), float(high), components)[:, None].repeat(1, groups)
    return rate_RG * (1 + 0.1 * torch.rand_like(rate_RG)), torch.rand(components, groups, per_group) + 0.1


SMALL = [(1, 1, 1, 1, 2, 3, 1), (2, 1, 1, 21, 5, 7, 3), (1, 1, 2, 50, 4, 7, 4), (1, 1, 3, 20, 3, 5, 16)]
LARGE = [(2, 3, 1, 1024, 64, 64, 8), (1, 2, 4, 515, 64, 65, 4), (1, 12, 1, 128, 64, 64, 16), (2, 1, 2, 2100, 33, 65, 8)]
CASES = [(torch.float32, s) for s in SMALL] + [(torch.bfloat16, SMALL[1]), (torch.float16, SMALL[2])]
ON_CARD = [pytest.param(d, s, marks=ON_GPU) for d in TOLERANCE for s in LARGE]
EXTREME = [(1e-9, 1e-6), (30.0, 200.0), (1e-4, 60.0)]


def sums_of(batch, groups, per_group, blocks, features, values, components, rates=(1e-3, 2.0)):
    torch.manual_seed(blocks)
    x = torch.randn(batch, groups, blocks, features, values)
    return x, *kernel_of(components, groups, per_group, rates), torch.randn(batch, components, groups, features, values)


@pytest.mark.parametrize("dtype, shape", CASES + ON_CARD)
def test_scan(dtype, shape):
    inputs = [x.to(DEVICE) for x in sums_of(*shape)]
    check_kernels(block_scan, inputs, dtype, kept=(1, 2, 3))


@pytest.mark.parametrize("shape", [SMALL[1], pytest.param(LARGE[3], marks=ON_GPU)])
def test_scan_of_ragged_rows(shape):
    inputs = [x.to(DEVICE) for x in sums_of(*shape)]
    count_B = torch.tensor([shape[3] - 3, 0], device=DEVICE)
    with use_kernels("kernel"):
        assert block_scan(*inputs, count_B)[0][1].abs().max() == 0
    check_kernels(lambda *given: block_scan(*given, count_B), inputs, torch.float32, kept=(1, 2, 3))


@pytest.mark.parametrize("rates", EXTREME)
@pytest.mark.parametrize("both", [False, True])
def test_scan_of_extreme_rates(rates, both):
    inputs = [x.to(DEVICE) for x in sums_of(1, 1, 1, 40, 4, 5, 3, rates)]
    rounding = 2**-24 * float(inputs[1].max()) * 40  # of rate x blocks, whose differences are exponents
    if both:
        check_kernels(
            lambda *given: [block_scan_bidirectional(*given)], inputs[:3], torch.float32, kept=(1, 2), rounding=rounding
        )
    else:
        check_kernels(block_scan, inputs, torch.float32, kept=(1, 2, 3), rounding=rounding)


@pytest.mark.parametrize("dtype, shape", CASES + ON_CARD)
def test_scan_both_ways(dtype, shape):
    inputs = [x.to(DEVICE) for x in sums_of(*shape)[:3]]
    check_kernels(lambda *given: [block_scan_bidirectional(*given)], inputs, dtype, kept=(1, 2))


def test_scan_without_a_state_of_a_view():
    x, rate, weight, _ = (x.to(DEVICE) for x in sums_of(2, 2, 1, 21, 4, 5, 2))
    check_kernels(lambda x, *given: block_scan(x.transpose(1, 2)[:, :, ::2].transpose(3, 4), *given)[:1],
           [x.transpose(1, 2).contiguous(), rate, weight], torch.float32, kept=(1, 2))  # fmt: skip


def tokens_of(batch, groups, per_group, length, features, values, components):
    torch.manual_seed(length)
    q = torch.randn(batch, groups, per_group, length, features)
    k, v = torch.randn(batch, groups, length, features), torch.randn(batch, groups, length, values)
    state = torch.randn(batch, components, groups, features, values)
    return q, k, v, *kernel_of(components, groups, per_group, (0.02, 1.5)), state


# batch, groups, per group, tokens, features, values, components, block
SHORT = [(1, 1, 1, 1, 3, 2, 1, 16), (2, 1, 1, 21, 3, 17, 3, 16), (1, 1, 2, 70, 18, 3, 2, 70)]
LONG = [
    (2, 3, 1, 1000, 64, 65, 8, 64),
    (1, 2, 4, 2048, 128, 128, 4, 128),
    (1, 12, 1, 1536, 64, 64, 16, 64),
    (1, 2, 1, 1300, 64, 65, 3, 500),
]
TOKENS = [(torch.float32, s) for s in SHORT] + [(torch.bfloat16, s) for s in SHORT[1:]]
FEW = [TOKENS[1], TOKENS[4]]
ON_CARD_TOKENS = [pytest.param(d, s, marks=ON_GPU) for d in TOLERANCE for s in LONG]


@pytest.mark.parametrize("dtype, shape", TOKENS + ON_CARD_TOKENS)
def test_causal_attention(dtype, shape):
    inputs = [x.to(DEVICE) for x in tokens_of(*shape[:-1])]
    batch, per_group, length, block = shape[0], shape[2], shape[3], shape[-1]
    start_B = torch.tensor([5 + block, 2 * block][:batch], device=DEVICE)
    count_B = torch.full_like(start_B, length)
    place = {"count_B": count_B, "block": block, "chunk": block}

    def resumed(*given):
        *operands, state = given
        return toeplitz_causal(*operands, first_BRGFV=state, start_B=start_B, **place)

    check_kernels(resumed, inputs, dtype, kept=(3, 4, 5))
    if DEVICE == "cpu" and per_group > 1:
        return
    zero_B = torch.zeros_like(start_B)

    def from_zero(*given):
        return toeplitz_causal(*given, first_BRGFV=None, start_B=zero_B, **place)[:1]

    check_kernels(from_zero, inputs[:5], dtype, kept=(3, 4))


@pytest.mark.parametrize("dtype, shape", FEW + ON_CARD_TOKENS)
def test_attention_both_ways(dtype, shape):
    inputs = [x.to(DEVICE) for x in tokens_of(*shape[:-1])[:5]]
    check_kernels(lambda *given: [toeplitz_bidirectional(*given, shape[-1])], inputs, dtype, kept=(3, 4))


def test_attention_of_views():
    """Tokens before heads, as projections give them; a gradient whose rows are spread out."""
    q, k, v, *kernel = (x.to(DEVICE) for x in tokens_of(1, 2, 1, 20, 3, 2, 2)[:5])
    zero_B = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def run(q, k, v, *kernel):
        q, k, v = q.permute(0, 2, 3, 1, 4), k.transpose(1, 2), v.permute(0, 3, 2, 1)
        place = {"start_B": zero_B, "count_B": zero_B + 20}
        out, _ = toeplitz_causal(q, k, v, *kernel, first_BRGFV=None, **place, block=16, chunk=16)
        return [out.transpose(3, 4)]

    views = q.permute(0, 3, 1, 2, 4).contiguous(), k.transpose(1, 2).contiguous(), v.permute(0, 3, 2, 1).contiguous()
    check_kernels(run, (*views, *kernel), torch.float32, kept=(3, 4))


@ON_GPU
def test_more_than_2_31_numbers():
    x = torch.randn(1, 9, 65536, 64, 64, device=DEVICE, dtype=torch.bfloat16)
    kernel = [part.to(DEVICE) for part in kernel_of(4, 9, 1)]
    with use_kernels("kernel"), torch.no_grad():
        whole, last = block_scan(x, *kernel)
        alone, last_alone = block_scan(x[:, 8:], *(part[:, 8:] for part in kernel))
        again, _ = block_scan(x, *kernel)
    assert torch.equal(whole[:, 8:], alone) and torch.equal(last[:, :, 8:], last_alone)
    assert torch.equal(whole, again)


@pytest.mark.parametrize("dtype, shape", FEW + ON_CARD_TOKENS)
def test_free_mixing(dtype, shape):
    q, k, v = (x.to(DEVICE) for x in tokens_of(*shape[:-1])[:3])
    (_, groups, per_group, length), block = q.shape[:4], shape[-1]
    count = -(-length // block) + 1
    matrix = torch.rand(groups, per_group, count, count, device=DEVICE).softmax(-1)
    check_kernels(lambda *given: [blocks_bidirectional(*given, block)], (q, k, v, matrix), dtype, kept=(3,))

    def causal(q, k, v, matrix):
        out, sums = blocks_from_zero(q, k, v, matrix.tril(), block, chunk=16, keep=True)
        return out, sums[:, : -(-length // block)]

    check_kernels(causal, (q, k, v, matrix), dtype, kept=(3,))


@pytest.mark.parametrize("count", [[37, 0], [16, 31]])
def test_states_of_ragged_rows(count):
    q, k, v, *kernel, state = (x.to(DEVICE) for x in tokens_of(2, 1, 1, 40, 3, 2, 2))
    start_B, count_B = torch.tensor([16, 7], device=DEVICE), torch.tensor(count, device=DEVICE)
    real = (torch.arange(40, device=DEVICE) < count_B[:, None])[:, None, :, None]

    def run(q, k, v, rate, weight, state):
        place = {"start_B": start_B, "count_B": count_B}
        operands = q, k * real, v * real, rate, weight
        out, last = toeplitz_causal(*operands, first_BRGFV=state, **place, block=16, chunk=16)
        return out * real.unsqueeze(2), last

    check_kernels(run, (q, k, v, *kernel, state), torch.float32, kept=(3, 4, 5))


@pytest.mark.parametrize("shape", [(2, 1, 1, 5, 3, 2), (3, 2, 2, 9, 17, 4), (64, 12, 1, 64, 65, 8)])
def test_steps(shape):
    batch, groups, per_group = shape[:3]
    if batch > 3 and DEVICE == "cpu":
        pytest.skip("too large for Triton's interpreter")
    q, k, v, *kernel, state = (x.to(DEVICE) for x in tokens_of(batch, groups, per_group, 1, *shape[3:]))
    start_B = torch.tensor([16, 17, 32], device=DEVICE).repeat(batch)[:batch]
    count_B = torch.tensor([1, 1, 0], device=DEVICE).repeat(batch)[:batch]
    v = v * count_B[:, None, None, None]
    place = {"start_B": start_B, "count_B": count_B, "block": 16}
    with use_kernels("kernel"):
        outs = toeplitz_step(q, k, v, *kernel, sum_BRGFV=state, **place)
    with use_kernels("reference"):
        expected = toeplitz_step(*(x.double() for x in (q, k, v, *kernel)), sum_BRGFV=state.double(), **place)
    for out, want in zip(outs, expected):
        assert relative(out, want) < 1e-5


@pytest.mark.parametrize("config", [ToeplitzBlocks(block=16, components=3), Blocks(block=16, count=6)])
def test_masks_take_them(config):
    """In pieces, rows at their own positions, a normaliser's column of ones beside the values."""
    mask = make_mask(config)
    begin = [0, 0] if isinstance(config, Blocks) else [19, 0]
    rows = random_rows(mask, "kernel", 37, begin, [37, 20], features=5, values=17)
    with use_kernels("reference"):
        expected = dense_output(mask, rows)
    mask, quick = mask.float().to(DEVICE), on_device(to_dtype(rows, torch.float32))
    state = mask.empty_state(2, 5, 17, DEVICE)
    with torch.no_grad(), use_kernels("kernel"), record_dispatch() as names:
        first, state = mask.chunked(slice_rows(quick, 0, 21), state, 8)
        second, state = mask.chunked(slice_rows(quick, 21, 36), state, 8)
        third, _ = mask.step(slice_rows(quick, 36, 37), state)
    assert names >= ({"toeplitz_causal", "toeplitz_step"} if any(begin) else {"blocks_from_zero"})
    assert relative_error(torch.cat([first, second, third], 3).cpu(), expected.detach(), rows) < 1e-5


def on_device(rows):
    moved = {name: x.to(DEVICE) for name, x in vars(rows).items() if isinstance(x, torch.Tensor)}
    return replace(rows, **moved, signals={name: x.to(DEVICE) for name, x in rows.signals.items()})
