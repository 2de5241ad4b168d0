"""Structured linears in vLLM's engine: the same greedy tokens as transformers, and nothing missing or unmatched
passes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import median

import pytest
import torch
from helpers.served import converted, expected, quantized, ragged_prompts, random_checkpoint
from safetensors.torch import load_file, save_file
from serving.engines import apart, check_equal, engine, gaps_of_equal_tokens, generate, needs_vllm

pytestmark = needs_vllm

ALL_STRUCTURES = {
    "structure": "btt",
    "blocks": [4, 4],
    "rules": [
        {"match": "attention.query", "structure": "low_rank", "keep": 0.5},
        {"match": "attention.key", "structure": "dense"},
        {"match": "attention.value", "structure": "pivoted_low_rank", "keep": 0.4},
        {"match": "mlp.gate", "structure": "monarch", "keep": 0.5},
        {"match": "mlp.up", "structure": "kronecker", "keep": 0.6},
        {"match": "mlp.down", "structure": "low_rank", "keep": 0.7},
        {"match": "head", "structure": "low_rank", "keep": 0.6},
    ],
}
SEVERAL_CORES = {
    "structure": "mlr",
    "levels": 2,
    "keep": 0.6,
    "rules": [
        {"match": "attention.query", "structure": "tensor_train", "cores": 3, "keep": 0.6},
        {"match": "attention.value", "structure": "block_tensor_train", "cores": 3, "keep": 0.6},
        {"match": "mlp.gate", "structure": "mlbtc", "levels": [1, [4, 4]], "keep": 0.6},
        {"match": "mlp.up", "structure": "block_tensor_train", "cores": 3, "keep": 0.6},
    ],
}
WHOLE = {"structure": "btt", "blocks": [4, 4], "rules": [{"match": "head", "structure": "low_rank", "keep": 0.6}]}
JOINED = {
    "structure": "pivoted_low_rank",
    "share": "input",
    "rules": [{"match": "mlp.*", "structure": "btt", "blocks": [4, 4]}],
}
PRUNED = {
    "structure": "low_rank",
    "keep": 0.6,
    "rules": [
        {"match": "mlp.*", "structure": "pruned", "multiple": 16},
        {"match": "mlp.*", "layers": "1:", "keep": 0.8},
        {"match": "mlp.*", "layers": "2:", "structure": "dense"},
    ],
}
# family -> the recipe and the class of vLLM that serves it
SERVED = {
    "llama": (ALL_STRUCTURES, "LlamaForCausalLM"),
    "llama-cores": (SEVERAL_CORES, "LlamaForCausalLM"),
    "mistral": (ALL_STRUCTURES, "MistralForCausalLM"),
    "qwen2": (ALL_STRUCTURES, "Qwen2ForCausalLM"),
    "qwen3": (ALL_STRUCTURES, "Qwen3ForCausalLM"),
    "gemma2": (ALL_STRUCTURES, "SurgeryLogitsForCausalLM"),
    "granite": ({"structure": "low_rank", "keep": 0.5}, "SurgeryLogitsForCausalLM"),
    "llama-joined": (JOINED, "LlamaForCausalLM"),
    "qwen2-joined": (JOINED, "Qwen2ForCausalLM"),
    "gemma2-joined": (JOINED, "SurgeryLogitsForCausalLM"),
    "llama-pruned": (PRUNED, "LlamaForCausalLM"),
    "phi3-pruned": (PRUNED, "Phi3ForCausalLM"),
    "phi3": (WHOLE, "Phi3ForCausalLM"),
    "phi3-split": ({**WHOLE, "fused": "split"}, "Phi3ForCausalLM"),
}


@pytest.mark.parametrize("name", SERVED)
def test_tokens_equal_those_of_transformers(name, tmp_path):
    recipe, cls = SERVED[name]
    out = apart(
        converted, apart(random_checkpoint, tmp_path / "SRC", name.partition("-")[0]), tmp_path / "OUT", **recipe
    )
    prompts = ragged_prompts()
    wanted = apart(expected, out, prompts, 16)
    with engine(out) as llm:
        assert llm.llm_engine.vllm_config.model_config.architecture == cls
        check_equal(generate(llm, prompts, 16), wanted)


# family -> the recipe of a checkpoint that is stored as integers, and options of the engine
QUANTIZED = {
    "llama": (ALL_STRUCTURES, {}),
    "llama-cores": (SEVERAL_CORES, {}),
    "llama-transformers": (ALL_STRUCTURES, {"model_impl": "transformers"}),
    "qwen2-joined": (JOINED, {}),
    "phi3-split": ({**WHOLE, "fused": "split"}, {}),
}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", QUANTIZED)
def test_linears_stored_as_integers_give_the_tokens_of_transformers(name, bits, tmp_path):
    """And the integers stay in memory."""
    recipe, options = QUANTIZED[name]
    source = apart(random_checkpoint, tmp_path / "SRC", name.partition("-")[0])
    out = apart(quantized, apart(converted, source, tmp_path / "OUT", **recipe), tmp_path / "SMALL", bits)
    prompts = ragged_prompts()
    with engine(out, **options) as llm:
        check_equal(generate(llm, prompts, 16), apart(expected, out, prompts, 16))
        stored = llm.apply_model(integer_tensors)[0]
    assert len(stored) >= 6 and all(dtype == (torch.int8 if bits == 8 else torch.uint8) for dtype in stored.values())


# Structures with a product in FP8
WITH_FP8 = {**ALL_STRUCTURES, "rules": [r for r in ALL_STRUCTURES["rules"] if r.get("structure") != "kronecker"]}
IN_FP8 = {**QUANTIZED, "llama": (WITH_FP8, {}), "llama-transformers": (WITH_FP8, {"model_impl": "transformers"})}
IN_FP8["llama-compiled"] = WITH_FP8, {"enforce_eager": False}
del IN_FP8["llama-cores"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "compiled" in name else name for name in IN_FP8]
)
def test_linears_in_fp8_round_their_inputs_as_in_transformers(name, tmp_path):
    """A difference in the last digit may become a step of e4m3, so a token may differ, and all behind it. Until then most
    log probabilities are equal to rounding; without rounded inputs they differ by 0.05 nats.
    """
    recipe, options = IN_FP8[name]
    source = apart(random_checkpoint, tmp_path / "SRC", name.partition("-")[0])
    out = apart(quantized, apart(converted, source, tmp_path / "OUT", **recipe), tmp_path / "SMALL", 8, "fp8")
    prompts = ragged_prompts()
    wanted = apart(expected, out, prompts, 16)
    with engine(out, **options) as llm:
        outputs = generate(llm, prompts, 16)
        dtypes = llm.apply_model(weight_dtypes)[0]
    gaps = gaps_of_equal_tokens(outputs, wanted)
    assert len(gaps) > 8 * 16 * 0.6 and median(gaps) < 1e-5
    assert dtypes.count(torch.float8_e4m3fn) >= 6


def weight_dtypes(model) -> list[torch.dtype]:
    return [t.dtype for n, t in model.named_parameters() if n.endswith("weight")]


def integer_tensors(model) -> dict[str, torch.dtype]:
    return {n: t.dtype for n, t in model.named_parameters() if n.endswith("weight") and not t.is_floating_point()}


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_linears_stored_as_integers_compile(bits, llama, tmp_path):
    out = apart(quantized, llama, tmp_path / "SMALL", bits)
    prompts = ragged_prompts()
    with engine(out, enforce_eager=False) as llm:
        check_equal(generate(llm, prompts, 8), apart(expected, out, prompts, 8))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return apart(converted, apart(random_checkpoint, folder / "SRC"), folder / "OUT", **ALL_STRUCTURES)


@pytest.mark.parametrize(
    "options", [{"model_impl": "transformers"}, {"max_num_batched_tokens": 48, "max_num_seqs": 4}], ids=str
)
def test_tokens_are_equal_through_the_transformers_backend_and_in_pieces(llama, options):
    prompts = ragged_prompts()
    with engine(llama, **options) as llm:
        check_equal(generate(llm, prompts, 8), apart(expected, llama, prompts, 8))


def test_pruned_mlps_of_several_widths_through_the_transformers_backend(tmp_path):
    out = apart(converted, apart(random_checkpoint, tmp_path / "SRC"), tmp_path / "OUT", **PRUNED)
    prompts = ragged_prompts(4)
    with engine(out, model_impl="transformers") as llm:
        check_equal(generate(llm, prompts, 8), apart(expected, out, prompts, 8))


def test_speculation_by_prompt_lookup_is_exact_without_mixers(llama):
    prompts = ragged_prompts()
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    with engine(llama, speculative_config=speculative) as llm:
        check_equal(generate(llm, prompts, 8), apart(expected, llama, prompts, 8))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("model.layers.1.self_attn.q_proj.right", "right"),
        ("model.layers.1.mlp.up_proj.weight", "up_proj"),
        ("model.norm.weight", "norm"),
        ("model.layers.0.self_attn.k_proj.weight", "k_proj"),
    ],
)
def test_a_missing_tensor_stops_the_engine(llama, tmp_path, tensor, message):
    broken = shutil.copytree(llama, tmp_path / "OUT")
    tensors = load_file(broken / "model.safetensors")
    tensors.pop(tensor)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match=message), engine(broken):
        pass


def test_an_unknown_bias_stops_the_engine(llama, tmp_path):
    broken = shutil.copytree(llama, tmp_path / "OUT")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.bias"] = torch.ones(128)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match=r"down_proj\.bias"), engine(broken):
        pass


def test_an_entry_without_a_module_stops_the_engine(llama, tmp_path):
    broken = shutil.copytree(llama, tmp_path / "OUT")
    config = json.loads((broken / "config.json").read_text())
    modules = config["quantization_config"]["modules"]
    modules["model.layers.9.mlp.up_proj"] = modules["model.layers.0.mlp.up_proj"]
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match=r"layers\.9\.mlp\.up_proj"), engine(broken):
        pass


def test_another_quantization_is_refused_in_words(llama):
    message = "--quantization fp8 is not for converted checkpoints"
    with pytest.raises(Exception, match=message), engine(llama, quantization="fp8"):
        pass


def test_random_weights_are_refused_in_words(llama):
    with pytest.raises(Exception, match="--load-format dummy has random numbers"), engine(llama, load_format="dummy"):
        pass


def test_loading_again_is_refused_in_words(llama):
    with engine(llama) as llm, pytest.raises(Exception, match=r"reload_weights is refused|twice"):
        llm.collective_rpc("reload_weights")
