"""Dispatch: when a kernel replaces its reference."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch.autograd import forward_ad

from surgery.core import dispatch
from surgery.core.dispatch import (
    DispatchedOp,
    dispatched,
    load_kernels,
    record_dispatch,
    record_references,
    register_kernel,
    use_kernels,
)
from surgery.core.errors import SurgeryError


@dispatched
def double(x, times=2):
    return x * times


@register_kernel(double, accepts=lambda x, **_: x.dtype == torch.float32, is_faster=lambda x, **_: x.numel() > 4)
def double_quickly(x, times=2):
    return x + x + 0.5  # so that one sees who answered


SMALL, LARGE = torch.ones(2), torch.ones(8)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The kernels of these tests are functions that run on the CPU, also where a GPU has Triton compile its kernels."""
    load_kernels()  # before a test changes the variable, which Triton reads as kernels are imported
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_forced_kernels_on_a_cpu_need_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with (
        use_kernels("kernel"),
        pytest.raises(SurgeryError, match=r"this call is on a CPU.*set TRITON_INTERPRET=1 before"),
    ):
        double(SMALL)
    with use_kernels("kernel"):
        assert torch.equal(double(SMALL.double()), 2 * SMALL.double())  # no kernel takes it


def test_the_reference_serves_the_cpu():
    assert torch.equal(double(LARGE), 2 * LARGE)


def test_a_choice_of_kernels_holds_inside_and_ends():
    with use_kernels("kernel"):
        assert torch.equal(double(SMALL), 2 * SMALL + 0.5)
        assert torch.equal(double(SMALL.double()), 2 * SMALL.double())  # not accepted
        with use_kernels("reference"):
            assert torch.equal(double(SMALL), 2 * SMALL)
        assert torch.equal(double(x=SMALL), 2 * SMALL + 0.5)
    assert torch.equal(double(SMALL), 2 * SMALL)


def test_what_is_measured_to_lose_is_not_taken(monkeypatch):
    monkeypatch.setattr("surgery.core.dispatch._on_gpu", lambda *_: True)
    assert torch.equal(double(SMALL), 2 * SMALL)
    assert torch.equal(double(LARGE), 2 * LARGE + 0.5)


def test_ways_that_are_not_ours_speak_first_and_are_no_kernels(monkeypatch):
    @dispatched
    def triple(x):
        return 3 * x

    register_kernel(triple, accepts=lambda x: True)(lambda x: 3 * x + 0.5)
    register_kernel(triple, accepts=lambda x: True, is_faster=lambda x: x.numel() > 4, implementation="original")(
        lambda x: 3 * x + 1
    )
    with use_kernels("kernel"):
        assert torch.equal(triple(LARGE), 3 * LARGE + 0.5)
    monkeypatch.setattr("surgery.core.dispatch._on_gpu", lambda *_: True)
    assert torch.equal(triple(LARGE), 3 * LARGE + 1) and torch.equal(triple(SMALL), 3 * SMALL + 0.5)


def test_products_are_taken_where_there_are_some(monkeypatch):
    """ "products" forces an implementation of that name; functions without one choose as they do by default."""

    @dispatched
    def triple(x):
        return 3 * x

    register_kernel(triple, accepts=lambda x: True)(lambda x: 3 * x + 0.5)
    register_kernel(triple, accepts=lambda x: True, is_faster=lambda x: False, implementation="products")(
        lambda x: 3 * x + 1
    )
    with use_kernels("products"):
        assert torch.equal(triple(LARGE), 3 * LARGE + 1) and torch.equal(double(LARGE), 2 * LARGE)
        monkeypatch.setattr("surgery.core.dispatch._on_gpu", lambda *_: True)
        assert torch.equal(double(LARGE), 2 * LARGE + 0.5) and torch.equal(double(SMALL), 2 * SMALL)


def test_the_environment_names_the_choice():
    """A word that is no choice is refused at the first call."""
    code = (
        "import torch\nfrom surgery.structures.btt import btt_linear\nx, core = torch.ones(1, 4), torch.ones(2, 2, 2, "
        "2)\n"
        "btt_linear(x, core, core, None, 4)"
    )
    environment = {**os.environ, "SURGERY_KERNELS": "product"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "SURGERY_KERNELS='product' is not one of" in done.stderr and "did you mean 'products'" in done.stderr


def test_an_op_says_what_it_is():
    assert double.__name__ == "double"


def test_what_kernels_took_can_be_watched():
    with record_dispatch() as used:
        double(LARGE)
        assert not used
        with use_kernels("kernel"):
            double(SMALL)
        assert used == {"double"}


def test_calls_that_no_kernel_takes_are_told_once(monkeypatch):
    """Neither a call that a kernel runs, nor one that the reference was measured to run faster, is one of them."""
    told = []
    with record_references(lambda name, reason: told.append((name, reason))) as found:
        double(LARGE.double())  # on a CPU
        monkeypatch.setattr("surgery.core.dispatch._on_gpu", lambda *_: True)
        double(LARGE)
        double(SMALL)
        assert not told
        double(LARGE.double())
        double(LARGE.half())
    double(LARGE.double())
    assert told == [("double", "no kernel takes x float64 (8,)")] == list(found.items())


def test_compiled_calls_that_no_kernel_takes_are_told_while_they_are_traced(monkeypatch):
    monkeypatch.setattr("surgery.core.dispatch._on_gpu", lambda *_: True)
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: double(x) + 1, backend=backend, fullgraph=True)
    with record_references() as found:
        assert torch.equal(compiled(LARGE), 2 * LARGE + 1.5) and not found
        assert torch.equal(compiled(LARGE.double()), 2 * LARGE.double() + 1)
        assert list(found) == ["double"]
    assert torch.equal(compiled(LARGE.double()), 2 * LARGE.double() + 1)
    assert len(traced) == 2  # no second graph for calls that are not recorded


def list_arguments(function):
    """Return (number of arguments that may be passed by position, names of the keyword-only ones)."""
    arguments = inspect.signature(function).parameters.values()
    keywords = {each.name for each in arguments if each.kind is each.KEYWORD_ONLY}
    return len(arguments) - len(keywords), keywords


def test_kernels_and_their_conditions_take_what_the_reference_takes():
    """Conditions are called on a GPU only, where a wrong name would be an error at the first call."""
    pytest.importorskip("triton")
    load_kernels()
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("surgery.")]
    ops = {op for module in modules for op in vars(module).values() if isinstance(op, DispatchedOp)}
    assert sum(len(op.kernels) for op in ops) > 12
    for op in ops:
        count, keywords = list_arguments(op.reference)
        for kernel in op.kernels:
            assert list_arguments(kernel.run) == (count, keywords), kernel.run
            for condition in (kernel.accepts, kernel.is_faster):
                inspect.signature(condition).bind(*range(count), **dict.fromkeys(keywords))


class OnSecondGPU(torch.Tensor):
    """A tensor that says that it lies on cuda:1."""

    is_cuda = True

    def get_device(self):
        return 1


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("current", [0, 1])
def test_a_kernel_runs_on_the_gpu_of_its_tensor(monkeypatch, current, is_kept):
    """Triton launches on the current GPU: a layer of a model with a device_map may lie on another."""
    entered, seen = [], []

    @contextmanager
    def device(index):
        entered.append(index)
        yield
        entered.append("left")

    where = DispatchedOp(lambda x: x, (lambda x: x.shape) if is_kept else None)

    @register_kernel(where, accepts=lambda x: True)
    def where_it_runs(x):
        seen.append(entered[-1:])

    monkeypatch.setattr(dispatch, "_gpus", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    for _ in range(2):
        where(LARGE.as_subclass(OnSecondGPU))
    guard = [1] if current == 0 else []
    assert seen == [guard, guard] and entered == 2 * (guard and [1, "left"])


def test_transforms_of_torch_func_run_the_reference():
    with use_kernels("kernel"):
        assert torch.equal(torch.func.vmap(double)(LARGE.view(2, 4)), 2 * LARGE.view(2, 4))
        assert torch.equal(torch.func.jvp(double, (LARGE,), (LARGE,))[1], 2 * LARGE)
        with forward_ad.dual_level():
            made = forward_ad.unpack_dual(double(forward_ad.make_dual(LARGE, 3 * LARGE)))
        assert torch.equal(made.primal, 2 * LARGE) and torch.equal(made.tangent, 6 * LARGE)
        assert torch.equal(double(LARGE), 2 * LARGE + 0.5)  # behind them, the kernel again
