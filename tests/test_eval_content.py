"""Issue 17, section 3: what is scored is what was asked for. Data, answers and results are cached by content, never by path."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from surgery import digests
from surgery.calibrate import document_stream
from surgery.errors import SurgeryError
from surgery.eval.harness import mirror, names
from surgery.eval.suites import EvalOptions
from surgery.training.data_recipe import SourceConfig
from surgery.training.documents import files_identity
from surgery.training.sources import open_source

ROOT = Path(__file__).resolve().parents[1]
TINY, MIRROR = ROOT / "surgery" / "data" / "tiny", ROOT / "eval" / "mirror"
FILES = "\n".join(f"  - {{split: {split}, path: {split}.jsonl}}" for split in ("train", "validation"))
HEADER = f"---\nconfigs:\n- config_name: default\n  data_files:\n{FILES}\n---\n"
LONG_AGO = 1_000_000_000


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """One Arrow cache for all that a test reads."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def written(path: Path, rows: list[dict]) -> Path:
    """JSON lines whose mtime says nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


def questions(root: Path, label: int) -> Path:
    """A mirror of baber/piqa in which every answer is `label`: same header, sizes and mtimes for each."""
    rows = [{"goal": f"find lamp {i}", "sol1": "look", "sol2": "sleep", "label": label} for i in range(4)]
    for split in ("train", "validation"):
        written(root / f"baber/piqa/{split}.jsonl", rows)
    (root / "baber/piqa/README.md").write_text(HEADER)
    os.utime(root / "baber/piqa/README.md", (LONG_AGO, LONG_AGO))
    return root


# -- 3.1: the data --------------------------------------------------------------------------------------
def test_3_1_mirrors_with_equal_headers_are_told_apart(tmp_path):
    """`datasets` alone returns the first mirror's rows for all of them."""
    for number in range(3):
        place = questions(tmp_path / str(number), number)
        assert set(mirror.rows(place, "piqa", "baber/piqa", None, "validation")["label"]) == {number}
    questions(tmp_path / "0", 7)  # in place, with the mtime of before
    assert set(mirror.rows(tmp_path / "0", "piqa", "baber/piqa", None, "validation")["label"]) == {7}


def test_3_1_tasks_of_lm_eval_read_the_mirror_that_was_named(tmp_path):
    for number in range(2):
        asked = EvalOptions(data_root=questions(tmp_path / str(number), number))
        (task,) = names.load(["piqa"], asked)["tasks"].values()
        assert [doc["label"] for doc in task.eval_docs] == [number] * 4
    assert Path.cwd() != tmp_path


def test_3_1_a_mirror_that_changes_while_it_is_read_is_refused(tmp_path, cache):
    place = questions(tmp_path / "mirror", 0)
    with pytest.raises(SurgeryError, match="changed while it was read"), mirror.inside(place, ["baber/piqa"]):
        questions(place, 1)
    assert mirror.rows(place, "piqa", "baber/piqa", None, "validation")["label"][0] == 1


def test_3_1_training_reads_the_files_as_they_are(tmp_path):
    """Also where a file was replaced by one with its path, size and mtime."""
    said, identities = [], set()
    for text in ("one", "two"):
        path = written(tmp_path / "data.jsonl", [{"text": text}])
        reader = open_source(SourceConfig(path=str(path)), 0, "training", 0.0, False)
        said.append(reader.take().content)
        identities.add(reader.identity())
    assert said == ["one", "two"] and len(identities) == 2


def test_3_1_streamed_rows_have_the_columns_of_their_file(tmp_path):
    """`datasets` keeps columns by path and mtime, and casts the rows of a changed file to them."""
    path = written(tmp_path / "data.jsonl", [{"text": "one"}])
    open_source(SourceConfig(path=str(path)), 0, "training", 0.0, False)
    written(path, [{"said": "two"}])
    assert list(document_stream(str(path))) == ["two"]
    streamed = open_source(SourceConfig(path=str(path), streaming=True, text="said"), 0, "training", 0.0, False)
    assert streamed.take().content == "two"


def test_3_1_text_that_differs_in_its_middle_is_another_text(tmp_path):
    """What resuming and a teacher cache compare."""
    found = []
    for word in ("red", "tin"):
        (tmp_path / "text.txt").write_text("a" * 100_000 + word + "b" * 100_000)
        found.append(files_identity([tmp_path / "text.txt"]))
    assert found[0] != found[1]


# -- digests that are remembered -----------------------------------------------------------------------------
def test_3_2_a_large_file_is_hashed_once(tmp_path, monkeypatch):
    """Also by several processes; a file of the same size and mtime that was written since is hashed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(digests, "LARGE", 1)
    monkeypatch.setattr(digests, "SETTLED", -1.0)
    path, opened = tmp_path / "weights", []
    path.write_bytes(b"some")
    monkeypatch.setattr(digests, "open", lambda *given: opened.append(1) or open(*given), raising=False)
    first = digests.file_digest(path)
    digests._known.clear()  # as in another process
    assert digests.file_digest(path) == first and len(opened) == 1
    before = path.stat().st_mtime_ns
    path.write_bytes(b"same")
    os.utime(path, ns=(before, before))
    assert digests.file_digest(path) != first and len(opened) == 2


@pytest.mark.parametrize("harm", ["", "{", "[1]", '{"sha256": "x"}', '{"sha256": 3, "signature": null}'])
def test_3_2_a_damaged_note_costs_hashing_again(tmp_path, monkeypatch, harm):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(digests, "LARGE", 1)
    (tmp_path / "weights").write_bytes(b"some")
    note = digests._note(str(tmp_path / "weights"))
    note.parent.mkdir(parents=True)
    note.write_text(harm)
    assert digests.file_digest(tmp_path / "weights") == digests.hashlib.sha256(b"some").hexdigest()


def test_3_2_a_file_that_just_changed_is_not_remembered(tmp_path):
    """A second write within the clock's resolution would go unnoticed."""
    path = tmp_path / "weights"
    path.write_bytes(b"some")
    digests.file_digest(path)
    assert str(path) not in digests._known
