"""Decoding steps of an engine by the kernel that reads and writes vLLM's cache in place, under Triton's interpreter."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest
from helpers.served import converted, expected, ragged_prompts
from serving.engines import apart, check_equal, engine, generate, needs_vllm

RELEASE = tuple(map(int, version("triton").split(".")[:2])) if find_spec("triton") else (0, 0)
pytestmark = [
    needs_vllm,
    pytest.mark.skipif(not RELEASE[0], reason="needs Triton"),
    pytest.mark.skipif(RELEASE >= (3, 9), reason="Triton 3.9's interpreter refuses masks of a block and a scalar"),
]

TOKENS = 8
MIXERS = {
    "log-linear": {
        "mask": {"name": "hierarchical", "block": 8},
        "scores": "delta",
        "features": "hedgehog",
        "rope": "both",
    },
    "normalised": {"mask": "ones", "features": "hedgehog", "normalise": True},
}


def generate_by_kernels(out: Path, prompts: list[list[int]], wanted: list[tuple[list[int], list[float]]]) -> list[int]:
    """Check an engine's tokens, and return the requests of each step that the kernel has computed."""
    from helpers.kernel_rows import patch_tensor_loops

    from surgery.core.dispatch import load_kernels
    from surgery.vllm import mixer_state

    steps: list[int] = []
    with pytest.MonkeyPatch.context() as monkeypatch, engine(out, max_num_batched_tokens=24, max_num_seqs=3) as llm:
        assert load_kernels()
        from surgery.kernels import window_step

        def step(q_BHTK, *call):
            steps.append(len(q_BHTK))
            return window_step.step_in_pages(q_BHTK, *call)

        patch_tensor_loops(monkeypatch)
        monkeypatch.setattr(mixer_state, "has_kernel", window_step.accepts_pages)
        monkeypatch.setattr(mixer_state, "step_in_pool", step)
        for _ in range(2):  # the second time in pages that hold other requests' states
            check_equal(generate(llm, prompts, TOKENS), wanted)
    return steps


@pytest.mark.parametrize("name", MIXERS)
def test_tokens_equal_those_of_transformers(name, source, tmp_path, monkeypatch):
    """With pieces of prompts between the steps, and a prompt of one token.

    In a process of its own: Triton chooses its interpreter when it is imported.
    """
    keys = {"mixer": "linear", "window": 8, "sinks": 2, **MIXERS[name], "output_gate": "value"}
    hybrid = {"softmax": 0.34, "choose_by": "every"}
    out = apart(converted, source, tmp_path / "OUT", structure="dense", attention={**keys, "hybrid": hybrid})
    prompts = [*ragged_prompts(3, longest=30), [7]]
    wanted = apart(expected, out, prompts, TOKENS)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        steps = pool.submit(generate_by_kernels, out, prompts, wanted).result()
    assert set(steps) == {1, 2, 3}
