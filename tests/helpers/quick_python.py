"""A Python that starts without import time: a server with torch and transformers imported forks for each command.

    QuickPython(environment).write(folder / "python")      an executable that takes what `python` takes: -m, -c or a file

The command runs in the caller's directory with its environment and its standard streams, and exits as it would alone.
For tests that run many commands, each of which would import for seconds.
"""

from __future__ import annotations

import array
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
import types
from pathlib import Path

HEADER = 4


class QuickPython:
    """A server process that forks for each command, so that commands start without import time."""

    def __init__(self, folder: Path, environment: dict[str, str]):
        self.address = str(folder / "socket")
        command = [sys.executable, __file__, "serve", self.address]
        self.server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        while self.server.poll() is None:  # a busy machine takes minutes to import
            if os.path.exists(self.address):
                return
            time.sleep(0.1)
        raise RuntimeError(f"the server of commands ended with {self.server.returncode}")

    def write(self, path: Path, words: str = "") -> None:
        """Write an executable script that runs `python words ..` on the server."""
        # -I -S: nothing but the standard library, which starts in a few hundredths of a second.
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{__file__}" call "{self.address}" {words} "$@"\n')
        path.chmod(0o755)

    def close(self) -> None:
        """Stop the server."""
        self.server.kill()
        self.server.wait()


def call(address: str, words: list[str]) -> int:
    """Send a command to the server and return its exit code."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address)
        request = json.dumps({"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
        streams = array.array("i", [0, 1, 2])
        link.sendmsg(
            [len(request).to_bytes(HEADER, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams.tobytes())]
        )
        link.sendall(request)
        answer = link.recv(1)
    return answer[0] if answer else 1


def serve(address: str) -> None:
    """Serve until the process is killed or its parent is gone."""
    parent = os.getppid()
    import transformers.modeling_utils  # noqa: F401

    import surgery.cli.main
    import surgery.conversion.convert
    import surgery.publish.summary  # noqa: F401

    os.fsync = lambda _: None  # as in tests/conftest.py
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address + ".new")
        listening.listen()
        os.rename(address + ".new", address)  # there when it answers
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the commands
        listening.settimeout(10.0)
        while os.getppid() == parent:
            try:
                link, _ = listening.accept()
            except TimeoutError:
                continue
            link.setblocking(True)
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                _answer(link)
            link.close()


def _answer(link: socket.socket) -> None:
    size, ancillary, _, _ = link.recvmsg(HEADER, socket.CMSG_LEN(3 * 4))
    streams = array.array("i", ancillary[0][2])
    request = b""
    while len(request) < int.from_bytes(size, "big"):
        request += link.recv(2**16)
    asked = json.loads(request)
    for ours, theirs in enumerate(streams):
        os.dup2(theirs, ours)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    code = _run(asked["words"])
    sys.stdout.flush()
    sys.stderr.flush()
    link.sendall(bytes([code]))
    os._exit(code)


def _run(words: list[str]) -> int:
    sys.path[0] = os.getcwd()
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec", dont_inherit=True), main.__dict__)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    sys.exit(call(sys.argv[2], sys.argv[3:]))
