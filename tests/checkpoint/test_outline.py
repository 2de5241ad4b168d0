"""The outline of a decoder against transformers' model class: same modules, attention and plan; no outline if they
could differ.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
from helpers.small import FAMILIES, tiny_config

import surgery  # noqa: F401
from surgery.architectures import get_architecture, known_families
from surgery.architectures.attention import attention_paths, attention_shape, output_path
from surgery.architectures.linears import find_linears
from surgery.architectures.outline import build_outline
from surgery.checkpoint.meta_model import MetaModel, bare_model
from surgery.checkpoint.outline import describe_checkpoint, read_outline
from surgery.checkpoint.source import CheckpointSource, open_checkpoint
from surgery.core.errors import SurgeryError
from surgery.planning.plan import make_plan
from surgery.planning.recipe import conversion_recipes_folder, load_recipe
from surgery.publish.summary import plan_dict

OUTLINED = ("llama", "llama-tied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2")
RECIPES = [load_recipe(path.stem) for path in sorted(conversion_recipes_folder().glob("*.yaml"))]
RECIPES += [
    load_recipe("btt-half", ['rules=[{"match": "head", "keep": 0.5}]']),
    load_recipe("btt-half", ["blocks=[7, 7]"]),  # which tiles no matrix
    load_recipe("btt-half", ['rules=[{"match": "no.such.module", "keep": 0.5}]']),
    load_recipe("sliding-window", ["attention.layers=0:1"]),
    load_recipe("sliding-window", ["attention.hybrid={softmax: 0.5, choose_by: every}"]),
]


def outcome(model, recipe):
    """Return the plan as data, or the message of its refusal."""
    try:
        plan = make_plan(model, recipe)
    except SurgeryError as error:
        return str(error)
    return repr(plan), json.dumps(plan_dict(plan))


def describe_model(model):
    """Return everything that a plan reads of a model's modules."""
    paths = attention_paths(model)
    return {
        "class": type(model).__name__,
        "parameters": [(name, tuple(p.shape)) for name, p in model.named_parameters(remove_duplicate=False)],
        "tied": dict(model.all_tied_weights_keys),
        "linears": find_linears(model),
        "attention": [(path, output_path(model, path), attention_shape(model, path)) for path in paths],
    }


def both_ways(folder: Path) -> None:
    """Check that a checkpoint has an outline, and that every recipe plans the same with it as with transformers'
    class.
    """
    source = open_checkpoint(str(folder), weights=False)
    outline, model = read_outline(source), MetaModel(source)
    assert outline is not None
    assert (outline.keys, outline.tied) == (model.keys, model.tied)
    assert describe_model(outline.model) == describe_model(model.model)
    for name in model.keys:
        assert outline.tensor_info(name) == model.tensor_info(name)
    for recipe in RECIPES:
        assert outcome(outline, recipe) == outcome(model, recipe)


def save(folder: Path, family: str, max_shard_size: str = "1GB", **changes) -> Path:
    """Save a tiny random model whose config has other values, and return its folder."""
    cls, config = tiny_config(family)
    cls(type(config)(**{**config.to_dict(), **changes})).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def with_config(folder: Path, source: Path, drop: tuple[str, ...] = (), **changes) -> Path:
    """Copy a checkpoint, changing keys of its config.json."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in {**config, **changes}.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def test_every_outline_is_compared():
    specs = {get_architecture(family).outline for family in known_families()} - {None}
    assert {spec.model_type for spec in specs} == {tiny_config(family)[1].model_type for family in OUTLINED}


@pytest.mark.parametrize("family", OUTLINED)
def test_plans_equal_those_of_the_model_class(family, checkpoints):
    both_ways(checkpoints(family))


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 16}),
        ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        ("llama", {"max_shard_size": "20KB"}),
        ("llama-tied", {"max_shard_size": "20KB"}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 8, "head_dim": 16}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("gemma2", {"attention_bias": True, "attn_logit_softcapping": None, "query_pre_attn_scalar": 12}),
        ("gemma3", {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False}),
        ("olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    ],
)  # fmt: skip
def test_plans_equal_with_other_settings(family, changes, tmp_path):
    folder = save(tmp_path / "source", family, **changes)
    assert ("max_shard_size" in changes) == (len(list(folder.glob("*.safetensors"))) > 1)
    both_ways(folder)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "family, drop, changes",
    [
        ("llama", ("rope_parameters", "dtype"), {"rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "bfloat16"}),
        ("llama", ("rope_parameters", "attention_bias", "mlp_bias", "head_dim", "pretraining_tp"), {}),
        ("llama", ("rope_parameters",), {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32}}),
        ("llama", (), {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32, "rope_theta": 10000}}),
        ("qwen2", ("layer_types", "rope_parameters"), {"sliding_window": 16, "rope_theta": 1000000}),
        ("qwen3", ("layer_types",), {"eos_token_id": [2, 3], "pad_token_id": None, "_name_or_path": "x/y"}),
    ],
)
def test_plans_equal_for_configs_of_older_versions(family, drop, changes, checkpoints, tmp_path):
    both_ways(with_config(tmp_path / "source", checkpoints(family), drop, **changes))


def test_plans_equal_where_both_tied_tensors_are_stored(checkpoints, tmp_path):
    from safetensors.torch import load_file, save_file

    source = with_config(tmp_path / "source", checkpoints("llama-tied"))
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors")
    both_ways(source)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in OUTLINED])
def test_other_families_need_the_model_class(family, checkpoints):
    source = open_checkpoint(str(checkpoints(family)), weights=False)
    assert read_outline(source) is None
    assert isinstance(describe_checkpoint(source), MetaModel)


def change_tensors(source: Path, change) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")


KEY = "model.layers.1.self_attn.k_proj"
CHANGES = {
    "missing": lambda tensors: tensors.pop(f"{KEY}.weight"),
    "missing norm": lambda tensors: tensors.pop("model.norm.weight"),
    "other shape": lambda tensors: tensors.update({f"{KEY}.weight": tensors[f"{KEY}.weight"][:8].clone()}),
    "transposed": lambda tensors: tensors.update({f"{KEY}.weight": tensors[f"{KEY}.weight"].T.contiguous()}),
    "below a linear": lambda tensors: tensors.update({f"{KEY}.bias": tensors["model.norm.weight"].clone()}),
    "another layer": lambda tensors: tensors.update(
        {"model.layers.2.input_layernorm.weight": tensors["model.norm.weight"].clone()}
    ),
    "old buffer": lambda tensors: tensors.update(
        {"model.layers.0.self_attn.rotary_emb.inv_freq": tensors["model.norm.weight"][:4].clone()}
    ),
    "without prefix": lambda tensors: [
        tensors.update({name.removeprefix("model."): tensors.pop(name)}) for name in sorted(tensors)
    ],
}


@pytest.mark.parametrize("change", CHANGES)
def test_tensors_that_differ_are_judged_by_the_model_class(change, checkpoints, tmp_path):
    folder = with_config(tmp_path / "source", checkpoints("llama"))
    change_tensors(folder, CHANGES[change])
    source = open_checkpoint(str(folder), weights=False)
    assert read_outline(source) is None
    outcomes = []
    for describe in (describe_checkpoint, MetaModel):
        try:
            outcomes.append(outcome(describe(source), RECIPES[0]))
        except SurgeryError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


ODD_VALUES = (
    None,
    True,
    -1,
    0,
    1,
    3,
    2.5,
    1e300,
    10**400,
    float("nan"),
    "",
    "auto",
    [],
    [0],
    {},
    {"rope_type": "yarn"},
)


@pytest.mark.parametrize("family", OUTLINED)
def test_an_outline_of_an_odd_config_is_that_of_the_model_class(family, checkpoints):
    """Each value of config.json in turn is missing or odd: there is no outline, or transformers builds the same
    model.
    """
    folder = checkpoints(family)
    plain = json.loads((folder / "config.json").read_text())
    configs = [{key: value for key, value in plain.items() if key != dropped} for dropped in plain]
    keys = (
        *plain,
        "attn_implementation",
        "rope_scaling",
        "partial_rotary_factor",
        "head_dim",
        "layer_types",
        "num_labels",
    )
    configs += [{**copy.deepcopy(plain), key: value} for key in keys for value in ODD_VALUES]
    built = 0
    for config in configs:
        outline = build_outline(config)
        if outline is not None:
            built += 1
            assert describe_model(outline) == describe_model(
                _transformers_model(config, folder.parent / f"{family}-odd")
            )
    assert built > 10


def _transformers_model(config, folder: Path):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return bare_model(CheckpointSource(str(folder), folder, config, {}))
