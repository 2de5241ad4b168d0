"""Decoding steps captured in a CUDA graph generate what single calls do.

Without a GPU the graph is the recorded function itself.
"""

from __future__ import annotations

import pytest
import torch
from helpers.small import tiny_inputs
from helpers.small_mixers import random_model_with_mixers

from surgery.mixers import mixer_config
from surgery.modeling import cuda_graph as captured
from surgery.modeling.cache import MixerCacheLayer

CUDA = torch.cuda.is_available()
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
MIXERS = [
    {"mixer": "linear", "mask": "hierarchical"},
    {"mixer": "linear", "mask": "gates", "scores": "delta"},
    {
        "mixer": "linear",
        "mask": "hierarchical",
        "scores": "delta",
        "convolution": 3,
        "output_gate": "value",
        "norm": "rms",
    },
    {"mixer": "linear", "window": 4},
    {"mixer": "linear", "mask": "hierarchical", "scores": "delta", "window": 5, "sinks": 2, "rope": "both"},
    {"mixer": "linear", "mask": "ones", "features": "hedgehog", "normalise": True, "window": 3, "sinks": 12},
]


@pytest.fixture
def graphs(monkeypatch):
    """Counts what is recorded."""
    made, real = [], captured.record_graph

    def record_step(step):
        made.append(step)
        return real(step) if CUDA else step

    monkeypatch.setattr(captured, "record_graph", record_step)
    if not CUDA:
        monkeypatch.setattr(captured, "is_on_one_gpu", lambda model: True)
    return made


def model_of(config, layers=None):
    torch.manual_seed(0)
    model = random_model_with_mixers("llama", mixer_config(config), layers).eval()
    return model.to("cuda" if CUDA else "cpu")


def generate(model, new=14, **options):
    ids = tiny_inputs("llama", 2, 9, 3)["input_ids"].to(model.device)
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    prompt["attention_mask"][0, :3] = 0
    done = model.generate(
        **prompt, max_new_tokens=new, return_dict_in_generate=True, output_logits=True, **GREEDY, **options
    )
    return done.sequences, torch.stack(done.logits, 1), done.past_key_values


@pytest.mark.parametrize("config", MIXERS, ids=str)
def test_the_same_tokens(config, graphs):
    """Through powers of two, where a log-linear state gets more buckets, and with padding on the left."""
    model = model_of(config)
    right, logits, plain = generate(model)
    assert not graphs
    tokens, ours, cache = generate(model, cache_implementation="static")
    assert len(graphs) == 1 and torch.equal(tokens, right)
    assert (ours - logits).abs().max() < 1e-5 * logits.abs().max()
    for one, other in zip(cache.layers, plain.layers):
        assert type(one) is MixerCacheLayer and one.seen == other.seen and one.state.max_seen == other.state.max_seen
        assert torch.equal(one.state.seen_B, other.state.seen_B)


def test_when_it_is_not_asked(graphs):
    model = model_of(MIXERS[0])
    generate(model, 4, cache_implementation="static", disable_compile=True)
    generate(model_of(MIXERS[0], layers=[1]), 4, cache_implementation="static")
    generate(model_of({"mixer": "linear", "mask": "toeplitz"}), 4, cache_implementation="static")
    assert not graphs


def test_what_cannot_be_captured_runs_step_by_step(monkeypatch, graphs):
    def refuse_capture(step):
        raise RuntimeError("operation not permitted when stream is capturing")

    model = model_of(MIXERS[0])
    right = generate(model)[0]
    monkeypatch.setattr(captured, "record_graph", refuse_capture)
    with pytest.warns(UserWarning, match="cannot be captured"):
        assert torch.equal(generate(model, cache_implementation="static")[0], right)
