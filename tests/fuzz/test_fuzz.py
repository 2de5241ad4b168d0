"""A few mutated documents per parser (`python tests/fuzz/fuzz.py` runs for hours), and inputs that broke one before."""

from __future__ import annotations

import random

import pytest
from fuzz.fuzz_targets import TARGETS, FuzzTarget
from helpers.fuzzing import SandboxEscape, mutate, sandbox
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surgery.core.errors import SurgeryError

# Each takes as long as all the others together, or more: they are for long runs.
LONG = {"weights", "table", "report", "training_rows", "training_log", "journal", "pretrain", "teacher_shard"}


@pytest.mark.parametrize("name", TARGETS)
def test_changed_documents(name):
    target = TARGETS[name]
    seeds = target.seeds()
    for seed in seeds[: 1 if name in LONG else None]:
        target.check_seed(seed)  # good as they are

    @settings(
        max_examples=3 if name in LONG else 12, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.sampled_from(seeds), st.integers(0, 2**32))
    def run_target(seed: bytes, number: int) -> None:
        target.run(mutate(seed, random.Random(number)))

    run_target()


FOUND = {
    "index": b'{"weight_map": {"w": "' + b"a" * 3000 + b'.safetensors"}}',
    "recipe": b'{"description": "\\ud800"}',
    "override": b"keep={a: 1, a: 2}",
    "pretrain": b"model: {model_type: gpt2}\ncommon: [1]\nstages: [{kind: lm, tokens: 64, rate: 1e-4}]",
    "teacher_index": b'{"format": "surgery-teacher-cache", "version": 1, "shards": [3]}',
    "eval_answers": b'{"key": "\xd6"}\n' + b"[" * 9000,
    "mirror": b"---\nconfigs: [3]\n---\n\xd6",
    "measured": b'{"tables": [{"rows": "x"}]}',
    "training_log": b'{"stage": {}, "step": 1}\n[1]\n{"kind": "lm", "stage": 0, "step": 1e400}',
    "journal": b'{"step": "piece", "piece": "rest"}\n',
}


@pytest.mark.parametrize("name", FOUND)
def test_what_broke_a_parser_once(name):
    target = TARGETS[name]
    target.check_seed(
        target.seeds()[0]
    )  # the first call imports modules and makes files, which the sandbox would report
    target.run(FOUND[name])


@pytest.mark.parametrize(
    "spec",
    [
        *({"blocks": blocks, "rank": 1} for blocks in ([2, 2, 2], [0, 2], ["2", 2], 5, "x", [2**40, 1], "sqrt")),
        *({"blocks": [2, 2], "rank": rank} for rank in (0, -1, None, "full", 10**9, 2**70, 1.5, True, "1", [1])),
        *({"blocks": [2, 2], "rank": 1, "in_features": n} for n in (0, -4, 2**40, "4", None, 4.0)),
        {"blocks": [2, 2], "rank": 1, "bias": "yes"},
    ],
    ids=str,
)
def test_entries_of_a_table(spec):
    from surgery.modeling.modules import build_module

    with pytest.raises(SurgeryError):
        build_module({"structure": "btt", "in_features": 8, "out_features": 8, "bias": False, **spec})


@pytest.mark.parametrize("parts", [{}, [], {"a": 1}, {"a": {}}, {"a.b": {"structure": "dense"}}, None])
def test_split_entries_of_a_table(parts):
    from surgery.modeling.modules import build_module

    with pytest.raises(SurgeryError, match="damaged"):
        build_module({"structure": "split", "parts": parts, "heads": 0})


# -- the fence ---------------------------------------------------------------------------------------
def _target(read) -> FuzzTarget:
    return FuzzTarget("fenced", None, read, lambda: [b""], lambda folder: None)


def test_the_fence_sees_what_is_written_elsewhere(tmp_path):
    with pytest.raises(SandboxEscape, match="elsewhere"):
        _target(lambda text: (tmp_path / "elsewhere").write_text(text)).run(b"x")
    _target(lambda text: (tmp_path / "elsewhere").read_text()).run(b"x")


def test_the_fence_ends_what_takes_too_long_or_too_much(tmp_path):
    from helpers.fuzzing import TimeLimitExceeded

    with pytest.raises(TimeLimitExceeded), sandbox(tmp_path, 0.05):
        while True:
            pass
    with pytest.raises(MemoryError):
        _target(lambda text: bytearray(2**36)).run(b"x")
