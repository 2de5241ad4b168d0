"""Teacher caches: contents, refusals, and resuming after a kill."""

from __future__ import annotations

import importlib.resources
import itertools
import json
import shutil
import traceback
from pathlib import Path

import pytest
import torch
from helpers import killing
from helpers.small import run_python
from safetensors.torch import load_file

from surgery.core.errors import SurgeryError
from surgery.training.data.dataset import DataConfig, make_data
from surgery.training.teacher_cache.write_read import TeacherCache, write_teacher_cache
from surgery.training.top_k import MIN_LOG_PROB, MIN_MASS, top_k_log_probs

EMBEDDED = Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint")))
LENGTH, COUNT, K = 48, 21, 8


@pytest.fixture(scope="module")
def teacher():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(EMBEDDED)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "lines.jsonl"
    whole = (EMBEDDED / "calibration.txt").read_text(encoding="utf-8")[:12000]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in whole.split(". ") if line))
    return path


def data_of(tokenizer, text, length=LENGTH, seed=0, **options):
    return make_data(DataConfig(sources=str(text), shuffle=16, **options), tokenizer, length, seed)


def write_cache(teacher, data, out, **options):
    options = {"top_k": K, "examples": COUNT, "per_shard": 8, "rows": 3, **options}
    return write_teacher_cache(teacher, data, out, **options)


@pytest.fixture(scope="module")
def cache(teacher, tokenizer, text, tmp_path_factory):
    """Not to be changed."""
    out = tmp_path_factory.mktemp("caches") / "cache"
    write_cache(teacher, data_of(tokenizer, text), out)
    return out


def files_of(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "lock"}


# -- what is stored --------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_targets_are_the_teacher_s(dtype, teacher, tokenizer, text, tmp_path):
    data = data_of(tokenizer, text)
    write_cache(teacher, data, tmp_path, dtype=dtype)
    opened = TeacherCache(tmp_path)
    opened.check(data)
    assert len(opened) == COUNT and (opened.top_k, opened.length) == (K, LENGTH)
    for i, example in enumerate(itertools.islice(data.examples(0), COUNT)):
        with torch.no_grad():
            inputs = {n: example[n][None] for n in ("input_ids", "position_ids")}
            wanted = teacher(**inputs, use_cache=False).logits[0].log_softmax(-1)
        tokens, log_probs, rest = opened.targets(i, example["input_ids"])
        assert tokens.dtype == torch.int32 and log_probs.dtype == dtype and rest.dtype == torch.float32
        assert tokens.shape == log_probs.shape == (LENGTH, K) and rest.shape == (LENGTH,)
        found = wanted.gather(-1, tokens.long())
        assert torch.allclose(log_probs.float(), found, rtol={torch.bfloat16: 8e-3}.get(dtype, 1e-3), atol=1e-3)
        assert torch.allclose(found, wanted.topk(K).values, atol=1e-4)
        assert torch.allclose(rest.exp() + found.exp().sum(-1), torch.ones(LENGTH), atol=1e-4)


def test_all_of_a_vocabulary_leaves_no_rest():
    tokens, log_probs, rest = top_k_log_probs(torch.randn(5, 7), 7, exact_rest=True)
    assert torch.equal(rest, torch.full((5,), MIN_LOG_PROB)) and torch.isfinite(log_probs).all()
    assert torch.equal(tokens.sort().values, torch.arange(7).expand(5, 7))


def test_the_rest_is_exact_where_it_is_small():
    """One minus the sum of the top probabilities rounds to zero there, which is replaced by its floor."""
    logits = torch.tensor([[40.0, 0.0, 0.0, 0.0]])
    assert torch.allclose(top_k_log_probs(logits, 1, exact_rest=True)[2], torch.log(torch.tensor(3.0)) - 40)
    assert torch.allclose(top_k_log_probs(logits, 1)[2], torch.tensor(MIN_MASS).log())


def test_the_files_are_as_documented(cache):
    """For tools that know nothing of this one."""
    index = json.loads((cache / "index.json").read_text())
    assert [shard["count"] for shard in index["shards"]] == [8, 8, 5]
    assert {p.name for p in cache.iterdir()} == {"index.json", *(s["file"] for s in index["shards"])}
    tensors = load_file(cache / index["shards"][0]["file"])
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    assert shapes == {
        "tokens": ((8, LENGTH, K), torch.int32),
        "log_probs": ((8, LENGTH, K), torch.float16),
        "rest": ((8, LENGTH), torch.float32),
        "input_ids": ((8, LENGTH), torch.int32),
    }


# -- interruptions ---------------------------------------------------------------------------------
def test_a_killed_writer_goes_on_to_the_same_bytes(teacher, tokenizer, text, tmp_path):
    def write(out, resume):
        import os

        target = out.with_name(out.name + ".partial") if out.name.startswith("out") else out
        try:
            write_cache(teacher, data_of(tokenizer, text), target, per_shard=2, resume=resume or target.exists())
        except BaseException:  # a child ends without a word
            traceback.print_exc()
            raise
        if target != out:
            os.replace(target, out)

    outs = killing.convert_with_kills(write, tmp_path, kills=6)
    wanted = files_of(outs[0])
    assert len(outs) > 1 and all(files_of(out) == wanted for out in outs[1:])


def test_more_examples_and_lost_shards(cache, teacher, tokenizer, text, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(cache, copy)
    (copy / "targets-00001.safetensors").unlink()
    blob = bytearray((copy / "targets-00000.safetensors").read_bytes())
    blob[-3] ^= 1
    (copy / "targets-00000.safetensors").write_bytes(blob)
    opened = TeacherCache(copy)
    with pytest.raises(SurgeryError, match=r"targets-00000\.safetensors is damaged"):
        opened.targets(3)
    with pytest.raises(SurgeryError, match=r"targets-00001\.safetensors is missing"):
        opened.targets(9)
    opened.targets(17)
    write_cache(teacher, data_of(tokenizer, text), copy, resume=True)
    assert files_of(copy) == files_of(cache)
    index = write_cache(teacher, data_of(tokenizer, text), copy, resume=True, examples=30)
    assert [shard["count"] for shard in index["shards"]] == [8, 8, 8, 6] and len(TeacherCache(copy)) == 30


def test_two_writers(cache, teacher, tokenizer, text):
    import fcntl

    with open(cache / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SurgeryError, match="another teacher cache is writing"):
            write_cache(teacher, data_of(tokenizer, text), cache, resume=True)


# -- what does not belong together -----------------------------------------------------------------
def test_other_data_is_refused(cache, tokenizer, text, tmp_path):
    opened = TeacherCache(cache)
    opened.check(data_of(tokenizer, text))
    for said, other in {
        "length": data_of(tokenizer, text, length=32),
        "seed": data_of(tokenizer, text, seed=5),
        "data": data_of(tokenizer, text, packing="none"),
    }.items():
        with pytest.raises(SurgeryError, match=f"another {said}"):
            opened.check(other)
    other_text = tmp_path / "lines.jsonl"
    other_text.write_text(text.read_text().replace("Tess", "Anna"))
    with pytest.raises(SurgeryError, match="another data"):
        opened.check(data_of(tokenizer, other_text))
    with pytest.raises(SurgeryError, match="has another text than the training example"):
        opened.targets(2, torch.zeros(LENGTH, dtype=torch.long))


def test_another_tokenizer_is_refused(cache, tokenizer, text):
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer("a text, padded", padding="max_length", max_length=20, truncation=True)  # which is no other tokenizer
    TeacherCache(cache).check(data_of(tokenizer, text))
    other.add_tokens(["Tess"])
    with pytest.raises(SurgeryError, match="another tokenizer"):
        TeacherCache(cache).check(data_of(other, text))


def test_rows_that_are_not_there(cache, tokenizer, text):
    opened = TeacherCache(cache)
    with pytest.raises(SurgeryError, match="holds 21 rows, but row 21 is needed"):
        opened.targets(COUNT)
    with pytest.raises(SurgeryError, match=r"data\.rows is 40"):
        opened.check(data_of(tokenizer, text, rows=40))
    again = data_of(tokenizer, text, rows=20)
    opened.check(again)
    examples = list(itertools.islice(again.examples(0), 45))
    for i, example in enumerate(examples):
        assert torch.equal(example["input_ids"], examples[i % 20]["input_ids"])
        opened.targets(i, example["input_ids"])


def test_3_2_a_cache_is_finished_by_the_teacher_that_began_it(teacher, tokenizer, text, tmp_path):
    """A teacher's path says nothing of its weights."""
    data, out = data_of(tokenizer, text), tmp_path / "cache"
    assert write_cache(teacher, data, out, examples=8, weights="a" * 64)["teacher_digest"] == "a" * 64
    with pytest.raises(SurgeryError, match="begun with another teacher_digest"):
        write_cache(teacher, data, out, resume=True, weights="b" * 64)
    assert write_cache(teacher, data, out, examples=16, resume=True, weights="a" * 64)["examples"] == 16


def test_people_s_mistakes(cache, teacher, tokenizer, text, tmp_path):
    data = data_of(tokenizer, text)
    with pytest.raises(SurgeryError, match="finish it with --resume"):
        write_cache(teacher, data, cache)
    with pytest.raises(SurgeryError, match="begun with another top_k"):
        write_cache(teacher, data, cache, resume=True, top_k=4)
    with pytest.raises(SurgeryError, match="of a vocabulary of 1,536"):
        write_cache(teacher, data, tmp_path / "a", top_k=5000)
    with pytest.raises(SurgeryError, match="is not a teacher cache"):
        TeacherCache(tmp_path / "nothing")
    with pytest.raises(SurgeryError, match="the data ends after"):
        write_cache(teacher, data_of(tokenizer, text, epochs=1), tmp_path / "b", examples=5000)
    (tmp_path / "c").mkdir()
    for index in ("{", "[]", '{"format": "other"}'):
        (tmp_path / "c" / "index.json").write_text(index)
        with pytest.raises(SurgeryError, match="not the index"):
            TeacherCache(tmp_path / "c")
    index = json.loads((cache / "index.json").read_text())
    index["shards"][0]["file"] = "../secret.safetensors"
    (tmp_path / "c" / "index.json").write_text(json.dumps(index))
    with pytest.raises(SurgeryError, match="files beside the index"):
        TeacherCache(tmp_path / "c")
    teacher.config._attn_implementation_internal, before = "flash_attention_2", teacher.config._attn_implementation
    try:
        with pytest.raises(SurgeryError, match="batches of one row only"):
            write_cache(teacher, data, tmp_path / "d")
    finally:
        teacher.config._attn_implementation_internal = before


def test_the_command_and_a_run_without_a_teacher(text, teacher, tmp_path, capsys):
    """`surgery teacher-cache` writes what `surgery finetune` asks for; other text is refused before a step."""
    from surgery.cli.main import main

    def run_command(*words, code=0):
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        assert (left.value.code or 0) == code
        printed = capsys.readouterr()
        return printed.out + printed.err

    recipe = tmp_path / "heal.yaml"
    recipe.write_text(
        "data: {packing: documents, validation: 0.05, validation_examples: 2}\nprecision: float32\n"
        "stages: [{kind: distill, length: 32, batch: 2, rows: 2, tokens: 256, rate: 1e-4, trains: [all]}]\n"
    )
    common = ("--recipe", recipe, "--data", text)
    assert "8 sequences of 32 tokens" in run_command(
        "teacher-cache", EMBEDDED, *common, "--out", tmp_path / "c", "--top-k", 4
    )
    assert "finish it with --resume" in run_command("teacher-cache", EMBEDDED, *common, "--out", tmp_path / "c", code=2)
    use = ("--set", f"teacher.cache={tmp_path / 'c'}", "--track", "none")
    assert "distill: 4 steps" in run_command("finetune", EMBEDDED, *common, *use, "--out", tmp_path / "healed")
    other = (*use, "--set", "seed=3", "--out", tmp_path / "other")
    assert "written with another seed" in run_command("finetune", EMBEDDED, *common, *other, code=2)
    align = tmp_path / "lm.yaml"
    align.write_text("stages: [{kind: lm, length: 32, tokens: 256, rate: 1e-4}]\n")
    words = ("teacher-cache", EMBEDDED, "--recipe", align, "--data", text, "--out", tmp_path / "d")
    assert "no stage that trains on the teacher's logits" in run_command(*words, code=2)


def test_importing_it_is_light():
    said = run_python("import sys, surgery.training.teacher_cache.write_read; print('datasets' in sys.modules)")
    assert said.stdout.strip() == "False"
