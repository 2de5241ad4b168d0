"""Pages and lengths of a server's requests, by the kernel and by the reference."""

from __future__ import annotations

import pytest
import torch

from surgery.core.dispatch import use_kernels
from surgery.mixers.common.request_rows import write_request_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 8), (300, 700), (0, 5)])
def test_kernel_equals_reference(count, size, block):
    torch.manual_seed(count)
    tokens = torch.randint(0, 5, (count,))
    lengths = (tokens + torch.randint(0, 60, (count,)) * (tokens > 0)).to(torch.int32)
    starts = torch.nn.functional.pad(tokens.cumsum(0), (1, 0)).to(torch.int32)
    pages = torch.randint(1, 1000, (count, 9), dtype=torch.int32)[:, :6]
    given = [t.to(DEVICE) for t in (lengths, starts, pages)]
    found = {}
    for name in ("kernel", "reference"):
        buffers = [torch.full((size,), 77, dtype=torch.int32, device=DEVICE) for _ in range(2)]
        with use_kernels(name):
            write_request_rows(*given, *buffers, block=block, no_page=0)
        found[name] = [t.tolist() for t in buffers]
    assert found["kernel"] == found["reference"]
    assert found["kernel"][0][count:] == [0] * (size - count) and found["kernel"][1][count:] == [-1] * (size - count)
