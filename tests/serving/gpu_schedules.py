"""Greedy tokens of vLLM's engine on a GPU under drawn schedules of requests, compared with those of transformers.

    python tests/serving/gpu_schedules.py                                   # every case, with CUDA graphs and eager
    python tests/serving/gpu_schedules.py --only low-rank ssd --mode eager --schedules 20
    python tests/serving/gpu_schedules.py --jobs 8 --out schedules.jsonl    # 8 engines at a time on one GPU

A case is a random Llama of three layers in float32 and a conversion of it. transformers writes 16 tokens behind each of
17 prompts alone, on the CPU. An engine in a process of its own then gets (a) all prompts at once, whose tokens and log
probabilities are compared, and (b) schedules (test_vllm_schedules.py): requests join, share prefixes, are cut into
pieces, preempted and cancelled. A request is equal if its tokens are those of transformers, as far as it was run; a
schedule, if all its requests are.

Without a GPU the program runs vLLM's build for CPUs, where `graphs` means compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]  # the checkout, tests/

from helpers.served import HYBRID, attention_of_recipe, converted, expected, random_checkpoint
from serving.engines import engine, gaps_of_equal_tokens, generate, preemptions
from serving.test_vllm_linears import ALL_STRUCTURES
from serving.test_vllm_mixers import RECIPES
from serving.test_vllm_schedules import PROMPTS, TOKENS, Server, differs, draw_schedule

Wanted = list[tuple[list[int], list[float]]]  # tokens of each prompt and their log probabilities
# name -> recipe; {}: not converted
CASES: dict[str, dict[str, Any]] = {
    "original": {},
    "low-rank": {"structure": "low_rank", "keep": 0.5},
    "structures": ALL_STRUCTURES,
    "hybrid": HYBRID,
    **{name: {"structure": "dense", "attention": attention_of_recipe(name)} for name in RECIPES},
}
MODES = ("graphs", "eager")
# Numbers of blocks that are tried in this order: with the first that holds a request, running ones have to give way.
FEW_BLOCKS = dict.fromkeys(("original", "low-rank", "hybrid", "log-linear", "gated-deltanet"), (15, 40, 72))
NEEDS_BLOCKS = "max seq len"  # in vLLM's error if a request does not fit into the blocks
FLOAT32 = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}  # products of float32 numbers are not rounded
SHOWN = 5  # wrong requests that are printed in full


@dataclass
class Outcome:
    """What one engine did. error: why it did not start or stopped; wrong: the first requests that differ."""

    case: str
    mode: str
    prompts: int = 0
    equal_prompts: int = 0
    largest_gap: float = 0.0  # nats, of the log probabilities of equal tokens
    schedules: int = 0
    equal_schedules: int = 0
    requests: int = 0
    equal_requests: int = 0
    counts: dict[str, int] = field(default_factory=dict)  # of finished and cancelled requests, prefix hits, preemptions
    about: dict[str, Any] = field(default_factory=dict)  # what the engine chose
    error: str = ""
    wrong: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        done = (self.equal_prompts, self.equal_schedules) == (self.prompts, self.schedules)
        return done and self.prompts > 0 and not self.error

    def line(self) -> str:
        """Return the outcome in one line."""
        if self.error and not self.prompts:
            return f"{self.case}, {self.mode}: did not start: {self.error}"
        counts = {name: self.counts.get(name, 0) for name in ("preemptions", "hits", "cancelled")}
        words = [
            f"prompts {self.equal_prompts} of {self.prompts}",
            f"schedules {self.equal_schedules:,} of {self.schedules:,}",
            f"requests {self.equal_requests:,} of {self.requests:,} equal",
            f"{counts['preemptions']} preemptions",
            f"{counts['hits']:,} prefix hits",
            f"{counts['cancelled']} cancelled",
            f"largest gap {self.largest_gap:.1e} nats",
            f"{self.about.get('cudagraph_mode')}, {self.about.get('blocks')} blocks",
        ]
        stopped = f"; stopped: {self.error}" if self.error else ""
        return f"{self.case}, {self.mode}: {', '.join(words)}{stopped}"


def prepare(case: str, folder: Path, head_dim: int) -> tuple[Path, Wanted]:
    """Write the checkpoint of a case; return its folder and what transformers generates."""
    source = random_checkpoint(folder / "SRC", head_dim=head_dim)
    recipe = CASES[case]
    out = converted(source, folder / "OUT", **recipe) if recipe else source
    return out, expected(out, PROMPTS, TOKENS)


def engine_options(case: str, mode: str, gpu: bool) -> list[dict[str, Any]]:
    """Return the options of the engine, the preferred ones first."""
    options = {"enforce_eager": mode == "eager", "enable_prefix_caching": True, "max_num_seqs": 8}
    options["max_num_batched_tokens"] = 48 if case in RECIPES else 200  # prompts of mixers come in many pieces
    if gpu:  # many engines share a GPU
        options |= {"kv_cache_memory_bytes": 512 << 20, "gpu_memory_utilization": 0.06}
        if mode == "graphs":
            options["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
    return [*({**options, "num_gpu_blocks_override": count} for count in FEW_BLOCKS.get(case, ())), options]


def serve(
    case: str, mode: str, folder: Path, wanted: Wanted, seconds: float, schedules: int, first_seed: int
) -> Outcome:
    """Run an engine on all prompts at once and on schedules, of as many seconds or as many schedules."""
    import torch

    outcome = Outcome(case, mode)
    for options in engine_options(case, mode, torch.cuda.is_available()):
        try:
            with engine(folder, **options) as llm:
                config = llm.llm_engine.vllm_config
                outcome.about = {
                    "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
                    "architecture": config.model_config.architecture,
                    "blocks": config.cache_config.num_gpu_blocks,
                    "block_size": config.cache_config.block_size,
                }
                compare_prompts(llm, wanted, outcome)
                compare_schedules(llm, wanted, outcome, seconds, schedules, first_seed)
        except Exception as error:
            if isinstance(error, ValueError) and NEEDS_BLOCKS in str(error) and "num_gpu_blocks_override" in options:
                continue
            traceback.print_exc()
            outcome.error = f"{type(error).__name__}: {error}"[:1000]
        break
    return outcome


def compare_prompts(llm: Any, wanted: Wanted, outcome: Outcome) -> None:
    """Compare tokens and log probabilities of all prompts at once."""
    outputs = generate(llm, PROMPTS, TOKENS)
    outcome.prompts = len(outputs)
    outcome.equal_prompts = sum(list(o.outputs[0].token_ids) == tokens for o, (tokens, _) in zip(outputs, wanted))
    outcome.largest_gap = max(gaps_of_equal_tokens(outputs, wanted), default=0.0)


def compare_schedules(
    llm: Any, wanted: Wanted, outcome: Outcome, seconds: float, schedules: int, first_seed: int
) -> None:
    """Compare the tokens of the requests of drawn schedules."""
    server, began = Server(llm), time.monotonic()
    tokens_of = [tokens for tokens, _ in wanted]
    while outcome.schedules < schedules and time.monotonic() - began < seconds:
        seed = first_seed + outcome.schedules
        results = server.run(draw_schedule(Random(seed)))
        wrong = [result for result in results if differs(result, tokens_of)]
        outcome.schedules += 1
        outcome.equal_schedules += not wrong
        outcome.requests += len(results)
        outcome.equal_requests += len(results) - len(wrong)
        for prompt, tokens, _, got in wrong[: SHOWN - len(outcome.wrong)]:
            outcome.wrong.append(f"schedule {seed}, prompt {prompt}: {got} instead of {tokens_of[prompt][:tokens]}")
    outcome.counts = {**server.counts, "preemptions": int(preemptions(llm))}


def set_variables(environment: dict[str, str]) -> None:
    """Set environment variables of this process."""
    os.environ.update(environment)


def apart(function: Callable[..., Any], environment: dict[str, str], *args: Any) -> Any:
    """Return what a function returns in a new process with these environment variables."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=set_variables, initargs=(environment,)) as pool:
        return pool.submit(function, *args).result()


def run_case(case: str, given: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> list[Outcome]:
    """Run a case in all modes, one after another."""
    outcomes = []
    try:
        where, wanted = apart(prepare, {"CUDA_VISIBLE_DEVICES": ""}, case, folder, given.head_dim)
    except Exception as error:
        outcomes = [Outcome(case, mode, error=f"no checkpoint: {type(error).__name__}: {error}") for mode in given.mode]
    for mode in given.mode if not outcomes else ():
        try:
            asked = (case, mode, where, wanted, given.seconds, given.schedules, given.seed)
            outcomes.append(apart(serve, FLOAT32, *asked))
        except Exception as error:  # the process was killed
            outcomes.append(Outcome(case, mode, error=f"{type(error).__name__}: {error}"))
    for outcome in outcomes:
        say("\n".join([outcome.line(), *outcome.wrong]))
        if given.out is not None:
            with given.out.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
    return outcomes


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description="Compare vLLM's greedy tokens under drawn schedules with transformers'."
    )
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", default=list(CASES), choices=list(CASES), help="cases (default: all)"
    )
    parser.add_argument("--mode", nargs="+", default=list(MODES), choices=MODES, help="default: graphs eager")
    parser.add_argument("--seconds", type=float, default=50, help="of schedules in each engine (default: 50)")
    parser.add_argument("--schedules", type=int, default=1000, help="at most, in each engine (default: 1000)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first schedule; the next have the next (default: 0)"
    )
    parser.add_argument("--head-dim", type=int, default=32, help="dims of an attention head (default: 32)")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time, on the same GPU (default: 1)")
    parser.add_argument("--out", type=Path, help="append each outcome as a line of JSON to this file")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    given = parse_arguments(words)
    with tempfile.TemporaryDirectory(prefix="gpu-schedules-") as scratch, ThreadPoolExecutor(given.jobs) as threads:
        say = lambda line: print(line, flush=True)  # noqa: E731
        cases = [threads.submit(run_case, case, given, Path(scratch) / case, say) for case in given.only]
        outcomes = [outcome for done in cases for outcome in done.result()]
    equal = sum(outcome.is_equal for outcome in outcomes)
    print(f"total: {equal} of {len(outcomes)} engines equal to transformers in all tokens", flush=True)
    return 0 if equal == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
