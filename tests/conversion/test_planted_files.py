"""Files in OUT.partial that the command did not write are refused by name and never delivered."""

from __future__ import annotations

import os
import shutil

import pytest
from helpers.small import make_recipe
from helpers.small_training import LM, healing_recipe

from surgery.conversion import sinks
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.core.errors import SurgeryError
from surgery.core.files import partial_path
from surgery.core.journal import Journal
from surgery.training.finetune import finetune

PLANTED = ("chat_template.jinja", "evil.py", "sub/x.json", "adapter_config.json", "pieces/x.py", "deep/er/x")
RECIPE = make_recipe(structure="low_rank")


class Killed(BaseException):
    pass


@pytest.fixture
def source(checkpoints):
    return str(checkpoints("llama"))


@pytest.fixture
def out(source, tmp_path, monkeypatch):
    """A conversion killed before its pieces were joined."""

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(sinks, "write_checkpoint", kill)
        with pytest.raises(Killed):
            convert(source, RECIPE, tmp_path / "out")
    return tmp_path / "out"


def plant(folder, name):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("x")


@pytest.mark.parametrize("name", PLANTED)
def test_outside_d4_planted_files_are_refused_first(source, out, name):
    plant(partial_path(out), name)
    with pytest.raises(SurgeryError, match=rf"{name.split('/')[0]}.* was not written by this command.*Remove it"):
        convert(source, RECIPE, out, resume=True)
    assert not out.exists()
    top = partial_path(out) / name.split("/")[0]
    (partial_path(out) / name).unlink() if top.name in ("pieces", name) else shutil.rmtree(top)
    convert(source, RECIPE, out, resume=True)
    assert sorted(os.listdir(out)) == ["config.json", "generation_config.json", "model.safetensors", "surgery_report.json", "surgery_shim.py"]  # fmt: skip


def test_outside_d4_a_stale_index_is_not_delivered(source, out):
    plant(partial_path(out), "model.safetensors.index.json")
    with pytest.raises(SurgeryError, match=r"index.json was not written by this command"):
        convert(source, RECIPE, out, resume=True)
    assert not out.exists() and partial_path(out).is_dir()
    (partial_path(out) / "model.safetensors.index.json").unlink()
    convert(source, RECIPE, out, resume=True)


def test_outside_d4_files_planted_during_a_rewrite(source, tmp_path, monkeypatch):
    convert(source, RECIPE, tmp_path / "converted")
    partial_path(tmp_path / "dense").mkdir()
    plant(partial_path(tmp_path / "dense"), "mine.txt")
    with pytest.raises(SurgeryError, match=r"mine.txt was not written by this command"):
        densify(str(tmp_path / "converted"), tmp_path / "dense")
    assert (partial_path(tmp_path / "dense") / "mine.txt").is_file()
    shutil.rmtree(partial_path(tmp_path / "dense"))
    move = Journal.move
    monkeypatch.setattr(Journal, "move", lambda self, *a: (plant(self.folder, "chat_template.jinja"), move(self, *a)))
    with pytest.raises(SurgeryError, match=r"chat_template.jinja was not written"):
        densify(str(tmp_path / "converted"), tmp_path / "dense")
    assert not (tmp_path / "dense").exists()


def test_outside_d4_finetune(student, texts, tmp_path):
    plant(partial_path(tmp_path / "out"), "chat_template.jinja")
    with pytest.raises(SurgeryError, match=r"chat_template.jinja was not written"):
        finetune(str(student), healing_recipe(texts, LM), tmp_path / "out", resume=True, track="none")


@pytest.mark.parametrize("name", ["journal.jsonl", "pieces/model.layers.0.safetensors"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_outside_d12_what_is_no_regular_file(source, out, name, make):
    path = partial_path(out) / name
    path.unlink()
    make(path)
    with pytest.raises(SurgeryError, match=r"regular file|was not written by this command"):
        convert(source, RECIPE, out, resume=True)
    assert not out.exists()
