"""`surgery demo`, with the default recipe and with a quick one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from surgery.cli.demo import FOLDER, NEEDLES, ROLES, _free_folder
from surgery.cli.main import app, main
from surgery.core.errors import SurgeryError

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
QUICK = "structure: low_rank\nkeep: 0.5\ntokens: 1024\nlength: 128\nallocate: uniform\ncurvature: none\nsweeps: 0\n"
# btt-half, the default, with enough tokens for a perplexity close to the original's.
QUICKER_DEFAULT = (
    "structure: btt\nblocks: [4, 4]\nkeep: 0.5\ntokens: 4096\nlength: 256\nallocate: uniform\ncurvature: none\n"
)


def dimensions(checkpoint: Path) -> set[int]:
    """Of the layers' projections: 2 where all are ordinary matrices."""
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        return {len(file.get_slice(n).get_shape()) for n in file.keys() if "_proj.weight" in n}  # noqa: SIM118


def few_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate on few tokens, in windows short enough for a standard error."""
    monkeypatch.setattr("surgery.cli.demo.TOKENS", 4096)
    monkeypatch.setattr("surgery.cli.demo.LENGTH", 256)
    for key, few in {"lengths": (128,), "depths": (0.5,), "samples": 8}.items():
        monkeypatch.setitem(NEEDLES, key, few)


@pytest.fixture(scope="module", params=["quick", pytest.param("as it is", marks=pytest.mark.slow)])
def run(request, tmp_path_factory):
    """(working directory, result, seconds of processor time) of `surgery demo --json`.

    quick: in this process, with a quicker recipe of the same structure, and on few tokens.
    """
    resource = pytest.importorskip("resource")
    place = tmp_path_factory.mktemp("demo")
    if request.param == "quick":
        (place / "quick.yaml").write_text(QUICKER_DEFAULT)
        said = io.StringIO()
        with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(said):
            few_measurements(monkeypatch)
            monkeypatch.chdir(place)
            app(["demo", "--json", "--recipe", "quick.yaml"], standalone_mode=False)
        return place, json.loads(said.getvalue()), None
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "surgery", "demo", "--json"], cwd=place, env=ENVIRONMENT, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return place, json.loads(done.stdout), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_what_it_leaves(run):
    place, result, _ = run
    assert result["folder"] == "surgery-demo" and (place / result["report"]).is_file()
    names = {path.name for path in (place / "surgery-demo").iterdir()}
    assert names == {*ROLES, "calibration.txt", "heldout.txt", "report.md", "report.html", "eval"}
    assert dimensions(place / "surgery-demo" / "converted") == {4}
    assert dimensions(place / "surgery-demo" / "densified") == {2}


def test_before_and_after(run):
    rows = {label.split(",")[0]: values for label, *values in run[1]["rows"]}
    parameters = [int(n.replace(",", "")) for n in rows["parameters"]]
    assert parameters[0] == parameters[2] and 0.5 < parameters[1] / parameters[0] < 0.6
    original, converted, densified = (
        [float(n) for n in value.split(" ± ")] for value in rows["perplexity ± standard error"]
    )
    assert original[0] < converted[0] < 1.4 * original[0] and abs(densified[0] - converted[0]) < 0.02
    assert 0 < original[1] < converted[1] < 0.2
    assert all(int(n.removesuffix("%")) > 90 for n in rows["needles found"])


def test_it_ends_with_prompts_the_verdict_and_the_page(run):
    from surgery.publish.tables import demo_ending

    place, result, _ = run
    assert len(result["generations"]) == 3 and all(all(each.values()) for each in result["generations"])
    page = (place / result["page"]).read_text()
    assert result["page"].endswith("report.html") and result["verdict"] in page
    assert all(each["prompt"] in page for each in result["generations"])
    lines = demo_ending(result)
    assert lines[-1] == f"[bold]{result['verdict']}[/]" and sum("prompt:" in line for line in lines) == 3
    assert "of the weights of the replaced linears, perplexity x 1." in result["verdict"]


def test_the_report_shows_the_table_and_the_commands(run):
    place, result, _ = run
    text = (place / result["report"]).read_text()
    assert all(command in text for command in result["commands"]) and len(result["commands"]) == 6
    assert all(value in text for row in result["rows"] for value in row)


@pytest.mark.slow  # it measures time, which is longer on a slow machine
def test_it_takes_less_than_two_minutes_of_two_cores(run):
    """Of their time, so that a busy machine does not matter."""
    assert run[2] < 200


def test_the_steps_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few_measurements(monkeypatch)
    monkeypatch.setattr("surgery.cli.demo.TOKENS", 512)  # two windows: no number is looked at
    monkeypatch.setitem(NEEDLES, "samples", 1)
    (tmp_path / "quick.yaml").write_text(QUICK)
    app(["demo", "--out", "here", "--recipe", "quick.yaml"], standalone_mode=False)
    said = capsys.readouterr().out
    steps = [
        "surgery plan here/original",
        "surgery convert here/original",
        "surgery inspect",
        "surgery eval",
        "surgery densify",
    ]
    places = [said.find(step) for step in [*steps, "before and after", "report: here/report.md"]]
    assert -1 not in places and places == sorted(places)
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--out", "here"])
    assert stop.value.code == 2 and "here exists; choose another --out" in capsys.readouterr().err


def test_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _free_folder(None) == FOLDER and _free_folder(tmp_path / "mine") == tmp_path / "mine"
    FOLDER.mkdir()
    Path("surgery-demo-2").mkdir()
    assert _free_folder(None) == Path("surgery-demo-3")
    with pytest.raises(SurgeryError, match="exists"):
        _free_folder(FOLDER)


def test_a_slip_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--recipe", "btt-haf"])
    assert stop.value.code == 2 and "did you mean 'btt-half'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
