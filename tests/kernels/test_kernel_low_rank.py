"""Low-rank linears by two matrix-vector products, on a GPU or under Triton's interpreter: against float64, and where
they run.
"""

from __future__ import annotations

import pytest
import torch
from helpers.kernel_rows import patch_tensor_loops
from helpers.slow import slow_where

from surgery.core.dispatch import load_kernels, record_dispatch, use_kernels
from surgery.structures import STRUCTURES
from surgery.structures.btt import btt_linear
from surgery.structures.grouped import group_linears, low_rank_group, low_rank_stack
from surgery.structures.low_rank import LowRank, low_rank_linear

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="too large for Triton's interpreter")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    patch_tensor_loops(monkeypatch)
    load_kernels()


def random_inputs(tokens, in_, rank, out, dtype=torch.float32, bias=True):
    torch.manual_seed(tokens + in_)
    shapes = (tokens, in_), (rank, in_), (1, out, rank), (out,)
    x, right, left, b_O = (torch.randn(shape, device=DEVICE) for shape in shapes)
    x, right, left, b_O = (t.to(dtype) for t in (x, right / in_**0.5, left / rank**0.5, b_O))
    return x, right, left, b_O if bias else None


def check_kernel(tolerance, x, right, left, bias):
    with use_kernels("kernel"), torch.no_grad():
        kernel = low_rank_linear.select_kernel(x, right, left, bias)
        assert kernel is not None
        y, again = kernel.run(x, right, left, bias), low_rank_linear(x, right, left, bias)
    exact = low_rank_linear.reference(*(None if t is None else t.double() for t in (x, right, left, bias)))
    assert y.shape == exact.shape and torch.equal(y, again)
    assert float((y.double() - exact).norm() / exact.norm()) < tolerance


SMALL = [(1, 40, 7, 33), (3, 300, 24, 65), (4, 5000, 3, 9), (2, 64, 64, 64), (1, 1, 1, 1)]
LARGE = [(1, 4096, 1024, 4096), (2, 2048, 768, 8192), (4, 8192, 768, 2048), (3, 4097, 1471, 11007), (1, 2048, 192, 512)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_small(shape, bias):
    check_kernel(1e-5, *random_inputs(*shape, bias=bias))


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large(shape, dtype):
    check_kernel(TOLERANCE[dtype], *random_inputs(*shape, dtype=dtype))


@pytest.mark.parametrize("cores", [(2, 256, 2, 260, 130), (1, 300, 3, 270, 301)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_btt_with_large_blocks(cores, bias):
    """BTT takes the same kernel for large blocks, rows of its cores lie along memory."""
    (c, d, b, a, s), out = cores, cores[2] * cores[3] - 3
    torch.manual_seed(0)
    x, right, left, b_O = (torch.randn(z, device=DEVICE) for z in ((2, c * d), (c, d, b, s), (b, c, s, a), (out,)))
    with use_kernels("kernel"), torch.no_grad():
        y = btt_linear(x, right, left, b_O if bias else None, out)
    exact = btt_linear.reference(x.double(), right.double(), left.double(), b_O.double() if bias else None, out)
    assert float((y.double() - exact).norm() / exact.norm()) < 1e-5


GROUPS_SMALL = [(1, 40, (7, 3), (33, 20)), (3, 300, (24, 8, 9), (65, 17, 17)), (2, 5000, (3, 1, 200), (9, 2, 9))]
GROUPS_LARGE = [
    (1, 2048, (512, 192, 192), (2048, 512, 512)),
    (4, 2048, (768, 768), (8192, 8192)),
    (2, 4096, (2048, 512, 511), (4096, 1024, 1023)),
]


def check_group(tolerance, tokens, in_, ranks, outs, dtype, bias):
    torch.manual_seed(in_)
    x, *rest = (torch.randn(shape, device=DEVICE).to(dtype) for shape in [(tokens, in_), *((o,) for o in outs)])
    rights = tuple((torch.randn(r, in_, device=DEVICE) / in_**0.5).to(dtype) for r in ranks)
    lefts = tuple((torch.randn(1, o, r, device=DEVICE) / r**0.5).to(dtype) for r, o in zip(ranks, outs))
    biases = tuple(rest) if bias else (None,) * len(outs)
    with use_kernels("kernel"), torch.no_grad():
        kernel = low_rank_group.select_kernel(x, rights, lefts, biases)
        assert kernel is not None
        ys, again = kernel.run(x, rights, lefts, biases), low_rank_group(x, rights, lefts, biases)
        in_rows = low_rank_group(x[:, None], rights, lefts, biases)
    for y, same, row, *factors in zip(ys, again, in_rows, rights, lefts, biases):
        exact = low_rank_linear.reference(*(None if t is None else t.double() for t in (x, *factors)))
        assert y.shape == exact.shape and torch.equal(y, same) and torch.equal(y[:, None], row)
        assert float((y.double() - exact).norm() / exact.norm()) < tolerance


@pytest.mark.parametrize(
    "shape", slow_where(lambda shape: shape == GROUPS_SMALL[-1], [(shape,) for shape in GROUPS_SMALL]), ids=str
)
def test_stacks_write_their_outputs_side_by_side(shape):
    tokens, in_, ranks, outs = shape
    torch.manual_seed(in_)
    x, right = torch.randn(tokens, in_, device=DEVICE), torch.randn(sum(ranks), in_, device=DEVICE) / in_**0.5
    lefts = tuple(torch.randn(1, o, r, device=DEVICE) / r**0.5 for r, o in zip(ranks, outs))
    with use_kernels("kernel"), torch.no_grad(), record_dispatch() as names:
        y, in_rows = low_rank_stack(x, right, lefts), low_rank_stack(x[:, None], right, lefts)
    exact = low_rank_stack.reference(x.double(), right.double(), tuple(left.double() for left in lefts))
    assert names == {"low_rank_stack"} and y.shape == exact.shape and torch.equal(y[:, None], in_rows)
    assert float((y.double() - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize(
    ("shape", "bias"),
    slow_where(
        lambda shape, bias: shape == GROUPS_SMALL[-1] and not bias,
        [(shape, bias) for shape in GROUPS_SMALL for bias in (True, False)],
    ),
    ids=str,
)
def test_group_small(shape, bias):
    check_group(1e-5, *shape, torch.float32, bias)


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", GROUPS_LARGE, ids=str)
def test_group_large(shape, dtype):
    check_group(TOLERANCE[dtype], *shape, dtype, True)


def test_groups_of_four_run_one_by_one():
    linears = [STRUCTURES[LowRank](30, 20, LowRank(rank=4)).to(DEVICE).requires_grad_(False) for _ in range(4)]
    x = torch.randn(1, 30, device=DEVICE)
    with use_kernels("kernel"), torch.no_grad():
        alone = [linear(x) for linear in linears]
        group_linears(linears)
        with record_dispatch() as names:
            together = [linear(x) for linear in linears]
    assert names == {"low_rank_linear"}
    assert all(torch.equal(y, z) for y, z in zip(alone, together))


def test_strides_and_leading_dims():
    x, right, left, bias = random_inputs(4, 32, 5, 20)
    for view in (x.T.contiguous().T, x.view(2, 2, 32), x.view(2, 2, 32).transpose(0, 1), x[:, None]):
        with use_kernels("kernel"), torch.no_grad():
            y = low_rank_linear(view, right, left, bias)
        expected = low_rank_linear.reference(view.double(), right.double(), left.double(), bias.double())
        assert y.shape == expected.shape and float((y - expected).norm() / expected.norm()) < 1e-5


def test_other_calls_run_the_products():
    """More tokens, gradients, other dtypes and transposed factors."""
    x, right, left, bias = random_inputs(5, 32, 5, 20)
    few = x[:2]
    refused = [
        (x, right, left, bias),
        (few, right.clone().requires_grad_(), left, bias),
        (few.clone().requires_grad_(), right, left, bias),
        (few.double(), right.double(), left.double(), bias.double()),
        (few, right.mT.contiguous().mT, left, bias),
        (few, right, left, bias.double()),
    ]
    with use_kernels("kernel"):
        assert all(low_rank_linear.select_kernel(*call) is None for call in refused)
        assert low_rank_linear.select_kernel(few, right, left, bias) is not None
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            assert low_rank_linear.select_kernel(few, right, left, bias) is None


def test_a_linear_takes_it():
    linear = STRUCTURES[LowRank](30, 20, LowRank(rank=4)).to(DEVICE).requires_grad_(False)
    x = torch.randn(2, 30, device=DEVICE)
    with use_kernels("kernel"), record_dispatch() as names:
        y = linear(x)
    assert "low_rank_linear" in names
    with use_kernels("reference"):
        assert torch.allclose(y, linear(x), atol=1e-5)
    assert torch.allclose(linear.product(x) + (0 if linear.bias is None else linear.bias), y, atol=1e-5)


@ON_GPU
def test_a_captured_pair_waits_for_its_first_product():
    """Replayed many times with new inputs: the second kernel starts early and must wait for the first."""
    x, right, left, bias = random_inputs(1, 4096, 1024, 4096, dtype=torch.bfloat16)
    y = torch.empty(1, 4096, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        low_rank_linear(x, right, left, bias)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                y = low_rank_linear(low_rank_linear(x, right, left, bias), right, left, bias)
        for seed in range(50):
            torch.manual_seed(seed)
            x.normal_()
            graph.replay()
            expected = low_rank_linear(low_rank_linear(x, right, left, bias), right, left, bias)
            assert torch.equal(y, expected)


@ON_GPU
@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_compiled(tokens):
    linear = STRUCTURES[LowRank](512, 384, LowRank(rank=64)).to(DEVICE).requires_grad_(False)
    x = torch.randn(tokens, 512, device=DEVICE)
    compiled = torch.compile(linear, fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert torch.allclose(compiled(x), linear(x), atol=1e-4)


@ON_GPU
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_group(mode):
    linears = [STRUCTURES[LowRank](512, out, LowRank(rank=64)).to(DEVICE).requires_grad_(False) for out in (384, 128)]
    given = torch.randn(1, 512, device=DEVICE)
    with torch.no_grad():
        alone = [linear(given) for linear in linears]
        group_linears(linears)
        compiled = torch.compile(lambda x: [linear(x) for linear in linears], fullgraph=True, dynamic=False, mode=mode)
        for _ in range(3):
            assert all(torch.allclose(y, z, atol=1e-4) for y, z in zip(compiled(given), alone))
    assert not linears[0].group[0].kept.outputs
