"""compile: layers. The compiler itself is replaced here: what it makes of a layer is tested with its kernels."""

from __future__ import annotations

import pytest
import torch
from helpers.saved_bytes import saved_storages, total_bytes
from helpers.small_training import LAYERS, LM, healing_recipe, read_losses, tensors
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from surgery.mixers import mixer_config
from surgery.modeling.attention import install
from surgery.training import compiled_layers
from surgery.training.compiled_layers import compilation_settings, count_layer_kinds, is_worth_compiling, try_compiled
from surgery.training.finetune import _journal_recipe, finetune


def train(btt, texts, out, **keys):
    finetune(str(btt), healing_recipe(texts, {**LM, **keys}), out, device="cpu")
    return read_losses(out / "training"), tensors(out)


@pytest.fixture
def compiled(monkeypatch):
    """Return a list of the classes whose calls went through the compiler, in order."""
    calls = []

    def compile_module(self, **options):
        assert options == {"dynamic": False}

        def call(*args, **kwargs):
            calls.append(type(self).__name__)
            return self._call_impl(*args, **kwargs)

        self._compiled_call_impl = call

    monkeypatch.setattr(nn.Module, "compile", compile_module)
    return calls


def test_layers_alone_are_compiled(btt, texts, tmp_path, compiled, without_curves):
    losses, weights = train(btt, texts, tmp_path / "compiled", compile="layers")
    assert set(compiled) == {"LlamaDecoderLayer"} and len(compiled) > 8
    count = len(compiled)
    plain, theirs = train(btt, texts, tmp_path / "plain")
    assert len(compiled) == count and losses == plain
    assert all(torch.equal(weights[name], tensor) for name, tensor in theirs.items())


def test_a_failure_leaves_the_layers_as_they_were(btt, texts, tmp_path, monkeypatch, without_curves):
    def compile_module(self, **options):
        def call(*args, **kwargs):
            raise RuntimeError("backend='inductor' raised: no compiler")

        self._compiled_call_impl = call

    monkeypatch.setattr(nn.Module, "compile", compile_module)
    with pytest.warns(UserWarning, match="cannot be compiled, so they run without compilation: RuntimeError: backend"):
        losses, _ = train(btt, texts, tmp_path / "failed", compile="layers")
    assert losses == train(btt, texts, tmp_path / "plain")[0]


def test_a_resumed_run_may_compile_and_hold_activations_otherwise(texts):
    recipes = [healing_recipe(texts, {**LM, **keys}) for keys in ({}, {"compile": "layers"}, {"memory": "keep"})]
    assert len({_journal_recipe(recipe) for recipe in recipes}) == 1
    assert _journal_recipe(healing_recipe(texts, {**LM, "memory": "checkpoint"})) != _journal_recipe(recipes[0])


def test_rows_of_several_documents_run_without_compilation(btt, texts, tmp_path, compiled, without_curves):
    keys = {"length": 256, "tokens": 1024, "batch": 2, "rows": 1, "data": {"packing": "documents"}}
    losses, _ = train(btt, texts, tmp_path / "compiled", compile="layers", **keys)
    assert losses == train(btt, texts, tmp_path / "plain", **keys)[0]
    micro_batches = len(compiled) / LAYERS
    assert micro_batches < 5  # of four and the one that compiles


def test_kinds_of_layers():
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=4, **shape))
    assert count_layer_kinds([model]) == count_layer_kinds([model, model]) == 1
    install(model, {"model.layers.1.self_attn": mixer_config({"mixer": "linear", "mask": "decay"})})
    assert count_layer_kinds([model]) == 2
    model.model.layers[2].mlp.down_proj = nn.Linear(32, 16, bias=True)
    assert count_layer_kinds([model]) == 3
    limit = torch._dynamo.config.recompile_limit
    with compilation_settings([model] * 2):
        assert torch._dynamo.config.recompile_limit == max(limit, 12)
    assert torch._dynamo.config.recompile_limit == limit


def test_auto_compiles_long_stages_of_few_kinds_of_layers(monkeypatch):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=2))
    assert is_worth_compiling([model], 4_000_000) and not is_worth_compiling([model], 3_999_999)
    monkeypatch.setattr(compiled_layers, "AUTO_KINDS", 0)
    assert not is_worth_compiling([model], 4_000_000)


def test_compiled_layers_keep_few_activations(monkeypatch):
    """Under bfloat16 autocast: the layer's input, q, k and v, outputs of attention and its projection, gate and up."""
    width, inner, heads, groups, tokens = 64, 160, 4, 2, 32
    shape = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": width // heads}
    config = LlamaConfig(
        vocab_size=16,
        num_hidden_layers=1,
        hidden_size=width,
        intermediate_size=inner,
        attn_implementation="sdpa",
        **shape,
    )
    model, compile_module = LlamaForCausalLM(config).train(), nn.Module.compile
    monkeypatch.setattr(
        nn.Module,
        "compile",
        lambda self, **options: compile_module(self, backend="aot_eager_decomp_partition", **options),
    )
    x_BTD = torch.randn(1, tokens, width, requires_grad=True)
    rope = tuple(torch.randn(1, tokens, width // heads) for _ in range(2))
    given, kept = (*model.parameters(), *rope), {}

    def run():
        with torch.autocast("cpu", torch.bfloat16), saved_storages(given) as kept_now:
            out = model.model.layers[0](x_BTD, position_embeddings=rope)
        kept.update(kept_now)
        out.sum().backward()

    with compilation_settings([model]):
        assert try_compiled([model], run)
    halves = 2 * width + 2 * groups * width // heads + width + 2 * inner  # elements a token in bfloat16
    others = 4 * (width + 2 + heads)  # the input, two roots, sums of softmax
    assert total_bytes(kept) <= tokens * (2 * halves + others) * 1.01, total_bytes(kept) / tokens
