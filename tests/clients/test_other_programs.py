"""Other programs read the densified checkpoint and write the greedy tokens that transformers writes.

Their pins exclude each other, so each has an environment of its own, .venv-client-NAME, which `make test-clients`
installs. llama.cpp's converter is in no package, so LLAMA_CPP must name a checkout of it.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.small import make_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgery.conversion.convert import convert
from surgery.conversion.densify import densify

ROOT = Path(__file__).resolve().parents[2]
TINY = Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint")))
PROMPT, TOKENS = "Story: Mia", 8

GREEDY = """
import torch
from transformers import AutoModelForCausalLM
def greedy(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    return model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, len(ids):].tolist()
"""

# Each script gets `source` (the densified folder), `original`, `work` (an empty folder), `ids` (the prompt) and `count`,
# and sets `tokens`.
SCRIPTS = {
    # A merge with weight 1 for the densified model, and 0 for the original.
    "mergekit": GREEDY
    + """
import yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
models = [{"model": original, "parameters": {"weight": 0.0}}, {"model": source, "parameters": {"weight": 1.0}}]
config = {"merge_method": "linear", "dtype": "float32", "models": models}
run_merge(MergeConfiguration.model_validate(config), work, MergeOptions(quiet=True))
tokens = greedy(work)
""",
    # Weights in 8 bits, without calibration.
    "llmcompressor": GREEDY
    + """
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=False)
oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="W8A16", ignore=["lm_head"]), output_dir=work)
tokens = greedy(work)
""",
    "mlx": """
import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step
model, _ = load(source)
tokens = [int(token) for (token, _), _ in zip(generate_step(mx.array(ids), model, max_tokens=count), range(count))]
""",
    # The converter knows tokenizers by a hash, and not the embedded one: its pre-tokenizer gets a name.
    "llama-cpp": """
import os
llama = os.environ["LLAMA_CPP"]
sys.path[:0] = [llama, os.path.join(llama, "gguf-py")]
import conversion.base
import convert_hf_to_gguf
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = ["convert_hf_to_gguf.py", source, "--outfile", work + "/dense.gguf", "--outtype", "f32"]
convert_hf_to_gguf.main()
from llama_cpp import Llama
model = Llama(work + "/dense.gguf", n_ctx=64, n_threads=1, verbose=False)
tokens = [token for token, _ in zip(model.generate(ids, temp=0.0), range(count))]
""",
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    convert(str(TINY), make_recipe(structure="low_rank", keep=0.5), folder / "OUT")
    densify(str(folder / "OUT"), folder / "DENSE")
    return folder / "DENSE"


@pytest.mark.parametrize("program", SCRIPTS)
def test_greedy_tokens_are_those_of_transformers(program, dense, tmp_path):
    python = ROOT / f".venv-client-{program}/bin/python"
    if not (python.parent.parent / "installed").exists():
        pytest.skip(f"{program} is not installed in .venv-client-{program} (make test-clients)")
    if program == "llama-cpp" and "LLAMA_CPP" not in os.environ:
        pytest.skip("LLAMA_CPP names no checkout of llama.cpp")
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, trust_remote_code=False)
    ids = AutoTokenizer.from_pretrained(dense)(PROMPT).input_ids
    known = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)[0, len(ids) :].tolist()
    work = tmp_path / "work"
    work.mkdir()
    given = json.dumps([str(dense), str(TINY), str(work), ids, TOKENS])
    script = f"import json, sys\nsource, original, work, ids, count = json.loads(sys.argv[1])\n{SCRIPTS[program]}"
    script += "\nprint('TOKENS', json.dumps(tokens))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", script, given], capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env=environment | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.rpartition("TOKENS ")[2]) == known
