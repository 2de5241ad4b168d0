"""Recipes with `rates_to_try`: the rate with the best validation loss of short trials, and the recipe `control`."""

from __future__ import annotations

import json
import math
import re
import shutil

import pytest
from helpers.forked import run_processes
from helpers.small_training import TINY_CHECKPOINT

from surgery.core.errors import SurgeryError
from surgery.training import rate_search
from surgery.training.finetune import finetune
from surgery.training.guard import TrainingStopped
from surgery.training.rate_search import best_rate, set_rate, trial_recipe, trials_folder
from surgery.training.recipe import load_healing_recipe, parse_healing_recipe

RATES = [1e-6, 1e-3, 3.0]


def search_recipe(texts, **keys):
    stage = {"kind": "lm", "trains": ["all"], "length": 32, "tokens": 1024, "batch": 4, "rows": 4, "rate": 1e-4}
    data = {"sources": [{"path": str(texts)}], "validation": 0.1, "validation_examples": 4}
    return parse_healing_recipe(
        {"stages": [stage], "data": data, "rates_to_try": RATES, "trial_share": 0.5, "log": 1, "checkpoint": 2, **keys}
    )


def test_rates_keep_their_proportion():
    data = {"sources": "a.txt", "validation": 0.1}
    stages = [
        {"kind": "align", "tokens": 4096, "rate": 2e-3, "batch": 4, "length": 64},
        {"kind": "distill", "tokens": 40960, "rate": 1e-3, "rates": {"mixers": 6e-3}, "batch": 4, "length": 64},
    ]
    recipe = parse_healing_recipe({"stages": stages, "data": data, "rates_to_try": [1e-3, 1e-4], "trial_share": 0.01})
    align, distill = set_rate(recipe, 1e-4).stages
    assert (align.rate, distill.rate, distill.rates["mixers"]) == (pytest.approx(2e-4), 1e-4, pytest.approx(6e-4))
    trial = trial_recipe(recipe, 1e-3)
    assert [stage.tokens for stage in trial.stages] == [256, 410]  # a step at least
    assert (trial.rates_to_try, trial.deliver, trial.evaluate) == ((), "last", 0)


def test_best_rate():
    tried = [{"rate": 1.0, "loss": None}, {"rate": 0.1, "loss": 2.0}, {"rate": 0.01, "loss": 2.0}]
    assert best_rate(tried) == 0.1
    with pytest.raises(SurgeryError, match=r"training stopped at every rate of rates_to_try \(1\)"):
        best_rate(tried[:1])


@pytest.mark.parametrize(
    "rates, rule",
    [
        ("[1e-4]", r"rates_to_try: must be two or more different rates, or empty \(got \[0.0001\]\)$"),
        ("[1e-4, 1e-4]", r"rates_to_try: must be two or more different rates, or empty \(got \[0.0001, 0.0001\]\)$"),
        ("[1e-4, -1]", r"rates_to_try.1: must be greater than 0 \(got -1\)$"),
        ("[1e-4, .inf]", r"rates_to_try.1: must be a finite number \(got inf\)$"),
    ],
)
def test_rates_that_are_no_choice_are_refused(rates, rule):
    with pytest.raises(SurgeryError, match=rf"control.yaml with override rates_to_try={re.escape(rates)}: {rule}"):
        load_healing_recipe("control", [f"rates_to_try={rates}"])


@pytest.mark.slow
def test_the_best_rate_trains_an_unconverted_model(texts, tmp_path):
    """The record names all trials; the result is that of the same recipe with the best rate and no search."""
    recipe = search_recipe(texts)
    record = finetune(str(TINY_CHECKPOINT), recipe, tmp_path / "searched")
    tried = {trial["rate"]: trial["loss"] for trial in record["rates_tried"]}
    assert list(tried) == RATES and {trial["tokens"] for trial in record["rates_tried"]} == {512}
    assert tried[1e-3] < tried[1e-6] and (tried[3.0] is None or tried[3.0] > tried[1e-3])
    assert record["recipe"]["stages"][0]["rate"] == 1e-3
    assert not trials_folder(tmp_path / "searched").exists()
    report = json.loads((tmp_path / "searched" / "surgery_report.json").read_text())
    assert report["training"][-1]["rates_tried"] == record["rates_tried"]
    plain = finetune(str(TINY_CHECKPOINT), search_recipe(texts, rates_to_try=[]).model_copy(
        update={"stages": set_rate(recipe, 1e-3).stages}), tmp_path / "plain")  # fmt: skip
    assert plain["validation"] == record["validation"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("searched", "plain")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_interrupted_trials_continue(texts, tmp_path, monkeypatch):
    recipe, out = search_recipe(texts), tmp_path / "out"
    whole = finetune(str(TINY_CHECKPOINT), recipe, tmp_path / "whole")
    write, writes = rate_search._write_trial, []

    def stop_at_fourth(folder, rate, entry):
        writes.append(entry)
        if len(writes) == 4:  # the second trial is trained, and its loss is not yet written
            raise KeyboardInterrupt
        write(folder, rate, entry)

    monkeypatch.setattr(rate_search, "_write_trial", stop_at_fourth)
    with pytest.raises(KeyboardInterrupt):
        finetune(str(TINY_CHECKPOINT), recipe, out)
    monkeypatch.setattr(rate_search, "_write_trial", write)
    with pytest.raises(SurgeryError, match=r"has the trials of an unfinished run\. Add --resume"):
        finetune(str(TINY_CHECKPOINT), recipe, out)
    other = search_recipe(texts, seed=5)
    with pytest.raises(SurgeryError, match="a trial of rate 1e-06 with another recipe, model or data"):
        finetune(str(TINY_CHECKPOINT), other, out, resume=True)
    said: list[str] = []
    runs = []
    train = rate_search._run_trial

    def counted(trial, rate, *rest):
        runs.append(rate)
        return train(trial, rate, *rest)

    monkeypatch.setattr(rate_search, "_run_trial", counted)
    record = finetune(str(TINY_CHECKPOINT), recipe, out, resume=True, progress=Said(said))
    assert runs == RATES[1:]
    assert (record["rates_tried"], record["validation"]) == (whole["rates_tried"], whole["validation"])
    assert "training with rate 0.001, the best of 3" in said


@pytest.mark.slow
def test_two_processes_search_and_continue(texts, tmp_path):
    """All trials and the run in one process group; the second call finds a trial that was trained, without its loss."""
    recipe, out = search_recipe(texts, rates_to_try=RATES[:2]), tmp_path / "out"

    def run(place, dies=False):
        def work(rank):
            write, entries = rate_search._write_trial, []

            def stop_at_fourth(folder, rate, entry):
                entries.append(entry)
                if len(entries) == 4:
                    raise KeyboardInterrupt
                write(folder, rate, entry)

            rate_search._write_trial = stop_at_fourth if dies else write
            finetune(str(TINY_CHECKPOINT), recipe, place, device="cpu", track="none", resume=place.parent == tmp_path)

        return run_processes(2, work)

    assert run(out, dies=True) == [1, 1] and (trials_folder(out) / "rate-0.001").is_dir()
    assert run(out) == [0, 0] and not trials_folder(out).exists()
    (tmp_path / "whole").mkdir()
    assert run(tmp_path / "whole" / "out") == [0, 0]
    reports = [json.loads((place / "surgery_report.json").read_text()) for place in (out, tmp_path / "whole" / "out")]
    first, second = (report["training"][-1] for report in reports)
    assert first["processes"] == 2 and first["rates_tried"] == second["rates_tried"]
    assert first["validation"] == second["validation"]


class Said(rate_search.Progress):
    """Collects what is said."""

    def __init__(self, lines: list[str]):
        self.lines = lines

    def say(self, text: str) -> None:
        self.lines.append(text)


def test_a_rate_at_which_training_stops_is_not_chosen(texts, tmp_path):
    def train(recipe, out, resume):
        if recipe.stages[0].rate == 3.0:
            out.mkdir()
            raise TrainingStopped("the loss diverged")
        return {"validation": {"after": {"loss": recipe.stages[0].rate}}}

    said: list[str] = []
    recipe, tried = rate_search.search_rates(
        search_recipe(texts), tmp_path / "out", train, lambda r: "", False, Said(said)
    )
    assert [trial["loss"] for trial in tried] == [1e-6, 1e-3, None] and recipe.stages[0].rate == 1e-6
    assert said[-1].endswith("it is the lowest of them, and a lower one may be better")
    assert "rate 3, 512 tokens: the loss diverged" in said
    assert sorted(path.name for path in trials_folder(tmp_path / "out").iterdir()) == [
        "rate-0.001.json", "rate-1e-06.json", "rate-3.json",
    ]  # fmt: skip


def search(recipe, out, losses, resume=False):
    """Search with trainings that give these losses by rate."""

    def train(trial, place, resume):
        place.mkdir(parents=True, exist_ok=True)
        return {"validation": {"after": {"loss": losses[trial.stages[0].rate]}}}

    return rate_search.search_rates(recipe, out, train, lambda trial: "key", resume, Said([]))


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_not_the_best(lost, texts, tmp_path):
    """The first of all rates too, beside which every comparison is false."""
    recipe, tried = search(search_recipe(texts), tmp_path / "out", {1e-6: lost, 1e-3: 3.0, 3.0: lost})
    assert recipe.stages[0].rate == 1e-3 and [trial["loss"] for trial in tried] == [None, 3.0, None]
    again, _ = search(search_recipe(texts), tmp_path / "out", {}, resume=True)
    assert again == recipe


def test_a_trial_that_was_trained_earlier_stays_until_the_end(texts, tmp_path):
    """Its loss is read by all processes, of which the first may be ahead; a trial of this call is removed."""
    folder, record = trials_folder(tmp_path / "out"), {"validation": {"after": {"loss": 0.5}}}
    (folder / "rate-0.001").mkdir(parents=True)
    (folder / "rate-0.001" / "surgery_report.json").write_text(json.dumps({"training": [record]}))
    recipe, _ = search(search_recipe(texts), tmp_path / "out", {1e-6: 1.0, 3.0: 1.0}, resume=True)
    assert recipe.stages[0].rate == 1e-3
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["rate-0.001"]


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "{}", '{"key": 3}', '{"key": "key", "loss": "1"}', '{"key": "key", "loss": null}',
             '{"key": "key", "loss": NaN}', '{"key": "key", "loss": true}', '{"key": "key", "stopped": 4}'],
)  # fmt: skip
def test_a_damaged_entry_is_refused(text, texts, tmp_path):
    trials_folder(tmp_path / "out").mkdir()
    (trials_folder(tmp_path / "out") / "rate-0.001.json").write_text(text)
    with pytest.raises(SurgeryError, match=r"rate-0\.001\.json"):
        search(search_recipe(texts), tmp_path / "out", {1e-6: 1.0, 1e-3: 1.0, 3.0: 1.0}, resume=True)


def test_a_refused_run_leaves_no_trials(texts, tmp_path):
    """The next call, with other arguments, needs neither --resume nor a removal."""
    stage = {"kind": "lm", "trains": ["all"], "length": 4096, "tokens": 65536, "batch": 4, "rows": 4, "rate": 1e-4}
    with pytest.raises(SurgeryError, match="max_position_embeddings"):
        finetune(str(TINY_CHECKPOINT), search_recipe(texts, stages=[stage]), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_validation_text_is_required(texts, tmp_path):
    recipe = search_recipe(texts, data={"sources": [{"path": str(texts)}]})
    with pytest.raises(SurgeryError, match=r"chooses the rate by validation text, and the recipe has none"):
        finetune(str(TINY_CHECKPOINT), recipe, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_control_trains_the_original(texts, tmp_path):
    few = ["stages.*.tokens=256", "stages.*.length=32", "stages.*.batch=4", "stages.*.rows=4"]
    few += [f"data.sources=[{{path: {texts}}}]", "data.validation=0.1", "data.validation_examples=2"]
    recipe = load_healing_recipe("control", few, tiny=True)
    record = finetune(str(TINY_CHECKPOINT), recipe, tmp_path / "control")
    assert [trial["rate"] for trial in record["rates_tried"]] == [3e-5, 1e-4, 3e-4] and record["teacher"] is None
    assert record["recipe"]["stages"][0]["kind"] == "lm"
    shutil.rmtree(tmp_path / "control")
