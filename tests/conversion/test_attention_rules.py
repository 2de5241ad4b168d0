"""Mixer options by layer, and the costs of attention that plans and reports show."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.small import make_recipe, model_outputs, tiny_config, tiny_inputs
from safetensors.torch import save_file

from surgery.budget.choices import ATTENTION, Kind
from surgery.budget.recipes import attention_of
from surgery.checkpoint.outline import describe_checkpoint
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS
from surgery.mixers.cache_size import cache_bytes
from surgery.planning.plan import make_plan
from surgery.planning.recipe import load_recipe
from surgery.publish.summary import CONTEXTS, inspect, plan_dict, softmax_macs
from surgery.publish.tables import plan_table

SMALL = {"mixer": "linear", "mask": {"name": "hierarchical", "block": 8}, "scores": "delta", "window": 6, "sinks": 2}
LOOKUP = {"layers": "1", "states": "per_head", "rope": "both", "mask": "hierarchical"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A function from a family and a number of layers to the folder of a random checkpoint."""
    folder = tmp_path_factory.mktemp("sources")

    def write(family, layers):
        place = folder / f"{family}-{layers}"
        if not place.exists():
            torch.manual_seed(0)
            kind, config = tiny_config(family)
            config.num_hidden_layers = layers
            if getattr(config, "layer_types", None):
                config.layer_types = [config.layer_types[i % 2] for i in range(layers)]
            kind(config).save_pretrained(place)
        return place

    return write


def plan_of(folder, **attention):
    recipe = make_recipe(structure="dense", attention={**SMALL, **attention})
    return make_plan(describe_checkpoint(open_checkpoint(str(folder))), recipe)


def configs(plan):
    return [target.config for target in plan.attention_targets.values()]


def test_rules_put_options_over_those_of_the_recipe(sources):
    folder = sources("llama", 4)
    plain = configs(plan_of(folder))[0]
    found = configs(plan_of(folder, rules=[{"layers": "1:", "window": 12}, {**LOOKUP, "window": 3}]))
    assert found[0] == plain and found[2] == found[3] and found[2].window == 12 and found[2].mask == plain.mask
    assert (found[1].states, found[1].rope, found[1].window, found[1].sinks) == ("per_head", "both", 3, 2)
    assert found[1].mask.block == 1 and plain.mask.block == 8
    other = configs(plan_of(folder, rules=[{"layers": "-1", "mixer": "window", "window": 5}]))
    assert (other[3].name, other[3].window, other[3].sinks) == ("window", 5, 0) and other[:3] == [plain] * 3


def test_a_recipe_without_rules_is_written_as_before():
    assert "rules" not in json.loads(make_recipe(structure="dense", attention=SMALL).model_dump_json())["attention"]
    recipe = load_recipe(
        "log-linear", ['attention.rules=[{layers: "4", states: per_head}]', "attention.rules.0.window=9"]
    )
    told = json.loads(recipe.model_dump_json())["attention"]
    assert told["rules"] == [{"layers": "4", "mixer": None, "states": "per_head", "window": 9}]
    assert make_recipe(structure="dense", attention=told).attention == recipe.attention


@pytest.mark.parametrize(
    "keys, says",
    [
        ({"rules": [{"layers": "1", "windw": 3}]}, r"attention.rules.0: mixer 'linear' has no option 'windw'; did you mean 'window'"),
        ({"rules": [{"layers": "1", "steps": 3}]}, r"attention.rules.0: mixer 'linear' has no option 'steps'"),
        ({"rules": [{"layers": "1"}]}, r"attention.rules.0: names layers '1' and no option"),
        ({"rules": [{"layers": 1, "window": 3}]}, r"must be a range of layer numbers in quotes"),
        ({"rules": [{"layers": "1", "cache": 0.5}]}, r"attention.rules.0: mixer 'linear' has no ranks for `cache`"),
        ({"rules": [{"layers": "1", "mixer": "mlr", "cache": 0}]}, r"attention.rules.0.cache: Input should be greater than 0"),
        ({"rules": [{"layers": "1", "mixer": "mlr", "cache": 0.5, "ranks": [4, 4]}]}, r"attention.rules.0: `cache` chooses ranks"),
        ({"rules": [{"layers": "1", "window": -3}]}, r"attention.rules.0: linear: window must be 0 or more \(got -3\)"),
        ({"rules": [{"layers": "1", "mixer": "windw"}]}, r"unknown mixer 'windw'; did you mean 'window'"),
        ({"rules": [{"layers": "7", "window": 3}]}, r'attention.rules.0: layers "7" selects none of the layers .* \[0, 1, 2, 3\]'),
        ({"layers": ":2", "rules": [{"layers": "3", "window": 3}]}, r'layers "3" selects none .* \[0, 1\]'),
        ({"hybrid": {"layers": [3]}, "rules": [{"layers": "3", "window": 3}]}, r'layers "3" selects none .* \[0, 1, 2\]'),
    ],
)  # fmt: skip
def test_rules_that_are_refused(sources, keys, says):
    with pytest.raises(SurgeryError, match=says):
        plan_of(sources("llama", 4), **keys)


def test_rules_do_not_fit_a_cache_budget():
    with pytest.raises(SurgeryError, match="`cache` chooses the ranks of every layer"):
        make_recipe(
            structure="dense", attention={"mixer": "mlr", "cache": 0.5, "rules": [{"layers": "1", "form": "nested"}]}
        )


def test_each_layer_of_a_rule_has_a_cache_budget_of_its_own(sources, tmp_path):
    """Every MLR layer keeps at most the share of its rule, the other layers the recipe's mixer, and plan and result
    agree on which these are.
    """
    folder = sources("llama", 4)
    save_file(tiny_inputs("llama", 6, 64), tmp_path / "inputs.safetensors")
    rules = [{"layers": "1:3", "mixer": "mlr", "cache": 0.6}, {"layers": "2", "mixer": "mlr", "cache": 0.3}]
    recipe = make_recipe(
        structure="dense",
        attention={"mixer": "window", "window": 8, "rules": rules},
        calibration=str(tmp_path / "inputs.safetensors"),
        curvature="none",
    )
    convert(str(folder), recipe, tmp_path / "out")
    model = tiny_config("llama")[0].from_pretrained(tmp_path / "out").eval()
    configs = [layer.self_attn.mixer.config for layer in model.model.layers]
    assert [config.name for config in configs] == ["window", "mlr", "mlr", "window"]
    shape = model.model.layers[1].self_attn.mixer.shape
    full = shape.groups * shape.key * 64
    for config, share in zip(configs[1:3], (0.6, 0.3)):
        keys = MIXERS[config].cost(config, shape, 64).cache - shape.groups * shape.value * 64
        assert 0 < keys <= share * full * (1 + 1e-6)


def test_a_layer_that_keeps_softmax_needs_no_rule(sources, tmp_path):
    """`surgery search` writes MLR attention by rules only, beside the layers that keep softmax."""
    folder = sources("llama", 4)
    save_file(tiny_inputs("llama", 6, 64), tmp_path / "inputs.safetensors")
    small, large = (Kind(name, ATTENTION, "mlr", {"mixer": "mlr", "cache": float(name)}) for name in ("0.3", "0.6"))
    inputs = {"calibration": str(tmp_path / "inputs.safetensors"), "curvature": "none"}
    recipe = make_recipe(structure="dense", attention=attention_of([small, None, large, None]), **inputs)
    convert(str(folder), recipe, tmp_path / "out")
    model = tiny_config("llama")[0].from_pretrained(tmp_path / "out").eval()
    mixers = [getattr(layer.self_attn, "mixer", None) for layer in model.model.layers]
    assert [mixer and mixer.config.name for mixer in mixers] == ["mlr", None, "mlr", None]


def test_a_converted_model_has_the_states_of_its_rules(sources, tmp_path):
    """Loads, decodes step by step as in one pass, with more state in the layer of the rule."""
    folder = sources("llama", 2)
    save_file(tiny_inputs("llama", 4, 48), tmp_path / "inputs.safetensors")
    attention = {**SMALL, "steps": 2, "rules": [LOOKUP]}
    keys = {"calibration": str(tmp_path / "inputs.safetensors"), "tokens": 64, "length": 32}
    recipe = make_recipe(structure="dense", attention=attention, **keys)
    convert(str(folder), recipe, tmp_path / "out")
    model = tiny_config("llama")[0].from_pretrained(tmp_path / "out").eval()
    mixers = [layer.self_attn.mixer for layer in model.model.layers]
    assert [mixer.config.states for mixer in mixers] == ["shared", "per_head"]
    ids = tiny_inputs("llama", 2, 30, seed=3)["input_ids"]
    whole, cache, parts = model_outputs(model, {"input_ids": ids}), None, []
    with torch.inference_mode():
        for piece in (ids[:, :20], *ids[:, 20:].split(1, dim=1)):
            out = model(input_ids=piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-3, atol=1e-4)
    small, lookup = (layer.state.nbytes() for layer in cache.layers)
    assert lookup > 1.5 * small
    plan = plan_dict(make_plan(describe_checkpoint(open_checkpoint(str(folder))), recipe))
    told = inspect(str(tmp_path / "out"))
    assert told["attention_totals"] == plan["attention_totals"] and told["mixer_rows"] == plan["mixers"]
    assert [row["layers"] for row in plan["mixers"]] == [1, 1] and "states per head" in plan["mixers"][1]["mixer"]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_costs_of_a_hybrid_count_the_layers_that_keep_softmax(sources, family):
    """A choice by measurement: exact for equal layers, otherwise the mean over the choices."""
    from itertools import combinations

    folder = sources(family, 4)
    measured = plan_dict(plan_of(folder, hybrid={"softmax": 0.5}))
    totals = [
        plan_dict(plan_of(folder, hybrid={"layers": list(layers)}))["attention_totals"]
        for layers in combinations(range(4), 2)
    ]
    for name in ("cache_bytes", "macs"):
        for length in map(str, CONTEXTS):
            for i in (0, 1):
                mean = sum(total[name][length][i] for total in totals) / len(totals)
                assert measured["attention_totals"][name][length][i] == pytest.approx(mean, rel=1e-6)
    assert measured["attention_totals"]["softmax_layers"] == 2 and measured["attention_totals"]["layers"] == 4
    assert sum(row["layers"] for row in measured["mixers"]) == 2


def test_totals_are_sums_over_all_layers(sources):
    plan = plan_of(sources("gemma2", 4), layers="1:", hybrid={"layers": [2]}, rules=[{**LOOKUP, "layers": "3"}])
    shapes = [*plan.softmax_shapes, *(target.shape for target in plan.attention_targets.values())]
    told = plan_dict(plan)
    assert [shape.window for shape in plan.softmax_shapes] == [8, 8] and told["attention_totals"]["softmax_layers"] == 2
    for length in CONTEXTS:
        before = sum(cache_bytes(None, shape, length, plan.dtype) for shape in shapes)
        targets = plan.attention_targets.values()
        mixed = [MIXERS[t.config].cost(t.config, t.shape, length) for t in targets]
        after = sum(cache_bytes(None, shape, length, plan.dtype) for shape in plan.softmax_shapes)
        after += sum(cache_bytes(t.config, t.shape, length, plan.dtype) for t in targets)
        assert told["attention_totals"]["cache_bytes"][str(length)] == [before, after]
        kept = sum(softmax_macs(shape, length) for shape in plan.softmax_shapes)
        assert told["attention_totals"]["macs"][str(length)][1] == kept + sum(cost.macs for cost in mixed)
    (table,) = [part for part in plan_table(told) if hasattr(part, "columns")]
    first, layers = (list(column.cells) for column in table.columns[:2])
    assert first[-2:] == ["softmax, not replaced", "all layers"] and layers == ["1", "1", "2", "4"]
    assert plan_dict(make_plan(describe_checkpoint(open_checkpoint(str(sources("llama", 2)))), make_recipe(structure="low_rank")))["attention_totals"] is None  # fmt: skip
