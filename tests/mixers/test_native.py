"""Level weights of native linear layers: equal to the library's layers at the start, and to the definition with any
weights, in one pass, from a cache, padded, converted, saved and undone.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import killing
from helpers.tiny_families import DELTA_NET, NO_HEAD_DIM, TINY_FAMILIES, TinyFamily
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

import surgery
from surgery.architectures.native import GATED_DELTA, MAMBA2, native_core, native_paths
from surgery.cli.main import main
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError
from surgery.mixers import AttentionShape
from surgery.mixers.native import NativeInputs, NativeMixer
from surgery.mixers.native_config import Native
from surgery.modeling.cache import CACHE_NAME, record_past
from surgery.modeling.native import add_level_weights, gated_delta_core, install_native, mamba2_core, no_fused_layer
from surgery.modeling.native_cache import NativeCacheLayer
from surgery.planning.recipe import load_recipe
from surgery.structures import StructuredLinear
from surgery.training.optim import select_parameters

SMALL = Native(levels=5, block=4)  # levels of blocks, and one that is shared, within the tokens of these tests
SLOW = [pytest.mark.slow]
FAMILIES = [
    "qwen3_5",
    "mamba2",
    "kimi_linear",
    *(
        pytest.param(name, marks=SLOW)
        for name in (
            *("olmo_hybrid", "qwen3_next", "qwen3_5_moe", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"),
            *("zamba2", "bailing_hybrid"),
        )
    ),
]
# Families that are in no shared table, because nothing else is special about them.
MORE = {
    "bailing_hybrid": TinyFamily(
        "BailingHybridForCausalLM",
        "BailingHybridConfig",
        {
            **NO_HEAD_DIM,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "dense"],
            "num_key_value_heads": 4,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "num_mtp_layers": 0,
        },
    ),
    "kimi_linear": TinyFamily(
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {
            **NO_HEAD_DIM,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "num_key_value_heads": 4,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "moe_intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "olmo_hybrid": TinyFamily(
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        {**NO_HEAD_DIM, **DELTA_NET, "layer_types": ["linear_attention", "full_attention"]},
    ),
}
TOKENS = 75


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def tiny_model(name: str) -> torch.nn.Module:
    """Return a tiny random model. Skips if transformers runs its layers without the core functions, or has no such model."""
    family = {**TINY_FAMILIES, **MORE}[name]
    if not hasattr(transformers, family.model_class):
        pytest.skip(f"this version of transformers has no {family.model_class}")
    model = family.build()
    if not any(native_core(module) for module in model.modules()):
        pytest.skip("this version of transformers has no core functions by these names")
    return model


def upgrade(model: torch.nn.Module, config: Native = SMALL, random: bool = True) -> torch.nn.Module:
    """Give all native layers level weights, random ones or 1."""
    generator = torch.Generator().manual_seed(3)
    for path in native_paths(model):
        add_level_weights(model, path, config)
        level = model.get_submodule(path).mixer.level
        for parameter in level.parameters() if random else ():
            with torch.no_grad():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def token_ids(length: int = TOKENS, rows: int = 2) -> torch.Tensor:
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: torch.nn.Module, ids: torch.Tensor, **inputs: object) -> torch.Tensor:
    return model(ids, **inputs).logits


# -- the start -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_changes_at_the_start(name: str) -> None:
    """With level weights of 1 logits and greedy text are those of the library's own layers."""
    model, ids = tiny_model(name), token_ids()
    before, text = logits(model, ids), model.generate(ids[:, :20], max_new_tokens=8, do_sample=False)
    upgrade(model, random=False)
    assert relative(logits(model, ids), before) < 2e-5
    assert torch.equal(model.generate(ids[:, :20], max_new_tokens=8, do_sample=False), text)
    assert {n for n, _ in model.named_parameters() if ".mixer.level." in n} == {
        f"{path}.mixer.level.{leaf}" for path in native_paths(model) for leaf in ("weight", "bias")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_level_weights_are_exactly_one(dtype: torch.dtype) -> None:
    """lambda = 1 without rounding, in every dtype of the checkpoint."""
    model = tiny_model("qwen3_5").to(dtype)
    upgrade(model, random=False)
    mixer = model.get_submodule(native_paths(model)[0]).mixer
    assert mixer.level.weight.dtype == dtype
    assert bool((mixer.level_weights(torch.randn(2, 9, mixer.shape.dim, dtype=dtype)) == 1).all())


# -- the definition --------------------------------------------------------------------------------
def by_definition(inputs: NativeInputs, weights_BTGJL: torch.Tensor, config: Native) -> torch.Tensor:
    """Return out_BHTV token by token: what token s wrote, after the transitions to t, times the weight of its level."""
    v, gate = inputs.v_BGTV, inputs.gate_BTG.transpose(1, 2)
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (inputs.q_BHTK, inputs.k_BGTK))
    if gate.dim() == 3:
        gate = gate.unsqueeze(-1)  # the same for all key channels
    out, bits = torch.zeros_like(v), int(math.log2(config.block))
    for s in range(q.shape[2]):
        beta = 1.0 if inputs.beta_BGT is None else inputs.beta_BGT[:, :, s, None, None]
        state = beta * k[:, :, s, :, None] * v[:, :, s, None, :]
        for t in range(s, q.shape[2]):
            if t > s:
                state = gate[:, :, t, :, None].exp() * state
                if inputs.beta_BGT is not None:
                    read = k[:, :, t, None, :] @ state
                    state = state - inputs.beta_BGT[:, :, t, None, None] * k[:, :, t, :, None] * read
            level = min(max(0, (t ^ s).bit_length() - bits), config.levels - 1)
            out[:, :, t] += weights_BTGJL[:, t, :, 0, level, None] * (q[:, :, t, None, :] @ state).squeeze(2)
    return out


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("config", [SMALL, Native(levels=3, block=1)])
def test_random_weights_follow_the_definition(name: str, config: Native) -> None:
    """The core is O = (A . M) V in float64, with the queries, keys, values and gates that the layer makes."""
    model = upgrade(tiny_model(name), config)
    mixer: NativeMixer = model.get_submodule(native_paths(model)[0]).mixer
    calls: list[NativeInputs] = []
    handle = mixer.register_forward_pre_hook(lambda _, args: calls.append(args[0]))
    logits(model, token_ids(37))
    handle.remove()
    mixer.double()
    tensors = {n: t.double() for n, t in vars(calls[0]).items() if isinstance(t, torch.Tensor)}
    inputs = dataclasses.replace(calls[0], **tensors)
    weights = mixer.level_weights(inputs.x_BTD)
    expected = by_definition(inputs, weights, config)
    assert relative(mixer(inputs)[0], expected) < 1e-12
    assert relative(mixer.dense(inputs), expected) < 1e-12
    plain = by_definition(inputs, torch.ones_like(weights), config)
    assert relative(plain, expected) > 0.05  # the weights matter


def test_cores_take_what_the_library_takes() -> None:
    """At lambda = 1 each core returns the output of the library's function, with shared keys and clamped steps. Keys of
    Gated DeltaNet are repeated for the library, which takes shared ones in some versions only.
    """
    from transformers.models.mamba2 import modeling_mamba2
    from transformers.models.qwen3_next import modeling_qwen3_next

    tiny_model("mamba2")

    class Call:
        x_BTD = valid_BT = None

        def run(self, inputs: NativeInputs) -> torch.Tensor:
            weights = torch.ones(2, 20, 4, 1, 5)
            return by_definition(inputs, weights, SMALL).transpose(1, 2)

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 20, 2, 8), torch.randn(2, 20, 2, 8), torch.randn(2, 20, 4, 6)
    g, beta = -F.softplus(torch.randn(2, 20, 4)), torch.rand(2, 20, 4)
    own = [x.repeat_interleave(2, dim=2) for x in (q, k)]
    expected, _ = modeling_qwen3_next.torch_chunk_gated_delta_rule(*own, v, g, beta, use_qk_l2norm_in_kernel=True)
    found, state = gated_delta_core(q, k, v, g=g, beta=beta, surgery=Call(), initial_state=None)
    assert state is None and relative(found, expected) < 1e-5
    dt, decay, skip = torch.randn(2, 20, 4), -torch.rand(4) - 0.1, torch.randn(4)
    options = {"D": skip, "dt_bias": torch.randn(4), "dt_softplus": True, "dt_limit": (0.5, 1.0)}
    expected = modeling_mamba2.mamba2_chunk_scan(v, dt, decay, k, q, 16, **options)
    assert relative(mamba2_core(v, dt, decay, k, q, chunk_size=16, **options, surgery=Call()), expected) < 1e-5


# -- caches ----------------------------------------------------------------------------------------
def continued(model: torch.nn.Module, ids: torch.Tensor, parts: list[int]) -> torch.Tensor:
    """Return the logits of a text that is read in parts, from a cache."""
    cache, outs, seen = DynamicCache(config=model.config), [], 0
    name = CACHE_NAME if model.config.model_type != "mamba2" else "cache_params"
    for length in parts:
        positions = {} if name == "cache_params" else {"position_ids": torch.arange(seen, seen + length)[None]}
        with torch.no_grad():
            out = model(ids[:, seen : seen + length], **{name: cache}, **positions, use_cache=True)
        outs.append(out.logits)
        seen += length
    for path in native_paths(model):
        module = model.get_submodule(path)
        layer = cache.layers[module.layer_idx]
        cost = type(module.mixer).cost(module.mixer.config, module.mixer.shape, seen)
        assert isinstance(layer, NativeCacheLayer)
        assert layer.nbytes() == 4 * cost.cache * len(ids)
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_and_chunks_equal_one_pass(name: str) -> None:
    """Reading from a cache, in chunks and single tokens, gives the logits of one pass; its bytes are those counted."""
    model, ids = upgrade(tiny_model(name)), token_ids()
    full = logits(model, ids)
    assert relative(continued(model, ids, [29, 1, 1, 1, 20, 1, 22]), full) < 1e-5
    assert relative(continued(model, ids[:1], [1] * 20), full[:1, :20]) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_does_not_count(name: str) -> None:
    """Levels count real tokens: a left-padded row has the logits and the text of the row alone."""
    model, ids = upgrade(tiny_model(name)), token_ids(30)
    padded = torch.cat([torch.zeros(2, 11, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(2, 11, dtype=torch.long), torch.ones_like(ids)], dim=1)
    assert relative(logits(model, padded, attention_mask=mask)[:, 11:], logits(model, ids)) < 1e-5
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    same = model.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(same[:, 11:], text)


@pytest.mark.parametrize("name", FAMILIES)
def test_beams_equal_those_without_a_cache(name: str) -> None:
    """Beam search selects rows of both states."""
    model, ids = upgrade(tiny_model(name)), token_ids(20)
    options = {"max_new_tokens": 7, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", pytest.param("falcon_h1", marks=SLOW)])
def test_static_caches(name: str) -> None:
    """generate with a static cache gives the text of a dynamic one, with and without padding."""
    model, ids = upgrade(tiny_model(name)), token_ids(20)
    mask = torch.ones_like(ids)
    for padding in (0, 6):
        mask[0, :padding] = 0
        options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
        text = model.generate(ids, **options)
        assert torch.equal(model.generate(ids, cache_implementation="static", **options), text)


def test_tokens_can_be_removed() -> None:
    """A cropped cache continues like one that never had the tokens."""
    model, ids = upgrade(tiny_model("qwen3_5")), token_ids(40, rows=1)
    full, cache = logits(model, ids), DynamicCache(config=model.config)
    record_past(cache, model)
    logits(model, ids[:, :30], **{CACHE_NAME: cache})
    logits(model, token_ids(7, rows=1) + 3, **{CACHE_NAME: cache})
    cache.crop(-9)
    rest = logits(model, ids[:, 28:], **{CACHE_NAME: cache})
    assert relative(rest, full[:, 28:]) < 1e-5


def test_single_tokens_of_kimi_delta_attention_are_not_recorded() -> None:
    """transformers keeps no past of its convolution for them: refused, where a crop would be wrong."""
    model, ids = upgrade(tiny_model("kimi_linear")), token_ids(20, rows=1)
    cache = DynamicCache(config=model.config)
    record_past(cache, model)
    logits(model, ids[:, :10], **{CACHE_NAME: cache})
    with pytest.raises(SurgeryError, match="keeps no past of its convolution for single tokens"):
        logits(model, ids[:, 10:11], **{CACHE_NAME: cache})


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("config", [SMALL, Native(levels=3, block=1), Native(levels=4, block=64)])
def test_decoding_reads_only_buckets_that_hold_tokens(delta: bool, config: Native, monkeypatch) -> None:
    """A donated state is updated in place, with rows at different positions; a state that is held is not touched."""
    mixer = NativeMixer(config, AttentionShape(6, 4, 4, 8, 8, 1.0))
    torch.nn.init.normal_(mixer.level.weight)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 80, 8, generator=generator) for _ in range(3))
    beta = torch.rand(2, 4, 80, generator=generator) if delta else None
    gate, x = -torch.rand(2, 80, 4, generator=generator) / 8, torch.randn(2, 80, 6, generator=generator)
    valid = torch.arange(80) >= torch.tensor([[0], [7]])
    inputs = NativeInputs(q, F.normalize(k, dim=-1), v, x, valid, gate_BTG=gate, beta_BGT=beta)
    calls: list[int] = []
    step = NativeMixer._step_in_place
    monkeypatch.setattr(NativeMixer, "_step_in_place", lambda *args: calls.append(1) or step(*args))
    with torch.no_grad():
        _, first = mixer.mix(inputs.at_tokens(slice(0, 30)), mixer.empty_state(2, "cpu"))
        held, kept = first, first.tensors["buckets"].clone()
        donated = dataclasses.replace(first, tensors={"buckets": kept.clone()})
        for token in range(30, 80):
            tokens = inputs.at_tokens(slice(token, token + 1))
            expected, held = mixer.mix(tokens, held)
            found, donated = mixer.mix(tokens, donated.donate())
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(donated.tensors["buckets"], held.tensors["buckets"], rtol=1e-4, atol=1e-5)
    assert len(calls) == 50 and torch.equal(first.tensors["buckets"], kept)
    with torch.enable_grad():
        mixer.mix(inputs.at_tokens(slice(0, 1)), mixer.empty_state(2, "cpu").donate())
    assert len(calls) == 50


@pytest.mark.parametrize("layer", ["Mamba-2", "Gated DeltaNet", "Kimi delta attention"])
@pytest.mark.parametrize("config", [SMALL, Native(levels=3, block=1), Native(levels=4, block=64)])
def test_decoding_does_not_read_empty_buckets(layer: str, config: Native) -> None:
    """Buckets whose bit is not set in a row's number of whole blocks may hold NaN: they are overwritten when they fill."""
    mixer = NativeMixer(config, AttentionShape(6, 4, 4, 8, 8, 1.0))
    torch.nn.init.normal_(mixer.level.weight)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 150, 8, generator=generator) for _ in range(3))
    beta = torch.rand(2, 4, 150, generator=generator) if layer != "Mamba-2" else None
    channels = (8,) if layer == "Kimi delta attention" else ()
    gate, x = -torch.rand(2, 150, 4, *channels, generator=generator) / 8, torch.randn(2, 150, 6, generator=generator)
    valid = torch.arange(150) >= torch.tensor([[0], [7]])
    inputs = NativeInputs(q, F.normalize(k, dim=-1), v, x, valid, gate_BTG=gate, beta_BGT=beta)
    own, empty = config.block > 1, 0
    with torch.no_grad():
        _, held = mixer.mix(inputs.at_tokens(slice(0, 30)), mixer.empty_state(2, "cpu"))
        donated = dataclasses.replace(held, tensors={"buckets": held.tensors["buckets"].clone()})
        for token in range(30, 150):
            buckets_BLGFV = donated.tensors["buckets"]
            for row, seen in enumerate(held.seen_B.tolist()):
                for level in range(own, buckets_BLGFV.shape[1]):
                    if not (seen // config.block) >> (level - own) & 1:
                        buckets_BLGFV[row, level], empty = float("nan"), empty + 1
            tokens = inputs.at_tokens(slice(token, token + 1))
            expected, held = mixer.mix(tokens, held)
            found, donated = mixer.mix(tokens, donated.donate())
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert empty > 50


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "kimi_linear"])
def test_models_decode_without_reading_empty_buckets(name: str) -> None:
    """The caches of whole models hand their states on, so that no step copies one or reads an empty bucket."""
    model, ids = upgrade(tiny_model(name)), token_ids(50)
    full, cache, outs = logits(model, ids), DynamicCache(config=model.config), []
    key = "cache_params" if name == "mamba2" else CACHE_NAME
    logits(model, ids[:, :30], **{key: cache})
    for token in range(30, 50):
        for path in native_paths(model):
            buckets_BLGFV = cache.layers[model.get_submodule(path).layer_idx].native.state.tensors["buckets"]
            for level in range(1, buckets_BLGFV.shape[1]):
                if not (token // SMALL.block) >> (level - 1) & 1:
                    buckets_BLGFV[:, level] = float("nan")
        positions = {} if name == "mamba2" else {"position_ids": torch.tensor([[token]])}
        outs.append(logits(model, ids[:, token : token + 1], **{key: cache}, **positions))
    assert relative(torch.cat(outs, 1), full[:, 30:]) < 1e-5


def test_caches_are_copied_and_refused() -> None:
    """A copied cache continues alone; one that the library's own layers filled is refused."""
    model, ids = tiny_model("qwen3_5"), token_ids()
    filled = DynamicCache(config=model.config)
    logits(model, ids, **{CACHE_NAME: filled})
    upgrade(model)
    with pytest.raises(SurgeryError, match="recurrent state of a layer without level weights"):
        logits(model, ids[:, :1], **{CACHE_NAME: filled})
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :50], **{CACHE_NAME: cache})
    twin = copy.deepcopy(cache)
    rest = logits(model, ids[:, 50:], **{CACHE_NAME: cache})
    assert torch.equal(logits(model, ids[:, 50:], **{CACHE_NAME: twin}), rest)


LENGTHS = [(9, 1, 14, 8), (20, 12), (32,)]  # of the documents of each row


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_row_is_each_document_alone(name: str) -> None:
    """Convolutions, states and levels begin again with each document, with gradients, by position ids or by seq_idx."""
    model, ids = upgrade(tiny_model(name)), token_ids(32, rows=3)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    rows = zip(ids, LENGTHS)
    alone = [torch.cat([model(part[None]).logits[0] for part in row.split(list(n))]) for row, n in rows]
    expected = torch.stack(alone)
    options = {"position_ids": positions, "use_cache": False}
    if name == "granitemoehybrid":  # transformers makes its masks without positions
        with pytest.raises(SurgeryError, match=r"the softmax layers of .* attend from one to the other"):
            logits(model, ids, **options)
        return
    found = model(ids, **options).logits
    assert relative(found, expected) < 1e-5
    assert relative(logits(model, ids), expected) > 1e-3
    level = model.get_submodule(native_paths(model)[0]).mixer.level.weight
    slopes = [torch.autograd.grad(out.square().sum(), level)[0] for out in (found, expected)]
    assert relative(*slopes) < 1e-4
    if name != "mamba2":  # softmax layers beside
        return
    for names in ({"seq_idx": (positions == 0).cumsum(1)}, {"position_ids": positions}):
        assert relative(logits(model, ids, use_cache=False, **names), expected) < 1e-5
    ends = torch.tensor([0, 9, 10, 24, 32])
    assert relative(logits(model, ids[:1], use_cache=False, cu_seq_lens_q=ends), expected[:1]) < 1e-5
    assert relative(logits(model, ids[2:], cu_seq_lens_q=ends[[0, -1]]), expected[2:]) < 1e-5


def test_packed_documents_survive_recomputed_activations() -> None:
    """Activations that are recomputed in the backward pass begin again with each document too."""
    model, ids = upgrade(tiny_model("qwen3_5")).train(), token_ids(20)
    options = {"position_ids": torch.cat([torch.arange(12), torch.arange(8)]).expand(2, -1), "use_cache": False}
    level, slopes = model.get_submodule(native_paths(model)[0]).mixer.level.weight, []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found = model(ids, **options).logits.square().sum()
        model(ids[:, :5])  # another call before the backward pass
        slopes.append(torch.autograd.grad(found, level)[0])
    assert relative(*slopes) < 1e-6


def test_packed_documents_that_are_refused() -> None:
    """Those with a cache, those of which a layer is not told, and borders for kernels that a layer gets alone."""
    model, ids = upgrade(tiny_model("qwen3_5")), token_ids(20)
    positions = torch.cat([torch.arange(12), torch.arange(8)]).expand(2, -1)
    with pytest.raises(SurgeryError, match=r"several documents packed in a row and a cache.*Pass use_cache=False"):
        logits(model, ids, position_ids=positions, use_cache=True)
    layer = model.get_submodule(native_paths(model)[0])
    with pytest.raises(SurgeryError, match="'seq_idx', that is, with several documents"):
        layer(torch.randn(1, 20, model.config.hidden_size), seq_idx=torch.zeros(1, 20))
    for path in native_paths(model):
        module = model.get_submodule(path)
        module.forward = lambda *args, forward=module.forward, surgery_documents=None, **kwargs: forward(
            *args, **kwargs
        )
    with pytest.raises(SurgeryError, match="does not pass on to its linear layers where they begin"):
        logits(model, ids, position_ids=positions, use_cache=False)
    assert logits(model, ids, position_ids=torch.arange(20)[None]).shape[1] == 20


# -- training --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_gradients_equal_differences(name: str) -> None:
    """Gradients of the level weights and of the gates are those of finite differences, in training mode."""
    model, ids = upgrade(tiny_model(name)).double().train(), token_ids(24)
    module = model.get_submodule(native_paths(model)[0])
    weights = torch.randn(2, 24, model.config.vocab_size, generator=torch.Generator().manual_seed(2))
    score = lambda: (model(ids).logits * weights).sum()  # noqa: E731
    for parameter in (module.mixer.level.bias, module.mixer.level.weight, module.A_log):
        direction = torch.randn(parameter.shape, dtype=torch.float64)
        direction /= direction.norm()
        model.zero_grad()
        score().backward()
        slope, scores = (parameter.grad * direction).sum().item(), []
        for step in (1e-2, -1e-2):
            with torch.no_grad():
                parameter.add_(step * direction)
                scores.append(score().item())
                parameter.sub_(step * direction)
        assert slope != 0
        assert abs((scores[0] - scores[1]) / 2e-2 - slope) < 1e-2 * abs(slope)  # norms are in float32


def test_the_fused_training_path_is_left(monkeypatch) -> None:
    """With mamba-ssm installed the library's layer trains in one function, without the core; an upgraded one does not.

    The module of the family is imported anew while a package of that name is there.
    """
    from transformers.models.mamba2 import modeling_mamba2

    tiny_model("mamba2")
    calls: list[str] = []

    def mamba_split_conv1d_scan_combined(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, outproj_weight):
        calls.append("fused")
        return zxbcdt[..., : outproj_weight.shape[1]] @ outproj_weight.mT

    fused = types.ModuleType("mamba_ssm")
    fused.mamba_split_conv1d_scan_combined = mamba_split_conv1d_scan_combined
    monkeypatch.setitem(sys.modules, "mamba_ssm", fused)
    spec = importlib.util.spec_from_file_location(f"{modeling_mamba2.__name__}_fused", modeling_mamba2.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    model = module.Mamba2ForCausalLM(tiny_model("mamba2").config).train()
    model(token_ids()).logits.sum().backward()
    assert len(calls) == len(native_paths(model))
    calls.clear()
    upgrade(model)
    loss = model(token_ids()).logits.square().sum()
    loss.backward()
    assert calls == []
    gradients = [model.get_submodule(path).mixer.level.bias.grad for path in native_paths(model)]
    assert all(bool(gradient.any()) for gradient in gradients)
    torch.testing.assert_close(loss.item(), model.eval()(token_ids()).logits.square().sum().item())


def test_selectors_find_level_weights_alone() -> None:
    """`trains: [mixers]` selects the level weights, also in families whose layers are called mixer themselves."""
    model = upgrade(tiny_model("mamba2"))
    names = {f"{path}.mixer.level.{leaf}" for path in native_paths(model) for leaf in ("weight", "bias")}
    assert select_parameters(model, ["mixers"], {}) == names


def test_the_fused_layer_is_never_called() -> None:
    """Kernels that run the whole layer in training would leave the level weights out."""
    model = upgrade(tiny_model("mamba2"))
    forward = type(model.get_submodule(native_paths(model)[0])).own_forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    assert forward.__globals__["mamba2_split_conv1d_scan_combined"] is no_fused_layer


# -- other models ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "reason"), [("jamba", "Mamba-1"), ("lfm2", "short convolution"), ("llama", "no layer of it")]
)
def test_other_layers_are_refused_by_name(name: str, reason: str) -> None:
    """Models without Gated DeltaNet and Mamba-2 are refused with the reason."""
    model = TINY_FAMILIES[name].build()
    with pytest.raises(SurgeryError, match=reason):
        surgery.apply(model, "upgrade-log-linear")


@pytest.mark.parametrize(
    ("native", "message"),
    [
        ({"levels": 1}, "levels must be a whole number, 2 or more"),
        ({"block": 48}, "power of two"),
        ({"level": 3}, "level"),
        ({"layers": "7:"}, "selects none of the 1 native"),
    ],
)
def test_options_are_checked_by_the_plan(native: dict, message: str) -> None:
    """Options that do not fit are refused before anything is converted."""
    with pytest.raises(SurgeryError, match=message):
        surgery.plan(tiny_model("qwen3_5"), {"structure": "dense", "native": native})


def test_level_weights_are_no_mixer_for_attention() -> None:
    """`attention: {mixer: native}` is refused, and names the key to use."""
    with pytest.raises(SurgeryError, match="Give the key native"):
        surgery.plan(tiny_model("qwen3_5"), {"structure": "dense", "attention": {"mixer": "native"}})


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("falcon_h1", marks=SLOW)])
def test_beside_mixers_for_attention(name: str) -> None:
    """A recipe may have both keys, unless one layer would hold both states."""
    recipe = {"structure": "dense", "native": {}, "attention": {"mixer": "window", "window": 8, "start": "copied"}}
    if name == "falcon_h1":
        with pytest.raises(SurgeryError, match="side by side"):
            surgery.apply(tiny_model(name), recipe)
        return
    model, ids = surgery.apply(tiny_model(name), recipe), token_ids(30)
    assert [row["layers"] for row in surgery.inspect(model)["mixer_rows"]] == [1, 1]
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


# -- checkpoints -----------------------------------------------------------------------------------
def tensors_in(folder: object) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_converted_folders(name: str, tmp_path) -> None:
    """convert, load, save and densify: the same logits, and at the end the same bits as before."""
    source, out, saved = (tmp_path / part for part in ("source", "out", "saved"))
    model, ids = tiny_model(name), token_ids()
    model.save_pretrained(source)
    report = surgery.convert(source, "upgrade-log-linear", out, quiet=True)
    assert report["native"]["change"] < 1e-5
    loaded = AutoModelForCausalLM.from_pretrained(out).eval()
    assert relative(logits(loaded, ids), logits(model, ids)) < 2e-5
    assert all(isinstance(loaded.get_submodule(path).mixer, NativeMixer) for path in native_paths(loaded))
    loaded.save_pretrained(saved)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(saved).eval(), ids), logits(loaded, ids))
    for folder in (out, saved):
        dense = tmp_path / f"{folder.name}-dense"
        assert surgery.densify(folder, dense)["native"] == len(native_paths(model))
        before, after = (tensors_in(place) for place in (source, dense))
        if name in MORE:  # convolutions in parts, which converted files hold joined
            before, after = (dict(AutoModelForCausalLM.from_pretrained(f).state_dict()) for f in (source, dense))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
    configs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("source", "out-dense"))
    assert next(configs) == next(configs)


def test_plan_inspect_and_apply_agree(tmp_path) -> None:
    """The plan, the report and a model in memory name the layers and the bytes of their states, before and after."""
    model = tiny_model("mamba2")
    model.save_pretrained(tmp_path / "source")
    planned = surgery.plan(tmp_path / "source", "upgrade-log-linear", context=4096)
    surgery.convert(tmp_path / "source", "upgrade-log-linear", tmp_path / "out", quiet=True)
    inspected = surgery.inspect(tmp_path / "out")
    applied = surgery.apply(model, "upgrade-log-linear")
    row, shape = planned["mixers"][0], model.get_submodule(native_paths(model)[0]).mixer.shape
    state = 4 * shape.groups * shape.key * shape.value * 2  # two layers
    assert row["mixer"] == "native: 12 level weights, block 64"
    assert row["paths"] == native_paths(model)
    assert row["cache_bytes"]["4096"] == [state, 8 * state]  # a block, and bits 6 to 12 of 4096
    for report in (inspected, surgery.inspect(applied)):
        assert report["checks"]["as_reported"]
        assert report["mixer_rows"][0]["paths"] == native_paths(model)
        assert report["mixer_rows"][0]["cache_bytes"]["65536"][0] == state
        assert 0 < report["native"]["change"] < 1e-5 and report["native"]["tokens"] == 256  # four blocks
    applied.save_pretrained(tmp_path / "applied")
    written = tensors_in(tmp_path / "out")
    assert tensors_in(tmp_path / "applied").keys() == written.keys()
    surgery.densify(applied)
    assert not any("level" in name for name, _ in applied.named_parameters())
    assert relative(logits(applied, token_ids()), logits(tiny_model("mamba2"), token_ids())) == 0


@pytest.mark.parametrize(
    "recipe", ["upgrade-log-linear", {"structure": "low_rank", "keep": 0.5, "native": {"block": 16}}]
)
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_the_change_of_the_logits_is_measured_at_conversion(recipe, factor, tmp_path, monkeypatch, capsys) -> None:
    """inspect prints the change by the level weights alone, beside structured linears too, and warns if it is no rounding.
    A report that was edited is refused.
    """
    weights = NativeMixer.level_weights
    monkeypatch.setattr(NativeMixer, "level_weights", lambda self, x_BTD: factor * weights(self, x_BTD))
    tiny_model("qwen3_5").save_pretrained(tmp_path / "source")
    surgery.convert(tmp_path / "source", recipe, tmp_path / "out", quiet=True)
    with pytest.raises(SystemExit, match="0"):
        main(["inspect", str(tmp_path / "out")])
    shown = " ".join(capsys.readouterr().out.split())
    assert "level weights of 1, at conversion: logits of" in shown and "of the largest logit" in shown
    assert ("That is more than rounding" in shown) == (factor > 1)
    path = tmp_path / "out" / "surgery_report.json"
    report = json.loads(path.read_text())
    assert (report["native"]["change"] < 1e-5) == (factor == 1)
    path.write_text(json.dumps({**report, "native": {**report["native"], "change": -1.0}}))
    with pytest.raises(SurgeryError, match=r"native\.change: input should be greater than or equal to 0"):
        surgery.inspect(tmp_path / "out")


def test_killed_and_resumed_to_the_same_bytes(tmp_path) -> None:
    """The change is measured once: a resumed conversion reads it from the journal, and draws the same numbers."""
    tiny_model("mamba2").save_pretrained(tmp_path / "source")
    recipe = load_recipe("upgrade-log-linear")
    whole, *resumed = killing.convert_with_kills(
        lambda out, resume: convert(str(tmp_path / "source"), recipe, out, resume=resume), tmp_path, kills=2
    )
    change = json.loads((whole / "surgery_report.json").read_text())["native"]
    for out in resumed:
        assert json.loads((out / "surgery_report.json").read_text())["native"] == change
        assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_trained_level_weights_stay(tmp_path) -> None:
    """densify leaves trained level weights, and refuses a model that has nothing else."""
    model = surgery.apply(tiny_model("qwen3_5"), {"structure": "dense", "native": {"levels": 3, "block": 8}})
    mixer = model.get_submodule(native_paths(model)[0]).mixer
    assert mixer.config == Native(3, 8)
    torch.nn.init.ones_(mixer.level.bias)
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(SurgeryError, match="these were trained"):
        surgery.densify(model)
    with pytest.raises(SurgeryError, match="these were trained"):
        surgery.densify(tmp_path / "trained", tmp_path / "dense")


LOW_RANK = {"structure": "low_rank", "keep": 0.9, "tokens": 128, "length": 32, "curvature": "none"}


def test_structured_linears_beside_level_weights(tmp_path) -> None:
    """Structured projections of an upgraded layer are those of the layer without level weights, which densify removes."""
    source, ids = tmp_path / "source", token_ids()
    tiny_model("qwen3_5").save_pretrained(source)
    surgery.convert(source, LOW_RANK, tmp_path / "plain", quiet=True)
    surgery.convert(source, {**LOW_RANK, "native": {}}, tmp_path / "both", quiet=True)
    plain, both = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("plain", "both"))
    assert relative(logits(both, ids), logits(plain, ids)) < 2e-5
    structured = [n for n, m in both.named_modules() if isinstance(m, StructuredLinear) and "linear_attn" in n]
    assert {name.rpartition(".")[2] for name in structured} == {"in_proj_qkv", "in_proj_z", "out_proj"}
    surgery.densify(tmp_path / "both", tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())


def test_structured_linears_before_level_weights(tmp_path) -> None:
    """A model with structured projections is upgraded as exactly as a dense one, and keeps them."""
    tiny_model("mamba2").save_pretrained(tmp_path / "source")
    surgery.convert(tmp_path / "source", LOW_RANK, tmp_path / "structured", quiet=True)
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "structured").eval(), token_ids()
    before = logits(model, ids)
    upgrade(model, random=False)
    assert relative(logits(model, ids), before) < 2e-5
    structured = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, StructuredLinear)}
    assert structured == {"in_proj", "out_proj"}
    upgrade(model)
    assert relative(continued(model, ids, [29, 1, 45]), logits(model, ids)) < 1e-5


def test_calibrated_linears_beside_level_weights() -> None:
    """A calibrated conversion fits the linears as it does without level weights, and tunes them."""
    recipe, texts = {**LOW_RANK, "tune": {"layers": 1}}, [{"input_ids": token_ids(32, rows=4)}]
    plain, both = (
        surgery.apply(tiny_model("qwen3_5"), {**recipe, **more}, calibration=texts) for more in ({}, {"native": {}})
    )
    assert relative(logits(both, token_ids()), logits(plain, token_ids())) < 2e-5


def test_models_in_memory_without_a_recipe(tmp_path) -> None:
    """install_native records the level weights in the config, so that save_pretrained writes a converted folder."""
    model, ids = tiny_model("qwen3_5"), token_ids()
    with pytest.raises(SurgeryError, match="no native linear layer"):
        install_native(model, {"model.layers.1.self_attn": SMALL})
    install_native(model, dict.fromkeys(native_paths(model), SMALL))
    torch.nn.init.normal_(model.get_submodule(native_paths(model)[0]).mixer.level.bias)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval(), ids), logits(model, ids))


def test_kernels_for_whole_layers_are_refused() -> None:
    """`use_kernels=True` replaces layers by others, which would leave the level weights out."""
    model = tiny_model("qwen3_5")
    model._use_kernels = True
    with pytest.raises(SurgeryError, match="use_kernels=True, which replaces whole layers"):
        surgery.apply(model, "upgrade-log-linear")


def test_names_of_the_core_functions() -> None:
    """The functions that are replaced exist in this version of transformers under these names."""
    tiny_model("mamba2")
    from transformers.models.mamba2 import modeling_mamba2
    from transformers.models.qwen3_next import modeling_qwen3_next

    assert all(hasattr(modeling_qwen3_next, name) for name in GATED_DELTA)
    assert all(hasattr(modeling_mamba2, name) for name in MAMBA2)
