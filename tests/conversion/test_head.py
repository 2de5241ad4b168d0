"""Replacing the LM head unties it from the embedding and changes nothing else."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers.small import make_recipe, model_outputs, tiny_config, tiny_inputs
from safetensors.torch import load_file, save_file

import surgery  # noqa: F401
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.structures import StructuredLinear

# T5 scales its decoder's output or not by what config.json says of ties; older files say nothing else of it.
OLD_T5 = {"t5": {}, "t5-gated": {"tie_word_embeddings": False}}
FAMILIES = ("llama", "llama-tied", "gemma2", "gpt2", "bert", "t5", "t5-gated")


def load(family, folder):
    return tiny_config(family)[0].from_pretrained(folder, dtype=torch.float32).eval()


def worst(a, b) -> float:
    return float((a - b).abs().max() / b.abs().max())


def head_only(**keys):
    rule = {"match": "head", "structure": "btt", "blocks": [2, 2], **keys}
    return {"structure": "dense", "rules": [rule]}


@pytest.fixture
def source(checkpoints, tmp_path):
    """source(family) -> its checkpoint, T5's with a config.json as of old."""

    def of(family):
        folder = checkpoints(family)
        if family not in OLD_T5:
            return folder
        old = shutil.copytree(folder, tmp_path / "old")
        config = json.loads((old / "config.json").read_text())
        config = {k: v for k, v in config.items() if k not in ("scale_decoder_outputs", "tie_word_embeddings")}
        (old / "config.json").write_text(json.dumps({**config, **OLD_T5[family]}))
        if OLD_T5[family]:  # a head of its own, as in T5 v1.1
            tensors = load_file(old / "model.safetensors")
            tensors["lm_head.weight"] = tensors["shared.weight"].flip(0).contiguous()
            save_file(tensors, old / "model.safetensors", metadata={"format": "pt"})
        return old

    return of


@pytest.mark.parametrize("text", [False, True], ids=["plain", "calibrated"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_at_full_rank_is_exact(family, text, source, calibration, tmp_path):
    folder, inputs = source(family), tiny_inputs(family, 3, seed=2)
    more = {"calibration": calibration(family)} if text else {}
    report = convert(str(folder), make_recipe(**head_only(rank="full"), **more), tmp_path / "out")
    assert [m["roles"] for m in report["modules"]] == [["head"]]
    before = load(family, folder)
    tied = before.get_output_embeddings().weight is before.get_input_embeddings().weight
    assert any("unties them" in note for note in report["notes"]) == tied == (family not in ("llama", "t5-gated"))
    original = model_outputs(before, inputs)
    model = load(family, tmp_path / "out")
    assert isinstance(model.get_output_embeddings(), StructuredLinear)
    assert worst(model_outputs(model, inputs), original) < 1e-5
    model.tie_weights()  # libraries call it; there is nothing left to tie
    model.save_pretrained(tmp_path / "again")
    densify(str(tmp_path / "out"), tmp_path / "dense")
    for name in ("again", "dense"):
        assert worst(model_outputs(load(family, tmp_path / name), inputs), original) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_smaller_head_leaves_the_embedding_alone(family, source, calibration, tmp_path):
    """The output is that of the original with the products as its head, the rest to the bit as it was."""
    folder, inputs = source(family), tiny_inputs(family, 3, seed=2)
    report = convert(str(folder), make_recipe(**head_only(keep=0.5), calibration=calibration(family)), tmp_path / "out")
    assert report["totals"]["kept"] <= 0.5 and report["modules"][0]["error"] < 1
    original, model = load(family, folder), load(family, tmp_path / "out")
    assert torch.equal(model.get_input_embeddings().weight, original.get_input_embeddings().weight)
    standin, linear = model.get_output_embeddings(), original.get_output_embeddings()
    linear.weight = torch.nn.Parameter(standin.dense())
    found, expected = model_outputs(model, inputs), model_outputs(original, inputs)
    assert worst(found, expected) < 1e-5


def test_an_embedding_stored_under_the_heads_name_survives(checkpoints, tmp_path):
    """A tied pair may be stored under either name."""
    folder = shutil.copytree(checkpoints("llama-tied"), tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    convert(str(folder), make_recipe(**head_only(rank="full")), tmp_path / "out")
    inputs = tiny_inputs("llama", 2)
    original, converted = (load("llama-tied", f) for f in (checkpoints("llama-tied"), tmp_path / "out"))
    assert worst(model_outputs(converted, inputs), model_outputs(original, inputs)) < 1e-5
