"""Kernels of gated masks under torch.compile: custom ops with correct metadata, in one graph."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from helpers.kernel_rows import DEVICE
from helpers.slow import slow_where

from surgery.core.dispatch import record_dispatch, use_kernels
from surgery.mixers.masks.log_linear import log_linear
from surgery.mixers.masks.semiseparable import semiseparable

CASES = [("gates", False, True), ("gates", True, False), ("hierarchical", False, True), ("hierarchical", True, True)]

pytestmark = pytest.mark.usefixtures("loops_of_tensors")


def random_inputs(delta: bool, state: bool, tree: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 1, 2, 21, 16), torch.randn(2, 1, 21, 16), torch.randn(2, 1, 21, 17)
    gates, beta = -0.1 * torch.rand(2, 1, 21), torch.rand(2, 1, 21) if delta else None
    first = torch.randn(2, 3 if tree else 1, 1, 16, 17) if state else None
    level = torch.rand(2, 21, 1, 2, 6) if tree else None
    k = torch.nn.functional.normalize(k, dim=-1)
    given = [q, k, v, beta, gates, level, first]
    return [None if x is None else x.to(DEVICE).requires_grad_() for x in given]


def call(tree: bool, q, k, v, beta, gates, level, first):
    if not tree:
        return semiseparable(q, k, v, beta, gates.unsqueeze(1), None, first_BRGFV=first, chunk=32)
    start = torch.full((2,), 7, device=q.device)
    state = {"start_B": start, "count_B": torch.full_like(start, 21), "buckets_BLGFV": first}
    return log_linear(q, k, v, beta, gates, level, **state, chunk=32, levels=5)


def gradients(run, given):
    outs = [x for x in run(*given) if x is not None]
    torch.manual_seed(1)
    total = sum((x.float() * torch.randn(x.shape).to(x.device)).sum() for x in outs)
    return outs, torch.autograd.grad(total, [x for x in given if x is not None], allow_unused=True)


@pytest.mark.parametrize("mask, delta, state", slow_where(lambda *case: case == ("hierarchical", False, True), CASES))
def test_one_graph(mask, delta, state):
    tree = mask == "hierarchical"
    given = random_inputs(delta, state, tree)
    run = lambda *args: call(tree, *args)  # noqa: E731
    torch.compiler.reset()
    with use_kernels("kernel"), record_dispatch() as taken:
        right, slopes = gradients(run, given)
        assert taken
        ours, back = gradients(torch.compile(run, fullgraph=True, backend="aot_eager"), given)
    for a, b in zip([*ours, *back], [*right, *slopes]):
        assert (a is None) == (b is None)
        assert a is None or (a.shape == b.shape and (a - b).norm() <= 1e-5 * b.norm() + 1e-6)


def nodes():
    from surgery.kernels import gated_delta, log_linear, log_linear_delta, ssd

    q, k, v, beta, gates, level, first = random_inputs(True, True, False)
    level = torch.rand(2, 21, 1, 2, 6, device=DEVICE).requires_grad_()
    start, tokens = torch.zeros(2, dtype=torch.int64, device=DEVICE), (q, k, v)
    first = first.detach()[:, 0].clone().requires_grad_()
    yield ssd.SSD_OP.node, (*tokens, gates, first, start.int(), None, 32, True)
    yield log_linear.LOG_LINEAR_OP.node, (*tokens, gates, level, start, 1, start, None, 16, False)
    yield gated_delta.GATED_DELTA_OP.node, (*tokens, beta, gates, first, None, 32)
    yield (
        log_linear_delta.LOG_LINEAR_DELTA_OP.node,
        (*tokens, beta, gates, level, None, None, None, start, None, 32, 2, 1),
    )


def packed_nodes():
    """Two sequences packed into one row: a state for each."""
    from surgery.kernels import gated_delta, log_linear, ssd

    q, k, v, beta, gates, level, _ = (None if x is None else x.detach()[:1] for x in random_inputs(True, True, True))
    ends, first = torch.tensor([0, 8, 21], device=DEVICE), torch.randn(2, 1, 16, 17, device=DEVICE)
    tokens = [x.clone().requires_grad_() for x in (q, k, v)]
    yield ssd.SSD_OP.node, (*tokens, gates, first, ends, ends, 16, False)
    yield log_linear.LOG_LINEAR_OP.node, (*tokens, gates, level, ends[:-1].clone(), 0, ends, ends, 16, False)
    yield gated_delta.GATED_DELTA_OP.node, (*tokens, beta, gates, first, ends, 32)


@pytest.mark.parametrize("which", range(3))
def test_nodes_of_packed_sequences(which):
    """The fake outputs have as many states as the kernels' outputs."""
    node, args = list(packed_nodes())[which]
    torch.library.opcheck(node, args, test_utils=("test_faketensor",))


@pytest.mark.parametrize("which", range(4))
def test_nodes_are_what_they_say(which):
    """Shapes, strides, gradients, what is changed: torch's own checks."""
    node, args = list(nodes())[which]
    torch.library.opcheck(node, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
