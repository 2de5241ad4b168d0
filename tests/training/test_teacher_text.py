"""`--data generated`: text that the teacher writes itself, and training on it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers.small_training import LM, TINY_CHECKPOINT
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from surgery.core.errors import SurgeryError
from surgery.training.data import write_text
from surgery.training.data.dataset import DataConfig, make_data
from surgery.training.data.recipe import GeneratedText
from surgery.training.data.teacher_text import TokenTable, read_index
from surgery.training.data.write_text import write_teacher_text
from surgery.training.finetune import finetune
from surgery.training.recipe import parse_healing_recipe

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write(folder, source=TINY_CHECKPOINT, tokens=400, length=32, **config):
    write_teacher_text(folder, str(source), GeneratedText(**config), tokens, length, device="cpu")
    return [(path.name, path.read_bytes()) for path in sorted(folder.glob("*.safetensors"))]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of rows of 32 tokens, sampled four together."""
    folder = tmp_path_factory.mktemp("text") / "text"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_text, "MAX_ROWS", 4)
        write(folder)
    return folder


def test_rows_begin_as_documents_do_and_are_read_as_they_are(text):
    index, table = read_index(text), TokenTable(text)
    assert [shard.documents for shard in index.shards] == [4] * 4
    assert sum(shard.tokens for shard in index.shards) == 512 >= 400
    tokenizer = AutoTokenizer.from_pretrained(TINY_CHECKPOINT)
    config = DataConfig(sources={"path": str(text)}, packing="documents", shuffle=0)
    rows = [
        example["input_ids"] for example, _ in zip(make_data(config, tokenizer, 32, 0).examples(), range(len(table)))
    ]
    stored = torch.cat([load_file(text / shard.file)["ids"] for shard in index.shards]).view(-1, 32)
    assert torch.equal(torch.stack(rows), stored.long())
    assert (stored[:, 0] == tokenizer.bos_token_id).all() and len({tuple(row.tolist()) for row in stored}) == 16


def test_an_interrupted_text_goes_on_with_equal_tokens(text, tmp_path, monkeypatch):
    """Also by several processes, of which each writes every other batch."""
    whole = [(path.name, path.read_bytes()) for path in sorted(text.glob("*.safetensors"))]
    part = shutil.copytree(text, tmp_path / "part")
    index = json.loads((part / "teacher_text.json").read_text())
    (part / "teacher_text.json").write_text(json.dumps({**index, "shards": []}))
    with pytest.raises(SurgeryError, match="unfinished"):
        TokenTable(part)
    (part / whole[1][0]).unlink()
    (part / whole[2][0]).write_bytes(b"damaged")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(write_text, "_wait_for", lambda path: _other_process(path, part))
    assert write(part) == whole
    assert read_index(part) == read_index(text)


def _other_process(path, folder):
    """Write the batch that another process would write."""
    if not path.is_file():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", "1")
            patch.setattr(write_text, "_wait_for", lambda path: None if path.is_file() else pytest.skip("not here"))
            index = read_index(folder)
            sampler, _ = write_text._open_sampler(
                "transformers",
                write_text.open_checkpoint(str(TINY_CHECKPOINT)),
                index.settings,
                torch.device("cpu"),
                False,
            )
            compose = write_text._documents(AutoTokenizer.from_pretrained(TINY_CHECKPOINT), index.settings)
            number = int(path.stem.split("-")[1])
            write_text._write_batch(folder, number, index, lambda seed: compose(sampler, index.rows, seed))


def test_chat_models_write_a_turn_and_its_answer(tmp_path):
    source = shutil.copytree(TINY_CHECKPOINT, tmp_path / "chat")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    write(tmp_path / "text", source, tokens=200, length=64)
    assert read_index(tmp_path / "text").settings.chat
    tokenizer, table = AutoTokenizer.from_pretrained(source), TokenTable(tmp_path / "text")
    for i in range(len(table)):
        (document,) = table.document_parts(i)
        said = tokenizer.decode(list(document.content))
        assert said.startswith("user: ") and said.count("<|endoftext|>assistant: ") == 1 and len(document.content) <= 64
    assert write(tmp_path / "plain", source, tokens=100, chat=False)
    for template, said in (
        (TEMPLATE.replace("m.content", "m.content.strip('\u2063')"), "changes the text of a user turn"),
        (
            TEMPLATE.replace("{{ m.role }}", "{{ m.role }} of a conversation that is long: it has many words"),
            "leave room",
        ),
    ):
        (source / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
        with pytest.raises(SurgeryError, match=said):
            write(tmp_path / "refused", source, length=16)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda index: index.update(version=2), "version"),
        (lambda index: index.update(shards=[{**index["shards"][0], "file": "../x.safetensors"}]), "no plain name"),
        (lambda index: index["shards"][0].update(sha256="0"), "missing or was changed"),
        (lambda index: index["shards"][0].update(tokens=7), "size"),
        (lambda index: index.update(extra=1), "extra"),
    ],
)
def test_a_changed_index_is_refused(text, tmp_path, change, said):
    folder = shutil.copytree(text, tmp_path / "text")
    index = json.loads((folder / "teacher_text.json").read_text())
    change(index)
    (folder / "teacher_text.json").write_text(json.dumps(index))
    with pytest.raises(SurgeryError, match=said):
        TokenTable(folder)


@pytest.mark.parametrize(
    "ids, lengths, said",
    [
        (torch.zeros(8, dtype=torch.int64), torch.tensor([8], dtype=torch.int32), "both int32"),
        (torch.zeros(8, dtype=torch.int32), torch.tensor([9], dtype=torch.int32), "sum to its 8"),
        (torch.zeros(8, dtype=torch.int32), torch.tensor([16, -8], dtype=torch.int32), "at least 1"),
        (torch.full((8,), 99999, dtype=torch.int32), torch.tensor([8], dtype=torch.int32), "must be below 1,536"),
    ],
)
def test_a_hostile_shard_is_refused(text, tmp_path, ids, lengths, said):
    folder = shutil.copytree(text, tmp_path / "text")
    index = json.loads((folder / "teacher_text.json").read_text())
    path = folder / index["shards"][0]["file"]
    save_file({"ids": ids, "lengths": lengths}, path)
    shard = {"file": path.name, "documents": len(lengths), "tokens": 8, "sha256": write_text.file_digest(path)}
    (folder / "teacher_text.json").write_text(json.dumps({**index, "shards": [shard]}))
    with pytest.raises(SurgeryError, match=said):
        TokenTable(folder).check_tokenizer(AutoTokenizer.from_pretrained(TINY_CHECKPOINT))


def test_other_settings_folders_and_tokenizers_are_refused(text, tmp_path):
    with pytest.raises(SurgeryError, match=r"other settings .temperature is 1.0, asked for is 0.5"):
        write(text, temperature=0.5)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SurgeryError, match="no folder of a teacher's text"):
        write(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(TINY_CHECKPOINT)
    tokenizer.add_tokens("<more>")
    with pytest.raises(SurgeryError, match="whose tokenizer is not"):
        make_data(DataConfig(sources={"path": str(text)}), tokenizer, 32, 0)
    with pytest.raises(SurgeryError, match="holds no text of a teacher"):
        make_data(DataConfig(sources={"generated": True}), tokenizer, 32, 0)
    for wrong, said in (({}, "needs a path"), ({"generated": True, "text": "body"}, "does not apply to text that")):
        with pytest.raises(SurgeryError, match=said):
            DataConfig(sources=wrong)


def test_finetune_trains_on_a_mix_with_the_teachers_text(texts, btt, tmp_path):
    sources = [{"generated": True, "weight": 3}, {"path": str(texts)}]
    recipe = {"data": {"sources": sources, "packing": "stream"}, "stages": [{**LM, "tokens": 256}], "log": 1}
    with pytest.raises(SurgeryError, match=r"written by the teacher, and there is none. Give --teacher"):
        finetune(str(btt), parse_healing_recipe(json.loads(json.dumps(recipe))), tmp_path / "out")
    finetune(str(btt), parse_healing_recipe(recipe), tmp_path / "out", teacher=str(TINY_CHECKPOINT), device="cpu")
    index = read_index(tmp_path / "out-text")
    assert (index.settings.tokens, index.settings.length) == (192, 16)
