"""Errors meant for people: the object, the numbers, the rule, a working example. The command line prints
them as one message and exits with code 2; anything else is a defect and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class SurgeryError(Exception):
    """Something the user can put right: a wrong path, a typo in a recipe, a damaged shard, a full disk."""

    reported_by_peer = False  # whether another process of this run says so already


class NumbersError(SurgeryError):
    """A matrix that cannot be factored or fitted: NaN, overflow, singular. Whoever knows the name of the matrix adds it."""


@contextmanager
def naming(matrix: str) -> Iterator[None]:
    """NumbersError within gets the matrix's name in front."""
    try:
        yield
    except NumbersError as error:
        raise SurgeryError(f"{matrix}: {error}") from None


class Interrupted(SurgeryError):
    """Nothing is wrong with what was asked: what is done is kept, and --resume goes on."""


def suggestion(word: str, valid: Iterable[str], count: int = 1) -> str:
    """A tail for a message: `; did you mean 'low_rank'?`, or the valid names when none is close."""
    names = sorted(valid)
    close = difflib.get_close_matches(word, names, n=count, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(name) for name in close) + "?"
    return "; valid: " + ", ".join(names)
