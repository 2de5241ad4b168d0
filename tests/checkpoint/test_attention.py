"""Attention modules with a mixer: the inputs of the mixer, and loading, saving and training of the model."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
import transformers
from helpers.small import FAMILIES, model_outputs, tiny_inputs
from helpers.small_mixers import (
    DecayedConfig,
    DecayedMixer,
    ExactConfig,
    ExactMixer,
    random_model,
    random_model_with_mixers,
    register_test_mixers,
)
from safetensors.torch import load_file

from surgery.architectures.attention import attention_paths, attention_shape
from surgery.core.errors import SurgeryError
from surgery.mixers import AttentionShape
from surgery.modeling.attention import install, split_attention_mask
from surgery.modeling.cache import mixer_modules
from surgery.modeling.modules import GuardedLinear

MIXABLE = [f for f in FAMILIES if not f.startswith("t5")]
TEXT = [f for f in MIXABLE if f != "vit"]


@pytest.fixture(scope="module", autouse=True)
def register_mixers():
    with register_test_mixers():
        yield


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def mixed_paths(model) -> list[str]:
    return [path for path, _ in mixer_modules(model)]


# -- what a mixer is told --------------------------------------------------------------------------
PLAIN = AttentionShape(dim=32, heads=4, groups=2, key=8, value=8, scaling=8**-0.5, rotary=8)


@pytest.mark.parametrize(
    "family, index, differs",
    [
        ("llama", 0, {}),
        ("mistral", 0, {"window": 4096}),
        ("qwen2", 1, {}),
        ("qwen3", 1, {"norm": True}),
        ("gemma2", 0, {"window": 8, "softcap": 50.0}),
        ("gemma2", 1, {"softcap": 50.0}),
        ("gemma3", 1, {"window": 8, "norm": True}),
        ("phi3", 0, {}),
        ("olmo2", 0, {"norm": True}),
        ("gpt2", 0, {"groups": 4, "rotary": 0}),
        ("gpt_neox", 0, {"groups": 4, "rotary": 2}),
        ("bert", 0, {"groups": 4, "rotary": 0, "causal": False}),
        ("vit", 0, {"groups": 4, "rotary": 0, "causal": False}),
    ],
)
def test_shapes(family, index, differs):
    model = random_model(family)
    paths = attention_paths(model)
    assert len(paths) == 2
    assert attention_shape(model, paths[index]) == AttentionShape(**{**PLAIN.__dict__, **differs})


def padded_inputs(family: str, side: str) -> dict[str, torch.Tensor]:
    inputs = tiny_inputs(family, 3, 15)
    inputs["attention_mask"] = mask = torch.ones_like(inputs["input_ids"])
    first, last = (slice(None, 6), slice(None, 1)) if side == "left" else (slice(-6, None), slice(-1, None))
    mask[1, first], mask[2, last] = 0, 0
    if side == "holes":
        mask[0, 4], mask[0, 9:11] = 0, 0
    return inputs


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("family", MIXABLE)
def test_a_mixer_that_is_softmax_changes_nothing(family, side, attention):
    if family == "vit" and side != "none":
        pytest.skip("images have no padding")
    if family == "gemma2" and attention == "sdpa":
        pytest.skip("the library's sdpa leaves out the cap on scores, which a mixer must know of")
    inputs = tiny_inputs(family, 2, 15) if side == "none" else padded_inputs(family, side)
    model = random_model(family)
    model.set_attn_implementation(attention)
    expected = model_outputs(model, inputs)
    install(model, dict.fromkeys(attention_paths(model), ExactConfig()))
    found, real = model_outputs(model, inputs), inputs.get("attention_mask")
    if real is not None:
        found, expected = found[real.bool()], expected[real.bool()]
    assert far(found, expected) < 1e-6 * 2
    assert bool(model_outputs(model, inputs).isfinite().all())


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_some_layers_only(family):
    model, inputs = random_model(family), padded_inputs(family, "left")
    expected = model_outputs(model, inputs)
    install(model, {attention_paths(model)[1]: ExactConfig()})
    real = inputs["attention_mask"].bool()
    assert mixed_paths(model) == attention_paths(model)[1:]
    assert far(model_outputs(model, inputs)[real], expected[real]) < 2e-6


def test_validity_out_of_every_mask():
    """None; flash: 2-D; sdpa and eager: 4-D, of all tokens, of a window, of a static cache; flex: a block mask."""
    x, seen = torch.zeros(2, 3, 4), 5
    real = torch.tensor([[1, 1, 1], [0, 0, 1]], dtype=torch.bool)
    past = torch.tensor([[1] * 5, [0] * 5], dtype=torch.bool)
    columns = torch.cat([past, real], dim=1)
    assert split_attention_mask(None, x, seen) == (None, None)
    assert torch.equal(split_attention_mask(columns.long(), x, seen)[0], real)
    q_T1, k_S = torch.arange(5, 8)[:, None], torch.arange(8)
    full = columns[:, None, None, :] & (k_S <= q_T1)
    static = torch.cat([full, full.new_zeros(2, 1, 3, 6)], dim=-1)
    window = (full & (k_S > q_T1 - 4))[..., 2:]
    for mask in (full, static, window):
        valid, kept = split_attention_mask(mask, x, seen)
        assert torch.equal(valid, real) and torch.equal(kept, window if mask is window else full)
        for dtype in (torch.float32, torch.bfloat16):
            additive = torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)
            assert torch.equal(split_attention_mask(additive, x, seen)[0], real)
    from torch.nn.attention.flex_attention import create_block_mask

    block = create_block_mask(lambda b, h, q, k: columns[b, k] & (k <= q + seen), 2, None, 3, 8, device="cpu")
    assert torch.equal(split_attention_mask(block, x, seen)[0], real)


def test_rotary_embedding_is_left_out_where_a_mixer_says_so():
    inputs = tiny_inputs("gemma3", 2)
    turned, plain = (
        model_outputs(random_model_with_mixers("gemma3", DecayedConfig(rotated=r)), inputs) for r in (True, False)
    )
    assert far(turned, plain) > 1e-3
    caught = []
    model = random_model_with_mixers("gemma3", DecayedConfig(rotated=False))
    module = model.model.layers[0].self_attn
    model.model.layers[0].self_attn.q_norm.register_forward_hook(lambda *a: caught.append(a[2]))
    module.mixer.register_forward_pre_hook(lambda _, args: caught.append(args[0].q_BHTK))
    model_outputs(model, inputs)
    assert torch.equal(caught[0].transpose(1, 2) if caught[0].shape != caught[1].shape else caught[0], caught[1])


# -- refusals --------------------------------------------------------------------------------------
def test_models_that_cannot_be_given_mixers():
    with pytest.raises(SurgeryError, match="T5 adds a learned position bias"):
        attention_paths(random_model("t5"))
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(SurgeryError, match="computes attention in its own forward"):
        install(bloom, {"transformer.h.0.self_attention": ExactConfig()})


def test_paths_are_checked_before_anything_is_changed():
    model = random_model("llama")
    paths = attention_paths(model)
    with pytest.raises(SurgeryError, match=r"no attention at 'model.layers.2.self_attn'; did you mean"):
        install(model, {paths[0]: ExactConfig(), "model.layers.2.self_attn": ExactConfig()})
    assert not mixed_paths(model) and type(model) is transformers.LlamaForCausalLM


def test_cross_attention_is_not_among_the_places():
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=96, add_cross_attention=True)
    assert attention_paths(transformers.GPT2LMHeadModel(config)) == ["transformer.h.0.attn"]


def test_masks_of_one_s_own_are_refused():
    """A mixer that reads no masks must not mix what they keep apart (packed documents: test_packed_documents)."""
    model, ids = random_model_with_mixers("llama", DecayedConfig()), tiny_inputs("llama", 1, 8)["input_ids"]
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        mask = torch.ones(1, 1, 8, 8).tril().bool()
        mask[..., 2, 4] = True
        with pytest.raises(SurgeryError, match="not causal over the real tokens"):
            model(ids, attention_mask=mask if attention == "sdpa" else (~mask).float() * -1e38, use_cache=False)
    with pytest.raises(SurgeryError, match="cu_seq_lens_q"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 4, 8]), use_cache=False)


def test_masks_that_nobody_makes():
    """A None that may hide padding is not trusted; our name is no attention for ordinary modules."""
    model, inputs = random_model_with_mixers("llama", DecayedConfig()), padded_inputs("llama", "left")
    transformers.AttentionInterface.register("unheard-of", lambda *a, **k: None)
    model.config._attn_implementation_internal = "unheard-of"
    with pytest.raises(SurgeryError, match="'unheard-of' makes no masks"):
        model(**inputs)
    model = random_model("llama")
    model.config._attn_implementation_internal = "surgery"
    with pytest.raises(SurgeryError, match="LlamaAttention has none"):
        model(**inputs)


# -- checkpoints -----------------------------------------------------------------------------------
def tensors_of(folder):
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@pytest.mark.parametrize("family", MIXABLE)
def test_saving_and_loading_is_exact(family, tmp_path):
    """Outputs, tensors and table are equal, also with several files; so are the integer buffer and the buffer that is
    not saved.
    """
    model, inputs = random_model_with_mixers(family, DecayedConfig(half_life=3), [1]), tiny_inputs(family, 2)
    before = model_outputs(model, inputs)
    model.save_pretrained(tmp_path / "a", max_shard_size="20KB")
    kind = getattr(transformers, json.loads((tmp_path / "a" / "config.json").read_text())["architectures"][0])
    loaded = kind.from_pretrained(tmp_path / "a").eval()
    assert torch.equal(model_outputs(loaded, inputs), before)
    (_, module), paths = next(mixer_modules(loaded)), mixed_paths(loaded)
    assert isinstance(module.mixer, DecayedMixer) and paths == mixed_paths(model) and len(paths) == 1
    assert module.mixer.order_K.dtype == torch.int64 and module.mixer.config == DecayedConfig(half_life=3)
    loaded.save_pretrained(tmp_path / "b")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    a, b = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    tables = [json.loads((tmp_path / f / "config.json").read_text())["quantization_config"] for f in "ab"]
    assert tables[0] == tables[1] and list(tables[0]["mixers"]) == paths and tables[0]["format"] == 1


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit"])
def test_the_base_model_and_other_dtypes(family, tmp_path):
    model = random_model_with_mixers(family, DecayedConfig())
    model.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert len(mixed_paths(base)) == 2
    inputs = tiny_inputs(family, 2)
    with torch.inference_mode():
        assert torch.equal(base(**inputs)[0], getattr(model, model.base_model_prefix)(**inputs)[0])
        if family == "vit":
            return  # before transformers 5.17 a renamed tensor keeps the dtype of the file, whatever it belongs to
        half = type(model).__bases__[1].from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
        assert half(**inputs)[0].isfinite().all()
    assert next(mixer_modules(half))[1].mixer.ones_1.item() == 1


def test_the_tripwire_is_a_linear_like_any_other():
    model = random_model_with_mixers("gpt2", ExactConfig())
    folded = model.transformer.h[0].attn.c_proj
    assert isinstance(folded, GuardedLinear) and folded.weight.shape == (1, 32, 32)
    x = torch.randn(3, 32)
    assert torch.allclose(folded(x), random_model("gpt2").transformer.h[0].attn.c_proj(x), atol=1e-5)


def test_device_maps_and_disk(tmp_path):
    model, inputs = random_model_with_mixers("llama", DecayedConfig()), tiny_inputs("llama", 2)
    model.save_pretrained(tmp_path / "a")
    expected = model_outputs(model, inputs)
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert torch.equal(model_outputs(load(tmp_path / "a", device_map="cpu"), inputs), expected)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}  # fmt: skip
    split = load(tmp_path / "a", device_map=places, offload_folder=tmp_path / "disk")
    assert torch.equal(model_outputs(split, inputs), expected)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(split.generate(**inputs, **options), model.generate(**inputs, **options))


def test_missing_weights_are_not_made_up(tmp_path):
    from safetensors.torch import save_file

    random_model_with_mixers("llama", DecayedConfig()).save_pretrained(tmp_path)
    tensors = tensors_of(tmp_path)
    tensors.pop("model.layers.1.self_attn.mixer.rate_G")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SurgeryError, match=r"lacks .*model.layers.1.self_attn.mixer.rate_G"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


# -- an ordinary model -----------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_it_is_copied_pickled_and_cast(family):
    model, inputs = random_model_with_mixers(family, DecayedConfig()), tiny_inputs(family, 2)
    expected = model_outputs(model, inputs)
    assert type(model).__name__ == type(random_model(family)).__name__
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(model_outputs(twin, inputs), expected) and type(twin) is type(model)
        twin.set_attn_implementation("eager")  # its own config, not the first one's
        assert (
            all(m.host is twin.config for _, m in mixer_modules(twin)) and model.config._attn_implementation == "sdpa"
        )
    assert far(model_outputs(copy.deepcopy(model).half().float(), inputs), expected) < 0.05


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bert", "vit"])
def test_gradients_with_and_without_checkpointing(family):
    inputs, gradients = tiny_inputs(family, 2, 9), []
    for checkpointing in (False, True):
        model = random_model_with_mixers(family, DecayedConfig())
        if checkpointing:
            model.gradient_checkpointing_enable()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.train()(**inputs)[0].float().pow(2).mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert {n.rpartition("mixer.")[2] for n in gradients[0] if ".mixer." in n} == {"rate_G", "gate.weight", "gate.bias"}
    assert all(torch.allclose(g, gradients[1][n], rtol=1e-4, atol=1e-7) for n, g in gradients[0].items())


def test_a_few_steps_of_training():
    model = random_model_with_mixers("llama", DecayedConfig()).train()
    ids = tiny_inputs("llama", 8, 16)["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_lora_on_queries_and_on_the_folded_output(family):
    from peft import LoraConfig, get_peft_model

    model, inputs = random_model_with_mixers(family, DecayedConfig()), tiny_inputs(family, 2)
    targets = ["c_attn", "attn.c_proj"] if family == "gpt2" else ["q_proj", "o_proj"]
    before = model_outputs(model, inputs)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, fan_in_fan_out=False)).eval()
    assert torch.equal(model_outputs(adapted, inputs), before)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    changed = model_outputs(adapted, inputs)
    assert far(changed, before) > 1e-3
    tokens = adapted.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=0)
    merged = adapted.merge_and_unload()
    assert far(model_outputs(merged, inputs), changed) < 1e-5
    assert torch.equal(merged.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=0), tokens)


@pytest.mark.parametrize("family", ["gemma3", "bert"])
def test_compiles_whole(family):
    """fullgraph: a graph break in a mixer, or around it, is an error."""
    model, inputs = random_model_with_mixers(family, ExactConfig()), padded_inputs(family, "left")
    options = {} if family == "bert" else {"use_cache": False}
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.inference_mode():
        assert far(compiled(**inputs, **options)[0], model(**inputs, **options)[0]) < 1e-6


def test_compiled_generation():
    model, ids = random_model_with_mixers("llama", DecayedConfig(), [0]), tiny_inputs("llama", 2, 7)["input_ids"]
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, **options)
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(model.generate(ids, **options), expected)


def test_installing_again_changes_the_mixer():
    model = random_model_with_mixers("llama", DecayedConfig())
    paths = attention_paths(model)
    install(model, {paths[0]: ExactConfig()})
    kinds = [type(module.mixer) for _, module in mixer_modules(model)]
    assert kinds == [ExactMixer, DecayedMixer]
    assert model.config.quantization_config.mixers[paths[0]] == {"mixer": "test-exact"}
