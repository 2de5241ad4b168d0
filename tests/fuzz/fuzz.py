"""Feed mutated documents to a parser for a given time, and report those on which it fails.

    python tests/fuzz/fuzz.py recipe --seconds 600          or `all`, each for that long; --list names the targets
    python tests/fuzz/fuzz.py recipe --input crash-recipe-0123abcd

With atheris installed (`pip install atheris`, on Linux) coverage guides the mutations; without it they are random. A
document on which the parser fails is written to the working directory as crash-TARGET-HASH, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Not this folder, where the package `fuzz` would be this file.
sys.path[:] = [
    str(ROOT),
    str(ROOT / "tests"),
    *(p for p in sys.path if Path(p or ".").resolve() != ROOT / "tests/fuzz"),
]
sys.dont_write_bytecode = True
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description="Fuzz one of surgery's parsers.")
    parser.add_argument("target", nargs="?", default="all")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--input", type=Path, help="one file, instead")
    parser.add_argument("--plain", action="store_true", help="without atheris, though it is installed")
    given = parser.parse_args()
    warnings.simplefilter("ignore")

    from fuzz.fuzz_targets import TARGETS

    if given.list:
        print("\n".join(f"{name:<20} {(one.read.__doc__ or '').strip()}" for name, one in TARGETS.items()))
        return 0
    names = list(TARGETS) if given.target == "all" else [given.target]
    if given.input is not None:
        TARGETS[names[0]].run(given.input.read_bytes())
        return 0
    if len(names) == 1 and not given.plain:
        try:
            import atheris
        except ImportError:
            pass
        else:
            fuzz_with_atheris(atheris, names[0], given.seconds, given.seed)
    return max(fuzz_randomly(name, given.seconds, given.seed) for name in names)


def fuzz_randomly(name: str, seconds: float, seed: int) -> int:
    """Mutate valid documents, and documents that produced a message not seen before."""
    from fuzz.fuzz_targets import TARGETS
    from helpers.fuzzing import mutate

    target, rng = TARGETS[name], random.Random(seed)
    pool = target.seeds()
    for data in pool:
        target.check_seed(data)
    seen: Counter[str] = Counter()
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        data = mutate(rng.choice(pool), rng)
        count += 1
        try:
            target.run(data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # TooLong is one, by intent
            where = traceback.extract_tb(error.__traceback__)[-1]
            key = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
            seen[key] += 1
            if seen[key] == 1:
                path = save_crash(name, data)
                print(f"{name}: {key}: {str(error)[:200]!r} ({path})", flush=True)
    print(f"{name}: {count:,} inputs in {time.monotonic() - began:.0f} s, {len(seen)} defects", flush=True)
    return int(bool(seen))


def save_crash(name: str, data: bytes) -> Path:
    """Write a failing input to a file and return its path."""
    path = Path(f"crash-{name}-{hashlib.sha256(data).hexdigest()[:8]}")
    path.write_bytes(data)
    return path


def fuzz_with_atheris(atheris: object, name: str, seconds: float, seed: int) -> None:
    """Fuzz with coverage guidance. Does not return: libFuzzer ends the process."""
    from typing import Any

    fuzzer: Any = atheris
    from fuzz.fuzz_targets import TARGETS
    from helpers.fuzzing import mutate

    target = TARGETS[name]
    for data in target.seeds():
        target.check_seed(data)
    corpus = target.folder.with_name(target.folder.name + "-corpus")
    corpus.mkdir()
    for number, data in enumerate(target.seeds()):
        (corpus / str(number)).write_bytes(data)
    for module in [m for n, m in sys.modules.items() if n.split(".")[0] == "surgery"]:
        for value in vars(module).values():
            if getattr(value, "__module__", None) == module.__name__ and hasattr(value, "__code__"):
                value.__code__ = fuzzer.instrument_func(value).__code__

    def mutate_input(data: bytes, limit: int, seed: int) -> bytes:
        rng = random.Random(seed)
        made = mutate(data, rng) if rng.random() < 0.7 else fuzzer.Mutate(data, limit)
        return made[:limit]

    def one(data: bytes) -> None:
        try:
            target.run(data)
        except BaseException:
            print(f"{name}: {save_crash(name, data)}", flush=True)
            raise

    words = [sys.argv[0], f"-max_total_time={int(seconds)}", f"-seed={seed + 1}", "-max_len=1000000", str(corpus)]
    fuzzer.Setup(words, one, custom_mutator=mutate_input)
    fuzzer.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
