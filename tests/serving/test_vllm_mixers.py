"""Mixers in vLLM's engine: the same greedy tokens as transformers in pieces, with cached prefixes, after preemption, and compiled."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from helpers.served import converted, expected, ragged_prompts, random_checkpoint
from serving.engines import apart, check_equal, engine, generate, needs_vllm, preemptions

from surgery.planning.recipe import load_recipe

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
)
TOKENS = 16
LONG = {"shared": 300, "longest": 20}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return apart(random_checkpoint, tmp_path_factory.mktemp("source") / "SRC")


def by_recipe(source: Path, out: Path, name: str, **attention) -> Path:
    """Convert by a shipped recipe, with a smaller window and block, so that short prompts leave them."""
    keys = load_recipe(name, []).attention.model_dump(exclude_unset=True)
    keys |= {"window": 16} if keys.get("window") else {}
    if isinstance(keys.get("mask"), dict) and keys["mask"].get("block", 1) > 1:
        keys["mask"] = {**keys["mask"], "block": 32}
    return apart(converted, source, out, structure="dense", attention={**keys, **attention})


@pytest.mark.parametrize("name", RECIPES)
def test_tokens_equal_those_of_transformers(name, source, tmp_path):
    out = by_recipe(source, tmp_path / "OUT", name)
    prompts = ragged_prompts()
    with engine(out) as llm:
        assert llm.llm_engine.vllm_config.model_config.architecture == "SurgeryForCausalLM"
        check_equal(generate(llm, prompts, TOKENS), apart(expected, out, prompts, TOKENS))


@pytest.fixture(scope="module")
def hybrid(source, tmp_path_factory) -> Path:
    """Gated DeltaNet with a window in two of three layers, softmax in the other, and BTT linears. The state is small, so that blocks of
    the key cache, which vLLM makes as large, are shorter than the shared prefix."""
    keys = {"mixer": "linear", "mask": "gates", "scores": "delta", "gate": "value", "window": 16, "sinks": 4}
    keys |= {"hybrid": {"keep": 0.34, "by": "every"}}
    out = tmp_path_factory.mktemp("hybrid") / "OUT"
    return apart(converted, source, out, structure="btt", blocks=[4, 4], attention=keys)


@pytest.mark.parametrize("name", ["log-linear", "tbm"])
def test_prompts_in_pieces_of_48_tokens(name, source, tmp_path):
    out = by_recipe(source, tmp_path / "OUT", name)
    prompts = ragged_prompts()
    with engine(out, max_num_batched_tokens=48, max_num_seqs=4) as llm:
        check_equal(generate(llm, prompts, TOKENS), apart(expected, out, prompts, TOKENS))


def test_cached_prefixes_are_hit_and_exact(hybrid):
    prompts = ragged_prompts(**LONG)
    wanted = apart(expected, hybrid, prompts, TOKENS)
    with engine(hybrid, enable_prefix_caching=True) as llm:
        check_equal(generate(llm, prompts, TOKENS), wanted)
        again = generate(llm, prompts, TOKENS)
        check_equal(again, wanted)
        assert min(output.num_cached_tokens for output in again) >= 128
        check_equal(
            generate(llm, [prompt[:-2] for prompt in prompts], 4), apart(expected, hybrid, [p[:-2] for p in prompts], 4)
        )


def test_preempted_requests_start_again(hybrid):
    prompts = ragged_prompts(shared=112, longest=13)  # 118 to 125 tokens, so that each needs a second block of 128
    with engine(hybrid, num_gpu_blocks_override=15) as llm:
        check_equal(generate(llm, prompts, TOKENS), apart(expected, hybrid, prompts, TOKENS))
        assert preemptions(llm) > 0


def run_schedule(llm: Any, prompts: list[list[int]], tokens: int, draw: Random) -> dict[str, tuple[int, list[int]]]:
    """Let requests join, leave early and go on in a drawn order. Return, for each request, (its prompt, the tokens it got)."""
    from vllm import SamplingParams

    core = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
    waiting = draw.sample(range(len(prompts)), len(prompts))
    running: dict[str, int] = {}
    got: dict[str, tuple[int, list[int]]] = {}
    while waiting or core.has_unfinished_requests():
        if waiting and (not running or draw.random() < 0.4):
            number = waiting.pop()
            core.add_request(f"{number}", {"prompt_token_ids": prompts[number]}, sampling)
            running[f"{number}"] = number
        elif running and draw.random() < 0.05:
            name = draw.choice(sorted(running))
            core.abort_request([name])
            del running[name]
        for output in core.step():
            if output.request_id in running:
                got[output.request_id] = running[output.request_id], list(output.outputs[0].token_ids)
                if output.finished:
                    del running[output.request_id]
    return got


def test_any_schedule_of_the_engine_gives_the_tokens_of_transformers(hybrid):
    """Drawn schedules of requests that join, are cancelled, share prefixes and are prefilled in pieces."""
    prompts = [*ragged_prompts(4, shared=280, longest=40), *ragged_prompts(4)]
    wanted = apart(expected, hybrid, prompts, TOKENS)
    with engine(hybrid, enable_prefix_caching=True, max_num_batched_tokens=200, max_num_seqs=4) as llm:
        whole = 0
        for seed in range(6):
            for number, tokens in run_schedule(llm, prompts, TOKENS, Random(seed)).values():
                assert tokens == wanted[number][0][: len(tokens)], f"schedule {seed}, prompt {number}"
                whole += len(tokens) == TOKENS
        assert 24 < whole < 48, "schedules should finish most requests and cancel some"


def test_speculation_is_refused(hybrid):
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    with (
        pytest.raises(Exception, match="speculative decoding is refused"),
        engine(hybrid, speculative_config=speculative),
    ):
        pass


@pytest.mark.parametrize("mixer", [{"mixer": "window", "window": 8}, {"mixer": "linear", "mask": "toeplitz"}], ids=str)
def test_states_that_grow_are_refused(mixer, source, tmp_path):
    out = apart(converted, source, tmp_path / "OUT", structure="dense", attention=mixer)
    with pytest.raises(Exception, match=r"keeps keys or scores of its own|grows with the context"), engine(out):
        pass


@pytest.mark.slow
def test_compiled_engines_give_the_same_tokens(hybrid):
    prompts = ragged_prompts()
    with engine(hybrid, enforce_eager=False) as llm:
        check_equal(generate(llm, prompts, TOKENS), apart(expected, hybrid, prompts, TOKENS))
