"""Layers without attention (`mixer: none`) or without an MLP (`structure: dropped`), from the plan to the dense model."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.small import make_recipe, model_outputs, tiny_config, tiny_inputs
from safetensors.torch import load_file, save_file

import surgery
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify, densify_live
from surgery.conversion.quantize_checkpoint import quantize
from surgery.core.errors import SurgeryError
from surgery.planning.plan import make_plan
from surgery.publish.summary import inspect

ATTENTION = {"structure": "dense", "attention": {"mixer": "none", "layers": "0"}}
BOTH = {**ATTENTION, "rules": [{"match": "mlp.*", "structure": "dropped", "layers": "1"}]}
FAMILIES = ("llama", "gpt2", "phi3", "gpt_neox", "qwen3", "gemma2", "bert")


def source(folder, family="llama"):
    torch.manual_seed(0)
    cls, config = tiny_config(family)
    model = cls(config).eval()
    model.save_pretrained(folder / "source")
    save_file(tiny_inputs(family, 4, 48), folder / "inputs.safetensors")
    return model


def without(model, family):
    """The model with zero weights in the linears of layer 0's attention and of layer 1's MLP; biases stay."""
    from surgery.architectures.linears import find_linears

    for linear in find_linears(model).linears:
        is_attention = any(role.startswith("attention") for role in linear.roles)
        if linear.index == (0 if is_attention else 1):
            torch.nn.init.zeros_(model.get_submodule(linear.path).weight)
    return model


@pytest.mark.parametrize("keep", [1.0, {"attention.*": 0.5}])
def test_mlps_are_dropped_whatever_keep_says(keep, tmp_path):
    source(tmp_path)
    recipe = make_recipe(structure="low_rank", keep=keep, rules=BOTH["rules"])
    plan = make_plan(MetaModel(open_checkpoint(str(tmp_path / "source"))), recipe)
    dropped = [path for path, targets in plan.targets.items() if all(target.is_dropped for target in targets)]
    assert dropped == [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]


@pytest.mark.parametrize("family", FAMILIES)
def test_dropped_parts_are_zero_weights(family, tmp_path):
    """Converted, loaded, saved again and densified on disk and in memory: the original with zero weights."""
    original, inputs = source(tmp_path, family), tiny_inputs(family, 2, 12, seed=4)
    expected = model_outputs(without(original, family), inputs)
    convert(str(tmp_path / "source"), make_recipe(**BOTH), tmp_path / "out")
    model = type(original).from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(model_outputs(model, inputs), expected)
    model.save_pretrained(tmp_path / "again")
    again = type(original).from_pretrained(tmp_path / "again").eval()
    torch.testing.assert_close(model_outputs(again, inputs), expected)
    densify(str(tmp_path / "out"), tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    dense = type(original).from_pretrained(tmp_path / "dense").eval()
    assert type(dense) is type(original)
    torch.testing.assert_close(model_outputs(dense, inputs), expected)
    densify_live(model)
    assert type(model) is type(original) and not hasattr(model.config, "quantization_config")
    torch.testing.assert_close(model_outputs(model, inputs), expected)


@pytest.mark.parametrize("calibrated", [False, True])
def test_no_weight_is_stored(calibrated, tmp_path):
    model = source(tmp_path)
    text = {"calibration": str(tmp_path / "inputs.safetensors"), "tokens": 192, "length": 48, "holdout": 0.25}
    tuned = {**text, "tune": {"layers": 1, "model": 1, "norms": True}} if calibrated else {}
    report = convert(str(tmp_path / "source"), make_recipe(**BOTH, **tuned), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    empty = {name for name, tensor in tensors.items() if tensor.numel() == 0}
    names = [f"self_attn.{p}_proj" for p in "qkvo"], [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    assert empty == {f"model.layers.{n}.{name}.weight" for n, some in enumerate(names) for name in some}
    before = sum(p.numel() for p in model.parameters())
    gone = sum(model.get_submodule(name.removesuffix(".weight")).weight.numel() for name in empty)
    assert report["totals"]["params_after"] == sum(t.numel() for t in tensors.values()) == before - gone
    told = inspect(str(tmp_path / "out"))
    (row,), cache = told["mixer_rows"], told["attention_totals"]["cache_bytes"]
    assert row["mixer"] == "none" and {after for _, after in row["cache_bytes"].values()} == {0}
    assert all(2 * after == before for before, after in cache.values())  # of two layers one has a cache


@pytest.mark.parametrize("layers", ["0", ":"])
def test_generation_without_attention_in_the_first_layer(layers, tmp_path):
    """The lengths of masks and positions are read from the cache of layer 0: it counts tokens all the same."""
    original, ids = source(tmp_path), tiny_inputs("llama", 2, 12, seed=4)["input_ids"]
    recipe = make_recipe(structure="dense", attention={"mixer": "none", "layers": layers})
    convert(str(tmp_path / "source"), recipe, tmp_path / "out")
    model = type(original).from_pretrained(tmp_path / "out").eval()
    greedy = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **greedy)
    assert torch.equal(model.generate(ids, **greedy), expected)
    assert torch.equal(model.generate(ids, cache_implementation="static", **greedy), expected)
    assert torch.equal(model.generate(ids[:1], prompt_lookup_num_tokens=3, **greedy), expected[:1])
    beams = model.generate(ids, use_cache=False, num_beams=3, **greedy)
    assert torch.equal(model.generate(ids, num_beams=3, **greedy), beams)
    padded = torch.cat([torch.full((2, 3), 1), ids], dim=1)
    mask = (torch.arange(15) >= 3).long().expand(2, 15)
    assert torch.equal(model.generate(padded, attention_mask=mask, **greedy)[:, 3:], expected)


def test_training_keeps_dropped_parts(tmp_path):
    model = surgery.apply(source(tmp_path), make_recipe(**BOTH)).train()
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-2), tiny_inputs("llama", 2, 12)["input_ids"]
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_dropped_parts_are_not_quantized(tmp_path):
    original, inputs = source(tmp_path), tiny_inputs("llama", 2, 12, seed=4)
    convert(str(tmp_path / "source"), make_recipe(**BOTH), tmp_path / "out")
    summary = quantize(str(tmp_path / "out"), tmp_path / "small", bits=8)
    assert summary["linears"] == 7  # of 14
    small = type(original).from_pretrained(tmp_path / "small").eval()
    live = type(original).from_pretrained(tmp_path / "out").eval()
    whole = model_outputs(live, inputs)
    surgery.quantize(live, bits=8)
    assert torch.equal(model_outputs(live, inputs), model_outputs(small, inputs))
    assert (model_outputs(small, inputs) - whole).norm() < 0.05 * whole.norm()


@pytest.mark.parametrize(
    "keys, says",
    [
        ({"rules": [{"match": "mlp.down", "structure": "dropped"}]}, "drops an MLP with all of its linears"),
        ({"rules": [{"match": "attention.*", "structure": "dropped"}]}, "mixer: none"),
        ({"structure": "dropped"}, "to drop attention give attention"),
        ({"structure": "auto", "candidates": ["low_rank", "dropped"]}, "candidates: dropped replaces several linears"),
        ({"attention": {"mixer": "none", "window": 4}}, "has no option 'window'"),
        ({"attention": {"mixer": "none", "hybrid": {"softmax": 0.5, "unit": "heads"}}}, "linear or window"),
        ({"attention": {"mixer": "none", "hybrid": {"softmax": 0.5}}}, "Name the layers with softmax"),
    ],
)
def test_refusals(keys, says, tmp_path):
    from surgery.planning.plan import make_plan

    source(tmp_path)
    with pytest.raises(SurgeryError, match=says):
        make_plan(MetaModel(open_checkpoint(str(tmp_path / "source"))), make_recipe(**{"structure": "dense", **keys}))
