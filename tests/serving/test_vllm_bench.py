"""`surgery bench vllm` on the engines themselves: two random models take turns in processes of their own."""

from __future__ import annotations

import pytest
from serving.engines import ENVIRONMENT, needs_vllm

import surgery

pytestmark = needs_vllm


@pytest.mark.slow
def test_prefill_and_decoding_are_measured(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    found = surgery.bench("vllm", sizes="small", only="log-linear", dtype="float32")
    assert found["complete"] and {row["model"] for row in found["rows"]} == {"original", "log-linear"}
    assert all(row["prefill_s"] > 0 and row["decode_ms"] > 0 for row in found["rows"])
    assert all(about["blocks"] > 0 and about["vllm"].startswith("0.") for about in found["engines"].values())
