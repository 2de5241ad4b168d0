"""`accelerate launch -m surgery eval`: two processes measure what one does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from surgery.eval.run import evaluate
from surgery.eval.suites import EvalOptions

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "surgery" / "data" / "tiny"
WORDS = [
    "--text",
    str(TINY / "heldout.txt"),
    "--tokens",
    "768",
    "--length",
    "128",
    "--lengths",
    "128",
    "--depths",
    "0,1",
]
SUITES = ["ppl", "needle"]


def launched(*words: str) -> subprocess.CompletedProcess:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        "2",
        "--multi_gpu",
        "--num_machines",
        "1",
    ]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(port), "-m", "surgery"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*command, *words], env=environment, capture_output=True, text=True)


def test_two_processes_share_the_samples(tmp_path):
    words = ["eval", str(TINY), "-s", ",".join(SUITES), *WORDS, "--limit", "3", "--compare", str(TINY), "--json"]
    done = launched(*words, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout[done.stdout.index("{") :])
    options = EvalOptions(text=WORDS[1], tokens=768, length=128, lengths=(128,), depths=(0, 1), limit=3)
    alone = evaluate(str(TINY), SUITES, options)
    assert said["models"]["converted"]["processes"] == 2
    assert len(said["rows"]) == len(alone.rows)
    for row, same in zip(said["rows"], alone.rows):
        assert (row["task"], row["group"], row["samples"]) == (same.task, same.group, same.samples)
        assert row["values"]["converted"] == pytest.approx(same.values["converted"], rel=1e-4)
    assert len((tmp_path / "out" / "results.json").read_text()) > 100
