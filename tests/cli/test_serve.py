"""`surgery serve`: which server, with which command, and how it ends. Needs no vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.small import make_recipe
from safetensors.torch import load_file, save_file

from surgery.checkpoint.source import open_converted_checkpoint
from surgery.cli import serve as serving
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError

ADDRESS = ["--host", "127.0.0.1", "--port", "8123", "--dtype", "auto"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def out(tmp_path_factory, checkpoints):
    """Three conversions of a tiny Llama: structured linears, Gated DeltaNet, and MLR attention."""
    folder = tmp_path_factory.mktemp("serve")
    recipes = {
        "btt": {"structure": "btt", "blocks": [4, 4]},
        "gdn": {"structure": "dense", "attention": {"mixer": "linear", "mask": "gates", "scores": "delta"}},
        "window": {"structure": "dense", "attention": {"mixer": "window", "window": 8}},
    }
    for name, recipe in recipes.items():
        convert(str(checkpoints("llama")), make_recipe(**recipe), folder / name)
    return folder


@pytest.fixture
def both(monkeypatch):
    monkeypatch.setattr(serving, "vllm_problem", lambda: None)
    monkeypatch.setattr(serving, "transformers_can_serve", lambda: True)


@pytest.mark.parametrize("name", ["btt", "gdn"])
def test_vllm_serves_what_it_can(out, both, name):
    launch = serving.choose_server(
        open_converted_checkpoint(str(out / name)), "auto", ADDRESS, ["--max-model-len", "512"]
    )
    assert "with vLLM, which is installed" in launch.reason
    eager = ["--enforce-eager"] if name == "gdn" else []
    assert launch.command[3:5] == ["--model", str(out / name)]
    assert launch.command[-2 - len(eager) :] == ["--max-model-len", "512", *eager]
    assert launch.command[7:9] == ["--host", "127.0.0.1"] and not any("trust" in word for word in launch.command)


def test_transformers_serves_the_rest_and_says_why(out, both):
    source = open_converted_checkpoint(str(out / "window"))
    launch = serving.choose_server(source, "auto", ADDRESS)
    assert "with transformers serve, not with vLLM" in launch.reason and "mixer 'window'" in launch.reason
    with pytest.raises(SurgeryError, match=r"vLLM cannot serve .*mixer 'window'"):
        serving.choose_server(source, "vllm", ADDRESS)
    with pytest.raises(SurgeryError, match="--max-model-len and --eager are for vLLM"):
        serving.choose_server(source, "auto", ADDRESS, ["--enforce-eager"])


def test_a_head_of_another_name_is_not_for_vllm(checkpoints, both, tmp_path):
    convert(str(checkpoints("gpt_neox")), make_recipe(structure="low_rank"), tmp_path / "neox")
    with pytest.raises(SurgeryError, match="whose head has the name embed_out"):
        serving.choose_server(open_converted_checkpoint(str(tmp_path / "neox")), "vllm", ADDRESS)


def test_without_any_server_it_says_what_to_install(out, monkeypatch):
    monkeypatch.setattr(serving, "find_spec", lambda name: None)
    with pytest.raises(SurgeryError, match=r"vLLM: it is not installed.*pip install 'transformers\[serving\]'"):
        serving.choose_server(open_converted_checkpoint(str(out / "btt")), "auto", ADDRESS)


def test_a_plugin_left_out_is_noticed(monkeypatch):
    monkeypatch.setattr(serving, "find_spec", lambda name: object())
    monkeypatch.setattr(serving, "entry_points", lambda group: type("Found", (), {"names": {"surgery"}}))
    assert serving.vllm_problem() is None
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "leaves out the plugin" in str(serving.vllm_problem())


def test_code_in_the_folder_a_missing_tensor_and_a_damaged_table_are_refused(out, both, tmp_path):
    def changed(name, change):
        folder = tmp_path / name
        subprocess.run(["cp", "-r", str(out / "btt"), str(folder)], check=True)
        change(folder)
        return open_converted_checkpoint(str(folder))

    def edit(folder, **keys):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **keys}))

    def drop(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("model.norm.weight")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(SurgeryError, match="needs code from its own repository"):
        source = changed("code", lambda folder: edit(folder, auto_map={"AutoModelForCausalLM": "evil.Model"}))
        serving.choose_server(source, "auto", ADDRESS)
    with pytest.raises(SurgeryError, match=r"lacks tensor 'model\.norm\.weight'"):
        serving.choose_server(changed("tensor", drop), "auto", ADDRESS)
    with pytest.raises(SurgeryError, match=r"table in config\.json is damaged"):
        source = changed(
            "table", lambda folder: edit(folder, quantization_config={"quant_method": "surgery", "modules": 3})
        )
        serving.choose_server(source, "auto", ADDRESS)


CHILD = """
import signal, sys
try:
    print("up", flush=True)
    while True:
        signal.pause()
except KeyboardInterrupt:
    print("stopped", flush=True)
    sys.exit(3)
"""
PARENT = "import sys; from surgery.cli.serve import run_until_interrupted; sys.exit(run_until_interrupted([sys.executable, '-c', {child!r}]))"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_server_once_and_exits_with_zero(number):
    code = PARENT.format(child=CHILD)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout.readline().strip() == "up"
    parent.send_signal(number)
    out, _ = parent.communicate(timeout=600)
    assert out.split() == ["stopped"] and parent.returncode == 0


def test_the_code_of_a_server_that_fails_is_passed_on():
    assert serving.run_until_interrupted([sys.executable, "-c", "import sys; sys.exit(7)"]) == 7


def test_the_commands_of_the_documentation_are_parsed():
    from typer.main import get_command

    from surgery.cli.main import app

    lines = [
        line
        for line in (ROOT / "docs" / "serve-vllm.md").read_text().splitlines()
        if line.startswith("surgery serve OUT")
    ]
    assert lines
    for line in lines:
        words = line.split()[2:]
        context = get_command(app).commands["serve"].make_context("serve", words)  # type: ignore[attr-defined]
        assert context.params["host"] == "127.0.0.1" and context.params["port"] == 8000
