"""Conversions of every family: full rank reproduces the original, for whole and split linears, and converted models
generate.
"""

from __future__ import annotations

import pytest
import torch
from helpers.slow import slow_where
from helpers.small import FAMILIES, GENERATIVE_FAMILIES, make_recipe, matrix_structures, model_outputs, tiny_inputs

import surgery  # noqa: F401
from surgery.checkpoint.meta_model import model_class
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.planning.recipe import ConversionRecipe


def load(folder):
    from transformers import AutoConfig

    return model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32).eval()


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def pairs():
    """BTT in every family, and the other structures in turns: every one in several families."""
    others = [name for name in matrix_structures() if name != "btt"]
    for n, family in enumerate(FAMILIES):
        yield from ((family, "btt"), (family, others[n % len(others)]))


@pytest.mark.parametrize("family, structure", pairs())
def test_full_rank_is_exact(family, structure, checkpoints, tmp_path):
    source = checkpoints(family)
    report = convert(str(source), make_recipe(structure=structure, rank="full"), tmp_path / "out")
    assert {m["structure"]["structure"] for m in report["modules"]} == {structure}
    inputs = tiny_inputs(family, 3, seed=2)
    original, converted = load(source), load(tmp_path / "out")
    assert worst(model_outputs(converted, inputs), model_outputs(original, inputs)) < 1e-5


@pytest.mark.parametrize("family", GENERATIVE_FAMILIES)
def test_greedy_generation_is_equal_token_by_token(family, checkpoints, tmp_path):
    source = checkpoints(family)
    convert(str(source), make_recipe(structure="btt", blocks=[2, 4], rank="full", fused="split"), tmp_path / "out")
    ids = tiny_inputs(family, 2, 8, seed=3)["input_ids"]
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = [load(folder).generate(input_ids=ids, **options) for folder in (source, tmp_path / "out")]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("family", ["phi3", "gpt2", "gpt_neox"])
def test_fused_linears_split_by_role(family, checkpoints, calibration, tmp_path):
    """One role replaced, the others dense and untouched where they are fitted to the same input."""
    rules = [{"match": "attention.key", "structure": "low_rank", "keep": 0.5}, {"match": "mlp.*", "structure": "dense"}]
    rules = [{"match": "attention.*", "structure": "dense"}, *rules]
    source = checkpoints(family)
    report = convert(str(source), make_recipe(structure="low_rank", rules=rules), tmp_path / "out")
    cut = [m for m in report["modules"] if m["roles"] == ["attention.key"]]
    assert len(cut) == 2 and all(m["structure"]["structure"] == "low_rank" for m in cut)
    dense = [m for m in report["modules"] if m["roles"] != ["attention.key"]]
    assert dense and all(m["error"] == 0 for m in dense)
    split = load(tmp_path / "out")
    densify(str(tmp_path / "out"), tmp_path / "dense")
    inputs = tiny_inputs(family, 2)
    assert worst(model_outputs(load(tmp_path / "dense"), inputs), model_outputs(split, inputs)) < 1e-5


LIKE_LLAMA = ("mistral", "olmo2", "qwen2", "qwen3", "gemma2")


@pytest.mark.parametrize("family", slow_where(lambda family: family in LIKE_LLAMA, FAMILIES))
def test_calibrated_beats_plain(family, checkpoints, calibration, tmp_path):
    """Half the numbers: the calibrated conversion's output is nearer than the data-free one's."""
    source, inputs = checkpoints(family), tiny_inputs(family, 6, seed=5)
    plain = make_recipe(structure="btt", blocks=[2, 2], keep=0.6)
    fitted = plain.model_copy(update={"calibration": str(calibration(family))})
    errors = {}
    original = model_outputs(load(source), inputs)
    for name, recipe in (("plain", plain), ("fitted", fitted)):
        report = convert(str(source), recipe, tmp_path / name)
        assert report["totals"]["kept"] <= 0.6
        errors[name] = float((model_outputs(load(tmp_path / name), inputs) - original).norm() / original.norm())
    assert errors["fitted"] < errors["plain"]


def the_same_densified(folder, dense_folder, inputs):
    densify(str(folder), dense_folder)
    dense = load(dense_folder)
    assert not hasattr(dense.config, "quantization_config")
    assert worst(model_outputs(dense, inputs), model_outputs(load(folder), inputs)) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_densified_computes_the_same(family, converted, tmp_path):
    """Every structure somewhere in every family, fused linears split."""
    the_same_densified(converted(family), tmp_path / "dense", tiny_inputs(family, 2, seed=7))


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "t5-gated"])
def test_what_auto_chose_densified_computes_the_same(family, checkpoints, calibration, tmp_path):
    recipe = make_recipe(structure="auto", keep=0.6, sweeps=1, calibration=calibration(family), fused="split")
    convert(str(checkpoints(family)), recipe, tmp_path / "out")
    the_same_densified(tmp_path / "out", tmp_path / "dense", tiny_inputs(family, 2, seed=7))


def test_unknown_family_by_path(tmp_path):
    """A model without an architecture: its linears by path, and the user is told."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=96, word_embed_proj_dim=32, max_position_embeddings=64)  # fmt: skip
    OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    report = convert(str(tmp_path / "opt"), make_recipe(structure="low_rank", rank="full"), tmp_path / "out")
    assert "no architecture for model_type 'opt'" in report["notes"][0]
    assert len(report["modules"]) == 12
    inputs = tiny_inputs("llama", 2)
    assert worst(model_outputs(load(tmp_path / "out"), inputs), model_outputs(load(tmp_path / "opt"), inputs)) < 1e-5


def test_recipe_type() -> None:
    assert isinstance(make_recipe(structure="btt"), ConversionRecipe)
