"""Fixtures of the tests of conversions."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.small_experts import write_experts


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """experts(kind, **options) -> folder of a tiny random mixture of experts, made once."""
    made: dict[str, Path] = {}

    def make(kind: str, **options) -> Path:
        key = f"{kind} {options}"
        if key not in made:
            made[key] = write_experts(kind, tmp_path_factory.mktemp(kind) / "model", **options)
        return made[key]

    return make
