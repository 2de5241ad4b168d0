"""`generate()` with mixers: decoding with a cache gives the logits of one forward without a cache."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from helpers.small import DECODER, GENERATIVE_FAMILIES, tiny_inputs
from helpers.small_mixers import (
    DecayedConfig,
    DecayedMixer,
    ExactConfig,
    random_model,
    random_model_with_mixers,
    register_test_mixers,
)
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from surgery.architectures.attention import attention_paths
from surgery.architectures.dry_run import CACHE_ARGUMENTS
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, mixer_config
from surgery.mixers.linear_config import LinearAttention
from surgery.modeling.attention import install
from surgery.modeling.cache import MAX_RECORDED, MixerCacheLayer, mixer_modules, record_past
from surgery.modeling.cache_io import load_cache, save_cache
from surgery.modeling.padding_positions import mask_positions

FAMILIES = [f for f in GENERATIVE_FAMILIES if not f.startswith("t5") and f != "llama-tied"]
HYBRIDS = [("mistral", 0), ("mistral", 1), ("gemma2", 0), ("gemma2", 1), ("gemma3", 1), ("qwen3", 0), ("gpt2", 1)]
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module", autouse=True)
def register_mixers():
    with register_test_mixers():
        yield


def prompts(rows: int = 2, length: int = 10, seed: int = 3) -> torch.Tensor:
    return tiny_inputs("llama", rows, length, seed)["input_ids"]


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def decode(model, ids, new: int, **options):
    """(tokens, logits of the new ones)"""
    done = model.generate(
        ids, max_new_tokens=new, return_dict_in_generate=True, output_logits=True, **{**GREEDY, **options}
    )
    return done.sequences, torch.stack(done.logits, dim=1)


@torch.no_grad()
def whole(model, tokens, new: int) -> torch.Tensor:
    """Logits of the last `new` tokens from one forward without a cache."""
    return model(tokens[:, :-1], use_cache=False).logits[:, -new:]


def mixed_model(family: str, mixer, layers=None):
    changes = {"n_positions": 256} if family == "gpt2" else {"sliding_window": 8} if family == "mistral" else {}
    return random_model_with_mixers(family, mixer, layers, **changes)


@pytest.fixture(scope="module")
def llama():
    return mixed_model("llama", DecayedConfig())


def layers_of(cache) -> list[str]:
    return [type(layer).__name__ for layer in cache.layers]


# -- step by step = at once ------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mixer", [ExactConfig(), DecayedConfig()], ids=["exact", "decayed"])
def test_greedy_is_the_argmax_of_the_whole_forward(family, mixer):
    model, new = mixed_model(family, mixer), 12
    tokens, logits = decode(model, prompts(), new)
    assert far(logits, whole(model, tokens, new)) < 1e-5
    assert torch.equal(tokens[:, -new:], logits.argmax(-1))


@pytest.mark.parametrize("family, layer", HYBRIDS)
def test_hybrids_with_sliding_and_full_softmax_layers(family, layer):
    model, new = mixed_model(family, DecayedConfig(), [layer]), 12
    tokens, logits = decode(model, prompts(), new)
    assert far(logits, whole(model, tokens, new)) < 1e-5


def test_two_hundred_tokens_and_a_sabotaged_state(llama, monkeypatch):
    """On a random model tokens may agree by luck; logits do not, if one step's state is a little off."""
    tokens, logits = decode(llama, prompts(), 200)
    expected = whole(llama, tokens, 200)
    assert far(logits, expected) < 1e-5 and torch.equal(tokens[:, -200:], expected.argmax(-1))
    assert len(set(tokens[0].tolist())) > 10
    honest, calls = DecayedMixer.mix, []

    def perturb_state(self, inputs, state=None):
        out, after = honest(self, inputs, state)
        calls.append(1)
        if after is not None and len(calls) == 21:
            after.tensors["sums"] = after.tensors["sums"] * 0.99
        return out, after

    monkeypatch.setattr(DecayedMixer, "mix", perturb_state)
    tokens, logits = decode(llama, prompts(), 20)
    assert far(logits, whole(llama, tokens, 20)) > 1e-4


def test_the_cache_stays_small(llama):
    done = llama.generate(prompts(), max_new_tokens=30, return_dict_in_generate=True, **GREEDY)
    cache = done.past_key_values
    assert layers_of(cache) == ["MixerCacheLayer"] * 2
    assert cache.get_seq_length() == 39 and cache.layers[1].state.seen_B.tolist() == [39, 39]
    assert cache.layers[0].nbytes() == 2 * 2 * 8 * 8 * 4


# -- rows ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family, layers", [("llama", None), ("mistral", [0]), ("mistral", [1]), ("gemma3", [1]), ("gpt2", None), ("gpt_neox", None)])  # fmt: skip
def test_a_left_padded_row_is_as_alone(family, layers, attention):
    model = mixed_model(family, DecayedConfig(), layers)
    model.set_attn_implementation(attention)
    ids = prompts(3, 12)
    mask = torch.ones_like(ids)
    mask[1, :5], mask[2, :11] = 0, 0
    _, together = decode(model, ids.masked_fill(mask == 0, 0), 8, attention_mask=mask)
    for row, pad in ((0, 0), (1, 5), (2, 11)):
        assert far(together[row], decode(model, ids[row : row + 1, pad:], 8)[1][0]) < 1e-5


@pytest.mark.parametrize("layers", [None, [0]])
def test_beams_with_and_without_a_cache(layers):
    model = mixed_model("llama", DecayedConfig(), layers)
    options = {**GREEDY, "num_beams": 3, "max_new_tokens": 10, "num_return_sequences": 3}
    assert torch.equal(model.generate(prompts(), **options), model.generate(prompts(), use_cache=False, **options))


def test_sampling_with_and_without_a_cache(llama):
    def sample(**options):
        torch.manual_seed(5)
        return llama.generate(
            prompts(), max_new_tokens=16, do_sample=True, top_k=20, eos_token_id=None, pad_token_id=0, **options
        )

    assert torch.equal(sample(), sample(use_cache=False))


def test_rows_repeated_and_selected(llama):
    ids, cache = prompts(2, 9), DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(ids, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        found = llama(prompts(2, 3, seed=8), past_key_values=cache).logits
        expected = llama(torch.cat([ids[[1, 0]], prompts(2, 3, seed=8)], dim=1)).logits[:, -3:]
    assert far(found, expected) < 1e-5 and cache.layers[0].batch_size == 2


# -- pieces ----------------------------------------------------------------------------------------
@torch.no_grad()
@pytest.mark.parametrize("family, layers", [("llama", None), ("gemma2", [0]), ("mistral", [1]), ("gpt2", [0])])
@pytest.mark.parametrize("make", ["none", "empty", "config"])
def test_pieces_of_many_lengths(family, layers, make):
    """Chat turns: the cache is made by the model, by the user, or by the user from the config."""
    model, ids = mixed_model(family, DecayedConfig(), layers), prompts(2, 24)
    cache = {"none": lambda: None, "empty": DynamicCache, "config": lambda: DynamicCache(config=model.config)}[make]()
    if make == "empty" and family != "llama" and family != "gpt2":
        pytest.skip("a sliding layer's cache is made from the config")
    outs, start = [], 0
    for length in (7, 1, 1, 9, 6):
        done = model(ids[:, start : start + length], past_key_values=cache, use_cache=True)
        cache, start = done.past_key_values, start + length
        outs.append(done.logits)
    assert far(torch.cat(outs, 1), model(ids, use_cache=False).logits) < 1e-5
    assert layers_of(cache).count("MixerCacheLayer") == len(list(mixer_modules(model)))


@torch.no_grad()
def test_left_padded_pieces(llama):
    ids = prompts(2, 14)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    alone = llama(ids[1:, 6:], use_cache=False).logits[0]
    cache = DynamicCache(config=llama.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    outs = [
        llama(ids[:, a:b], attention_mask=mask[:, :b], position_ids=positions[:, a:b], past_key_values=cache).logits
        for a, b in ((0, 4), (4, 9), (9, 10), (10, 14))
    ]
    assert far(torch.cat(outs, 1)[1, 6:], alone) < 1e-5


POSITIONAL = {  # mixers whose output depends on positions themselves, not only on distances
    "hedgehog": LinearAttention(features="hedgehog", normalise=True, window=3, sinks=1),
    "toeplitz blocks": LinearAttention(mask={"name": "toeplitz_blocks", "block": 4, "components": 2}, features="elu"),
}


@torch.no_grad()
@pytest.mark.parametrize("config", POSITIONAL.values(), ids=POSITIONAL)
@pytest.mark.parametrize("family, layers", [("llama", None), ("qwen3", [1]), ("gpt_neox", None)])
def test_left_padding_without_positions(family, layers, config):
    """A forward call with a mask alone gives what each row has alone, in one piece and in several, and of
    embeddings.
    """
    model, ids = mixed_model(family, config, layers), prompts(3, 14)
    mask = torch.ones_like(ids)
    mask[1, :6], mask[2, :13] = 0, 0
    pieces = []
    cache = DynamicCache(config=model.config)
    for a, b in ((0, 4), (4, 9), (9, 10), (10, 14)):
        pieces.append(model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits)
    embedded = model.get_input_embeddings()(ids)
    for found in (
        model(ids, attention_mask=mask, use_cache=False).logits,
        model(inputs_embeds=embedded, attention_mask=mask.bool(), use_cache=False).logits,
        model.base_model(ids, mask, use_cache=False).last_hidden_state @ model.get_output_embeddings().weight.T,
        torch.cat(pieces, 1),
    ):
        for row, pad in ((0, 0), (1, 6), (2, 13)):
            assert far(found[row, pad:], model(ids[row : row + 1, pad:], use_cache=False).logits[0]) < 1e-5


@torch.no_grad()
def test_left_padding_of_a_rotary_encoder_without_positions():
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    plain = {k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "head_dim")}
    config = ModernBertConfig(**plain, local_attention=8, cls_token_id=1, sep_token_id=2, initializer_range=0.3)
    model, ids = ModernBertForMaskedLM(config).eval(), prompts(2, 12)
    install(model, dict.fromkeys(attention_paths(model), LinearAttention(features="hedgehog", normalise=True)))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    found = model(input_ids=ids * mask, attention_mask=mask).logits
    assert far(found[0], model(input_ids=ids[:1]).logits[0]) < 1e-5
    assert far(found[1, 5:], model(input_ids=ids[1:, 5:]).logits[0]) < 1e-5


@torch.no_grad()
def test_padding_elsewhere_and_positions_of_the_caller_are_left_alone(llama):
    ids, mask = prompts(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, 9:], mask[1, 4:6] = 0, 0
    places = torch.arange(12).expand(2, -1)
    expected = llama(ids, attention_mask=mask, position_ids=places).logits
    assert torch.equal(llama(ids, attention_mask=mask).logits, expected)
    mask[1, :6] = 0
    assert mask_positions(mask, 3).tolist() == [[9, 10, 11], [3, 4, 5]]
    shifted = llama(ids, attention_mask=mask, position_ids=places + 50).logits
    assert far(shifted[1, 6:], llama(ids[1:, 6:]).logits[0]) < 1e-4  # distances are the same


def test_turns_of_a_chat_and_prefill_in_chunks(llama):
    """generate() goes on from the cache of the last call; and prefills piece by piece."""
    first, cache = decode(llama, prompts(1), 6)[0], DynamicCache(config=llama.config)
    llama.generate(prompts(1), max_new_tokens=6, past_key_values=cache, **GREEDY)
    turn = torch.cat([first, prompts(1, 5, seed=9)], dim=1)
    assert far(decode(llama, turn, 6, past_key_values=cache)[1], decode(llama, turn, 6)[1]) < 1e-5
    assert far(decode(llama, turn, 6, prefill_chunk_size=4)[1], decode(llama, turn, 6)[1]) < 1e-5


@pytest.mark.parametrize("kind", ["static", "offloaded", "dynamic"])
@pytest.mark.parametrize("family, layers", [("llama", None), ("llama", [0]), ("llama", [1]), ("mistral", [0])])
def test_cache_implementations(family, layers, kind):
    built_for_cuda = torch.version.cuda is not None
    if kind == "offloaded" and not torch.cuda.is_available() and (layers or built_for_cuda):
        pytest.skip("softmax layers are offloaded from a GPU only, and torch built for one makes no stream without it")
    model, ids = mixed_model(family, DecayedConfig(), layers), prompts(2, 11)
    if kind == "offloaded" and torch.cuda.is_available():
        model, ids = model.to("cuda"), ids.to("cuda")
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    found = decode(model, ids, 8, cache_implementation=kind, attention_mask=mask)[1]
    assert far(found, decode(model, ids, 8, attention_mask=mask)[1]) < 1e-5


@torch.no_grad()
def test_a_static_cache_of_one_s_own(llama):
    cache, ids = StaticCache(config=llama.config, max_cache_len=32), prompts(2, 12)
    outs = [llama(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 7), (7, 8), (8, 12))]
    assert far(torch.cat(outs, 1), llama(ids, use_cache=False).logits) < 1e-5


# -- going back ------------------------------------------------------------------------------------
@pytest.mark.parametrize("family, layers", [("llama", None), ("llama", [0]), ("gemma2", [0]), ("mistral", [1])])
def test_candidates_are_taken_back(family, layers):
    """Prompt lookup and an assistant that is often wrong: tokens and logits of greedy search."""
    if family == "mistral" and not hasattr(DynamicCache, "activate_past_recording"):
        pytest.skip("this transformers cannot crop its own sliding layers")
    model = mixed_model(family, DecayedConfig(), layers)
    ids, end = prompts(1, 6).repeat(1, 4), {"eos_token_id": 1}
    expected, logits = decode(model, ids, 24, **end)
    found, other = decode(model, ids, 24, prompt_lookup_num_tokens=5, **end)
    same_start(found, expected, other, logits)
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.02 * parameter.abs().mean() * torch.randn_like(parameter))
    found, other = decode(model, ids, 24, assistant_model=assistant, **end)
    same_start(found, expected, other, logits)


@torch.no_grad()
@pytest.mark.parametrize("rope", ["window", "both"])
def test_candidates_of_a_mixer_that_rotates_itself_are_removed(rope):
    """Mixers with `rope: window` or `both` get the rotation as an input, which a recording cache cuts like the
    tokens.
    """
    mixer = LinearAttention(mask="gates", scores="delta", rope=rope, window=6, sinks=2)
    model, ids = mixed_model("llama", mixer), prompts(2, MAX_RECORDED + 40)
    cache = DynamicCache(config=model.config)
    record_past(cache, model)
    model(ids[:, :-5], past_key_values=cache)
    cache.crop(-7)
    assert far(model(ids[:, -12:], past_key_values=cache).logits, model(ids).logits[:, -12:]) < 1e-5
    ids = prompts(1, 6).repeat(1, 16)  # longer than what is recorded
    expected, logits = decode(model, ids, 12)
    found, other = decode(model, ids, 12, prompt_lookup_num_tokens=5)
    same_start(found, expected, other, logits)


def same_start(found, expected, other, logits) -> None:
    """Some versions of the library write past the length asked for."""
    assert torch.equal(found[:, : expected.shape[1]], expected)
    assert far(other[:, : logits.shape[1]], logits) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("long, back", [(9, 3), (MAX_RECORDED + 40, 7), (MAX_RECORDED + 40, MAX_RECORDED)])
def test_crop_is_exact(llama, long, back):
    ids, cache = prompts(2, long + 6), DynamicCache(config=llama.config)
    llama(ids[:, :2], past_key_values=cache)
    record_past(cache, llama)
    llama(ids[:, 2:long], past_key_values=cache)
    cache.crop(-back)
    assert cache.get_seq_length() == long - back
    stay = long - back
    assert far(llama(ids[:, stay:], past_key_values=cache).logits, llama(ids).logits[:, stay:]) < 1e-5


@torch.no_grad()
def test_crop_over_several_calls(llama):
    """An assistant writes tokens one by one, many more than are recorded at once, then takes some back."""
    ids, cache = prompts(1, 4 * MAX_RECORDED), DynamicCache(config=llama.config)
    record_past(cache, llama)
    for t in range(3 * MAX_RECORDED):
        llama(ids[:, t : t + 1], past_key_values=cache)
    assert sum(i.q_BHTK.shape[2] for i in cache.layers[0]._since) <= 2 * MAX_RECORDED + 1
    cache.crop(-MAX_RECORDED)
    expected = llama(ids).logits[:, 2 * MAX_RECORDED :]
    assert far(llama(ids[:, 2 * MAX_RECORDED :], past_key_values=cache).logits, expected) < 1e-5


@torch.no_grad()
def test_what_was_not_recorded_cannot_be_taken_back(llama):
    cache = DynamicCache(config=llama.config)
    llama(prompts(1, 9), past_key_values=cache)
    with pytest.raises(SurgeryError, match=r"cannot go back 2 tokens: it recorded 0"):
        cache.crop(-2)
    cache.crop(0)
    cache.crop(-9)
    assert cache.get_seq_length() == 0
    assert llama(prompts(1, 9), past_key_values=cache).logits.shape[1] == 9


# -- keeping a state -------------------------------------------------------------------------------
@torch.no_grad()
@pytest.mark.parametrize("family, layers", [("llama", None), ("llama", [1]), ("gemma2", [1]), ("mistral", [0])])
def test_a_saved_state_goes_on_as_the_live_one(family, layers, tmp_path):
    model, ids = mixed_model(family, DecayedConfig(), layers), prompts(2, 30)
    cache = DynamicCache(config=model.config)
    model(ids[:, :19], past_key_values=cache)
    save_cache(cache, tmp_path / "state.safetensors")
    again = load_cache(tmp_path / "state.safetensors", model)
    assert layers_of(again) == layers_of(cache) and again.get_seq_length() == 19
    for a, b in ((19, 20), (20, 30)):
        assert torch.equal(
            model(ids[:, a:b], past_key_values=again).logits, model(ids[:, a:b], past_key_values=cache).logits
        )


WINDOW = {"mixer": "linear", "mask": "hierarchical", "scores": "delta", "window": 5, "sinks": 2}


@torch.no_grad()
@pytest.mark.parametrize("seen", [3, 5, 6, 19])
def test_a_saved_window_is_in_order_of_position(seen, tmp_path):
    """As it was before states held rings, so that files go either way. Rows may have different lengths."""
    model, ids = mixed_model("llama", mixer_config(WINDOW)), prompts(2, 30)
    padding = torch.ones_like(ids)
    padding[1, :2] = 0
    cache, path = DynamicCache(config=model.config), tmp_path / "state.safetensors"
    model(ids[:, :seen], attention_mask=padding[:, :seen], past_key_values=cache)
    save_cache(cache, path)
    with safe_open(path, "pt") as file:
        stored = {name: file.get_tensor(f"0.{name}") for name in ("ring.k", "seen_B")}
    live = cache.layers[0].state.tensors["ring.k"]
    assert stored["ring.k"].shape[1] == 5 and live.shape[1] == 6 and stored["seen_B"].tolist() == [seen, seen - 2]
    for row, count in enumerate(stored["seen_B"].tolist()):
        for i, position in enumerate(range(count - 5, count)):
            assert torch.equal(stored["ring.k"][row, i], live[row, position % 6])
    again = load_cache(path, model)
    for a, b in ((seen, seen + 1), (seen + 1, 30)):
        assert torch.equal(
            model(ids[:, a:b], attention_mask=padding[:, :b], past_key_values=again).logits,
            model(ids[:, a:b], attention_mask=padding[:, :b], past_key_values=cache).logits,
        )


@torch.no_grad()
def test_a_saved_window_of_other_sizes_is_refused(tmp_path):
    model = mixed_model("llama", mixer_config(WINDOW))
    cache, path = DynamicCache(config=model.config), tmp_path / "state.safetensors"
    model(prompts(2, 9), past_key_values=cache)
    save_cache(cache, path)
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, change, words in (
        ("0.ring.k", lambda t: t[:, 1:], r"ring.k must have the shape \(2, 5, "),
        ("0.ring.beta", lambda t: t[:1], r"ring.beta must have the shape \(2, 5, "),
        ("1.sink.v", lambda t: t.repeat(1, 2, 1, 1), r"layer 1 .* sink.v must have the shape \(2, 2, "),
        ("0.seen_B", lambda t: t - 10, r"seen_B must be int64, from 0 to 9 \(got \[-1, -1\]\)"),
        ("0.seen_B", lambda t: t + 1, r"from 0 to 9 \(got \[10, 10\]\)"),
        ("0.seen_B", lambda t: t.float(), "must be int64"),
    ):
        save_file({**tensors, name: change(tensors[name]).contiguous()}, path, metadata)
        with pytest.raises(SurgeryError, match=words):
            load_cache(path, model)


@torch.no_grad()
def test_a_state_of_other_weights_is_refused(llama, tmp_path):
    """Of any layer, changed a little; of other options; but not of the same weights in bfloat16, elsewhere in memory or
    in a model with a head.
    """
    cache, path = DynamicCache(config=llama.config), tmp_path / "state"
    llama(prompts(1, 4), past_key_values=cache)
    save_cache(cache, path)
    save_cache(copy.deepcopy(cache), tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    for same in (llama, copy.deepcopy(llama), copy.deepcopy(llama).bfloat16(), llama.model):
        again = load_cache(path, same)
        assert again.get_seq_length() == 4
        save_cache(again, tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == path.read_bytes()
    changed = copy.deepcopy(llama)
    changed.lm_head.weight.mul_(2)
    assert load_cache(path, changed).get_seq_length() == 4  # no state depends on it
    for name in (
        "embed_tokens.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.1.self_attn.mixer.gate.weight",
        "layers.1.self_attn.mixer.rate_G",
    ):
        changed = copy.deepcopy(llama)
        changed.model.get_parameter(name).mul_(1.01)
        with pytest.raises(SurgeryError, match="filled by a model with other weights or options than this LlamaModel"):
            load_cache(path, changed)
    for name, place in (("embed_tokens.weight", (13, 7)), ("layers.1.self_attn.k_proj.weight", (slice(None), 5))):
        changed = copy.deepcopy(llama)  # one value, or one column, that no sample of a few values would meet
        changed.model.get_parameter(name)[place] += 1
        with pytest.raises(SurgeryError, match="other weights or options"):
            load_cache(path, changed)
    changed = copy.deepcopy(llama)
    changed.config.rms_norm_eps = 0.1
    with pytest.raises(SurgeryError, match="other weights or options"):
        load_cache(path, changed)


@torch.no_grad()
def test_a_state_of_unknown_weights_is_loaded_with_a_warning(llama, tmp_path):
    """Files of earlier versions, and caches that do not know their model."""
    cache, path = DynamicCache(config=llama.config), tmp_path / "state"
    llama(prompts(1, 4), past_key_values=cache)
    save_cache(cache, path)
    with safe_open(path, "pt") as file:
        layers, tensors = json.loads(file.metadata()["surgery"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert len(layers[0].pop("decoder")) == 64
    save_file(tensors, path, {"surgery": json.dumps(layers)})
    save_cache(pickle.loads(pickle.dumps(cache)), tmp_path / "unpickled")
    for each in (path, tmp_path / "unpickled"):
        with pytest.warns(UserWarning, match="names no weights, so it may be of another model"):
            assert load_cache(each, llama).get_seq_length() == 4
    for damaged in ("x", 7, ["x"]):
        layers[0]["decoder"] = damaged
        save_file(tensors, path, {"surgery": json.dumps(layers)})
        with pytest.raises(SurgeryError, match="digest of the decoder is damaged"):
            load_cache(path, llama)


@torch.no_grad()
def test_a_state_of_another_model_is_refused(llama, tmp_path):
    cache = DynamicCache(config=llama.config)
    llama(prompts(1, 4), past_key_values=cache)
    save_cache(cache, tmp_path / "state")
    with pytest.raises(SurgeryError, match=r"was saved by .*6.* here .*half_life=3"):
        load_cache(tmp_path / "state", mixed_model("llama", DecayedConfig(half_life=3)))
    with pytest.raises(SurgeryError, match="layer 1 of this cache holds the state of"):
        load_cache(tmp_path / "state", mixed_model("llama", DecayedConfig(), [0]))
    with pytest.raises(SurgeryError, match="StaticLayer"):
        save_cache(StaticCache(config=llama.config, max_cache_len=8), tmp_path / "other")
    (tmp_path / "nonsense").write_bytes(b"nonsense")
    with pytest.raises(SurgeryError, match="nonsense is not a saved cache"):
        load_cache(tmp_path / "nonsense", llama)


@torch.no_grad()
def test_a_cache_is_copied_and_pickled_without_the_model(llama):
    """A shared prompt: copies of its cache go their own ways."""
    cache, ids = DynamicCache(config=llama.config), prompts(1, 12)
    record_past(cache, llama)
    llama(ids[:, :8], past_key_values=cache)
    twin = copy.deepcopy(cache)
    assert len(pickle.dumps(cache.layers[0])) < 20_000
    llama(prompts(1, 5, seed=11), past_key_values=cache)
    assert far(llama(ids[:, 8:], past_key_values=twin).logits, llama(ids).logits[:, 8:]) < 1e-5


# -- refusals --------------------------------------------------------------------------------------
@torch.no_grad()
def test_caches_that_cannot_serve(llama):
    cache = DynamicCache(config=llama.config)
    random_model("llama")(prompts(1, 5), past_key_values=cache)
    with pytest.raises(SurgeryError, match="layer 0 of this cache holds keys and values of 5 tokens"):
        llama(prompts(1, 5), past_key_values=cache)
    cache = DynamicCache(config=llama.config)
    llama(prompts(1, 5), past_key_values=cache)
    with pytest.raises(SurgeryError, match="filled by a batch of 1 rows and is now given 2"):
        llama(prompts(2, 5), past_key_values=cache)
    with pytest.raises(SurgeryError, match="belongs to the converted model"):
        random_model("llama")(prompts(1, 5), past_key_values=cache)


def test_continuous_batching_is_refused(llama):
    with pytest.raises(SurgeryError, match="continuous batching"):
        llama.generate_batch(prompts(2).tolist())
    with pytest.raises(SurgeryError, match="continuous batching"):
        llama.generate(prompts(2), cache_implementation="paged", **GREEDY)
    pages, places = PagedAttentionCache.__new__(PagedAttentionCache), torch.arange(10)[None]
    for others in ({}, {"cu_seq_lens_q": torch.tensor([0, 10], dtype=torch.int32)}):
        with pytest.raises(SurgeryError, match="continuous batching"):  # as its manager calls a model
            llama(prompts(1), position_ids=places, cache=pages, use_cache=False, **others)
        with pytest.raises(SurgeryError, match="continuous batching"):  # whatever the argument's name
            llama(prompts(1), position_ids=places, pages=pages, use_cache=False, **others)
    with pytest.raises(SurgeryError, match="called with 'cu_seq_lens_q'"):
        llama(prompts(1), position_ids=places, use_cache=False, **others)


@torch.no_grad()
def test_a_cache_is_known_by_what_it_is(llama):
    """Models of transformers up to 5.23 pass `past_key_values` to attention, later ones `cache`; what a name does not
    promise is not read.
    """
    attention, ids = llama.model.layers[0].self_attn, prompts(2, 7)
    x_BTD = llama.get_input_embeddings()(ids)
    rope = llama.model.rotary_emb(x_BTD, torch.arange(7)[None])
    own = next(name for name in CACHE_ARGUMENTS if name in attention.arguments)
    expected = attention(x_BTD, position_embeddings=rope, attention_mask=None, **{own: None})[0]
    for name in {own, "past_key_values"}:
        cache = DynamicCache(config=llama.config)
        assert torch.equal(
            attention(x_BTD, position_embeddings=rope, attention_mask=None, **{name: cache})[0], expected
        )
        assert cache.get_seq_length() == 7 and type(cache.layers[0]) is MixerCacheLayer


# -- the mixers there are --------------------------------------------------------------------------
SPECS: list[dict] = [
    {"mixer": "mlr", "ranks": [4, 4], "extents": [8]},
    {"mixer": "mlr", "ranks": [4, 2, 2], "extents": [16, 5], "form": "nested"},
    {"mixer": "window", "window": 4, "sinks": 2},
    {"mixer": "global_window", "ranks": [4, 4], "window": 6},
    {"mixer": "bilinear_btt"},
    {"mixer": "bilinear_mlbtc", "levels": [1, "sqrt"], "ranks": [2, 1]},
    {"mixer": "bilinear_mlr", "ranks": [8, 4, 2]},
    {"mixer": "bilinear_btt", "norm": "qk"},
    {"mixer": "linear"},
    {"mixer": "linear", "mask": "hierarchical", "scores": "delta"},
    {"mixer": "linear", "mask": "toeplitz_blocks", "features": "elu", "normalise": True},
    {"mixer": "linear", "mask": {"name": "blocks", "block": 16, "count": 8}, "features": "relu", "normalise": True},
    {"mixer": "linear", "mask": "decay", "features": "hedgehog", "normalise": True, "window": 8, "sinks": 2, "convolution": 4, "output_gate": "head", "rope": "drop"},
    {"mixer": "linear", "mask": "fourier"},
    {"mixer": "none"},
    {"mixer": "softmax", "rope": "drop", "scale": "length", "trained_length": 8},
    {"mixer": "head_hybrid", "softmax_heads": [1], "others": {"mixer": "linear", "mask": "hierarchical", "scores": "delta", "window": 4, "rope": "both"}},
]  # fmt: skip


def test_every_mixer_is_generated_with():
    of_tests = {"test-exact", "test-decayed", "native"}  # native: see tests/mixers/test_native.py
    assert {spec["mixer"] for spec in SPECS} | of_tests == set(MIXERS.names())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: "-".join(map(str, spec.values())))
def test_mixers_generate_and_round_trip(spec, family, tmp_path):
    """Greedy, a padded row, beams, lookup and a state from disk, with the layer beside it as it was on gemma3."""
    model, ids = mixed_model(family, mixer_config(spec), None if family == "llama" else [1]), prompts(2, 12)
    tokens, logits = decode(model, ids, 20)
    assert far(logits, whole(model, tokens, 20)) < 1e-5
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    assert far(decode(model, ids, 6, attention_mask=mask)[1][1], decode(model, ids[1:, 5:], 6)[1][0]) < 1e-5
    beams = {**GREEDY, "num_beams": 2, "max_new_tokens": 6}
    assert torch.equal(model.generate(ids, **beams), model.generate(ids, use_cache=False, **beams))
    again = ids[:1, :6].repeat(1, 3)
    expected, logits = decode(model, again, 10, eos_token_id=1)
    found, other = decode(model, again, 10, prompt_lookup_num_tokens=5, eos_token_id=1)
    same_start(found, expected, other, logits)
    cache = DynamicCache(config=model.config)
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        save_cache(cache, tmp_path / "state")
        live = model(ids[:, 8:], past_key_values=cache).logits
        assert torch.equal(loaded(ids[:, 8:], past_key_values=load_cache(tmp_path / "state", loaded)).logits, live)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_attention_weights_are_aligned_with_the_layers(family):
    """One entry for each layer, None for a mixer, in a forward, in generate() and with an assistant."""
    model = mixed_model(family, ExactConfig(), [1])
    model.set_attn_implementation("eager")
    ids = prompts()
    out = model(ids, output_attentions=True, output_hidden_states=True)
    assert [None if x is None else x.shape for x in out.attentions] == [(2, 4, 10, 10), None]
    assert len(out.hidden_states) == 3
    options = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_attentions": True, **GREEDY}
    done = model.generate(ids[:1], **options)
    for assistant in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": copy.deepcopy(model)}):
        assisted = model.generate(ids[:1], **options, **assistant)
        assert torch.equal(assisted.sequences, done.sequences)
        for one, other in zip(assisted.attentions, done.attentions):
            assert len(one) == len(other) == 2 and one[1] is None and other[1] is None
            assert one[0].shape == other[0].shape
    model.set_attn_implementation("sdpa")  # which computes no weights in any layer
    assert not any(x is not None for x in model(ids, output_attentions=True).attentions)
