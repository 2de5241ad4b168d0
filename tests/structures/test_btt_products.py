"""BTT as two batched products: outputs and gradients against float64, for any shape, layout, dtype and kind of
differentiation.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from surgery.core.dispatch import use_kernels
from surgery.structures import STRUCTURES, btt_products
from surgery.structures.btt import BTT, btt_linear, btt_mvm
from surgery.structures.monarch import Monarch

SHAPES = [  # c, d, b, a, s, in, out
    (4, 16, 4, 16, 8, None, None),
    (5, 7, 3, 11, 2, 33, 31),  # nothing divides anything
    (1, 20, 1, 24, 5, None, None),  # low rank
    (8, 8, 8, 8, 1, None, None),  # Monarch
    (2, 9, 1, 4, 3, 17, 3),
]
TOKENS = [(), (1,), (0,), (2, 0), (3, 5), (150,)]  # leading dimensions; 150 tokens put z's tokens last


def random_inputs(shape, leading=(5,), dtype=torch.float64):
    """Return x, right, left, bias and dy; x has columns past the last block's end where the blocks do not divide."""
    c, d, b, a, s, in_, out = shape
    torch.manual_seed(c + s)
    in_, out = in_ or c * d, out or b * a
    sizes = (*leading, in_), (c, d, b, s), (b, c, s, a), (out,), (*leading, out)
    return [torch.randn(size).to(dtype) / (d**0.5 if i == 1 else 1) for i, size in enumerate(sizes)]


def outputs(function, x, right, left, bias, dy):
    """Return y and the gradients of x, right, left and the bias."""
    inputs = [t.detach().requires_grad_() for t in (x, right, left, bias)]
    y = function(*inputs, dy.shape[-1])
    return [y, *torch.autograd.grad(y, inputs, dy)]


def dense_product(x, right, left, bias, out):
    """Return x W^T + bias with the dense matrix of the cores."""
    blocks = torch.einsum("cdbs,bcsa->bacd", right, left).flatten(2).flatten(0, 1)
    return x @ blocks[:out, : x.shape[-1]].mT + bias


@pytest.mark.parametrize("leading", TOKENS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients(shape, leading):
    given = random_inputs(shape, leading)
    found, expected = outputs(btt_products.btt_products, *given), outputs(dense_product, *given)
    assert all(a.shape == b.shape and torch.allclose(a, b) for a, b in zip(found, expected))
    with torch.no_grad():
        assert torch.allclose(btt_products.btt_products(*given[:4], given[4].shape[-1]), expected[0])


@pytest.mark.parametrize("leading", [(7,), (150,)], ids=str)
@pytest.mark.parametrize("keeps_z", [True, False])
def test_z_may_be_computed_again(leading, keeps_z):
    """A rank at which z has more elements than x and y together is computed again in the backward pass."""
    shape = (4, 8, 4, 8, 2 if keeps_z else 6, None, None)
    given = random_inputs(shape, leading)
    y = btt_products.btt_products(*(t.clone().requires_grad_() for t in given[:4]), 32)
    assert sum(x is not None for x in y.grad_fn.saved_tensors) == (4 if keeps_z else 3)
    found, expected = outputs(btt_products.btt_products, *given), outputs(dense_product, *given)
    assert all(torch.allclose(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("leading", [(3, 5), (2, 75)], ids=str)
def test_inputs_that_are_not_contiguous(leading):
    shape = SHAPES[1]
    x, right, left, bias, dy = random_inputs(shape, leading)
    wide = torch.randn(*leading, x.shape[-1] + 3, dtype=x.dtype)
    views = [x.mT.contiguous().mT, x.transpose(0, 1).contiguous().transpose(0, 1), wide[..., 2:-1]]
    for view in views:
        given = view, right.mT.contiguous().mT, left.transpose(0, 2).contiguous().transpose(0, 2), bias
        y = btt_products.btt_products(*given, dy.shape[-1])
        assert torch.allclose(y, dense_product(*given, dy.shape[-1]))
    x, out = x.requires_grad_(), dy.shape[-1]
    one, other = (torch.autograd.grad(f(x, right, left, bias, out).sum(), x)[0] for f in (btt_linear, dense_product))
    assert torch.allclose(one, other)  # the gradient of a sum is one number, expanded


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("leading", [(1,), (40,), (700,)], ids=str)
def test_precisions(dtype, tolerance, leading):
    given = random_inputs(SHAPES[0], leading, dtype)
    expected = outputs(dense_product, *(t.double() for t in given))
    for a, b in zip(outputs(btt_products.btt_products, *given), expected):
        assert a.dtype == dtype and (a.double() - b).norm() < tolerance * b.norm()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 2)])
@pytest.mark.parametrize("leading", [(6,), (150,)], ids=str)
def test_only_the_gradients_that_are_needed(wanted, leading):
    *inputs, dy = random_inputs(SHAPES[1], leading)
    inputs = [t.requires_grad_(i in wanted) for i, t in enumerate(inputs)]
    chosen = [inputs[i] for i in wanted]
    found, expected = (
        torch.autograd.grad(f(*inputs, dy.shape[-1]), chosen, dy) for f in (btt_products.btt_products, dense_product)
    )
    assert all(torch.allclose(a, b) for a, b in zip(found, expected))


def test_x_is_not_copied(monkeypatch):
    """With tokens last the products read x and z and write y in the memory that they have."""
    x, right, left, _, dy = random_inputs(SHAPES[0], (300,))
    calls, product = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *args, **out: calls.append((*args, out["out"])) or product(*args, **out))
    y = btt_products.btt_products(x, right, left, None, dy.shape[-1])
    (_, x_read, z_written), (z_read, _, y_written) = calls
    assert x_read.data_ptr() == x.data_ptr() and y_written.data_ptr() == y.data_ptr()
    assert z_written.data_ptr() == z_read.data_ptr()
    for matrix in (x_read, z_written, z_read, y_written):
        assert 1 in matrix.stride()[1:], "BLAS takes matrices with one contiguous dimension"


def test_the_cpu_takes_it_and_says_when_not(monkeypatch):
    x, right, left, bias, _ = random_inputs(SHAPES[0])
    calls = []
    real = btt_products.btt_products
    monkeypatch.setattr("surgery.structures.btt.btt_products", lambda *args: calls.append(1) or real(*args))
    y = btt_linear(x, right, left, bias, 64)
    assert calls and torch.allclose(y, dense_product(x, right, left, bias, 64))
    assert not btt_products.supports_products(x.float(), right, left), "mixed dtypes"
    assert not btt_products.supports_products(torch.zeros(3, 64, dtype=torch.int64), *(2 * [torch.zeros(3, 64).long()]))


def test_autocast():
    x, right, left, bias, dy = (t.float() for t in random_inputs(SHAPES[1]))
    inputs = [t.requires_grad_() for t in (x, right, left, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        y = btt_linear(*inputs, dy.shape[-1])
    assert y.dtype == torch.bfloat16
    expected = dense_product(*inputs, dy.shape[-1])
    for a, b in zip(torch.autograd.grad(y, inputs, dy.bfloat16()), torch.autograd.grad(expected, inputs, dy)):
        assert a.dtype == torch.float32 and (a - b).norm() < 2e-2 * b.norm()


def test_every_kind_of_differentiation():
    """Gradients of gradients, function transforms and forward mode, as for PyTorch's own functions."""
    x, right, left, bias, _ = random_inputs((2, 2, 1, 3, 2, None, None), (2,))
    run = lambda *given: btt_linear(*given, 3)  # noqa: E731
    inputs = tuple(t.requires_grad_() for t in (x, right, left, bias))
    assert torch.autograd.gradcheck(run, inputs) and torch.autograd.gradgradcheck(run, inputs)
    given = tuple(t.detach() for t in inputs)
    by_row = torch.func.vmap(lambda row: run(row, *given[1:]))(given[0])
    assert torch.allclose(by_row, run(*given))
    jacobian = torch.func.jacrev(run)(*given)
    assert torch.allclose(jacobian, torch.autograd.functional.jacobian(lambda x: run(x, *given[1:]), given[0]))
    with forward_ad.dual_level():
        dual = run(forward_ad.make_dual(given[0], torch.ones_like(given[0])), *given[1:])
        slope = forward_ad.unpack_dual(dual).tangent
    assert torch.allclose(slope, run(torch.ones_like(given[0]), *given[1:3], torch.zeros_like(given[3])))


@pytest.mark.parametrize("config", [BTT(blocks=(4, 4), rank=8), Monarch(blocks=4), Monarch(blocks=(16, 16))], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 600])
def test_linears_are_their_dense_matrix(config, tokens):
    cls = STRUCTURES[config]
    linear = cls(64, 64, cls.fit(config, 64, 64, 4096))
    torch.nn.init.normal_(linear.bias)
    x = torch.randn(tokens, 64)
    expected = x.double() @ linear.dense().double().mT + linear.bias.double()
    with use_kernels("reference"):
        assert (linear(x).double() - expected).norm() < 1e-5 * expected.norm()


def test_meta_and_fake_tensors_have_the_right_shape():
    linear = STRUCTURES[BTT](64, 48, BTT(blocks=(4, 4), rank=3), device="meta")
    assert linear(torch.empty(2, 5, 64, device="meta")).shape == (2, 5, 48)
    with torch._subclasses.FakeTensorMode():
        linear = STRUCTURES[BTT](64, 48, BTT(blocks=(4, 4), rank=3))
        assert linear(torch.empty(2, 5, 64)).shape == (2, 5, 48)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_any_number_of_rows(strict):
    """One exported program serves one token and many, without the rule on the number of rows that eager calls
    follow.
    """
    linear = STRUCTURES[BTT](64, 48, BTT(blocks=(4, 4), rank=3))
    rows = torch.export.Dim("rows", min=1, max=4096)
    program = torch.export.export(linear, (torch.randn(2, 7, 64),), dynamic_shapes=({1: rows},), strict=strict)
    for tokens in (1, 500):
        x = torch.randn(2, tokens, 64)
        assert torch.allclose(program.module()(x), linear(x), atol=1e-5)


def test_compiled_with_any_number_of_rows():
    linear = STRUCTURES[BTT](64, 48, BTT(blocks=(4, 4), rank=3))
    torch.compiler.reset()
    compiled = torch.compile(linear, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (2, 500, 3):
        x, y = torch.randn(tokens, 64), []
        for call in (compiled, linear):
            y.append(torch.autograd.grad(call(x).square().sum(), list(linear.parameters())))
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-3) for a, b in zip(*y))


def test_the_einsum_reference_agrees():
    x, right, left, _, _ = random_inputs(SHAPES[0])
    expected = btt_mvm(x.view(-1, 4, 16), right, left).flatten(1)
    assert torch.allclose(btt_products.btt_products(x, right, left, None, 64), expected)
