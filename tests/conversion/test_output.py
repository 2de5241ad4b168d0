"""`--overwrite` replaces what a conversion wrote, and deletes nothing else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from helpers.small import make_recipe

from surgery import api
from surgery.conversion import output, sinks
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.conversion.quantize_checkpoint import quantize
from surgery.core.errors import SurgeryError
from surgery.core.files import partial_path, read_json

OLD, NEW = make_recipe(structure="low_rank"), make_recipe(structure="low_rank", keep=0.3)


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def source(checkpoints, tmp_path_factory):
    """A checkpoint with companions, one of them in a folder."""
    folder = tmp_path_factory.mktemp("source") / "llama"
    shutil.copytree(checkpoints("llama"), folder)
    (folder / "LICENSE").write_text("free")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    return str(folder)


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "out"
    convert(source, OLD, folder)
    return folder


@pytest.fixture
def out(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "work" / "out")
    return tmp_path / "work" / "out"


def state(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def interrupt(source, out, monkeypatch, at="write_checkpoint", recipe=OLD, **more):
    """Kill a conversion before one of its steps."""

    def kill(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(sinks, at, kill)
        with pytest.raises(Killed):
            convert(source, recipe, out, **more)


def test_the_report_lists_the_files_with_their_digests(finished):
    files = read_json(finished / "surgery_report.json")["files"]
    assert {*files, "surgery_report.json"} == set(state(finished))
    assert {"LICENSE", "additional_chat_templates/tool.jinja", "model.safetensors", "config.json"} <= set(files)
    output.check_finished(finished)


def test_a_conversion_is_replaced_when_its_successor_is_complete(source, out, monkeypatch):
    before = state(out)
    with pytest.raises(SurgeryError, match="exists; choose another --out, or remove it"):
        convert(source, NEW, out)
    interrupt(source, out, monkeypatch, recipe=NEW, overwrite=True)
    assert state(out) == before
    with pytest.raises(SurgeryError, match="Give one of them"):
        convert(source, NEW, out, overwrite=True, resume=True)
    convert(source, NEW, out, resume=True)  # a resumed conversion replaces what it was begun to replace
    assert read_json(out / "surgery_report.json")["recipe"]["keep"] == 0.3
    assert os.listdir(out.parent) == ["out"]
    api.convert(source, OLD, out, overwrite=True, quiet=True)
    assert {**state(out), "surgery_report.json": b""} == {**before, "surgery_report.json": b""}
    assert os.listdir(out.parent) == ["out"]


def test_an_interrupted_conversion_is_replaced(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    interrupt(source, out, monkeypatch)
    assert partial_path(out).is_dir()
    convert(source, NEW, out, overwrite=True)
    assert os.listdir(tmp_path) == ["out"] and read_json(out / "surgery_report.json")["recipe"]["keep"] == 0.3


def test_a_mistake_costs_nothing(source, out, monkeypatch):
    interrupt(source, out.with_name("other"), monkeypatch)
    partial_path(out.with_name("other")).rename(partial_path(out))
    before = state(out.parent)
    wrong = make_recipe(structure="low_rank", calibration="missing.txt")
    with pytest.raises(SurgeryError, match=r"missing\.txt"):
        convert(source, wrong, out, overwrite=True)
    with pytest.raises(SurgeryError, match="nothing"):
        convert(source, make_recipe(rules=[{"match": "*.nothing"}]), out, overwrite=True)
    with pytest.raises(SurgeryError, match="does not exist"):
        convert(str(out.parent / "none"), NEW, out, overwrite=True)
    assert state(out.parent) == before


def add(name):
    def change(out):
        folder = (out / name).parent
        named = out / name if folder.exists() else out / name.split("/")[0]
        folder.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
        return named

    return change


def edit(name):
    def change(out):
        (out / name).write_bytes((out / name).read_bytes() + b" ")
        return out / name

    return change


def link(out):
    (out / "link").symlink_to(out.parent)
    return out / "link"


def empty_folder(out):
    (out / "notes").mkdir()
    return out / "notes"


def forget_files(out):
    report = read_json(out / "surgery_report.json")
    del report["files"]
    (out / "surgery_report.json").write_text(json.dumps(report))
    return "older version"


def no_report(out):
    (out / "surgery_report.json").unlink()
    return "holds no surgery_report.json"


CHANGES = {
    "notes": add("notes.txt"),
    "a file among the companions": add("additional_chat_templates/mine.jinja"),
    "results": add("eval/results.json"),
    "another checkpoint": add("checkpoint-10/model.safetensors"),
    "a second shard": add("model-2.safetensors"),
    "an unfinished file": add("model.safetensors.tmp"),
    "trained weights": edit("model.safetensors"),
    "an edited companion": edit("LICENSE"),
    "a link": link,
    "a folder": empty_folder,
    "an older report": forget_files,
    "no report": no_report,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_folder_with_anything_else_is_refused(source, out, change):
    named, before = change(out), state(out.parent)
    with pytest.raises(SurgeryError) as refused:
        convert(source, NEW, out, overwrite=True)
    assert str(named) in str(refused.value) and state(out.parent) == before


@pytest.mark.parametrize("name", ["notes.txt", "pieces/mine.py", "deep/er/x", "chat_template.jinja"])
def test_an_unfinished_folder_with_anything_else_is_refused(source, tmp_path, monkeypatch, name):
    out = tmp_path / "out"
    interrupt(source, out, monkeypatch)
    add(name)(partial_path(out))
    before = state(tmp_path)
    with pytest.raises(SurgeryError, match=rf"{name.split('/')[0]}.* was not written by the conversion"):
        convert(source, NEW, out, overwrite=True)
    assert state(tmp_path) == before


def test_work_of_other_commands_is_refused(source, out, finished, tmp_path):
    for make in (lambda to: densify(str(finished), to), lambda to: quantize(str(finished), to, 8)):
        other = tmp_path / f"other-{len(os.listdir(tmp_path))}"
        make(other)
        before = state(other)
        with pytest.raises(SurgeryError, match=r"no surgery_report|changed after the conversion"):
            convert(source, NEW, other, overwrite=True)
        assert state(other) == before
    for journal in (None, "", '{"step": "start", "recipe": "", "crc32": 1}\n'):
        partial_path(out).mkdir(exist_ok=True)
        if journal is not None:
            (partial_path(out) / "journal.jsonl").write_text(journal)
        with pytest.raises(SurgeryError, match="holds no interrupted conversion"):
            convert(source, NEW, out, overwrite=True)
        shutil.rmtree(partial_path(out))
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    for target in (copy, copy.parent):
        before = state(copy)
        with pytest.raises(SurgeryError, match="no surgery_report"):
            convert(str(copy), NEW, target, overwrite=True)
        assert state(copy) == before


def test_places_that_are_in_use_are_refused(source, out, monkeypatch, tmp_path):
    before = state(out)
    (tmp_path / "link").symlink_to(out)
    with pytest.raises(SurgeryError, match="symbolic link"):
        convert(source, NEW, tmp_path / "link", overwrite=True)
    monkeypatch.chdir(out / "additional_chat_templates")
    for place in (out, Path(".."), Path(".")):
        with pytest.raises(SurgeryError, match=r"(is|holds) the working directory"):
            convert(source, NEW, place, overwrite=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(out))
    with pytest.raises(SurgeryError, match="is the home folder"):
        convert(source, NEW, out, overwrite=True)
    monkeypatch.undo()
    with pytest.raises(SurgeryError, match="is the source"):
        output.check_not_source(out, type("Source", (), {"folder": out, "name": str(out)}))
    output.aside_path(out).mkdir()
    with pytest.raises(SurgeryError, match=r"out.replaced exists"):
        convert(source, NEW, out, overwrite=True)
    assert state(out) == before


def test_a_file_that_came_meanwhile_is_kept(source, out, monkeypatch):
    """The conversion is complete then, and --resume finishes it once the file is gone."""
    written = sinks.write_checkpoint

    def disturbed(*words):
        (out / "notes.txt").write_text("mine")
        return written(*words)

    monkeypatch.setattr(sinks, "write_checkpoint", disturbed)
    with pytest.raises(SurgeryError, match=r"notes.txt was not written.*with --resume"):
        convert(source, NEW, out, overwrite=True)
    monkeypatch.undo()
    with pytest.raises(SurgeryError, match=r"notes.txt was not written"):
        convert(source, NEW, out, resume=True)
    assert (out / "notes.txt").read_text() == "mine" and "model.safetensors" in state(out)
    (out / "notes.txt").unlink()
    convert(source, NEW, out, resume=True)
    assert os.listdir(out.parent) == ["out"] and read_json(out / "surgery_report.json")["recipe"]["keep"] == 0.3


def test_the_old_result_comes_back_if_the_new_one_cannot_be_renamed(source, out, monkeypatch):
    before = state(out)

    def fail(*_):
        raise Killed

    monkeypatch.setattr("surgery.core.journal.Journal.move", fail)
    with pytest.raises(Killed):
        convert(source, NEW, out, overwrite=True)
    assert state(out) == before and not output.aside_path(out).exists()


def test_a_folder_that_no_conversion_began_is_not_resumed(source, tmp_path):
    work = partial_path(tmp_path / "out")
    work.mkdir()
    (work / "config.json").write_text("mine")
    for mode in ("resume", "overwrite"):
        with pytest.raises(SurgeryError, match="holds no interrupted conversion"):
            convert(source, NEW, tmp_path / "out", **{mode: True})
    assert (work / "config.json").read_text() == "mine"
