"""Quantized linears: integers within half a step, the same bits in memory and from files, and everything that is
refused.
"""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
import transformers
from conftest import MIXED
from helpers.small import FAMILIES, make_recipe, matrix_structures, model_outputs, tiny_inputs
from helpers.small_experts import write_experts
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import surgery
from surgery.checkpoint.source import open_converted_checkpoint
from surgery.checkpoint.tensor_names import load_checked_model
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.conversion.quantize_checkpoint import quantize
from surgery.core.errors import SurgeryError
from surgery.eval.model import open_model
from surgery.modeling.modules import build_module, quantized_entry
from surgery.modeling.quantize import quantize_live, quantize_module, stored_bytes
from surgery.planning.bits_recipe import read_bits
from surgery.structures import STRUCTURES
from surgery.structures.base import config_from_dict
from surgery.structures.low_rank import LowRank, cosine_transform
from surgery.structures.quantized import QuantizedLinear, Storage, dequantize_rows, quantize_rows
from surgery.training.models import open_trainable
from surgery.vllm.servable import check_config

OPTIONS = {"btt": {"blocks": [2, 4]}, "kronecker": {"blocks": [4, 4]}, "monarch": {"blocks": [4, 2]}}


def load(family, folder):
    with open(folder / "config.json") as file:
        cls = getattr(transformers, json.load(file)["architectures"][0])
    return cls.from_pretrained(folder).eval()


def quantized_linears(model):
    return {path: m for path, m in model.named_modules() if isinstance(m, QuantizedLinear)}


@pytest.fixture(scope="module")
def rounded(checkpoints, tmp_path_factory):
    """rounded(family) -> folder of its checkpoint with ranks of 8, made once."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp("rounded") / family
            rules = [{**rule, "rank": 8} if rule["structure"] != "monarch" else rule for rule in MIXED["rules"]]
            convert(str(checkpoints(family)), make_recipe(**{**MIXED, "rank": 8, "rules": rules}), made[family])
        return made[family]

    return make


# -- one linear ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits, within", [(8, 1 / 127), (4, 1 / 7)])
@pytest.mark.parametrize("largest", [65504.0, -65504.0])
def test_values_at_the_limit_of_float16_stay_finite(bits, within, largest):
    rows = torch.linspace(-1, 1, 32).repeat(4, 1)
    rows[:, 5] = largest
    rows = rows.half()
    found = dequantize_rows(*quantize_rows(rows, Storage(bits)), 32, Storage(bits))
    assert found.dtype == torch.float16 and bool(found.isfinite().all())
    assert float((found.double() - rows.double()).abs().max()) <= within * abs(largest)


@pytest.mark.parametrize("bits, steps", [(8, 0.5), (4, 2.0)])
@pytest.mark.parametrize("inputs, group", [(64, 16), (33, None), (7, 64), (85, 64), (33, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_within_steps_of_their_scale(bits, steps, inputs, group, dtype):
    """Half a step with 8 bits. With 4 bits the best scale may cut off the largest values of a group."""
    rows = torch.randn(5, 3, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[0, 0] = 0
    storage = Storage(bits, group)
    integers, scale = quantize_rows(rows, storage)
    assert integers.dtype == (torch.int8 if bits == 8 else torch.uint8) and scale.dtype == dtype
    assert integers.shape[-1] == (inputs if bits == 8 else -(-inputs // 2))
    assert scale.shape[-1] == -(-inputs // (group or inputs))
    found = dequantize_rows(integers, scale.float(), inputs, storage)
    step = scale.float().abs().repeat_interleave(storage.group_size(inputs), -1)[..., :inputs]
    # The scale itself was rounded to the dtype, which moves the largest value by up to 127 such roundings.
    assert bool(((found - rows.float()).abs() <= (steps + 127 * torch.finfo(dtype).eps) * step + 1e-6).all())
    assert bool((found[0, 0] == 0).all())
    again, _ = quantize_rows(found, storage) if bits == 8 and dtype == torch.float32 else (integers, scale)
    assert torch.equal(again, integers)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_on_a_gpu(bits):
    rows = torch.randn(6, 128, dtype=torch.bfloat16)
    there = quantize_rows(rows.cuda(), Storage(bits))
    assert all(torch.equal(x.cpu(), y) for x, y in zip(there, quantize_rows(rows, Storage(bits))))


@pytest.mark.parametrize("name", matrix_structures())
@pytest.mark.parametrize("bits, most", [(8, 0.02), (4, 0.3)])
def test_every_structure_computes_its_integers(name, bits, most):
    torch.manual_seed(0)
    cls = STRUCTURES[STRUCTURES.config_type(name)]
    config = cls.fit(config_from_dict({"structure": name, **OPTIONS.get(name, {})}), 48, 32, 0.8 * 48 * 32)
    linear, x = cls(32, 48, config), torch.randn(3, 5, 32)
    nn.init.normal_(linear.bias)
    quantized = quantize_module(linear, Storage(bits))
    y, expected = quantized(x), linear(x)
    assert float(((y - expected).norm() / expected.norm()).detach()) < most
    assert torch.allclose(y, x @ quantized.dense().mT + linear.bias, atol=1e-4)
    assert not any(p.requires_grad for p in quantized.parameters()) and quantized.weight.dim() > 2
    assert stored_bytes(quantized) < 0.6 * stored_bytes(linear)


@pytest.mark.parametrize("name", matrix_structures())
@pytest.mark.parametrize("bits, group, most", [(8, None, 8.8), (4, 64, 4.9)])
def test_scales_cost_little_in_every_structure(name, bits, group, most):
    """Groups are along the inputs that an output of a core sums over, which are many."""
    cls = STRUCTURES[STRUCTURES.config_type(name)]
    config = cls.fit(config_from_dict({"structure": name}), 512, 512, 0.5 * 512 * 512)
    linear = cls(512, 512, config, bias=False, device="meta", dtype=torch.bfloat16)
    quantized = QuantizedLinear(linear, Storage(bits, group))
    stored = 8 * sum(t.nbytes for name, t in quantized.named_buffers() if name not in linear._buffers)
    few = 1.3 if name == "monarch" else 0.0  # whose blocks have 8 inputs
    assert bits < stored / sum(core.numel() for core in linear.parameters()) < most + few


@pytest.mark.parametrize("name", ["tensor_train", "block_tensor_train"])
@pytest.mark.parametrize("bits", [8, 4])
def test_tensor_trains_with_scales_along_the_last_axis_still_open(name, bits):
    """As files were written before their entries had the key `scales`."""
    cls = STRUCTURES[STRUCTURES.config_type(name)]
    config = cls.fit(config_from_dict({"structure": name}), 48, 32, 0.8 * 48 * 32)
    linear, x = cls(32, 48, config), torch.randn(3, 32)
    nn.init.normal_(linear.bias)
    old = QuantizedLinear(linear, Storage(bits, 8, last_axis=True))
    entry = {**config.to_dict(), "in_features": 32, "out_features": 48, "bias": True}
    built = build_module({**entry, "bits": bits, "group": 8}, "cpu", torch.float32)
    built.load_state_dict(old.state_dict())
    assert torch.equal(built(x), old(x))
    new = QuantizedLinear(linear, Storage(bits, 8))
    built = build_module(quantized_entry(entry, Storage(bits, 8)), "cpu", torch.float32)
    built.load_state_dict(new.state_dict())
    assert torch.equal(built(x), new(x)) and stored_bytes(new) < stored_bytes(old)
    for table in ({"scales": "outputs"}, {"scales": "inputs", "structure": "low_rank", "rank": 8}):
        with pytest.raises(SurgeryError, match=r"damaged: scales: .* of structure"):
            kept = {k: v for k, v in entry.items() if k not in ("cores", "rank")} | {"rank": config.rank}
            build_module({**kept, "bits": bits, **table})


def test_factors_are_rotated_before_they_are_rounded_to_4_bits():
    """The product stays, and columns of very different norms lose less than rounded as they are."""
    g = torch.Generator().manual_seed(0)
    norms = torch.logspace(0, -3, 40)
    left, right = torch.randn(64, 40, generator=g) * norms, torch.randn(40, 96, generator=g)
    cls = STRUCTURES[LowRank]
    linear = cls.from_cores(LowRank(40), (64, 96), {"weight": left[None], "right": right / norms[:, None]})
    cores = linear.cores_to_round()
    whole = linear.dense().double()
    assert float((cores["weight"][0].double() @ cores["right"].double() - whole).norm() / whole.norm()) < 1e-6
    assert torch.allclose(cosine_transform(40) @ cosine_transform(40).mT, torch.eye(40), atol=1e-6)
    storage = Storage(4, 64)
    rotated = QuantizedLinear(linear, storage).dense()
    left_rounded, right_rounded = (
        dequantize_rows(*quantize_rows(core, storage), core.shape[-1], storage) for core in (left, linear.right.data)
    )
    plain = left_rounded @ right_rounded
    errors = [float((found - whole).norm() / whole.norm()) for found in (rotated, plain)]
    assert errors[0] < 0.2 and errors[0] < 0.5 * errors[1]


def test_columns_of_zeros_stay_finite():
    linear = STRUCTURES[LowRank].from_cores(
        LowRank(4), (8, 8), {"weight": torch.zeros(1, 8, 4), "right": torch.ones(4, 8)}
    )
    assert torch.equal(QuantizedLinear(linear, Storage(4, 8)).dense(), torch.zeros(8, 8))


# -- whole models --------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_loaded_and_in_memory_are_equal(family, converted, tmp_path):
    folder, inputs = converted(family), tiny_inputs(family, 2)
    before = load(family, folder)
    expected = model_outputs(before, inputs)
    result = quantize(str(folder), tmp_path / "int8", 8)
    model = load(family, tmp_path / "int8")
    found = model_outputs(model, inputs)
    assert float((found - expected).norm() / expected.norm()) < 0.1
    assert result["linears"] == len({path.partition(".parts.")[0] for path in quantized_linears(model)})
    assert not any(type(m) is nn.Linear for path, m in model.named_modules() if ".layers." in path or ".block." in path)

    live = quantize_live(before, 8)
    assert torch.equal(model_outputs(before, inputs), found)
    assert before.state_dict().keys() == model.state_dict().keys()
    assert live["linears"] == result["linears"]
    before.save_pretrained(tmp_path / "saved")
    assert torch.equal(model_outputs(load(family, tmp_path / "saved"), inputs), found)
    assert not list((tmp_path / "saved").glob("*.bin"))

    densify(str(tmp_path / "int8"), tmp_path / "dense")
    assert torch.allclose(model_outputs(load(family, tmp_path / "dense"), inputs), found, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_four_bits(family, rounded, tmp_path):
    folder, inputs = rounded(family), tiny_inputs(family, 2)
    quantize(str(folder), tmp_path / "int4", 4, 8)
    model, live = load(family, tmp_path / "int4"), load(family, folder)
    quantize_live(live, 4, 8)
    found = model_outputs(model, inputs)
    assert torch.equal(model_outputs(live, inputs), found) and bool(found.isfinite().all())
    assert model.dtype == torch.float32 and model.generate(inputs["input_ids"], max_new_tokens=2).shape[1] == 26
    half = load(family, tmp_path / "int4").to(torch.bfloat16)
    assert {m.weight.dtype for m in quantized_linears(half).values()} == {torch.uint8}
    assert bool(model_outputs(half, inputs).isfinite().all())


@pytest.mark.parametrize("bits, group", [(4, 64), (4, 32), (8, 16)])
def test_groups_need_not_divide_the_inputs(bits, group, checkpoints, tmp_path):
    """Ranks of shipped recipes are any numbers.

    Files and memory have the same bits, and one scale for each group that is begun.
    """
    recipe = make_recipe(structure="low_rank", keep=0.83)
    convert(str(checkpoints("llama")), recipe, tmp_path / "out")
    live, inputs = load("llama", tmp_path / "out"), tiny_inputs("llama", 2)
    expected = model_outputs(live, inputs)
    quantize(str(tmp_path / "out"), tmp_path / "small", bits, group)
    quantize_live(live, bits, group)
    found = model_outputs(load("llama", tmp_path / "small"), inputs)
    assert torch.equal(found, model_outputs(live, inputs)) and bool(found.isfinite().all())
    assert float((found - expected).norm() / expected.norm()) < (0.5 if bits == 4 else 0.1)
    linears = quantized_linears(live).values()
    assert any(m.shapes["right"][-1] % group or m.shapes["weight"][-1] % group for m in linears if m.config)
    for linear in linears:
        for name, shape in linear.shapes.items():
            assert getattr(linear, f"{name}_scale").shape[-1] == -(-shape[-1] // group)
            width = shape[-1] if bits == 8 else -(-shape[-1] // 2)
            assert getattr(linear, name).shape[-1] == width


def test_mixers_keep_working(checkpoints, tmp_path):
    recipe = make_recipe(structure="low_rank", attention={"mixer": "linear", "mask": "decay"})
    convert(str(checkpoints("llama")), recipe, tmp_path / "out")
    quantize(str(tmp_path / "out"), tmp_path / "int8")
    inputs = tiny_inputs("llama", 2)
    expected = model_outputs(load("llama", tmp_path / "out"), inputs)
    model, live = load("llama", tmp_path / "int8"), load("llama", tmp_path / "out")
    quantize_live(live)
    found = model_outputs(model, inputs)
    assert torch.equal(found, model_outputs(live, inputs))
    assert float((found - expected).norm() / expected.norm()) < 0.1
    assert not any(".mixer." in path for path in quantized_linears(model))
    densify(str(tmp_path / "int8"), tmp_path / "dense")
    assert torch.allclose(model_outputs(load("llama", tmp_path / "dense"), inputs), found, atol=1e-3, rtol=1e-3)
    surgery.densify(live)
    assert torch.allclose(model_outputs(live, inputs), found, atol=1e-3, rtol=1e-3) and not quantized_linears(live)


def test_experts(tmp_path):
    convert(str(write_experts("mixtral", tmp_path / "src")), make_recipe(structure="low_rank"), tmp_path / "out")
    quantize(str(tmp_path / "out"), tmp_path / "int8")
    inputs = tiny_inputs("llama", 2)
    live = load("mixtral", tmp_path / "out")
    quantize_live(live)
    assert torch.equal(model_outputs(load("mixtral", tmp_path / "int8"), inputs), model_outputs(live, inputs))
    assert any(".experts." in path for path in quantized_linears(live))


def test_reports_say_bytes(checkpoints, rounded, tmp_path):
    result = surgery.quantize(rounded("llama"), tmp_path / "int4", bits=4, group=8)
    files = sum(t.nbytes for t in load_file(tmp_path / "int4" / "model.safetensors").values())
    assert result["bytes_after"] == files < result["bytes_before"] and "bytes" in repr(result)
    seen = surgery.inspect(tmp_path / "int4")
    assert seen["checks"]["stored_bytes"] == seen["totals"]["bytes_after"] == files and seen["checks"]["as_reported"]
    assert "stored_params" not in seen["checks"] and "linears stored in 4 bits (scales of groups of 8)" in repr(seen)
    assert surgery.push(tmp_path / "int4", "me/model", license="apache-2.0", dry_run=True)["dry_run"]

    model = surgery.apply(AutoModelForCausalLM.from_pretrained(checkpoints("llama")), "low-rank-half")
    summary = surgery.quantize(model)
    assert surgery.inspect(model)["checks"]["stored_bytes"] == summary["bytes_after"] == stored_bytes(model)
    model.save_pretrained(tmp_path / "applied")
    assert surgery.inspect(tmp_path / "applied")["checks"]["as_reported"]


def test_an_adapter_trains_over_integers(converted, tmp_path):
    quantize(str(converted("llama")), tmp_path / "int8")
    base, ids = load("llama", tmp_path / "int8"), tiny_inputs("llama", 4, 16)["input_ids"]
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = get_peft_model(base, LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model.train()(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = {name.replace("base_layer.", ""): t for name, t in base.state_dict().items()}
    assert losses[-1] < losses[0] and all(torch.equal(after[name], t) for name, t in before.items())
    with pytest.raises(SurgeryError, match="has a PEFT adapter"):
        quantize_live(base)


# -- what is refused -----------------------------------------------------------------------------------
def test_refusals(checkpoints, converted, tmp_path):
    folder = str(converted("llama"))
    with pytest.raises(
        SurgeryError, match=r"not a converted checkpoint\..*--rules FILE with the line (.*) instead"
    ) as error:
        quantize(str(checkpoints("llama")), tmp_path / "out", 4)
    (tmp_path / "bits.yaml").write_text(re.search("the line (.*?) instead", str(error.value))[1])
    found = quantize(str(checkpoints("llama")), tmp_path / "out", rules=read_bits(tmp_path / "bits.yaml"))
    linears = quantized_linears(load("llama", tmp_path / "out"))
    assert found["linears"] == len(linears) > 0 and all(m.storage.bits == 4 for m in linears.values())
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "bits.yaml").unlink()
    with pytest.raises(SurgeryError, match="bits must be 8 or 4"):
        quantize(folder, tmp_path / "out", 3)
    with pytest.raises(SurgeryError, match="group must be one of 8, 16"):
        quantize(folder, tmp_path / "out", 4, 24)
    assert not list(tmp_path.iterdir())
    model = load("llama", converted("llama"))
    with pytest.raises(SurgeryError, match="LlamaForCausalLM is not a converted transformers model"):
        quantize_live(AutoModelForCausalLM.from_pretrained(checkpoints("llama")))
    with pytest.raises(SurgeryError, match="a folder and `out`, or a model without"):
        surgery.quantize(model, tmp_path / "out")

    quantize(folder, tmp_path / "out")
    with pytest.raises(SurgeryError, match="is quantized already"):
        quantize(str(tmp_path / "out"), tmp_path / "twice")
    with pytest.raises(SurgeryError, match="is quantized already"):
        quantize_live(load("llama", tmp_path / "out"))
    with pytest.raises(SurgeryError, match="in few bits, which cannot be trained"):
        open_trainable(str(tmp_path / "out"))
    check_config(open_converted_checkpoint(str(tmp_path / "out")).config, "out")  # vLLM's plugin serves it


def test_weights_that_are_not_finite_are_refused(converted, tmp_path):
    model = load("llama", converted("llama"))
    linear = model.model.layers[1].mlp.up_proj
    with torch.no_grad():
        next(iter(linear.parameters())).view(-1)[0] = torch.inf
    before = {path: type(module) for path, module in model.named_modules()}
    with pytest.raises(SurgeryError, match=r"layers.1.mlp.up_proj cannot be stored in 8 bits: .* not finite"):
        quantize_live(model)
    assert {path: type(module) for path, module in model.named_modules()} == before
    model.save_pretrained(tmp_path / "infinite")
    with pytest.raises(SurgeryError, match=r"up_proj.* holds 1 NaN or Inf"):
        quantize(str(tmp_path / "infinite"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_evaluations_name_no_number_of_parameters_for_integers(converted, tmp_path):
    """Tensors hold scales too, and two integers of 4 bits in an element."""
    quantize(str(converted("llama")), tmp_path / "out")
    assert open_model("base", str(tmp_path / "out")).parameters is None
    stored = sum(t.numel for t in open_converted_checkpoint(str(converted("llama"))).tensors.values())
    assert open_model("base", str(converted("llama"))).parameters == stored


def damage(folder, table=None, tensors=None):
    config = json.loads((folder / "config.json").read_text())
    for entry in config["quantization_config"]["modules"].values():
        entry |= table or {}
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        found = load_file(folder / "model.safetensors")
        save_file(tensors(found), folder / "model.safetensors", metadata={"format": "pt"})


SCALE, WEIGHT = "model.layers.1.mlp.up_proj.weight_scale", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "table, tensors, says",
    [
        ({"bits": 3}, None, "table in config.json is damaged: bits must be 8 or 4"),
        ({"bits": "8"}, None, "bits must be 8 or 4"),
        ({"bits": True}, None, "bits must be 8 or 4"),
        ({"group": 5}, None, "group must be one of"),
        ({"group": [8]}, None, "group must be one of"),
        ({"bits": 4}, None, "is torch.int8, not torch.uint8"),
        (None, lambda t: {k: v for k, v in t.items() if k != SCALE}, "lacks tensor .*up_proj.weight_scale"),
        (None, lambda t: {**t, SCALE: t[SCALE] * torch.nan}, "scales that are not finite"),
        (None, lambda t: {**t, SCALE: -t[SCALE]}, "scales that are not positive"),
        (None, lambda t: {**t, SCALE: (t[SCALE] * 0).int()}, "scales in torch.int32, which is no floating-point dtype"),
        (None, lambda t: {**t, WEIGHT: t[WEIGHT].bfloat16()}, "weight is torch.bfloat16, not torch.int8"),
    ],
)
def test_damaged_checkpoints(table, tensors, says, converted, tmp_path, tmp_path_factory):
    if not hasattr(test_damaged_checkpoints, "made"):
        made = tmp_path_factory.mktemp("quantized") / "int8"
        quantize(str(converted("llama")), made)
        test_damaged_checkpoints.made = made
    folder = tmp_path / "out"
    shutil.copytree(test_damaged_checkpoints.made, folder)
    damage(folder, table, tensors)
    with pytest.raises(SurgeryError, match=says):
        load_checked_model(AutoModelForCausalLM, str(folder), str(folder))


def test_weights_that_are_no_integers_are_not_multiplied_out(converted, tmp_path):
    quantize(str(converted("llama")), tmp_path / "out")
    damage(tmp_path / "out", tensors=lambda t: {**t, WEIGHT: t[WEIGHT].float()})
    with pytest.raises(SurgeryError, match=r"weight is torch\.float32, not torch\.int8"):
        densify(str(tmp_path / "out"), tmp_path / "dense")
    assert not (tmp_path / "dense").exists()


# -- torchao -------------------------------------------------------------------------------------------
def test_torchao_quantizes_converted_models(rounded, checkpoints, tmp_path):
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, PerGroup, PerTensor, quantize_

    inputs = tiny_inputs("llama", 2)
    for config, options in (
        (Int8WeightOnlyConfig(), (8, None)),
        (Int8WeightOnlyConfig(granularity=PerGroup(8)), (8, 8)),
        (Int4WeightOnlyConfig(group_size=8), (4, 8)),
    ):
        model, ours = load("llama", rounded("llama")), load("llama", rounded("llama"))
        quantize_(model, config)
        quantize_live(ours, *options)
        assert torch.equal(model_outputs(model, inputs), model_outputs(ours, inputs))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(model_outputs(load("llama", tmp_path / "saved"), inputs), model_outputs(model, inputs))

    model = load("llama", rounded("llama"))
    with pytest.raises(SurgeryError, match="can be quantized with Int8WeightOnlyConfig"):
        quantize_(model, Int8WeightOnlyConfig(granularity=PerTensor()))
    with pytest.raises(SurgeryError, match="give the whole, not a part"):
        quantize_(model.model.layers[0], Int8WeightOnlyConfig())
    assert not quantized_linears(model)
    dense = AutoModelForCausalLM.from_pretrained(checkpoints("llama"))
    quantize_(dense, Int8WeightOnlyConfig())
    assert type(dense.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"


RULES = "rules:\n- {match: 'mlp.*', layers: '0', bits: 4, group: 16}\n- {match: mlp.down, bits: 8}\n"


def test_rules_give_linears_their_bits(checkpoints, tmp_path):
    """Later rules win, and linears without a rule keep their numbers."""
    (tmp_path / "bits.yaml").write_text(RULES)
    convert(str(checkpoints("llama")), make_recipe(**MIXED), tmp_path / "converted")
    summary = surgery.quantize(tmp_path / "converted", tmp_path / "out", rules=tmp_path / "bits.yaml")
    model = load("llama", tmp_path / "out")
    stored = {path: (m.storage.bits, m.storage.group) for path, m in quantized_linears(model).items()}
    assert stored == {
        **{f"model.layers.0.mlp.{name}_proj": (4, 16) for name in ("gate", "up")},
        **{f"model.layers.{layer}.mlp.down_proj": (8, None) for layer in (0, 1)},
    }
    assert summary["linears"] == 4 and summary["bits"] == "4 or 8" and summary["group"] is None
    report = json.loads((tmp_path / "out" / "surgery_report.json").read_text())
    assert report["storage"]["bits"] == "4 or 8" and "4 or 8 bits (groups by their bits)" in str(
        surgery.inspect(tmp_path / "out")
    )


@pytest.mark.parametrize(
    "text, says",
    [
        ("rules: []", "rules"),
        ("rules: [{match: mlp.down, bits: 3}]", "bits"),
        ("rules: [{match: mlp.down, bits: 4, command: rm}]", "unknown key 'rules.0.command'"),
        ("rules: [{match: mlp.dwn, bits: 4}]", r"rules.0 matches no linear \('mlp.dwn', layers :\)"),
        ("rules: [{match: mlp.down, layers: '9', bits: 4}]", "layers 9"),
        ("rules: {", "is not YAML"),
    ],
)
def test_rules_that_are_refused(text, says, checkpoints, tmp_path):
    (tmp_path / "bits.yaml").write_text(text)
    with pytest.raises(SurgeryError, match=says):
        surgery.quantize(checkpoints("llama"), tmp_path / "out", rules=tmp_path / "bits.yaml")
    assert not (tmp_path / "out").exists()
