"""Run several processes of one gloo group, or a command, by forking a process that has imported everything.

This saves the import time of each process. One test of test_training_processes.py uses `accelerate launch` itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from helpers.ports import reserved_port

RUNNING = 256  # no process has this exit code


def run_processes(count: int, run: Callable[[int], object]) -> list[int]:
    """Run `run(rank)` in `count` processes of one group; return their exit codes."""
    import transformers.modeling_utils  # noqa: F401  once, for all children

    children: dict[int, int] = {}  # process id: exit code
    with reserved_port() as port:
        try:
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
                children[pid] = RUNNING
            for pid in children:
                children[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        finally:  # the test's time limit may interrupt the waiting
            for pid in (pid for pid, code in children.items() if code == RUNNING):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return list(children.values())


def _set_group_environment(rank: int, count: int, port: int) -> None:
    """Set the environment variables of torch.distributed."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_num_threads(1)
    if count > 1:
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
        os.environ.update({name: str(value) for name, value in environment.items()})


def start_command(folder: Path, words: list[str]) -> int:
    """Start `surgery WORDS` in a forked process that writes its output to folder/output; return the process id.

    The process exits with the command's code and handles Ctrl-C (SIGINT) as one that was started in a terminal.
    """
    import transformers.modeling_utils  # noqa: F401

    from surgery.cli.main import main

    if (pid := os.fork()) != 0:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with (
            open(folder / "output", "w") as output,
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            try:
                main(words)
                code = 0
            except SystemExit as left:
                code = left.code if isinstance(left.code, int) else int(left.code is not None)
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(code)


def run_command(count: int, folder: Path, words: list[str]) -> str:
    """Run `surgery WORDS` in `count` processes in `folder`; return the standard output of rank 0."""
    from surgery.cli.main import main

    def run(rank: int) -> None:
        os.chdir(folder)
        with open(folder / f"output-{rank}", "w") as output, contextlib.redirect_stdout(output):
            try:
                main(words)
            except SystemExit as left:
                if left.code:
                    raise

    assert run_processes(count, run) == [0] * count
    return (folder / "output-0").read_text()
