"""Every healing recipe but lambda fits every conversion recipe and every mixer, as docs/finetune.md says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.small import DECODER, SMALL_LEVELS
from helpers.small_training import healing_recipe_names

from surgery.architectures.linears import find_linears
from surgery.checkpoint.meta_model import model_class
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS
from surgery.mixers.features.base import FEATURES
from surgery.mixers.masks.base import MASKS
from surgery.planning.recipe import load_recipe, shipped_recipes, validate_recipe
from surgery.training.finetune import finetune
from surgery.training.pretrain.initialize import install_mixers, plan_new_model, replace_linears
from surgery.training.recipe import load_healing_recipe, parse_healing_recipe
from surgery.training.runner import changed_parameters
from surgery.training.stages import StageModels
from surgery.training.suitability import recipe_warnings

# Recipe lambda is for level weights of native layers, which these models do not have: test_level_weights_training.py.
NAMES = [name for name in healing_recipe_names() if name != "lambda"]
ROOT = Path(__file__).resolve().parents[2]
ALIGNED = str(ROOT / "recipes" / "papers" / "healing" / "aligned.yaml")
# What is decided by trained weights, decided here.
DECIDED = {"auto-half": ["structure=btt", "blocks=[4, 4]"], "hybrid-25": ["attention.hybrid={layers: [0]}"]}
DECIDED["mlr-nested"] = SMALL_LEVELS
DECIDED["pruned-half"] = ["rules.0.multiple=8"]  # of the 48 neurons of the tiny model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import LlamaConfig

    place = tmp_path_factory.mktemp("config")
    LlamaConfig(**DECODER, architectures=["LlamaForCausalLM"]).save_pretrained(place)
    return place


def convert_model(folder, recipe):
    """A random model of that shape with what the recipe puts in, and the roles of its linears."""
    from transformers import LlamaConfig

    plan = plan_new_model(folder, recipe)
    config = LlamaConfig.from_pretrained(folder)
    model = model_class(config)._from_config(config, dtype=torch.float32)
    roles = {linear.path: linear.roles for linear in find_linears(model).linears if linear.roles}
    replace_linears(model, plan)
    if plan.attention_targets:
        install_mixers(model, plan)
    return StageModels(model, model), roles


@pytest.mark.parametrize(
    "conversion", sorted(n for n in shipped_recipes() if not (load_recipe(n).native or load_recipe(n).stock))
)
def test_4_3_every_recipe_heals_every_conversion(folder, conversion):
    models, roles = convert_model(folder, load_recipe(conversion, DECIDED.get(conversion, [])))
    for name in NAMES:
        assert changed_parameters(load_healing_recipe(name), models, roles), name


GIVEN = {"mlr": {"cache": 0.6}, "bilinear_mlr": {"ranks": [0, 4, 2]}, "window": {"window": 8}}  # what has no default
GIVEN["head_hybrid"] = {"softmax_heads": [0], "others": {"mixer": "linear"}}
GIVEN["global_window"] = {"ranks": [4, 4], "window": 8}


def mixers():
    """Every mixer that replaces softmax attention by its defaults; of linear attention every mask and every feature map."""
    names = [config.name for config in MIXERS if config.name != "native" and not config.name.startswith("test-")]
    yield from ({"mixer": name, **GIVEN.get(name, {})} for name in names)
    yield from ({"mixer": "linear", "mask": config.name} for config in MASKS)
    for config in FEATURES:
        normalised = config.name in ("favor", "lara")  # which take nothing else
        yield {"mixer": "linear", "mask": "ones", "features": config.name, "normalise": normalised}


def test_4_3_every_mixer_can_be_healed(folder):
    """What a recipe of one's own may name, beyond the shipped ones."""
    stage = {"kind": "align", "modules": ["attention"], "tokens": 64, "rate": 1e-3, "trains": ["new"]}
    aligned = parse_healing_recipe({"stages": [stage]})
    for attention in mixers():
        models, roles = convert_model(folder, validate_recipe({"structure": "dense", "attention": attention}, "test"))
        assert all(changed_parameters(load_healing_recipe(name), models, roles) for name in NAMES)
        new = changed_parameters(aligned, models, roles)
        assert new and all(".self_attn." in name for name in new), attention


def test_4_3_a_word_that_selects_nothing_is_still_refused(folder):
    models, roles = convert_model(folder, load_recipe("sliding-window"))
    for trains, said in (
        (["mixers"], r"no parameters of their own. Use trains: \[new\].*recipe new-modules"),
        (["attention", "structured"], r"whose linears were not converted\. Use --recipe attention or new-modules"),
        (["attention", "adapters"], "whether it was converted"),
        (["attention", "mixres"], "did you mean 'mixers'"),
    ):
        stage = {"kind": "lm", "tokens": 64, "rate": 1e-3, "trains": trains}
        with pytest.raises(SurgeryError, match=said):
            changed_parameters(parse_healing_recipe({"stages": [stage]}), models, roles)


def test_4_3_a_sliding_window_is_healed(tmp_path, student, words, without_curves):
    """Its attention's projections are aligned, which are all that can adapt; then everything is distilled."""
    source, window = student.parent / "source", tmp_path / "window"
    convert(str(source), load_recipe("sliding-window", ["attention.window=8"]), window)
    few = [
        "stages.*.tokens=64",
        "stages.*.length=16",
        "stages.*.batch=4",
        "stages.*.rows=4",
        "evaluate=0",
        "deliver=last",
    ]
    few += [f"data.sources=[{{path: {words}}}]", "data.validation=0.1", "data.validation_examples=2", "log=1"]
    out, aligned = tmp_path / "out", load_healing_recipe(ALIGNED, few, tiny=True)
    record = finetune(str(window), aligned, out, teacher=str(source), device="cpu", track="none")
    assert [stage["steps"] for stage in record["stages"]] == [1, 1]
    lines = [json.loads(line) for line in (out / "training" / "log.jsonl").read_text().splitlines()]
    assert {line["stage"] for line in lines if "self_attn" in line} == {0}


def test_an_unconverted_model_is_named_as_such(folder):
    """Recipes that train what a conversion added refuse it; others warn, unless they need no teacher."""
    from transformers import LlamaConfig

    model = model_class(LlamaConfig.from_pretrained(folder))._from_config(LlamaConfig.from_pretrained(folder))
    roles = {linear.path: linear.roles for linear in find_linears(model).linears if linear.roles}
    with pytest.raises(SurgeryError, match=r"it is not a converted model\. Convert it first: surgery convert SRC"):
        changed_parameters(load_healing_recipe("new-modules"), StageModels(model, model), roles)
    (said,) = recipe_warnings("SRC", model, load_healing_recipe("attention").stages)
    assert "SRC is not a converted checkpoint" in said and "surgery convert SRC --recipe btt-half --out OUT" in said
    further = parse_healing_recipe({"stages": [{"kind": "lm", "tokens": 64, "rate": 1e-3, "trains": ["all"]}]})
    assert recipe_warnings("SRC", model, further.stages) == []
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1e-9)
    (said,) = recipe_warnings("OUT", model, further.stages, converted_whole=True)
    assert "model.layers.0.self_attn.q_proj.weight of OUT has values below 1e-06" in said and "Leave out q_proj" in said


@pytest.mark.parametrize(
    ("conversion", "warned"), [("low-rank-half", {"attention"}), ("log-linear", set()), ("sliding-window", set())]
)
def test_a_recipe_for_attention_warns_where_only_linears_were_replaced(folder, conversion, warned):
    models, _ = convert_model(folder, load_recipe(conversion))
    said = {name: recipe_warnings("OUT", models.student, load_healing_recipe(name).stages) for name in NAMES}
    assert {name for name, warnings in said.items() if warnings} == warned
    assert all("the attention of OUT is as it was" in said[name][0] for name in warned)
