"""compile: layers. The compiler itself is replaced here: what it makes of a layer is tested with its kernels."""

from __future__ import annotations

import pytest
import torch
from helpers.small_training import LM, healing_recipe, read_losses, tensors
from torch import nn

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
