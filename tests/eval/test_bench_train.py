"""`surgery bench train`: the training loop beside a bare one."""

from __future__ import annotations

import json

import pytest

from surgery.core.errors import SurgeryError
from surgery.eval.speed.run import bench
from surgery.eval.speed.tables import lost_share, result_tables


def test_training_runs_in_both_loops(tmp_path):
    """The same model, by a bare loop and by surgery's, and both are timed."""
    out = tmp_path / "out.json"
    result = bench("train", sizes="small", device="cpu", only="original", out=out)
    assert json.loads(out.read_text()) == json.loads(json.dumps(result)) and result["complete"]
    (row,) = result["rows"]
    assert row["ours_ms"] > 0 and row["bare_ms"] > 0 and len(row["losses"]) == 2
    assert all(6 < loss < 8 for loss in row["losses"]) and lost_share(row) < 1
    assert result_tables(result)
    with pytest.raises(SurgeryError, match="no case"):
        bench("train", sizes="small", device="cpu", only="nothing")


def test_no_time_for_a_case_is_an_incomplete_result():
    result = bench("train", sizes="small", device="cpu", only="original", time_limit=1e-6)
    assert result["rows"] == [] and not result["complete"]
    assert result_tables(result) is not None
