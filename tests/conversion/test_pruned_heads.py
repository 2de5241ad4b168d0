"""structure: pruned in a rule for attention.*: whole key/value heads with their query heads, end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import killing
from helpers.narrowed import check_densified, check_stock, load
from helpers.small import DECODER, FAMILIES, allocate_by_gain, make_recipe, model_outputs, relative, tiny_inputs
from safetensors.torch import load_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import surgery
from surgery.architectures.linears import find_linears
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.conversion.quantize_checkpoint import quantize
from surgery.core.errors import SurgeryError
from surgery.training.models import load_student, open_trainable
from surgery.training.optim import select_parameters
from surgery.vllm.servable import check_config

HEADS = {"match": "attention.*", "structure": "pruned"}
SECOND = {**HEADS, "layers": "1:"}  # the first layer keeps all heads
QUICK = {"structure": "dense", "keep": 0.5, "allocate": "uniform", "sweeps": 1}
STACKED = ("phi3", "gpt2")
REFUSED = (*STACKED, "olmo2", "t5", "t5-gated")
KINDS = ("llama", "qwen2", "qwen3", "gpt_neox", "bert")  # GQA, with biases, with norms of heads, fused by head, encoder


@pytest.fixture(scope="module")
def per_layer(checkpoints, calibration, tmp_path_factory):
    """per_layer(family) -> folder in which one of two layers has half of the heads, made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("per-layer") / family
            recipe = make_recipe(**QUICK, rules=[SECOND], calibration=calibration(family))
            convert(str(checkpoints(family)), recipe, made[family])
        return made[family]

    return make


# -- every family ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*REFUSED}))
def test_the_result_has_half_of_the_heads(family, checkpoints, tmp_path):
    report = convert(str(checkpoints(family)), make_recipe(**QUICK, rules=[HEADS]), tmp_path / "out")
    records = report["modules"]
    assert len(records) == 2 and all(r["params_after"] == r["macs_after"] == r["params_before"] // 2 for r in records)
    stored = sum(t.numel() for t in load_file(tmp_path / "out" / "model.safetensors").values())
    assert report["totals"]["params_after"] == stored
    model = load(tmp_path / "out")
    inputs = tiny_inputs(family, 3, seed=2)
    assert bool(model_outputs(model, inputs).isfinite().all())
    if hasattr(model, "generate") and "input_ids" in inputs and family != "bert":
        cache = DynamicCache(config=model.config)
        whole = model_outputs(model, inputs)
        first, second = ({"input_ids": inputs["input_ids"][:, part]} for part in (slice(0, 20), slice(20, None)))
        model_outputs(model, {**first, "past_key_values": cache})
        rest = model_outputs(model, {**second, "past_key_values": cache})
        assert torch.allclose(rest, whole[:, 20:], atol=1e-4)
        heads = 2 if family == "gpt_neox" else 1
        assert all(layer.keys.shape[1] == layer.values.shape[1] == heads for layer in cache.layers), "a smaller cache"


@pytest.mark.parametrize("family", KINDS)
def test_heads_are_rows_of_the_original(family, checkpoints, per_layer):
    """Query, key, value and their biases lose rows and keep the others bit by bit, those of the same heads."""
    before, after = (load_file(f / "model.safetensors") for f in (checkpoints(family), per_layer(family)))
    model = load(checkpoints(family))
    paths = {linear.path: linear for linear in find_linears(model).linears}
    kept: dict[str, set[int]] = {}
    for name in (name for name in before if before[name].shape != after[name].shape):
        linear = next(n for path, n in paths.items() if name.rpartition(".")[0] in (path, path.partition(".")[2]))
        if "attention.output" in linear.roles:
            continue
        groups = 2 if family in ("llama", "qwen2", "qwen3") else 4
        whole = before[name].unflatten(0, (groups, -1))
        stored = after[name].unflatten(0, (groups // 2, -1))
        kept[name] = {g for g in range(groups) for one in stored if torch.equal(whole[g], one)}
    assert len(kept) >= 1 and all(groups == next(iter(kept.values())) for groups in kept.values())
    assert all(len(groups) == (1 if family in ("llama", "qwen2", "qwen3") else 2) for groups in kept.values())


@pytest.mark.parametrize("family", KINDS)
def test_all_groups_are_the_original(family, checkpoints, calibration, tmp_path):
    groups = 2 if family in ("llama", "qwen2", "qwen3") else 4
    recipe = make_recipe(**QUICK, rules=[{**HEADS, "groups": groups}], calibration=calibration(family))
    convert(str(checkpoints(family)), recipe, tmp_path / "out")
    inputs = tiny_inputs(family, 3, seed=2)
    found, wanted = (model_outputs(load(folder), inputs) for folder in (tmp_path / "out", checkpoints(family)))
    assert relative(found, wanted) < 1e-4


@pytest.mark.parametrize("family", KINDS)
def test_densify_gives_the_same_function_in_the_original_sizes(family, checkpoints, per_layer, tmp_path):
    check_densified(per_layer(family), checkpoints(family), tiny_inputs(family, 3, seed=2), tmp_path / "dense")


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_integers(family, per_layer, tmp_path):
    quantize(str(per_layer(family)), tmp_path / "int8")
    inputs = tiny_inputs(family, 3, seed=2)
    found, wanted = (model_outputs(load(folder), inputs) for folder in (tmp_path / "int8", per_layer(family)))
    assert 0 < relative(found, wanted) < 0.1


# -- ordinary checkpoints ---------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_one_number_of_groups_is_an_ordinary_checkpoint(checkpoints, calibration, tmp_path):
    """In a process that cannot import this package: Llama, and Qwen3, whose queries and keys are normalized."""
    families = ("llama", "qwen3")
    for family in families:
        rules = [{**HEADS, "groups": "uniform"}, {"match": "mlp.*", "structure": "pruned", "width": 24}]
        report = convert(
            str(checkpoints(family)),
            make_recipe(**QUICK, rules=rules, calibration=calibration(family)),
            tmp_path / family,
        )
        config = json.loads((tmp_path / family / "config.json").read_text())
        assert "quantization_config" not in config and "auto_map" not in config
        assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (2, 1, 8)
        assert config["intermediate_size"] == 24
        found = surgery.inspect(tmp_path / family)
        assert found["checks"]["as_reported"] and found["totals"] == report["totals"]
        linears = 2 * (2 * 32 * 32 + 2 * 16 * 32)
        assert found["macs_per_token"] == {
            "before": linears + 6 * 32 * 48 + 96 * 32,
            "after": linears // 2 + 6 * 32 * 24 + 96 * 32,
        }
        plan = surgery.plan(str(checkpoints(family)), {**QUICK, "rules": rules})
        counted = {(*row["shape"], row["count"]) for row in plan["unchanged"]}
        assert counted == {(*row["shape"], row["count"]) for row in found["linears"]["unchanged"]}
        assert counted >= {(16, 32, 2), (8, 32, 4), (32, 16, 2)}
    check_stock(tmp_path, families, families)


def test_an_ordinary_checkpoint_converts_again(checkpoints, calibration, tmp_path):
    """Also to attention with a mixer, which reads the heads of the config."""
    recipe = make_recipe(**QUICK, rules=[HEADS], calibration=calibration("llama"))
    report = convert(str(checkpoints("llama")), recipe, tmp_path / "out")
    with pytest.raises(SurgeryError, match="ordinary checkpoint already"):
        densify(str(tmp_path / "out"), tmp_path / "dense")
    mlr = make_recipe(structure="low_rank", keep=0.5, attention={"mixer": "mlr", "ranks": [4]})
    again = convert(str(tmp_path / "out"), mlr, tmp_path / "again")
    assert again["totals"]["params_before"] <= report["totals"]["params_after"]
    assert bool(model_outputs(load(tmp_path / "again"), tiny_inputs("llama", 2)).isfinite().all())


# -- allocation, journal, models in memory ------------------------------------------------------------------------------
def test_heads_widths_and_ranks_share_one_budget(checkpoints, calibration, tmp_path, monkeypatch):
    allocate_by_gain(monkeypatch)
    rules = [{"match": "mlp.*", "structure": "pruned", "multiple": 8}, HEADS]
    recipe = make_recipe(structure="low_rank", keep=0.5, rules=rules, calibration=calibration("llama"))
    report = convert(str(checkpoints("llama")), recipe, tmp_path / "out")
    assert report["allocation"]["kept"] == "measured" and 0.3 < report["totals"]["kept"] <= 0.5
    heads = [r for r in report["modules"] if "attention.output" in r["roles"]]
    assert len(heads) == 2 and {r["name"].count("+") for r in heads} == {3}
    shares = {r["params_after"] / r["params_before"] for r in report["modules"]}
    assert {r["params_after"] / r["params_before"] for r in heads} <= {0.5, 1.0} and len(shares) > 1


def test_killed_and_resumed_to_the_same_bytes(checkpoints, calibration, tmp_path):
    recipe = make_recipe(**QUICK, rules=[SECOND], calibration=calibration("qwen2"), tune={"model": 1})
    whole, *resumed = killing.convert_with_kills(
        lambda out, resume: convert(str(checkpoints("qwen2")), recipe, out, resume=resume), tmp_path, kills=1
    )
    assert resumed
    for out in resumed:
        for name in ("model.safetensors", "config.json"):
            assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("rules", [[HEADS], [SECOND]])
def test_apply_equals_convert(family, rules, checkpoints, calibration, tmp_path):
    recipe = {**QUICK, "rules": rules}
    inputs = load_file(calibration(family))
    surgery.convert(str(checkpoints(family)), recipe, tmp_path / "out", calibration=str(calibration(family)))
    model = surgery.apply(load(checkpoints(family)), recipe, calibration=inputs)
    stored = load(tmp_path / "out")
    found = tiny_inputs(family, 2, seed=4)
    assert torch.equal(model_outputs(model, found), model_outputs(stored, found))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(model_outputs(load(tmp_path / "saved"), found), model_outputs(stored, found))


@pytest.mark.parametrize("rules", [[HEADS], [SECOND]])
def test_training_counts_them_as_new(rules, checkpoints, calibration, tmp_path):
    recipe = make_recipe(**QUICK, rules=rules, calibration=calibration("llama"))
    convert(str(checkpoints("llama")), recipe, tmp_path / "out")
    student = load_student(open_trainable(str(tmp_path / "out")))
    layers = range(2) if rules == [HEADS] else [1]
    names = [f"self_attn.{role}_proj.weight" for role in "qkvo"]
    assert select_parameters(student, ["new"], {}) == {f"model.layers.{i}.{name}" for i in layers for name in names}


def test_the_bias_of_the_output_projection_is_fitted(checkpoints, per_layer):
    before, after = (load_file(f / "model.safetensors") for f in (checkpoints("gpt_neox"), per_layer("gpt_neox")))
    changed = {
        name for name in before if name.endswith("attention.dense.bias") and not torch.equal(before[name], after[name])
    }
    assert changed == {"gpt_neox.layers.1.attention.dense.bias"}


# -- what is refused -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("family", "message"),
    [
        *((family, "are divided by numbers of heads in config.json") for family in STACKED),
        ("olmo2", "q_norm.weight has values for all heads together"),
        ("t5", "T5 adds a learned position bias"),
    ],
)
def test_families_are_refused_with_the_reason(family, message, checkpoints):
    with pytest.raises(SurgeryError, match=f"cannot lose heads or value dims: .*{message}"):
        surgery.plan(str(checkpoints(family)), {**QUICK, "rules": [HEADS]})


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            {"rules": [{**HEADS, "keep": 0.4}]},
            r"of which it has 2, and its budget covers 0.80. Raise keep to 0.5 or more",
        ),
        ({"rules": [{**HEADS, "groups": 3}]}, r"groups must be from 1 to the 2 key/value heads .got 3"),
        ({"rules": [{**HEADS, "groups": "many"}]}, "groups: write a whole number over 0, for example 4, or uniform"),
        ({"rules": [{**HEADS, "width": 16}]}, r"width in the rule for 'attention.\*' is a number of neurons"),
        ({"rules": [{"match": "mlp.*", "structure": "pruned", "groups": 1}]}, "is a number of key/value heads"),
        ({"rules": [{"match": "attention.query", "structure": "pruned"}]}, "Give them in one rule for attention"),
        ({"rules": [HEADS, {"match": "attention.value", "keep": 0.7}]}, "Give them in one rule for attention"),
        (
            {"rules": [{**HEADS, "groups": "uniform"}, {"match": "attention.*", "layers": "1:", "keep": 0.7}]},
            r"groups: uniform gives all attention one size.* \(keep 0.5, 0.7\)",
        ),
        (
            {"rules": [HEADS], "attention": {"mixer": "mlr", "ranks": [4]}},
            "layers.0 gets a mixer, and its heads",
        ),
        ({"rules": [{**HEADS, "structure": "low_rank", "groups": 1}]}, "'low_rank' has no option 'groups'"),
    ],
)
def test_refusals(recipe, message, checkpoints):
    with pytest.raises(SurgeryError, match=message):
        surgery.plan(str(checkpoints("llama")), {"structure": "dense", "keep": 0.5, **recipe})


def test_one_key_value_head_is_refused(tmp_path):
    LlamaForCausalLM(LlamaConfig(**{**DECODER, "num_key_value_heads": 1})).save_pretrained(tmp_path / "mqa")
    with pytest.raises(SurgeryError, match=r"it has one key/value head, .* \(multi-query attention\)"):
        surgery.plan(str(tmp_path / "mqa"), {**QUICK, "rules": [HEADS]})


def test_vllm_refuses_several_numbers_of_heads_with_a_sentence(per_layer):
    config = json.loads((per_layer("llama") / "config.json").read_text())
    with pytest.raises(SurgeryError, match=r"different numbers of heads.* Convert with groups: uniform"):
        check_config(config, "it")
