"""Recipes: every shipped one is valid, and errors name the nearest valid word."""

from __future__ import annotations

import pytest
import yaml
from helpers.small import make_recipe
from hypothesis import given, settings
from hypothesis import strategies as st

from surgery.core.errors import SurgeryError
from surgery.planning.recipe import (
    ConversionRecipe,
    TuneRecipe,
    conversion_recipes_folder,
    is_layer_selected,
    load_recipe,
    parse_recipe,
    validate_recipe,
)


@pytest.mark.parametrize("name", sorted(p.stem for p in conversion_recipes_folder().glob("*.yaml")))
def test_shipped_recipes(name):
    recipe = load_recipe(name)
    text = (conversion_recipes_folder() / f"{name}.yaml").read_text()
    assert recipe.description and len(text.splitlines()) < 80
    if recipe.attention is None and recipe.native is None and recipe.stock is None:
        assert recipe.keep == 0.5 and "keep" in yaml.safe_load(text)
        assert recipe.tune == TuneRecipe(model=20)
    else:
        assert recipe.tune is None
        assert recipe.structure == "dense"  # attention alone; linears are added with --set structure=..


@pytest.mark.parametrize(
    "text, says",
    [
        ("kep: 0.5", "unknown key 'kep'; did you mean 'keep'"),
        ("structure: bt", "unknown structure 'bt'; did you mean 'btt'"),
        ("candidates: [lowrank]", "unknown structure 'lowrank'; did you mean 'low_rank'"),
        ("rules: [{match: mlp.dwn}]", "unknown role 'mlp.dwn'; did you mean 'mlp.down'"),
        ("rules: [{match: mlp.down, kep: 0.5}]", "unknown key 'rules.0.kep'; did you mean 'keep'"),
        ("depth: {xyz: 0.5}", "unknown key 'depth.xyz'; valid: drop, keep, refit, remove$"),
        ("depth: {drops: 1}", "unknown key 'depth.drops'; did you mean 'drop'"),
        ("speed: {prefil: 2}", "unknown key 'speed.prefil'; did you mean 'prefill'"),
        ("tune: {modl: 1}", "unknown key 'tune.modl'; did you mean 'model'"),
        ("native: {leaf: 4}", "unknown key 'native.leaf'; valid: block, layers, levels$"),
        (
            "attention: {mixer: linear, hybrid: {sofmax: 0.2}}",
            "unknown key 'attention.hybrid.sofmax'; did you mean 'softmax'",
        ),
        ("calibration: [{path: a, wight: 2}]", "unknown key 'calibration.0.wight'; did you mean 'weight'"),
        ("rules: [{match: mlp.down, structure: monarc}]", "did you mean 'monarch'"),
        ("keep: abc", r"^recipe r.yaml: keep: write a fraction over 0 and at most 1, .* \(got 'abc'\)$"),
        ("keep: 1.5", r"keep: write a fraction .* \(got 1.5\)$"),
        ("keep: 0", r"keep: write a fraction .* \(got 0\)$"),
        ("keep: {mlp.down: 7}", "keep: 'mlp.down' must have a fraction over 0 and at most 1 \\(got 7\\)"),
        ("keep: {mlp.down: 0.7}\nrules: [{match: x, keep: no}]", r"rules.0.keep: write a fraction .* \(got False\)$"),
        ("keep: {3: 0.5}", "keep: 3 is not a pattern"),
        ("keep: {mlp.down: 0.5}\nrules: 1", r"r.yaml: rules: .* \(got 1\)$"),
        ("round_ranks: 0", r"round_ranks: write a whole number from 1 to 4096, for example 64 \(got 0\)$"),
        ("round_ranks: 6.4", r"round_ranks: write a whole number from 1 to 4096, for example 64 \(got 6.4\)$"),
        ("blocks: 0", r"r.yaml: blocks: write two whole numbers over 0, .* \(got 0\)$"),
        ("blocks: true", r"r.yaml: blocks: write two whole numbers over 0, .* \(got True\)$"),
        ("blocks: [0, 4]", r"r.yaml: blocks: write two whole numbers over 0, .* \(got \[0, 4\]\)$"),
        ("blocks: sqr", r"r.yaml: blocks: write [^;]* \(got 'sqr'\)$"),
        ("rules: [{match: mlp.up, rank: some}]", r"r.yaml: rules.0.rank: write a whole number [^;]* \(got 'some'\)$"),
        ("sweeps: -1", r"r.yaml: sweeps: .* \(got -1\)$"),
        ("layers: first", "must be a range of layer numbers"),
        ("layers: 2:4", "must be a range .* in quotes, .* .got 124."),
        ("rules: [{match: x, layers: 3}]", "must be a range .* in quotes, .* .got 3."),
        ("candidates: []", "name at least one structure"),
        ("[1, 2]", r"must be a mapping of keys to values \(got \[1, 2\]\)"),
        ("[]", r"must be a mapping of keys to values \(got \[\]\)"),
        ("false", r"must be a mapping of keys to values \(got False\)"),
        ("", "has no keys"),
        ("# structure: btt", "has no keys"),
        ("keep: 0.5\nstructure: btt\nkeep: 0.7", "the key 'keep' is given twice; give it once"),
        ("rules: [{match: x, keep: 0.5, match: y}]", "the key 'match' is given twice"),
        ("attention: {mixer: linear, context: 99}", "context is about the ranks that `cache` chooses"),
        ("attention: {mixer: mlr, ranks: [8, 8], ladder: [8]}", "ladder is about the ranks that `cache` chooses"),
        ("attention: {mixer: mlr, cache: 0.5, ranks: [8, 8], extents: [8]}", "`cache` chooses ranks; give one"),
        ("attention: {mixer: linear, hybrid: {layers: [1], choose_by: every}}", "choose_by: every has no effect"),
        ("attention: {mixer: linear, hybrid: {heads: {1: [0]}, choose_by: restored}}", "choose_by: restored has no"),
        ("a: [", "is not YAML"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
        ("a: &a [*a]", "not YAML|unknown key"),
    ],
)
def test_slips(text, says):
    with pytest.raises(SurgeryError, match=says):
        parse_recipe(text, "r.yaml")


@pytest.mark.parametrize(
    "override, says",
    [
        ("keep", "write key=value"),
        ("rules.3.keep=1", "no such key|rules"),
        ("kee=1", "did you mean 'keep'"),
        ("keep=[", "not a YAML value"),
    ],
)
def test_overrides_that_are_refused(override, says):
    with pytest.raises(SurgeryError, match=says):
        load_recipe("btt-half", [override])


def test_overrides():
    recipe = load_recipe(
        "btt-half", ["keep=0.75", "blocks=[2, 8]", "rules=[{match: mlp.*, keep: 0.9}]", "rules.0.keep=0.8"]
    )
    assert (recipe.keep, recipe.blocks, recipe.rules[0].keep) == (0.75, (2, 8), 0.8)


@pytest.mark.parametrize("text", ["2:4", "9:", "-1", "7", ":"])
def test_a_range_of_layers_is_overridden_as_it_stands(text):
    assert load_recipe("btt-half", [f"layers={text}"]).layers == text


def test_no_such_recipe():
    with pytest.raises(SurgeryError, match="no recipe 'btt-haf'; did you mean 'btt-half'"):
        load_recipe("btt-haf")
    with pytest.raises(SurgeryError, match="does not exist"):
        load_recipe("/nowhere/r.yaml")


@pytest.mark.parametrize(
    "text, chosen",
    [
        (":", {0, 1, 2, 3, 4, 5}),
        ("2:-2", {2, 3}),
        (":1", {0}),
        ("-1", {5}),
        ("3", {3}),
        ("4:", {4, 5}),
        ("9:", set()),
        ("7", set()),
        ("-7", set()),
    ],
)
def test_layer_ranges(text, chosen):
    assert {i for i in range(6) if is_layer_selected(text, i, 6)} == chosen


def settings_of(recipe, role="mlp.up", path="model.layers.1.mlp.up_proj", index=1, count=4):
    from fnmatch import fnmatchcase

    return recipe.settings(lambda p: fnmatchcase(role, p) or fnmatchcase(path, p), index, count)


def test_later_rules_win_and_options_follow_their_structure():
    recipe = make_recipe(
        structure="btt",
        blocks=[4, 4],
        rules=[
            {"match": "mlp.*", "keep": 0.7},
            {"match": "*.up_proj", "structure": "low_rank"},
            {"match": "mlp.up", "keep": 0.3, "layers": "2:"},
        ],
    )
    found = settings_of(recipe)
    assert (found.structure, found.keep, found.blocks) == ("low_rank", 0.7, None)
    assert settings_of(recipe, index=2).keep == 0.3


def test_keep_patterns():
    recipe = make_recipe(structure="btt", keep={"*": 0.5, "mlp.*": 0.7, "model.layers.0.*": 1.0})
    assert settings_of(recipe).keep == 0.7
    assert settings_of(recipe, path="model.layers.0.mlp.up_proj", index=0).structure == "dense"
    assert settings_of(recipe, role="attention.key", path="x").keep == 0.5


def test_outside_the_layers_only_by_rule():
    assert settings_of(make_recipe(), role="head", path="lm_head", index=None).structure == "dense"
    recipe = make_recipe(structure="low_rank", rules=[{"match": "head", "keep": 0.4}])
    found = settings_of(recipe, role="head", path="lm_head", index=None)
    assert (found.structure, found.keep) == ("low_rank", 0.4)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_a_recipe_or_a_clear_refusal(text):
    try:
        assert isinstance(parse_recipe(text, "fuzz"), ConversionRecipe)
    except SurgeryError as error:
        assert str(error)


JSONISH = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=6), x, max_size=3), max_leaves=6)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*ConversionRecipe.model_fields]), JSONISH, max_size=4))
def test_any_values_are_a_recipe_or_a_clear_refusal(data):
    try:
        make_recipe(**data)
    except SurgeryError as error:
        assert str(error)


def test_the_share_of_a_hybrid_is_explained_without_patterns():
    """`keep` of the recipe may be written per pattern, `softmax` of a hybrid may not."""
    data = {
        "structure": "dense",
        "attention": {"mixer": "linear", "hybrid": {"softmax": {"mlp.*": 0.2}, "choose_by": "every"}},
    }
    with pytest.raises(SurgeryError, match=r"attention\.hybrid\.softmax: write a fraction .* for example 0\.25 \(got"):
        validate_recipe(data, "(given as a dict)")
    with pytest.raises(SurgeryError, match=r": keep: write a fraction .* or \{pattern: fraction\} \(got 1\.5\)"):
        validate_recipe({"structure": "btt", "keep": 1.5}, "(given as a dict)")
