"""Launches whose grid and integers change from call to call: what they read of their arguments, and what Triton compiles
for."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from helpers.compiled_kernel import CompiledKernel

from surgery.kernels.launch import OpenLaunch, describe_arguments, open_launch


class Rows(NamedTuple):
    """A tensor and its stride."""

    ptr: torch.Tensor
    stride: int


def a_kernel(refuses=False):
    return CompiledKernel(("x", "n", "free", "B"), ("free",), refuses)


def test_a_kernel_is_found_once_for_what_triton_compiles_for():
    kernel, x = a_kernel(), torch.zeros(64)
    launch = OpenLaunch(kernel, {"B": 16, "num_warps": 4})
    calls = [
        ((3,), (Rows(x, 48), 7, 5), True),
        ((9, 2), (Rows(x, 64), 9, 6), False),  # another grid, and integers of the same kinds
        ((3,), (Rows(x, 7), 7, 5), True),  # 16 does not divide the stride
        ((3,), (Rows(x, 9), 7, 1), False),  # 1 is a number like others where nothing is specialized
        ((3,), (Rows(x, 48), 1, 5), True),
        ((3,), (Rows(x[1:], 48), 7, 5), True),
        ((3,), (Rows(x[2:], 48), 7, 5), False),
        ((3,), (Rows(x.half(), 48), 7, 5), True),
        ((3,), (Rows(x, 48), 7, 2**40), True),
        ((3,), (Rows(x, 48), 7, 2**41), False),
        ((3,), (Rows(x, 32), 7, 5), False),
    ]
    for grid, arguments, is_new in calls:
        before = len(kernel.found)
        launch(grid, *arguments)
        assert (len(kernel.found) > before) == is_new, arguments
    assert kernel.again[0] == ((9, 2, 1), ((x.data_ptr(), 64), 9, 6, 16))
    assert len(kernel.again) == sum(not is_new for *_, is_new in calls)


def test_sizes_that_change_with_every_call_are_of_a_few_kinds():
    kernel, x = a_kernel(), torch.zeros(64)
    launch = OpenLaunch(kernel, {"B": 16})
    for n in range(3, 60, 2):
        launch((1,), Rows(x, 16), n, n)
    assert len(kernel.found) == len(launch.launchers) == 1
    assert [args[1] for _, args in kernel.again] == list(range(5, 60, 2))


def test_what_triton_refuses_is_found_again():
    kernel, x = a_kernel(refuses=True), torch.zeros(4)
    launch = OpenLaunch(kernel, {"B": 16})
    for _ in range(4):
        launch((3,), x, 2, 3)
    assert len(kernel.found) == 4 and not kernel.again


def test_arguments_of_another_structure_are_read_anew():
    kernel, x = a_kernel(), torch.zeros(16)
    launch = OpenLaunch(kernel, {"B": 16})
    for arguments in ((x, 3, 3), (Rows(x, 16), 3, 3), (None, 3, 3), (x, 5, 3), ((x, x), 3, 3), (x, 3.0, 3)):
        launch((1,), *arguments)
        launch((1,), *arguments)
    assert [args[0] for _, args in kernel.again] == [
        x.data_ptr(), (x.data_ptr(), 16), None, x.data_ptr(), x.data_ptr(), (x.data_ptr(), x.data_ptr()), x.data_ptr()
    ]  # fmt: skip


def test_equal_options_have_one_launch():
    kernel = a_kernel()
    assert open_launch(kernel, {"B": 1}) is open_launch(kernel, {"B": 1}) is not open_launch(kernel, {"B": 2})


def test_the_key_tells_apart_what_triton_does():
    """Of pairs of numbers: Triton's own types and properties differ exactly if the keys do."""
    native = pytest.importorskip("triton._C.libtriton")
    if not hasattr(native, "native_specialize_impl"):
        pytest.skip("another version of Triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    backend = type(make_backend(GPUTarget("cuda", 90, 32)))
    numbers = [0, 1, 2, 16, 17, -16, -1, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), -(2**31) - 16, 2**63, 2**63 + 1]
    for unread in (False, True):
        keys, wanted = [], []
        for n in numbers:
            key: list[Any] = []
            describe_arguments((n,), key, frozenset((0,) if unread else ()))
            keys.append(tuple(key))
            wanted.append(native.native_specialize_impl(backend, n, False, not unread, True))
        for i in range(len(numbers)):
            for j in range(i):
                assert (keys[i] == keys[j]) == (wanted[i] == wanted[j]), (numbers[i], numbers[j], unread)
