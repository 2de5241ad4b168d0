"""Rows that begin with the call: slices in place of tables give the outputs, gradients and states of the general
path.
"""

from __future__ import annotations

import pytest
import torch

from surgery.mixers import MIXERS, MixerInputs
from surgery.mixers.base import AttentionShape
from surgery.mixers.linear_config import LinearAttention

WINDOW, SINKS = 8, 3
MASKS = ["gates", "decay", "ones", "hierarchical", {"name": "hierarchical", "block": 16}, "toeplitz_blocks"]


@pytest.mark.parametrize("length", [WINDOW + SINKS, WINDOW + SINKS + 1, 40, 90])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_slices_give_what_tables_give(mask, length):
    """A mask of padding that is true everywhere forces the tables."""
    scores = "kernel" if mask == "toeplitz_blocks" else "delta"
    shape = AttentionShape(16, 4, 2, 8, 8, 8**-0.5)
    config = LinearAttention(mask=mask, features="hedgehog", scores=scores, window=WINDOW, sinks=SINKS)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, dtype=torch.float64, generator=generator).requires_grad_()  # noqa: E731
    mixer = MIXERS[config](config, shape).double()
    for parameter in mixer.parameters():
        parameter.data = 0.1 * draw(*parameter.shape).detach()
    tensors = draw(2, 4, length, 8), draw(2, 2, length, 8), draw(2, 2, length, 8), draw(2, length, 16)
    leaves = [*tensors, *(p for p in mixer.parameters() if p.requires_grad)]

    def run(valid, state):
        out, after = mixer.mix(MixerInputs(*tensors, valid_BT=valid), state)
        weight = torch.arange(out.numel(), dtype=out.dtype).sin().view_as(out)
        return out, torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True), after

    everywhere = torch.ones(2, length, dtype=torch.bool)
    out, grads, _ = run(everywhere, None)
    states = []
    for valid, state in ((None, None), (None, mixer.empty_state(2, "cpu")), (everywhere, mixer.empty_state(2, "cpu"))):
        found, found_grads, after = run(valid, state)
        torch.testing.assert_close(found, out, rtol=0, atol=1e-10)
        for one, other in zip(found_grads, grads):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
        states += [after.tensors] if after is not None else []
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name], rtol=0, atol=1e-10)
