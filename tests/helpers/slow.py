"""Cases of parametrized tests that `make test` leaves out and `make test-all` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_where(is_slow: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """Return the cases, a value or a tuple of values each, with the mark `slow` on those that `is_slow` is true of.

    is_slow: takes the values of a case. For cases of which others of the same test check the same behaviour.
    """
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*each, marks=[pytest.mark.slow] if is_slow(*each) else []) for each in values]
