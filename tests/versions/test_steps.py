"""One step of everything with the embedded checkpoint, in environments at both ends of the promised versions: `make
test-versions`.

Marked slow: in the environment of `make test` other tests cover these steps.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import surgery

# pydantic before 2.10 warns of names and values that are right.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error::UserWarning:pydantic")]

CHECKPOINT = Path(__file__).resolve().parents[2] / "recipes" / "tiny" / "checkpoint"
TEXT = CHECKPOINT / "calibration.txt"
SMALL = {"tokens": 512, "length": 64, "tune": False, "allocate": "uniform"}
# Recipe and overrides of each converted checkpoint.
CONVERSIONS = {
    "joined": ("low-rank-half", {"share": "input"}),
    "tuned": ("btt-half", {"tune": {"layers": 1, "model": 1}}),
    "generated": ("low-rank-half", {"generated_tokens": 256}),
    "gated-deltanet": ("gated-deltanet", {"attention.steps": 1}),
    "mlr": ("mlr-cache-60", {"attention.steps": 1}),
}
HEALING = """
data: {{sources: [{{path: {text}}}], packing: stream, validation: {text}, validation_examples: 2}}
common: {{length: 64, batch: 4, rows: 4}}
stages:
  - {{kind: distill, tokens: 1024, rate: 1e-4, trains: [all]}}
precision: float32
"""


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """converted(name) -> folder of a checkpoint of CONVERSIONS, made once."""
    folder = tmp_path_factory.mktemp("versions")

    def make(name: str) -> Path:
        out = folder / name
        if not out.exists():
            recipe, overrides = CONVERSIONS[name]
            report = surgery.convert(CHECKPOINT, recipe, out, calibration=TEXT, overrides={**SMALL, **overrides})
            assert report["modules"] or report["mixers"]
        return out

    return make


def tokens(last: int) -> torch.Tensor:
    """Return the token ids from 3 to `last`, (1, T)."""
    return torch.arange(3, last)[None]


def greedy(model, new_tokens: int = 12, **options) -> torch.Tensor:
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    return model.generate(tokens(40), do_sample=False, **lengths, **options)


def run(*arguments: str) -> str:
    """Return what a new Python process prints."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plan():
    assert surgery.plan(CHECKPOINT, "btt-half")["totals"]["modules"] > 0


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_converted_checkpoint_generates_the_same_with_and_without_a_cache(name, converted):
    model = AutoModelForCausalLM.from_pretrained(converted(name), dtype=torch.float32)
    assert {tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()} == {torch.float32}
    assert bool(model(tokens(40), use_cache=False).logits.isfinite().all())
    assert torch.equal(greedy(model), greedy(model, use_cache=False))


def test_a_mixer_generates_the_same_with_a_static_cache(converted):
    model = AutoModelForCausalLM.from_pretrained(converted("gated-deltanet"))
    assert torch.equal(greedy(model), greedy(model, cache_implementation="static"))


def test_a_lora_adapter_trains(converted):
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(converted("joined"))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    adapted(tokens(9), labels=tokens(9)).loss.backward()
    gradients = [parameter.grad for parameter in adapted.parameters() if parameter.requires_grad]
    assert gradients and all(gradient is not None for gradient in gradients)


def test_an_applied_recipe_saves_and_loads(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    rows = [TEXT.read_text(encoding="utf-8")[:20_000]]
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = surgery.apply(model, "btt-half", calibration=rows, tokenizer=tokenizer, **SMALL)
    model.save_pretrained(tmp_path / "applied")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "applied")
    assert torch.equal(model(tokens(40)).logits, loaded(tokens(40)).logits)


def test_densify(converted, tmp_path):
    surgery.densify(converted("tuned"), tmp_path / "dense")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(converted("tuned"), dtype=torch.float32)
    torch.testing.assert_close(dense(tokens(40)).logits, model(tokens(40)).logits, rtol=0.1, atol=0.1)


def test_quantize(converted, tmp_path):
    surgery.quantize(converted("tuned"), tmp_path / "quantized", bits=8)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized")
    assert bool(model(tokens(40)).logits.isfinite().all())


def test_finetune_evaluate_and_report(converted, tmp_path):
    recipe = tmp_path / "heal.yaml"
    recipe.write_text(HEALING.format(text=TEXT), encoding="utf-8")
    surgery.finetune(converted("tuned"), recipe, teacher=CHECKPOINT, out=tmp_path / "healed")
    options = {"text": str(TEXT), "compare": CHECKPOINT, "tokens": 512, "length": 128, "out": tmp_path / "evaluated"}
    assert surgery.evaluate(tmp_path / "healed", **options)["rows"]
    assert Path(surgery.report(tmp_path / "healed", measured=tmp_path / "evaluated")).is_file()


def test_a_program_loads_it_without_importing_surgery(converted):
    code = (
        f"from transformers import AutoModelForCausalLM as A; m = A.from_pretrained({str(converted('joined'))!r}); "
        "print(type(m.model.layers[0].mlp.up_proj).__name__)"
    )
    assert run("-c", code).strip() == "JoinedLinear"


def test_the_command_line_inspects_it(converted):
    assert "peak memory" in run("-m", "surgery", "inspect", str(converted("joined")))
