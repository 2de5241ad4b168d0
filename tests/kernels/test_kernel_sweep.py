"""The kernel sweep (kernel_sweep.py): on a GPU its reduced grid, elsewhere its driver on a few rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from helpers.canaries import Overrun, guard_allocations
from kernels.kernel_sweep import CASES, DEVICE, F32, Case, check, sweep

from kernels import kernel_sweep

gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: under Triton's interpreter the sweep takes hours")
KERNELS = Path(__file__).resolve().parents[2] / "kernels"


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("op", CASES)
def test_every_row_is_its_own(op):
    """The full grid takes minutes: python tests/kernels/kernel_sweep.py."""
    lines: list[str] = []
    total = sweep("reduced", [op], say=lines.append)
    assert total.calls and not total.failures, "\n".join(lines)


def test_the_sweep_itself():
    lines: list[str] = []
    total = sweep("tiny", ["ssd_step", "slots", "btt_dense"], say=lines.append)
    assert (total.failures, total.left_out) == (0, 0) and total.calls > 10, "\n".join(lines)
    assert re.fullmatch(r"total: \d+ calls, \d+ lanes, \d+ seconds, 0 failures", total.line())
    assert sweep("tiny", ["slots"], seconds=-1).left_out == 1


@pytest.mark.skipif(
    DEVICE == "cuda", reason="takes 8 GiB a tensor on a GPU: python tests/kernels/kernel_sweep.py --far --jobs 1"
)
def test_tokens_that_lie_far_apart():
    """Rows of 2^31 numbers from the first to the last: an offset that does not fit 32 bits is an error of the
    interpreter.
    """
    lines: list[str] = []
    total = sweep("far", ["btt"], say=lines.append)
    assert total.calls and not total.failures, "\n".join(lines)


def test_every_kernel_is_swept():
    ops = {op for file in KERNELS.rglob("*.py") for op in re.findall(r"@register_kernel\(\s*(\w+)", file.read_text())}
    source = Path(kernel_sweep.__file__).read_text()
    assert len(ops) > 10 and all(re.search(rf"\b{op}\b", source) for op in ops), ops


def twice(x):
    """What the kernels below should do."""
    return [2 * x["x"]]


def writes_beside(x):
    """Behind the end of a tensor of its own."""
    out = torch.empty_like(x["x"])
    if len(out) == 100:
        out.as_strided((4,), (1,), out.storage_offset() + out.numel()).fill_(1.0)
    return [2 * x["x"] + 0 * out.zero_()]


def reads_beside(x):
    """A number behind the end of its input."""
    if len(x["x"]) < 100:
        return twice(x)
    return [2 * x["x"] + 0 * x["x"].as_strided((1,), (1,), x["x"].storage_offset() + x["x"].numel())]


def reads_nothing_written(x):
    return [2 * x["x"] + 0 * torch.empty_like(x["x"])]


def mixes_rows(x):
    """Row 40 is given a little of row 41."""
    out = 2 * x["x"]
    return [torch.cat([out[:40], out[40:41] + 0.01 * out[41:42], out[41:]]) if len(out) > 41 else out]


def is_wrong_everywhere(x):
    return [2.001 * x["x"]]


@pytest.mark.parametrize(
    "kernel", [writes_beside, reads_beside, reads_nothing_written, mixes_rows, is_wrong_everywhere]
)
def test_the_sweep_finds(kernel):
    rows = {"x": torch.randn(100, 4, device=DEVICE)}
    check(Case("", F32, 100, rows, twice, kernel=twice))
    with pytest.raises(AssertionError):
        check(Case("", F32, 100, rows, twice, kernel=kernel, gradients=kernel is not reads_beside, step=10))


def test_guards_see_every_side_and_are_taken_away():
    originals = torch.empty, torch.zeros_like, torch.Tensor.new_empty
    for offset in (-1, 12):
        with guard_allocations() as buffers:
            x = torch.zeros(2, 3, device=DEVICE).new_empty(3, 4).T
            assert (
                x.stride() == (1, 4) and torch.zeros_like(x).eq(0).all() and torch.empty(2, device=DEVICE).isnan().all()
            )
            x.as_strided((1,), (1,), x.storage_offset() + offset).fill_(0.0)
        with pytest.raises(Overrun, match=r"test_kernel_sweep\.py:\d+: bytes .* of 48 bytes"):
            buffers.check()
    assert (torch.empty, torch.zeros_like, torch.Tensor.new_empty) == originals
    assert "new_empty" not in vars(torch.Tensor)
