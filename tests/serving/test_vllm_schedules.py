"""Whatever order vLLM's engine runs requests in, each gets the greedy tokens that transformers writes for its prompt
alone, in float32.

A schedule is a list of events: requests join, the engine makes steps, requests are cancelled. A failing schedule is
shrunk to one from which no event can be left out, and printed.

    SURGERY_SCHEDULES=500 .venv-vllm-0.32/bin/python -m pytest tests/serving/test_vllm_schedules.py      more of them
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from helpers.served import converted, expected, ragged_prompts
from serving.engines import apart, engine, needs_vllm, preemptions

COUNT = int(os.environ.get("SURGERY_SCHEDULES", "0"))
TOKENS = 16  # that a request asks for at most
# With a long prefix in common; of 118 to 125 tokens, which begin a second block of 128 while they are written; short
# and ragged; of one token, whose first piece vLLM may count as a decode, in a row that holds what another request left.
PROMPTS = [*ragged_prompts(4, shared=280, longest=60), *ragged_prompts(6, shared=112, longest=13), *ragged_prompts(4)]
PROMPTS += [[prompt[0]] for prompt in ragged_prompts(3)]
BORDER = range(4, 10)
Event = tuple[Any, ...]  # ("join", prompt, tokens), ("steps", number), ("cancel", which of the running requests)


def draw_schedule(draw: Random) -> list[Event]:
    """Return 10 to 30 events; one schedule in three begins with more requests than the blocks of the test hold."""
    events: list[Event] = [("join", draw.choice(BORDER), TOKENS) for _ in range(8 if draw.random() < 1 / 3 else 0)]
    for kind in draw.choices(("join", "steps", "cancel"), (6, 4, 1), k=draw.randint(10, 22)):
        if kind == "join":
            events.append((kind, draw.randrange(len(PROMPTS)), draw.choice([TOKENS, TOKENS, 9, 3, 1])))
        else:
            events.append((kind, draw.randint(1, 5)))
    return events


def shrink(schedule: list[Event], fails: Callable[[list[Event]], bool]) -> list[Event]:
    """Return a failing schedule from which no single event can be left out; runs of events are tried first, long before
    short.
    """
    size = len(schedule) // 2
    while size:
        shorter = (schedule[:i] + schedule[i + size :] for i in range(len(schedule) - size + 1))
        found = next((events for events in shorter if fails(events)), None)
        size = size // 2 if found is None else min(size, len(found) // 2) or min(1, len(found) - 1)
        schedule = schedule if found is None else found
    return schedule


class Server:
    """An engine under a schedule. counts: of what the schedules made it do."""

    def __init__(self, llm: Any):
        self.core, self.llm, self.counts = llm.llm_engine, llm, Counter[str]()

    def run(self, schedule: list[Event]) -> list[tuple[int, int, bool, list[int]]]:
        """Run a schedule to its end.

        Return for each request its prompt, the tokens asked for, whether it was cancelled, and its tokens.
        """
        from vllm import SamplingParams

        asked: dict[str, tuple[int, int]] = {}
        self.got: dict[str, list[int]] = {}
        self.running: list[str] = []
        cancelled = set()
        assert self.llm.reset_prefix_cache()
        for kind, *numbers in schedule:
            if kind == "join":
                name, (prompt, tokens) = f"{len(asked)}", numbers
                sampling = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
                self.core.add_request(name, {"prompt_token_ids": PROMPTS[prompt]}, sampling)
                asked[name], self.got[name] = (prompt, tokens), []
                self.running.append(name)
            elif kind == "steps":
                for _ in range(numbers[0]):
                    self.step()
            elif self.running:
                name = self.running.pop(numbers[0] % len(self.running))
                self.core.abort_request([name])
                cancelled.add(name)
                self.counts["cancelled"] += bool(self.got[name])
        while self.core.has_unfinished_requests():
            self.step()
        return [(*asked[name], name in cancelled, tokens) for name, tokens in self.got.items()]

    def step(self) -> None:
        """Let the engine run once, and note what it wrote."""
        if not self.core.has_unfinished_requests():
            return
        for output in self.core.step():
            if output.request_id in self.running:
                self.got[output.request_id] = list(output.outputs[0].token_ids)
                if output.finished:
                    self.running.remove(output.request_id)
                    self.counts["hits"] += bool(output.num_cached_tokens)
                    self.counts["finished"] += 1


def differs(result: tuple[int, int, bool, list[int]], wanted: list[list[int]]) -> bool:
    """Return whether a request of a schedule has other tokens than transformers writes, too many, or too few although it
    was not cancelled.
    """
    prompt, tokens, is_cancelled, got = result
    return got != wanted[prompt][: len(got)] or len(got) > tokens or (len(got) < tokens and not is_cancelled)


def check_schedules(folder: Path, count: int, needed: tuple[str, ...], **options: Any) -> None:
    """Run drawn schedules on an engine, and check that they made it do what they are for."""
    wanted = [tokens for tokens, _ in apart(expected, folder, PROMPTS, TOKENS)]
    assert len({tuple(tokens) for tokens in wanted}) == len(PROMPTS)
    with engine(folder, **options) as llm:
        server = Server(llm)

        def problem(schedule: list[Event]) -> str:
            for result in server.run(schedule):
                if differs(result, wanted):
                    prompt, tokens, _, got = result
                    return f"prompt {prompt}: {got} instead of {wanted[prompt][:tokens]}"
            return ""

        for seed in range(COUNT or count):
            if problem(schedule := draw_schedule(Random(seed))):
                shortest = shrink(schedule, lambda events: bool(problem(events)))
                raise AssertionError(f"schedule {seed}, shrunk: {shortest}: {problem(shortest)}")
        server.counts["preemptions"] = int(preemptions(llm))
    assert all(server.counts[name] for name in needed), dict(server.counts)


def test_a_failing_schedule_is_shrunk():
    """To the two events that make it fail, wherever they are among the others."""
    for seed in range(20):
        schedule = draw_schedule(Random(seed))
        schedule.insert(seed % 5, ("join", 99, 1))
        schedule.append(("cancel", 99))
        assert shrink(schedule, lambda events: {("join", 99, 1), ("cancel", 99)} <= set(events)) == [
            ("join", 99, 1),
            ("cancel", 99),
        ]


@needs_vllm
def test_hybrids_with_pieces_cached_prefixes_and_too_few_blocks(hybrid):
    options = {"enable_prefix_caching": True, "max_num_batched_tokens": 200, "max_num_seqs": 8}
    check_schedules(hybrid, 20, ("finished", "cancelled", "hits", "preemptions"), **options, num_gpu_blocks_override=15)


@needs_vllm
@pytest.mark.parametrize("mask", [{"name": "hierarchical", "block": 32}], ids=["log-linear"])
def test_states_that_grow_with_the_logarithm(mask, source, tmp_path):
    keys = {"mixer": "linear", "mask": mask, "window": 16, "sinks": 4}
    out = apart(converted, source, tmp_path / "OUT", structure="dense", attention=keys)
    options = {"enable_prefix_caching": True, "max_num_batched_tokens": 48, "max_num_seqs": 4}
    check_schedules(out, 10, ("finished", "cancelled"), **options)
