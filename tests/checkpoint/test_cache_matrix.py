"""Every cache of transformers with softmax layers beside mixers: the logits of each call are those of one forward
without a cache.

    mask {none, ones, left, right, middle} x attention {eager, sdpa} x cache {dynamic, static, one's own static,
    offloaded, quantized} x softmax in {the first layer, the middle one, the last, none} x calls {prefill, one token,
    several}

`make test` runs a sample; the tests marked slow run all of it, for every kind of mixer, and for families whose softmax
layers have windows.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers.slow import slow_where
from helpers.small_mixers import MIXER_SPECS, random_model_with_mixers
from transformers import CompileConfig, DynamicCache, QuantizedCache, StaticCache
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from surgery.mixers import mixer_config
from surgery.mixers.linear import LinearMixer
from surgery.modeling.cache import MixerCacheLayer

PIECES = (7, 1, 1, 4, 1, 2)  # the prompt, single tokens, several at once
TOKENS = sum(PIECES)
PADDING = {
    "none": None,
    "ones": None,
    "left": slice(0, 4),
    "right": slice(5, 7),
    "middle": slice(2, 4),
}  # of the prompt of row 1
SOFTMAX = {"first": 0, "middle": 1, "last": 2, "none": None}
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}
FULL, SLIDING = "full_attention", "sliding_attention"
# Name -> (family, changes of its config to three layers). Static layers of a window longer than the text have empty
# slots, as those without.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 3}),
    "gpt2": ("gpt2", {"n_layer": 3}),
    "short windows": ("mistral", {"num_hidden_layers": 3, "sliding_window": 6}),
    "long windows": ("mistral", {"num_hidden_layers": 3, "sliding_window": 64}),
    "two windows": ("gemma3", {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 6}),
    "one window": ("gemma3", {"num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL], "sliding_window": 6}),
}


@functools.cache
def hybrid(name: str, mixer: str, softmax: str) -> Any:
    """Return a model of three layers, with softmax kept in one of them or in none."""
    family, changes = MODELS[name]
    layers = [i for i in range(3) if i != SOFTMAX[softmax]]
    return random_model_with_mixers(family, mixer_config(MIXER_SPECS[mixer]), layers, **changes)


def tokens_and_mask(padding: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    ids = torch.randint(3, 96, (2, TOKENS), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    if PADDING[padding] is not None:
        mask[1, PADDING[padding]] = 0
    return ids, None if padding == "none" else mask


class LosslessQuantizer:
    """Stands in for the quantizer of a cache, so that what remains is its bookkeeping."""

    @staticmethod
    def quantize(tensor, *args, **kwargs):
        return tensor, 1.0

    @staticmethod
    def dequantize(stored):
        return stored[0]


def quantized_backend() -> str | None:
    """Return a backend of QuantizedCache that is installed; newer versions of transformers have fp8 of their own."""
    if is_optimum_quanto_available():
        return "quanto"
    if is_hqq_available():
        return "hqq"
    return "fp8" if "fp8" in (QuantizedCache.__doc__ or "") else None


def make_cache(model: Any, kind: str) -> Any:
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=TOKENS + 3)
    if kind == "static, as long as the text":
        return StaticCache(config=model.config, max_cache_len=TOKENS)
    if kind == "quantized":
        cache = QuantizedCache(backend=quantized_backend(), config=model.config)
        for layer in cache.layers:
            layer._quantize, layer._dequantize = LosslessQuantizer.quantize, LosslessQuantizer.dequantize
        return cache
    return DynamicCache(config=model.config, **({"offloading": True} if kind == "offloaded" else {}))


def error(found: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor | None) -> float:
    """Return the largest difference of logits (B, T, V) at real tokens, over the largest logit."""
    real = slice(None) if mask is None else mask.bool()
    return float((found - expected)[real].abs().max() / expected[real].abs().max())


@torch.no_grad()
def error_in_pieces(model: Any, kind: str, padding: str) -> float:
    """Return the error of calls of the model with a cache of one's own."""
    ids, mask = tokens_and_mask(padding)
    cache, outs, stop = make_cache(model, kind), [], 0
    for piece in PIECES:
        start, stop = stop, stop + piece
        known = None if mask is None else mask[:, :stop]
        outs.append(model(ids[:, start:stop], attention_mask=known, past_key_values=cache).logits)
    return error(torch.cat(outs, 1), model(ids, attention_mask=mask, use_cache=False).logits, mask)


@torch.no_grad()
def error_of_generate(model: Any, kind: str, padding: str, **options: Any) -> float:
    """Return the error of the logits of generate(), which makes the cache."""
    ids, mask = tokens_and_mask(padding)
    ids, mask = ids[:, : PIECES[0]], None if mask is None else mask[:, : PIECES[0]]
    new = {"max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
    done = model.generate(ids, attention_mask=mask, cache_implementation=kind, **GREEDY, **new, **options)
    mask = torch.ones_like(ids) if mask is None else mask
    whole = torch.cat([mask, torch.ones_like(done.sequences[:, PIECES[0] :])], 1)[:, :-1]
    places = (whole.cumsum(1) - 1).clamp_min(0)
    expected = model(done.sequences[:, :-1], attention_mask=whole, position_ids=places, use_cache=False).logits
    return error(torch.stack(done.logits, 1), expected[:, PIECES[0] - 1 :], whole[:, PIECES[0] - 1 :])


KINDS = ("dynamic", "static", "static, as long as the text", "offloaded", "quantized")
GENERATED = ("dynamic", "static", "offloaded", "offloaded_static")


def is_available(name: str, kind: str, softmax: str) -> bool:
    """Return whether a cache can be made.

    Softmax layers are offloaded from a GPU only, and torch built for one makes no stream without it. transformers does
    not quantize layers with windows.
    """
    if "offloaded" in kind:
        return torch.cuda.is_available() or (softmax == "none" and torch.version.cuda is None)
    return kind != "quantized" or (quantized_backend() is not None and "sliding_window" not in MODELS[name][1])


def check(
    name: str, mixer: str, attention: str, softmax: str, kinds=KINDS, generated=GENERATED, paddings=tuple(PADDING)
):
    """Compare every cache of `kinds` in calls of the model, and of `generated` in generate(), which prefills at once
    and in chunks.
    """
    model, found = hybrid(name, mixer, softmax), {}
    model.set_attn_implementation(attention)
    for kind in (k for k in kinds if is_available(name, k, softmax)):
        for padding in PADDING:
            found[f"{kind}, {padding}"] = error_in_pieces(model, kind, padding)
    for kind in (k for k in generated if is_available(name, k, softmax)):
        for padding in (p for p in paddings if p != "right"):  # generate asks for padding on the left
            for chunks in ({}, {"prefill_chunk_size": 3}):
                found[f"generate, {kind}, {padding}, {chunks}"] = error_of_generate(model, kind, padding, **chunks)
    assert not {case: far for case, far in found.items() if not far < 1e-5}


CASES = [(attention, softmax) for attention in ("eager", "sdpa") for softmax in SOFTMAX]
MIXERS = ("gated deltanet", "log-linear", "mhla", "mlr", "window", "bilinear", "softmax", "heads")


@pytest.mark.parametrize(
    "attention, softmax", slow_where(lambda *case: case[0] == "eager" and case[1] != "first", CASES)
)
def test_a_cache_gives_the_logits_of_one_forward(attention, softmax):
    kinds, generated = ("dynamic", "static", "quantized"), ("static",)
    check("llama", "gated deltanet", attention, softmax, kinds, generated, ("none", "left"))


@pytest.mark.parametrize("name", ["long windows", "two windows"])
def test_a_static_cache_of_layers_with_windows_gives_the_logits_of_one_forward(name):
    """With a mixer in the place of a layer with a window, beside others of them."""
    for softmax in ("first", "last"):
        check(name, "log-linear", "sdpa", softmax, ("static",), ("static",), ("none",))


@pytest.mark.slow
@pytest.mark.parametrize("attention, softmax", CASES)
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_cache_gives_the_logits_of_one_forward(mixer, attention, softmax):
    """Mixers of every kind of state: of one size, of a size that grows, with keys and values."""
    check("llama", mixer, attention, softmax)


@pytest.mark.slow
@pytest.mark.parametrize("attention, softmax", CASES)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_every_cache_of_other_families_gives_the_logits_of_one_forward(name, attention, softmax):
    """Learned positions; windows in all layers, or in some."""
    check(name, "gated deltanet", attention, softmax)


@torch.no_grad()
def test_masks_are_made_for_empty_slots_only():
    """A mask for every token beside static layers; none in a dynamic cache, and none where mixers have taken all
    layers.
    """
    for softmax in SOFTMAX:
        model, ids = hybrid("llama", "gated deltanet", softmax), tokens_and_mask("none")[0]
        for kind in ("dynamic", "static"):
            cache = make_cache(model, kind)
            model(ids[:, :7], past_key_values=cache)
            assert cache.is_compileable == (kind == "static" and softmax != "none")
            ours = [layer for layer in cache.layers if isinstance(layer, MixerCacheLayer)]
            columns = TOKENS + 3 if cache.is_compileable else 8
            assert {layer.get_mask_sizes(1) for layer in ours} == {(columns, 0)}


@torch.no_grad()
@pytest.mark.parametrize("padding", ["none", "left"])
def test_mixers_get_a_mask_only_if_a_token_of_the_call_is_padding(padding, monkeypatch):
    """Steps with a mask are slower, and a static cache has one in every step."""
    model, (ids, mask) = hybrid("llama", "gated deltanet", "first"), tokens_and_mask(padding)
    model.set_attn_implementation("sdpa")
    masked, mix = [], LinearMixer.mix
    monkeypatch.setattr(
        LinearMixer,
        "mix",
        lambda self, inputs, state: masked.append(inputs.valid_BT is not None) or mix(self, inputs, state),
    )
    cache = make_cache(model, "static")
    for start, stop in ((0, 7), (7, 8), (8, 12)):
        model(ids[:, start:stop], attention_mask=None if mask is None else mask[:, :stop], past_key_values=cache)
    assert masked == [padding == "left"] * 2 + [False] * 4


def test_generate_does_not_compile_the_steps_of_mixers():
    """Not by itself on a GPU, and not when it is asked to: their states grow, and each step would be compiled again."""
    options = {"max_new_tokens": 3, "cache_implementation": "static", **GREEDY, "disable_compile": False}
    asked = CompileConfig(backend="none that exists")
    asked._compile_all_devices = True
    for softmax in ("first", "none"):
        model, ids = hybrid("llama", "gated deltanet", softmax), tokens_and_mask("none")[0]
        with pytest.warns(UserWarning, match="compile_config is not used"):
            found = model.generate(ids, compile_config=asked, **options)
        assert torch.equal(found, model.generate(ids, max_new_tokens=3, **GREEDY))


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("softmax", ["first", "none"])
def test_a_compiled_model_with_a_static_cache_gives_the_logits_of_one_forward(softmax):
    model, (ids, _) = hybrid("llama", "gated deltanet", softmax), tokens_and_mask("none")
    model.set_attn_implementation("sdpa")
    expected = model(ids, use_cache=False).logits
    torch.compiler.reset()
    compiled, cache, outs, stop = torch.compile(model, backend="eager"), make_cache(model, "static"), [], 0
    for piece in PIECES:
        start, stop = stop, stop + piece
        call = compiled if start else model
        outs.append(call(ids[:, start:stop], past_key_values=cache).logits)
    assert error(torch.cat(outs, 1), expected, None) < 1e-5
