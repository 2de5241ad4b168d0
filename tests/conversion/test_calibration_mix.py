"""Several calibration texts in one conversion, and conversations."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from cli.test_tiny import FOLDER as TINY
from helpers.small import make_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

import surgery
from surgery.calibration.data import document_stream, interleave
from surgery.cli.main import main
from surgery.conversion.sources import FolderSource
from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress

TALK = [{"role": "user", "content": "Where is Mia?"}, {"role": "assistant", "content": "In the garden."}]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
QUICK = {"structure": "low_rank", "keep": 0.5, "sweeps": 0, "allocate": "uniform", "curvature": "none"}


@pytest.fixture
def texts(tmp_path):
    """Paths of two long texts of different words."""
    paths = []
    for name, sentence in (("a", "Mia saw a red ball. "), ("b", "The old dog slept in the sun. ")):
        paths.append(tmp_path / f"{name}.txt")
        paths[-1].write_text(sentence * 2000)
    return paths


@pytest.fixture
def chat_model(tmp_path):
    """The embedded checkpoint with a chat template."""
    folder = tmp_path / "chat"
    shutil.copytree(TINY, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return folder


def read(source, **keys):
    opened = FolderSource(str(source))
    opened.open(Progress())
    return opened.calibration(make_recipe(**QUICK, **keys))


def rows_of(inputs, path):
    """Return which rows of mixed inputs are of one text."""
    own = read(TINY, calibration=path, tokens=4096, length=64).tensors["input_ids"]
    known = {tuple(row) for row in own.tolist()}
    return [tuple(row) in known for row in inputs.tensors["input_ids"].tolist()]


# -- several texts -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weights", [(1, 1), (3, 1)])
def test_every_part_of_the_windows_has_each_texts_share(weights, texts):
    sources = [{"path": str(path), "weight": weight} for path, weight in zip(texts, weights)]
    inputs = read(TINY, calibration=sources, tokens=2048, length=64)
    first = rows_of(inputs, texts[0])
    assert len(first) == 32 and first == [not other for other in rows_of(inputs, texts[1])]
    share = weights[0] / sum(weights)
    for start in range(0, 32, 8):
        assert sum(first[start : start + 8]) == 8 * share
    assert all(str(path) in inputs.label for path in texts) and ("weight" in inputs.label) == (weights != (1, 1))


def test_a_short_text_is_spread_over_all_windows():
    mixed = interleave([{"input_ids": torch.arange(6)[:, None]}, {"input_ids": torch.arange(10, 12)[:, None]}])
    assert mixed["input_ids"].flatten().tolist() == [0, 1, 10, 2, 3, 4, 11, 5]


@pytest.mark.slow
def test_the_command_takes_several_texts(texts, tmp_path):
    named = [word for path in texts for word in ("--calibration", str(path))]
    words = [f"--set={key}={value}" for key, value in QUICK.items()]
    convert = ["convert", str(TINY), "--recipe", "low-rank-half", *words, "--set=tune=false", "--tokens=512"]
    for name, given in (("both", named), ("one", named[:2])):
        with pytest.raises(SystemExit) as done:
            main([*convert, "--length=64", *given, "--out", str(tmp_path / name)])
        assert not done.value.code
    both, one = (
        json.loads((tmp_path / name / "surgery_report.json").read_text())["recipe"] for name in ("both", "one")
    )
    assert both["calibration"] == [{"path": str(path), "weight": 1.0} for path in texts]
    assert one["calibration"] == str(texts[0])


@pytest.mark.slow
def test_a_model_in_memory_is_calibrated_on_the_same_windows(texts, tmp_path):
    recipe = {**QUICK, "calibration": [str(path) for path in texts], "tokens": 512, "length": 64}
    surgery.convert(str(TINY), recipe, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype="auto")
    applied = surgery.apply(model, recipe, tokenizer=AutoTokenizer.from_pretrained(TINY))
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    found = applied.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_what_is_refused(texts, calibration):
    with pytest.raises(SurgeryError, match="calibration: name at least one text"):
        make_recipe(**QUICK, calibration=[])
    ready = str(calibration("llama"))
    with pytest.raises(SurgeryError, match=r"of several texts each must be a text \(got .*safetensors\)"):
        read(TINY, calibration=[str(texts[0]), ready], tokens=512, length=64)
    with pytest.raises(SurgeryError, match="rows of one length"):
        interleave([{"input_ids": torch.zeros(2, n)} for n in (3, 4)])


# -- conversations -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_the_chat_template_renders_conversations(column, chat_model, tmp_path):
    talk = TALK if column == "messages" else [{"from": "human", "value": "Where is Mia?"}]
    rows = [{"id": "x", column: talk}, {"id": "y", column: []}, {"id": "z", column: talk}]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    found = list(document_stream(str(tmp_path / "chat.jsonl"), None, tokenizer))
    assert len(found) == 2 and found[0].startswith("<user>Where is Mia?\n") and found[0] == found[1]
    assert ("<assistant>In the garden.\n" in found[0]) == (column == "messages")


def test_a_text_column_comes_before_conversations(chat_model, tmp_path):
    (tmp_path / "both.jsonl").write_text(json.dumps({"text": "Plain.", "messages": TALK}))
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    assert list(document_stream(str(tmp_path / "both.jsonl"), None, tokenizer)) == ["Plain."]


def test_conversations_need_a_template(tmp_path):
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": TALK}))
    with pytest.raises(SurgeryError, match=r"chat\.jsonl holds conversations, but the tokenizer has no chat template"):
        read(TINY, calibration=str(tmp_path / "chat.jsonl"), tokens=128, length=16)


def test_a_conversion_reads_conversations(chat_model, tmp_path):
    (tmp_path / "chat.jsonl").write_text("\n".join([json.dumps({"messages": TALK})] * 60))
    inputs = read(chat_model, calibration=str(tmp_path / "chat.jsonl"), tokens=256, length=32)
    text = AutoTokenizer.from_pretrained(chat_model).decode(inputs.tensors["input_ids"].flatten().tolist())
    assert text.count("Where is Mia?") > 5 and text.count("In the garden.") > 5 and "user>" in text
