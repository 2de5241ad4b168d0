"""A GGUF file is a source: it is expanded once, its values are kept, and damaged files are refused before they are
expanded.
"""

from __future__ import annotations

import io
import shutil
import struct
import threading
import time
import tracemalloc
from contextlib import redirect_stderr
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.gguf_files import DIM, HEADS, VOCAB, write_gguf
from helpers.small import run_python
from safetensors.torch import load_file

import surgery
from surgery.checkpoint import gguf as gguf_files
from surgery.checkpoint.load_model import load_model
from surgery.checkpoint.source import open_checkpoint, open_converted_checkpoint
from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress
from surgery.training.models import load_source_tokenizer, load_teacher, open_trainable

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")


class Said(Progress):
    """Keeps the lines."""

    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder that holds expanded files in this test."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "surgery" / "gguf"


@pytest.fixture
def file(tmp_path, cache):
    path = tmp_path / "tiny.gguf"
    write_gguf(gguf, path)
    return path


def open_quietly(path, **options):
    return open_checkpoint(str(path), progress=Progress(), **options)


# -- expansion -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind, dtype", [("Q8_0", "BF16"), ("Q4_1", "BF16"), ("BF16", "BF16"), ("F16", "F16"), ("F32", "F32")]
)
def test_the_weights_are_the_values_of_the_file(kind, dtype, tmp_path, cache):
    written, said = write_gguf(gguf, tmp_path / "tiny.gguf", kind), Said()
    source = open_checkpoint(str(tmp_path / "tiny.gguf"), progress=said)
    assert source.name == str(tmp_path / "tiny.gguf") and source.folder.is_relative_to(cache)
    assert {info.dtype for info in source.tensors.values()} == {dtype} and source.config["model_type"] == "llama"
    stored = load_file(source.folder / "model.safetensors")
    for name, path in (("ffn_down", "mlp.down_proj"), ("attn_v", "self_attn.v_proj")):
        tensor = stored[f"model.layers.0.{path}.weight"]
        assert torch.equal(tensor, torch.tensor(written[f"blk.0.{name}"]).to(tensor.dtype))
    (line,) = said.lines
    assert str(source.folder) in line and (f"quantized values ({kind})" if kind[0] == "Q" else "float") in line
    assert "stranger" not in line + (source.folder / "config.json").read_text()
    tokenizer = load_source_tokenizer(source)
    assert tokenizer("ab").input_ids == [257] and tokenizer.eos_token == "<|end|>"


def test_a_file_is_expanded_once(file, cache, monkeypatch):
    first = open_quietly(file)
    monkeypatch.setattr(gguf_files, "_write", None)
    plain = open_quietly(shutil.copy(file, file.with_name("other name.gguf")), weights=False)
    assert plain.folder == first.folder and plain.fingerprint() == first.fingerprint()
    assert open_converted_checkpoint(str(file)).tensors.keys() == first.tensors.keys()


def test_a_line_on_stderr_names_the_folder_once_per_process(file, cache):
    printed = io.StringIO()
    with redirect_stderr(printed):
        for _ in range(2):
            folder = open_checkpoint(str(file)).folder
    assert printed.getvalue().count("note:") == 1 and folder.parent.name in printed.getvalue().replace("\n", "")


def test_a_changed_file_of_the_cache_is_written_again(file):
    folder = open_quietly(file).folder
    before = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(before[:-1] + b"\1")
    (folder / "added.json").write_text("{}")
    assert (open_quietly(file).folder / "model.safetensors").read_bytes() == before
    assert not (folder / "added.json").exists()


def test_a_failed_or_killed_expansion_leaves_nothing_that_is_used(file, cache, monkeypatch):
    def fail(header, link, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(gguf_files, "_save_model", fail)
        with pytest.raises(KeyboardInterrupt):
            open_quietly(file)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    (lock,) = cache.iterdir()
    killed = cache / f"{lock.stem}.partial-x"  # as SIGKILL leaves it
    (killed / "checkpoint").mkdir(parents=True)
    assert open_quietly(file).tensors and not killed.exists()


def test_of_several_that_open_one_file_one_expands_it(file, cache, monkeypatch):
    written, write = [], gguf_files._write
    monkeypatch.setattr(gguf_files, "_write", lambda *given: (written.append(given), write(*given)))
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(open_quietly(file).folder)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1 and len(folders) == 3 and len(set(folders)) == 1


def test_the_tokenizer_beside_the_file_comes_first(file, tmp_path):
    own = open_quietly(file).folder
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(own / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "adapter_config.json").write_text("{}")  # of something else in the same folder
    (tmp_path / "config.json").write_text("{")
    said = Said()
    folder = open_checkpoint(str(file), progress=said).folder
    assert (
        folder != own and (folder / "chat_template.jinja").is_file() and not (folder / "adapter_config.json").exists()
    )
    assert said.lines[0].endswith("Tokenizer: of the files beside it")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to("/etc/passwd")
    with pytest.raises(SurgeryError, match=r"tokenizer\.json is a link to .*outside"):
        open_quietly(file)


def test_the_frequencies_of_llama_3_are_restored(tmp_path, cache):
    """llama.cpp stores divisors: 1 for short waves, the factor for long ones, between them interpolated."""
    wave = 2 * np.pi * 1e4 ** (np.arange(DIM // HEADS // 2) / (DIM // HEADS // 2))
    smooth = (8192 / wave - 1) / (4 - 1)
    divisors = np.where(wave < 8192 / 4, 1, np.where(wave > 8192, 8, 1 / ((1 - smooth) / 8 + smooth)))
    assert len({*divisors.round(3)}) == 3
    write_gguf(gguf, tmp_path / "scaled.gguf", rope_divisors=divisors)
    source = open_quietly(tmp_path / "scaled.gguf")
    assert source.config["rope_parameters"]["rope_type"] == "llama3" and source.config["rope_parameters"]["factor"] == 8
    found = load_model(source, "auto").model.rotary_emb.inv_freq
    assert np.allclose(found, 2 * np.pi / wave / divisors, rtol=1e-5)
    write_gguf(gguf, tmp_path / "other.gguf", rope_divisors=divisors + 0.5)
    with pytest.raises(SurgeryError, match=r"scales its rotary frequencies \(tensor rope_freqs.weight\)"):
        open_quietly(tmp_path / "other.gguf")


# -- use -------------------------------------------------------------------------------------------
def test_commands_take_a_gguf_file(file, tmp_path):
    """plan, convert, apply, evaluate, load and training with a teacher give what they give for the expanded folder."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} is {i * i % 97}, and then\n" for i in range(200)))
    keys = {"calibration": str(text), "tokens": 512, "length": 32, "allocate": "uniform", "tune": False}
    folder = open_quietly(file).folder
    reports = {}
    for name, source in (("file", str(file)), ("folder", str(folder))):
        assert surgery.plan(source, "low-rank-half")["totals"]["modules"] == 7
        reports[name] = surgery.convert(source, "low-rank-half", tmp_path / name, progress=Progress(), **keys)
    assert reports["file"]["source"]["name"] == str(file)
    assert reports["file"]["source"]["fingerprint"] == reports["folder"]["source"]["fingerprint"]
    stored = [load_file(next((tmp_path / name).glob("*.safetensors"))) for name in reports]
    assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])

    options = dict(suites=["ppl"], text=str(text), tokens=512, length=32, device="cpu")  # noqa: C408
    both = surgery.evaluate(str(tmp_path / "file"), compare=str(file), **options)
    same = surgery.evaluate(str(tmp_path / "folder"), compare=str(folder), **options)
    assert [row["values"] for row in both["rows"]] == [row["values"] for row in same["rows"]]
    model, tokenizer = surgery.load(str(file))
    assert model.dtype == torch.bfloat16 and len(tokenizer) == VOCAB
    student = open_trainable(str(tmp_path / "file"))
    settings = SimpleNamespace(device=None, dtype="float32")
    teacher = load_teacher(str(file), model, load_source_tokenizer(student), settings, torch.device("cpu"))
    assert teacher.dtype == torch.float32 and not any(p.requires_grad for p in teacher.parameters())


# -- refusals --------------------------------------------------------------------------------------
def test_a_folder_with_a_gguf_file_names_it(file, tmp_path):
    for extra in ({}, {"config.json": '{"model_type": "llama"}'}):
        for name, content in extra.items():
            (tmp_path / name).write_text(content)
        with pytest.raises(SurgeryError, match=r"it holds a GGUF file: give the file itself, .*tiny\.gguf"):
            open_checkpoint(str(tmp_path))


def header(tensors=1, entries=1, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensors, entries)


def text(value):
    return struct.pack("<Q", len(value)) + value


def entry(key, value):
    return text(key) + (
        struct.pack("<I", 8) + text(value) if isinstance(value, bytes) else struct.pack("<II", 4, value)
    )


LLAMA = entry(b"general.architecture", b"llama")
BLOCKS = entry(b"llama.block_count", 1)


def tensor(name=b"w", shape=(32,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "is not a GGUF file: it begins with b''"),
        (b"PK\3\4" + bytes(60), "is not a GGUF file: it begins with"),
        (b"GGUF\3\0", "ends within its header"),
        (header(version=1) + bytes(99), "has GGUF version 1; surgery reads versions 2 and 3"),
        (header(version=3 << 24) + bytes(99), "big-endian order"),
        (header(tensors=2**60) + bytes(99), "names 1,152,921,504,606,846,976 tensors in 123 bytes"),
        (header(entries=2**63) + bytes(99), "metadata entries in 123 bytes"),
        (header(tensors=100) + bytes(99), "names 100 tensors in 123 bytes"),
        (header() + struct.pack("<Q", 2**62) + bytes(99), "ends within its header"),
        (header() + text(b"k" * 2000) + bytes(99), "a name in the header has over 1024 bytes"),
        (header() + text(b"\xff") + bytes(99), "a name in the header is not UTF-8"),
        (header() + text(b"k") + struct.pack("<I", 77) + bytes(99), "value of type 77"),
        (header() + text(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(99), "value of type array of 9"),
        (header() + text(b"k") + struct.pack("<IIQ", 9, 4, 2**40) + bytes(99), "a list of 1,099,511,627,776 items"),
        (header(entries=2) + LLAMA + LLAMA + bytes(99), "has 'general.architecture' twice"),
        (header(entries=0) + tensor(shape=(1,) * 9) + bytes(999), "a tensor has 9 dimensions"),
        (header() + LLAMA + tensor(kind=999) + bytes(999), "ggml type 999"),
        (header() + LLAMA + tensor(shape=(0, 4)) + bytes(999), "impossible shape"),
        (header() + LLAMA + tensor(shape=(2**60, 2**60)) + bytes(999), "impossible shape"),
        (header() + LLAMA + tensor(shape=(33,), kind=8) + bytes(999), "impossible shape"),
        (header() + LLAMA + tensor(shape=(2**20,)) + bytes(999), "beyond the file's .* the file is truncated"),
        (header() + LLAMA + tensor(offset=2**63) + bytes(999), "beyond the file's"),
        (header(2) + LLAMA + 2 * tensor() + bytes(999), "has tensor 'w' twice"),
        (header(9) + LLAMA + b"".join(tensor(b"%d" % i, (200,)) for i in range(9)) + bytes(999), "its tensors overlap"),
        (header(entries=0) + tensor() + bytes(999), "names no general.architecture"),
        (header() + LLAMA + tensor() + bytes(999), "llama.block_count is None"),
        (header(entries=2) + LLAMA + entry(b"llama.block_count", 2**31) + tensor() + bytes(999), "block_count is 2147483648"),
        (header(entries=3) + LLAMA + BLOCKS + entry(b"split.count", 3) + tensor() + bytes(999), "is one of 3 shards"),
        (header(entries=3) + LLAMA + BLOCKS + entry(b"llama.rope.scaling.type", b"yarn") + tensor() + bytes(999), "type 'yarn'"),
        (header(entries=2) + entry(b"general.architecture", b"nonesuch") + entry(b"nonesuch.block_count", 1) + tensor() + bytes(999),
         "transformers cannot load the model of architecture nonesuch"),
        (header(entries=2) + LLAMA + BLOCKS + tensor() + bytes(999), "transformers cannot load the model|describe a model"),
    ],
)  # fmt: skip
def test_hostile_and_truncated_files_are_refused(content, says, tmp_path, cache):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    began = time.monotonic()
    with pytest.raises(SurgeryError, match=says) as refused:
        open_quietly(path)
    assert str(path) in str(refused.value) and time.monotonic() - began < 20
    assert not cache.exists() or all(left.suffix == ".lock" for left in cache.iterdir())


@pytest.mark.parametrize("share", [0.01, 0.2, 0.9, 0.999])
def test_a_file_cut_anywhere_is_refused(share, file):
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(SurgeryError, match="truncated"):
        open_quietly(file)


@pytest.mark.parametrize(
    "keys, says",
    [
        ({"vocab_size": 2**25}, "describe a model of .* parameters, and its tensors hold"),
        ({"skip": ("blk.0.ffn_up",)}, "describe a model of .* parameters, and its tensors hold"),
        ({"layers": 2, "skip": ("blk.1.ffn_up",)}, "describe a model of"),
    ],
)
def test_a_model_larger_than_its_tensors_is_refused_before_it_is_allocated(keys, says, tmp_path, cache):
    write_gguf(gguf, tmp_path / "model.gguf", **keys)
    tracemalloc.start()
    try:
        with pytest.raises(SurgeryError, match=says):
            open_quietly(tmp_path / "model.gguf")
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()


def test_a_shard_is_refused_by_its_name(tmp_path):
    (tmp_path / "model-00001-of-00003.gguf").write_bytes(header() + bytes(99))
    with pytest.raises(SurgeryError, match=r"is one of several shards.*llama-gguf-split --merge"):
        open_quietly(tmp_path / "model-00001-of-00003.gguf")


def test_without_the_package_the_error_says_how_to_install_it(file, monkeypatch):
    import sys

    for name in ("gguf", "gguf.constants"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SurgeryError, match=r"the package gguf, .* is not installed\. Run pip install .*\[gguf\]"):
        open_quietly(file)


def test_a_full_disk_is_refused_before_it_is_written(file, cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000, total=2000))
    with pytest.raises(SurgeryError, match=r"needs .* as bfloat16 in .*, whose disk has 1\.0 kB free.*HF_HOME"):
        open_quietly(file)


# -- a real file -----------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_real_file_is_its_expanded_checkpoint(shared, tmp_path, cache):
    """The program beside the file writes the same weights, with the tokenizer's own files."""
    real = shared / "models" / "smollm2-135m"
    if not real.is_dir():
        pytest.skip(f"{real} is not here")
    file, words = next(real.glob("*.gguf")), "The cat sat on the mat, and the dog lay at the door.\n" * 200
    expanded = run_python((real / "expand.py").read_text().replace("__file__", repr(str(real / "expand.py"))).replace("sys.argv[1]", repr(str(tmp_path / "expanded"))))  # fmt: skip
    assert expanded.returncode == 0, expanded.stderr
    (tmp_path / "text.txt").write_text(words)
    options = dict(suites=["ppl"], text=str(tmp_path / "text.txt"), tokens=256, length=64, device="cpu")  # noqa: C408
    found, expected = (surgery.evaluate(str(source), **options)["rows"] for source in (file, tmp_path / "expanded"))
    assert [row["values"] for row in found] == [row["values"] for row in expected]
    report = surgery.convert(
        str(file), "low-rank-half", tmp_path / "out", calibration=str(tmp_path / "text.txt"), tokens=256, length=64,
        allocate="uniform", curvature="none", tune=False, progress=Progress(),
    )  # fmt: skip
    assert len(report["modules"]) == 210 and report["source"]["name"] == str(file)
