"""PyTorch's own attention replaces attention whose terms reach every key, with the same outputs, and nothing else."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from surgery.core.dispatch import load_kernels, use_kernels
from surgery.kernels import tuning as measured
from surgery.kernels.mlr_attention import sdpa as attend_library
from surgery.mixers.base import AttentionShape
from surgery.mixers.common.kv_layout import KVLayout
from surgery.mixers.common.softmax import ScoreTerm, attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, G, J, T, DIMS = 2, 2, 3, 20, (16, 8, 8)


@pytest.fixture(autouse=True)
def kernels():
    load_kernels()


def random_terms(dtype=torch.bfloat16, extents=(T + 5, T), form="sliding", bias=True):
    torch.manual_seed(0)
    q, k = torch.randn(B, G, J, T, sum(DIMS), device=DEVICE), torch.randn(B, G, T, sum(DIMS), device=DEVICE)
    v = torch.randn(B, G, T, sum(DIMS), device=DEVICE).to(dtype)
    biases = [None, *(torch.randn(G, J, device=DEVICE) if bias else None for _ in extents)]
    parts = zip(q.to(dtype).split(DIMS, -1), k.to(dtype).split(DIMS, -1), (None, *extents), biases)
    return [ScoreTerm(a, b, e, form, bias) for a, b, e, bias in parts], v


def frame(queries=T, slots=T, holes=False):
    return KVLayout(torch.tensor([slots], device=DEVICE), queries, slots, holes)


def shape(window=None, softcap=None):
    return AttentionShape(8, G * J, G, sum(DIMS), sum(DIMS), 0.3, True, window, softcap)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_it_is_the_same_attention(dtype, tolerance):
    terms, v = random_terms(dtype)
    assert attend_library.accepts(terms, v, frame(), shape(window=T))
    leaves = [x.requires_grad_() for term in terms for x in (term.q_BGJTR, term.k_BGSR)] + [v.requires_grad_()]
    got = attend_library.sdpa_attend(terms, v, frame(), shape(window=T))
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = [
        term._replace(q_BGJTR=wide[2 * i], k_BGSR=wide[2 * i + 1], bias_GJ=term.bias_GJ.double() if i else None)
        for i, term in enumerate(terms)
    ]
    with use_kernels("reference"):
        want = attend(exact, wide[-1], frame(), shape(window=T))
    grad = torch.randn_like(got)
    grads = torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, wide, grad.double())
    for a, b in zip((got, *grads[0]), (want, *grads[1]), strict=True):
        assert (a.double() - b).norm() / b.norm() < tolerance


@pytest.mark.parametrize(
    "terms, where, module",
    [
        (random_terms(extents=(T, T - 1)), frame(), shape()),
        (random_terms(form="nested"), frame(), shape()),
        (random_terms(torch.float32), frame(), shape()),
        (random_terms(), frame(queries=1), shape()),
        (random_terms(), frame(holes=True), shape()),
        (random_terms(), frame(), shape(window=T - 1)),
        (random_terms(), frame(), shape(softcap=3.0)),
    ],
)
def test_what_is_structured_is_left_to_others(terms, where, module):
    assert not attend_library.accepts(*terms, where, module)


def test_a_bias_that_learns_gets_a_gradient_from_the_kernels():
    terms, v = random_terms()
    terms[1].bias_GJ.requires_grad_()
    assert not attend_library.accepts(terms, v, frame(), shape())


def test_it_is_taken_where_it_was_measured_to_win(monkeypatch):
    terms, v = random_terms()
    monkeypatch.setattr(measured, "device_key", lambda *_: measured.DeviceKey((9, 0), "bfloat16"))
    for original, way in ((1.0, "original"), (3.0, None)):
        rows = [{"op": "mlr", "pass": "forward", "sizes": {"lanes": 12, "tokens": T, "levels": 1}, "kernel": 2.0}]
        rows[0]["original"] = original
        monkeypatch.setattr(measured, "device_rows", lambda place, rows=rows: rows)
        measured.fastest_measured.cache_clear()
        wins = measured.is_fastest(
            "mlr", measured.CallReader(attend_library.tuning_query, attend_library.tuning_key), "original"
        )
        assert wins(terms, v, frame(), shape()) == (way == "original")
    measured.fastest_measured.cache_clear()


def test_asked_for_a_kernel_it_is_ours():
    terms, v = random_terms()
    with use_kernels("kernel"):
        assert attend.select_kernel(terms, v, frame(), shape()).implementation == "kernel"
