"""Products with packed integers, on a GPU or under Triton's interpreter: against the integers multiplied out, and where
they run.
"""

from __future__ import annotations

import pytest
import torch
from helpers.kernel_rows import patch_bfloat16_products, patch_tensor_loops
from helpers.slow import slow_where

from surgery.core.dispatch import load_kernels, record_dispatch, use_kernels
from surgery.modeling.modules import GuardedLinear
from surgery.modeling.quantize import quantize_module
from surgery.structures import STRUCTURES
from surgery.structures.base import config_from_dict
from surgery.structures.fp8 import quantize_tokens
from surgery.structures.quantized import Storage, dequantize_rows, quantize_rows, quantized_product

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts off the bits that bfloat16 lacks, and a GPU rounds to the nearest.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3 if DEVICE == "cuda" else 1e-2, torch.float16: 1e-3}
STORAGES = [Storage(8), Storage(8, 32), Storage(8, 8), Storage(4, 64), Storage(4, 8), Storage(4, 256), Storage(4)]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    patch_tensor_loops(monkeypatch)
    patch_bfloat16_products(monkeypatch)
    load_kernels()


def check_kernel(N, G, K, R, storage, dtype):
    """The integers and scales are those of the dtype; the exact product of their rounded weights is in float64."""
    torch.manual_seed(N * K + R)
    rows = (torch.randn(G, R, K, device=DEVICE) / K**0.5).to(dtype)
    integers, scale = quantize_rows(rows, storage)
    wide = torch.randn(N, K, G, device=DEVICE).to(dtype)
    exact = torch.einsum("nkg,grk->ngr", wide.double(), dequantize_rows(integers, scale, K, storage).double())
    with use_kernels("kernel"), torch.no_grad():
        for x in (wide.transpose(1, 2), wide.transpose(1, 2).contiguous()):
            kernel = quantized_product.select_kernel(x, integers, scale, storage)
            assert kernel is not None
            y = quantized_product(x, integers, scale, storage)
            assert y.shape == (N, G, R) and y.dtype == dtype
            error = float((y.double() - exact).norm() / exact.norm().clamp_min(1e-30))
            assert error < TOLERANCE[dtype], error
            alone = torch.cat([quantized_product(row[None], integers, scale, storage) for row in x])
            assert float((alone.double() - exact).norm() / exact.norm().clamp_min(1e-30)) < TOLERANCE[dtype]


SIZES = [(1, 1, 85, 33), (3, 2, 64, 17), (16, 1, 300, 5), (7, 1, 7, 40)]
CASES = [
    (sizes, storage, dtype) for sizes in SIZES for storage in STORAGES for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(
    ("sizes", "storage", "dtype"),
    slow_where(lambda sizes, _, dtype: dtype == torch.bfloat16 and sizes in (SIZES[1], SIZES[3]), CASES),
    ids=str,
)
def test_small(sizes, storage, dtype):
    check_kernel(*sizes, storage, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="too large for Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 4096, 14336), (5, 1, 14336, 4096), (16, 4, 1471, 2049), (2, 64, 64, 512)], ids=str
)
def test_large(sizes, storage, dtype):
    check_kernel(*sizes, storage, dtype)


def make_linear(name):
    if name == "dense":
        return GuardedLinear.from_weight(torch.randn(51, 37), torch.randn(51))
    options = {
        "btt": {"blocks": [4, 2]},
        "monarch": {"blocks": [4, 4]},
        "strided": {"blocks": [4, 3], "order": "strided"},
    }
    structure = "btt" if name == "strided" else name
    cls = STRUCTURES[STRUCTURES.config_type(structure)]
    config = cls.fit(config_from_dict({"structure": structure, **options.get(name, {})}), 51, 37, 0.9 * 51 * 37)
    linear = cls(37, 51, config)
    torch.nn.init.normal_(linear.bias)
    if name == "pivoted_low_rank":
        linear.place = torch.randperm(51).to(linear.place)
    return linear


@pytest.mark.parametrize("storage", [Storage(8), Storage(4, 16)], ids=str)
@pytest.mark.parametrize("name", ["dense", "low_rank", "pivoted_low_rank", "btt", "strided", "monarch"])
def test_linears_of_few_tokens_multiply_by_packed_cores(name, storage):
    torch.manual_seed(0)
    quantized = quantize_module(make_linear(name), storage).to(DEVICE)
    for tokens in (1, 16):
        x = torch.randn(2, tokens // 2, 37, device=DEVICE) if tokens > 1 else torch.randn(37, device=DEVICE)
        with use_kernels("kernel"), torch.no_grad(), record_dispatch() as names:
            y = quantized(x)
        assert names == {"quantized_product"}
        exact = x.double() @ quantized.dense().double().mT + quantized.bias.double()
        assert y.shape == exact.shape and float((y.double() - exact).norm() / exact.norm()) < 1e-5
        with use_kernels("reference"), torch.no_grad():
            assert torch.allclose(quantized(x), y, atol=1e-4)


def test_many_tokens_gradients_and_other_structures_are_multiplied_out():
    torch.manual_seed(0)
    dense, train = (
        quantize_module(make_linear("dense"), Storage(8)),
        quantize_module(make_linear("kronecker"), Storage(8)),
    )
    few = torch.randn(2, 37)
    for linear, x in ((dense, torch.randn(17, 37)), (dense, few.clone().requires_grad_()), (train, few)):
        with use_kernels("kernel"), record_dispatch() as names:
            y = linear(x)
        assert "quantized_product" not in names
        assert torch.allclose(y, x @ linear.dense().mT + linear.bias, atol=1e-4)
    with use_kernels("kernel"):
        x, integers, scale = few.bfloat16()[:, None], dense.weight, dense.weight_scale
        assert quantized_product.select_kernel(x, integers, scale, dense.storage) is None  # scales in another dtype
        assert quantized_product.select_kernel(few[:0, None], integers, scale, dense.storage) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(5, 33), (1, 16), pytest.param((700, 20000), marks=pytest.mark.gpu)], ids=str)
def test_tokens_in_e4m3(sizes, dtype):
    """Scales are equal, and values on a GPU; Triton's interpreter rounds some of them wrongly."""
    if DEVICE == "cpu" and sizes[1] > 100:
        pytest.skip("too large for Triton's interpreter")
    torch.manual_seed(sizes[1])
    x = (torch.randn(*sizes, device=DEVICE) * torch.logspace(-4, 2, sizes[0], device=DEVICE)[:, None]).to(dtype)
    x[0] = 0
    for rows in (x, x.t().contiguous().t()):
        with use_kernels("kernel"):
            assert quantize_tokens.select_kernel(rows) is not None
            found, scale = quantize_tokens(rows)
        exact, exact_scale = quantize_tokens.reference(rows)
        assert found.dtype == exact.dtype and torch.equal(scale, exact_scale)
        wrong = found.float() != exact.float()
        if DEVICE == "cuda":
            assert not wrong.any()
        else:
            assert wrong.float().mean() < 0.1 and bool((found.float() / exact.float())[wrong].abs().le(1.2).all())


@pytest.mark.parametrize("inputs", [33, 20001])
def test_a_nan_among_the_inputs_stays(inputs):
    """In FP8 a row with a NaN has NaN as its scale, and no other row."""
    x = torch.randn(3, inputs, device=DEVICE)
    x[1, -1] = torch.nan
    with use_kernels("kernel"):
        _, scale = quantize_tokens(x)
    assert scale.isnan().flatten().tolist() == [False, True, False]
    assert quantize_tokens.reference(x)[1].isnan().flatten().tolist() == [False, True, False]
