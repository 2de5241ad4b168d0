"""experts: fewer routed experts, end to end."""

from __future__ import annotations

import json
import os

import pytest
import torch
from helpers import killing
from helpers.forked import run_processes
from helpers.narrowed import load
from helpers.small import make_recipe, model_outputs, tiny_inputs
from helpers.small_experts import MERGED, SPLIT, write_experts
from safetensors.torch import load_file, save_file

import surgery
import surgery.calibration.partition
from surgery.architectures.experts import RoutedExperts, split_experts
from surgery.checkpoint.fewer_experts import ExpertStack
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError
from surgery.publish.hub.citations import cited_papers
from surgery.publish.tables import kept_expert_lines

DENSE = {"structure": "dense"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("inputs") / "inputs.safetensors"
    save_file(tiny_inputs("llama", 12), path)
    return str(path)


def never_route(model, expert: int) -> None:
    """Change a model of one layer so that no token is routed to an expert: feature 0 of the hidden states is large and
    positive for all tokens, and only the router's row of the expert reads it, with a negative weight.
    """
    parameters = dict(model.named_parameters())
    router = next(
        n
        for n in parameters
        if n.endswith(("gate.weight", "router.weight", "router.layer.weight")) and "shared" not in n
    )
    parameters["model.embed_tokens.weight"].data[:, 0] = 20.0
    for name, parameter in parameters.items():
        if name.endswith("o_proj.weight"):
            parameter.data.zero_()
    parameters[router].data[:, 0] = 0.0
    parameters[router].data[expert, 0] = -50.0


# -- every family ---------------------------------------------------------------------------------------------------
ONE_LAYER = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "layer_types": None,
}


# One kind of each router and layout of the files.
QUICK_KINDS = ("mixtral", "deepseek_v3", "gpt_oss", "llama4_text")


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK_KINDS else pytest.param(kind, marks=pytest.mark.slow) for kind in SPLIT]
)
def test_an_expert_that_no_token_is_routed_to_goes_and_nothing_changes(kind, inputs, tmp_path):
    options = {**ONE_LAYER, "layer_types": ["full_attention"]} if "qwen3_" in kind or kind == "gpt_oss" else ONE_LAYER
    source = write_experts(kind, tmp_path / "source", **options)
    model = load(source)
    never_route(model, expert=1)
    model.save_pretrained(source)
    count = next(m.num_experts for m in split(model).modules() if isinstance(m, RoutedExperts))
    recipe = make_recipe(**DENSE, experts=count - 1, calibration=inputs)
    plan, report = surgery.plan(str(source), recipe), convert(str(source), recipe, tmp_path / "out")
    (kept,) = report["experts"]["kept"].values()
    assert kept == [index for index in range(count) if index != 1] and report["experts"]["kept_tokens"] == 1.0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and not list((tmp_path / "out").glob("*.py"))
    found, wanted = (
        model_outputs(load(folder), tiny_inputs("llama", 3, seed=2)) for folder in (tmp_path / "out", source)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert plan["totals"]["model_after"] == sum(p.numel() for p in load(tmp_path / "out").parameters())
    assert report["totals"]["params_after"] < report["totals"]["params_before"]
    assert report["held_out"]["converted"] == pytest.approx(report["held_out"]["original"], abs=1e-5)


def split(model):
    split_experts(model)
    return model


def test_scores_are_those_of_the_paper(experts, inputs, tmp_path):
    report = convert(str(experts("mixtral")), make_recipe(**DENSE, experts=2, calibration=inputs), tmp_path / "out")
    model, calls = load(experts("mixtral")), {}
    for path, module in model.named_modules():
        if path.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda _, args, path=path: calls.__setitem__(path, args))
    rows = {name: tensor[:10] for name, tensor in load_file(inputs).items()}  # 2 of 12 are held out
    model_outputs(model, rows)
    for path, (x_ND, index_Nk, weight_Nk) in calls.items():
        merged, sums = model.get_submodule(path).requires_grad_(False), [[] for _ in range(4)]
        for x_D, experts_k, weights_k in zip(x_ND, index_Nk.tolist(), weight_Nk.tolist()):
            for expert, weight in zip(experts_k, weights_k):
                gate, up = (merged.gate_up_proj[expert] @ x_D).chunk(2)
                out = merged.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
                sums[expert].append(weight * float(out.detach().norm()))
        scores = [sum(values) / len(values) for values in sums]
        assert report["experts"]["scores"][path] == pytest.approx(scores, rel=1e-4)
        best = sorted(range(4), key=lambda expert: -scores[expert])[:2]
        assert report["experts"]["kept"][path] == sorted(best)


def test_tensors_are_those_of_the_original(experts, inputs, tmp_path):
    report = convert(str(experts("qwen3_moe")), make_recipe(**DENSE, experts=4, calibration=inputs), tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (experts("qwen3_moe"), tmp_path / "out"))
    for layer in range(2):
        block = f"model.layers.{layer}.mlp"
        kept = report["experts"]["kept"][f"{block}.experts"]
        assert torch.equal(after[f"{block}.gate.weight"], before[f"{block}.gate.weight"][kept])
        for new, old in enumerate(kept):
            name = "{}.experts.{}.down_proj.weight"
            assert torch.equal(after[name.format(block, new)], before[name.format(block, old)])
    assert not any(".experts.4." in name for name in after)


def test_a_config_with_another_name_for_the_number(inputs, tmp_path):
    """As of Qwen3-30B-A3B, whose config.json was not written by transformers 5."""
    source = write_experts("qwen3_moe", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")
    (source / "config.json").write_text(json.dumps(config))
    convert(str(source), make_recipe(**DENSE, experts=4, calibration=inputs), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["num_experts"] == 4 and "num_local_experts" not in written
    assert bool(model_outputs(load(tmp_path / "out"), tiny_inputs("llama", 2)).isfinite().all())


def test_padding_counts_for_no_expert(experts, tmp_path):
    ids, reports = tiny_inputs("llama", 8)["input_ids"], []
    padded = torch.nn.functional.pad(ids, (0, 5))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (0, 5))
    for name, tensors in (("whole", {"input_ids": ids}), ("padded", {"input_ids": padded, "attention_mask": mask})):
        save_file(tensors, tmp_path / f"{name}.safetensors")
        recipe = make_recipe(**DENSE, experts=3, calibration=tmp_path / f"{name}.safetensors")
        reports.append(convert(str(experts("mixtral")), recipe, tmp_path / name)["experts"])
    assert reports[0]["kept"] == reports[1]["kept"]
    for path, scores in reports[0]["scores"].items():
        assert reports[1]["scores"][path] == pytest.approx(scores, rel=1e-4)


# -- groups ------------------------------------------------------------------------------------------------------------
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1}


def test_every_group_keeps_as_many(experts, inputs, tmp_path):
    source = experts("deepseek_v3", **GROUPS)
    report = convert(str(source), make_recipe(**DENSE, experts=4, calibration=inputs), tmp_path / "out")
    (kept,), (scores,) = (report["experts"][key].values() for key in ("kept", "scores"))
    assert [index // 4 for index in kept] == [0, 0, 1, 1]
    for first in (0, 4):
        group = scores[first : first + 4]
        assert {first + group.index(score) for score in sorted(group)[2:]} <= set(kept)
    assert bool(model_outputs(load(tmp_path / "out"), tiny_inputs("llama", 2)).isfinite().all())
    for number in (2, 5, 7):
        with pytest.raises(
            SurgeryError, match=r"multiple of the 2 groups \(n_group\) .* Give 4 or another multiple of 2"
        ):
            surgery.plan(str(source), {**DENSE, "experts": number})


def test_of_equal_scores_the_first_stays():
    stack = ExpertStack(("experts",), 6, "", ("num_experts",), 1, 2, 1)
    assert stack.select([1.0, 3.0, 3.0, 0.0, 3.0, 1.0], 4) == (0, 1, 2, 4)


# -- with other replacements, in the report, with healing ------------------------------------------------------------------
def test_fewer_experts_of_fewer_neurons_and_low_rank(experts, inputs, tmp_path):
    rules = [{"match": "expert.*", "structure": "pruned", "multiple": 4}]
    recipe = make_recipe(structure="low_rank", keep=0.5, experts=4, rules=rules, calibration=inputs, sweeps=1)
    report = convert(str(experts("qwen3_moe")), recipe, tmp_path / "out")
    found = surgery.inspect(tmp_path / "out")
    assert found["checks"]["as_reported"] and found["totals"] == report["totals"]
    assert report["totals"]["kept"] <= 0.5
    model = split(load(tmp_path / "out"))
    (experts_0, *_) = (module for module in model.modules() if isinstance(module, RoutedExperts))
    assert experts_0.num_experts == 4 and model.config.moe_intermediate_size < 24


def test_report_and_card(experts, inputs, tmp_path):
    report = convert(str(experts("mixtral")), make_recipe(**DENSE, experts=3, calibration=inputs), tmp_path / "out")
    (line,) = kept_expert_lines(report)
    assert line.startswith("3 of 4 experts stay in each of 2 layers, to which ")
    macs = surgery.inspect(tmp_path / "out")["macs_per_token"]
    assert macs["before"] - macs["after"] == report["experts"]["macs"]
    assert any("REAP" in paper for paper in cited_papers([report["experts"]]))


# -- journal and processes -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_killed_and_resumed_to_the_same_bytes(kind, experts, inputs, tmp_path):
    rules = [{"match": "expert.*", "structure": "pruned", "multiple": 4}]
    recipe = make_recipe(**DENSE, keep=0.5, experts=3, rules=rules, allocate="uniform", sweeps=1, calibration=inputs)
    whole, *resumed = killing.convert_with_kills(
        lambda out, resume: convert(str(experts(kind)), recipe, out, resume=resume), tmp_path, kills=2
    )
    assert resumed
    for out in resumed:
        for name in ("model.safetensors", "config.json"):
            assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_give_the_bytes_of_one(experts, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(surgery.calibration.partition, "MIN_SHARD_TOKENS", 64)
    recipe, source = make_recipe(**DENSE, experts=4, calibration=inputs), experts("qwen3_moe")
    for count in (1, 2):
        out = tmp_path / f"out-{count}"
        assert run_processes(count, lambda _, out=out: convert(str(source), recipe, out, device="cpu")) == [0] * count
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out-1" / name).read_bytes() == (tmp_path / "out-2" / name).read_bytes()


# -- what is refused -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "recipe", "message"),
    [
        ("mixtral", {"experts": 1}, r"experts must be from 2, which each token is routed to, to 3, .*\(got 1\)"),
        ("mixtral", {"experts": 4}, r"to 3, fewer than the 4 of each layer \(got 4\)"),
        ("mixtral", {"experts": "few"}, "experts: write a whole number over 0, for example 6"),
        (
            "mixtral",
            {"experts": 3, "depth": {"drop": 1}},
            "depth and experts remove layers and experts before all else",
        ),
        (MERGED[0], {"experts": 3}, "cannot be removed one by one: .* Leave experts out for this model"),
    ],
)
def test_refusals(kind, recipe, message, experts):
    with pytest.raises(SurgeryError, match=message):
        surgery.plan(str(experts(kind)), {**DENSE, **recipe})


def test_models_without_experts_text_or_files_are_refused(checkpoints, experts, inputs, tmp_path):
    recipe = make_recipe(**DENSE, experts=3)
    with pytest.raises(SurgeryError, match="LlamaForCausalLM has no routed experts"):
        surgery.plan(str(checkpoints("llama")), recipe)
    with pytest.raises(
        SurgeryError, match=r"by what they add on calibration text, and there is none\. Give --calibration"
    ):
        convert(str(experts("mixtral")), recipe, tmp_path / "out")
    with pytest.raises(SurgeryError, match="experts removes experts of a checkpoint, not of a model in memory"):
        surgery.apply(load(experts("mixtral")), recipe, calibration=load_file(inputs))


def test_planned_from_the_config_alone(experts, tmp_path):
    (tmp_path / "config.json").write_text((experts("mixtral") / "config.json").read_text())
    recipe = {**DENSE, "experts": 3}
    totals = [surgery.plan(str(folder), recipe)["totals"] for folder in (tmp_path, experts("mixtral"))]
    assert totals[0] == totals[1]
