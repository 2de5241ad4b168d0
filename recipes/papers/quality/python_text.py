"""Write a training text of Python source from wheels: documents in random order, without the files that are scored.

pip download --no-deps --only-binary :all: -d WHEELS django sympy scipy ..
python -m recipes.papers.quality.python_text WHEELS --exclude heldout.txt --out code.txt [--bytes 48M] [--seed 0]

Takes the .py files of wheels whose metadata name a permissive licence (MIT, BSD, Apache, ISC, PSF, Python). A file is left
out if more than --overlap of its long lines are in an --exclude file, if it was seen before, if it is generated (lines
above 400 characters), or shorter than 500 characters. Documents are cut at --longest characters, at a line's end, and
separated by <|endoftext|>.
"""

from __future__ import annotations

import argparse
import random
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from recipes.papers.script import run_script
from surgery.core.config import parse_count
from surgery.core.errors import SurgeryError

PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation|0BSD|HPND)\b", re.IGNORECASE)
COPYLEFT = re.compile(r"\b(A?GPL|LGPL|General Public|Mozilla|MPL)\b", re.IGNORECASE)
LONG_LINE, SHORTEST, WIDEST = 40, 500, 400  # characters
SEPARATOR = "<|endoftext|>"


def licence_of(wheel: zipfile.ZipFile) -> str:
    """Return the lines of a wheel's metadata that name its licence."""
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    head = wheel.read(name).decode("utf-8", "replace").split("\n\n")[0]
    return "\n".join(line for line in head.splitlines() if line.startswith(("License", "Classifier: License")))


def long_lines(text: str) -> list[str]:
    """Return the lines that say something: stripped, of 40 characters and more."""
    return [line.strip() for line in text.splitlines() if len(line.strip()) >= LONG_LINE]


def sources(wheels: Sequence[Path]) -> Iterator[str]:
    """Yield the .py files of permissively licensed wheels."""
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            licence = licence_of(wheel)
            if not PERMISSIVE.search(licence) or COPYLEFT.search(licence):
                print(f"{path.name} is left out: its licence is not known as permissive ({licence[:80]!r})")
                continue
            for name in sorted(wheel.namelist()):
                if name.endswith(".py"):
                    yield wheel.read(name).decode("utf-8", "replace").replace("\r\n", "\n")


def documents(wheels: Sequence[Path], excluded: set[str], overlap: float, longest: int) -> Iterator[str]:
    """Yield the documents, in the order of the wheels."""
    seen: set[int] = set()
    for text in sources(wheels):
        lines = long_lines(text)
        digest = hash(tuple(lines))
        if len(text) < SHORTEST or digest in seen or SEPARATOR in text or max(map(len, lines), default=0) > WIDEST:
            continue
        seen.add(digest)
        if sum(line in excluded for line in lines) <= overlap * len(lines):
            yield text if len(text) <= longest else text[: text.rfind("\n", 0, longest) + 1]


def main(given: list[str] | None = None) -> None:
    """Write the text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("wheels", type=Path, help="Folder with wheels.")
    add("--exclude", type=Path, action="append", default=[], help="Text that is scored, repeatable.")
    add("--out", type=Path, required=True, help="File to write.")
    add("--bytes", type=parse_count, default=48_000_000, help="Characters to write at most. Default: 48M.")
    add("--overlap", type=float, default=0.1, help="Largest share of lines in --exclude. Default: %(default)s.")
    add("--longest", type=int, default=24_000, help="Characters of a document. Default: %(default)s.")
    add("--seed", type=int, default=0, help="Seed of the order. Default: %(default)s.")
    a = parser.parse_args(given)
    wheels = sorted(a.wheels.glob("*.whl"))
    if not wheels:
        raise SurgeryError(
            f"{a.wheels} has no wheels (*.whl); download some with `pip download --no-deps -d {a.wheels}`"
        )
    excluded = {line for path in a.exclude for line in long_lines(path.read_text(encoding="utf-8"))}
    found = list(documents(wheels, excluded, a.overlap, a.longest))
    random.Random(a.seed).shuffle(found)
    taken, size = [], 0
    for text in found:
        if size + len(text) > a.bytes:
            break
        taken.append(text)
        size += len(text)
    a.out.write_text(SEPARATOR.join(taken), encoding="utf-8")
    print(f"{a.out}: {len(taken):,} of {len(found):,} documents, {size / 1e6:.1f}M characters, of {len(wheels)} wheels")


if __name__ == "__main__":
    run_script(main)
