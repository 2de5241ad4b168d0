"""Convolutions that files hold in parts and models in one tensor: OLMo-hybrid."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers
from helpers.small_training import TINY_CHECKPOINT
from helpers.tiny_families import DELTA_NET, NO_HEAD_DIM, TinyFamily
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import surgery
from surgery.checkpoint.joined_convolutions import join_convolutions, joined_convolutions
from surgery.checkpoint.safetensors_io import read_header
from surgery.checkpoint.source import open_checkpoint
from surgery.core.errors import SurgeryError
from surgery.training.export import check_exported_tensors

PREFIX = "model.layers.0.linear_attn."
PARTS = [f"{PREFIX}{letter}_conv1d.weight" for letter in "qkv"]
LOW_RANK = {"structure": "low_rank", "keep": 0.7}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    if not hasattr(transformers, "OlmoHybridForCausalLM"):
        pytest.skip("this version of transformers has no OlmoHybridForCausalLM")
    options = {**NO_HEAD_DIM, **DELTA_NET, "layer_types": ["linear_attention", "full_attention"]}
    folder = tmp_path_factory.mktemp("source")
    model = TinyFamily("OlmoHybridForCausalLM", "OlmoHybridConfig", options).build()
    tokenizer = AutoTokenizer.from_pretrained(TINY_CHECKPOINT)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(folder) -> torch.Tensor:
    ids = torch.randint(3, 90, (2, 30), generator=torch.Generator().manual_seed(1))
    return AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits


def test_a_source_has_the_joined_tensor(source) -> None:
    stored = load_file(source / "model.safetensors")
    assert set(PARTS) <= stored.keys()
    opened = open_checkpoint(str(source)).tensors
    assert f"{PREFIX}conv1d.weight" in opened and not set(PARTS) & opened.keys()
    info = opened[f"{PREFIX}conv1d.weight"]
    assert torch.equal(info.tensor, torch.cat([stored[part] for part in PARTS]))
    assert info.nbytes == sum(stored[part].nbytes for part in PARTS)


@pytest.mark.parametrize("recipe", [{**LOW_RANK, "rank": "full"}, LOW_RANK])
def test_conversions_load_back(recipe, source, tmp_path) -> None:
    """From files as from memory; what is not replaced has the same values, and densify's files load too."""
    surgery.convert(source, recipe, tmp_path / "files", quiet=True)
    model = surgery.apply(AutoModelForCausalLM.from_pretrained(source), recipe)
    model.save_pretrained(tmp_path / "memory")
    surgery.densify(tmp_path / "files", tmp_path / "dense")
    found = {name: logits(tmp_path / name) for name in ("files", "memory", "dense")}
    for name in ("memory", "dense"):
        torch.testing.assert_close(found[name], found["files"], rtol=0, atol=1e-4 * float(found["files"].abs().max()))
    if "rank" in recipe:
        original = logits(source)
        torch.testing.assert_close(found["files"], original, rtol=0, atol=1e-4 * float(original.abs().max()))


def test_calibrated_conversions_read_them(source, tmp_path) -> None:
    recipe = {**LOW_RANK, "rank": "full", "tokens": 128, "length": 32, "curvature": "none", "tune": False}
    surgery.convert(source, recipe, tmp_path / "out", calibration=TINY_CHECKPOINT / "calibration.txt", quiet=True)
    original = logits(source)
    torch.testing.assert_close(logits(tmp_path / "out"), original, rtol=0, atol=1e-3 * float(original.abs().max()))


def test_what_is_joined(source, tmp_path) -> None:
    """All parts of a rule of the model's type; parts of several dtypes are an error that names them."""
    config = {"model_type": "olmo_hybrid"}
    assert joined_convolutions(config, PARTS) == {f"{PREFIX}conv1d.weight": PARTS}
    assert joined_convolutions({"text_config": config}, PARTS) == {f"{PREFIX}conv1d.weight": PARTS}
    assert joined_convolutions(config, PARTS[1:]) == {}
    assert joined_convolutions({"model_type": "llama"}, PARTS) == {}
    tensors = read_header(source / "model.safetensors")
    (whole,) = (
        info
        for name, info in join_convolutions(config, tensors, values=False).items()
        if name.endswith("conv1d.weight")
    )
    assert whole.tensor.is_meta and whole.shape == (sum(tensors[part].shape[0] for part in PARTS), 1, 4)
    mixed = {
        part: torch.zeros(4, 1, 4, dtype=dtype) for part, dtype in zip(PARTS, [torch.float16, *2 * [torch.float32]])
    }
    save_file(mixed, tmp_path / "mixed.safetensors")
    with pytest.raises(SurgeryError, match=r"q_conv1d\.weight.* must have one dtype"):
        join_convolutions(config, read_header(tmp_path / "mixed.safetensors"))


def test_trained_checkpoints_are_compared_with_the_joined_tensor(source, tmp_path) -> None:
    """finetune writes what it did not train as it was; a convolution in parts is compared joined."""
    opened = open_checkpoint(str(source))
    check_exported_tensors(source, opened, {})
    tensors = load_file(source / "model.safetensors")
    tensors[PARTS[1]][0, 0, 0] += 1
    shutil.copytree(source, tmp_path / "other")
    save_file(tensors, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    with pytest.raises(SurgeryError, match="conv1d"):
        check_exported_tensors(tmp_path / "other", opened, {})
