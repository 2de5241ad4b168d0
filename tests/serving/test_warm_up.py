"""Kernels of a served mixer are compiled before the first request. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from helpers.kernel_rows import DEVICE

from surgery.core.dispatch import use_kernels
from surgery.kernels.launch import OpenLaunch, describe_arguments
from surgery.mixers import MIXERS, AttentionShape, mixer_config
from surgery.vllm import warm_up as warming
from surgery.vllm.mixer_state import ROW_NUMBERS, Batch, StateLayout, Tokens, mix_batch, row_size
from surgery.vllm.warm_up import warm_up, warm_up_once

pytestmark = pytest.mark.usefixtures("loops_of_tensors")

SHAPE = AttentionShape(dim=32, heads=4, groups=2, key=16, value=16, scaling=0.25, rotary=16)
CONFIG = {"mixer": "linear", "scores": "delta", "features": "hedgehog", "rope": "both", "window": 8, "sinks": 2}
BATCHES = [  # decodes, and tokens before the call and in it
    (0, [(0, 64)]),
    (0, [(0, 33), (0, 33)]),
    (0, [(100, 48)]),
    (1, [(40, 1), (0, 17), (31, 80)]),
    (3, [(40, 1), (41, 1), (3, 1), (0, 5), (7, 31), (64, 32), (0, 1)]),
    (0, [(0, 1)]),
]


@pytest.fixture
def mixer():
    torch.manual_seed(0)
    config = mixer_config({**CONFIG, "mask": {"name": "hierarchical", "block": 4}, "output_gate": "value"})
    return MIXERS[config](config, SHAPE).requires_grad_(False).eval().to(DEVICE)


@pytest.fixture
def kinds(monkeypatch):
    """A set that collects kernels, constants and kinds of arguments, for each of which Triton compiles. None is launched."""
    found = set()

    def watched(self, grid, *arguments):
        names = self.kernel.kwargs.get("do_not_specialize") or ()  # what the interpreter ignores
        unread = frozenset(self.kernel.arg_names.index(name) for name in names)
        key: list[Any] = []
        describe_arguments(arguments, key, unread)
        found.add((self.kernel.fn.__name__, tuple(self.options.items()), tuple(key)))

    monkeypatch.setattr(OpenLaunch, "__call__", watched)
    return found


def zeros(count: int) -> Tokens:
    q, k, v, x, turned = (
        torch.zeros(count, *size, device=DEVICE) for size in ((4, 16), (2, 16), (2, 16), (32,), (16,))
    )
    return Tokens(q, k, v, x, (turned, turned))


def run(mixer, layout, decodes: int, requests: list[tuple[int, int]]) -> None:
    counts = [count for _, count in requests]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    rows_R = torch.arange(len(requests), dtype=torch.int32, device=DEVICE)
    batch = Batch.of(decodes, starts, [seen + count for seen, count in requests], rows_R)
    cache = torch.zeros(8, row_size([layout]), device=DEVICE)[:, : layout.size]
    mix_batch(mixer, layout, cache, batch, zeros(starts[-1]))


def test_no_batch_compiles_another_kernel(mixer, kinds, monkeypatch):
    """Of pieces of prompts, whatever their number, lengths and decodes beside them."""
    monkeypatch.setattr(warming, "WARM_UPS", [w for w in warming.WARM_UPS if w.decodes < len(w.requests)])
    layout = StateLayout(mixer, 200)
    with use_kernels("kernel"):
        warm_up(mixer, layout, zeros(1), row_size([layout]))
        warm, _ = set(kinds), kinds.clear()
        for decodes, requests in BATCHES:
            run(mixer, layout, decodes, requests)
    assert len({name for name, *_ in kinds}) == 11  # every kernel of pieces
    assert kinds <= warm, [kind for kind in kinds if kind not in warm]


def test_mixers_alike_are_warmed_once(mixer, monkeypatch):
    calls: list[Any] = []
    capturing = SimpleNamespace(now=False)
    monkeypatch.setattr(warming, "_warm", set())
    monkeypatch.setattr(warming, "warm_up", lambda _mixer, _layout, tokens, _row: calls.append(tokens.x_ND.dtype))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.now)
    layout = StateLayout(mixer, 200)

    def call(dtype, is_cuda=True):
        x: Any = SimpleNamespace(dtype=dtype, device="cuda:0", is_cuda=is_cuda)
        warm_up_once(mixer, layout, Tokens(x, x, x, x, None), 64)

    call(torch.float32, is_cuda=False)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        call(dtype)
    capturing.now = True
    call(torch.float16)
    assert calls == [torch.float32, torch.bfloat16]


def test_rows_of_the_cache_are_aligned(mixer):
    layout = StateLayout(mixer, 200)
    assert row_size([layout, layout]) % ROW_NUMBERS == 0 and 0 <= row_size([layout]) - layout.size < ROW_NUMBERS
