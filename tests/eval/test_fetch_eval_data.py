"""A mirror of data sets is written completely or not at all, and suites read it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from surgery.cli.main import main
from surgery.core.digests import content_digest
from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress
from surgery.eval import offline_data as mirror
from surgery.eval.document_suites import INFINITEBENCH
from surgery.eval.fetch import SUITE_SOURCES, DatasetSource, dataset_sources, fetch, read_commits
from surgery.eval.results.data_read import mirror_commit

MIRROR = Path(__file__).resolve().parents[2] / "eval" / "mirror"


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the Hub that holds what the small mirror holds; `asked` says what was loaded, `broken` what
    fails.
    """
    import datasets
    import huggingface_hub

    place = SimpleNamespace(asked=[], broken=set(), scripts=set(), newest="commit of {}")
    real = datasets.load_dataset

    def load_dataset(
        path, config=None, split=None, revision=None, cache_dir=None, trust_remote_code=False, features=None
    ):
        if not Path(path).is_absolute():
            assert not Path(path).exists(), "datasets would read that folder, not the Hub"
            place.asked.append((path, config, split, revision))
            if (path, split) in place.broken:
                raise ConnectionError("the line was cut\nand more")
            if path in place.scripts:
                raise RuntimeError(f"Dataset scripts are no longer supported, but found {path.split('/')[1]}.py")
            path = str(MIRROR / path)
        return real(path, config, split=split, cache_dir=cache_dir, features=features)

    def names(path, config=None, revision=None, trust_remote_code=False):
        header = yaml.safe_load((MIRROR / path / "README.md").read_text().split("---\n")[1])["configs"]
        (one,) = [c for c in header if c["config_name"] == (config or "default")]
        return [file["split"] for file in one["data_files"]]

    api = SimpleNamespace(dataset_info=lambda path: SimpleNamespace(sha=place.newest.format(path)))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_split_names", names)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    return place


def test_a_mirror_is_what_suites_read(hub, tmp_path):
    done = fetch(tmp_path, dataset_sources(["ruler"]), Progress())
    assert done["fetched"] == ["baber/paul_graham_essays", "rajpurkar/squad_v2", "hotpotqa/hotpot_qa"]
    assert hub.asked[-1] == ("hotpotqa/hotpot_qa", "distractor", "validation", "commit of hotpotqa/hotpot_qa")
    for path, config, split in (
        ("rajpurkar/squad_v2", None, "validation"),
        ("hotpotqa/hotpot_qa", "distractor", "validation"),
    ):
        rows = mirror.load_rows(tmp_path, "ruler", path, config, split)
        assert list(rows) == list(mirror.load_rows(MIRROR, "ruler", path, config, split))
    assert "commit of rajpurkar/squad_v2" in (tmp_path / "rajpurkar/squad_v2/README.md").read_text()


def test_what_is_there_is_kept_and_what_lacks_is_added(hub, tmp_path):
    fetch(tmp_path, dataset_sources(["longbench"], ["qasper"]), Progress())
    assert [config for _, config, _, _ in hub.asked] == ["qasper"]
    done = fetch(tmp_path, dataset_sources(["longbench"], ["qasper", "trec"]), Progress())
    assert [config for _, config, _, _ in hub.asked] == ["qasper", "trec"] and done["fetched"]
    for config in ("qasper", "trec"):
        assert len(mirror.load_rows(tmp_path, "longbench", "Xnhyacinth/LongBench", config, "test")) >= 1
    assert fetch(tmp_path, dataset_sources(["longbench"], ["trec"]), Progress()) == {
        "fetched": [], "kept": ["Xnhyacinth/LongBench"]
    }  # fmt: skip


def test_all_splits_where_none_is_named(hub, tmp_path):
    fetch(tmp_path, [DatasetSource("baber/piqa")], Progress())
    assert [split for _, _, split, _ in hub.asked] == ["train", "validation"]


def test_splits_that_lack_are_added(hub, tmp_path):
    """Of one data set suites and tasks of lm-eval read different ones."""
    first, other, every = (
        DatasetSource("baber/piqa", None, ("validation",)),
        DatasetSource("baber/piqa", None, ("train",)),
        DatasetSource("baber/piqa"),
    )
    fetch(tmp_path, [first], Progress())
    assert fetch(tmp_path, [first], Progress())["kept"] and fetch(tmp_path, [first, other], Progress())["fetched"]
    assert [split for _, _, split, _ in hub.asked] == ["validation", "train"]
    assert fetch(tmp_path, [first, every], Progress())["fetched"], "all splits: the Hub knows which those are"
    assert fetch(tmp_path, [every, first], Progress())["kept"] and len(hub.asked) == 2
    for split in ("train", "validation"):
        assert len(mirror.load_rows(tmp_path, "piqa", "baber/piqa", None, split)) >= 1


def test_3_1_a_folder_of_that_name_here_is_not_taken_for_the_hub(hub, tmp_path, monkeypatch):
    """`datasets` prefers a folder org/name in the working directory: a fetch from within a mirror would copy that
    one.
    """
    monkeypatch.chdir(MIRROR)
    fetch(tmp_path, [DatasetSource("baber/piqa", None, ("validation",))], Progress())
    monkeypatch.chdir(tmp_path)
    fetch(Path(), [DatasetSource("baber/piqa")], Progress())
    assert [split for _, _, split, _ in hub.asked] == ["validation", "train"]


def test_all_files_of_a_data_set_are_of_one_commit_and_a_mirror_can_be_made_again(hub, tmp_path):
    first, second = "a" * 40, "b" * 40
    hub.newest = first
    fetch(tmp_path / "one", dataset_sources(["longbench"], ["qasper"]), Progress())
    hub.newest = second  # the Hub moves on
    fetch(tmp_path / "one", [*dataset_sources(["longbench"], ["trec"]), DatasetSource("baber/piqa")], Progress())
    assert {(config, revision) for _, config, _, revision in hub.asked} == {
        ("qasper", first), ("trec", first), (None, second)
    }  # fmt: skip
    commits = tmp_path / "one" / "commits.json"
    assert json.loads(commits.read_text()) == {"Xnhyacinth/LongBench": first, "baber/piqa": second}
    assert mirror_commit(tmp_path / "one" / "Xnhyacinth/LongBench") == first
    hub.newest = "c" * 40
    pinned = read_commits(commits)
    fetch(
        tmp_path / "two", [*dataset_sources(["longbench"], ["trec"]), DatasetSource("baber/piqa")], Progress(), pinned
    )
    assert (tmp_path / "two" / "commits.json").read_bytes() == commits.read_bytes()
    assert content_digest(tmp_path / "two" / "baber/piqa") == content_digest(tmp_path / "one" / "baber/piqa")
    with pytest.raises(SurgeryError, match=f"piqa is of commit {second}, not {'c' * 40}. Remove that folder"):
        fetch(tmp_path / "two", [DatasetSource("baber/piqa")], Progress(), {"baber/piqa": "c" * 40})
    commits.write_text('{"baber/piqa": "main"}')
    with pytest.raises(SurgeryError, match="forty hexadecimal digits each"):
        read_commits(commits)


def test_data_sets_that_are_scripts_are_named_with_their_copy(hub, tmp_path):
    hub.scripts |= {"ybisk/piqa", "some/thing"}
    with pytest.raises(SurgeryError, match=r"ybisk/piqa is published as a loading script.* copy baber/piqa"):
        fetch(tmp_path, [DatasetSource("ybisk/piqa", None, ("validation",))], Progress())
    with pytest.raises(SurgeryError, match=r"some/thing is published as a loading script.*JSON lines"):
        fetch(tmp_path, [DatasetSource("some/thing", None, ("test",))], Progress())
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "commits.json"]


def test_columns_of_infinitebench_have_types(hub, tmp_path):
    fetch(tmp_path, [DatasetSource(INFINITEBENCH, None, ("math_find",))], Progress())
    (row, _) = mirror.load_rows(tmp_path, "infinitebench", INFINITEBENCH, None, "math_find")
    assert row["answer"] == ["345"] and row["options"] == []


def test_suites_of_documents_name_what_they_read():
    sources = dataset_sources(["babilong"], ["qa2", "qa7"])
    assert [(s.config, s.splits) for s in sources[:2]] == [("0k", ("qa2", "qa7")), ("1k", ("qa2",))] and len(
        sources
    ) == 9
    assert [s.config for s in dataset_sources(["longbench-e"], ["trec"])] == ["trec_e"]
    assert len(dataset_sources(["longbench2"])) == 20
    assert [s.config for s in dataset_sources(["longbench2"], ["code"])] == ["code_repo_qa"]


def test_a_line_that_is_cut_leaves_nothing_half(hub, tmp_path):
    hub.broken.add(("rajpurkar/squad_v2", "validation"))
    with pytest.raises(SurgeryError, match=r"squad_v2 could not be fetched \(ConnectionError: the line was cut\)"):
        fetch(tmp_path, dataset_sources(["ruler"]), Progress())
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_dir() and "." in path.name) == []
    assert (tmp_path / "baber/paul_graham_essays/README.md").is_file()
    assert not (tmp_path / "rajpurkar/squad_v2").exists()
    hub.broken.clear()
    done = fetch(tmp_path, dataset_sources(["ruler"]), Progress())
    assert done["kept"] == ["baber/paul_graham_essays"] and len(done["fetched"]) == 2


def test_the_command(hub, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main(["fetch-eval-data", str(tmp_path), "--suite", "niah,retrieval", "--json"])
    assert left.value.code == 0
    assert len(json.loads(capsys.readouterr().out)["fetched"]) == 9
    with pytest.raises(SystemExit) as left:
        main(["fetch-eval-data", str(tmp_path), "--suite", "niah"])
    assert left.value.code == 0 and "0 data sets downloaded, 1 already present" in capsys.readouterr().out


def test_the_small_mirror_has_all_that_ours_read():
    for suite in SUITE_SOURCES:
        for source in dataset_sources([suite]):
            place = MIRROR / source.path
            configs = yaml.safe_load((place / "README.md").read_text(encoding="utf-8").split("---\n")[1])["configs"]
            (one,) = [c for c in configs if c["config_name"] == (source.config or "default")]
            splits = {file["split"] for file in one["data_files"]}
            assert set(source.splits) <= splits
            assert all((place / file["path"]).is_file() for file in one["data_files"])


def test_zeroshot_s_data_sets_are_found_in_lm_eval_s_files():
    assert {(source.path, source.config) for source in dataset_sources(["zeroshot"])} == {
        ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"),
        ("EleutherAI/lambada_openai", None),
        ("baber/piqa", None),
        ("Rowan/hellaswag", None),
        ("allenai/winogrande", "winogrande_xl"),
        ("allenai/ai2_arc", "ARC-Easy"),
        ("allenai/ai2_arc", "ARC-Challenge"),
    }


def test_classes_of_lm_eval_name_their_data_sets_too():
    assert [source.path for source in dataset_sources(["swde"])] == ["hazyresearch/based-swde-v2"]


def test_a_path_that_is_none_is_refused(tmp_path):
    with pytest.raises(SurgeryError, match="org/name"):
        fetch(tmp_path, [DatasetSource("../outside")], Progress())
    assert not list(tmp_path.iterdir())
