"""Log-linear attention whose groups share one query and key: as with a copy for each group, by PyTorch and by kernels."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from helpers.kernel_rows import DEVICE

from surgery.core.dispatch import use_kernels
from surgery.kernels.log_linear import log_linear_triton
from surgery.kernels.log_linear_delta import log_linear_delta_triton
from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.log_linear import log_linear
from surgery.mixers.native import NativeInputs, NativeMixer
from surgery.mixers.native_config import Native

pytestmark = pytest.mark.usefixtures("loops_of_tensors")

ROWS, GROUPS, LENGTH, KEY, VALUE, LEVELS = 2, 2, 37, 16, 16, 5
FORMS = {
    ("torch", False): log_linear.reference,
    ("torch", True): log_linear.reference,
    ("triton", False): log_linear_triton,
    ("triton", True): log_linear_delta_triton,
}


@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("form", "delta"), FORMS)
def test_shared_heads_equal_their_copies(form, delta, resumed) -> None:
    """Outputs, buckets and gradients, with and without buckets from before."""
    torch.manual_seed(0)
    q, k = (
        torch.randn(ROWS, 1, 1, LENGTH, KEY),
        torch.nn.functional.normalize(torch.randn(ROWS, 1, LENGTH, KEY), dim=-1),
    )
    v, gates = torch.randn(ROWS, GROUPS, LENGTH, VALUE), -torch.rand(ROWS, GROUPS, LENGTH) / 4
    beta = torch.rand(ROWS, GROUPS, LENGTH) if delta else None
    level = torch.rand(ROWS, LENGTH, GROUPS, 1, LEVELS)
    start_B = torch.tensor([0, 21]) if resumed else torch.zeros(ROWS, dtype=torch.long)
    buckets = torch.randn(ROWS, 5, GROUPS, KEY, VALUE) if resumed else None
    if buckets is not None:
        alive_BL = (start_B.unsqueeze(1) >> torch.arange(5)) & 1
        buckets = buckets * alive_BL[:, :, None, None, None]
    q, k, v, gates, level, start_B = (t.to(DEVICE) for t in (q, k, v, gates, level, start_B))
    beta, buckets = (None if t is None else t.to(DEVICE) for t in (beta, buckets))
    options = {
        "start_B": start_B,
        "count_B": torch.full((ROWS,), LENGTH, device=DEVICE),
        "buckets_BLGFV": buckets,
        "chunk": 16,
    }
    found = []
    for copies in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        shared = leaves
        if copies:
            shared = [x.repeat_interleave(GROUPS, dim=1) for x in leaves]
        out, after = FORMS[form, delta](*shared, v, beta, gates, level, **options)
        total = out.square().sum() + (0 if after is None else after.square().sum())
        found.append([out, *([] if after is None else [after]), *torch.autograd.grad(total, leaves)])
    for shared_result, expected in zip(*found):
        assert (shared_result - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("delta", [False, True])
def test_native_layers_share_heads(delta) -> None:
    """The mixer gives with two heads of queries and keys for six of values what it gives with a copy for each."""
    torch.manual_seed(0)
    heads, groups = 2, 6
    mixer = NativeMixer(Native(levels=4, block=8), AttentionShape(12, groups, groups, KEY, VALUE, 1.0))
    torch.nn.init.normal_(mixer.level.weight)
    q, k = (torch.nn.functional.normalize(torch.randn(ROWS, heads, LENGTH, KEY), dim=-1) for _ in range(2))
    gate = -torch.rand(ROWS, LENGTH, groups) / 4
    beta = torch.rand(ROWS, groups, LENGTH) if delta else None
    valid = torch.arange(LENGTH) >= torch.tensor([[0], [9]])
    v, x = torch.randn(ROWS, groups, LENGTH, VALUE), torch.randn(ROWS, LENGTH, 12)
    shared = NativeInputs(q, k, v, x, valid, gate_BTG=gate, beta_BGT=beta)
    copied = NativeInputs(*(t.repeat_interleave(3, dim=1) for t in (q, k)), v, x, valid, gate_BTG=gate, beta_BGT=beta)
    outs = []
    for inputs in (shared, copied):
        with torch.no_grad(), use_kernels("reference"):
            whole, state, parts = mixer.mix(inputs)[0], mixer.empty_state(ROWS, "cpu"), []
            for tokens in (slice(0, 20), slice(20, 21), slice(21, LENGTH)):
                part, state = mixer.mix(inputs.at_tokens(tokens), state)
                parts.append(part)
        outs.append([whole, torch.cat(parts, dim=2), state.tensors["buckets"], mixer.dense(inputs)])
    for found, expected in zip(*outs):
        assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert (outs[0][0] - outs[0][1]).abs().max() <= 1e-5 * outs[0][0].abs().max()
