"""Linear attention through its kernels, whole, in pieces and by steps, against float64."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("triton")

from helpers.kernel_rows import CUDA, DEVICE, gpu, patch_tensor_loops

from surgery.core.dispatch import use_kernels
from surgery.mixers.base import AttentionShape, MixerInputs
from surgery.mixers.linear import LinearMixer
from surgery.mixers.linear_config import LinearAttention

SIZE, LENGTH = (64, 300) if CUDA else (16, 40)
SHAPE = AttentionShape(dim=32, heads=4, groups=2, key=SIZE, value=SIZE, scaling=SIZE**-0.5)


@pytest.fixture(autouse=True)
def loops(monkeypatch):
    patch_tensor_loops(monkeypatch)


def both(mask: str, dtype: torch.dtype, **options):
    """(kernels, reference): a call gives the outputs of a prefill with padding, of another, and of two steps."""
    torch.manual_seed(0)
    config = LinearAttention(mask={"name": mask}, features={"name": "elu"}, normalise=True, chunk=64, **options)
    mixer = LinearMixer(config, SHAPE).to(DEVICE)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    total = LENGTH + 2
    sizes = ((4, total, SIZE), (2, total, SIZE), (2, total, SIZE), (total, 32))
    parts = [torch.randn(2, *size, device=DEVICE).to(dtype) for size in sizes]
    valid_BT = torch.arange(total, device=DEVICE) >= torch.tensor([[5], [0]], device=DEVICE)

    def run(mixer: LinearMixer, parts: list[torch.Tensor]) -> torch.Tensor:
        state, outs = mixer.empty_state(2, DEVICE), []
        for a, b in [(0, 13), (13, LENGTH), (LENGTH, LENGTH + 1), (LENGTH + 1, total)]:
            inputs = MixerInputs(*(x[:, :, a:b] for x in parts[:3]), parts[3][:, a:b], valid_BT[:, a:b])
            out_BHTV, state = mixer.mix(inputs, state)
            outs.append(out_BHTV)
        whole, _ = mixer.mix(MixerInputs(*parts, valid_BT), None)
        return torch.cat([*outs, whole], 2)

    with torch.no_grad():
        with use_kernels("kernel"):
            ours = run(mixer, parts)
        with use_kernels("reference"):
            exact = run(copy.deepcopy(mixer).double(), [x.double() for x in parts])
    real = valid_BT.repeat(1, 2)[:, None, :, None]
    return ours.double() * real, exact * real


def miss(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours - exact).norm() / exact.norm())


@pytest.mark.parametrize("mask", ["gates", "hierarchical"])
def test_float32(mask):
    assert miss(*both(mask, torch.float32)) < 1e-5


@gpu
@pytest.mark.parametrize("mask", ["gates", "decay", "ones", "hierarchical"])
def test_bfloat16(mask):
    assert miss(*both(mask, torch.bfloat16)) < 1e-2
