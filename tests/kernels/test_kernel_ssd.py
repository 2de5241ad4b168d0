"""Kernels of gated masks: outputs, states and gradients against the reference in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from helpers.kernel_rows import (
    DEVICE,
    HALF_DTYPES,
    SIZES,
    TOLERANCE,
    gpu,
    log_gates,
    patch_bfloat16_products,
    random_tokens,
    relative_errors,
)

from surgery.core.dispatch import use_kernels
from surgery.kernels.ssd import layout as ssd_launch
from surgery.mixers.masks.semiseparable import semiseparable

pytestmark = pytest.mark.usefixtures("loops_of_tensors")


SMALL = [(1, 1, 1, 1, 16, 16, False), (2, 2, 1, 37, 16, 17, True), (1, 2, 2, 70, 24, 16, False)]


def worst(sizes, dtype=torch.float32, gates="mild", first=True, weight=False, chunk=16) -> float:
    *shape, shared = sizes
    B, G, J, _, F, V = shape
    leaves = random_tokens(*shape, shared=shared, dtype=dtype, gates=gates)
    leaves += [torch.randn(B, 1, G, F, V, device=DEVICE)] if first else []
    leaves += [torch.rand(1, G, J, device=DEVICE)] if weight else []

    def call(q, k, v, g, *rest):
        q, k = q.expand(-1, G, -1, -1, -1), k.expand(-1, G, -1, -1)
        rest = list(rest)
        state = rest.pop(0) if first else None
        operands = q, k, v, None, g.unsqueeze(1), rest.pop() if weight else None
        return semiseparable(*operands, first_BRGFV=state, chunk=chunk)

    def ours(*given):
        with use_kernels("kernel"):
            operands = *given[:3], None, given[3].unsqueeze(1), None
            assert semiseparable.select_kernel(*operands, first_BRGFV=None, chunk=chunk)
            return call(*given)

    def exact(*given):
        with use_kernels("reference"):
            return call(*given)

    return max(relative_errors(ours, exact, leaves))


@pytest.mark.parametrize("sizes", SMALL)
def test_small(sizes):
    assert worst(sizes) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("gates", ["none", "wild", "any"])
def test_gates_of_any_size(gates):
    assert worst((1, 2, 1, 40, 16, 16, True), gates=gates) < 2e-5


def test_in_parts(monkeypatch):
    """Of features and values, where all do not fit."""
    monkeypatch.setattr(ssd_launch, "MAX_FEATURES", 32)
    monkeypatch.setattr(ssd_launch, "MAX_VALUES", 16)
    assert worst((1, 2, 1, 37, 24, 17, True)) < TOLERANCE[torch.float32]


def test_many_features(monkeypatch):
    """In half precision too: those of heads of 256 dims with Hedgehog."""
    patch_bfloat16_products(monkeypatch)
    assert worst((1, 1, 2, 37, 520, 17, False), torch.bfloat16) < TOLERANCE[torch.bfloat16]


def test_without_a_state_and_with_a_weight():
    assert worst((1, 2, 2, 20, 16, 16, False), first=False, weight=True) < TOLERANCE[torch.float32]


def test_sequences_in_one_row():
    """Each as if alone."""
    from surgery.kernels.ssd import ssd

    ends = [0, 5, 5, 38, 54]
    leaves = random_tokens(1, 2, 1, ends[-1], 16, 16)
    leaves.append(torch.randn(len(ends) - 1, 2, 16, 16, device=DEVICE))
    cu_seqlens = torch.tensor(ends, device=DEVICE)

    def alone(q, k, v, g, first):
        outs, states = [], []
        for i, (a, b) in enumerate(itertools.pairwise(ends)):
            if a == b:
                states.append(first[i : i + 1])
                continue
            parts = q[:, :, :, a:b], k[:, :, a:b], v[:, :, a:b], None, g[:, None, :, a:b]
            out, state = semiseparable.reference(*parts, None, first_BRGFV=first[None, i : i + 1], chunk=16)
            outs.append(out)
            states.append(state[0])
        return torch.cat(outs, 3), torch.cat(states)

    assert max(relative_errors(lambda *x: ssd(*x, cu_seqlens=cu_seqlens, chunk=16), alone, leaves)) < 1e-5


@gpu
@pytest.mark.parametrize("gates", ["mild", "wild", "any"])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_half_precision(sizes, dtype, gates):
    assert worst(sizes, dtype, gates, chunk=64) < TOLERANCE[dtype]


@gpu
@pytest.mark.parametrize("sizes", SIZES)
def test_float32(sizes):
    assert worst(sizes, chunk=64) < TOLERANCE[torch.float32]


def test_gates_shared_by_all():
    """B and G of the log-gates are 1, as those of linear attention."""
    q, k, v, _ = random_tokens(2, 2, 1, 20, 16, 16)
    gates = log_gates("mild", 1, 1, 1, 20)
    with use_kernels("kernel"):
        out, _ = semiseparable(q, k, v, None, gates, None, first_BRGFV=None, chunk=16)
    wide = *(x.double() for x in (q, k, v)), None, gates.double(), None
    exact, _ = semiseparable.reference(*wide, first_BRGFV=None, chunk=16)
    assert (out - exact).norm() < 1e-6 * exact.norm()
