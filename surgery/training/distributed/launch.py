"""Start the worker processes of one command on this machine: `surgery finetune .. --gpus 4`.

torch's elastic agent starts them (that of torchrun), with the environment variables of torchrun, and watches them. Each
worker runs the same command line. A worker writes the error that ends it to a file, and this process reports one error:
the first that a user can correct, otherwise the first of all.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from surgery.core.errors import SurgeryError, WorkerError

WORKER, ERROR_FILE = "SURGERY_WORKER", "TORCHELASTIC_ERROR_FILE"
RUN_ID = "surgery"


def is_worker() -> bool:
    """Return whether `run_workers` started this process."""
    return WORKER in os.environ


def check_gpus(count: int | None, device: str | None) -> int:
    """Return the number of worker processes to start, 0 to run in this process.

    count: of --gpus. Raises SurgeryError if the machine has fewer GPUs, or if `device` names one of them.
    """
    if count is None or is_worker():
        return 0
    if count < 1:
        raise SurgeryError(f"--gpus must be at least 1 (got {count}).")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SurgeryError(
            f"--gpus {count} starts its own processes, and this process is one of {os.environ['WORLD_SIZE']} of "
            "accelerate launch or torchrun. Leave out one of both."
        )
    if device not in (None, "cuda", "cpu"):
        raise SurgeryError(
            f"--gpus {count} uses the first {count} GPUs, and --device names {device}. Leave out --device."
        )
    if device != "cpu" and (available := torch.cuda.device_count()) < count:
        hint = (
            f"Use --gpus {available}" if available else f"--gpus {count} --device cpu trains in {count} CPU processes"
        )
        raise SurgeryError(f"--gpus {count}: this machine has {available} GPUs. {hint}.")
    return 0 if count == 1 else count


def run_workers(words: Sequence[str], count: int, capture: bool = False) -> str:
    """Run `surgery WORDS` in `count` processes of one group; return the standard output of rank 0 where it is captured.

    The environment is that of this process. Raises SurgeryError or WorkerError with the message of the worker that
    failed, after all workers have ended, and KeyboardInterrupt after Ctrl-C.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its report of a failed worker
    added = {WORKER: "1", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
    added = {name: value for name, value in added.items() if name not in os.environ}
    with tempfile.TemporaryDirectory(prefix="surgery-workers-") as folder:
        logs: dict[str, Any] = {"redirects": Std.OUT} if capture else {}
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=RUN_ID, max_restarts=0, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", local_addr="localhost", logs_specs=DefaultLogsSpecs(log_dir=folder, **logs),
        )  # fmt: skip
        os.environ.update(added)  # the workers inherit the environment
        try:
            elastic_launch(config, sys.executable)("-m", "surgery", *words)
        except ChildFailedError as error:
            raise worker_error(error.failures) from None
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            sys.exit(128 + int(stopped.sigval))
        finally:
            for name in added:
                del os.environ[name]
        outputs = sorted(Path(folder).rglob("0/stdout.log"))
        return outputs[0].read_text(encoding="utf-8") if outputs else ""


def write_worker_error(message: str) -> bool:
    """Write the message that ends this worker to its file. Return False if this process is no worker."""
    path = os.environ.get(ERROR_FILE)
    if not is_worker() or not path:
        return False
    details = {"message": message, "extraInfo": {"timestamp": str(int(time.time())), "py_callstack": ""}}
    Path(path).write_text(json.dumps({"message": details}), encoding="utf-8")
    return True


def worker_error(failures: dict[int, Any]) -> Exception:
    """Return the error to report. failures: torch's ProcessFailure of each failed worker, by rank."""
    rank, failure = min(failures.items(), key=lambda item: (item[1].exitcode != 2, item[1].timestamp))
    data = failure.error_file_data.get("message")
    if isinstance(data, dict):
        message = str(data["message"])
        return SurgeryError(message) if failure.exitcode == 2 else WorkerError(message, failure.exitcode)
    if failure.exitcode < 0:
        return SurgeryError(
            f"process {rank} was ended by {failure.signal_name()}, often because the host's "
            "memory ran out. Finished work is kept; run the same command with --resume to continue."
        )
    return WorkerError(f"process {rank} ended with exit code {failure.exitcode}.", failure.exitcode)
