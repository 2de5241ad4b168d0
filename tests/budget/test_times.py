"""Times of choices: measured where a table has them, counted otherwise, and said which."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from surgery.budget.search import SearchSettings, search
from surgery.budget.times import DATA_SHEETS, find_device
from surgery.cli.main import main
from surgery.core.errors import SurgeryError
from surgery.mixers import AttentionShape, mixer_config
from surgery.planning.measured_times import MeasuredTimes, included_tables

SHAPE = AttentionShape(dim=512, heads=8, groups=2, key=64, value=64, rotary=64, scaling=0.125)
BF16 = torch.bfloat16


def test_a_linear_has_its_measured_time():
    device = find_device("h200", None, 4096)
    assert device.times is not None and device.name == "NVIDIA H200"
    row = next(row for row in included_tables()[0]["rows"] if row["op"] == "low_rank" and row["pass"] == "captured")
    sizes = row["sizes"]
    shape = (sizes["outputs"], sizes["inputs"])
    dense = device.times.dense("decode", 1, *shape)
    assert dense is not None and device.linear_ns("decode", shape, None, shape[0] * shape[1]) == round(dense.ms * 1e6)
    config = {"structure": "low_rank", "rank": sizes["rank"]}
    structured = device.times.structured("decode", 1, config, shape)
    assert structured is not None
    assert device.linear_ns("decode", shape, config, sizes["rank"] * sum(shape)) == round(structured.ms * 1e6)


def test_a_structure_that_was_not_measured_is_no_faster_than_its_share():
    """Its time lies between that share of the dense linear's and all of it."""
    times = MeasuredTimes(included_tables()[0])
    dense, half = times.dense("prefill", 8192, 4096, 4096), times.scaled("prefill", 8192, 4096 * 2048, (4096, 4096))
    assert dense is not None and half is not None and dense.ms / 2 <= half.ms < dense.ms
    assert times.scaled("prefill", 8192, 4096 * 4096, (4096, 4096)) == (pytest.approx(dense.ms), False)


def test_a_device_without_a_table_is_counted():
    device = find_device("A100", None, 4096)
    rate, bandwidth = DATA_SHEETS["a100"]
    assert device.times is None and "counted, not measured" in device.describe()
    assert device.linear_ns("prefill", (4096, 4096), None, 4096**2) == round(2 * 4096 * 4096**2 / rate * 1e9)
    moved = 2 * (4096**2 + 2 * 4096)
    assert device.linear_ns("decode", (4096, 4096), None, 4096**2) == round(moved / bandwidth * 1e9)
    assert device.linear_ns("prefill", (4096, 4096), None, 4096**2, last=True) == round(moved / bandwidth * 1e9)


def test_attention_is_counted():
    """Softmax grows with the square of a prompt, a window with its length; a decoding step reads its cache."""
    window = mixer_config({"mixer": "window", "window": 256, "sinks": 4})
    short, long = find_device("a100", None, 8192), find_device("a100", None, 32768)
    assert long.attention_ns("prefill", None, SHAPE, BF16) == pytest.approx(
        16 * short.attention_ns("prefill", None, SHAPE, BF16), rel=1e-3
    )
    assert long.attention_ns("prefill", window, SHAPE, BF16) < 6 * short.attention_ns("prefill", window, SHAPE, BF16)
    moved = 32768 * 2 * (64 + 64) * 2
    assert long.attention_ns("decode", None, SHAPE, BF16) == round(moved / DATA_SHEETS["a100"][1] * 1e9)


def test_an_unknown_device_is_refused():
    with pytest.raises(
        SurgeryError, match=r"--on must be one of NVIDIA H200, NVIDIA H100 80GB HBM3, .*\(got 'abacus'\).*surgery bench"
    ):
        find_device("abacus", None, 4096)


def test_a_limit_of_time_is_met(searched, source, text, tmp_path):
    out = tmp_path / "SEARCH"
    shutil.copytree(searched[0], out)
    settings = SearchSettings(text, 2048, 512, device="cpu", points=3, at=32768, on="h200", check=False)
    result = search(str(source), out, {"decode": "80%", "bytes": "90%"}, settings)
    asked = result["points"][0]["costs"]
    assert asked["decode"] <= result["limits"]["decode"] < result["original"]["decode"]
    assert asked["bytes"] <= result["limits"]["bytes"] and "times on NVIDIA H200" in result["times"]
    rows = json.loads((out / "table.json").read_text())["rows"]
    assert all({"decode", "prefill"} <= row["costs"].keys() for row in rows)
    removed = [row["costs"]["decode"] for row in rows if row["choice"].endswith("removed")]
    assert removed and all(time < 0 for time in removed)


@pytest.mark.parametrize(
    "words, says",
    [
        (
            ("--max-decode-ms", "fast"),
            "--max-decode-ms must be a share of the original or a number, such as 60% or 8.5",
        ),
        (("--max-decode-ms", "60%", "--on", "abacus"), "--on must be one of"),
        (("--max-prefill-ms", "60%", "--measured", "/nowhere.json"), "/nowhere.json does not exist"),
    ],
)
def test_wrong_options_of_time_exit_2(words, says, source, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main(["search", str(source), "--out", str(tmp_path / "SEARCH"), *words])
    assert left.value.code == 2 and says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "SEARCH").exists()
