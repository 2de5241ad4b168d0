"""An evaluation that was killed continues without losing a finished sample, and gives the results of one that was
not.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.killing import run_child

from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.eval import batching
from surgery.eval.journal import SampleJournal
from surgery.eval.run import evaluate
from surgery.eval.several import evaluate_models
from surgery.eval.suite import EvalOptions, Sample

ROOT = Path(__file__).resolve().parents[2]
TINY, MIRROR = ROOT / "recipes" / "tiny" / "checkpoint", ROOT / "eval" / "mirror"
SUITES = {
    "ppl": {"tokens": 640},
    "per-position": {"tokens": 640},
    "mqar": {"lengths": (64,), "limit": 10},
    "needle": {"lengths": (96,), "limit": 3, "depths": (0.0, 1.0)},
    "zeroshot": {"tasks": ("piqa", "lambada_openai")},
    "longbench": {
        "tasks": ("trec", "qasper", "hotpotqa", "musique", "triviaqa", "lcc"),
        "gen_kwargs": {"max_gen_toks": 4},
        "lengths": (256,),
    },
    "retrieval": {
        "tasks": ("swde", "squad", "fda", "nq", "drop"),
        "gen_kwargs": {"max_gen_toks": 4},
        "lengths": (128,),
    },
}
QUICK = ("needle", "zeroshot")  # the others are marked slow


def options(suite: str) -> EvalOptions:
    return EvalOptions(text=str(TINY / "heldout.txt"), length=64, batch_size=2, data_root=MIRROR, **SUITES[suite])


@pytest.fixture(scope="module", autouse=True)
def imported():
    """What children need is imported once, before they are forked."""
    for module in ("lm_eval.evaluator", "lm_eval.models.huggingface"):
        importlib.import_module(module)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[[str], list[dict]]:
    """Return the samples of a suite that was not interrupted."""
    found: dict[str, list[dict]] = {}

    def measure(suite: str) -> list[dict]:
        if suite not in found:
            done = evaluate(str(TINY), [suite], options(suite))
            found[suite] = json.loads(json.dumps([s.to_dict() for s in done.results[suite]["converted"].samples]))
        return found[suite]

    return measure


def measure_and_log(
    suite: str,
    out: Path,
    log: Path,
    before_batch: Callable[[int], None] = lambda n: None,
    asked: EvalOptions | None = None,
) -> None:
    """Run a suite, or several with the options `asked`; every scored item is a line of `log`. before_batch is called
    before each batch is written to the journal.
    """
    score, append, batches = batching._BatchRunner._score_batch, SampleJournal.append, [0]

    def scored(self, made, batch):
        found = score(self, made, batch)
        with open(log, "a") as file:
            file.write("".join(f"{self.keys[i]}\n" for i in batch))
        return found

    def written(self, keys, values):
        batches[0] += 1
        before_batch(batches[0])
        append(self, keys, values)

    batching._BatchRunner._score_batch, SampleJournal.append = scored, written
    try:
        evaluate(str(TINY), suite.split(","), asked or options(suite), out=out)
    finally:
        batching._BatchRunner._score_batch, SampleJournal.append = score, append


def stored_samples(out: Path) -> list[dict]:
    (path,) = out.rglob("samples.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def kill_at(last: int) -> Callable[[int], None]:
    def stop(batch: int) -> None:
        if batch == last:
            os.kill(os.getpid(), signal.SIGKILL)

    return stop


@pytest.mark.parametrize(
    "suite",
    [pytest.param(suite, marks=pytest.mark.slow if suite not in QUICK else ()) for suite in SUITES],
)
def test_a_killed_suite_continues_after_its_last_finished_sample(tmp_path, whole, suite):
    """Killed twice, each time before a batch is written: only that batch is scored again, and the results are those of
    a whole run.
    """
    out, log = tmp_path / "out", tmp_path / "log"
    lost = 0
    for last in (3, 2):
        done, _ = run_child(lambda n=last: measure_and_log(suite, out, log, kill_at(n)), killed_by=signal.SIGKILL)
        assert not done and not list(out.rglob("result.json"))
        lost += 2  # rows of a batch
        finished = sum(path.read_text().count("\n") for path in out.rglob("*.jsonl"))
        scored = len(log.read_text().splitlines())
        assert finished >= scored - lost > 0
    run_child(lambda: measure_and_log(suite, out, log))
    scored = log.read_text().splitlines()
    assert len(scored) - len(set(scored)) <= lost
    assert stored_samples(out) == whole(suite)
    assert not list(out.rglob("*.unfinished"))


def files_without_times(out: Path) -> dict[str, str]:
    """Return the text files of an evaluation by name, without the lines of dates and seconds."""
    texts = {
        path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.suffix in (".json", ".jsonl", ".md")
    }
    return {
        name: re.sub(r'^ *"(?:date|seconds|total_evaluation_time_seconds|start_time|end_time)": .*$', "", path.read_text(), flags=re.M)
        for name, path in sorted(texts.items())
    }  # fmt: skip


def test_killed_or_read_again_an_evaluation_writes_the_same_bytes(tmp_path):
    """Numbers keep their types: results that are read from disk are written as those that were just measured."""
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    asked = options("needle").model_copy(update={"tokens": 256})
    evaluate(str(TINY), ["needle", "ppl"], asked, out=whole)
    first = files_without_times(whole)
    evaluate(str(TINY), ["needle", "ppl"], asked, out=whole)
    assert files_without_times(whole) == first and len(first) > 4
    run_child(lambda: measure_and_log("needle,ppl", killed, log, kill_at(2), asked), killed_by=signal.SIGKILL)
    evaluate(str(TINY), ["needle", "ppl"], asked, out=killed)
    assert files_without_times(killed) == first


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
    """By its own processor time, at random moments: while loading, scoring, writing, between two suites."""
    out, log, chance = tmp_path / "out", tmp_path / "log", random.Random(0)
    asked = options("needle").model_copy(update={"tokens": 640})

    def run(out: Path = out, log: Path = log) -> None:
        measure_and_log("ppl,needle,mqar", out, log, asked=asked)

    _, took = run_child(lambda: run(tmp_path / "whole", tmp_path / "whole-log"))
    kills = 0
    for _ in range(2):
        done, _ = run_child(run, max(0.01, took * chance.uniform(0.3, 0.8)))
        kills += not done
    run_child(run)
    scored = log.read_text().splitlines()
    assert kills > 0 and len(scored) - len(set(scored)) <= 2 * kills  # rows of a batch
    assert set(scored) == set((tmp_path / "whole-log").read_text().splitlines())
    for suite in ("ppl", "needle", "mqar"):
        (path,), (same,) = (each.glob(f"*/{suite}/samples.jsonl") for each in (out, tmp_path / "whole"))
        assert path.read_bytes() == same.read_bytes()


def test_a_line_cut_off_is_scored_again_and_values_keep_every_bit(tmp_path):
    journal = SampleJournal(tmp_path / "ppl", {"a": 1}, DistContext())
    losses_T = torch.rand(5, generator=torch.Generator().manual_seed(0))
    sample = Sample("needle", "x", {"accuracy": 1.0}, {"length": 8, "depth": 0.1}, shown={"target": ["ä"]})
    values = [losses_T, sample, [0.1 + 0.2, True], {"nll": float("inf")}]
    keys = [journal.key_of("t", i) for i in range(len(values))]
    journal.append(keys, values)
    (path,) = journal.folder.iterdir()
    path.write_text(path.read_text() + '\n{"key": "half", "val')
    again = SampleJournal(tmp_path / "ppl", {"a": 1}, DistContext())
    journal.append(["last"], [1])
    found = [again.stored[key] for key in keys]
    assert torch.equal(found[0], losses_T) and found[1:] == values[1:] and "half" not in again.stored
    assert SampleJournal(tmp_path / "ppl", {"a": 1}, DistContext()).stored["last"] == 1
    assert not SampleJournal(tmp_path / "ppl", {"a": 2}, DistContext()).stored
    with pytest.raises(TypeError, match="must be JSON data"):
        journal.append(["x"], [object()])


def test_other_data_is_scored_again(tmp_path, whole):
    """The journal of another text is not used, though every other option is the same."""
    text = tmp_path / "text.txt"
    text.write_text((TINY / "heldout.txt").read_text()[3000:])
    out, log = tmp_path / "out", tmp_path / "log"
    run_child(lambda: measure_and_log("ppl", out, log, kill_at(3)), killed_by=signal.SIGKILL)
    other = options("ppl").model_copy(update={"text": str(text)})
    done = evaluate(str(TINY), ["ppl"], other, out=out)
    alone = evaluate(str(TINY), ["ppl"], other)
    assert done.results["ppl"]["converted"].samples == alone.results["ppl"]["converted"].samples
    assert not list(out.rglob("*.unfinished")), "a finished suite leaves no journal"


def test_two_processes_exclude_each_other(tmp_path):
    """While one evaluates one or several models into a folder, another is refused, and the first one's results are
    whole.
    """
    out = tmp_path / "out"
    reader, writer = os.pipe()
    answer, go = os.pipe()

    def first() -> None:
        def wait(batch: int) -> None:
            if batch == 1:
                os.write(writer, b"x")
                os.read(answer, 1)

        measure_and_log("ppl", out, tmp_path / "log", wait)

    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            first()
            code = 0
        finally:
            os._exit(code)
    try:
        os.read(reader, 1)  # the first one is in the middle of its suite
        with pytest.raises(SurgeryError, match=rf"another evaluation is writing into .* \(process {pid} on"):
            evaluate(str(TINY), ["mqar"], options("mqar"), out=out)
        with pytest.raises(SurgeryError, match="another evaluation is writing into"):
            evaluate_models([str(TINY), str(TINY) + "/"], ["mqar"], options("mqar"), out=out)
    finally:
        os.write(go, b"x")
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0 and len(list(out.rglob("result.json"))) == 1
    assert evaluate(str(TINY), ["ppl"], options("ppl"), out=out).exit_code == 0  # the lock is gone
