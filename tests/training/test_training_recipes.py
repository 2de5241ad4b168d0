"""Healing recipes: validation, parameter groups, and that the shipped ones run."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from helpers.small import tiny_config
from helpers.small_training import TINY_CHECKPOINT, healing_recipe_names

import surgery
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, AttentionShape
from surgery.mixers.bilinear_btt import BilinearBTT
from surgery.mixers.bilinear_mlr import BilinearMLR
from surgery.mixers.linear_config import LinearAttention
from surgery.structures import STRUCTURES
from surgery.structures.btt import BTT
from surgery.training.finetune import finetune
from surgery.training.optim import Schedule, SignSGD, make_groups, make_optimizer
from surgery.training.recipe import load_healing_recipe, parse_healing_recipe

ONE = {"kind": "lm", "tokens": "20M", "rate": "1e-4"}


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("auto", 10_000_000),
        ("linears", 3_000_000),
        ("attention", 10_000_000),
        ("new-modules", 400_000),
        ("control", 10_000_000),
    ],
)
def test_shipped_recipes_run_for_a_few_steps(name, least, btt, mixed, texts, tmp_path):
    assert sorted(healing_recipe_names()) == ["attention", "auto", "control", "lambda", "linears", "new-modules"]
    few = ["stages.*.tokens=256", "stages.*.length=32", "stages.*.batch=4", "stages.*.rows=4", "log=1", "evaluate=1"]
    few += [f"data.sources=[{{path: {texts}}}]", "data.validation=0.1", "data.validation_examples=2"]
    tiny = load_healing_recipe(name, few, tiny=True)
    student = btt if name == "linears" else mixed
    record = finetune(str(student), tiny, tmp_path / "out", teacher=str(TINY_CHECKPOINT))
    assert [stage["steps"] for stage in record["stages"]] == [2] * len(tiny.stages)
    assert (tmp_path / "out" / "training" / "curve.png").stat().st_size > 1000
    assert sum(stage.tokens for stage in load_healing_recipe(name).stages) == least


def test_numbers_as_people_write_them():
    (stage,) = parse_healing_recipe({"stages": [ONE], "common": {"batch": 8, "top_k": 4}}).stages
    assert (stage.tokens, stage.rate, stage.batch) == (20_000_000, 1e-4, 8)
    assert stage.steps == -(-20_000_000 // (8 * 512))


@pytest.mark.parametrize(
    "data, said",
    [
        ({}, "stages must list at least one"),
        ({"stages": [{"tokens": 1}]}, "mapping with a kind, one of align, .*distill"),
        ({"stages": [{**ONE, "kind": "distil"}]}, "did you mean 'distill'"),
        ({"stages": [{**ONE, "lenght": 3}]}, "unknown key 'lenght'; did you mean 'length'"),
        ({"stages": [{**ONE, "schedule": {"flor": 0}}]}, "unknown key 'schedule.flor'; did you mean 'floor'"),
        ({"stages": [ONE], "guard": {"xyz": 3}}, "unknown key 'guard.xyz'; valid: .*patience"),
        ({"stages": [{"kind": "lm", "tokens": "20M"}]}, "rate is missing"),
        ({"stages": [ONE], "common": {"bach": 3}}, "common has 'bach'"),
        ({"stages": [ONE], "precision": "fp8"}, "precision"),
        ({"stages": [{**ONE, "data": {"packing": "boxes"}}], "data": {"sources": "a.txt"}}, "packing"),
        ({"stages": [ONE], "stagess": 3}, "unknown key 'stagess'"),
        ({"stages": [{**ONE, "tokens": "20 million"}]}, "tokens"),
    ],
)
def test_refusals(data, said):
    with pytest.raises(SurgeryError, match=said):
        parse_healing_recipe(data)


def test_a_recipe_given_as_a_dict_is_that_of_the_file(tmp_path):
    keys = {
        "data": {"sources": ["a.txt"]},
        "stages": [{"kind": "lm", "rate": 1e-4, "tokens": 512}],
        "tiny": {"seed": "3"},
    }
    (tmp_path / "heal.yaml").write_text(json.dumps(keys))
    before = copy.deepcopy(keys)
    for tiny in (False, True):
        found = load_healing_recipe(keys, ["stages.0.rate=1e-3"], tiny)
        assert found == load_healing_recipe(str(tmp_path / "heal.yaml"), ["stages.0.rate=1e-3"], tiny)
    assert keys == before
    with pytest.raises(SurgeryError, match=r"recipe \(given as a dict\)"):
        load_healing_recipe({**keys, "stagez": []})


def test_set_reaches_every_place(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("stages: [{kind: lm, tokens: 1k, rate: 1e-3}, {kind: lm, tokens: 1k, rate: 1e-3}]\n")
    loaded = load_healing_recipe(str(path), ["stages.*.rate=2e-3", "stages.1.schedule.name=wsd", "guard.patience=5"])
    assert [s.rate for s in loaded.stages] == [2e-3, 2e-3]
    assert [s.schedule.name for s in loaded.stages] == ["cosine", "wsd"] and loaded.guard.patience == 5
    for wrong in ("stages.7.rate=1", "rate", "stages.*"):
        with pytest.raises(SurgeryError, match="--set"):
            load_healing_recipe(str(path), [wrong])
    with pytest.raises(SurgeryError, match="no block `tiny`"):
        load_healing_recipe(str(path), tiny=True)
    with pytest.raises(SurgeryError, match="did you mean 'linears'"):
        load_healing_recipe("liners")


def test_schedules():
    steps = 100
    cosine = [Schedule(warmup=0.1, floor=0.1).factor(i, steps) for i in range(steps)]
    assert cosine[0] == pytest.approx(1 / 11) and max(cosine) <= 1 and cosine[-1] == pytest.approx(0.1)
    wsd = [Schedule(name="wsd", warmup=0.1, decay=0.2, floor=0.0).factor(i, steps) for i in range(steps)]
    assert wsd[10] == wsd[79] == 1 and wsd[90] == pytest.approx(0.5) and wsd[-1] == pytest.approx(0.05)
    assert Schedule(name="constant", warmup=0).factor(99, 100) == 1


# -- rates -------------------------------------------------------------------------------------------------------
def stage_of(**optimiser):
    return parse_healing_recipe({"stages": [{**ONE, "optimiser": optimiser}]}).stages[0]


@pytest.mark.parametrize("name, right, left", [("adamw", 64 / 16, 64 / 32), ("sign", 64 / 16, 64 / 32)])
def test_mup_rates_of_btt(name, right, left):
    """Blocks 4 x 4 of 32 x 16, rank 8: right has fan-in d = 16, left c s = 32; the linear reads 64."""
    model = torch.nn.Sequential(STRUCTURES[BTT](64, 128, BTT(blocks=(4, 4), rank=8)))
    groups = make_groups(model, {"0.right", "0.weight", "0.bias"}, stage_of(name=name))
    rates = {n: g.rate for g in groups for n in g.names}
    assert rates == pytest.approx({"0.right": 1e-4 * right, "0.weight": 1e-4 * left, "0.bias": 1e-4})


def test_mup_rates_of_sgd_and_of_other_widths():
    model = torch.nn.Sequential(STRUCTURES[BTT](64, 128, BTT(blocks=(4, 4), rank=8)), torch.nn.Linear(128, 64))
    names = {"0.right", "0.weight", "1.weight"}
    rates = {n: g.rate / 1e-4 for g in make_groups(model, names, stage_of(name="sgd")) for n in g.names}
    assert rates == pytest.approx({"0.right": (4 * 8 / 16) * 64 / 128, "0.weight": (32 / 32) * 64 / 128, "1.weight": 1})
    rates = {n: g.rate / 1e-4 for g in make_groups(model, names, stage_of(base_width=256)) for n in g.names}
    assert rates == pytest.approx({"0.right": 256 / 16, "0.weight": 256 / 32, "1.weight": 256 / 128})
    same = make_groups(model, names, stage_of(rates="same"))
    assert {g.rate for g in same} == {1e-4}


def test_item_4_6_rates_of_mixers_follow_their_fans():
    """Factors of bilinear scores by their own fan-in, with base_width or in the D x D matrix that they are part of;
    linears that read the hidden states by the width alone; gains and biases at the rate of their kind."""
    shape = AttentionShape(dim=64, heads=4, groups=2, key=16, value=16, scaling=0.25)
    configs = (
        BilinearMLR((4, 2, 1), base="own", norm="qk"),
        BilinearBTT((4, 8), 2, norm="qk"),
        LinearAttention(mask="gates"),
    )
    layers = torch.nn.ModuleList(torch.nn.ModuleDict({"mixer": MIXERS[c](c, shape)}) for c in configs)
    names = {n for n, _ in layers.named_parameters()}
    fan_ins = {"0.mixer.left1": 64, "0.mixer.right2": 32, "0.mixer.left3": 16, "1.mixer.left": 16, "1.mixer.right": 8}
    for base, width in (({}, 64), ({"base_width": 256}, 256)):
        groups = make_groups(layers, names, stage_of(**base))
        rates = {n: g.rate / 1e-4 for g in groups for n in g.names}
        assert {n: rates[n] for n in fan_ins} == pytest.approx({n: width / fan for n, fan in fan_ins.items()})
        assert rates["0.mixer.key_gain"] == rates["2.mixer.mask.rate.bias"] == 1
        assert rates["2.mixer.mask.rate.weight"] == pytest.approx(width / 64)
        shown = {(g.row()["fan_in"], g.row()["example"]) for g in groups if "fan_in" in g.row()}
        assert (64, "0.mixer.left1") in shown and (16, "1.mixer.left") in shown
    assert {g.rate for g in make_groups(layers, names, stage_of(rates="same"))} == {1e-4}


# -- surgery.parameter_groups --------------------------------------------------------------------------------------
def told(groups):
    return [(g["kind"], g["lr"], g["weight_decay"], g["names"]) for g in groups]


class Seen(Exception):
    """Ends a run once its groups are known."""


@pytest.mark.parametrize("kind", ["btt", "mixed"])
def test_parameter_groups_are_those_of_finetune(kind, request, words, tmp_path, monkeypatch):
    folder, seen = request.getfixturevalue(kind), []

    def see(groups, settings):
        seen.extend(groups)
        raise Seen

    monkeypatch.setattr("surgery.training.runner.make_optimizer", see)
    chosen = {"data.sources": [{"path": str(words)}], "stages.*.trains": ["new", "attention.output", "vectors"]}
    chosen |= {"stages.*.rate": 3e-4, "stages.*.rates": {"mixers": 1e-2}, "stages.*.optimiser.weight_decay": 0.1}
    chosen |= {"stages.*.optimiser.base_width": 100}
    (tmp_path / "mine.yaml").write_text("stages: [{kind: lm, tokens: 1k, rate: 1e-3}]\n")
    with pytest.raises(Seen):
        surgery.finetune(folder, tmp_path / "mine.yaml", out=tmp_path / "healed", overrides=chosen)
    expected = [(g.kind, g.rate, g.decay, g.names) for g in seen]
    model, _ = surgery.load(folder, dtype="float32")
    trained = {name for g in seen for name in g.names}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    options = {"rates": {"mixers": 1e-2}, "weight_decay": 0.1, "base_width": 100}
    groups = surgery.parameter_groups(model, 3e-4, **options)
    assert told(groups) == expected and len(expected) >= 3
    named = dict(model.named_parameters())
    assert all([named[n] is p for n, p in zip(g["names"], g["params"])] for g in groups)
    torch.optim.AdamW(groups)
    assert all(told(surgery.parameter_groups(model, 3e-4, **options)) == expected for _ in range(2))


def test_parameter_groups_of_tied_frozen_adapted_and_unconverted_models():
    import peft

    cls, config = tiny_config("llama-tied")
    model = cls(config)
    groups = surgery.parameter_groups(model, 1e-3, weight_decay=0.1)
    assert {(g["kind"], g["lr"], g["weight_decay"]) for g in groups} == {
        ("dense", 1e-3, 0.1), ("embeddings", 1e-3, 0.1), ("vectors", 1e-3, 0.0)
    }  # fmt: skip
    assert sum(p.numel() for g in groups for p in g["params"]) == sum(p.numel() for p in model.parameters())
    assert sorted(n for g in groups for n in g["names"]) == sorted(n for n, _ in model.named_parameters())
    surgery.apply(model, {"structure": "low_rank", "keep": 0.5})
    rates = {n: g["lr"] for g in surgery.parameter_groups(model, 1e-3) for n in g["names"]}
    up = model.model.layers[0].mlp.up_proj
    assert rates["model.layers.0.mlp.up_proj.right"] == pytest.approx(1e-3)
    assert rates["model.layers.0.mlp.up_proj.weight"] == pytest.approx(1e-3 * up.in_features / up.config.rank)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["up_proj"]))
    (group,) = surgery.parameter_groups(adapted, 1e-3)
    assert group["kind"] == "adapters" and group["lr"] == 1e-3 and all("lora_" in name for name in group["names"])
    whole = {n: g["lr"] for g in surgery.parameter_groups(adapted.requires_grad_(True), 1e-3) for n in g["names"]}
    inner = "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"
    assert whole[inner] == pytest.approx(rates["model.layers.0.mlp.up_proj.weight"])
    with pytest.raises(SurgeryError, match="no parameters to train: all its parameters have requires_grad=False"):
        surgery.parameter_groups(model.requires_grad_(False), 1e-3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rate": 0.0}, "rate must be a finite number, above 0"),
        ({"rate": float("nan")}, "rate must be a finite number"),
        ({"rates": {"mixer": 1.0}}, "'mixer' is not a kind of parameters; did you mean 'mixers'"),
        ({"rates": {"dense": -1.0}}, "rates: dense must be a finite number, 0 or more"),
        ({"rates": {"dense": 0.0, "vectors": 0}}, "rates has 0 for all of them"),
        ({"optimizer": "adam"}, r"optimizer: input should be 'adamw', 'adamw8bit', 'sgd' or 'sign' \(got 'adam'\)"),
        ({"rule": "mu"}, "rule: input should be"),
        ({"base_width": 0}, "base_width: "),
        ({"model": "OUT"}, "parameter_groups"),
    ],
)
def test_parameter_groups_refuse(options, said):
    with pytest.raises(SurgeryError, match=said):
        surgery.parameter_groups(**{"model": torch.nn.Linear(4, 4), "rate": 1e-3, **options})


@pytest.mark.parametrize("name", ["adamw", "sgd", "sign"])
def test_a_bad_step_leaves_parameters_and_states(name):
    layer = torch.nn.Linear(4, 4)
    groups = make_groups(torch.nn.Sequential(layer), {"0.weight"}, stage_of(name=name, weight_decay=0.1))
    optimiser = make_optimizer(groups, stage_of(name=name).optimiser)
    for gradient, bad in ((torch.ones(4, 4), 0.0), (torch.full((4, 4), float("nan")), 1.0)):
        layer.weight.grad, before = gradient, layer.weight.detach().clone()
        states = {k: v.clone() for k, v in optimiser.state[layer.weight].items()}
        optimiser.found_inf = torch.tensor(bad)  # type: ignore[attr-defined]
        optimiser.step()
        assert torch.equal(before, layer.weight) == bool(bad)
    assert all(torch.equal(v, optimiser.state[layer.weight][k]) for k, v in states.items())


def test_sign_descent_moves_by_the_rate():
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([2.0, -0.1, 0.0])
    SignSGD([{"params": [p], "lr": 0.5}], momentum=0.9).step()
    assert p.tolist() == [-0.5, 0.5, 0.0]
