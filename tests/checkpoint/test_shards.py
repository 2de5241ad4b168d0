"""Damaged safetensors files (false headers, truncated data, NaN values) are refused with the reason."""

from __future__ import annotations

import contextlib
import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from surgery.checkpoint.safetensors_io import TensorSource, read_header, read_rows, read_tensor, write_shard
from surgery.checkpoint.source import open_checkpoint
from surgery.core.errors import SurgeryError

ANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def write_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_reads_what_safetensors_writes_and_writes_what_it_reads(tmp_path):
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(7).bfloat16(),
        "c": torch.arange(5),
        "d": torch.randn(2, 2, 2).half(),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "theirs.safetensors")
    header = read_header(tmp_path / "theirs.safetensors")
    assert all(torch.equal(read_tensor(header[k]), v) for k, v in tensors.items())
    write_shard(tmp_path / "ours.safetensors", [TensorSource.from_tensor(k, v) for k, v in tensors.items()])
    assert all(torch.equal(load_file(tmp_path / "ours.safetensors")[k], v) for k, v in tensors.items())
    write_shard(tmp_path / "copy.safetensors", [TensorSource.from_file(k, header[k]) for k in reversed(list(tensors))])
    assert (tmp_path / "copy.safetensors").read_bytes() == (tmp_path / "ours.safetensors").read_bytes()


def test_rows_are_read_without_the_rest(tmp_path):
    table = torch.randn(50, 3)
    save_file({"t": table}, tmp_path / "t.safetensors")
    rows = torch.tensor([0, 1, 2, 7, 8, 49])
    assert torch.equal(read_rows(read_header(tmp_path / "t.safetensors")["t"], rows), table[rows])


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header, data, says",
    [
        ({"w": ENTRY}, b"1234", "ends at byte"),
        ({"w": {**ENTRY, "shape": [3]}}, b"12345678", "cannot have 8 bytes"),
        ({"w": {**ENTRY, "data_offsets": [8, 0]}}, b"12345678", "is invalid; download"),
        ({"w": {**ENTRY, "data_offsets": [-8, 0]}}, b"12345678", "is invalid; download"),
        ({"w": {**ENTRY, "shape": [1.5]}}, b"12345678", "is invalid; download"),
        ({"w": {**ENTRY, "shape": [True, 2]}}, b"12345678", "is invalid; download"),
        ({"w": {"dtype": "F32"}}, b"", "is invalid; download"),
        ({"w": ENTRY, "v": ENTRY}, b"12345678", "share bytes"),
        ([1, 2], b"", "not a JSON object"),
        (b"{nonsense", b"", "not JSON"),
        (b"[" * 100_000, b"", "not JSON"),
    ],
)
def test_a_header_that_lies(tmp_path, header, data, says):
    with pytest.raises(SurgeryError, match=says):
        read_header(write_file(tmp_path / "x.safetensors", header, data))


def test_a_header_longer_than_the_file(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
    with pytest.raises(SurgeryError, match="its header claims"):
        read_header(tmp_path / "x.safetensors")


@ANY
@given(data=st.binary(max_size=200))
def test_random_bytes_never_crash(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    path.write_bytes(data)
    with contextlib.suppress(SurgeryError):
        read_header(path)


@ANY
@given(
    header=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats(allow_nan=False),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["dtype", "shape", "data_offsets", "w", "__metadata__"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_random_headers_never_crash(tmp_path_factory, header):
    path = write_file(tmp_path_factory.mktemp("fuzz") / "x.safetensors", header, b"0" * 64)
    try:
        for info in read_header(path).values():
            read_tensor(info, check=False)
    except SurgeryError:
        pass


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_is_named(tmp_path, bad, dtype):
    tensor = torch.randn(5, 5).to(dtype)
    tensor[3, 2] = bad
    save_file({"model.w": tensor}, tmp_path / "x.safetensors")
    info = read_header(tmp_path / "x.safetensors")["model.w"]
    with pytest.raises(SurgeryError, match=r"'model.w' in x.safetensors holds 1 NaN or Inf of 25"):
        read_tensor(info)
    with pytest.raises(SurgeryError, match="NaN or Inf"):
        write_shard(tmp_path / "y.safetensors", [TensorSource.from_file("model.w", info)])
    assert not (tmp_path / "y.safetensors").exists()


def test_large_numbers_are_not_taken_for_inf(tmp_path):
    save_file({"w": torch.full((64,), 3e38)}, tmp_path / "x.safetensors")
    assert float(read_tensor(read_header(tmp_path / "x.safetensors")["w"])[0]) == pytest.approx(3e38)


# -- sources ---------------------------------------------------------------------------------------
def source_with(tmp_path, config=None, files=None):
    folder = tmp_path / "source"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, content in (files or {}).items():
        (folder / name).write_bytes(content)
    return str(folder)


LLAMA = {"model_type": "llama"}


@pytest.mark.parametrize(
    "config, files, says",
    [
        (None, {}, "has no config.json; give the folder"),
        (None, {"adapter_config.json": b'{"base_model_name_or_path": "org/base"}'}, "adapter of org/base: merge it"),
        (None, {"adapter_config.json": b"[]"}, "adapter of None: merge it"),
        (
            LLAMA,
            {"model-q4.gguf": b"GGUF"},
            "neither model.safetensors .* a GGUF file: give the file itself, .*model-q4.gguf",
        ),
        ("{", {}, "is not JSON"),
        ({"a": 1}, {}, "names no model_type"),
        (LLAMA, {}, "has neither model.safetensors nor"),
        (LLAMA, {"pytorch_model.bin": b"x"}, "only pickled weights"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, {}, r"is quantized \(gptq\).*Give the checkpoint"),
        ({**LLAMA, "quantization_config": {"quant_method": "bitsandbytes"}}, {}, r"or dequantize it: .*dequantize\(\)"),
        ({**LLAMA, "quantization_config": {"quant_method": "surgery"}}, {}, "already converted.*surgery densify"),
        (
            {**LLAMA, "quantization_config": {"quant_method": "surgery"}, "auto_map": {"AutoModel": "surgery_shim.X"}},
            {},
            "already converted",
        ),
        ({**LLAMA, "auto_map": {"AutoModel": "x.Y"}}, {}, "then pass --trust-remote-code"),
        (LLAMA, {"model.safetensors.index.json": b"[]"}, "not a shard index"),
        (
            LLAMA,
            {"model.safetensors.index.json": b'{"weight_map": {"w": "a.safetensors"}}'},
            "lacks shard a.safetensors",
        ),
        (LLAMA, {"model.safetensors.index.json": b'{"weight_map": {"w": "../a.safetensors"}}'}, "beside the index"),
        (LLAMA, {"model.safetensors.index.json": b'{"weight_map": {"w": "a.bin"}}'}, "beside the index"),
        (LLAMA, {"model.safetensors.index.json": b'{"weight_map": {"w": 3}}'}, "beside the index"),
    ],
)
def test_sources_that_are_refused(tmp_path, config, files, says):
    with pytest.raises(SurgeryError, match=says):
        open_checkpoint(source_with(tmp_path, config, files))


def test_a_name_that_is_nowhere():
    with pytest.raises(SurgeryError, match="neither a local folder nor a Hub id"):
        open_checkpoint("no/such-checkpoint-here")
