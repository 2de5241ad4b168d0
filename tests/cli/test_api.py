"""The commands as functions: they return what --json prints, and notebooks display them as tables."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.small_training import EMBEDDED
from helpers.small_training import TINY_CHECKPOINT as TINY
from rich.markup import escape

import surgery
from surgery import api
from surgery.cli.main import main
from surgery.core.errors import SurgeryError

EVIL = "<b>[bold]<script>alert(1)</script>"
MIXED = {"structure": "btt", "blocks": [2, 2], "keep": 0.5}


def run_json(capsys, *words: object) -> dict:
    """What `surgery .. --json` says."""
    try:
        main([*map(str, words), "--json"])
    except SystemExit as left:
        assert not left.code
    return json.loads(capsys.readouterr().out)


def test_plan_is_the_command(checkpoints, capsys):
    source = checkpoints("llama")
    told = api.plan(source, "btt-half", keep=0.75, overrides={"blocks": [2, 2]})
    assert json.loads(json.dumps(told)) == run_json(
        capsys, "plan", source, "-r", "btt-half", "--set", "keep=0.75", "--set", "blocks=[2, 2]"
    )


class Tags(HTMLParser):
    """Opened and closed in turn; what a notebook gets has no colours of its own, for it may be dark."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append(tag)
        assert "color" not in dict(attrs).get("style", "")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_table_is_shown(checkpoints):
    told = api.plan(checkpoints("llama"), MIXED)
    assert "attention.query" in repr(told) and "kept" in repr(told)
    shown = api.CommandResult(told, lambda: [*told._parts(), escape(EVIL)])._repr_html_()
    tags = Tags()
    tags.feed(shown)
    assert not tags.open and {"table", "caption", "thead", "th", "td"} <= set(tags.seen)
    assert "attention.query" in shown and "&lt;b&gt;[bold]" in shown and "script" not in tags.seen


def test_a_chain(checkpoints, tmp_path):
    """Converted, opened, measured, packed for the Hub, made ordinary again: every function once."""
    source, out = checkpoints("llama"), tmp_path / "OUT"
    report = api.convert(source, MIXED, out, seed=3)
    assert report["seed"] == 3 and json.loads((out / "surgery_report.json").read_text()) == json.loads(
        json.dumps(report)
    )
    assert api.inspect(out)["checks"]["as_reported"]
    parcel = api.push(out, "me/small", licence="mit", dry_run=True)
    assert parcel["dry_run"] and "license: mit" in parcel["card"] and "model.safetensors" in repr(parcel)
    assert "license: mit" in api.push(out, "me/small", license="mit", dry_run=True)["card"]  # `licence` until 0.1
    assert parcel["license"] == parcel["licence"] == {"id": "mit", "origin": "given with --license"}
    assert "multiplied out" in repr(api.densify(out, tmp_path / "DENSE"))


def test_a_plan_without_calibration_refuses_what_the_conversion_would_refuse(checkpoints, capsys):
    with pytest.raises(SurgeryError, match=r"choose_by: measured needs calibration text.* Leave out calibrated=False"):
        surgery.plan(checkpoints("llama"), "hybrid-25", calibrated=False)
    with pytest.raises(SystemExit):
        main(["plan", str(checkpoints("llama")), "--recipe", "hybrid-25", "--data-free"])
    assert "Leave out --data-free, or set attention.hybrid.choose_by to every" in " ".join(
        capsys.readouterr().err.split()
    )


def test_the_whole_model_counts_the_parameters_of_mixers(checkpoints):
    planned = surgery.plan(checkpoints("llama"), "log-linear")
    mixers = sum(row["params"] for row in planned["mixers"])
    before = planned["totals"]["model_before"]
    assert mixers and f"whole model: {before:,} -> {before + mixers:,} parameters" in repr(planned)
    assert "keys and values in float32 (the model's dtype) and recurrent states in float32" in " ".join(
        repr(planned).split()
    )


def test_progress_is_plain_text(capsys):
    """Brackets are no markup, only the word "warning" is emphasized."""
    from surgery.core.progress import RichProgress

    RichProgress().say(f"warning: {EVIL}, for example calibration=[text]")
    assert capsys.readouterr().err == f"warning: {EVIL}, for example calibration=[text]\n"


def test_load_and_evaluate():
    tiny = Path(api.__file__).parents[1] / "recipes" / "tiny" / "checkpoint"
    model, tokenizer = api.load(tiny, dtype="float32")
    assert type(model).__name__ == "LlamaForCausalLM" and tokenizer("Story").input_ids
    told = api.evaluate(tiny, "ppl", text=str(tiny / "heldout.txt"), tokens=512, length=256)
    assert told["rows"] and "ppl" in repr(told)


def test_a_pinned_checkpoint_is_loaded(monkeypatch, tmp_path):
    import transformers

    from surgery.checkpoint import source

    asked = []
    loaded = torch.nn.Identity(), {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    loaded[0].config = None
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        monkeypatch.setattr(
            auto, "from_pretrained", lambda name, **how: asked.append((name, how["revision"])) or loaded
        )

    def open_stub(name, revision):
        pinned = revision or source.split_revision(name)[1]
        return SimpleNamespace(name=name, folder=tmp_path, config={}, revision=pinned)

    monkeypatch.setattr(source, "open_converted_checkpoint", open_stub)
    (tmp_path / "me@home").mkdir()
    for name in ("me/small@v1", "me/small", tmp_path / "me@home"):
        api.load(name)
    assert asked[::2] == asked[1::2] == [("me/small", "v1"), ("me/small", "main"), (str(tmp_path / "me@home"), "main")]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda source: api.plan(source, "btt-hlaf"), "did you mean 'btt-half'"),
        (lambda source: api.plan(source, "btt-half", keeep=0.5), "keeep"),
        (lambda source: api.plan(source, {"structure": "btt", "keep": 2}), "keep"),
        (lambda source: api.evaluate(source, tokns=5), "no option 'tokns'; did you mean 'tokens'"),
    ],
)
def test_errors_are_for_people(checkpoints, call, said):
    with pytest.raises(SurgeryError, match=said):
        call(checkpoints("llama"))


def test_every_command_is_a_documented_function():
    """Every argument stands in the docstring, and every command of the terminal but the demo and the server has its
    function.
    """
    from typer.main import get_command

    from surgery.cli.main import app

    commands = {name.replace("-", "_") for name in get_command(app).commands} - {"demo", "serve"}
    assert {"evaluate" if name == "eval" else name for name in commands} == set(surgery.COMMANDS) - {
        "apply",
        "drafter",
        "fuse_projections",
        "load",
        "parameter_groups",
        "verify",  # `surgery eval --verify`
    }
    for name in surgery.COMMANDS:
        function = getattr(surgery, name)
        parameters = inspect.signature(function).parameters
        words = set(re.findall(r"\w+", function.__doc__.partition("Args:")[2]))
        assert not parameters.keys() - words, name
        assert inspect.signature(function).return_annotation not in (inspect.Signature.empty, "Any"), name


def test_results_can_be_pickled(checkpoints):
    told = api.plan(checkpoints("llama"), MIXED)
    assert pickle.loads(pickle.dumps(told)) == told and copy.deepcopy(told) == told


def test_the_package_has_them_under_the_commands_names():
    """Also after a module of ours was imported that might take such a name."""
    for module in ("conversion", "planning", "publish", "checkpoint"):
        importlib.import_module(f"surgery.{module}")
    assert surgery.plan is api.plan and surgery.convert is api.convert and surgery.load is api.load
    assert sorted(surgery.COMMANDS) == dir(surgery)
    importlib.import_module("surgery.recipes.tiny.card")  # below the package of the same name as a command

    assert surgery.recipes is api.recipes and "btt-half" in surgery.recipes()
    with pytest.raises(AttributeError, match="no attribute 'pln'"):
        surgery.pln  # noqa: B018


def test_layer_ranges_are_text():
    whole = surgery.plan(EMBEDDED, "low-rank-half")["totals"]["modules"]
    for given in ({"layers": "1:-1"}, {"overrides": {"layers": "1:-1"}}):
        assert 0 < surgery.plan(EMBEDDED, "low-rank-half", **given)["totals"]["modules"] < whole


def test_no_number_of_a_table_is_cut():
    """A pipe has 80 columns: long names wrap."""
    command = [sys.executable, "-m", "surgery", "plan", str(TINY), "-r", "log-linear"]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    row = next(line for line in done.stdout.splitlines() if "->" in line)
    assert len(re.findall(r"[\d.]+ [kMG]?B -> [\d.]+ [kMG]?B(?=\s|$)", row)) == 3, done.stdout
