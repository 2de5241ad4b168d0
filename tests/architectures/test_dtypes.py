"""A converted checkpoint of every family of TINY_FAMILIES loads in the dtype that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.slow import slow_where
from helpers.small import make_recipe
from helpers.tiny_families import TINY_FAMILIES
from transformers import AutoConfig

from surgery.checkpoint.model_classes import model_class
from surgery.conversion.convert import convert

# transformers renames tensors of gpt_neox and mixtral on loading, keeps some of T5 in float32, and loads the others by
# other classes.
KEPT = ("gpt_neox", "mixtral", "vit", "t5", "mllama")


def convert_half(name: str, source: Path, converted: Path) -> Any:
    """Save a family's tiny model in bfloat16, convert its first layer, and return its class."""
    TINY_FAMILIES[name].build().to(torch.bfloat16).save_pretrained(source)
    convert(str(source), make_recipe(structure="low_rank", keep=0.6, layers="0"), converted)
    return model_class(AutoConfig.from_pretrained(source))


def float_dtypes(cls: Any, folder: Path, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of each floating tensor of a checkpoint that is loaded with `dtype`."""
    state = cls.from_pretrained(folder, dtype=dtype).state_dict()
    return {name: tensor.dtype for name, tensor in state.items() if tensor.is_floating_point()}


@pytest.mark.parametrize(
    "name", slow_where(lambda name: not (TINY_FAMILIES[name].in_ci or name in KEPT), TINY_FAMILIES)
)
def test_every_floating_tensor_has_the_asked_dtype(name, tmp_path):
    """Before 5.21 transformers leaves tensors that it renames on loading a quantized model (embed_out -> lm_head) as
    they are stored.
    """
    cls = convert_half(name, tmp_path / "source", tmp_path / "converted")
    found = float_dtypes(cls, tmp_path / "converted", torch.float32)
    assert found and not {tensor: dtype for tensor, dtype in found.items() if dtype != torch.float32}


@pytest.mark.parametrize("name", KEPT)
def test_in_float16_the_exceptions_of_the_class_hold(name, tmp_path):
    """T5 keeps DenseReluDense.wo in float32, a replaced one too."""
    cls = convert_half(name, tmp_path / "source", tmp_path / "converted")
    original = float_dtypes(cls, tmp_path / "source", torch.float16)
    for tensor, dtype in float_dtypes(cls, tmp_path / "converted", torch.float16).items():
        weight = f"{tensor.rpartition('.')[0]}.weight"  # of the replaced linear
        assert dtype == original.get(tensor, original.get(weight, torch.float16)), tensor
    assert (torch.float32 in original.values()) == (name == "t5")
