"""Data, answers and results of evaluations are cached by content, never by path."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from surgery.calibration.data import document_stream
from surgery.checkpoint.source import open_converted_checkpoint
from surgery.cli.main import main
from surgery.core import digests
from surgery.core.errors import SurgeryError
from surgery.eval import offline_data as mirror
from surgery.eval import run as frame
from surgery.eval import task_names as names
from surgery.eval.model import open_model
from surgery.eval.results.data_read import describe_data, is_unchanged, record_reads
from surgery.eval.results.store import ResultStore
from surgery.eval.run import evaluate
from surgery.eval.suite import EvalOptions
from surgery.publish.hub.files import strip_local_paths
from surgery.training.data.documents import files_identity
from surgery.training.data.recipe import SourceConfig
from surgery.training.data.sources import open_data_source

ROOT = Path(__file__).resolve().parents[2]
TINY, MIRROR = ROOT / "recipes" / "tiny" / "checkpoint", ROOT / "eval" / "mirror"
FILES = "\n".join(f"  - {{split: {split}, path: {split}.jsonl}}" for split in ("train", "validation"))
HEADER = f"---\nconfigs:\n- config_name: default\n  data_files:\n{FILES}\n---\n"
LONG_AGO = 1_000_000_000


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """One Arrow cache for all that a test reads."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def write_rows(path: Path, rows: list[dict]) -> Path:
    """JSON lines whose mtime says nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


def questions(root: Path, label: int) -> Path:
    """A mirror of baber/piqa in which every answer is `label`: same header, sizes and mtimes for each."""
    rows = [{"goal": f"find lamp {i}", "sol1": "look", "sol2": "sleep", "label": label} for i in range(4)]
    for split in ("train", "validation"):
        write_rows(root / f"baber/piqa/{split}.jsonl", rows)
    (root / "baber/piqa/README.md").write_text(HEADER)
    os.utime(root / "baber/piqa/README.md", (LONG_AGO, LONG_AGO))
    return root


# -- 3.1: the data --------------------------------------------------------------------------------------
def test_3_1_mirrors_with_equal_headers_are_told_apart(tmp_path):
    """`datasets` alone returns the first mirror's rows for all of them."""
    for number in range(3):
        place = questions(tmp_path / str(number), number)
        assert set(mirror.load_rows(place, "piqa", "baber/piqa", None, "validation")["label"]) == {number}
    questions(tmp_path / "0", 7)  # in place, with the mtime of before
    assert set(mirror.load_rows(tmp_path / "0", "piqa", "baber/piqa", None, "validation")["label"]) == {7}


def test_3_1_tasks_of_lm_eval_read_the_mirror_that_was_named(tmp_path):
    for number in range(2):
        asked = EvalOptions(data_root=questions(tmp_path / str(number), number))
        (task,) = names.load_tasks(["piqa"], asked)["tasks"].values()
        assert [doc["label"] for doc in task.eval_docs] == [number] * 4
    assert Path.cwd() != tmp_path


def test_3_1_a_mirror_that_changes_while_it_is_read_is_refused(tmp_path, cache):
    place = questions(tmp_path / "mirror", 0)
    with pytest.raises(SurgeryError, match="changed while it was read"), mirror.use_mirror(place, ["baber/piqa"]):
        questions(place, 1)
    assert mirror.load_rows(place, "piqa", "baber/piqa", None, "validation")["label"][0] == 1


def test_3_1_training_reads_the_files_as_they_are(tmp_path):
    """Also where a file was replaced by one with its path, size and mtime."""
    said, identities = [], set()
    for text in ("one", "two"):
        path = write_rows(tmp_path / "data.jsonl", [{"text": text}])
        reader = open_data_source(SourceConfig(path=str(path)), 0, "training", 0.0, False)
        said.append(reader.take().content)
        identities.add(reader.identity())
    assert said == ["one", "two"] and len(identities) == 2


def test_3_1_streamed_rows_have_the_columns_of_their_file(tmp_path):
    """`datasets` keeps columns by path and mtime, and casts the rows of a changed file to them."""
    path = write_rows(tmp_path / "data.jsonl", [{"text": "one"}])
    open_data_source(SourceConfig(path=str(path)), 0, "training", 0.0, False)
    write_rows(path, [{"said": "two"}])
    assert list(document_stream(str(path))) == ["two"]
    streamed = open_data_source(SourceConfig(path=str(path), streaming=True, text="said"), 0, "training", 0.0, False)
    assert streamed.take().content == "two"


def test_3_1_text_that_differs_in_its_middle_is_another_text(tmp_path):
    """What resuming and a teacher cache compare."""
    found = []
    for word in ("red", "tin"):
        (tmp_path / "text.txt").write_text("a" * 100_000 + word + "b" * 100_000)
        found.append(files_identity([tmp_path / "text.txt"]))
    assert found[0] != found[1]


def test_3_1_what_is_no_file_is_not_hashed(tmp_path):
    """A link to its own folder, a pipe that nobody writes to, a link that leads nowhere, a hidden file."""
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "rows.jsonl").write_text("{}")
    assert [name for name, _ in digests.files_in(tmp_path)] == ["inner/rows.jsonl"]


# -- digests that are remembered -----------------------------------------------------------------------------
def test_3_2_a_large_file_is_hashed_once(tmp_path, monkeypatch):
    """Also by several processes; a file of the same size and mtime that was written since is hashed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(digests, "LARGE", 1)
    monkeypatch.setattr(digests, "SETTLED", -1.0)
    path, opened = tmp_path / "weights", []
    path.write_bytes(b"some")
    read = digests._signature
    monkeypatch.setattr(digests, "_signature", lambda place: opened.append(1) or read(place))
    first = digests.file_digest(path)
    digests._known.clear()  # as in another process
    assert digests.file_digest(path) == first and len(opened) == 3, "looked at, hashed, looked at; looked at"
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # until the file system's clock has gone on
        path.write_bytes(b"same")
        os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert digests.file_digest(path) != first and len(opened) == 5


@pytest.mark.parametrize("harm", ["", "{", "[1]", '{"sha256": "x"}', '{"sha256": 3, "signature": null}'])
def test_3_2_a_damaged_note_costs_hashing_again(tmp_path, monkeypatch, harm):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(digests, "LARGE", 1)
    (tmp_path / "weights").write_bytes(b"some")
    note = digests._cache_file(str(tmp_path / "weights"))
    note.parent.mkdir(parents=True)
    note.write_text(harm)
    assert digests.file_digest(tmp_path / "weights") == digests.hashlib.sha256(b"some").hexdigest()


def test_3_2_a_file_that_just_changed_is_not_remembered(tmp_path, monkeypatch):
    """A second write within the clock's resolution would go unnoticed."""
    path = tmp_path / "weights"
    path.write_bytes(b"some")
    changed = max(path.stat().st_mtime, path.stat().st_ctime)
    for seconds, remembered in ((1.5, False), (2.5, True)):
        monkeypatch.setattr(digests, "time", SimpleNamespace(time=lambda seconds=seconds: changed + seconds))
        digests.file_digest(path)
        assert (os.path.realpath(path) in digests._known) == remembered


# -- 3.2: what is kept ---------------------------------------------------------------------------------------
def accuracy(place: Path, out: Path, answers: Path | None = None) -> float:
    options = EvalOptions(data_root=place, tasks=("piqa",), use_cache=answers)
    return evaluate(str(TINY), ["zeroshot"], options, out=out).row("piqa", "acc").values["converted"]


def test_3_2_changed_labels_are_scored_again(tmp_path, monkeypatch):
    """Neither the kept result nor the kept answers bring the old score back, and a mirror elsewhere is the same
    data.
    """
    place, out, answers = tmp_path / "mirror", tmp_path / "out", tmp_path / "answers"
    first = accuracy(questions(place, 0), out, answers)
    assert first in (0, 1)
    assert accuracy(questions(place, 1), out, answers) == 1 - first
    shutil.copytree(place, tmp_path / "moved")
    monkeypatch.setattr(frame, "load_eval_model", lambda *given: pytest.fail("measured again"))
    assert accuracy(tmp_path / "moved", out) == 1 - first


def perplexity(model: Path, out: Path, **more) -> float:
    options = EvalOptions(text=str(TINY / "heldout.txt"), tokens=256, length=64, **more)
    return evaluate(str(model), ["ppl"], options, out=out).row("ppl").values["converted"]


@pytest.fixture
def model(tmp_path) -> Path:
    shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("*.txt", "*.md"))
    return tmp_path / "model"


def test_3_2_weights_changed_in_place_are_measured_again(model, tmp_path):
    """Bytes amid a tensor, which a sample of its ends does not see; size and mtime are those of before."""
    first = perplexity(model, tmp_path / "out")
    sampled = open_converted_checkpoint(str(model)).fingerprint()
    (info,) = [
        t
        for name, t in open_converted_checkpoint(str(model)).tensors.items()
        if name.endswith("layers.0.mlp.up_proj.weight")
    ]
    stat = info.file.stat()
    with open(info.file, "r+b") as file:
        file.seek((info.start + info.stop) // 2)
        file.write(bytes(4096))
    os.utime(info.file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert open_converted_checkpoint(str(model)).fingerprint() == sampled, (
        "the place was not one that only a whole digest sees"
    )
    assert perplexity(model, tmp_path / "out") != first


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
def test_3_2_other_files_of_the_model_count_too(model, name):
    before = open_model("base", str(model)).fingerprint
    with open(model / name, "a") as file:
        file.write("\n")
    assert open_model("base", str(model)).fingerprint != before
    (model / "surgery_report.json").write_text("{}")
    after = open_model("base", str(model)).fingerprint
    (model / "surgery_report.json").write_text('{"about": "the conversion"}')
    assert open_model("base", str(model)).fingerprint == after


def test_3_2_sampled_answers_belong_to_their_seed():
    """Greedy ones do not."""
    from surgery.eval.lm_eval.adapter import BatchedLM

    lm = BatchedLM()
    lm.options = EvalOptions(seed=3)
    assert lm._sampling_key({"do_sample": True}) == lm._sampling_key({"temperature": 0.7}) == ["seed", 3]
    assert lm._sampling_key({"do_sample": False, "temperature": 0.0}) == []


def test_3_2_provenance_is_in_results_json(model, tmp_path):
    """Versions, model, data, device, date in UTC, and the command line without tokens."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text((TINY / "heldout.txt").read_text()[:4000])
    secret = "hf_" + "a1B2" * 9
    words = [
        "eval",
        str(model),
        "-s",
        "ppl",
        "--text",
        str(text),
        "--tokens",
        "128",
        "--length",
        "32",
        "--out",
        str(out),
    ]
    with pytest.raises(SystemExit) as left:
        main([*words, "--metadata", json.dumps({"key": secret})])
    assert not left.value.code
    said = json.loads((out / "results.json").read_text())
    run, kept = said["provenance"], said["suites"]["ppl"]["converted"]["provenance"]
    assert {"python", "surgery", "torch", "transformers", "datasets", "lm_eval"} <= set(run["versions"])
    assert kept["versions"] == run["versions"] and run["device"].startswith("cpu") and run["date"].endswith("+00:00")
    assert run["command"][:3] == ["surgery", "eval", str(model)] and str(text) in run["command"]
    assert secret not in (out / "results.json").read_text() and "--tokens" in run["command"]
    assert kept["model"] == said["models"]["converted"]["fingerprint"]
    assert str(tmp_path) not in json.dumps(strip_local_paths(said)), "what `surgery push` sends"
    assert kept["data"] == {str(text): {"sha256": digests.hashlib.sha256(text.read_bytes()).hexdigest()}}


def test_3_2_a_fetched_mirror_s_commit_is_told(tmp_path):
    place, commit = questions(tmp_path, 0), "0123456789" * 4
    readme = place / "baber/piqa/README.md"
    readme.write_text(HEADER + f"\nFetched by `surgery fetch-eval-data` from baber/piqa at {commit}.\n")
    with record_reads() as reads:
        mirror.load_rows(place, "piqa", "baber/piqa", None, "validation")
    (told,) = describe_data(reads, place).values()
    assert told["commit"] == commit and len(told["sha256"]) == 64
    assert is_unchanged(reads, EvalOptions(data_root=place))
    assert not is_unchanged(reads, EvalOptions(data_root=tmp_path / "elsewhere"))


@pytest.mark.parametrize(
    "read", ["hub:org/name", "file:/", "file:/etc", "mirror:../outside", "mirror:/etc", "other:x", "x"]
)
def test_3_2_a_stranger_s_result_names_nothing_to_be_read(read, monkeypatch):
    monkeypatch.setattr("surgery.eval.results.data_read.content_digest", lambda place: pytest.fail(f"{place} was read"))
    assert not is_unchanged({read: "unknown"}, EvalOptions(text="text.txt"))


def test_3_2_a_result_that_does_not_say_what_it_read_is_measured_again(model, tmp_path):
    """As those written before this was recorded; their results.json is still read for pages and cards (test_page)."""
    out = tmp_path / "out"
    first = perplexity(model, out)
    (place,) = out.rglob("result.json")
    told, options = json.loads(place.read_text()), EvalOptions(text=str(TINY / "heldout.txt"))
    assert ResultStore(out).load(place.parent, told["key"], options) is not None
    del told["reads"], told["provenance"]
    place.write_text(json.dumps(told))
    assert ResultStore(out).load(place.parent, told["key"], options) is None
    assert perplexity(model, out) == first
