"""Mixers in vLLM's engine: the same greedy tokens as transformers in pieces, with cached prefixes, after preemption,
and compiled.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.served import (
    HYBRID,
    attention_of_recipe,
    converted,
    expected,
    expected_with_adapter,
    lora_adapter,
    ragged_prompts,
    random_checkpoint,
)
from safetensors.torch import load_file, save_file
from serving.engines import apart, check_equal, engine, generate, needs_vllm, preemptions

pytestmark = needs_vllm

RECIPES = (
    "log-linear",
    "log-linear-gdn",
    "log-linear-mamba2",
    "gated-deltanet",
    "ssd",
    "retnet",
    "tbm",
    "lolcats",
    "hedgehog",
    "block-diagonal-mask",
)
TOKENS = 16
LONG = {"shared": 300, "longest": 20}


def by_recipe(source: Path, out: Path, name: str, **attention) -> Path:
    """Convert by a shipped recipe, with a smaller window and block."""
    return apart(converted, source, out, structure="dense", attention={**attention_of_recipe(name), **attention})


@pytest.mark.parametrize("name", RECIPES)
def test_tokens_equal_those_of_transformers(name, source, tmp_path):
    out = by_recipe(source, tmp_path / "OUT", name)
    prompts = ragged_prompts()
    with engine(out) as llm:
        assert llm.llm_engine.vllm_config.model_config.architecture == "SurgeryForCausalLM"
        check_equal(generate(llm, prompts, TOKENS), apart(expected, out, prompts, TOKENS))


@pytest.mark.parametrize("name", ["log-linear", "tbm"])
def test_prompts_in_pieces_of_48_tokens(name, source, tmp_path):
    out = by_recipe(source, tmp_path / "OUT", name)
    prompts = ragged_prompts()
    with engine(out, max_num_batched_tokens=48, max_num_seqs=4) as llm:
        check_equal(generate(llm, prompts, TOKENS), apart(expected, out, prompts, TOKENS))


def check_cached_prefixes(llm, out: Path, prompts: list[list[int]]) -> list:
    """Check the tokens of prompts that come twice, the second time with cached prefixes; return the second outputs."""
    wanted = apart(expected, out, prompts, TOKENS)
    check_equal(generate(llm, prompts, TOKENS), wanted)
    again = generate(llm, prompts, TOKENS)
    check_equal(again, wanted)
    return again


def test_cached_prefixes_are_hit_and_exact(hybrid):
    prompts = ragged_prompts(**LONG)
    with engine(hybrid, enable_prefix_caching=True) as llm:
        again = check_cached_prefixes(llm, hybrid, prompts)
        assert min(output.num_cached_tokens for output in again) >= 128
        check_equal(
            generate(llm, [prompt[:-2] for prompt in prompts], 4), apart(expected, hybrid, [p[:-2] for p in prompts], 4)
        )


def test_preempted_requests_start_again(hybrid):
    prompts = ragged_prompts(shared=112, longest=13)  # 118 to 125 tokens, so that each needs a second block of 128
    with engine(hybrid, num_gpu_blocks_override=15) as llm:
        check_equal(generate(llm, prompts, TOKENS), apart(expected, hybrid, prompts, TOKENS))
        assert preemptions(llm) > 0


def test_requests_with_an_adapter_after_others_of_the_same_prompts(hybrid, tmp_path):
    """LoRA of linears before and behind mixers, structured and dense; cached prefixes are those of an adapter.

    Not in one step: vLLM's build for CPUs then adds the adapter to every request, of unconverted models too.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
    adapter = apart(lora_adapter, hybrid, tmp_path / "ADAPTER", targets)
    prompts = ragged_prompts(4, **LONG)
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=TOKENS, ignore_eos=True)
    plain = [tokens for tokens, _ in apart(expected, hybrid, prompts, TOKENS)]
    adapted = apart(expected_with_adapter, hybrid, adapter, prompts, TOKENS)
    assert plain != adapted
    with engine(hybrid, enable_lora=True, max_loras=1, max_lora_rank=8, enable_prefix_caching=True) as llm:
        for wanted in (plain, adapted, plain, adapted):
            request = LoRARequest("adapter", 1, str(adapter)) if wanted is adapted else None
            inputs = [{"prompt_token_ids": ids} for ids in prompts]
            outputs = llm.generate(inputs, sampling, use_tqdm=False, lora_request=request)
            assert [list(output.outputs[0].token_ids) for output in outputs] == wanted


def test_speculation_is_refused(hybrid):
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    with (
        pytest.raises(Exception, match="speculative decoding is refused"),
        engine(hybrid, speculative_config=speculative),
    ):
        pass


@pytest.mark.parametrize(
    "mixer",
    [
        {"mixer": "window", "window": 8, "sinks": 2},
        {"mixer": "linear", "mask": "toeplitz"},
        {"mixer": "mlr", "ranks": [16, 8, 8], "extents": [64, 16]},
        {
            "mixer": "mlr",
            "ranks": [16, 16],
            "extents": [32],
            "form": "nested",
            "hybrid": {"softmax": 0.34, "choose_by": "every"},
        },
    ],
    ids=str,
)
def test_mixers_without_a_cache_in_vllm_are_refused(mixer, source, tmp_path):
    out = apart(converted, source, tmp_path / "OUT", structure="dense", attention=mixer)
    with (
        pytest.raises(Exception, match=r"sees the first 2 tokens|combines scores of|grows with the context"),
        engine(out),
    ):
        pass


def test_rope_that_depends_on_the_longest_request_is_served_up_to_a_length(tmp_path):
    """Beyond it, a long request would change the rotation of those computed with it."""
    rope = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}
    apart(random_checkpoint, tmp_path / "SRC", rope_parameters=rope, max_position_embeddings=64)
    out = apart(converted, tmp_path / "SRC", tmp_path / "OUT", **HYBRID)
    with pytest.raises(Exception, match="Use --max-model-len 64"), engine(out):
        pass
    prompts = ragged_prompts(longest=64 - TOKENS)
    with engine(out, max_model_len=64) as llm:
        check_equal(generate(llm, prompts, TOKENS), apart(expected, out, prompts, TOKENS))


def test_a_missing_tensor_of_a_mixer_stops_the_engine(hybrid, tmp_path, monkeypatch):
    """Also of a Hub id, whose files are not there yet when vLLM makes its config."""
    from surgery.vllm.linear import SurgeryTable

    broken = shutil.copytree(hybrid, tmp_path / "OUT")
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if ".mixer." in name)
    tensors.pop(name)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match=r"mixer\."), engine(broken):
        pass
    monkeypatch.setattr(SurgeryTable, "maybe_update_config", lambda *args, **kwargs: None)
    with pytest.raises(Exception, match="lacks 1 tensors of its mixers"), engine(broken):
        pass


WINDOWS = {"alternating": {"hybrid": {"softmax": 0.34, "choose_by": "every"}}, "everywhere": {}}


@pytest.fixture(scope="module", params=WINDOWS)
def windows(request, source, tmp_path_factory) -> Path:
    """Windows of 24 tokens in two of three layers, or in all of them, and BTT linears."""
    attention = {"mixer": "window", "window": 24, **WINDOWS[request.param]}
    out = tmp_path_factory.mktemp("windows") / "OUT"
    return apart(converted, source, out, structure="btt", blocks=[4, 4], attention=attention)


def test_windows_are_vllm_s_own(windows):
    """And the last tokens of a window count: prompts of one window, one token more and many."""
    prompts = [prompt for n in (24, 25, 120) for prompt in ragged_prompts(2, longest=n)]
    with engine(windows, max_num_batched_tokens=48, max_num_seqs=4) as llm:
        config = llm.llm_engine.vllm_config
        assert config.model_config.architecture == "SurgeryWindowForCausalLM"
        layers = config.compilation_config.static_forward_context.values()
        found = [layer.sliding_window for layer in layers if hasattr(layer, "sliding_window")]
        assert len(found) == 3 and found.count(24) in (2, 3)
        check_equal(generate(llm, prompts, TOKENS), apart(expected, windows, prompts, TOKENS))


def test_cached_prefixes_of_windows_are_exact(windows):
    with engine(windows, enable_prefix_caching=True) as llm:
        check_cached_prefixes(llm, windows, ragged_prompts(**LONG))


def test_states_and_windows_in_one_model(hybrid, tmp_path):
    """The hybrid with a window in its softmax layer, which has no tensors."""
    out = shutil.copytree(hybrid, tmp_path / "OUT")
    config = json.loads((out / "config.json").read_text())
    mixers = config["quantization_config"]["mixers"]
    (path,) = {f"model.layers.{i}.self_attn" for i in range(3)} - set(mixers)
    mixers[path] = {"mixer": "window", "window": 24}
    (out / "config.json").write_text(json.dumps(config))
    prompts = ragged_prompts()
    with engine(out, max_num_batched_tokens=48, max_num_seqs=4) as llm:
        check_equal(generate(llm, prompts, TOKENS), apart(expected, out, prompts, TOKENS))


@pytest.mark.slow
def test_compiled_engines_give_the_same_tokens(hybrid):
    prompts = ragged_prompts()
    with engine(hybrid, enforce_eager=False) as llm:
        check_equal(generate(llm, prompts, TOKENS), apart(expected, hybrid, prompts, TOKENS))
