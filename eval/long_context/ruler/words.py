"""Random words, numbers and names for prompts; words are those of the package wonderwords, as in RULER."""

from __future__ import annotations

import uuid
from functools import cache
from importlib.resources import files
from random import Random

from surgery.core.errors import SurgeryError
from surgery.core.project import install_command

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@cache
def load_words(kind: str) -> tuple[str, ...]:
    """Return wonderwords' list. kind: noun, adjective or verb."""
    try:
        text = (files("wonderwords") / "assets" / f"{kind}list.txt").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError):
        raise SurgeryError(f"RULER's words need the package wonderwords: {install_command('eval')}.") from None
    return tuple(sorted({line.strip() for line in text.splitlines() if line.strip()}))


@cache
def vocabulary() -> tuple[str, ...]:
    """Return nouns, adjectives and verbs, each once."""
    return tuple(sorted({*load_words("noun"), *load_words("adjective"), *load_words("verb")}))


def random_compound(rng: Random) -> str:
    """Return adjective-noun, all pairs equally likely."""
    return f"{rng.choice(load_words('adjective'))}-{rng.choice(load_words('noun'))}"


def random_number(rng: Random) -> str:
    """Return a number of seven digits."""
    return str(rng.randint(10**6, 10**7 - 1))


def random_uuid(rng: Random) -> str:
    """Return a UUID of version 4."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def random_letters(rng: Random, length: int, alphabet: str) -> str:
    """Return `length` letters, drawn with replacement."""
    return "".join(rng.choices(alphabet, k=length))
