"""Calls during the capture of a CUDA graph do without the masks that ordinary calls do without."""

from __future__ import annotations

import pytest
import torch
import transformers.masking_utils
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from surgery.modeling import graph_masks
from surgery.modeling.graph_masks import ATTENTION_NAME, masks_of_ordinary_calls

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
IDS_BT = torch.arange(24).view(2, 12)


@pytest.fixture
def capturing(monkeypatch):
    """Return a function that says whether a stream is being captured from now on, to us and to transformers."""
    state = [False]
    monkeypatch.setattr(graph_masks, "_is_capturing", lambda: state[0])
    monkeypatch.setattr(transformers.masking_utils, "is_tracing", lambda tensor=None: state[0])
    return lambda now: state.__setitem__(0, now)


def run(model):
    """Return the logits and the masks that the layers got."""
    seen = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
        for layer in model.model.layers
    ]
    with torch.no_grad():
        logits = model(input_ids=IDS_BT, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, seen


def test_captured_calls_make_no_masks(capturing):
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    capturing(True)
    plain, made = run(model)
    assert all(mask is not None for mask in made)  # why this module exists
    capturing(False)
    with masks_of_ordinary_calls([model]):
        assert model.config._attn_implementation == ATTENTION_NAME
        ordinary, none = run(model)
        capturing(True)
        captured, still_none = run(model)
    assert none == still_none == [None, None]
    assert torch.equal(ordinary, captured) and torch.allclose(plain, captured, atol=1e-6)
    assert model.config._attn_implementation == "sdpa"


def test_masks_that_ordinary_calls_need_are_made(capturing):
    """Sliding windows shorter than the rows; calls that no ordinary one came before; padded rows."""
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)).eval()
    with masks_of_ordinary_calls([model]):
        ordinary, made = run(model)
        capturing(True)
        captured, again = run(model)
    assert all(mask is not None for mask in (*made, *again)) and torch.equal(ordinary, captured)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    with masks_of_ordinary_calls([model]):
        assert all(mask is not None for mask in run(model)[1])
        capturing(False)
        run(model)
        padded = torch.ones_like(IDS_BT)
        padded[0, :3] = 0
        with torch.no_grad():
            model(input_ids=IDS_BT, attention_mask=padded, use_cache=False)
        capturing(True)
        assert all(mask is not None for mask in run(model)[1])


def test_other_implementations_keep_theirs():
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="eager")).eval()
    with masks_of_ordinary_calls([model]):
        assert model.config._attn_implementation == "eager"
