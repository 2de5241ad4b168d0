"""Linears in FP8: products of rounded values, files and memory alike, and what is refused."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
import torch
from helpers.small import make_recipe, model_outputs, tiny_inputs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from surgery.cli.main import main
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.conversion.quantize_checkpoint import quantize
from surgery.core.errors import SurgeryError
from surgery.modeling.modules import GuardedLinear
from surgery.modeling.quantize import quantize_live, quantize_module
from surgery.structures import STRUCTURES
from surgery.structures.base import config_from_dict
from surgery.structures.fp8 import E4M3, fp8_product, pad_sizes, supports_scaled_mm
from surgery.structures.quantized import QuantizedLinear, Storage, dequantize_rows, quantize_rows

FP8 = Storage(8, format="fp8")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = {"btt": {"blocks": [4, 2]}, "strided": {"blocks": [4, 3], "order": "strided"}, "monarch": {"blocks": [4, 4]}}


def relative_error(found, exact):
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stored_values_are_within_half_a_step_of_e4m3(dtype):
    """Three bits of mantissa: 2^-4 of the value, and 2^-10 of the scale below the normal numbers."""
    rows = torch.randn(5, 7, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[0, 0], rows[1, 1, 3] = 0, 6e4
    stored, scale = quantize_rows(rows, FP8)
    assert stored.dtype == E4M3 and stored.shape == rows.shape and scale.shape == (5, 7, 1) and scale.dtype == dtype
    found = stored.float() * scale.float()
    step = 2**-4 + 448 * torch.finfo(dtype).eps  # a scale that was rounded down cuts the largest value
    assert bool(((found - rows.float()).abs() <= step * rows.float().abs() + 2**-10 * scale.float().abs()).all())
    assert bool((found[0, 0] == 0).all()) and bool(dequantize_rows(stored, scale, 33, FP8).isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_the_rounded_values(dtype):
    """The definition in float64, from values that torch rounds to e4m3."""
    torch.manual_seed(0)
    x, weight = torch.randn(6, 48).to(dtype), (torch.randn(32, 48) / 7).to(dtype)
    x[1] = 0
    x[2] *= 1e3
    stored, scale = quantize_rows(weight, FP8)
    sizes = x.float().abs().amax(-1, keepdim=True) / 448
    sizes[1] = 1
    rounded = (x.float() / sizes).clamp(-448, 448).to(E4M3).double() * sizes.double()
    exact = rounded @ (stored.double() * scale.double()).mT
    y = fp8_product(x, stored, scale[:, 0])
    assert y.dtype == dtype and y.shape == (6, 32) and bool((y[1] == 0).all())
    assert relative_error(y, exact) < {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
    assert relative_error(y, x.double() @ weight.double().mT) < 0.05
    assert all(torch.equal(fp8_product(row[None], stored, scale[:, 0])[0].isnan(), y[0].isnan()) for row in x)


@pytest.mark.parametrize("sizes", [(48, 32), (33, 32), (48, 37), (5, 3)], ids=str)
def test_sizes_are_padded_with_zeros(sizes):
    """`_scaled_mm` takes multiples of 16: the first outputs of the padded product are the product."""
    torch.manual_seed(0)
    stored, scale = quantize_rows(torch.randn(*sizes), FP8)
    x = torch.randn(7, sizes[1]).to(E4M3)
    x_NK, weight_RK, scale_R = pad_sizes(x, stored, scale[:, 0])
    assert all(size % 16 == 0 for size in weight_RK.shape) and x_NK.shape == (7, weight_RK.shape[1])
    y = (x_NK.float() @ weight_RK.float().mT) * scale_R
    assert relative_error(y[:, : sizes[0]], (x.float() @ stored.float().mT) * scale[:, 0]) < 1e-6
    assert scale_R.shape == weight_RK.shape[:1] and bool((y[:, sizes[0] :] == 0).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 17, 8192])
@pytest.mark.parametrize("sizes", [(4096, 4096), (1024, 14336), (96, 80), (90, 70)], ids=str)
def test_the_gpu_computes_the_same_function(sizes, tokens):
    torch.manual_seed(0)
    out, in_ = sizes
    x, weight = torch.randn(tokens, in_).bfloat16(), (torch.randn(out, in_) / in_**0.5).bfloat16()
    stored, scale = quantize_rows(weight, FP8)
    exact = fp8_product(x.float(), stored, scale[:, 0])
    there = [t.cuda() for t in (x, stored, scale[:, 0])]
    assert supports_scaled_mm(there[0]) == (torch.cuda.get_device_capability() >= (9, 0))
    assert relative_error(fp8_product(*there).cpu(), exact) < 1e-2


def make_linear(name):
    if name == "dense":
        return GuardedLinear.from_weight(torch.randn(51, 37), torch.randn(51))
    structure = "btt" if name == "strided" else name
    cls = STRUCTURES[STRUCTURES.config_type(structure)]
    config = cls.fit(config_from_dict({"structure": structure, **OPTIONS.get(name, {})}), 51, 37, 0.9 * 51 * 37)
    linear = cls(37, 51, config)
    torch.nn.init.normal_(linear.bias)
    return linear


@pytest.mark.parametrize("name", ["dense", "low_rank", "pivoted_low_rank", "btt", "strided", "monarch"])
def test_structures_round_the_inputs_of_every_product(name):
    torch.manual_seed(0)
    linear = make_linear(name)
    stored = quantize_module(linear, FP8)
    few, many = torch.randn(3, 37), torch.randn(2, 40, 37)
    for x in (few, many, few[0]):
        y, plain = stored(x), x @ stored.dense().mT + stored.bias
        assert y.shape == plain.shape and 1e-4 < relative_error(y, plain) < 0.1 and relative_error(y, linear(x)) < 0.15
    with torch.no_grad():
        assert torch.equal(torch.cat([stored(row[None]) for row in few]).argmax(-1), stored(few).argmax(-1))
    trained = few.clone().requires_grad_()
    stored(trained).sum().backward()  # with gradients, inputs are not rounded
    assert torch.allclose(trained.grad, stored.dense().sum(0).expand_as(few), atol=1e-4)
    half = stored.half()
    assert half.weight.dtype == E4M3 and half.weight_scale.dtype == torch.float16
    assert torch.equal(half.float().weight.view(torch.uint8), stored.weight.view(torch.uint8))


@pytest.fixture(scope="module", params=["low_rank", "pivoted_low_rank"])
def pair(request, checkpoints, tmp_path_factory):
    """Folders of a converted checkpoint and of the same in fp8."""
    folder = tmp_path_factory.mktemp(request.param)
    recipe = make_recipe(structure=request.param, keep=0.7)
    convert(str(checkpoints("llama")), recipe, folder / "out")
    summary = quantize(str(folder / "out"), folder / "fp8", format="fp8")
    assert summary["format"] == "fp8" and summary["bits"] == 8
    return folder


def test_saved_loaded_and_in_memory_are_equal(pair, tmp_path):
    load = AutoModelForCausalLM.from_pretrained
    inputs, before = tiny_inputs("llama", 2), load(pair / "out").eval()
    expected = model_outputs(before, inputs)
    model = load(pair / "fp8").eval()
    stored = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    assert stored and all(m.storage == FP8 and m.weight.dtype == E4M3 for m in stored)
    found = model_outputs(model, inputs)
    assert relative_error(found, expected) < 0.2

    live = quantize_live(before, format="fp8")
    assert live["format"] == "fp8" and torch.equal(model_outputs(before, inputs), found)
    before.save_pretrained(tmp_path / "saved")
    assert torch.equal(model_outputs(load(tmp_path / "saved").eval(), inputs), found)
    tensors = {name: t for file in (pair / "fp8").glob("*.safetensors") for name, t in load_file(file).items()}
    assert {t.dtype for name, t in tensors.items() if name.endswith(("_proj.weight", "_proj.right"))} == {E4M3}
    table = json.loads((pair / "fp8" / "config.json").read_text())["quantization_config"]["modules"]
    assert all((entry["bits"], entry["format"]) == (8, "fp8") for entry in table.values())

    half = load(pair / "fp8", dtype=torch.bfloat16).eval()
    assert all(
        m.weight.dtype == E4M3 and m.weight_scale.dtype == torch.bfloat16
        for m in half.modules()
        if isinstance(m, QuantizedLinear)
    )
    assert bool(model_outputs(half, inputs).isfinite().all())
    assert model.generate(inputs["input_ids"], max_new_tokens=2).shape[1] == 26

    densify(str(pair / "fp8"), tmp_path / "dense")
    assert relative_error(model_outputs(load(tmp_path / "dense").eval(), inputs), found) < 0.2


@pytest.mark.parametrize("loads", [AutoModelForCausalLM.from_pretrained, lambda f: densify(str(f), f / "../dense")])
def test_damaged_values_are_refused(loads, pair, tmp_path):
    def damaged(name, change):
        folder = tmp_path / name
        shutil.copytree(pair / "fp8", folder)
        tensors = load_file(folder / "model.safetensors")
        key = next(key for key in tensors if f"{key}_scale" in tensors)
        tensors[key] = change(tensors[key])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    not_a_number = torch.tensor(0x7F, dtype=torch.uint8).view(E4M3)
    for name, change, says in (
        ("nan", lambda x: torch.full_like(x, float(not_a_number)), "has values that are not finite"),
        ("e5m2", lambda x: x.float().to(torch.float8_e5m2), "is torch.float8_e5m2, not torch.float8_e4m3fn"),
        ("wide", lambda x: x.bfloat16(), "is torch.bfloat16, not torch.float8_e4m3fn"),
    ):
        with pytest.raises(SurgeryError, match=says):
            loads(damaged(name, change))
    assert not (tmp_path / "dense").exists()
    folder = damaged("int", lambda x: x)  # the table forgets that it is fp8
    config = json.loads((folder / "config.json").read_text())
    for entry in config["quantization_config"]["modules"].values():
        entry.pop("format", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SurgeryError, match=r"is torch.float8_e4m3fn, not torch.int8"):
        loads(folder)


def test_the_command_says_what_it_stored(pair, tmp_path, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["quantize", str(pair / "out"), "--format", "fp8", "--out", str(tmp_path / "small")])
    assert "in 8 bits (fp8, one scale per output)" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["inspect", str(tmp_path / "small"), "--json"])
    storage = json.loads(capsys.readouterr().out)["storage"]
    assert (storage["bits"], storage["format"], storage["linears"]) == (8, "fp8", 14)


def test_what_has_no_product_in_fp8_is_refused(pair, checkpoints, tmp_path):
    store = partial(quantize, str(pair / "out"), tmp_path / "x")
    with pytest.raises(SurgeryError, match="format fp8 has 8 bits and one scale for each output"):
        store(4, format="fp8")
    with pytest.raises(SurgeryError, match="format fp8 has 8 bits and one scale for each output"):
        store(8, 64, format="fp8")
    with pytest.raises(SurgeryError, match="format must be int or fp8"):
        store(format="fp9")
    recipe = make_recipe(structure="kronecker", blocks=[4, 4], keep=0.7)
    convert(str(checkpoints("llama")), recipe, tmp_path / "kronecker")
    with pytest.raises(SurgeryError, match=r"cannot be stored in fp8: .* has no product in fp8.*Use format int"):
        quantize(str(tmp_path / "kronecker"), tmp_path / "x", format="fp8")
    assert not (tmp_path / "x").exists()
