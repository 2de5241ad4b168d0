"""Errors that the user can fix. A message names the object, the value, the rule, and what to do.

The command line prints such an error as one message and exits with code 2. Any other exception is a defect and keeps
its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class SurgeryError(Exception):
    """An error that the user can fix: a wrong path, a typo in a recipe, a damaged shard, a full disk."""

    reported_by_peer = False  # whether another process of this run reports this error


class UnknownNameError(SurgeryError):
    """The name of a structure, mixer, mask or feature map that neither surgery nor a plugin has registered."""


class NumericalError(SurgeryError):
    """A matrix that cannot be factored or fitted (NaN, overflow, singular). `naming` adds the name of the matrix."""


class RenamedWarning(FutureWarning):
    """A warning of an old word in a recipe; it names the new one. The command line prints it as a note."""


@contextmanager
def naming(matrix: str) -> Iterator[None]:
    """Prefix any NumericalError raised inside with the name of the matrix."""
    try:
        yield
    except NumericalError as error:
        raise SurgeryError(f"{matrix}: {error}") from None


class Interrupted(SurgeryError):
    """An interruption that the user did not cause by a mistake: finished work is kept, and --resume continues."""


class WorkerError(Exception):
    """The error of another process of this command, to be reported as that process would. code: its exit code."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


def suggestion(word: str, valid: Iterable[str], count: int = 1) -> str:
    """Return the end of an error message: `; did you mean 'low_rank'?`, or all valid names if none is close.

    A name is close if it resembles the word, or ends with it: longbench_qasper for qasper.
    """
    names = sorted(valid)
    close = difflib.get_close_matches(word, names, n=count, cutoff=0.6)
    close = close or [name for name in names if word and name.endswith((f"_{word}", f"-{word}", f".{word}"))][:count]
    if close:
        return "; did you mean " + " or ".join(repr(name) for name in close) + "?"
    return "; valid: " + ", ".join(names)
