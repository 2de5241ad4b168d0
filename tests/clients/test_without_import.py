"""Programs that never import surgery load converted checkpoints where it is installed: transformers, peft, lm-eval's
command.
"""

from __future__ import annotations

import importlib.resources
import json
import re
import shlex
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import torch
import typer
from helpers.installed import Installed
from helpers.ports import reserved_port
from helpers.small import make_recipe, model_outputs
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cli.chat import Chat
from transformers.cli.serve import Serve

import surgery  # noqa: F401
from surgery.conversion.convert import convert

ROOT = Path(__file__).resolve().parents[2]
TINY = Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint")))


def commands() -> list[list[str]]:
    """The commands of docs/serve.md that test_docs.py does not run, split as a shell does."""
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```console\n(.*?)^```$", page, re.M | re.S)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def command(*words: str) -> list[str]:
    """The first command of docs/serve.md that begins with these words and does not need remote code."""
    return next(c for c in commands() if c[: len(words)] == list(words) and "trust_remote_code" not in str(c))


def test_the_commands_of_the_page_are_parsed(monkeypatch):
    """By the programs' own parsers, where they are not run below."""
    app = typer.Typer()
    app.command("serve")(Serve)
    app.command("chat")(Chat)
    transformers = typer.main.get_command(app)
    for words in commands():
        if words[0] == "transformers":
            context = transformers.commands[words[1]].make_context(words[1], words[2:])
            assert "OUT" in context.params.values()
        else:
            harness = pytest.importorskip("lm_eval._cli.harness")
            monkeypatch.setattr("sys.argv", [words[0], "run", *words[1:]])
            assert harness.HarnessCLI().parse_args().model_args["pretrained"] == "OUT"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with OUT, a converted checkpoint with its tokenizer."""
    folder = tmp_path_factory.mktemp("desk")
    convert(str(TINY), make_recipe(structure="low_rank", keep=0.5, allocate="uniform"), folder / "OUT")
    return folder


PLAIN = """
import sys
assert "surgery_startup" in sys.modules and "surgery" not in sys.modules and "importlib.util" not in sys.modules
folder, saved = sys.argv[1:]
import transformers
assert "surgery" not in sys.modules
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
assert type(model) is transformers.LlamaForCausalLM
import torch
inputs = {"input_ids": torch.arange(3, 51).view(2, 24)}
with torch.inference_mode():
    torch.save(model.eval()(**inputs).logits, saved)
print(*[name for name in ("surgery.planning", "surgery.conversion", "peft") if name in sys.modules])
assert not [finder for finder in sys.meta_path if "surgery_startup" in str(finder)]
"""


def test_transformers_loads_it_without_an_import(installed, converted, tmp_path):
    """Nothing of surgery is imported before transformers needs its quantizers, and nothing of converting ever."""
    out = installed.run("-c", PLAIN, str(converted("llama")), str(tmp_path / "logits.pt"), cwd=tmp_path)
    assert out.split() == []
    model = AutoModelForCausalLM.from_pretrained(converted("llama")).eval()
    expected = model_outputs(model, {"input_ids": torch.arange(3, 51).view(2, 24)})
    assert torch.allclose(torch.load(tmp_path / "logits.pt"), expected, rtol=1e-4, atol=1e-4)


def test_the_registration_can_be_switched_off(installed, tmp_path):
    code = "import sys; print([finder for finder in sys.meta_path if 'surgery_startup' in str(finder)])"
    off = {**installed.environment, "SURGERY_STARTUP": "off"}
    assert installed.run("-c", code, cwd=tmp_path, env=off).strip() == "[]"
    assert installed.run("-c", code, cwd=tmp_path).strip() != "[]"


@pytest.fixture
def stand_in(tmp_path):
    """A folder with an empty package transformers, which imports at once: these tests are about the finder alone."""
    (tmp_path / "transformers" / "quantizers").mkdir(parents=True)
    for name in ("__init__.py", "quantizers/__init__.py", "quantizers/auto.py"):
        (tmp_path / "transformers" / name).write_text("")
    return tmp_path


def test_a_module_of_that_name_in_the_way_is_not_run(installed, stand_in):
    """A user's script of the same name that imports transformers must not run twice."""
    code = "print('ran', __name__)\nimport transformers.quantizers.auto, sys\nprint('surgery' in sys.modules)"
    (stand_in / "surgery.py").write_text(code)
    assert installed.run(str(stand_in / "surgery.py"), cwd=stand_in).split() == ["ran", "__main__", "False"]


BROKEN = """
import sys, warnings
sys.modules["surgery.modeling.register"] = None  # as if a file of the package were missing
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import transformers.quantizers.auto
print(*[each.message for each in caught])
"""


def test_a_broken_install_is_a_warning(installed, stand_in):
    """transformers stays usable for every other model."""
    said = installed.run("-c", BROKEN, cwd=stand_in)
    assert said.startswith("surgery could not register with transformers, so converted checkpoints cannot be loaded")


TASK = """
task: two_choices
dataset_path: json
dataset_kwargs: {data_files: {test: choices.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
CHOICES = [("Story: Mia went to the", "harbour", "zzz"), ("Story: Tom slept in the", "house", "qqq")]


@pytest.mark.slow
def test_lm_evals_own_command(installed, desk, tmp_path):
    """The command of docs/serve.md, with a task of two lines for its task, which is not on every machine."""
    pytest.importorskip("lm_eval")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "two_choices.yaml").write_text(TASK)
    rows = [{"text": text, "choices": choices, "answer": 0} for text, *choices in CHOICES]
    (tmp_path / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "OUT").symlink_to(desk / "OUT")
    words = command("lm_eval")
    words[words.index("--tasks") + 1] = "two_choices"
    installed.environment["HF_HOME"] = str(tmp_path / "cache")
    installed.run("-m", *words, "--include_path", "tasks", "--output_path", "results", "--log_samples", cwd=tmp_path)
    (results,) = (tmp_path / "results").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["two_choices"]["acc,none"] == 1.0
    (samples,) = (tmp_path / "results").rglob("samples_*.jsonl")
    logged = [json.loads(line) for line in samples.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(desk / "OUT").eval()
    tokenizer = AutoTokenizer.from_pretrained(desk / "OUT")
    for sample in logged:
        for request, found in zip(sample["arguments"].values(), sample["filtered_resps"]):
            prompt, answer = (tokenizer(request[name])["input_ids"] for name in ("arg_0", "arg_1"))
            with torch.inference_mode():
                log_probs = (
                    model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
                )
            expected = float(log_probs.gather(1, torch.tensor(answer)[:, None]).sum())
            assert float(found[0]) == pytest.approx(expected, rel=0.02)  # the checkpoint is bfloat16


@pytest.fixture
def port():
    with reserved_port() as number:
        yield number


def test_transformers_serve_and_chat(installed, desk, tmp_path, port):
    """The commands of docs/serve.md: a server answers completions and chats, and chat prints an answer."""
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        pytest.skip("needs transformers[serving]")
    shutil.copytree(desk / "OUT", tmp_path / "OUT")
    (tmp_path / "OUT" / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    serve, chat = command("transformers", "serve"), command("transformers", "chat")
    cli = ("-m", "transformers.cli.transformers")
    log = (tmp_path / "log").open("w")
    server = installed.start(*cli, *serve[1:], "--port", str(port), cwd=tmp_path, stdout=log, stderr=log)
    url = f"http://localhost:{port}"
    try:
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        assert server.poll() is None, (tmp_path / "log").read_text()
        asked = {"model": "OUT", "prompt": "Story: Mia went", "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        text = json.load(urllib.request.urlopen(request, timeout=600))["choices"][0]["text"]
        tokenizer, model = (
            AutoTokenizer.from_pretrained(desk / "OUT"),
            AutoModelForCausalLM.from_pretrained(desk / "OUT"),
        )
        prompt = tokenizer("Story: Mia went", return_tensors="pt")
        expected = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert text == tokenizer.decode(expected, skip_special_tokens=True)
        words = [word if "localhost" not in word else url for word in chat[1:]]
        environment = {
            k: v for k, v in installed.environment.items() if k != "HF_HUB_OFFLINE"
        }  # the client refuses even localhost
        said = subprocess.run(
            [str(installed.bin / "python"), *cli, *words, "max_new_tokens=8"], input="Story: Mia went\n!exit\n", capture_output=True,
            text=True, env=environment, cwd=tmp_path, timeout=600,
        )  # fmt: skip
        assert "OUT" in said.stdout and "Error" not in said.stderr, said.stdout + said.stderr
    finally:
        server.terminate()
        server.wait(timeout=600)
        log.close()
