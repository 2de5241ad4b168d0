"""Mutate valid inputs, and run a parser under limits of time, memory and file access."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

MEMORY = 2 * 2**30  # bytes that a parser may allocate in addition to the process's own

WORDS = (
    *(
        "",
        " ",
        "\0",
        "\n",
        "a" * 3000,
        "9" * 5000,
        "☃",
        "\ud800",
        "../x",
        "/etc/passwd",
        "..",
        "~",
        "C:\\x",
        "%s{0}",
        "<b>",
    ),
    *("1e400", "100M", "9e999999", "0x10", "1_000", "nan", "-1", "2:-2", ":", "0", "*", "[", "\\", "null", "true"),
    *("btt", "low_rank", "auto", "dense", "linear", "mlr", "model.layers.0.mlp.up_proj", "__class__", "__dict__"),
    *("F32", "BF16", "I64", "F4", "float32", "torch.float32", "llama", "gpt2", "os", "cuda", "meta"),
)
NUMBERS = (
    *(0, -1, 1, 2, 3, 7, 64, 255, 2**16, 2**31, 2**32 + 1, 2**53 + 1, 2**62, 2**63, 2**64, 10**30, -(2**63)),
    *(0.0, -0.0, 0.5, 1.5, -0.5, 1e-320, 1e300, float("inf"), float("-inf"), float("nan")),
)


def _random_value(rng: random.Random, words: tuple[str, ...]) -> Any:
    """Return a random JSON value."""
    kind = rng.randrange(10)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 6:
        return rng.choice(words)
    if kind == 6:
        return rng.choice((None, True, False))
    if kind == 7:
        return [_random_value(rng, words) for _ in range(rng.randrange(4))]
    if kind == 8:
        return {str(rng.choice(words)): _random_value(rng, words) for _ in range(rng.randrange(3))}
    deep: Any = 1
    for i in range(rng.choice((5, 40, 200))):
        deep = [deep] if i % 2 else {"a": deep}
    return deep


def _locations(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return (container, key) of everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        found.append((value, key))
        _locations(part, found)
    return found


def _mutate_tree(tree: Any, rng: random.Random) -> Any:
    places = _locations(tree, [])
    if not places or rng.random() < 0.03:
        return _random_value(rng, WORDS)
    names = {k for c, k in places if isinstance(c, dict)} | {c[k] for c, k in places if isinstance(c[k], str)}
    words = (*WORDS, *sorted(map(str, names)))
    container, key = rng.choice(places)
    how = rng.randrange(9)
    if how < 4:
        container[key] = _random_value(rng, words)
    elif how == 4:
        del container[key]
    elif how == 5:  # a value from elsewhere in the tree
        other, name = rng.choice(places)
        container[key] = json.loads(json.dumps(other[name])) if name in _keys(other) else None
    elif how == 6 and isinstance(container[key], (int, float)):
        container[key] = rng.choice((-container[key], container[key] + 1, container[key] * 2, str(container[key])))
    elif how == 7 and isinstance(container, dict):
        container[str(rng.choice(words))] = container.pop(key)
    elif how == 8 and isinstance(container, list):
        container.insert(key, _random_value(rng, words))
    else:
        container[key] = [container[key]] if rng.random() < 0.5 else {"a": container[key]}
    return tree


def _keys(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def _mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    how = rng.randrange(6)
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if how == 2:
        return data[:at] + rng.choice(WORDS).encode("utf-8", "surrogatepass") + data[at:]
    if how == 3:
        end = min(len(data), at + rng.randrange(64))
        return data[:at] + data[end:]
    if how == 4:
        end = min(len(data), at + rng.randrange(64))
        return data[:end] + data[at:end] * rng.randrange(3) + data[end:]
    return data[:at] + rng.choice((b'"', b"{", b"[", b"\xff\xfe", b"\n", b"&a ", b"*a", b"!!python/name:os ", b",", b":")) + data[at:]  # fmt: skip


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Mutate JSON, JSON lines, YAML and safetensors structurally, anything else as bytes."""
    if rng.random() < 0.2:
        return _mutate_bytes(data, rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = _mutate_once(data, rng)
    return data


def _mutate_once(data: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    try:
        if 0 < length <= len(data) - 8 and data[8:9] == b"{":
            text = _to_json_bytes(_mutate_tree(json.loads(data[8 : 8 + length]), rng))
            return struct.pack("<Q", len(text)) + text + data[8 + length :]
        lines = data.split(b"\n")
        if data.lstrip()[:1] in (b"{", b"[") and len(lines) > 1 and lines[0].rstrip()[-1:] in (b"}", b"]"):
            at = rng.randrange(len(lines))
            lines[at] = _to_json_bytes(_mutate_tree(json.loads(lines[at]), rng))
            return b"\n".join(lines)
        if data.lstrip()[:1] in (b"{", b"["):
            return _to_json_bytes(_mutate_tree(json.loads(data), rng))
        tree = yaml.safe_load(data.decode())
        if isinstance(tree, (dict, list)):
            changed = _mutate_tree(tree, rng)
            return yaml.safe_dump(changed).encode() if rng.random() < 0.5 else _to_json_bytes(changed)
    except (ValueError, yaml.YAMLError, RecursionError):
        pass
    return _mutate_bytes(data, rng)


def _to_json_bytes(tree: Any) -> bytes:
    return json.dumps(tree).encode()


# -- the fence -------------------------------------------------------------------------------------
class TimeLimitExceeded(BaseException):
    """The parser took too long. A BaseException, so that `except Exception` does not catch it."""


class SandboxEscape(Exception):
    """The parser wrote, ran or connected to something outside its folder."""


WRITE_EVENTS = {
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.utime",
}
FORBIDDEN_EVENTS = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "pickle.find_class",
}
_allowed_folders: list[Path] = []
_violations: list[str] = []


def _audit_hook(event: str, args: tuple[Any, ...]) -> None:
    if not _allowed_folders:
        return
    if event in FORBIDDEN_EVENTS:
        _violations.append(f"{event} {args!r:.200}")
    elif event in WRITE_EVENTS or (event == "open" and _opens_for_writing(args)):
        paths = (
            [(args[0], args[2]), (args[1], args[3])]
            if event == "os.rename"
            else [(args[0], None if event == "open" else args[-1])]
        )
        _violations.extend(f"{event} {path}" for path, beside in paths if not _is_allowed(path, beside))


def _opens_for_writing(args: tuple[Any, ...]) -> bool:
    return isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def _is_allowed(path: Any, beside: Any) -> bool:
    """Return whether a path may be written. beside: descriptor of the folder that the path is relative to, if any."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return True  # a descriptor: opened before
    where = os.fsdecode(path)
    if isinstance(beside, int) and beside >= 0 and not os.path.isabs(where):
        where = os.path.join(os.readlink(f"/proc/self/fd/{beside}"), where)
    where = os.path.realpath(where)
    return where.startswith((*(str(p) for p in _allowed_folders), "/dev/null", "/proc/")) or "__pycache__" in where


@contextmanager
def sandbox(folder: Path, seconds: float, *also: Path) -> Iterator[None]:
    """Restrict the code inside the context to `folder` (and `also`), 2 GiB and `seconds` of CPU time.

    CPU time is this process's own, so that load on the machine does not matter.
    """
    if not _HOOK_INSTALLED:
        sys.addaudithook(_audit_hook)
        _HOOK_INSTALLED.append(True)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    old = signal.signal(signal.SIGPROF, _raise_time_limit)
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    _violations.clear()
    _allowed_folders[:] = [folder.resolve(), *(path.resolve() for path in also)]
    try:
        yield
    finally:
        _allowed_folders.clear()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
        resource.setrlimit(resource.RLIMIT_AS, before)
    if _violations:
        raise SandboxEscape("; ".join(_violations))


_HOOK_INSTALLED: list[bool] = []


def _raise_time_limit(*_: Any) -> None:
    raise TimeLimitExceeded
