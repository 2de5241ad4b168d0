"""BTT on a GPU or under Triton's interpreter: outputs and gradients against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from helpers.compiled_kernel import CompiledKernel
from helpers.kernel_rows import patch_tensor_loops

from surgery.core.dispatch import load_kernels, use_kernels
from surgery.kernels.launch import CachedLaunch
from surgery.structures import STRUCTURES
from surgery.structures.btt import BTT, btt_linear

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="too large for Triton's interpreter, which multiplies no bf16")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    patch_tensor_loops(monkeypatch)
    load_kernels()


def relative(x, expected):
    x, expected = x.detach().double(), expected.detach().double()
    gap, scale = (x - expected).norm(), expected.norm()
    return float(gap / scale) if scale > 0 else float(gap)


def random_inputs(N, c, d, b, a, s, in_=None, out=None, dtype=torch.float32, bias=True):
    """x, right, left, bias, dy; z and y of about unit size."""
    torch.manual_seed(N + c + s)
    in_, out = in_ or c * d, out or b * a
    shapes = (N, in_), (c, d, b, s), (b, c, s, a), (out,), (N, out)
    x, right, left, b_O, dy = (torch.randn(shape, device=DEVICE) for shape in shapes)
    right, left = right / d**0.5, left / (c * s) ** 0.5
    x, right, left, b_O, dy = (t.to(dtype) for t in (x, right, left, b_O, dy))
    return x, right, left, b_O if bias else None, dy


def check_kernel(x, right, left, bias, dy, tolerance, way="kernel"):
    """y and the gradients of x, the cores and the bias by a kernel, within `tolerance` of the reference in float64."""
    out, kernel = dy.shape[-1], next(k for k in btt_linear.kernels if k.implementation == way)
    assert kernel.accepts(x, right, left, bias, out)

    def run(function, dtype):
        inputs = [None if t is None else t.detach().to(dtype).requires_grad_() for t in (x, right, left, bias)]
        y = function(*inputs, out)
        wanted = [t for t in inputs if t is not None]
        return [y, *torch.autograd.grad(y, wanted, dy.to(dtype))]

    right_ones = run(btt_linear.reference, torch.float64)
    for got, expected in zip(run(kernel.run, x.dtype), right_ones):
        assert got.shape == expected.shape and relative(got, expected) < tolerance
    with torch.no_grad():
        assert relative(kernel.run(x, right, left, bias, out), right_ones[0]) < tolerance


SMALL = [  # N, c, d, b, a, s, in, out
    (37, 4, 16, 4, 16, 1, None, None),
    (130, 2, 16, 3, 16, 4, None, None),
    (63, 5, 7, 3, 11, 1, 33, 31),  # nothing divides anything
    (40, 3, 130, 2, 70, 3, 380, 139),  # cores larger than a tile
    (1, 1, 9, 4, 2, 2, None, None),
    (18, 1, 20, 1, 24, 5, None, None),  # low rank
    (1, 8, 16, 16, 16, 1, None, None),  # decoding
    (5, 5, 11, 17, 9, 3, 52, 150),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=ON_GPU)])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_small(shape, dtype):
    if DEVICE == "cpu" and dtype == torch.float16 and shape not in SMALL[:3]:
        pytest.skip("the interpreter is slow")
    check_kernel(*random_inputs(*shape, dtype=dtype, bias=shape[0] != 130), TOLERANCE[dtype])


@pytest.mark.parametrize("pays", [0, 1e9], ids=["pairs", "dense"])
@pytest.mark.parametrize("shape", [SMALL[0], SMALL[2]], ids=str)
def test_either_way_to_the_cores_gradients(shape, pays, monkeypatch):
    monkeypatch.setattr("surgery.kernels.btt.DENSE_ADVANTAGE", pays)
    check_kernel(*random_inputs(*shape), 1e-5)


@pytest.mark.parametrize("shape", [SMALL[1], SMALL[2], (20, 2, 16, 2, 9, 40, 32, 17)], ids=str)
def test_multiplied_out(shape):
    check_kernel(*random_inputs(*shape), 1e-5, way="dense")


LARGE = [
    (8192, 64, 64, 64, 64, 1, None, None),
    (4100, 64, 64, 64, 64, 4, None, None),
    (2048, 64, 64, 86, 128, 1, None, None),  # 4096 -> 11008
    (1000, 64, 128, 64, 128, 2, None, None),  # 8192
    (777, 4, 512, 4, 512, 130, None, None),  # few large blocks
    (513, 61, 67, 59, 70, 3, 4083, 4096),
    (16, 64, 64, 64, 64, 4, None, None),
    (7, 64, 128, 64, 128, 4, None, None),
    (1, 64, 64, 86, 128, 1, None, None),
]


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large(shape, dtype):
    check_kernel(*random_inputs(*shape, dtype=dtype, bias=shape[0] % 2 == 0), TOLERANCE[dtype])


@ON_GPU
def test_a_ring_goes_round_the_same_every_time():
    """Many slabs, over and over: programs that wait for each other give the same bits."""
    x, right, left, bias, dy = random_inputs(65536, 32, 32, 32, 32, 1, dtype=torch.bfloat16)
    with torch.no_grad(), use_kernels("kernel"):
        first = btt_linear(x, right, left, bias, 1024)
        assert all(torch.equal(btt_linear(x, right, left, bias, 1024), first) for _ in range(20))
    check_kernel(x, right, left, bias, dy, 1e-2)


@pytest.mark.parametrize("N", [3, 20])
def test_strides_and_leading_dims(N):
    x, right, left, bias, _ = random_inputs(2 * N, 2, 16, 16, 3, 2)
    views = x.T.contiguous().T.view(2, N, 32), x.view(2, N, 32)[:, :, 1:], x.view(N, 2, 32).transpose(0, 1)[:, ::2]
    for view in views:
        with use_kernels("kernel"):
            y = btt_linear(view, right.mT.contiguous().mT, left, bias, 47)
        expected = btt_linear(view.double(), right.double(), left.double(), bias.double()[:47], 47)
        assert y.shape == expected.shape and relative(y, expected) < 1e-5


def test_only_what_is_asked_for():
    """Gradients of x alone, of the cores alone; none of an output that needs none."""
    x, right, left, _, dy = random_inputs(20, 2, 16, 3, 16, 2)
    expected = {}
    for choice in ("reference", "kernel"):
        for wanted in ((0,), (1,), (2,)):
            inputs = [t.detach().clone().requires_grad_(i in wanted) for i, t in enumerate((x, right, left))]
            with use_kernels(choice):
                y = btt_linear(*inputs, None, 48)
            (gradient,) = torch.autograd.grad(y, [inputs[i] for i in wanted], dy)
            assert relative(gradient, expected.setdefault(wanted, gradient)) < 1e-5


def test_a_linear_takes_it():
    """With its bias, and nothing else is asked of the module."""
    config = BTT(blocks=(3, 4), rank=2)
    linear = STRUCTURES[config](30, 20, config).to(DEVICE)
    torch.nn.init.normal_(linear.bias)
    x = torch.randn(2, 9, 30, device=DEVICE)
    with use_kernels("kernel"):
        y = linear(x)
    assert relative(y, x.double() @ linear.dense().double().mT + linear.bias.double()) < 1e-5


def test_autocast():
    """A trainer's bf16: parameters stay float32, and so do their gradients."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    x, right, left, bias, dy = random_inputs(20, 2, 16, 3, 16, 2)
    inputs = [t.requires_grad_() for t in (x, right, left, bias)]
    with use_kernels("kernel"), torch.autocast(DEVICE, dtype):
        y = btt_linear(*inputs, 48)
    assert y.dtype == dtype
    expected = btt_linear(*(t.double() for t in inputs), 48)
    gradients = (torch.autograd.grad(out, inputs, dy.to(out.dtype)) for out in (y, expected))
    for got, wanted in zip((y, *next(gradients)), (expected, *next(gradients))):
        assert relative(got, wanted) < 1e-2
        assert got is y or got.dtype == torch.float32


def test_high_ranks_are_multiplied_out():
    """By the rule for what was not measured (such as a CPU): a kernel for few tokens or low ranks, the dense product
    for many tokens and high ranks."""

    def choose_implementation(N, d, s):
        x, right, left = (
            torch.zeros(1, d).expand(N, -1),
            torch.zeros(64, d // 64, 64, s),
            torch.zeros(64, 64, s, d // 64),
        )
        return next(k.implementation for k in btt_linear.kernels if k.is_faster(x, right, left, None, d))

    assert [choose_implementation(8192, 4096, s) for s in (1, 4, 16)] == ["kernel", "kernel", "dense"]
    assert choose_implementation(1, 4096, 16) == "kernel"


HALF = (4, 1024, 4, 1024, 256)  # c, d, b, a, s: half of the parameters at width 4,096


def chosen(N, c, d, b, a, s):
    """The implementation that a call on a GPU without measurements runs."""
    x, right, left = torch.zeros(1, 1).expand(N, c * d), torch.empty(c, d, b, s), torch.empty(b, c, s, a)
    return next((k.implementation for k in btt_linear.kernels if k.is_faster(x, right, left, None, b * a)), "reference")


def test_large_products_are_the_library_s():
    """By arithmetic where nothing was measured: every side 128 or more, 64 rows or more, ranks from 16."""
    assert [chosen(N, *HALF) for N in (1, 63, 64, 8192)] == ["kernel", "reference", "products", "products"]
    assert chosen(8192, 16, 256, 16, 256, 64) == "products"
    assert chosen(8192, 4, 1024, 4, 1024, 8) == "reference", "a small rank"
    assert chosen(8192, 64, 64, 64, 64, 4) == "kernel", "small blocks"


def test_measured_products_follow_the_measurements(monkeypatch):
    """A row with times of the products decides, for them and against them; a row without leaves the rule in force."""
    from surgery.kernels import tuning
    from surgery.kernels.btt import choice

    place = tuning.DeviceKey((9, 0), "bfloat16")
    sizes = {"tokens": 8192, "inputs": 4096, "outputs": 4096, "rank": 256, "rows": 4, "columns": 4}
    row = {"op": "btt", "pass": "forward", "sizes": sizes, "kernel": 0.45, "reference": 0.6}
    monkeypatch.setattr(tuning, "device_key", lambda *_: place)
    for products, expected in ((0.2, "products"), (0.9, "kernel"), (None, "products")):
        rows = [{**row, **({"products": products} if products else {})}]
        table = {"device": "X1", "capability": [9, 0], "dtype": "bfloat16", "rows": rows}
        monkeypatch.setattr(tuning, "tables", lambda table=table: [table])
        for cached in (tuning.fastest_measured, tuning.device_rows):
            cached.cache_clear()
        monkeypatch.setattr(choice, "remembered_choice", tuning.remember(tuning.three_tensor_key, choice._decide))
        assert chosen(8192, *HALF) == expected
    for cached in (tuning.fastest_measured, tuning.device_rows):
        cached.cache_clear()


@pytest.mark.parametrize("shape", [SMALL[1], SMALL[2]], ids=str)
def test_products_on_this_device(shape):
    check_kernel(*random_inputs(*shape), 1e-5, way="products")


def test_products_by_choice():
    x, right, left, bias, _ = random_inputs(*SMALL[1])
    with use_kernels("products"):
        assert btt_linear.select_kernel(x, right, left, bias, 48).implementation == "products"
    with use_kernels("kernel"):
        assert btt_linear.select_kernel(x, right, left, bias, 48).implementation == "kernel"


@pytest.mark.parametrize("way, autocast", [("kernel", False), ("products", False), ("products", True)])
def test_compiled_in_one_graph(way, autocast, monkeypatch):
    """A model's BTT linear on a GPU is one operator of the graph, which runs what an eager call would."""
    monkeypatch.setattr("surgery.core.dispatch._on_gpu", lambda *_: True)  # torch.compile asks as it would on a GPU
    monkeypatch.setattr("surgery.kernels.btt.choice.remembered_choice", lambda *_: way)
    linear = STRUCTURES[BTT](30, 20, BTT(blocks=(3, 4), rank=2)).to(DEVICE)
    torch.nn.init.normal_(linear.bias)
    results, inputs = [], (torch.randn(2, 3, 30, device=DEVICE), torch.randn(2, 2, 30, device=DEVICE))
    torch.compiler.reset()
    compiled = torch.compile(linear, fullgraph=True, dynamic=True, backend="aot_eager")
    half = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    for call in (linear, compiled):
        for x in inputs:
            x = x.detach().requires_grad_()
            with torch.autocast(DEVICE, half, enabled=autocast):
                y = call(x)
            results.append([y, *torch.autograd.grad(y.float().square().sum(), [x, *linear.parameters()])])
    for eager, ours in zip(results[:2], results[2:]):
        for a, b in zip(eager, ours):
            assert a.dtype == b.dtype and a.shape == b.shape and relative(b, a) < (1e-2 if autocast else 1e-5)


def test_the_operator_is_what_it_says():
    from surgery.kernels.btt import BTT_OP

    *inputs, _ = random_inputs(9, 2, 16, 3, 16, 2)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(BTT_OP.node, (*[t.requires_grad_() for t in inputs], 48), test_utils=tests)


ARGUMENTS = ("x", "n", "B")


def test_a_launch_finds_its_kernel_once_for_each_dtype_and_alignment():
    kernel, x = CompiledKernel(ARGUMENTS), torch.zeros(64)
    launch = CachedLaunch(kernel, (3,), (7,), {"B": 16, "num_warps": 4})
    for tensor in (x, x, x[1:], x[1:], x[4:], x.half()):
        launch(tensor)
    assert [args[0].data_ptr() for _, args, _ in kernel.found] == [
        x.data_ptr(),
        x.data_ptr() + 4,
        kernel.found[2][1][0].data_ptr(),
    ]
    assert [(grid, args[1:]) for grid, args in kernel.again] == 3 * [((3, 1, 1), (7, 16))]


def test_a_launch_that_triton_refuses_is_found_again():
    kernel = CompiledKernel(ARGUMENTS, refuses=True)
    launch = CachedLaunch(kernel, (3,), (7,), {"B": 16})
    for _ in range(4):
        launch(torch.zeros(4))
    assert len(kernel.found) == 4 and not kernel.again


class Hooks:
    """Triton's launch hooks: functions that profilers add."""

    def __init__(self):
        self.calls = []


def test_a_launch_passes_hooks_only_when_there_are_some(monkeypatch):
    """Without hooks the compiled kernel's own `run` is called directly; with hooks Triton's launcher builds what they
    read.
    """
    from types import SimpleNamespace

    from surgery.kernels import launch

    runtime = SimpleNamespace(launch_enter_hook=Hooks(), launch_exit_hook=Hooks())
    monkeypatch.setattr(launch.triton, "knobs", SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(launch, "_takes_stream", lambda: True)
    monkeypatch.setattr(launch, "current_stream", lambda: 7)
    direct, compiled = [], CompiledKernel(ARGUMENTS)
    compiled.run, compiled.function, compiled.packed_metadata = lambda *args: direct.append(args), 5, (4, 1, 0)
    launcher = launch.bind_launcher(compiled, (3, 2, 1))
    launcher("x", 8)
    assert direct == [(3, 2, 1, 7, 5, (4, 1, 0), None, None, None, "x", 8)] and not compiled.again
    runtime.launch_exit_hook.calls.append(print)
    launcher("x", 8)
    assert len(direct) == 1 and compiled.again == [((3, 2, 1), ("x", 8))]
    monkeypatch.setattr(launch.triton, "knobs", SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=None)))
    launch.bind_launcher(compiled, (3, 2, 1))("x", 8)
    assert len(direct) == 1 and len(compiled.again) == 2, "another version of Triton launches its own way"


def test_what_it_declines():
    x, right, left, bias, _ = random_inputs(4, 2, 16, 2, 16, 1)
    with use_kernels("kernel"):
        assert btt_linear.select_kernel(x.double(), right, left, bias, 32) is None
        assert btt_linear.select_kernel(x[:0], right, left, bias, 32) is None
        assert btt_linear(x[:0], right, left, bias, 32).shape == (0, 32)
