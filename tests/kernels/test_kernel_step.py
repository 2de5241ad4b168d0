"""One decoding step by a kernel against the reference in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from helpers.kernel_rows import DEVICE

from surgery.core.dispatch import use_kernels
from surgery.mixers.masks.log_linear import log_linear_step
from surgery.mixers.masks.semiseparable import semiseparable_step

pytestmark = pytest.mark.usefixtures("loops_of_tensors")


def token(B, G, J, F, V, delta, shared):
    torch.manual_seed(0)
    one = 1 if shared else G
    q, k = torch.randn(B, one, J, F, device=DEVICE), torch.randn(B, one, F, device=DEVICE)
    k = (k / k.norm(dim=-1, keepdim=True)).expand(-1, G, -1)
    beta = torch.rand(B, G, device=DEVICE) if delta else None
    return q.expand(-1, G, -1, -1), k, torch.randn(B, G, V, device=DEVICE), beta


def widen(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def close(op, *args, **state):
    with use_kernels("kernel"):
        assert op.select_kernel(*args, **state)
        ours = op(*args, **state)
    exact = op.reference(*map(widen, args), **{name: widen(x) for name, x in state.items()})
    for a, b in zip(ours, exact):
        assert a.shape == b.shape and (a - b).norm() <= 1e-6 * b.norm()


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 16, 16), (2, 2, 3, 20, 33)])
def test_one_state(sizes, delta):
    B, G, J, F, V = sizes
    gates = -torch.rand(1 if G == 1 else B, 1, 1 if G == 1 else G, device=DEVICE)
    weight = torch.rand(1, G, J, device=DEVICE) if delta else None
    given = *token(*sizes, delta, shared=True), gates, weight
    close(semiseparable_step, *given, sum_BRGFV=torch.randn(B, 1, G, F, V, device=DEVICE))


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("levels", [3, 9])
def test_buckets(delta, levels):
    """At positions of which none, some or all buckets are full; a row without a token stays as it is."""
    start_B = torch.tensor([0, 5, 15, 12, 7], device=DEVICE)
    count_B = torch.tensor([1, 1, 1, 1, 0], device=DEVICE)
    B, G, J, F, V = 5, 2, 2, 20, 33
    full_BL = (start_B.unsqueeze(1) >> torch.arange(4, device=DEVICE)) & 1
    buckets = torch.randn(B, 4, G, F, V, device=DEVICE) * full_BL[..., None, None, None]
    real_B = count_B.view(-1, 1, 1).float()
    q, k, v, beta = token(B, G, J, F, V, delta, shared=False)
    gate, level = -torch.rand(B, G, device=DEVICE) * count_B.unsqueeze(1), torch.rand(B, G, J, levels, device=DEVICE)
    beta = None if beta is None else beta * count_B.unsqueeze(1)
    state = {"start_B": start_B, "count_B": count_B, "buckets_BLGFV": buckets}
    close(log_linear_step, q, k * real_B, v * real_B, beta, gate, level, **state)
    state = {"start_B": start_B[:1], "count_B": count_B[:1], "buckets_BLGFV": buckets[:1, :0]}
    close(log_linear_step, q[:1], k[:1], v[:1], None, gate[:1], level[:1], **state)


@pytest.mark.parametrize("F, V", [(320, 80), (512, 20), (1024, 20)])
def test_many_features(F, V):
    state = {"start_B": torch.tensor([3], device=DEVICE), "count_B": torch.tensor([1], device=DEVICE)}
    given = token(1, 1, 2, F, V, True, shared=False)
    gate, level = -torch.rand(1, 1, device=DEVICE), torch.rand(1, 1, 2, 3, device=DEVICE)
    close(log_linear_step, *given, gate, level, **state, buckets_BLGFV=torch.randn(1, 2, 1, F, V, device=DEVICE))
    sum_BRGFV = torch.randn(1, 1, 1, F, V, device=DEVICE)
    close(semiseparable_step, *given, gate.unsqueeze(1), None, sum_BRGFV=sum_BRGFV)
