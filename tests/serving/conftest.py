"""Converted checkpoints that several files of this folder serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.served import HYBRID, converted, random_checkpoint
from serving.engines import apart


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """A random Llama."""
    return apart(random_checkpoint, tmp_path_factory.mktemp("source") / "SRC")


@pytest.fixture(scope="session")
def hybrid(source, tmp_path_factory) -> Path:
    """Gated DeltaNet with a window in two of three layers, softmax in the other, and BTT linears.

    The state is small, so that blocks of the key cache, which vLLM makes as large, are shorter than the shared
    prefix.
    """
    return apart(converted, source, tmp_path_factory.mktemp("hybrid") / "OUT", **HYBRID)
