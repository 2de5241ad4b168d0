"""A checkpoint without surgery_report.json: `save_pretrained` of a loaded model writes none."""

from __future__ import annotations

import json

import pytest

from surgery.core.errors import SurgeryError
from surgery.publish.summary import read_report


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
