"""Run several processes of one gloo group by forking a process that has imported everything.

This replaces `accelerate launch`, which one test of test_training_processes.py runs, and saves each process's import time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

import torch


def run_processes(count: int, run: Callable[[int], object]) -> list[int]:
    """Run `run(rank)` in `count` processes of one group; return their exit codes."""
    import transformers.modeling_utils  # noqa: F401  once, for all children

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                _set_group_environment(rank, count, port)
                run(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


def _set_group_environment(rank: int, count: int, port: int) -> None:
    """Set the environment variables of torch.distributed."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_num_threads(1)
    if count > 1:
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
        os.environ.update({name: str(value) for name, value in told.items()})


def run_command(count: int, folder: Path, words: list[str]) -> str:
    """Run `surgery WORDS` in `count` processes in `folder`; return the standard output of rank 0."""
    from surgery.cli.main import main

    def run(rank: int) -> None:
        os.chdir(folder)
        with open(folder / f"said-{rank}", "w") as said, contextlib.redirect_stdout(said):
            try:
                main(words)
            except SystemExit as left:
                if left.code:
                    raise

    assert run_processes(count, run) == [0] * count
    return (folder / "said-0").read_text()
