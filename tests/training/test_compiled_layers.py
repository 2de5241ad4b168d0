"""compile: layers. The compiler itself is replaced here: what it makes of a layer is tested with its kernels."""

from __future__ import annotations

import pytest
import torch
from helpers.small_training import LAYERS, LM, healing_recipe, read_losses, tensors
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from surgery.mixers import mixer_config
from surgery.modeling.attention import install
from surgery.training import compiled_layers
from surgery.training.compiled_layers import count_layer_kinds, is_worth_compiling, room_for_compilations
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
    with room_for_compilations([model] * 2):
        assert torch._dynamo.config.recompile_limit == max(limit, 12)
    assert torch._dynamo.config.recompile_limit == limit


def test_auto_compiles_long_stages_of_few_kinds_of_layers(monkeypatch):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=2))
    assert is_worth_compiling([model], 4_000_000) and not is_worth_compiling([model], 3_999_999)
    monkeypatch.setattr(compiled_layers, "AUTO_KINDS", 0)
    assert not is_worth_compiling([model], 4_000_000)
