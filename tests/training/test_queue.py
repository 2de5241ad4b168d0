"""recipes/papers/queue.py: jobs on GPUs in turns, and their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.papers import queue
from recipes.papers.queue import main
from surgery.core.errors import SurgeryError


def run(tmp_path, jobs, *more, seconds="20"):
    path = tmp_path / "jobs.yaml"
    path.write_text(json.dumps({"set": {"word": "set"}, "jobs": jobs}), encoding="utf-8")
    main([str(path), "--gpus", "2", "--seconds", seconds, "--logs", str(tmp_path / "logs"), *more])
    lines = (tmp_path / "logs" / "jobs.jsonl").read_text().splitlines()
    return {line["name"]: line["status"] for line in map(json.loads, lines)}


def test_jobs_wait_for_gpus_for_each_other_and_for_files(tmp_path, capsys):
    flag = tmp_path / "flag"
    jobs = [
        {"name": "later", "needs": str(flag), "command": "echo later on $CUDA_VISIBLE_DEVICES"},
        {"name": "both", "gpus": 2, "after": ["first"], "command": "echo {word} on $CUDA_VISIBLE_DEVICES"},
        {"name": "first", "on": [1], "command": f"sleep 0.3; touch {flag}; echo first on $CUDA_VISIBLE_DEVICES"},
        {"name": "broken", "gpus": 0, "command": "exit 3"},
        {"name": "never", "after": ["broken"], "command": "echo never"},
        {"name": "long", "seconds": 1000, "command": "echo long"},
    ]
    assert run(tmp_path, jobs, "--set", "word=given") == {"later": 0, "both": 0, "first": 0, "broken": 3}
    logs = {path.stem: path.read_text().strip() for path in (tmp_path / "logs").glob("*.log")}
    assert logs["first"] == "first on 1" and logs["both"] == "given on 0,1" and logs["later"] == "later on 0"
    out = capsys.readouterr().out
    assert "never: not started" in out and "long: not started" in out
    run(tmp_path, jobs)  # only the job that failed runs again
    assert (tmp_path / "logs" / "jobs.jsonl").read_text().count('"name": "first"') == 1


def test_a_job_ends_at_its_limit_and_all_at_the_end(tmp_path):
    jobs = [
        {"name": "limited", "limit": 0.3, "command": "sleep 60"},
        {"name": "endless", "command": "trap '' TERM; while true; do sleep 0.1; done"},
    ]
    assert run(tmp_path, jobs, seconds="1") == {"limited": 124, "endless": 124}


def test_files_of_other_things(tmp_path):
    with pytest.raises(SurgeryError, match="b comes after c, which is no job"):
        run(tmp_path, [{"name": "b", "command": "true", "after": ["c"]}])
    with pytest.raises(SurgeryError, match="no file of jobs"):
        run(tmp_path, [{"name": "b", "comand": "true"}])
    with pytest.raises(SurgeryError, match="without /"):
        run(tmp_path, [{"name": "../b", "command": "true"}])


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
