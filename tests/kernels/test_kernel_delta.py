"""Kernels with the delta rule's scores: outputs and gradients against the references in float64."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from helpers.kernel_rows import DEVICE, SIZES, gpu
from helpers.slow import slow_where

from surgery.core.dispatch import record_dispatch, use_kernels
from surgery.mixers.masks.log_linear import log_linear
from surgery.mixers.masks.semiseparable import semiseparable

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}

pytestmark = pytest.mark.usefixtures("loops_of_tensors")


# B, G, J, T, F, V, keys shared by the groups
SMALL = [(1, 1, 1, 1, 16, 16, False), (1, 2, 1, 21, 16, 17, True), (2, 1, 2, 37, 24, 16, False)]


def draw(B, G, J, T, F, V, shared, gates="mild", dtype=torch.float32, seed=0):
    """q, k, v, beta, gates: every one a leaf, k of unit norm, strided as mixers hand them over. Values are those of
    `dtype`."""
    torch.manual_seed(seed)
    q = torch.randn(B, T, G, J, F)
    k = torch.nn.functional.normalize(torch.randn(B, T, 1 if shared else G, F) + 0.5, dim=-1)
    v, beta = torch.randn(B, T, G, V), torch.rand(B, T, G)
    rate = {"none": torch.zeros(B, T, G), "mild": -0.1 * torch.rand(B, T, G)}
    sudden = torch.where(torch.rand(B, T, G) < 0.2, -1e4, -1e-3 * torch.rand(B, T, G))
    g = {**rate, "extreme": torch.where(torch.rand(B, T, G) < 0.2, 0.0, sudden)}[gates]
    half = lambda x: x.to(dtype).to(DEVICE)  # noqa: E731
    return {"q": half(q), "k": half(k), "v": half(v), "beta": beta.to(DEVICE), "gates": g.to(DEVICE)}


def laid_out(leaves, G):
    """As the ops take them."""
    k = leaves["k"].transpose(1, 2)
    k = k.expand(-1, G, -1, -1)
    return leaves["q"].permute(0, 2, 3, 1, 4), k, leaves["v"].transpose(1, 2), leaves["beta"].mT, leaves["gates"].mT


def run(call, leaves, dtype, choice):
    """(outputs, gradients) of `call(leaves)`, a fixed random direction back."""
    leaves = {
        n: t.detach().to(dtype[n] if isinstance(dtype, dict) else dtype).requires_grad_() for n, t in leaves.items()
    }
    with use_kernels(choice):
        outs = [o for o in call(leaves) if o is not None]
    torch.manual_seed(1)
    total = sum((o.double() * torch.randn(o.shape, dtype=torch.float64).to(DEVICE)).sum() for o in outs)
    total.backward()
    grads = {n: t.grad for n, t in leaves.items()}
    return dict(zip(["out", "state"], outs)) | {f"d{n}": t for n, t in grads.items()}


def judge(call, leaves, tolerance, kernel=None):
    right = run(call, leaves, torch.float64, "reference")
    with record_dispatch() as taken:
        ours = run(kernel or call, leaves, {n: t.dtype for n, t in leaves.items()}, "kernel")
    assert taken or kernel
    errors = {}
    for name, want in right.items():
        got = ours[name].double()
        assert got.isfinite().all(), name
        errors[name] = (got - want).norm().item() / max(want.norm().item(), 1e-9 * want.numel() ** 0.5)
    print({n: float(f"{e:.2g}") for n, e in errors.items()})  # pytest -rP shows it
    wrong = {n: e for n, e in errors.items() if e > tolerance * (10 if n == "dgates" and tolerance < 1e-4 else 1)}
    assert not wrong, (wrong, errors)


def gated_call(G, chunk):
    def call(leaves):
        q, k, v, beta, gates = laid_out(leaves, G)
        operands = q, k, v, beta, gates.unsqueeze(1), leaves.get("weight")
        return semiseparable(*operands, first_BRGFV=leaves.get("first"), chunk=chunk)

    return call


def check_gated(shape, gates, dtype, first, chunk=64):
    leaves = draw(*shape, gates, dtype)
    B, G, _, _, F, V, _ = shape
    if first:
        leaves["first"] = torch.randn(B, 1, G, F, V, device=DEVICE)
    judge(gated_call(G, chunk), leaves, TOLERANCE[dtype])


@pytest.mark.parametrize("shape, gates", [*zip(SMALL, ["none", "mild", "extreme"])])
def test_gated_delta(shape, gates):
    check_gated(shape, gates, torch.float32, gates != "none", chunk=16)


def test_step_sizes_up_to_two():
    """Negative eigenvalues (negative_eigenvalues: true): near 2, where transitions are almost reflections."""
    shape = (2, 1, 2, 70, 24, 16, False)
    leaves = draw(*shape, "mild")
    leaves["beta"] = 2 - 0.2 * leaves["beta"]
    judge(gated_call(1, 64), leaves, TOLERANCE[torch.float32])


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gates", ["mild", "extreme"])
@pytest.mark.parametrize("shape", SIZES)
def test_gated_delta_large(shape, gates, dtype):
    check_gated(shape, gates, dtype, first=gates == "mild")


def log_linear_call(G, starts, chunk, levels):
    def call(leaves):
        q, k, v, beta, gates = laid_out(leaves, G)
        start = torch.tensor(starts, device=DEVICE)
        count = torch.full_like(start, v.shape[2])
        state = {"start_B": start, "count_B": count, "buckets_BLGFV": leaves.get("buckets")}
        return log_linear(q, k, v, beta, gates, leaves["level"], **state, chunk=chunk)

    return call


def check_log_linear(shape, gates, dtype, starts, levels=12, chunk=64):
    leaves = draw(*shape, gates, dtype)
    B, G, J, T, _, _, _ = shape
    leaves["level"] = 0.1 + torch.rand(B, T, G, J, levels, device=DEVICE)
    judge(log_linear_call(G, starts[:B], chunk, levels), leaves, TOLERANCE[dtype])


TREES = [  # B, G, J, T, F, V, shared; levels; starts; gates
    ((1, 1, 1, 1, 16, 16, False), 4, (5,), "mild"),
    ((1, 1, 1, 100, 16, 17, True), 12, (0,), "extreme"),
    ((2, 1, 1, 40, 16, 16, True), 12, (21, 1009), "mild"),
    ((1, 1, 2, 70, 24, 16, False), 3, (0,), "mild"),
    # segments of more than eight chunks
    pytest.param((1, 1, 1, 600, 16, 16, False), 12, (1_105,), "mild", marks=pytest.mark.slow),
    # a border of the highest level, two query heads
    pytest.param((1, 2, 2, 420, 24, 40, True), 4, (32 * 61 + 5,), "extreme", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("shape, levels, starts, gates", TREES)
def test_log_linear_delta(shape, levels, starts, gates):
    check_log_linear(shape, gates, torch.float32, starts, levels, chunk=32)


@pytest.mark.parametrize("values", slow_where(lambda values: values == 72, [40, 72]))
def test_log_linear_delta_in_half_precision(values):
    """Tiles of 128 features, and two query heads; the interpreter multiplies no bfloat16."""
    check_log_linear((1, 1, 2, 200, 72, values, False), "mild", torch.float16, (0,))


LARGE = [320, 512, 1024]  # features of heads of 80, 128 and 256 dims with both forms of RoPE and Hedgehog
# The interpreter multiplies no bfloat16.
LARGE_DTYPE = {320: torch.float32, 512: torch.float32, 1024: torch.float16}


@pytest.mark.parametrize("features", LARGE)
def test_many_features(features):
    check_gated((1, 1, 1, 40, features, 12, False), "mild", LARGE_DTYPE[features], first=True)


@pytest.mark.parametrize("features", slow_where(lambda features: features > 320, LARGE))
def test_many_features_in_levels(features):
    check_log_linear((1, 1, 1, 70, features, 12, False), "mild", LARGE_DTYPE[features], starts=(0,))


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("features, values", [(320, 80), (384, 96), (512, 128), (1024, 256)])
def test_many_features_large(features, values, dtype):
    check_gated((2, 2, 2, 300, features, values, False), "mild", dtype, first=True)
    check_log_linear((2, 2, 2, 300, features, values, False), "mild", dtype, starts=(0, 0))
    check_log_linear((2, 2, 2, 300, features, values, False), "extreme", dtype, starts=(21, 1009))


@pytest.mark.parametrize("features, values", [(24, 32), (136, 16)])
def test_the_order_of_programs_changes_no_bit(monkeypatch, features, values):
    """Backward by slots, and level by level with three blocks of features; the interpreter runs one program after another."""
    from triton.runtime import interpreter

    leaves = draw(1, 1, 2, 70, features, values, False)
    leaves["level"] = 0.1 + torch.rand(1, 70, 1, 2, 3, device=DEVICE)  # levels above chunks share the last one
    call, dtype = log_linear_call(1, (45,), 32, 3), torch.float32
    forwards, set_index = run(call, leaves, dtype, "kernel"), interpreter.InterpreterBuilder.set_grid_idx

    def from_behind(self, *index: int) -> None:
        set_index(self, *(size - 1 - i for size, i in zip(self.grid_dim, index, strict=True)))

    monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", from_behind)
    backwards = run(call, leaves, dtype, "kernel")
    assert all(torch.equal(t, backwards[name]) for name, t in forwards.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, levels, starts, gates",
    [
        ((1, 1, 3, 150, 16, 17, False), 12, (0,), "mild"),  # three query heads of a group go by levels anyway
        ((2, 1, 2, 300, 16, 16, True), 5, (21, 1009), "extreme"),
    ],
)
def test_backward_by_levels(monkeypatch, shape, levels, starts, gates):
    from surgery.kernels.log_linear_delta import plan as launch

    monkeypatch.setattr(launch, "MOST_SLOT_HEADS", shape[2] - 1)
    monkeypatch.setattr(launch.LogLinearDeltaPlan, "slots_backward", None)
    check_log_linear(shape, gates, torch.float32, starts, levels, chunk=32)


@pytest.mark.parametrize("heads", [2, 3])
def test_wide_keys(heads):
    """More than 128 features of 16 bits: two query heads of a group in a program, or one."""
    check_log_linear((1, 1, heads, 150, 136, 24, False), "mild", torch.float16, (0,))


@pytest.mark.parametrize("starts, lengths", [((0, 0), (1, 40)), ((31, 96), (70, 700)), ((32 * 511, 7), (2000, 65))])
def test_reads_of_slots_have_places_of_their_own(starts, lengths):
    """Each read of a slot by a chunk, counted one by one, and all within the bound, where rows are as long as they can
    be."""
    from surgery.kernels.gated_delta.layout import make_sizes, max_chunks
    from surgery.kernels.log_linear_delta.plan import LogLinearDeltaPlan

    for start, length in zip(starts, lengths):
        v, start_B = torch.zeros(2, 1, length, 16), torch.tensor([start, start + 32])
        sizes = make_sizes(v.unsqueeze(2), v, 32, start_B, None)
        top = (max_chunks(v, 32, start_B) - 1).bit_length()
        plan = LogLinearDeltaPlan(
            *[v] * 5, sizes, level=v, bucket_lRGKV=None, extra_RGKV=None, end_R=None, levels=top + 1, top=top
        )
        firsts, most = plan.first_reads(), plan.most_reads
        taken = []
        for row, begin in enumerate(start_B.tolist()):
            a0, chunks = begin // 32 % 2**top, -(-(begin % 32 + length) // 32)
            for a in range(a0, a0 + chunks):
                e = a
                while e > a0:
                    taken.append(int(firsts[row, e - a0]) + a - e)
                    e &= e - 1
        assert sorted(taken) == list(range(len(taken))) and len(taken) <= most


def test_backward_by_levels_where_memory_is_short(monkeypatch):
    """Reads of slots that take more than their share of the free memory."""
    from surgery.kernels.gated_delta.layout import make_sizes
    from surgery.kernels.log_linear_delta import plan as launch

    monkeypatch.setattr(launch.LogLinearDeltaPlan, "free_memory", property(lambda self: 2**30))

    def has_slots_backward(batch: int, length: int) -> bool:
        v = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16).expand(batch, 32, length, 128)
        sizes, levels = make_sizes(v.unsqueeze(2), v, 64, None, None), (length // 64 - 1).bit_length()
        given = {"bucket_lRGKV": None, "extra_RGKV": None, "end_R": None, "levels": levels, "top": levels}
        return launch.LogLinearDeltaPlan(*[v] * 5, sizes, level=v, **given).has_slots_backward

    # 64 chunks: 192 reads of 2 x 16 KiB for each of 32 heads and each row
    assert has_slots_backward(1, 4096) and not has_slots_backward(2, 4096)
    assert has_slots_backward(2, 2048) and not has_slots_backward(1, 65_536)


def test_levels_in_groups(monkeypatch):
    """Where there is little memory."""
    from surgery.kernels.log_linear_delta import plan as launch

    monkeypatch.setattr(launch, "MOST_SLOT_HEADS", 0)
    monkeypatch.setattr(launch, "FORWARD_MEMORY_SHARE", 0)
    monkeypatch.setattr(launch, "BACKWARD_MEMORY_SHARE", 0)
    check_log_linear((1, 1, 1, 170, 16, 16, False), "mild", torch.float32, (0,), 5, chunk=32)
    check_buckets((1, 1, 1, 100, 16, 16, False), torch.float32, (80,), (100,), chunk=32)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("starts", [(0, 0), (4090, 77)])
@pytest.mark.parametrize("shape", SIZES)
def test_log_linear_delta_large(shape, starts, dtype):
    check_log_linear(shape, "mild" if starts[0] else "extreme", dtype, starts)


def check_buckets(shape, dtype, starts, counts, levels=12, chunk=64, gates="mild"):
    """Rows that go on: buckets of all that came before, of which some are empty."""
    leaves = draw(*shape, gates, dtype)
    B, G, J, T, features, V, _ = shape
    leaves["level"] = 0.1 + torch.rand(B, T, G, J, levels, device=DEVICE)
    there = torch.tensor([[start >> bit & 1 for bit in range(max(starts).bit_length())] for start in starts])
    there = there[..., None, None, None].to(DEVICE)
    leaves["buckets"] = torch.randn(*there.shape[:2], G, features, V, device=DEVICE)
    silent = (torch.arange(T) < torch.tensor(counts).unsqueeze(1)).to(DEVICE)

    def call(leaves):
        tokens = {
            n: t * silent.view(B, T, *[1] * (t.dim() - 2)) for n, t in leaves.items() if n not in ("level", "buckets")
        }
        q, k, v, beta, gates = laid_out({**leaves, **tokens}, G)
        start, count = (torch.tensor(x, device=DEVICE) for x in (starts, counts))
        state = {"start_B": start, "count_B": count, "buckets_BLGFV": leaves["buckets"] * there}
        return log_linear(q, k, v, beta, gates, leaves["level"], **state, chunk=chunk)

    judge(call, leaves, TOLERANCE[dtype])


@pytest.mark.parametrize("T, starts, counts", [(5, (3, 0), (5, 2)), (37, (21, 80), (37, 16))])
def test_log_linear_delta_goes_on(T, starts, counts):
    check_buckets((2, 1, 1, T, 16, 16, False), torch.float32, starts, counts, chunk=16)


@pytest.mark.parametrize("features", [320, 512])
def test_many_features_go_on(features):
    check_buckets((1, 1, 1, 37, features, 12, False), torch.float32, (21,), (37,))


def unread(leaves):
    """So that each leaf has a gradient."""
    return 0 * (leaves["first"].sum() + leaves["level"].sum())


def check_packed(shape, dtype, borders, tree, chunk=64):
    """Sequences packed in one row: as each of them alone."""
    leaves = draw(*shape, "mild", dtype)
    _, G, J, T, features, V, _ = shape
    leaves["level"] = 0.1 + torch.rand(1, T, G, J, 9, device=DEVICE)
    leaves["first"] = torch.randn(len(borders) - 1, G, features, V, device=DEVICE)

    def kernel(leaves):
        from surgery.kernels.gated_delta import gated_delta
        from surgery.kernels.log_linear_delta import log_linear_delta

        tokens, cu = laid_out(leaves, G), torch.tensor(borders, device=DEVICE)
        if tree:
            return [log_linear_delta(*tokens, leaves["level"], cu_seqlens=cu, chunk=chunk) + unread(leaves)]
        out, last = gated_delta(*tokens, leaves["first"], cu_seqlens=cu, chunk=chunk)
        return [out + unread(leaves), last]

    def reference(leaves):
        outs, lasts = [], []
        for i, (a, b) in enumerate(pairwise(borders)):
            q, k, v, beta, g = laid_out({n: x[:, a:b] for n, x in leaves.items() if n not in ("first", "level")}, G)
            zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
            if tree:
                state = {"start_B": zero, "count_B": zero + b - a, "buckets_BLGFV": None}
                out, _ = log_linear(q, k, v, beta, g, leaves["level"][:, a:b], **state, chunk=64)
            else:
                first = leaves["first"][i, None, None]
                out, last = semiseparable(q, k, v, beta, g.unsqueeze(1), None, first_BRGFV=first, chunk=64)
                lasts.append(last[:, 0])
            outs.append(out)
        return [torch.cat(outs, 3) + unread(leaves), *([torch.cat(lasts)] if lasts else [])]

    judge(reference, leaves, TOLERANCE[dtype], kernel=kernel)


@pytest.mark.parametrize("tree", [False, True])
def test_packed_sequences(tree):
    check_packed((1, 1, 1, 60, 16, 16, False), torch.float32, (0, 17, 18, 60), tree, chunk=16)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tree", [False, True])
def test_packed_sequences_large(tree, dtype):
    check_packed((1, 3, 1, 1000, 128, 64, True), dtype, (0, 1, 130, 642, 1000), tree)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_linear_delta_goes_on_large(dtype):
    check_buckets((2, 2, 1, 1000, 128, 64, False), dtype, (130, 64), (1000, 700))


@pytest.mark.parametrize("memory, most", [(99 * 1024, 256), (163 * 1024, 1024), (227 * 1024, 1024)])
def test_many_features_need_shared_memory(monkeypatch, memory, most):
    from surgery.kernels.gated_delta import layout

    monkeypatch.setattr(layout, "_shared_memory", lambda device: memory)
    assert layout.max_features(SimpleNamespace(is_cuda=True, get_device=lambda: 0)) == most
