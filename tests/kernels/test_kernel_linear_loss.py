"""Statistics and gradient of rows of logits: the reference against autograd, the kernels against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from surgery.core.dispatch import record_dispatch, use_kernels
from surgery.core.logit_rows import LogitTransform, RowSpec, row_gradient_, row_stats

pytest.importorskip("triton")

from helpers.kernel_rows import CUDA, DEVICE, gpu

pytestmark = pytest.mark.usefixtures("loops_of_tensors")

CASES = [
    {},
    {"temperature": 2.0},
    {"direction": "reverse", "temperature": 0.7},
    {"hard": True},
    {"hard": True, "temperature": 3.0, "transform": LogitTransform(0.5, 5.0)},
    {"hard": True, "direction": "reverse", "transform": LogitTransform(2.0), "teacher_transform": LogitTransform(1.0, 4.0)},
    {"hard": True, "size": 60},
    {"size": 60, "direction": "reverse"},
    {"soft": False, "hard": True, "transform": LogitTransform(1.0, 3.0)},
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    from surgery.kernels import linear_loss

    if not CUDA:
        monkeypatch.setattr(linear_loss, "BLOCK", 32)


def inputs(spec, dtype, rows=5, vocabulary=70):
    torch.manual_seed(0)
    logits = (3 * torch.randn(rows, vocabulary, device=DEVICE)).to(dtype)
    teacher = (3 * torch.randn(rows, spec.size + 4, device=DEVICE)).to(dtype) if spec.soft else None
    labels = torch.randint(0, vocabulary, (rows,), device=DEVICE)
    soft, hard = torch.rand(rows, device=DEVICE), torch.rand(rows, device=DEVICE)
    soft[1] = hard[1] = 0
    return logits, teacher, labels, soft if spec.soft else None, hard if spec.hard else None


def by_definition(spec, logits, teacher, labels, soft, hard):
    """Return (kl, ce, gradient) in float64."""
    logits = logits.double().clone().requires_grad_()
    x, total, kl, ce = spec.transform.apply(logits), 0.0, None, None
    if spec.soft:
        q = (x[:, : spec.size] / spec.temperature).log_softmax(-1)
        p = (spec.teacher_transform.apply(teacher.double())[:, : spec.size] / spec.temperature).log_softmax(-1)
        p, q = (p, q) if spec.direction == "forward" else (q, p)
        kl = (p.exp() * (p - q)).sum(-1)
        total = total + (kl * soft).sum() * spec.temperature
    if spec.hard:
        ce = cross_entropy(x, labels, reduction="none")
        total = total + (ce * hard).sum()
    total.backward()
    return kl, ce, logits.grad


def check(case, dtype, choice, tolerance, **sizes):
    spec = RowSpec(**{"size": sizes.get("vocabulary", 70), "soft": True, "hard": False, **case})
    logits, teacher, labels, soft, hard = inputs(spec, dtype, **sizes)
    kl, ce, exact = by_definition(spec, logits, teacher, labels, soft, hard)
    label_x = spec.transform.apply(logits.double()).gather(-1, labels[:, None]).squeeze(-1)
    with use_kernels(choice), record_dispatch() as taken:
        stats = row_stats(logits, teacher, spec)
        row_gradient_(logits, teacher, stats, soft, hard, labels, spec=spec)
    assert taken == ({"row_stats", "row_gradient_"} if choice == "kernel" else set())
    if spec.soft:
        torch.testing.assert_close(stats.kl_N.double(), kl, rtol=1e-5, atol=1e-5)
    if spec.hard:
        torch.testing.assert_close(stats.hard_N - label_x, ce, rtol=1e-5, atol=1e-5)
    assert ((logits.double() - exact).norm() / exact.norm()).item() < tolerance
    assert not logits[1].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_the_definition(case, monkeypatch):
    monkeypatch.setattr("surgery.core.logit_rows.MAX_ELEMENTS", {DEVICE: 140})
    check(case, torch.float64, "reference", 1e-6)
    check(case, torch.bfloat16, "reference", 4e-3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_are_the_definition(case):
    check(case, torch.float32, "kernel", 1e-5)
    check(case, torch.bfloat16, "kernel", 6e-3)


@gpu
@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_large_vocabularies(case):
    check(case, torch.bfloat16, "kernel", 6e-3, rows=3000, vocabulary=151936)


def test_what_is_refused():
    from surgery.kernels.linear_loss import accepts

    rows = torch.zeros(3, 8)
    assert accepts(rows, None) and accepts(rows[:, :4], rows.bfloat16())
    assert not accepts(rows.double(), None) and not accepts(rows.T, None) and not accepts(rows[:0], None)
