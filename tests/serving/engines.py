"""One vLLM engine after another in this process, and the comparison of what it generates with transformers."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")
ENGINES: list[Path] = []  # folders of the engines of this process
LARGEST_GAP = 1e-3  # nats between log probabilities of the same token in float32


@cache
def worker() -> ProcessPoolExecutor:
    """Return a process without vLLM, whose Transformers backend changes the classes of transformers in the process that
    it runs in.
    """
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def apart(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Return what a function of a module returns in that process."""
    return worker().submit(function, *args, **keywords).result()


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    """An engine in this process, in float32, with the plugin that vLLM finds by its entry point."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    if ENGINES:
        # Without Triton, vLLM puts Python functions in the place of kernels by going through all objects of all
        # modules. Once is enough, and after an engine with n-gram speculation it meets an object of llvmlite that it
        # cannot read.
        current_platform.register_triton_kernel_overrides = lambda: None
    ENGINES.append(folder)
    defaults = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "enforce_eager": True}
    llm = None
    try:
        llm = LLM(
            model=str(folder), **{**defaults, "disable_log_stats": False, "enable_prefix_caching": False, **options}
        )
        yield llm
    finally:
        if (
            llm is not None
        ):  # at once: a test that failed still holds the engine, whose end would end the next one's groups
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def generate(llm: Any, prompts: list[list[int]], tokens: int) -> list[Any]:
    """Return vLLM's greedy outputs, with the log probability of each token."""
    from vllm import SamplingParams

    # ignore_eos alone would let the end of text be chosen, which min_tokens forbids, as transformers' min_new_tokens
    # does
    sampling = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, logprobs=0)
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)


def check_equal(outputs: list[Any], wanted: list[tuple[list[int], list[float]]]) -> None:
    """Check that vLLM's tokens are those of transformers, and their log probabilities equal to rounding."""
    assert len({tuple(tokens) for tokens, _ in wanted}) > 1, (
        "every prompt has the same continuation: the test proves little"
    )
    for output, (tokens, scores) in zip(outputs, wanted, strict=True):
        got = output.outputs[0]
        assert list(got.token_ids) == tokens
        for chosen, token, score in zip(got.logprobs, tokens, scores, strict=True):
            assert abs(chosen[token].logprob - score) < LARGEST_GAP


def gaps_of_equal_tokens(outputs: list[Any], wanted: list[tuple[list[int], list[float]]]) -> list[float]:
    """Return how much log probabilities differ from those of transformers, of each output's tokens before the first other
    one.
    """
    gaps = []
    for output, (tokens, scores) in zip(outputs, wanted, strict=True):
        got = output.outputs[0]
        for found, token, chosen, score in zip(got.token_ids, tokens, got.logprobs, scores, strict=True):
            if found != token:
                break
            gaps.append(abs(chosen[token].logprob - score))
    return gaps


def preemptions(llm: Any) -> int:
    """Return how often the engine has dropped a running request to make room."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
