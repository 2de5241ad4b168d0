"""Searches of a tiny mixture of experts: fewer experts beside fewer neurons, low rank and shared bases."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.small import tiny_inputs
from helpers.small_experts import write_experts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from surgery.budget.choices import Counting, LayerCosts, expert_kinds, find_choices
from surgery.budget.search import SearchSettings, search
from surgery.budget.times import find_device
from surgery.calibration.data import CalibrationSet
from surgery.checkpoint.source import open_converted_checkpoint
from surgery.conversion.convert import convert
from surgery.conversion.sources import FolderSource
from surgery.core.progress import Progress
from surgery.planning.recipe import load_recipe

LAYERS, EXPERTS = 2, 6


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_experts("qwen3_moe", tmp_path_factory.mktemp("moe") / "SRC", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("inputs") / "inputs.safetensors"
    save_file(tiny_inputs("llama", 16), path)
    return str(path)


@pytest.fixture(scope="module")
def searched(source, inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("search") / "SEARCH"
    settings = SearchSettings(inputs, device="cpu", points=3, at=64, only="experts", on="h200")
    return out, search(str(source), out, {"bytes": "80%"}, settings)


def rows_of(out) -> dict:
    return {row["choice"]: row for row in json.loads((out / "table.json").read_text())["rows"]}


def divergence(original, converted, inputs) -> float:
    """Return the KL divergence of a converted model in nats per token of the held-out samples."""
    tensors = load_file(inputs)
    held = CalibrationSet.from_inputs(tensors, 0.125)
    x_BT = tensors["input_ids"][held.n_fit :]
    p, q = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(x_BT).logits.log_softmax(-1)
        for folder in (original, converted)
    )
    return float((p.exp() * (p - q)).sum(-1).mean().detach())


def test_every_structure_of_experts_is_a_choice(searched):
    """Fewer experts once for all layers, the structures in each layer, with damage, bytes and times."""
    rows = rows_of(searched[0])
    fewer = {name: row for name, row in rows.items() if row["family"] == "fewer_experts"}
    assert {name.partition(": ")[2] for name in fewer} == {"4 of 6", "3 of 6", "2 of 6"}
    assert all(len(row["covers"]) == LAYERS for row in fewer.values())
    kinds = {name.partition(": ")[2] for name in rows} - {name.partition(": ")[2] for name in fewer}
    assert {f"{kind} {share}" for kind in ("low_rank", "shared basis") for share in ("75%", "50%", "25%")} <= kinds
    assert all(row["damage"] > 0 and row["costs"]["bytes"] < 0 for row in rows.values())
    assert {"decode", "prefill"} <= rows["model.layers.0 experts: low_rank 50%"]["costs"].keys()
    damages = [fewer[f"model.layers.0 experts: {n} of 6"]["damage"] for n in (4, 3, 2)]
    assert damages == sorted(damages)


@pytest.mark.parametrize("words", [["4 of 6"], ["shared basis 50%", "low_rank 25%"]])
def test_a_recipe_of_experts_has_the_predicted_costs_and_damage(words, source, inputs, tmp_path):
    """Costs to the byte. The damage of fewer experts alone is that of the conversion, which makes the same choice."""
    settings = SearchSettings(inputs, device="cpu", points=0, at=64, only=",".join(words))
    result = search(str(source), tmp_path / "SEARCH", {"bytes": "90%"}, settings)
    point = result["points"][0]
    recipe = load_recipe(str(tmp_path / "SEARCH" / point["recipe"]), ["tune=false"])
    assert (recipe.experts == 4) == (words == ["4 of 6"])
    convert(str(source), recipe, tmp_path / "OUT", device="cpu")
    written = open_converted_checkpoint(str(tmp_path / "OUT"))
    assert sum(tensor.numel for tensor in written.tensors.values()) == point["costs"]["parameters"]
    assert written.nbytes == point["costs"]["bytes"]
    assert point["measured"] > 0
    if recipe.experts is not None:
        row = rows_of(tmp_path / "SEARCH")["model.layers.0 experts: 4 of 6"]
        assert row["damage"] == pytest.approx(divergence(source, tmp_path / "OUT", inputs), rel=1e-3)


def test_fewer_experts_go_with_other_parts_and_exclude_removed_layers(source, inputs, tmp_path):
    """Attention gets low rank beside them; both are measured together."""
    settings = SearchSettings(inputs, device="cpu", points=0, at=64, only="of 6,projections low_rank,layer")
    result = search(str(source), tmp_path / "SEARCH", {"bytes": "45%"}, settings)
    recipe = load_recipe(str(tmp_path / "SEARCH" / "recipe-1.yaml"), ["tune=false"])
    assert recipe.experts is None or recipe.depth is None
    plans = json.loads((tmp_path / "SEARCH" / "table.json").read_text())["plans"]
    together = [plan["choices"] for plan in plans if any("of 6" in name for name in plan["choices"])]
    assert all(not any("removed" in name for name in plan) for plan in together)
    assert any(len(plan) > 1 for plan in together) and result["points"][0]["measured"] > 0


def test_a_routed_expert_takes_its_share_of_the_time(source):
    """In a decoding step the experts of a layer together take the time of those that a token is routed to."""
    device = find_device("h100", None, 4096)
    whole, routed = (device.linear_ns("decode", (24, 32), None, 768, active=share) for share in (1.0, 2 / EXPERTS))
    assert routed == pytest.approx(whole * 2 / EXPERTS, abs=1)
    shares = [device.linear_ns("prefill", (4096, 4096), None, 2**24, active=share) for share in (1.0, 0.25)]
    assert shares[1] < shares[0]
    model = FolderSource(str(source)).open(Progress())
    choices = find_choices(model, {"allocate": "uniform"}, expert_kinds(model), Counting(4096, device))
    fewer = [choice for choice in choices.choices if choice.number is not None]
    assert [choice.number for choice in fewer] == [4, 3, 2] and all(choice.costs["decode"] == 0 for choice in fewer)
    assert LayerCosts(model, choices.plan.dtype, Counting(4096, device)).of_fewer_experts(
        choices.plans["experts", "3 of 6"]
    ) == dict(fewer[1].costs)
