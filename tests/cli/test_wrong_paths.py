"""What commands say to folders and files that are not what they take: what is wrong with them, and what to do."""

from __future__ import annotations

import importlib.resources
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surgery.cli.main import app
from surgery.core.errors import SurgeryError

TINY = Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint")))


@pytest.fixture
def source(tmp_path):
    """A dense checkpoint in a folder whose name is not ASCII."""
    return Path(shutil.copytree(TINY, tmp_path / "späß 模型"))


def refusal(*words):
    """Return what a command says that refuses its arguments."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(done.exception, SurgeryError), done.output
    return str(done.exception)


def test_an_empty_file_of_weights_is_called_empty(source):
    (source / "model.safetensors").write_bytes(b"")
    said = refusal("plan", source, "--recipe", "btt-half")
    assert "model.safetensors is damaged or not safetensors: it is empty; download" in said


def test_a_config_that_is_a_list_is_called_one(source):
    (source / "config.json").write_text("[]")
    assert "must hold a JSON object, as a Hugging Face config does (got list)" in refusal(
        "plan", source, "--recipe", "btt-half"
    )


@pytest.mark.parametrize("command", ["inspect", "densify"])
def test_a_dense_checkpoint_is_named_with_what_to_give(command, source):
    out = [] if command == "inspect" else ["--out", source.parent / "OUT"]
    said = refusal(command, source, *out)
    assert f"{source} is not a converted checkpoint" in said and "Give a folder that `surgery convert` wrote" in said


def test_a_search_into_a_checkpoint_does_not_tell_to_remove_it(source):
    text = source / "calibration.txt"
    said = refusal("search", source, "--max-bytes", "60%", "--calibration", text, "--out", source)
    assert (
        "was not written by this command" in said
        and "Remove it if nothing else needs it, or give another folder" in said
    )
    assert (source / "config.json").is_file()
