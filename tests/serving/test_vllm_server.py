"""`surgery serve` with vLLM: its OpenAI endpoint on the loopback address with two clients at once, a cancelled request,
Ctrl-C, and two processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.served import converted, expected, ragged_prompts, random_checkpoint
from serving.engines import ENVIRONMENT, apart, needs_vllm

pytestmark = needs_vllm

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_START = 500


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    gated = {"mixer": "linear", "mask": "gates", "scores": "delta"}
    return apart(
        converted,
        apart(random_checkpoint, folder / "SRC"),
        folder / "OUT",
        structure="btt",
        blocks=[4, 4],
        attention=gated,
    )


@contextmanager
def running(out: Path, log: Path, *more: str) -> Iterator[tuple[subprocess.Popen, str, str]]:
    """A server of the checkpoint: its process, its address, and what it has said until it was up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", str(out), "--port", str(port), "--max-model-len", "512", "--dtype", "float32", "--eager"]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "surgery", *words, *more]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    address, start = f"http://127.0.0.1:{port}", time.monotonic()
    while process.poll() is None and time.monotonic() - start < SECONDS_TO_START:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
            break
        except OSError:
            time.sleep(1)
    try:
        text = log.read_text()
        assert process.poll() is None, text[-3000:]
        yield process, address, text
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


@pytest.fixture(scope="module")
def server(out, tmp_path_factory):
    with running(out, tmp_path_factory.mktemp("log") / "server.log") as started:
        yield started


def ask(address: str, body: dict) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)


def completion(address: str, model: str, prompt: list[int], tokens: int) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "temperature": 0}
    with urllib.request.urlopen(ask(address, {**body, "ignore_eos": True}), timeout=300) as answer:
        return json.load(answer)["choices"][0]["text"]


def check_texts(out: Path, address: str, prompts: list[list[int]]) -> None:
    """Check that two clients at once get the text of transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    wanted = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens, _ in apart(expected, out, prompts, 12)]
    with ThreadPoolExecutor(2) as clients:
        found = list(clients.map(lambda prompt: completion(address, str(out), prompt, 12), prompts))
    assert found == wanted


def test_two_clients_at_once_get_the_text_of_transformers(server, out):
    _, address, text = server
    assert "with vLLM, which is installed" in text
    check_texts(out, address, ragged_prompts(4))


def test_a_cancelled_stream_does_not_disturb_the_next_request(server, out):
    _, address, _ = server
    prompt = ragged_prompts(2)[1]
    before = completion(address, str(out), prompt, 8)
    body = {
        "model": str(out),
        "prompt": prompt,
        "max_tokens": 300,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    with urllib.request.urlopen(ask(address, body), timeout=300) as stream:
        assert stream.readline().startswith(b"data: ")
    assert completion(address, str(out), prompt, 8) == before


def test_ctrl_c_ends_the_server_and_its_processes(server):
    process, address, _ = server
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 0
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{address}/health", timeout=5)


def test_two_processes_give_the_text_of_transformers(out, tmp_path):
    """The build for CPUs binds each process to a memory node, of which there may be one."""
    with running(out, tmp_path / "server.log", "--", "--tensor-parallel-size", "2") as (_, address, _):
        check_texts(out, address, ragged_prompts(4))
