"""`--dtype`: the conversion of a checkpoint as if it had been stored in another dtype."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers.small import make_recipe
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from surgery.checkpoint.rounded import round_checkpoint
from surgery.checkpoint.safetensors_io import DTYPES, TensorSource, read_tensor, write_shard
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError

RECIPE = make_recipe(structure="low_rank")


def stored_in(folder, dtype, to):
    """Copy a checkpoint whose tensors are in `dtype`."""
    shutil.copytree(folder, to)
    tensors = {name: x.to(dtype) for name, x in load_file(folder / "model.safetensors").items()}
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}))
    return str(to)


@pytest.mark.parametrize(("family", "calibrated"), [("llama", True), ("gpt2", False)])
def test_the_result_is_that_of_a_checkpoint_stored_so(checkpoints, calibration, tmp_path, family, calibrated):
    text = str(calibration(family)) if calibrated else None
    recipe = make_recipe(structure="low_rank", calibration=text, allocate="uniform", sweeps=1)
    rounded = stored_in(checkpoints(family), torch.bfloat16, tmp_path / "source")
    first, second = tmp_path / "first", tmp_path / "second"
    report = convert(str(checkpoints(family)), recipe, first, dtype="bfloat16")
    convert(rounded, recipe, second)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert json.loads((first / "config.json").read_text())["dtype"] == "bfloat16"
    assert report["totals"]["bytes_after"] < report["totals"]["bytes_before"] / 2
    assert AutoModelForCausalLM.from_pretrained(first, dtype="auto").dtype == torch.bfloat16


def test_tensors_in_another_dtype_than_the_rest_stay(checkpoints, tmp_path):
    shutil.copytree(checkpoints("llama"), tmp_path / "mixed")
    tensors = {n: x if "norm" in n else x.half() for n, x in load_file(tmp_path / "mixed/model.safetensors").items()}
    save_file(tensors, tmp_path / "mixed" / "model.safetensors", metadata={"format": "pt"})
    convert(str(tmp_path / "mixed"), RECIPE, tmp_path / "out", dtype="bfloat16")
    found = {n: x.dtype for n, x in load_file(tmp_path / "out" / "model.safetensors").items()}
    assert {torch.float32} == {dtype for name, dtype in found.items() if "norm" in name}
    assert {torch.bfloat16} == {dtype for name, dtype in found.items() if "norm" not in name}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_way_of_reading_rounds(checkpoints, tmp_path, dtype):
    source = open_checkpoint(str(checkpoints("gpt2")))
    rounded = round_checkpoint(source, dtype)
    kind = getattr(torch, dtype)
    write_shard(tmp_path / "x.safetensors", [TensorSource.from_file(n, info) for n, info in rounded.tensors.items()])
    written = load_file(tmp_path / "x.safetensors")
    for name, info in source.tensors.items():
        expected, other = read_tensor(info).to(kind), rounded.tensors[name]
        assert DTYPES[other.dtype] == kind and other.nbytes_read == expected.numel() * expected.element_size()
        assert torch.equal(read_tensor(other), expected) and torch.equal(written[name], expected)
        assert torch.equal(read_tensor(other.rows(1, 3)), expected[1:3])
        if expected.dim() == 2:
            assert torch.equal(read_tensor(other.outputs(slice(0, 6, 2))), expected[:, 0:6:2].mT)
    assert rounded.config["dtype"] == dtype and (rounded.tensors == source.tensors) == (dtype == "float32")


def test_what_a_dtype_cannot_hold_is_refused(checkpoints, tmp_path):
    with pytest.raises(SurgeryError, match=r"--dtype bf16 is no dtype in which a result can be stored"):
        convert(str(checkpoints("llama")), RECIPE, tmp_path / "out", dtype="bf16")
    shutil.copytree(checkpoints("llama"), tmp_path / "large")
    tensors = load_file(tmp_path / "large" / "model.safetensors")
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, tmp_path / "large" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SurgeryError, match=r"'model.norm.weight' holds values over 65,504, the largest of F16"):
        convert(str(tmp_path / "large"), RECIPE, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
