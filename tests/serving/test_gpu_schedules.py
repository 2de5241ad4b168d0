"""The program of drawn schedules (gpu_schedules.py): its cases, what it counts as equal, and a run with vLLM's CPU build."""

from __future__ import annotations

import json

import pytest
from serving import gpu_schedules
from serving.engines import needs_vllm
from serving.gpu_schedules import CASES, FEW_BLOCKS, Outcome, engine_options, main, parse_arguments
from serving.test_vllm_schedules import PROMPTS, TOKENS

from surgery.planning.recipe import validate_recipe

WANTED = [(list(range(n, n + TOKENS)), [-1.0] * TOKENS) for n in range(len(PROMPTS))]


class StandIn:
    """A server whose requests get the wanted tokens, except those of prompt 3."""

    def __init__(self, llm):
        self.counts = {"hits": 2, "finished": 4}

    def run(self, schedule):
        joined = [event[1:] for event in schedule if event[0] == "join"]
        return [(n, count, False, [0] if n == 3 else WANTED[n][0][:count]) for n, count in joined]


def test_requests_and_schedules_are_counted(monkeypatch):
    monkeypatch.setattr(gpu_schedules, "Server", StandIn)
    monkeypatch.setattr(gpu_schedules, "preemptions", lambda llm: 5)
    outcome = Outcome("low-rank", "eager", prompts=17, equal_prompts=17)
    gpu_schedules.compare_schedules(None, WANTED, outcome, 60, 12, 0)
    assert outcome.schedules == 12 and 0 < outcome.equal_schedules < 12
    assert 0 < outcome.requests - outcome.equal_requests < outcome.requests
    assert outcome.counts == {"hits": 2, "finished": 4, "preemptions": 5}
    assert 0 < len(outcome.wrong) <= gpu_schedules.SHOWN and "prompt 3: [0] instead of [3, " in outcome.wrong[0]
    assert not outcome.is_equal and "5 preemptions, 2 prefix hits, 0 cancelled" in outcome.line()


def test_only_engines_that_ran_count_as_equal():
    assert Outcome("ssd", "eager", prompts=17, equal_prompts=17).is_equal
    assert not Outcome("ssd", "eager", prompts=17, equal_prompts=16).is_equal
    stopped = Outcome("ssd", "eager", error="RuntimeError: mat1 is on cpu")
    assert not stopped.is_equal and stopped.line() == "ssd, eager: did not start: RuntimeError: mat1 is on cpu"


@pytest.mark.parametrize("case", CASES)
def test_cases_are_recipes(case):
    if CASES[case]:
        validate_recipe(CASES[case], case)
    options = engine_options(case, "graphs", gpu=True)
    assert len(options) == 1 + len(FEW_BLOCKS.get(case, ())) and "num_gpu_blocks_override" not in options[-1]
    assert all(o["compilation_config"]["cudagraph_capture_sizes"][-1] == o["max_num_seqs"] for o in options)
    assert "compilation_config" not in engine_options(case, "eager", gpu=True)[0]


def test_arguments_name_cases_and_modes(capsys):
    assert parse_arguments(["--only", "ssd", "hybrid", "--mode", "eager"]).only == ["ssd", "hybrid"]
    for words in (["--only", "sdd"], ["--mode", "lazy"], ["--schedules", "many"]):
        with pytest.raises(SystemExit):
            parse_arguments(words)
    assert "invalid choice: 'sdd'" in capsys.readouterr().err


@needs_vllm
@pytest.mark.slow
def test_a_run_of_one_case(tmp_path, capsys):
    out = tmp_path / "schedules.jsonl"
    assert main(["--only", "original", "--mode", "eager", "--schedules", "2", "--out", str(out)]) == 0
    (found,) = map(json.loads, out.read_text().splitlines())
    assert (found["prompts"], found["schedules"], found["error"]) == (17, 2, "")
    assert found["requests"] == found["equal_requests"] > 0 and found["largest_gap"] < 1e-3
    assert "total: 1 of 1 engines equal to transformers" in capsys.readouterr().out
