"""Tiny random models of every family, and functions shared by the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

DECODER = dict(  # noqa: C408
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
SMALL_LEVELS = ["attention.ranks=[4, 2, 2]", "attention.extents=[16, 8]"]  # of mlr-nested, for heads of 8 dims


def tiny_config(family: str):
    """Return (model class, config) of a tiny model of a family."""
    import transformers as t

    plain = {k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "head_dim")}
    gpt2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=96, bos_token_id=1, eos_token_id=2)  # noqa: C408
    t5 = dict(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)  # noqa: C408
    vit = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
    }
    windows = dict(sliding_window=8)  # noqa: C408
    return {
        "llama": lambda: (t.LlamaForCausalLM, t.LlamaConfig(**DECODER)),
        "llama-tied": lambda: (t.LlamaForCausalLM, t.LlamaConfig(**DECODER, tie_word_embeddings=True)),
        "mistral": lambda: (t.MistralForCausalLM, t.MistralConfig(**DECODER)),
        "qwen2": lambda: (t.Qwen2ForCausalLM, t.Qwen2Config(**{**DECODER, "head_dim": 8})),
        "qwen3": lambda: (t.Qwen3ForCausalLM, t.Qwen3Config(**DECODER)),
        "gemma2": lambda: (t.Gemma2ForCausalLM, t.Gemma2Config(**DECODER, **windows, query_pre_attn_scalar=8)),
        "gemma3": lambda: (t.Gemma3ForCausalLM, t.Gemma3TextConfig(**DECODER, **windows, query_pre_attn_scalar=8)),
        "phi3": lambda: (t.Phi3ForCausalLM, t.Phi3Config(**{k: v for k, v in DECODER.items() if k != "head_dim"})),
        "olmo2": lambda: (t.Olmo2ForCausalLM, t.Olmo2Config(**{k: v for k, v in DECODER.items() if k != "head_dim"})),
        "gpt2": lambda: (t.GPT2LMHeadModel, t.GPT2Config(**gpt2)),
        "gpt_neox": lambda: (t.GPTNeoXForCausalLM, t.GPTNeoXConfig(**plain)),
        "bert": lambda: (t.BertForMaskedLM, t.BertConfig(**plain)),
        "vit": lambda: (t.ViTForImageClassification, t.ViTConfig(**vit, num_labels=5)),
        "t5": lambda: (t.T5ForConditionalGeneration, t.T5Config(**t5)),
        "t5-gated": lambda: (t.T5ForConditionalGeneration, t.T5Config(**t5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    }[family]()  # fmt: skip


FAMILIES = (
    "llama", "llama-tied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "gpt2", "gpt_neox",
    "bert", "vit", "t5", "t5-gated",
)  # fmt: skip
GENERATIVE_FAMILIES = tuple(f for f in FAMILIES if f not in ("bert", "vit"))


def tiny_inputs(family: str, rows: int, length: int = 24, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return random model inputs of a family; equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}
    inputs = {"input_ids": torch.randint(3, 96, (rows, length), generator=generator)}
    if family.startswith("t5"):
        answers = torch.randint(3, 96, (rows, length // 2), generator=generator)
        inputs["decoder_input_ids"] = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), answers], dim=1)
    return inputs


def matrix_structures() -> list[str]:
    """Return the names of the structures that replace one matrix; that of MLPs has tests of its own."""
    from surgery.structures import STRUCTURES

    return [name for name in STRUCTURES.names() if not STRUCTURES.config_type(name).of_mlp]


def make_recipe(**keys):
    """Validate a conversion recipe given as keyword arguments."""
    from surgery.planning.recipe import validate_recipe

    return validate_recipe({k: str(v) if isinstance(v, Path) else v for k, v in keys.items()}, "test")


def model_outputs(model, inputs):
    """Return the model's first output without gradients."""
    with torch.inference_mode():
        return model(**inputs)[0]


ROOT = Path(__file__).resolve().parents[2]


def start_python(code: str, cwd: Path | None = None, **environment: str) -> subprocess.Popen:
    """Start a fresh interpreter that finds this checkout's package and has not imported it."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=cwd, **pipes)


def run_python(code: str, cwd: Path | None = None, stdin: str = "", **environment: str) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter and return the completed process."""
    process = start_python(code, cwd, **environment)
    out, err = process.communicate(stdin)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class Logits(torch.nn.Module):
    """A language model as a function of token ids alone, for exports."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


def checkpoint_logits(folder: Path | str, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits (B, T, V) of a causal language model's checkpoint."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return |a - b| / |b| in the Frobenius norm."""
    return float((a - b).norm() / b.norm())


def choose_layers_quickly(monkeypatch) -> None:
    """Let `choose_by: measured` of layers work on windows of over 10 tokens, in place of 68, with two steps of
    alignment, in place of 100.
    """
    from surgery.conversion import aligned, restored
    from surgery.mixers.sliding_window import Window

    monkeypatch.setattr(aligned, "ALIGN_STEPS", 2)
    monkeypatch.setattr(restored, "NEAR", Window(window=8, sinks=2))


def allocate_by_gain(monkeypatch) -> None:
    """Let `allocate: measured` take the allocation by the gain of each rank without a trial."""
    from surgery.conversion import choose_by_time, trial

    def choose(ctx, contenders, plans=None):
        return contenders["measured"], {"kept": "measured", "why": "no trial"}

    for module in (choose_by_time, trial):
        monkeypatch.setattr(module, "choose_allocation", choose)
