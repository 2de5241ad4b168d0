"""A drafter's `generate` writes what its original writes alone: greedily token for token, by sampling with the same
distribution.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers.noisy import noisy
from helpers.small_mixers import MIXER_SPECS, random_model, random_model_with_mixers
from helpers.tiny_families import TINY_FAMILIES, text
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import surgery
from surgery.core.errors import SurgeryError
from surgery.mixers import mixer_config
from surgery.modeling.attention import install
from surgery.speculation.bound import best_length, cache_bytes, expected_tokens, speedup, weight_bytes
from surgery.speculation.decode import DraftLength
from surgery.speculation.drafter import Drafter, extra_bytes, twin_of
from surgery.speculation.sampling import accept_greedy, accept_sampled, next_distribution
from surgery.speculation.slots import Sight, SlotCache

NEW = 18
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": NEW}
WINDOW = {"structure": "dense", "attention": {"mixer": "window", "window": 4, "sinks": 1}}


@functools.cache
def load(family: str) -> Any:
    """Return a tiny model in float64; Gemma 2 in float32, because its eager attention casts scores to it, even the
    lowest number.
    """
    model = random_model(family).eval()
    return model if family == "gemma2" else model.double()


def original(family: str = "llama") -> Any:
    return load(family)


def batch(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids (rows, 9) and their mask; the second row has four, the third two tokens of padding."""
    ids = torch.randint(3, 96, (rows, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row, pad in ((1, 4), (2, 2)):
        mask[row : row + 1, :pad] = 0
    return ids.masked_fill(mask == 0, 0), mask


@functools.cache
def drafter(kind: str, family: str = "llama") -> Drafter:
    model = original(family)
    if kind in ("window 4", "window 3 alone", "all"):
        sight = {"window 4": Sight(4, 1), "window 3 alone": Sight(3), "all": Sight()}[kind]
        return Drafter(model, model, sight)
    if kind in MIXER_SPECS:
        twin = twin_of(model)
        install(twin, {"model.layers.1.self_attn": mixer_config(MIXER_SPECS[kind])})
        return Drafter(model, twin)
    return Drafter(model, noisy(model, {"own": 0.05, "wrong": 5.0}[kind]))


KINDS = ["window 4", "window 3 alone", "all", "own", "wrong", "mlr", "gated deltanet", "log-linear", "ssd", "bilinear"]


# -- greedy ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_the_original(kind):
    """Rows of a padded batch accept different numbers of drafts; also one row alone, long drafts, and none."""
    made, (ids, mask) = drafter(kind), batch()
    plain = made.model.generate(ids, attention_mask=mask, **GREEDY)
    for k in (0, 1, 4, 30):
        out = made.generate(ids, mask, draft_tokens=k, **GREEDY)
        assert torch.equal(out.sequences, plain), k
        assert out.generated == ids.shape[0] * NEW and out.accepted <= out.tested <= out.drafted
    assert torch.equal(made.generate(ids[:1], draft_tokens=5, **GREEDY).sequences, plain[:1])


def test_a_drafter_that_sees_everything_is_always_right():
    """The same weights, and all keys: other logits would mean wrong masks, positions or slots."""
    ids, mask = batch()
    for kind in ("all", "own"):
        made = drafter(kind) if kind == "all" else Drafter(original(), twin_of(original()))
        out = made.generate(ids, mask, draft_tokens=4, **GREEDY)
        assert out.acceptance == 1 and out.forwards < NEW
    assert 0 < drafter("window 4").generate(ids, mask, draft_tokens=4, **GREEDY).acceptance < 1


@pytest.mark.parametrize("family", ["gemma3", "gemma2", "mistral", "gpt2", "gpt_neox", "qwen3", "phi3"])
def test_families_with_windows_and_other_positions(family):
    ids, mask = batch()
    plain = original(family).generate(ids, attention_mask=mask, **GREEDY)
    for kind in ("window 4", "own"):
        assert torch.equal(drafter(kind, family).generate(ids, mask, draft_tokens=3, **GREEDY).sequences, plain)


REFUSED = {"qwen3_5", "qwen3_next", "qwen3_5_moe", "llama4", "lfm2", "bloom", "falcon-alibi", "t5"}
REFUSED |= {
    "mamba",
    "falcon_mamba",
    "mamba2",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
    "zamba2",
    "jamba",
}
FAMILIES = [
    pytest.param(name, marks=() if family.in_ci else pytest.mark.slow)
    for name, family in TINY_FAMILIES.items()
    if family.generates and family.inputs is text and name not in REFUSED
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_verifies_drafts(family):
    """The same tokens; and a drafter with the same weights that sees everything, in the shared cache or its own, is
    always right.
    """
    model, (ids, mask) = TINY_FAMILIES[family].build(), batch()
    plain = model.generate(ids, attention_mask=mask, **GREEDY)
    near = Drafter(model, model, Sight(4, 1))
    assert torch.equal(near.generate(ids, mask, draft_tokens=3, **GREEDY).sequences, plain)
    for made in (Drafter(model, model, Sight()), Drafter(model, twin_of(model))):
        assert made.generate(ids, mask, draft_tokens=3, **GREEDY).acceptance == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype):
    """In bfloat16 a forward of several tokens rounds differently from single steps: tokens may leave each other at a
    near tie.
    """
    model = random_model("llama").to(dtype)
    ids, mask = batch()
    plain = model.generate(ids, attention_mask=mask, **GREEDY)
    found = Drafter(model, model, Sight(4, 1)).generate(ids, mask, draft_tokens=4, **GREEDY).sequences
    assert found.shape == plain.shape
    with torch.no_grad():
        positions = (torch.cat([mask, torch.ones(3, NEW, dtype=torch.long)], 1).cumsum(1) - 1).clamp_min(0)
        full = torch.cat([mask, torch.ones(3, NEW, dtype=torch.long)], 1)
        logits = model(found, attention_mask=full, position_ids=positions).logits[:, ids.shape[1] - 1 : -1].float()
    chosen = logits.gather(2, found[:, ids.shape[1] :, None])[..., 0]
    slack = 1e-4 if dtype == torch.float32 else 0.05
    assert (logits.amax(-1) - chosen <= slack * logits.abs().max()).all()
    if dtype == torch.float32:
        assert torch.equal(found, plain)


def test_drafts_stay_within_the_positions_that_a_model_has():
    """Rows of different lengths reach the last position in different rounds; one is drafted beyond it."""
    model, (ids, mask) = random_model("gpt2", n_positions=9 + NEW).double().eval(), batch()
    plain = model.generate(ids, attention_mask=mask, **GREEDY)
    for made in (Drafter(model, model, Sight(3)), Drafter(model, noisy(model, 0.2))):
        for k in (3, 30):
            assert torch.equal(made.generate(ids, mask, draft_tokens=k, **GREEDY).sequences, plain)


def test_rows_end_by_themselves():
    """An end token inside a draft ends its row, others go on; the text behind it is padding."""
    made, (ids, mask) = drafter("all"), batch()
    plain = made.model.generate(ids, attention_mask=mask, **GREEDY)
    ends = [int(plain[0, ids.shape[1] + 5]), int(plain[1, ids.shape[1] + 9])]
    options = {**GREEDY, "eos_token_id": ends}
    expected = made.model.generate(ids, attention_mask=mask, **options)
    for k in (1, 4, 12):
        assert torch.equal(made.generate(ids, mask, draft_tokens=k, **options).sequences, expected)


class EvenSum(StoppingCriteria):
    """Ends a row when the sum of its tokens is a multiple of five."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(1) % 5 == 0


class FavorRepeats(LogitsProcessor):
    """A processor that depends on the text and on the row."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores.scatter_add_(
            1,
            (input_ids[:, -2:] * 7 + torch.arange(len(input_ids))[:, None]) % 96,
            torch.full((len(input_ids), 2), 9.0),
        )
        return scores


@pytest.mark.parametrize("kind", ["window 4", "own"])
def test_settings_of_generate_are_respected(kind):
    made, (ids, mask) = drafter(kind), batch()
    plain = made.model.generate(ids, attention_mask=mask, **GREEDY)
    settings: list[dict[str, Any]] = [
        {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
        {"min_new_tokens": 12, "eos_token_id": int(plain[0, 12])},
        {"max_new_tokens": 1},
        {"max_new_tokens": None, "max_length": 14},
        {"bad_words_ids": [[int(plain[0, 10])], [int(plain[1, 11]), int(plain[1, 12])]]},
        {"logits_processor": LogitsProcessorList([FavorRepeats()])},
        {"suppress_tokens": [int(plain[2, 10])], "renormalize_logits": True},
    ]
    for setting in settings:
        options = {**GREEDY, **setting}
        expected = made.model.generate(ids, attention_mask=mask, **options)
        assert torch.equal(made.generate(ids, mask, draft_tokens=4, **options).sequences, expected), setting
    found = made.generate(
        ids, mask, draft_tokens=4, stopping_criteria=StoppingCriteriaList([EvenSum()]), **GREEDY
    ).sequences
    for row in range(len(ids)):  # generate() itself goes on writing rows that end by other criteria than an end token
        stop = next(n for n in range(ids.shape[1] + 1, 28) if n == 27 or int(plain[row, :n].sum()) % 5 == 0)
        assert torch.equal(found[row, :stop], plain[row, :stop]) and not found[row, stop:].any()
    config = GenerationConfig(**{**GREEDY, "max_new_tokens": 7})
    assert torch.equal(made.generate(ids, mask, generation_config=config).sequences, plain[:, : ids.shape[1] + 7])


def test_a_streamer_gets_the_text_in_order():
    class Heard:
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, tokens):
            self.tokens += tokens.flatten().tolist()

        def end(self):
            self.ended = True

    made, (ids, _), heard = drafter("window 4"), batch(), Heard()
    out = made.generate(ids[:1], draft_tokens=4, streamer=heard, **GREEDY)
    assert heard.ended and heard.tokens == out.sequences[0].tolist()


# -- sampling -----------------------------------------------------------------------------------------------
def test_the_rejection_rule_gives_the_model_s_distribution():
    """First and second token of 200,000 rounds against p, within six standard errors; and the residual by its
    formula.
    """
    rows, k, V = 200_000, 2, 4
    generator = torch.Generator().manual_seed(5)
    p = torch.rand(k + 1, V, generator=generator).softmax(-1).double() ** 3
    q = torch.rand(k, V, generator=generator).softmax(-1).double() ** 2
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    torch.manual_seed(6)
    drafts = torch.stack([torch.multinomial(q[i], rows, replacement=True) for i in range(k)], 1)
    accepted, after = accept_sampled(p.log().expand(rows, -1, -1), drafts, q.expand(rows, -1, -1))
    first = torch.where(accepted > 0, drafts[:, 0], after)
    second = torch.where(accepted > 1, drafts[:, 1], after)[accepted > 0]
    for tokens, expected in ((first, p[0]), (second, p[1])):
        share = torch.bincount(tokens, minlength=V) / len(tokens)
        assert ((share - expected).abs() < 6 * (expected * (1 - expected) / len(tokens)).sqrt()).all()
    chance = torch.minimum(p[0], q[0]).sum()
    assert abs(float((accepted > 0).double().mean() - chance)) < 6 * float((chance * (1 - chance) / rows) ** 0.5)
    residual = next_distribution(p[None], q[None], torch.tensor([1]))[0]
    assert torch.allclose(residual, (p[1] - q[1]).clamp_min(0) / (p[1] - q[1]).clamp_min(0).sum())
    assert torch.equal(next_distribution(p[None], q[None], torch.tensor([2]))[0], p[2])
    assert torch.equal(
        next_distribution(p[None, :1], p[None, :1], torch.tensor([0]))[0], p[0]
    )  # nothing is left of p - q


@pytest.mark.parametrize("kind", ["softmax", "ssd"])
def test_samples_have_the_original_s_distribution(kind):
    """Four tokens of 3,000 rows, each from the two most likely at temperature 2: sixteen outcomes against their exact
    chances.
    """
    ids, rows = batch()[0][:1], 3_000
    model = original() if kind == "softmax" else random_model_with_mixers("llama", mixer_config(MIXER_SPECS[kind]))
    other = drafter("window 3 alone") if kind == "softmax" else Drafter(model, noisy(model, 0.1))
    made = Drafter(model, noisy(model, 0.3))
    options: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 2, "top_p": 1.0, "max_new_tokens": 4}
    options |= {"pad_token_id": 0, "eos_token_id": None}
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        longer = {}
        for tokens, chance in exact.items():
            with torch.no_grad():
                text = torch.cat([ids, torch.tensor([tokens], dtype=torch.long)], 1)
                best = (model(text, use_cache=False).logits[0, -1] / 2).topk(2)
            for token, p in zip(best.indices.tolist(), best.values.softmax(-1).tolist()):
                longer[(*tokens, token)] = chance * p
        exact = longer
    for each, k in ((made, 3), (other, 1)):
        torch.manual_seed(7)
        out = each.generate(ids.expand(rows, -1), draft_tokens=k, **options)
        assert out.drafted and 0 < out.acceptance < 1
        found = [tuple(row) for row in out.sequences[:, -4:].tolist()]
        for tokens in {*exact, *found}:
            p = exact.get(tokens, 0.0)
            assert abs(found.count(tokens) / rows - p) <= 6 * (p * (1 - p) / rows) ** 0.5, tokens


def test_greedy_rule_counts_up_to_the_first_difference():
    scores = torch.zeros(3, 4, 5)
    scores.scatter_(2, torch.tensor([[1, 2, 3, 4]]).expand(3, -1)[..., None], 1.0)
    accepted, after = accept_greedy(scores, torch.tensor([[1, 2, 3], [1, 0, 3], [0, 2, 3]]))
    assert accepted.tolist() == [3, 1, 0] and after.tolist() == [4, 2, 1]


# -- what it costs --------------------------------------------------------------------------------------------
def test_only_what_differs_costs_memory(tmp_path):
    model, (ids, mask) = random_model("llama").eval(), batch()
    window = surgery.drafter(model, WINDOW)
    assert window.extra_bytes == 0 and window.cache_bytes(1000) == 0 and window.sight == Sight(4, 1)
    assert window.draft_model is model and surgery.drafter(model).sight == Sight(256, 4)
    low = surgery.drafter(model, {"structure": "low_rank", "allocate": "uniform", "curvature": "none"})
    replaced = [m for m in low.draft_model.modules() if type(m).__name__ == "LowRankLinear"]
    own = sum(p.numel() * p.element_size() for m in replaced for n, p in m.named_parameters() if n != "bias")
    assert replaced and low.extra_bytes >= own > 0 and low.extra_bytes < weight_bytes(model)
    assert low.draft_model.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert low.cache_bytes(100, 3) == 3 * cache_bytes(model, 100) > 0
    low.draft_model.save_pretrained(tmp_path / "low")
    loaded = surgery.drafter(model, tmp_path / "low")
    assert low.extra_bytes <= loaded.extra_bytes <= 1.1 * low.extra_bytes
    plain = model.generate(ids, attention_mask=mask, **GREEDY)
    for made in (window, low, loaded):
        out = made.generate(ids, mask, draft_tokens=3, **GREEDY)
        assert torch.equal(out.sequences, plain)
        assert (out.draft_cache_bytes == 0) == (made is window)
    assert extra_bytes(model, random_model("llama")) >= sum(p.numel() * p.element_size() for p in model.parameters())
    half = surgery.drafter(model, {"structure": "dense", "attention": {"mixer": "linear", "layers": "1"}})
    assert half.sight is None and torch.equal(half.generate(ids, mask, draft_tokens=2, **GREEDY).sequences, plain)


def test_the_cache_of_the_original_is_the_only_one():
    """A window drafter runs on the model that it drafts for, and reads window + sinks keys of it at each step."""
    made, read = drafter("window 4"), []
    attention = made.model.model.layers[0].self_attn
    hook = attention.register_forward_pre_hook(lambda m, args, kwargs: read.append(kwargs["attention_mask"].shape[-1]) if kwargs.get("attention_mask") is not None else None, with_kwargs=True)  # fmt: skip
    made.generate(batch()[0], draft_tokens=3, **GREEDY)
    hook.remove()
    assert 5 in read and max(read) > 20


@pytest.mark.parametrize("window, sinks", [(1, 0), (3, 0), (3, 2), (20, 4)])
def test_columns_hold_each_visible_key_once(window, sinks):
    sight, pad = Sight(window, sinks), torch.tensor([0, 3, 5])
    for slots in ([5, 5, 5], [7, 12, 9], [30, 4, 6]):
        slot = torch.tensor(slots)
        columns, once = sight.columns(slot, pad), sight.once(slot, pad)
        every = torch.arange(40).expand(3, -1)
        allowed = sight.allowed(slot[:, None], every, pad)[:, 0]
        for row in range(3):
            seen = columns[row][once[row]].tolist()
            assert sorted(seen) == every[row][allowed[row]].tolist() and len(seen) == len(set(seen))


def test_slots_grow_rarely():
    cache = SlotCache(1)
    sizes = set()
    for start in range(0, 600, 3):
        with cache.at(torch.tensor([start, max(0, start - 2)]), 3):
            new = torch.full((2, 1, 3, 2), float(start))
            keys, _ = cache.layers[0].update(new, new)
        assert keys.shape[2] == start + 3 and bool((keys[0, :, start:] == start).all())
        sizes.add(cache.layers[0].keys.shape[2])
    assert len(sizes) < 12


def test_bound():
    assert expected_tokens(0.5, 2) == 1.75 and expected_tokens(1, 3) == 4
    assert speedup(0.8, 0, 0.3) == 1 and best_length(0.9, 1.0) == 0 and best_length(0.9, 0.05) > 3
    made = drafter("window 4")
    whole, draft = made.step_bytes(10_000, 8)
    layers, per_token = 2, 2 * 2 * 8 * 8  # keys and values of two heads of eight float64 numbers
    assert whole - draft == 8 * layers * per_token * (10_000 - 5)
    assert whole == weight_bytes(original()) + 8 * layers * per_token * 10_000


def test_a_step_reads_the_states_that_the_cache_holds():
    model, cache = random_model_with_mixers("llama", mixer_config(MIXER_SPECS["heads"])).bfloat16(), DynamicCache()
    with torch.inference_mode():
        model(torch.arange(50)[None], past_key_values=cache)
    assert cache_bytes(model, 50) == sum(layer.nbytes() for layer in cache.layers)


def test_the_draft_length_follows_what_is_accepted():
    long, short = DraftLength(None, cost=0.1), DraftLength(None, cost=0.1)
    for _ in range(30):
        long.record(4, 4)
        short.record(1, 0)
    assert long.next() > 8 and short.next() == 0
    assert [short.next() for _ in range(40)].count(1) == 2  # a test now and then
    assert DraftLength(3).next() == 3
    ids, mask = batch()
    plain = original().generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(drafter("window 4").generate(ids, mask, **GREEDY).sequences, plain)


# -- refusals ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_beams": 2}, "num_beams=2 asks for another way"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"output_scores": True}, "output_scores"),
        ({"draft_tokens": -1}, "draft_tokens must be"),
        ({"draft_tokens": "many"}, "draft_tokens must be"),
        ({"stop_strings": ["x"]}, "need the tokenizer"),
        ({"assistant_model": 1}, "does not take assistant_model"),
        ({"streamer": object()}, "one prompt"),
    ],
)
def test_other_ways_of_decoding_are_refused(options, message):
    with pytest.raises(SurgeryError, match=message):
        drafter("window 4").generate(*batch(), **{**GREEDY, **options})


def test_a_call_reads_the_slots_that_its_mask_counts():
    """transformers makes no mask for a single token of a cache that is not static, so that no empty slot may be read,
    also after growing.
    """
    cache, stop = SlotCache(1), 0
    for tokens in (5, 1, 1, 70, 1, 2):
        start, stop = stop, stop + tokens
        with cache.at(torch.tensor([start, start]), tokens) as read:
            columns = cache.get_mask_sizes(tokens, 0)
            keys, values = cache.update(torch.ones(2, 1, tokens, 4), torch.ones(2, 1, tokens, 4), 0)
        assert columns == (stop, 0) and keys.shape[2] == values.shape[2] == read == stop
        assert bool((keys == 1).all())
    assert not cache.is_compileable


def test_padding_on_the_right_is_refused():
    ids, mask = batch()
    with pytest.raises(SurgeryError, match="padding_side"):
        drafter("window 4").generate(ids, mask.flip(1), **GREEDY)


def test_originals_that_cannot_verify_are_refused(tmp_path):
    with pytest.raises(SurgeryError, match=r"has mixers.*prompt-lookup"):
        surgery.drafter(random_model_with_mixers("llama", mixer_config(MIXER_SPECS["ssd"])), WINDOW)
    with pytest.raises(SurgeryError, match="causal language model"):
        surgery.drafter(torch.nn.Linear(2, 2), WINDOW)
    with pytest.raises(SurgeryError, match="vocabulary has 96 tokens, the original's 90"):
        small = random_model("llama")
        small.resize_token_embeddings(90)
        surgery.drafter(small, original())
    for name, message in (
        ("t5", "has an encoder"),
        ("qwen3_5", "keys and values of its own"),
        ("qwen3_next", "keys and values of its own"),
        ("llama4", "chunked attention"),
        ("bloom", "cannot verify drafts"),
    ):
        with pytest.raises(SurgeryError, match=message):
            surgery.drafter(TINY_FAMILIES[name].build(), WINDOW)
    dynamic = random_model("llama")
    dynamic.config.rope_parameters = {**dynamic.config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(SurgeryError, match="frequencies change"):
        surgery.drafter(dynamic, WINDOW)
    flash = random_model("llama")
    flash.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(SurgeryError, match="set_attn_implementation"):
        surgery.drafter(flash, WINDOW)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SurgeryError, match="recipe keys"):
        surgery.drafter(original(), tmp_path, keep=0.5)
