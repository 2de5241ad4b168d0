"""`surgery eval --verify`: what differs from a finished evaluation, and that a stranger's results choose nothing that
is read.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import surgery
from surgery.cli.main import app, main
from surgery.core import digests
from surgery.core.errors import SurgeryError
from surgery.eval import verify as verifying
from surgery.eval.run import evaluate
from surgery.eval.suite import SUITES, EvalOptions, Suite, SuiteResult, load_suites, register
from surgery.eval.suites.mqar import METRICS, Sample

ROOT = Path(__file__).resolve().parents[2]
TINY, MIRROR = ROOT / "recipes" / "tiny" / "checkpoint", ROOT / "eval" / "mirror"
DATA = "baber/paul_graham_essays"


def read_essays(eval_model, options):
    """Measure nothing, and read a data set of the mirror and the text."""
    from surgery.eval.offline_data import load_rows
    from surgery.eval.results.data_read import note_read

    load_rows(options.data_root, "niah", DATA, None, "train")
    note_read("file", options.text)
    return SuiteResult([Sample("essays", "0", dict.fromkeys(METRICS, 1.0))], dict(METRICS))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(results folder, model, text, mirror): a finished evaluation of the embedded checkpoint."""
    place = tmp_path_factory.mktemp("verify")
    load_suites()
    register(Suite("essays", "reads the essays", read_essays))
    model, mirror, text = place / "model", place / "mirror", place / "text.txt"
    shutil.copytree(TINY, model)
    shutil.copytree(MIRROR / DATA, mirror / DATA)
    text.write_text("Mia found a lamp.\n")
    options = EvalOptions(text=str(text), data_root=mirror, limit=3)
    evaluate(str(model), ["essays"], options, compare=str(TINY), out=place / "out")
    yield place / "out", model, text, mirror
    del SUITES["essays"]


@pytest.fixture
def same(finished, tmp_path):
    """Copies of the same files that a test may change, and verify with all of them."""
    out, model, text, mirror = finished
    for name, path in (("out", out), ("model", model), ("mirror", mirror)):
        shutil.copytree(path, tmp_path / name)
    shutil.copy(text, tmp_path / "text.txt")

    def verify(**given):
        asked = {"model": str(tmp_path / "model"), "compare": str(TINY), "text": str(text)}
        return verifying.verify(tmp_path / "out", **{**asked, "data_root": tmp_path / "mirror", **given})

    return tmp_path, verify


def exit_code(words: list[str]) -> int:
    """Return the exit code of a command line."""
    try:
        main(words)
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def changed(done) -> list[str]:
    return [check.thing for check in done.checks if check.status == "different"]


def rewrite(folder: Path, change) -> None:
    path = folder / "out" / "results.json"
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))


def test_nothing_differs(same):
    done = same[1]()
    assert done.exit_code == 0 and {check.status for check in done.checks} == {"same"}, done.lines()
    things = " ".join(check.thing for check in done.checks)
    for word in ("package torch", "package lm_eval", "model (base)", "model (converted)", DATA, "text", "suite essays"):
        assert word in things
    assert done.lines()[-1].endswith("same, 0 different, 0 cannot be checked")
    assert "values themselves are not checked" in done.lines()[-2]
    assert "not given here, so taken as recorded: limit" in " ".join(done.lines())


def test_data_that_is_named_but_not_among_the_reads_cannot_be_checked(same):
    place, verify = same
    for role in ("converted", "base"):
        rewrite(place, lambda told, role=role: told["suites"]["essays"][role].update(reads=[]))
    done = verify()
    unknown = [check for check in done.checks if check.status == "cannot be checked"]
    assert done.exit_code == 1 and any("do not say how it was read" in check.why for check in unknown)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
def test_every_file_of_a_model_counts(same, name):
    place, verify = same
    path = place / "model" / name
    if name == "model.safetensors":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        path.write_text((path.read_text() if path.exists() else "{}") + "\n")
    done = verify()
    (label,) = changed(done)
    assert label.startswith("model (converted)") and done.exit_code == 1
    check = next(check for check in done.checks if check.status == "different")
    assert check.was != check.now and len(check.was) == len(check.now) == 64
    assert f"was {check.was[:12]}, is {check.now[:12]}" in check.line()


def test_data_text_versions_suites_and_options_count(same, monkeypatch):
    place, verify = same
    rows = next((place / "mirror" / DATA).rglob("*.jsonl"))
    rows.write_text(rows.read_text() + json.dumps({"text": "More."}) + "\n")
    (place / "other.txt").write_text("Ben found a lamp.\n")
    monkeypatch.setitem(SUITES, "essays", Suite("essays", "", read_essays, version=2))
    monkeypatch.setattr(verifying, "package_versions", lambda: {"python": "3.0", "torch": "0.1"})
    done = verify(text=str(place / "other.txt"), options={"limit": 4, "seed": 0})
    found = changed(done)
    assert {f"data {DATA}", f"text {place / 'other.txt'}", "suite essays", "option limit"} <= set(found)
    assert {"package torch", "package lm_eval"} <= set(found)  # another version, and none
    lines = done.lines()
    assert (
        "option limit: different: was 3, is 4" in lines
        and "suite essays: different: was version 1, is version 2" in lines
    )
    assert any(line.startswith("package lm_eval: different: was") and line.endswith("is absent") for line in lines)


def test_another_default_of_an_option_is_a_difference(same):
    rewrite(same[0], lambda told: told["all_options"].update(tokens=99))
    assert changed(same[1]()) == ["option tokens"]


def test_the_commit_of_a_mirrored_data_set_is_compared(same):
    place, verify = same
    commits = "0" * 40, "1" * 40
    line = "\nFetched by `surgery fetch-eval-data` from x at {}.\n"
    readme = place / "mirror" / DATA / "README.md"
    plain = readme.read_text()
    readme.write_text(plain + line.format(commits[1]))

    def recorded(told):
        for one in told["suites"]["essays"].values():
            one["provenance"]["data"][DATA]["commit"] = commits[0]

    rewrite(place, recorded)
    assert changed(verify()) == [f"data {DATA}", f"commit of {DATA}"]


def test_what_is_not_named_is_not_read(same, monkeypatch):
    """Without arguments no file but results.json is opened: not the model, text or mirror that the results name."""
    place, _ = same

    def never(*_):
        raise AssertionError("a file that the results name was read")

    for target in ("hash_file", "file_digest", "files_digest", "content_digest"):
        monkeypatch.setattr(digests, target, never)
    monkeypatch.setattr(verifying, "content_digest", never)
    monkeypatch.setattr(verifying, "open_model", never)
    done = verifying.verify(place / "out")
    unchecked = {check.thing for check in done.checks if check.status == "cannot be checked"}
    assert unchecked == {"model (converted)", "model (base)", f"data {DATA}", "text"} and done.exit_code == 1
    assert any("give MODEL; it was recorded as" in line for line in done.lines())


def add_read(folder: Path, read: str) -> None:
    kind, _, name = read.partition(":")
    entry = {"kind": kind, "name": name, "digest": "0" * 64}
    rewrite(folder, lambda told: told["suites"]["essays"]["base"]["reads"].append(entry))


@pytest.mark.parametrize(
    "read",
    ["mirror:../../etc", "mirror:/etc/passwd", "mirror:a/../b", "hub:../x", "hub:a/b/c", "link:x", "mirror:.hidden"],
)
def test_paths_in_results_are_refused(same, read):
    place, verify = same
    add_read(place, read)
    with pytest.raises(SurgeryError, match="damaged"):
        verify()


def test_a_file_that_is_not_the_text_is_not_read(same):
    place, verify = same
    add_read(place, "file:/etc/passwd")
    lines = verify().lines()
    assert "text /etc/passwd: cannot be checked: it is not the text that the options name" in lines


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.pop("models"),
        lambda told: told["models"].update(base={"name": "x", "fingerprint": "y"}),
        lambda told: told["models"].update(base={"name": "x" * 5000, "fingerprint": "0" * 64}),
        lambda told: told["provenance"].update(versions={str(i): "1" for i in range(200)}),
        lambda told: told["suites"].update({str(i): {} for i in range(1001)}),
        lambda told: told["suites"]["essays"].update(converted=[]),
        lambda told: told.update(all_options=3),
        lambda told: told["suites"]["essays"]["base"].update(
            reads=[{"kind": "hub", "name": f"a/b{i}", "digest": "0"} for i in range(101)]
        ),
    ],
)
def test_damaged_results_are_refused(same, change, capsys):
    place, _ = same
    rewrite(place, change)
    assert exit_code(["eval", "--verify", str(place / "out")]) == 2
    assert "damaged" in capsys.readouterr().err


def test_results_that_are_no_json_a_link_too_large_or_absent(same, capsys, monkeypatch):
    place, verify = same
    path = place / "out" / "results.json"
    path.write_text("{" * 3000)
    assert exit_code(["eval", "--verify", str(place / "out")]) == 2
    path.rename(place / "elsewhere.json")
    path.symlink_to(place / "elsewhere.json")
    with pytest.raises(SurgeryError, match="not a regular file"):
        verify()
    path.unlink()
    with pytest.raises(SurgeryError, match="does not exist"):
        verify()
    shutil.copy(place / "elsewhere.json", path)
    monkeypatch.setitem(verifying.check_file.__globals__["MAX_BYTES"], "results.json", 100)
    with pytest.raises(SurgeryError, match="must have at most 100 bytes"):
        verify()


def test_control_characters_and_markup_do_not_reach_the_terminal(same):
    place, _ = same
    rewrite(place, lambda told: told["models"]["base"].update(name="\x1b[31m[red]x[/red]\nmodel (base): same"))
    shown = CliRunner().invoke(app, ["eval", "--verify", str(place / "out")]).stdout
    assert "\x1b" not in shown and "\nmodel (base): same" not in shown and "[red]x[/red]" in shown


def test_results_without_what_is_recorded_today(same):
    """Those of an earlier version: models and versions are compared, the rest is reported as not recorded."""

    def older(told):
        del told["all_options"]
        for one in told["suites"]["essays"].values():
            del one["reads"], one["provenance"]["suite_version"]

    rewrite(same[0], older)
    done = same[1]()
    found = {check.thing: check.status for check in done.checks}
    assert found["options"] == found["suite essays"] == "cannot be checked" and done.exit_code == 1
    assert found["model (base) " + str(TINY)] == "same"


def test_the_command_and_the_function(same, capsys):
    place, _ = same
    given = [str(place / "model"), "--compare", str(TINY), "--data-root", str(place / "mirror")]
    told = json.loads((place / "out" / "results.json").read_text())["options"]
    words = [
        "eval",
        *given,
        "--text",
        told["text"],
        "--suite",
        "essays",
        "--limit",
        "3",
        "--verify",
        str(place / "out"),
    ]
    assert exit_code(words) == 0
    assert "0 different, 0 cannot be checked" in capsys.readouterr().out
    assert exit_code([*words, "--seed", "4", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["same"] and [c["thing"] for c in found["checks"] if c["status"] != "same"] == ["option seed"]
    done = surgery.verify(
        place / "out", place / "model", compare=TINY, text=told["text"], data_root=place / "mirror", limit=3
    )
    assert done["same"] and "options (" in repr(done)
    with pytest.raises(SurgeryError, match="did you mean 'limit'"):
        surgery.verify(place / "out", limt=3)
    assert exit_code([*words, "--out", str(place / "new")]) == 2
    assert "--verify measures nothing, so it takes no --out" in capsys.readouterr().err


def test_unset_new_options_leave_the_digest_as_it_was():
    """Results that were measured before these options existed stay valid."""
    import hashlib

    left_out = {"batch_size", "use_cache", "data_root", "prompts", "fill", "pairs", "data"}
    left_out |= {"greedy_prompts", "greedy_tokens", "tolerance"}
    data = EvalOptions(limit=2).model_dump(mode="json", exclude=left_out) | {"mirror": False}
    plain = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    assert EvalOptions(limit=2).digest() == plain
    for one in (
        {"prompts": "jrt"},
        {"fill": "ruler"},
        {"pairs": (4,)},
        {"pairs": "based"},
        {"tolerance": 0.1},
        {"data": {"piqa": "x"}},
    ):
        assert EvalOptions(limit=2, **one).digest() != plain
