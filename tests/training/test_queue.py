"""recipes/papers/queue.py: jobs on GPUs in turns, and their files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from recipes.papers import queue
from recipes.papers.queue import main
from surgery.core.errors import SurgeryError

ROOT = Path(queue.__file__).parents[2]


def run(tmp_path, jobs, *more, seconds="20", status=0):
    path = tmp_path / "jobs.yaml"
    path.write_text(json.dumps({"set": {"word": "set"}, "jobs": jobs}), encoding="utf-8")
    with pytest.raises(SystemExit, match=str(status)) if status else nullcontext():
        main([str(path), "--gpus", "2", "--seconds", seconds, "--logs", str(tmp_path / "logs"), *more])
    lines = (tmp_path / "logs" / "jobs.jsonl").read_text().splitlines()
    return {line["name"]: line["status"] for line in map(json.loads, lines)}


def test_jobs_wait_for_gpus_for_each_other_and_for_files(tmp_path, capsys):
    flag = tmp_path / "flag"
    jobs = [
        {"name": "later", "needs": str(flag), "command": "echo later on $CUDA_VISIBLE_DEVICES"},
        {"name": "both", "gpus": 2, "after": ["first"], "command": "echo {word} on $CUDA_VISIBLE_DEVICES"},
        {"name": "first", "cards": [1], "command": f"sleep 0.3; touch {flag}; echo first on $CUDA_VISIBLE_DEVICES"},
        {"name": "broken", "gpus": 0, "command": "exit 3"},
        {"name": "never", "after": ["broken"], "command": "echo never"},
        {"name": "long", "seconds": 1000, "command": "echo long"},
    ]
    assert run(tmp_path, jobs, "--set", "word=given", status=1) == {"later": 0, "both": 0, "first": 0, "broken": 3}
    logs = {path.stem: path.read_text().strip() for path in (tmp_path / "logs").glob("*.log")}
    assert logs["first"] == "first on 1" and logs["both"] == "given on 0,1" and logs["later"] == "later on 0"
    out = capsys.readouterr().out
    assert "never: not started, because broken did not end with status 0" in out
    assert "long: not started, because the time was over or too short for it" in out
    with (tmp_path / "logs" / "jobs.jsonl").open("a") as file:
        file.write('\n{"name": "cut')
    path = tmp_path / "logs" / "jobs.jsonl"
    with pytest.raises(SystemExit):  # only the job that failed runs again
        main([str(tmp_path / "jobs.yaml"), "--gpus", "2", "--seconds", "20", "--logs", str(tmp_path / "logs")])
    assert path.read_text().count('"name": "broken"') == 2 and "cut" not in path.read_text()
    assert (tmp_path / "logs" / "jobs.jsonl").read_text().count('"name": "first"') == 1


def test_a_job_ends_at_its_limit_and_all_at_the_end(tmp_path):
    jobs = [
        {"name": "limited", "limit": 0.3, "command": "sleep 60"},
        {"name": "endless", "command": "trap '' TERM; while true; do sleep 0.1; done"},
    ]
    assert run(tmp_path, jobs, seconds="1", status=1) == {"limited": 124, "endless": 124}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_jobs_end_with_the_queue(tmp_path, number):
    path = tmp_path / "jobs.yaml"
    path.write_text(json.dumps({"jobs": [{"name": "a", "gpus": 0, "command": "sleep 300 & echo $!; wait"}]}))
    words = [str(path), "--gpus", "0", "--seconds", "60", "--logs", str(tmp_path / "logs")]
    command = [sys.executable, "-m", "recipes.papers.queue", *words]
    heeds = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a background shell has it ignored
    process = subprocess.Popen(command, cwd=ROOT, preexec_fn=heeds)
    log = tmp_path / "logs" / "a.log"
    until = time.monotonic() + 30
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(20) != 0
    stat = Path(f"/proc/{int(log.read_text())}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"  # ended, not yet collected


@pytest.mark.parametrize(
    ("jobs", "reason"),
    [
        ([{"name": "b", "command": "true", "after": ["c"]}], "b comes after c, which is no job"),
        ([{"name": "b", "comand": "true"}], "no file of jobs: jobs.0.command: Field required"),
        ([{"name": "../b", "command": "true"}], "no file of jobs: jobs.0.name"),
        ([], "no file of jobs: jobs"),
        ([{"name": "b", "command": "true", "after": ["b"]}], "b waits for itself"),
        ([{"name": "b", "command": "true", "gpus": 3}], "b needs 3 of the GPUs"),
        ([{"name": "b", "command": "true", "cards": [7]}], "b needs 1 of the GPUs"),
        ([{"name": "b", "command": "true", "limit": -5}], "no file of jobs: jobs.0.limit"),
        ([{"name": "b", "command": "true"}] * 2, "several jobs 'b'"),
    ],
)
def test_jobs_that_can_never_run(tmp_path, jobs, reason):
    with pytest.raises(SurgeryError, match=reason):
        run(tmp_path, jobs)


@pytest.mark.parametrize(("text", "reason"), [(None, "cannot be read"), ("{", "is not YAML"), ("", "no file of jobs")])
def test_files_of_other_things(tmp_path, text, reason):
    path = tmp_path / "jobs.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(SurgeryError, match=reason):
        main([str(path), "--gpus", "1", "--seconds", "1", "--logs", str(tmp_path)])


@pytest.mark.parametrize("name, number, start", [
    ("quality/public_rows.yaml", 10, "NAME=original; mkdir -p WORK/$NAME"),
    ("speed/gpu_checks.yaml", 12, 'python3 -m pytest -q -m ""'),
])  # fmt: skip
def test_shipped_jobs_are_read(name, number, start, capsys):
    path = Path(queue.__file__).parent / name
    main([str(path), "--gpus", "4", "--seconds", "1", "--logs", "LOGS", "--set", "source=SRC", "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == number and lines[0].partition(": ")[2].startswith(start)
    assert not any(word in "".join(lines) for word in ("{source}", "{run}", "{long}", "{tests}", "{out}"))
