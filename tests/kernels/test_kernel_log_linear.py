"""Kernels of log-linear attention: outputs, buckets and gradients against the reference in float64."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

pytest.importorskip("triton")

from helpers.canaries import guard_allocations
from helpers.kernel_rows import (
    DEVICE,
    HALF_DTYPES,
    SIZES,
    TOLERANCE,
    gpu,
    patch_bfloat16_products,
    random_tokens,
    relative_errors,
)
from helpers.log_linear_chunks import log_linear_chunks

from surgery.core.dispatch import use_kernels
from surgery.kernels.ssd import layout as ssd_launch
from surgery.mixers.masks.log_linear import log_linear

pytestmark = pytest.mark.usefixtures("loops_of_tensors")


# B, G, J, T, F, V, queries and keys shared; starts; counts
SMALL = [
    ((1, 1, 1, 1, 16, 16, False), [0], [1]),
    ((2, 2, 1, 37, 16, 17, True), [0, 5], [37, 20]),
    ((1, 2, 2, 150, 16, 16, False), [496], [150]),
]
LARGE = [*zip(SIZES, ([0, 37], [1000], [0], [77], [64]), ([1000, 900], [517], [300], [200], [4160]))]


def worst(case, dtype=torch.float32, gates="mild", state=True, levels=12, chunk=16) -> float:
    (*shape, shared), start, count = case
    B, G, J, T, F, V = shape
    leaves = random_tokens(*shape, shared=shared, dtype=dtype, gates=gates)
    start_B, count_B = (torch.tensor(x, device=DEVICE) for x in (start, count))
    place = {"start_B": start_B, "count_B": count_B}
    real_BT = torch.arange(T, device=DEVICE) < count_B.unsqueeze(1)
    leaves.append(torch.rand(B, T, G, J, levels, device=DEVICE) + 0.1)
    if state:
        kept = max(start).bit_length()
        full_BL = (start_B.unsqueeze(1) >> torch.arange(kept, device=DEVICE)) & 1
        leaves.append(torch.randn(B, kept, G, F, V, device=DEVICE) * full_BL[..., None, None, None])

    def call(q, k, v, g, level, *buckets):
        k, v, g = (x * real_BT.view(B, 1, T, *[1] * (x.dim() - 3)).to(x.dtype) for x in (k, v, g))
        q, k = q.expand(-1, G, -1, -1, -1), k.expand(-1, G, -1, -1)
        first = buckets[0] if buckets else None
        out, after = log_linear(q, k, v, None, g, level, **place, buckets_BLGFV=first, chunk=chunk)
        real = real_BT[:, None, None, :, None].to(out.dtype)
        return out * real, after

    def ours(*given):
        with use_kernels("kernel"):
            operands = *given[:3], None, *given[3:5]
            assert log_linear.select_kernel(*operands, **place, buckets_BLGFV=None, chunk=chunk)
            return call(*given)

    def exact(*given):
        with use_kernels("reference"):
            return call(*given)

    return max(relative_errors(ours, exact, leaves))


@pytest.mark.parametrize("case", SMALL)
def test_small(case):
    assert worst(case) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("gates", ["none", "wild", "any"])
def test_gates_of_any_size(gates):
    assert worst(((1, 2, 1, 70, 16, 16, True), [3], [70]), gates=gates) < 2e-5


def test_in_parts(monkeypatch):
    """Of features and values, where all do not fit."""
    monkeypatch.setattr(ssd_launch, "MAX_FEATURES", 32)
    monkeypatch.setattr(ssd_launch, "MAX_VALUES", 16)
    assert worst(((1, 2, 1, 37, 24, 17, True), [5], [37])) < TOLERANCE[torch.float32]


def test_many_features(monkeypatch):
    """In half precision too."""
    patch_bfloat16_products(monkeypatch)
    assert worst(((1, 1, 2, 37, 520, 17, False), [0], [37]), torch.bfloat16, state=False) < TOLERANCE[torch.bfloat16]


def test_levels_beyond_the_last_share_its_lambda():
    assert worst(((1, 1, 1, 70, 16, 16, False), [0], [70]), state=False, levels=3) < TOLERANCE[torch.float32]


def test_sequences_in_one_row():
    """Each as if alone."""
    ends = [0, 5, 5, 58, 90]
    leaves = random_tokens(1, 2, 1, ends[-1], 16, 16)
    leaves.append(torch.rand(1, ends[-1], 2, 1, 9, device=DEVICE) + 0.1)
    cu_seqlens = torch.tensor(ends, device=DEVICE)
    zero_B = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def alone(q, k, v, g, level):
        outs = []
        for a, b in itertools.pairwise(ends):
            if b > a:
                parts = q[:, :, :, a:b], k[:, :, a:b], v[:, :, a:b], None, g[:, :, a:b], level[:, a:b]
                place = {"start_B": zero_B, "count_B": zero_B + b - a}
                outs.append(log_linear.reference(*parts, **place, buckets_BLGFV=None, chunk=16)[0])
        return [torch.cat(outs, 3)]

    def ours(*x):
        return [log_linear_chunks(*x, cu_seqlens=cu_seqlens, chunk=16)]

    assert max(relative_errors(ours, alone, leaves)) < 1e-5


def test_log_linear_rows_keep_to_their_places():
    """Issue 17, 1: rows whose number of chunks is no multiple of 8 shared places with the next group's first rows, and
    the last group's ran past the end."""
    from surgery.kernels.log_linear.states import launch_build_slots

    B, G, T, F, chunk = 5, 1, 225, 16, 16  # at most 15 chunks, so that rows would drift by 7 places in 8
    _, k, v, gates = random_tokens(B, G, 1, T, F, F, gates="none")
    q = k.unsqueeze(2)
    start_B = torch.arange(B, device=DEVICE) % 3 * chunk
    lay = ssd_launch.ChunkTable.from_rows(start_B, T, chunk)
    assert lay.count % 8 == 7 and lay.units(3) == B * 3
    with guard_allocations() as buffers:
        plan = ssd_launch.ChunkedPlan.from_inputs(lay, q, k, v, gates)
        (slots, *_), _ = launch_build_slots(plan, start_B, 0)
    buffers.check()
    for row in range(B):  # a slot behind chunk e - 1 has the last lowest-bit(e) chunks
        first = int(start_B[row]) // chunk
        for e in range(first + 1, first + -(-T // chunk) + 1):
            low = max(e - (e & -e), first) - first
            a, b = low * chunk, min((e - first) * chunk, T)
            exact = k[row, :, a:b].mT.double() @ v[row, :, a:b].double()
            got = slots[:, row * lay.count + e - 1 - first]
            assert (got - exact).norm() <= 1e-5 * exact.norm(), (row, e)


def test_log_linear_places_are_one_sequence_s_own():
    """For any rows, starts, lengths and chunks: the places of whole eights, in the tree's buffers and in its grids, as
    the kernel counts them. Another sequence has none of them, and none lies outside."""
    from surgery.kernels.log_linear.states import tops_of

    draw, tops_of = random.Random(0), tops_of.fn
    for _ in range(300):
        seqs, chunk = draw.randint(1, 40), draw.choice([16, 32, 64])
        packed = draw.random() < 0.5
        lengths = [draw.randint(0 if packed else 1, 3000)] * seqs
        starts = [0] * seqs if packed else [draw.randint(0, 5000) for _ in range(seqs)]
        if packed:
            lengths = [draw.choice([0, 1, chunk, draw.randint(0, 3000)]) for _ in range(seqs)]
            ends = torch.tensor([0, *itertools.accumulate(lengths)])
            lay = ssd_launch.ChunkTable.from_cu_seqlens(ends, int(ends[-1]), chunk)
            assert lay.first_of is not None
            bases = lay.first_of.tolist()
        else:
            lay = ssd_launch.ChunkTable.from_rows(torch.tensor(starts), lengths[0], chunk)
            bases = [seq * lay.count for seq in range(seqs)]
        firsts = [start // chunk for start in starts]
        counts = [-(-(start % chunk + n) // chunk) if n else 0 for start, n in zip(starts, lengths)]
        taken = {}
        for seq, (base, first, count) in enumerate(zip(bases, firsts, counts)):
            assert base + count <= lay.places and (lay.varlen or count <= lay.count)
            for e in range(first + 1, first + count + 1):
                if e % 8 == 0:
                    place = tops_of(seq, base, lay.count, lay.varlen) - (first >> 3) - 1 + (e >> 3)
                    assert 0 <= place < lay.units(3) and taken.setdefault(place, seq) == seq
        for shift in (3, 6, 9):
            owners, units = lay.owners(shift).tolist(), {}
            for m in range(lay.units(shift)):  # which eights of which sequence the programs of a launch take
                if lay.varlen:
                    seq = owners[m]
                    unit = m - (bases[seq] >> shift) - seq
                else:
                    seq, unit = divmod(m, (lay.count >> shift) + 2)
                    unit += firsts[seq] >> shift
                units.setdefault(seq, []).append(unit)
            for seq, (first, count) in enumerate(zip(firsts, counts)):
                wanted = range(first >> shift, ((first + count - 1) >> shift) + 1) if count else []
                assert set(wanted) <= set(units[seq]) and len(set(units[seq])) == len(units[seq])


@gpu
@pytest.mark.parametrize("gates", ["mild", "wild", "any"])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("case", LARGE)
def test_half_precision(case, dtype, gates):
    assert worst(case, dtype, gates, chunk=64) < TOLERANCE[dtype]


@gpu
@pytest.mark.parametrize("case", LARGE)
def test_float32(case):
    assert worst(case, chunk=64) < TOLERANCE[torch.float32]


@gpu
def test_twice_the_same():
    """Whatever the order in which programs run."""
    leaves = random_tokens(1, 8, 1, 20000, 128, 64, shared=True, dtype=torch.bfloat16)
    leaves.append(torch.rand(1, 20000, 8, 1, 20, device=DEVICE))
    runs = []
    for _ in range(2):
        given = [x.detach().requires_grad_() for x in leaves]
        out = log_linear_chunks(*given)
        runs.append([out, *torch.autograd.grad(out.float().square().sum(), given)])
    assert all(torch.equal(a, b) for a, b in zip(*runs))
