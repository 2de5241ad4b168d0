"""Data sets whose README or links lead out of their folder are refused before anything is read."""

from __future__ import annotations

import json

import pytest

from surgery.calibration.data import document_stream
from surgery.core.digests import check_no_outside_files
from surgery.core.errors import SurgeryError
from surgery.eval import offline_data as mirror


def data_set(root, head, name="org/name"):
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(f"---\nconfigs:\n{head}\n---\n")
    (folder / "test.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    return folder


@pytest.mark.parametrize("form", ["{split: test, path: %s}", "{split: test, path: [test.jsonl, %s]}", "%s"])
@pytest.mark.parametrize(
    "path", ["../shared/test.jsonl", ".data/x.jsonl", "a/../../x", "/etc/hostname", '"https://x.y/z"', '"zip://a::b"']
)
def test_outside_d2_data_files_lie_in_their_folder(tmp_path, form, path):
    folder = data_set(tmp_path, f"- config_name: default\n  data_files:\n  - {form % path}")
    with pytest.raises(SurgeryError, match=r"README.md: data_files names .* inside the data set's folder"):
        mirror.load_rows(tmp_path, "x", "org/name", None, "test")
    with pytest.raises(SurgeryError, match="data_files names"), mirror.use_mirror(tmp_path, ["org/name"]):
        pass
    assert folder.is_dir()


@pytest.mark.parametrize("head", ["- config_name: d\n  data_dir: ../x", "- config_name: d\n  data_files: {test: ../x}"])
def test_outside_d2_data_dir_and_tables_of_splits(tmp_path, head):
    with pytest.raises(SurgeryError, match=r"names '\.\./x'"):
        check_no_outside_files(data_set(tmp_path, head))


def test_outside_d2_line_ends_of_another_system(tmp_path):
    folder = data_set(tmp_path, "")
    (folder / "README.md").write_bytes(b"---\r\nconfigs:\r\n- config_name: d\r\n  data_files: ../x\r\n---\r\n")
    with pytest.raises(SurgeryError, match=r"names '\.\./x'"):
        check_no_outside_files(folder)


def test_outside_d2_links_and_hidden_settings(tmp_path):
    folder = data_set(tmp_path, "- config_name: default\n  data_files: test.jsonl")
    check_no_outside_files(folder)
    (folder / "more.jsonl").symlink_to(folder / "test.jsonl")
    check_no_outside_files(folder)
    (tmp_path / "other.jsonl").write_text("{}")
    (folder / "out.jsonl").symlink_to(tmp_path / "other.jsonl")
    with pytest.raises(SurgeryError, match=r"out.jsonl is a link to .*, outside the data set's folder"):
        check_no_outside_files(folder)
    (folder / "out.jsonl").unlink()
    (folder / ".huggingface.yaml").write_text("configs: []")
    with pytest.raises(SurgeryError, match=r"only from README.md"):
        check_no_outside_files(folder)


def test_outside_d2_a_calibration_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data_set(tmp_path, "- config_name: default\n  data_files: ../../x.jsonl")
    with pytest.raises(SurgeryError, match="data_files names"):
        next(iter(document_stream("org/name")))
