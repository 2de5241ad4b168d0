"""Assisted decoding of converted models: the tokens and logits of plain decoding, at a cost that does not grow with the
context.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from helpers.slow import slow_where
from helpers.small_mixers import MIXER_SPECS, random_model_with_mixers
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import StaticLayer

from surgery.core.errors import SurgeryError
from surgery.mixers import mixer_config
from surgery.mixers.softmax import SoftmaxAttention
from surgery.modeling.cache import MAX_RECORDED, record_past

NEW = 14
# Token 0 is suppressed: its embedding is zero, so that all logits after it may be equal.
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": NEW, "suppress_tokens": [0]}
GROWING = ("mlr", "global window", "bilinear", "window", "softmax")  # mixers whose state holds keys and values


@functools.cache
def model_with(name: str) -> Any:
    """Return a two-layer Llama in float64 with the mixer in both layers; bounded for MHLA, whose longest row is 64
    tokens.
    """
    return random_model_with_mixers("llama", mixer_config(MIXER_SPECS[name])).double().eval()


@functools.cache
def wide_model(name: str) -> Any:
    """Return such a model with a window of 400 tokens, longer than the slots that are copied at every call."""
    spec = {**MIXER_SPECS[name], **({"window": 400} if "window" in MIXER_SPECS[name] else {})}
    return random_model_with_mixers("llama", mixer_config(spec), max_position_embeddings=2048).double().eval()


def prompt(tokens: int = 12) -> torch.Tensor:
    """Return a prompt (1, tokens) that repeats itself, so that prompt lookup finds drafts."""
    piece = torch.randint(3, 96, (1, 4), generator=torch.Generator().manual_seed(1))
    return piece.repeat(1, -(-tokens // 4))[:, :tokens]


def assistants(model: Any) -> dict[str, Any]:
    """Return arguments of generate by kind of draft: from the text, almost right, and wrong as a rule."""
    kinds: dict[str, Any] = {"lookup": {"prompt_lookup_num_tokens": 5}}
    for name, noise in (("near", 0.02), ("wrong", 3.0)):
        torch.manual_seed(1)
        assistant = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in assistant.parameters():
                parameter.add_(noise * parameter.abs().mean() * torch.randn_like(parameter))
        assistant.generation_config.update(assistant_confidence_threshold=0.0, num_assistant_tokens=4)
        kinds[name] = {"assistant_model": assistant}
    return kinds


def full_logits(model: Any, ids: torch.Tensor, new: int) -> torch.Tensor:
    """Return the logits of the last `new` tokens from one forward without a cache, (new, vocabulary)."""
    with torch.no_grad():
        return model(ids, use_cache=False).logits[0, -new - 1 : -1]


# What the others have too: a recurrence behind a window, in chunks, or with other levels.
LIKE_OTHERS = (
    "heads, gates",
    "heads, window",
    "log-linear behind chunks",
    "log-linear mamba-2",
    "log-linear matrices",
    "log-linear strong",
    "mhla behind chunks",
    "tbm behind chunks",
    "toeplitz behind chunks",
)
SPECS = slow_where(lambda name: name in LIKE_OTHERS, MIXER_SPECS)


@pytest.mark.parametrize("name", SPECS)
def test_assisted_greedy_tokens_are_those_of_plain_decoding(name):
    """Also where the text ends inside a draft."""
    model, ids = model_with(name), prompt()
    plain = model.generate(ids, **GREEDY)
    best = full_logits(model, plain, NEW)[:, 1:].topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-9, "a tie would make the comparison meaningless"
    end = int(plain[0, ids.shape[1] + NEW // 2])
    ended = model.generate(ids, **{**GREEDY, "eos_token_id": end})
    for kind, arguments in assistants(model).items():
        assert torch.equal(model.generate(ids, **GREEDY, **arguments), plain), kind
        assert torch.equal(model.generate(ids, **{**GREEDY, "eos_token_id": end}, **arguments), ended), kind


@pytest.mark.parametrize("name", SPECS)
def test_assisted_samples_come_from_the_model_s_own_logits(name):
    model, ids = model_with(name), prompt()
    for kind, arguments in assistants(model).items():
        torch.manual_seed(3)
        options = {**GREEDY, "do_sample": True, "return_dict_in_generate": True, "output_logits": True}
        out = model.generate(ids, **options, **arguments)
        found, new = torch.cat(out.logits), out.sequences.shape[1] - ids.shape[1]
        expected = full_logits(model, out.sequences, new).float()
        assert (found[:new] - expected).abs().max() < 1e-4 * expected.abs().max(), kind


class AfterTokens(StoppingCriteria):
    """Ends the text at a length that the length of drafts is not limited by."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize(
    "name, kind", [("mlr", "lookup"), ("window", "wrong"), ("gated deltanet", "lookup"), ("ssd", "near")]
)
def test_drafts_may_be_longer_than_what_is_recorded_of_a_prompt(name, kind):
    long = MAX_RECORDED + 20
    model, ids = wide_model(name), prompt(200)
    criteria = StoppingCriteriaList([AfterTokens(ids.shape[1] + 4)])
    options = {**GREEDY, "max_new_tokens": 2 * long, "stopping_criteria": criteria}
    plain = model.generate(ids, **options)
    if kind == "lookup":
        found = model.generate(ids, **options, prompt_lookup_num_tokens=long)
    else:
        assistant = assistants(model)[kind]["assistant_model"]
        assistant.generation_config.num_assistant_tokens = long
        found = model.generate(ids, **options, assistant_model=assistant)
    assert torch.equal(found[:, : plain.shape[1]], plain)


@torch.no_grad()
@pytest.mark.parametrize("name", [*GROWING, "gated deltanet", "ssd"])
def test_removing_a_draft_costs_what_the_draft_has(name, monkeypatch):
    """Keys and values stay where they are, no score is computed; a recurrence takes in the accepted tokens of the draft
    again.
    """
    model, ids, long, draft, accepted = wide_model(name), prompt(680), 600, 8, 3
    cache = DynamicCache(config=model.config)
    record_past(cache, model)
    model(ids[:, :long], past_key_values=cache)
    cache.crop(0)
    model(ids[:, long : long + draft], past_key_values=cache)
    layer, mixer = cache.layers[0], model.model.layers[0].self_attn.mixer
    before = {n: t.untyped_storage().data_ptr() for n, t in layer.state.tensors.items()}
    mixed, mix = [], type(mixer).mix

    def counting(self, inputs, state=None):
        mixed.append(inputs.q_BHTK.shape[2])
        return mix(self, inputs, state)

    monkeypatch.setattr(type(mixer), "mix", counting)
    cache.crop(accepted - draft)
    assert sum(mixed) <= (0 if name in GROWING else 2 * accepted)  # two layers
    if name in GROWING:
        sizes = {n: t.numel() for n, t in layer.state.tensors.items()}
        after = {n: t.untyped_storage().data_ptr() for n, t in layer.state.tensors.items()}
        large = [n for n, size in sizes.items() if size > 300 * model.config.num_key_value_heads]
        assert large and all(before[n] == after[n] for n in large)
    monkeypatch.undo()
    rest = ids[:, long + accepted :]
    found = model(rest, past_key_values=cache).logits
    expected = model(ids, use_cache=False).logits[:, -rest.shape[1] :]
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("name", ["heads", "heads, gates", "heads, window"])
def test_softmax_heads_compute_no_scores_when_a_draft_is_removed(name, monkeypatch):
    model, ids = model_with(name), prompt(40)
    cache = DynamicCache(config=model.config)
    record_past(cache, model)
    model(ids[:, :30], past_key_values=cache)
    model(ids[:, 30:38], past_key_values=cache)
    with monkeypatch.context() as patch:
        patch.setattr(SoftmaxAttention, "mix", lambda *_: pytest.fail("scores of a rejected draft"))
        cache.crop(-5)
    found = model(ids[:, 33:], past_key_values=cache).logits
    expected = model(ids, use_cache=False).logits[:, 33:]
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()


@torch.no_grad()
def test_a_copied_cache_is_not_changed_by_removing_tokens():
    model, ids = wide_model("mlr"), prompt(640)
    cache = DynamicCache(config=model.config)
    record_past(cache, model)
    model(ids[:, :600], past_key_values=cache)
    cache.crop(0)
    model(ids[:, 600:610], past_key_values=cache)
    twin = copy.deepcopy(cache)
    cache.crop(-9)
    model(prompt(8).flip(1), past_key_values=cache)
    found = model(ids[:, 610:], past_key_values=twin).logits
    expected = model(ids, use_cache=False).logits[:, 610:]
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()


def test_a_static_cache_works_and_takes_drafts_where_transformers_crops_it():
    model, ids = model_with("gated deltanet"), prompt()
    plain = model.generate(ids, **GREEDY)
    drafts = {"prompt_lookup_num_tokens": 3, "cache_implementation": "static"}
    if hasattr(StaticLayer, "crop"):  # since transformers 5.24
        assert torch.equal(model.generate(ids, **GREEDY, **drafts), plain)
    else:
        with pytest.raises(ValueError, match="Static cache"):
            model.generate(ids, **GREEDY, **drafts)
    assert torch.equal(model.generate(ids, **GREEDY, cache_implementation="static"), plain)
    with pytest.raises(SurgeryError, match="cannot go back"):
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        cache.crop(-2)
