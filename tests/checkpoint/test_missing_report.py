"""What `surgery inspect` refuses: a checkpoint without surgery_report.json (`save_pretrained` of a loaded model writes
none), and a table in config.json that the stored tensors do not fit."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from surgery.checkpoint.safetensors_io import TensorInfo
from surgery.checkpoint.source import open_checkpoint
from surgery.core.errors import SurgeryError
from surgery.core.journal import check_output_path
from surgery.publish.summary import check_entries, read_report


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        ({"quantization_config": {"quant_method": "surgery"}}, "copy the file from the checkpoint that the model was"),
        ({"quantization_config": {"quant_method": "gptq"}}, "Give a converted checkpoint"),
        ([1], "Give a converted checkpoint"),
        (None, "Give a converted checkpoint"),
    ],
)
def test_the_error_says_where_the_report_is(tmp_path, config, remedy):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SurgeryError, match=remedy):
        read_report(tmp_path, "OUT")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"structure": "low_rank", "rank": 10**9}, "its rank must be a number from 1 to 8"),
        (
            {"structure": "low_rank", "rank": 5},
            r"'layer' the tensor right has the shape \[5, 8\], the file has \[4, 8\]",
        ),
        ({"structure": "os.system"}, "os.system"),
    ],
)
def test_inspect_refuses_a_table_that_the_tensors_do_not_fit(tmp_path, entry, message):
    source = SimpleNamespace(tensors={"layer.right": TensorInfo("layer.right", tmp_path / "f", "F32", (4, 8), 0, 128)})
    whole = {"in_features": 8, "out_features": 8, "bias": False, **entry}
    with pytest.raises(SurgeryError, match=message):
        check_entries({"layer": whole}, source)
    check_entries({"layer": {**whole, "structure": "low_rank", "rank": 4}}, source)


def test_an_interrupted_or_finished_conversion_is_named(tmp_path):
    (tmp_path / "OUT.partial").mkdir()
    with pytest.raises(SurgeryError, match=r"OUT does not exist; .*OUT\.partial holds unfinished work.*with --resume"):
        open_checkpoint(str(tmp_path / "OUT"))
    with pytest.raises(SurgeryError, match="neither a local folder"):
        open_checkpoint("x" * 250)  # with .partial behind it, longer than a file's name may be
    (tmp_path / "DONE").mkdir()
    (tmp_path / "DONE" / "surgery_report.json").write_text("{}")
    with pytest.raises(SurgeryError, match="DONE is complete, so there is nothing to resume"):
        check_output_path(tmp_path / "DONE", resume=True)
