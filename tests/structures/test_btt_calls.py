"""Calls of one token: how many operations and Python functions they take, and that remembered decisions change no result."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from surgery.core.dispatch import DispatchedOp, dispatched_once, register_kernel, use_kernels
from surgery.structures import STRUCTURES
from surgery.structures.btt import BTT, btt_linear
from surgery.structures.btt_calls import call_key
from surgery.structures.low_rank import LowRank
from surgery.structures.monarch import Monarch

CONFIGS = [LowRank(rank=6), BTT(blocks=(4, 4), rank=3), Monarch(blocks=(8, 8)), BTT(blocks=(3, 5), rank=2)]


class Operations(TorchDispatchMode):
    """Names of the operations that PyTorch's dispatcher runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__.split(".")[0])
        return function(*args, **(kwargs or {}))


def count_calls(run) -> list[str]:
    """Return the names of the Python functions that `run` calls."""
    names = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(before)
    return names[1:]


def make_linear(config, out=48, in_=64, bias=False, dtype=torch.float32):
    """Return a linear with random values."""
    torch.manual_seed(0)
    kind = STRUCTURES[config]
    linear = kind(in_, out, kind.resolve(kind.fit(config, out, in_, out * in_ // 2), out, in_), bias, dtype=dtype)
    if bias:
        torch.nn.init.normal_(linear.bias)
    return linear


@pytest.mark.parametrize(
    "config, grad, operations, calls",
    [
        (LowRank(rank=6), False, 5, 4),
        (BTT(blocks=(4, 4), rank=3), False, 9, 9),
        (Monarch(blocks=(8, 8)), False, 9, 9),
        (BTT(blocks=(4, 4), rank=3), True, 10, 12),
    ],
    ids=str,
)
def test_a_call_of_one_token_takes_few_steps(config, grad, operations, calls):
    linear, x = make_linear(config), torch.randn(1, 1, 64)
    with torch.set_grad_enabled(grad), use_kernels("measured"):
        linear(x)
        with Operations() as seen:
            linear(x)
        named = count_calls(lambda: linear(x))
    assert len(seen.names) <= operations, seen.names
    assert len(named) <= calls, named
    if not isinstance(config, LowRank):
        assert seen.names.count("bmm") == 2 and seen.names.count("clone") == 1, "z is the only tensor that is copied"


def test_a_call_of_one_token_by_the_kernel_allocates_z_and_y_and_nothing_else(monkeypatch):
    pytest.importorskip("triton")
    from surgery.kernels.launch import CachedLaunch

    launches = []
    monkeypatch.setattr(CachedLaunch, "_launch_by_triton", lambda self, tensors: launches.append(len(tensors)))
    linear, x = make_linear(BTT(blocks=(2, 4), rank=5), bias=True), torch.randn(1, 1, 64)
    try:
        with use_kernels("kernel"):
            for grad, most in ((False, 13), (True, 16)):
                with torch.set_grad_enabled(grad):
                    linear(x)
                    with Operations() as seen:
                        linear(x)
                    named = count_calls(lambda: linear(x))
                assert [name for name in seen.names if "detach" not in name] == ["new_empty", "new_empty"]
                assert len(named) <= most, named
        assert launches == 12 * [4]
    finally:
        btt_linear.calls.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(), (1,), (1, 1), (3,)], ids=str)
@pytest.mark.parametrize("config", CONFIGS[1:], ids=str)
def test_remembered_calls_are_bit_equal(config, leading, bias, dtype):
    """Outputs and gradients of a first and a second call are those of the reference, which remembers nothing."""
    linear = make_linear(config, bias=bias, dtype=dtype)
    x = torch.randn(*leading, 64, dtype=dtype)
    given = linear.right, linear.weight, linear.bias, linear.out_features
    with torch.no_grad():
        expected = btt_linear.reference(x, *given)
        assert all(torch.equal(linear(x), expected) for _ in range(2))
    x.requires_grad_()
    leaves, dy = [x, *linear.parameters()], torch.randn_like(expected)
    wanted = torch.autograd.grad(btt_linear.reference(x, *given), leaves, dy)
    for _ in range(2):
        y = linear(x)
        assert torch.equal(y, expected) and y.shape == (*leading, 48)
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(y, leaves, dy), wanted))


def test_gradients_of_gradients_of_one_row():
    linear = make_linear(BTT(blocks=(2, 2), rank=2), 6, 4, True, torch.float64)
    inputs = (torch.randn(1, 4, dtype=torch.float64), linear.right, linear.weight, linear.bias)
    inputs = tuple(t.detach().requires_grad_() for t in inputs)
    assert torch.autograd.gradcheck(lambda *given: btt_linear(*given, 6), inputs)
    assert torch.autograd.gradgradcheck(lambda *given: btt_linear(*given, 6), inputs)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,)])
def test_only_the_gradients_that_are_needed_of_one_row(wanted):
    linear = make_linear(BTT(blocks=(4, 4), rank=3), bias=True)
    inputs = [torch.randn(1, 64), *(linear.right, linear.weight, linear.bias)]
    inputs = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
    leaves = [inputs[i] for i in wanted]
    found, expected = (torch.autograd.grad(f(*inputs, 48).sum(), leaves) for f in (btt_linear, btt_linear.reference))
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_by_the_kernel_remembered_calls_are_bit_equal(monkeypatch):
    pytest.importorskip("triton")
    from helpers.kernel_rows import DEVICE, patch_tensor_loops

    from surgery.core.dispatch import load_kernels

    patch_tensor_loops(monkeypatch)
    load_kernels()
    run = next(kernel.run for kernel in btt_linear.kernels if kernel.implementation == "kernel")
    linear = make_linear(BTT(blocks=(2, 4), rank=5), bias=True).to(DEVICE)
    given = linear.right, linear.weight, linear.bias, linear.out_features
    wide = torch.randn(2, 2, 70, device=DEVICE)
    for x in (torch.randn(1, 1, 64, device=DEVICE), wide[..., 3:67], wide[..., :64].transpose(0, 1)):
        x = x.detach().requires_grad_()
        with use_kernels("kernel"):
            expected, dy = run(x, *given), torch.randn(*x.shape[:-1], 48, device=DEVICE)
            wanted = torch.autograd.grad(expected, [x, *linear.parameters()], dy)
            for _ in range(2):
                y = linear(x)
                assert torch.equal(y, expected)
                found = torch.autograd.grad(y, [x, *linear.parameters()], dy)
                assert all(torch.equal(a, b) for a, b in zip(found, wanted))
                with torch.no_grad():
                    assert torch.equal(linear(x), expected)


def test_what_decides_is_in_the_key():
    linear = make_linear(BTT(blocks=(4, 4), rank=3))
    given, x = (linear.right, linear.weight, None, 48), torch.randn(1, 64)
    with torch.no_grad():
        keys = [call_key(t, *given) for t in (x, x[None], torch.randn(2, 64), torch.randn(1, 65)[:, 1:])]
        keys += [call_key(x, *given[:2], torch.randn(48), 48), call_key(x, *given[:3], 47)]
        keys += [call_key(x.double(), linear.right.double(), linear.weight.double(), None, 48)]
    keys.append(call_key(x, *given))  # gradients are recorded
    assert None not in keys and len(set(keys)) == len(keys)


def test_what_is_not_remembered():
    linear = make_linear(BTT(blocks=(4, 4), rank=3))
    given, x = (linear.right, linear.weight, None, 48), torch.randn(1, 64)
    assert call_key(x, *given) is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert call_key(x, *given) is None
        assert linear(x).dtype == torch.bfloat16
    assert call_key(x.double(), *given) is None, "two dtypes"
    assert call_key(x.to("meta"), *(t.to("meta") for t in given[:2]), *given[2:]) is None
    assert call_key(x, linear.right.mT.contiguous().mT, *given[1:]) is None, "cores with gaps"
    with torch._subclasses.FakeTensorMode() as mode:
        assert call_key(mode.from_tensor(x), *given) is None
    seen = []
    torch.func.vmap(lambda row: seen.append(call_key(row, *given)) or linear(row))(torch.randn(3, 64))
    assert seen == [None]


def test_a_choice_of_kernels_is_part_of_what_is_remembered():
    op = dispatched_once(lambda x: len(x))(lambda x: x + 1)
    assert isinstance(op, DispatchedOp)
    tried = []
    accepts = lambda x: tried.append(len(x)) or True  # noqa: E731
    x = torch.zeros(3)
    assert torch.equal(op(x), x + 1)
    register_kernel(op, accepts=accepts, bind=lambda x: lambda x: x + 3)(lambda x: x + 2)
    for _ in range(2):
        with use_kernels("kernel"):
            assert torch.equal(op(x), x + 3)
        assert torch.equal(op(x), x + 1)
    assert tried == [3], "decided once"


def test_parameters_that_a_library_replaced_are_found():
    from torch.nn.utils import parametrize

    class Doubled(torch.nn.Module):
        def forward(self, core):
            return 2 * core

    for config in CONFIGS:
        linear, x = make_linear(config), torch.randn(1, 64)
        expected = 2 * linear(x)
        parametrize.register_parametrization(linear, "right", Doubled())
        assert torch.allclose(linear(x), expected, atol=1e-5)
