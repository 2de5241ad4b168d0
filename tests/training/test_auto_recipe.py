"""The healing recipe `auto`: the rule, what it says, and that a run with it is an ordinary, resumable one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
from helpers.small_training import TINY_CHECKPOINT
from typer.testing import CliRunner

from surgery.cli.main import app
from surgery.core.errors import SurgeryError
from surgery.training.auto_recipe import (
    MEASURED,
    ModelFacts,
    choose_recipe,
    interpolate,
    load_recipe_of_run,
    read_facts,
)
from surgery.training.models import open_trainable

FACTS = ModelFacts(parameters=106_200_000, width=576, longest=8192, linears=0, mixers=22)
FEW = ["stages.0.tokens=256", "stages.0.length=32", "stages.0.batch=4", "stages.0.rows=4", "log=1", "evaluate=0"]


@pytest.mark.parametrize("kind", sorted(MEASURED))
def test_measured_models_get_what_was_measured(kind):
    for point in MEASURED[kind]:
        facts = replace(FACTS, parameters=point.parameters, mixers=22 * (kind == "attention"), linears=4)
        choice = choose_recipe(facts)
        stage = {key.removeprefix("stages.0."): value for key, value in choice.settings.items()}
        assert (stage["rate"], stage["tokens"]) == (point.rate, point.tokens)
        assert stage.get("rates", {}).get("mixers") == point.mixers and not choice.extrapolated
        assert stage["batch"] * stage["length"] == 8192 and stage["batch"] % stage["rows"] == 0


def test_between_and_beyond():
    points = [(10, 1.0), (1000, 0.01)]
    assert interpolate(points, 5, -1 / 3) == 1.0
    assert interpolate(points, 100, -1 / 3) == pytest.approx(0.1)
    assert interpolate(points, 8000, -1 / 3) == pytest.approx(0.005)


def test_larger_models_get_smaller_rates_more_tokens_and_larger_steps():
    sizes = [10**7, 5 * 10**7, 10**8, 5 * 10**8, 10**9, 8 * 10**9, 7 * 10**10]
    for mixers in (0, 22):
        chosen = [choose_recipe(replace(FACTS, parameters=n, mixers=mixers)).settings for n in sizes]
        for before, after in pairwise(chosen):
            assert after["stages.0.rate"] <= before["stages.0.rate"]
            assert after["stages.0.tokens"] >= before["stages.0.tokens"]
        steps = [c["stages.0.batch"] * c["stages.0.length"] for c in chosen]
        assert steps == sorted(steps) and steps[0] == 8192 and steps[-1] == 65536
    assert choose_recipe(replace(FACTS, parameters=10**9)).extrapolated
    assert choose_recipe(replace(FACTS, longest=512)).settings["stages.0.length"] == 512


def test_facts_count_no_embedding(btt, mixed):
    config = json.loads((TINY_CHECKPOINT / "config.json").read_text())
    for checkpoint, linears, mixers in ((TINY_CHECKPOINT, False, False), (btt, True, False), (mixed, None, True)):
        facts = read_facts(open_trainable(str(checkpoint)))
        assert facts.width == config["hidden_size"] and bool(facts.mixers) == mixers
        assert linears is None or bool(facts.linears) == linears
        assert facts.parameters == read_facts(open_trainable(str(TINY_CHECKPOINT))).parameters > 10**6


def test_stock_layers_are_replaced_attention(tmp_path):
    """They are in the report alone, and their parameters have the rate of the rest."""
    shutil.copytree(TINY_CHECKPOINT, tmp_path / "OUT")
    report = tmp_path / "OUT" / "surgery_report.json"
    for stock, said in (({"linear_layers": [0, 1, 2]}, "3 attention modules"), ({"linear_layers": "x"}, "nothing")):
        report.write_text(json.dumps({"stock": stock}))
        recipe, lines = load_recipe_of_run("auto", str(tmp_path / "OUT"))
        assert f", {said} replaced" in lines[0] and "rates.mixers" not in "\n".join(lines)
        assert not recipe.stages[0].rates
        assert recipe.stages[0].tokens == (10_000_000 if said != "nothing" else 3_000_000)


def test_it_says_what_it_chose_and_set_wins(mixed):
    recipe, lines = load_recipe_of_run("auto", str(mixed), ["stages.0.rate=7e-5"])
    (stage,) = recipe.stages
    assert stage.rate == 7e-5 and stage.rates == {"mixers": 6e-3} and stage.tokens == 10_000_000
    said = "\n".join(lines)
    assert "attention modules replaced" in said and "rates.mixers" in said and recipe.description == said
    assert "extrapolated" not in said and lines[-1] == "  --set and --tiny replace these values: rate 0.001 -> 7e-05"
    assert load_recipe_of_run("attention", "no such folder")[1] == []
    tiny, lines = load_recipe_of_run("auto", str(mixed), tiny=True)
    assert tiny.stages[0].tokens == 128_000 and "tokens 10,000,000 -> 128,000" in lines[-1]


def test_finetune_and_teacher_cache(btt, texts, tmp_path):
    sets = [word for text in FEW for word in ("--set", text)]
    command = ["finetune", str(btt), "--teacher", str(TINY_CHECKPOINT), "--recipe", "auto", "--data", str(texts)]
    result = CliRunner().invoke(app, [*command, *sets, "--tiny", "--out", str(tmp_path / "out"), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "recipe auto for" in result.output and "linears replaced" in result.output
    (record,) = json.loads((tmp_path / "out" / "surgery_report.json").read_text())["training"]
    assert record["recipe"]["stages"][0]["rate"] == 3e-4 and "recipe auto for" in record["recipe"]["description"]
    refused = CliRunner().invoke(
        app, ["teacher-cache", str(TINY_CHECKPOINT), "--recipe", "auto", "--out", str(tmp_path / "c")]
    )
    assert refused.exit_code and isinstance(refused.exception, (SurgeryError, SystemExit))
