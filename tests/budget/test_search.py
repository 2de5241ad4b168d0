"""Searches of a small trained checkpoint, end to end."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

import surgery.budget.search
from surgery.budget.choices import ATTENTION, Kind, default_kinds, find_choices, linear_kinds, shipped_mixer
from surgery.budget.damage import DamagePass
from surgery.budget.recipes import attention_of, ranges
from surgery.budget.search import SearchSettings, search
from surgery.budget.table import plan_key
from surgery.cli.main import main
from surgery.conversion.convert import convert
from surgery.conversion.quantize_checkpoint import quantize
from surgery.conversion.sources import FolderSource
from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress
from surgery.eval.results.models import compare_folders
from surgery.eval.run import evaluate
from surgery.eval.suite import EvalOptions
from surgery.planning.bits_recipe import read_bits
from surgery.planning.recipe import load_recipe
from surgery.publish.front import read_front
from surgery.publish.summary import inspect

LIMITS = {"bytes": "60%", "cache": "60%"}


def settings_of(text, **changes) -> SearchSettings:
    return SearchSettings(
        **{"calibration": text, "tokens": 2048, "length": 512, "device": "cpu", "points": 4, "at": 8192} | changes
    )


def test_a_search_writes_table_front_picture_and_recipes(searched):
    out, result = searched
    names = {path.name for path in out.iterdir()}
    assert names == {"table.json", "front.json", "front.png", *(p["recipe"] for p in result["points"] if p["recipe"])}
    assert Image.open(out / "front.png").size[0] > 300
    table, front = (json.loads((out / name).read_text()) for name in ("table.json", "front.json"))
    assert front == {key: value for key, value in result.items() if key != "out"}
    kinds = {row["choice"].partition(": ")[2] for row in table["rows"]}
    assert kinds == {kind.name for kind in default_kinds()} | {"removed"}
    assert all(row["damage"] >= 0 and row["costs"].keys() == table["original"].keys() for row in table["rows"])
    asked = result["points"][0]
    assert all(asked["costs"][name] <= limit for name, limit in result["limits"].items()) and not result["excess"]
    assert 0 <= asked["low"] <= asked["loss"] <= asked["high"] and asked["loss"] <= asked["measured"]
    plans = [point for point in [*result["points"], *result["rivals"].values()] if point["choices"]]
    assert len(table["plans"]) >= len(plans) > 3 and all(point["measured"] > 0 for point in plans)


def test_smaller_choices_do_more_damage(searched):
    """At a quarter of the parameters more is lost than at three quarters, of every structure."""
    rows = json.loads((searched[0] / "table.json").read_text())["rows"]
    damage = {row["choice"]: row["damage"] for row in rows}
    large = [name for name in damage if name.endswith("75%")]
    assert len(large) > 6 and all(damage[name] < damage[name.replace("75%", "25%")] for name in large)


@pytest.mark.parametrize("number", [1, 3])
def test_a_converted_recipe_has_the_predicted_costs(number, searched, source, tmp_path):
    """Parameters, bytes and cache to the byte."""
    out, result = searched
    point = next(p for p in result["points"] if p["recipe"] == f"recipe-{number}.yaml")
    recipe = load_recipe(str(out / point["recipe"]), ["tune=false"])
    report = convert(str(source), recipe, tmp_path / "OUT", device="cpu")
    front = read_front(report)
    assert front is not None
    assert (
        front == recipe.front
        and front.own.value == point["costs"]["bytes"]
        and len(front.points) == len(result["points"])
    )
    assert front.own.loss == pytest.approx(point["loss"], rel=1e-3) and front.limit == result["limits"]["bytes"]
    totals = report["totals"]
    assert (totals["params_before"], totals["bytes_before"]) == tuple(
        result["original"][n] for n in ("parameters", "bytes")
    )
    assert (totals["params_after"], totals["bytes_after"]) == tuple(point["costs"][n] for n in ("parameters", "bytes"))
    attention = inspect(str(tmp_path / "OUT"))["attention_totals"]
    after = attention["cache_bytes"]["8192"][1] if attention else result["original"]["cache"]
    assert after == point["costs"]["cache"]


def test_a_comparison_shows_the_front_with_the_converted_points(source, text, tmp_path):
    """From the recipes through the reports of the conversions and the results of the evaluations to the comparison."""
    settings = settings_of(text, only="mlp pruned", tokens=1024, length=128, points=3, check=False)
    result = search(str(source), tmp_path / "SEARCH", {"bytes": "70%"}, settings)
    recipes = [point["recipe"] for point in result["points"] if point["recipe"]][:2]
    for recipe in recipes:
        out = tmp_path / Path(recipe).stem
        changes = ["tune=false", "curvature=none"]
        convert(str(source), load_recipe(str(tmp_path / "SEARCH" / recipe), changes), out, device="cpu")
        options = EvalOptions(text=str(text), tokens=512, length=128, greedy_prompts=1, greedy_tokens=2)
        done = evaluate(
            str(out), ["ppl", "agreement"], options, compare=str(source), out=tmp_path / "RESULTS", device="cpu"
        )
        assert not done.broken
    (shared,) = compare_folders([tmp_path / "RESULTS"]).fronts
    assert shared.chosen.keys() == shared.measured.keys() == {Path(recipe).stem for recipe in recipes}
    assert shared.quantity == "KL" and all(value > 0 for value in shared.measured.values())
    costs = {Path(point["recipe"] or "").stem: point["costs"]["bytes"] for point in result["points"]}
    assert {shared.front.points[number - 1].value == costs[name] for name, number in shared.chosen.items()} == {True}


def test_dropped_attention_and_mlps(searched, source, text, tmp_path):
    """A search that may only drop parts drops attention, with its cache, and MLPs; its recipe has the predicted costs."""
    out = tmp_path / "SEARCH"
    shutil.copytree(searched[0], out)
    limits = {"cache": "70%", "parameters": "80%"}
    result = search(str(source), out, limits, settings_of(text, only="attention dropped,mlp dropped", points=0))
    asked = result["points"][0]
    assert asked["choices"].keys() == {"attention dropped", "mlp dropped"} and not result["excess"]
    recipe = load_recipe(str(out / asked["recipe"]), ["tune=false"])
    assert recipe.attention.mixer == "none" and all(rule.structure == "dropped" for rule in recipe.rules)
    report = convert(str(source), recipe, tmp_path / "OUT", device="cpu")
    costs = asked["costs"]
    totals = (report["totals"]["params_after"], report["totals"]["bytes_after"])
    assert totals == (costs["parameters"], costs["bytes"])
    told = inspect(str(tmp_path / "OUT"))
    assert told["attention_totals"]["cache_bytes"]["8192"][1] == costs["cache"] <= result["limits"]["cache"]


@pytest.mark.slow
def test_bits_are_for_quantize(searched, source, text, tmp_path):
    """Recipe and rules together have the predicted bytes; where nothing else changes, the source is quantized."""
    out = tmp_path / "SEARCH"
    shutil.copytree(searched[0], out)
    settings = settings_of(text, bits=(8, 4), only="mlp pruned,projections", points=6)
    result = search(str(source), out, {"bytes": "40%"}, settings)
    asked = result["points"][0]
    assert asked["recipe"] and asked["bits"] == "bits-1.yaml" and any("bits" in name for name in asked["choices"])
    convert(str(source), load_recipe(str(out / asked["recipe"]), ["tune=false"]), tmp_path / "OUT", device="cpu")
    summary = quantize(str(tmp_path / "OUT"), tmp_path / "SMALL", rules=read_bits(out / asked["bits"]))
    assert summary["bytes_after"] == asked["costs"]["bytes"] <= result["limits"]["bytes"]
    alone = next(point for point in result["points"] if point["bits"] and not point["recipe"])
    summary = quantize(str(source), tmp_path / "ALONE", rules=read_bits(out / alone["bits"]))
    assert summary["bytes_after"] == alone["costs"]["bytes"]


def test_other_limits_are_solved_without_measuring_again(searched, source, text, tmp_path, monkeypatch):
    out = tmp_path / "SEARCH"
    shutil.copytree(searched[0], out)
    monkeypatch.setattr(DamagePass, "run", lambda _: pytest.fail("measured again"))
    again = search(str(source), out, LIMITS, settings_of(text))
    assert {**again, "out": ""} == {**searched[1], "out": ""}
    smaller = search(str(source), out, {"parameters": "45%"}, settings_of(text, points=0, at=1024, check=False))
    assert smaller["points"][0]["costs"]["parameters"] <= 0.45 * smaller["original"]["parameters"]
    assert sorted(path.name for path in out.glob("recipe-*")) == ["recipe-1.yaml"]  # those of the last limits


@pytest.mark.slow
def test_an_interrupted_search_goes_on(source, text, tmp_path, monkeypatch):
    """Steps that are written are not measured again, and the result is the same."""
    settings = settings_of(text, only="mlp pruned,layer")
    reference = search(str(source), tmp_path / "WHOLE", LIMITS, settings)
    monkeypatch.setattr(surgery.budget.damage, "PASS_VARIANTS", 8)
    whole, measured = DamagePass.run, []

    def run(self):
        measured.append(len(self.variants))
        if len(measured) == 2:
            raise KeyboardInterrupt
        return whole(self)

    monkeypatch.setattr(DamagePass, "run", run)
    out = tmp_path / "SEARCH"
    with pytest.raises(KeyboardInterrupt):
        search(str(source), out, LIMITS, settings)
    assert len(json.loads((out / "table.json").read_text())["rows"]) == measured[0]
    result = search(str(source), out, LIMITS, settings)
    table = json.loads((out / "table.json").read_text())
    assert sum(measured[2:]) == len(table["rows"]) + len(table["plans"]) - measured[0] > 0
    assert {**result, "out": ""} == {**reference, "out": ""}
    # Without the last pass, which measures whole plans, nothing else is measured again.
    (out / "table.json").write_text(json.dumps({**table, "plans": table["plans"][:1]}))
    measured[:] = [0] * 2
    assert {**search(str(source), out, LIMITS, settings), "out": ""} == {**reference, "out": ""}
    assert measured[2:] == [len(table["plans"]) - 1]


def test_a_search_of_some_kinds_keeps_the_rows_of_others(searched, source, text, tmp_path):
    out = tmp_path / "SEARCH"
    shutil.copytree(searched[0], out)
    before = json.loads((out / "table.json").read_text())
    result = search(str(source), out, {"bytes": "60%"}, settings_of(text, only="mlp,-btt", points=0))
    assert all(name.startswith("mlp") and "btt" not in name for name in result["points"][0]["choices"])
    after = json.loads((out / "table.json").read_text())
    assert after["rows"] == before["rows"] and after["plans"][: len(before["plans"])] == before["plans"]


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda t: "not json", "is not JSON. Remove it to measure again"),
        (lambda t: {**t, "start": {**t["start"], "settings": {**t["start"]["settings"], "length": 32}}}, "another length"),
        (lambda t: {**t, "start": {**t["start"], "settings": 3}}, "another"),
        (lambda t: {**t, "rows": [{**t["rows"][0], "damage": -1.0}]}, r"rows.0.damage: must be greater than or equal to 0"),
        (lambda t: {**t, "rows": [{**t["rows"][0], "damage": "0.1"}]}, r"rows.0.damage"),
        (lambda t: {**t, "rows": [{**t["rows"][0], "command": "rm"}]}, r"unknown key 'rows.0.command'"),
        (lambda t: {**t, "rows": [{**t["rows"][0], "choice": "model.layers.9 mlp: pruned 75%"}]}, "is no choice of this model"),
        (lambda t: {**t, "rows": [t["rows"][0], t["rows"][0]]}, "a choice has two rows"),
        (lambda t: {**t, "plans": [{**t["plans"][0], "damage": -1.0}]}, r"plans.0.damage: must be greater than or equal to 0"),
        (lambda t: {**t, "plans": [{**t["plans"][0], "choices": ["model.layers.9 mlp: pruned 75%"]}]}, "of a plan is no choice of this model"),
        (lambda t: {**t, "plans": [t["plans"][0], t["plans"][0]]}, "a plan is there twice"),
        (lambda t: {**t, "plans": [{**t["plans"][0], "choices": t["plans"][0]["choices"][::-1] * 2}]}, "its choices are not sorted"),
        (lambda t: {**t, "start": {**t["start"], "calibration": "another"}}, "was begun with another calibration"),
        (lambda t: {**t, "format": 2}, "format"),
        (lambda t: {**t, "rows": [{**r, "mixer": {"mixer": "mlr", "ranks": [10**6]}} if r["mixer"] else r for r in t["rows"]]}, "table.json: .*ranks"),
        (lambda t: {**t, "rows": [{**r, "mixer": None} for r in t["rows"]]}, "has no mixer 'mlr'"),
    ],
)  # fmt: skip
def test_a_table_is_a_stranger_s_word(change, says, searched, source, text, tmp_path):
    out = tmp_path / "SEARCH"
    shutil.copytree(searched[0], out)
    data = change(json.loads((out / "table.json").read_text()))
    (out / "table.json").write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(SurgeryError, match=says):
        search(str(source), out, LIMITS, settings_of(text))


def test_costs_of_a_table_are_counted_again(searched, source, text, tmp_path):
    """Costs that someone edited decide nothing."""
    out = tmp_path / "SEARCH"
    shutil.copytree(searched[0], out)
    table = json.loads((out / "table.json").read_text())
    for row in table["rows"]:
        row["costs"] = dict.fromkeys(row["costs"], -(10**9))
    (out / "table.json").write_text(json.dumps(table))
    again = search(str(source), out, LIMITS, settings_of(text))
    assert again["points"] == searched[1]["points"]


def test_notes_are_about_selected_kinds(source, text, tmp_path, capsys):
    """A kind that `--only` leaves out has no note, whether the model or the length of the samples rules it out."""
    model = FolderSource(str(source)).open(Progress())
    unsuitable = [Kind("mlp wide", "mlp", "low_rank", {"structure": "low_rank", "blocks": [5, 5]})]
    for only, count in ((None, 1), ("wide", 1), ("attention,-mlp", 0)):
        settings = settings_of(text, only=only)
        choices = find_choices(
            model, settings.keys(), [*unsuitable, *default_kinds()], settings.counting({}), settings.selects_title
        )
        assert sum("mlp wide is left out" in note for note in choices.notes) == count
    short = [
        "--calibration",
        text,
        "--tokens",
        "256",
        "--length",
        "32",
        "--points",
        "0",
        "--no-check",
        "--device",
        "cpu",
    ]
    for only, count in (("mlp low_rank 50%", 0), ("mlp low_rank 50%,attention window", 1)):
        out = tmp_path / str(count)
        with pytest.raises(SystemExit) as stopped:
            main(["search", str(source), "--max-bytes", "95%", *short, "--only", only, "--out", str(out)])
        assert not stopped.value.code
        notes = json.loads((out / "front.json").read_text())["notes"]
        said = "".join(capsys.readouterr()).replace("\n", " ")
        assert bool(notes) == ("is left out" in said) == bool(count)


def test_links_and_unknown_files_are_refused(source, text, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "LINK").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SurgeryError, match="symbolic link"):
        search(str(source), tmp_path / "LINK", LIMITS, settings_of(text))
    (tmp_path / "MINE").mkdir()
    (tmp_path / "MINE" / "thesis.tex").write_text("mine")
    with pytest.raises(SurgeryError, match=r"thesis.tex"):
        search(str(source), tmp_path / "MINE", LIMITS, settings_of(text))


# -- whole plans --------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_choices_of_a_plan_are_made_together(searched, source, text, tmp_path, monkeypatch):
    """A plan of one choice loses what that choice loses; further choices of the layer, fewer bits and a removed layer
    add to it.
    """
    out = tmp_path / "SEARCH"
    shutil.copytree(searched[0], out)
    kept: list = []
    monkeypatch.setattr(surgery.budget.search.Measuring, "measure_plans", lambda self, _: kept.append(self))
    search(str(source), out, LIMITS, settings_of(text, only="mlp pruned,low_rank,mlr,layer"))
    monkeypatch.undo()
    measuring = kept[0]
    (out / "work").mkdir(exist_ok=True)
    by_key = {choice.key: choice for choice in measuring.choices.choices}
    layer = "model.layers.0"
    names = [f"{layer} attention: mlr 40%", f"{layer} projections: low_rank 25%", f"{layer} mlp: pruned 25%"]
    whole, removed = [by_key[name] for name in names], by_key["model.layers.1: removed"]
    rounded = [*whole[:2], replace(whole[2], bits=4)]
    plans = {"one": whole[:1], "two": whole[:2], "three": whole, "rounded": rounded, "removed": [*whole, removed]}
    plans |= {choice.key: [choice] for choice in (*whole, removed)}
    measuring.measure_plans(plans.values())
    damages = {name: measuring.plans[plan_key(chosen)].nats for name, chosen in plans.items()}
    for choice in (*whole, removed):
        assert damages[choice.key] == pytest.approx(measuring.damages[choice.key].nats, rel=1e-4, abs=1e-7)
    assert damages["one"] < damages["two"] < damages["three"] < damages["removed"]
    assert damages["rounded"] not in (damages["two"], damages["three"])


def test_the_point_with_the_lowest_measured_loss_is_chosen(searched, source, text, tmp_path):
    """If the solver's plan turns out to lose much, a rival within the limits takes its place."""
    out, before = tmp_path / "SEARCH", searched[1]
    shutil.copytree(searched[0], out)
    table = json.loads((out / "table.json").read_text())
    losses = [p["loss"] for p in [before["points"][0], *before["rivals"].values()]]
    assert before["rivals"] and losses[0] == min(losses)
    worst = max(before["rivals"], key=lambda family: before["rivals"][family]["loss"])
    for plan in table["plans"]:
        found = next(p for p in before["rivals"].values() if p["loss"] == before["rivals"][worst]["loss"])
        plan["damage"] = 1e-6 if plan["damage"] == found["measured"] else plan["damage"]
    (out / "table.json").write_text(json.dumps(table))
    after = search(str(source), out, LIMITS, settings_of(text))
    assert after["points"][0]["choices"] == before["rivals"][worst]["choices"]
    assert after["points"][0]["measured"] == 1e-6 and after["points"][0]["loss"] <= 1e-6
    assert all(after["points"][0]["costs"][name] <= limit for name, limit in after["limits"].items())
    assert before["points"][0]["choices"] in [point["choices"] for point in after["points"][1:]]


def test_without_the_check_the_sum_counts(searched, source, text, tmp_path, monkeypatch):
    out = tmp_path / "SEARCH"
    shutil.copytree(searched[0], out)
    table = json.loads((out / "table.json").read_text())
    (out / "table.json").write_text(json.dumps({**table, "plans": []}))
    monkeypatch.setattr(DamagePass, "run", lambda _: pytest.fail("measured"))
    result = search(str(source), out, LIMITS, settings_of(text, check=False))
    assert not result["rivals"] and all(point["measured"] is None for point in result["points"])
    assert result["points"][0]["loss"] <= result["points"][0]["damage"]


# -- the command line ---------------------------------------------------------------------------------------------
def run_command(*words: str) -> int:
    try:
        main([*words])
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def test_the_command_prints_the_front(searched, source, text, tmp_path, capsys):
    out = tmp_path / "SEARCH"
    shutil.copytree(searched[0], out)
    words = ["search", str(source), "--calibration", text, "--tokens", "2048", "--length", "512", "--out", str(out)]
    assert run_command(*words, "--max-bytes", "60%", "--max-cache-bytes", "60%", "--at", "8k", "--points", "4") == 0
    printed = capsys.readouterr().out
    assert "recipe-1 *" in printed and "what binds: --max-bytes" in printed and "cache 8K" in printed
    assert "measured together, choices lose" in printed and "measured too at your limits: without" in printed
    assert (
        "healing not fitted: " in printed
        and f"surgery convert {source} --recipe {out}/recipe-1.yaml" in printed.replace("\n", "")
    )


def test_limits_that_cannot_be_met_give_the_nearest_plan(searched, source, text, tmp_path, capsys):
    out = tmp_path / "SEARCH"
    shutil.copytree(searched[0], out)
    words = ["search", str(source), "--calibration", text, "--tokens", "2048", "--length", "512", "--out", str(out)]
    assert run_command(*words, "--max-bytes", "1%", "--max-cache-bytes", "60%") == 1
    printed = capsys.readouterr().out
    assert "--max-bytes cannot be met: the nearest choice has" in printed and "--max-cache-bytes cannot" not in printed
    assert (out / "recipe-1.yaml").exists() and "excess" in json.loads((out / "front.json").read_text())


@pytest.mark.parametrize(
    "words, says",
    [
        ((), "give at least one limit (--max-parameters, --max-bytes, --max-cache-bytes"),
        (("--max-bytes", "half"), "--max-bytes must be a share of the original or a number"),
        (("--max-bytes", "0%"), "--max-bytes must be above 0 (got '0%')"),
        (("--max-parameters", "3GB"), "--max-parameters must be a share of the original or a number"),
        (("--max-bytes", "60%", "--only", "nothing"), "--only 'nothing' selects no kind of choice"),
        (("--max-bytes", "60%", "--bits", "3"), "--bits must be 8, 4 or both, such as 8,4 (got '3')"),
        (("--max-bytes", "60%", "--gains", "/nowhere.json"), "cannot read /nowhere.json"),
        (("--max-bytes", "60%", "--at", "0"), "must be a number of tokens"),
        (("--max-bytes", "60%", "--at", "1000000M"), "search: at must be 1 to 67108864 tokens"),
        (("--max-bytes", "999999999999999GB"), "--max-bytes is larger than any model (got '999999999999999GB')"),
    ],
)
def test_wrong_options_exit_2(words, says, source, tmp_path, capsys):
    assert run_command("search", str(source), "--out", str(tmp_path / "SEARCH"), *words) == 2
    assert says in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "SEARCH").exists()


def test_a_search_needs_a_calibration_text(source, tmp_path, capsys):
    assert run_command("search", str(source), "--max-bytes", "60%", "--out", str(tmp_path / "SEARCH")) == 2
    assert "give --calibration" in capsys.readouterr().err and not (tmp_path / "SEARCH").exists()


# -- recipes ------------------------------------------------------------------------------------------------------
def test_neighboring_layers_share_a_rule():
    half, quarter = linear_kinds("mlp", "pruned", (0.5, 0.25))
    assert ranges([half, half, None, quarter, half]) == [(half, "0:2"), (quarter, "3"), (half, "4")]


def test_attention_of_several_kinds():
    window, far = Kind("window", ATTENTION, "window", shipped_mixer("sliding-window")), shipped_mixer("log-linear")
    linear, small = (
        Kind("log-linear", ATTENTION, "log_linear", far),
        Kind("mlr", ATTENTION, "mlr", {"mixer": "mlr", "cache": 0.4}),
    )
    mixed = attention_of([None, window, linear, linear, small])
    assert mixed["mixer"] == "linear" and mixed["hybrid"] == {"layers": [0]}
    assert mixed["rules"] == [{"layers": "1", **window.settings}, {"layers": "4", **small.settings}]
    only = attention_of([None, small, small])
    assert only == {
        "mixer": "mlr",
        "hybrid": {"layers": [0]},
        "rules": [{"layers": "1:3", "mixer": "mlr", "cache": 0.4}],
    }
