"""Drivers of recipes/papers/experiments: smoke runs, resumed sweeps, statistics, verdicts, and the table in
docs/papers.md.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.papers.experiments import page, recall, regression, scaling
from recipes.papers.experiments.driver import main, show
from recipes.papers.experiments.sweep import (
    Cell,
    append_rows,
    at_edge,
    best_rows,
    difference,
    edge_words,
    gpu_minutes,
    is_complete,
    missing_runs,
    paired_difference,
    rates_beyond,
    read_rows,
    run_sweep,
    stack_size,
)
from recipes.papers.experiments.verdicts import WORDS
from surgery.core.errors import SurgeryError

ROOT = Path(__file__).resolve().parents[2]
RUNNERS = {experiment.name: experiment for experiment in page.EXPERIMENTS}


@pytest.mark.parametrize("name", RUNNERS)
def test_smoke_run_and_show(name, tmp_path, capsys):
    experiment, out = RUNNERS[name], tmp_path / "rows.jsonl"
    main(experiment, ["run", "--setting", "smoke", "--out", str(out), "--device", "cpu"])
    assert "complete" in capsys.readouterr().out
    rows = read_rows(out)
    assert is_complete(rows, experiment.smoke) and all(row["loss"] > 0 and row["macs"] > 0 for row in rows)
    main(experiment, ["run", "--setting", "smoke", "--out", str(out), "--device", "cpu"])
    assert read_rows(out) == rows  # nothing is trained twice
    text = show(experiment, [out], None)
    on_gpu = any(setting.where == "gpu" for setting in experiment.settings)
    assert f"Rule: {experiment.rule}." in text and re.search(rf"`smoke`: ({'|'.join(WORDS)}) \(", text)
    assert ("undecided: GPU time" in text and "forecast" in text) == on_gpu
    assert on_gpu or name == "two_orders"  # which trains nothing


@pytest.mark.parametrize("name", ["recall", "regression"])
def test_every_method_of_every_setting_has_a_model(name):
    module = {"recall": recall, "regression": regression}[name]
    make = {"recall": recall.make_recall_model, "regression": regression.make_values_model}[name]
    seen = set()
    for setting in module.SETTINGS:
        small = replace(setting, layers=1, length=16)
        for cell in (Cell(m, w) for m in setting.methods for w in setting.widths if w == min(setting.widths)):
            if cell not in seen:
                make(small, cell, 0)
            seen.add(cell)
        assert 0 < gpu_minutes(setting, module.heads, stack_size(setting, module.heads, 60.0)) < 120


def rows_of(setting, accuracy):
    """Rows of a complete sweep; accuracy(method, width, seed)."""
    best = setting.rates[len(setting.rates) // 2]
    choosing = setting.choosing_seeds
    runs = [(rate, s) for rate in setting.rates for s in range(choosing)]
    runs += [(best, s) for s in range(choosing, setting.seeds)]
    cells = [Cell(m, w) for m in setting.methods for w in setting.widths]
    return [
        {"setting": setting.name, "method": c.method, "width": c.width, "rate": rate, "seed": seed,
         "loss": 1.0 if rate == best else 2.0, "accuracy": accuracy(*c, seed), "error": accuracy(*c, seed)}
        for c in cells for rate, seed in runs
    ]  # fmt: skip


@pytest.mark.parametrize(
    "gain, softmax, word",
    [
        (0.05, 1.0, "reproduced"),
        (-0.05, 1.0, "not seen at this size"),
        (0.05, 0.9, "undecided"),
        (0.0, 1.0, "in part"),
    ],
)
def test_verdict_of_recall_follows_from_the_rows(gain, softmax, word):
    setting = recall.EXPERIMENT.setting("gpu")

    def accuracy(method, width, seed):
        return (
            softmax
            if method == "softmax"
            else width / 100 + 0.001 * seed * (1 + method.startswith("log")) + gain * method.startswith("log")
        )

    rows = rows_of(setting, accuracy)
    noisy = [
        {**r, "accuracy": r["accuracy"] + (0.02 * (-1) ** r["seed"] if not gain and r["method"] == "ssd" else 0)}
        for r in rows
    ]
    assert recall.EXPERIMENT.judge(noisy, setting).word == word
    assert recall.EXPERIMENT.judge(rows[1:], setting).word == "undecided: GPU time"
    if gain < 0:
        assert "ssd 16 answers 16.2% (paper: 46.9%)" in recall.EXPERIMENT.judge(noisy, setting).why
        higher = [{**r, "accuracy": 1 + r["accuracy"] * (r["method"] != "softmax")} for r in noisy]
        assert recall.EXPERIMENT.judge(higher, setting).word == "refuted"


@pytest.mark.parametrize(
    "many, one, word", [(0.9, 0.02, "reproduced"), (0.02, 0.02, "refuted"), (0.9, 0.5, "undecided")]
)
def test_verdict_of_regression_follows_from_the_rows(many, one, word):
    setting = regression.EXPERIMENT.setting("gpu")
    errors = {"heads_8": many, "heads_1": one, "btt_8": 0.02, "mlr_8": 0.02}
    rows = rows_of(setting, lambda method, width, seed: errors[method] * (1 + 0.01 * seed))
    assert regression.EXPERIMENT.judge(rows, setting).word == word


def test_a_killed_sweep_goes_on(tmp_path):
    """Killed within a row: the part of the row is removed, and only missing runs are trained."""
    setting, out, trained = replace(recall.SMOKE, rate_seeds=1), tmp_path / "rows.jsonl", []

    def train(setting, cell, runs, device):
        if len(trained) == 2:
            trained.append("killed")
            raise KeyboardInterrupt
        trained.append((cell, runs))
        return [
            {"setting": setting.name, "method": cell.method, "width": cell.width, "rate": r, "seed": s, "loss": 1.0}
            for r, s in runs
        ]

    with pytest.raises(KeyboardInterrupt):
        run_sweep(setting, train, out, "cpu", stack=lambda cell: 4, say=lambda text: None)
    with open(out, "a") as file:
        file.write('{"setting": "smo')
    assert len(read_rows(out)) == 2
    assert run_sweep(setting, train, out, "cpu", stack=lambda cell: 4, say=lambda text: None)
    assert len(trained) == 5 and is_complete(read_rows(out), setting)
    assert not run_sweep(
        replace(setting, seeds=9), train, out, "cpu", stack=lambda cell: 1, minutes=-1, say=lambda text: None
    )


@pytest.mark.parametrize("slope, beyond", [(1, 2.5e-4), (-1, 2.5e-2), (0, None)])
def test_a_best_rate_at_an_end_is_followed_by_one_more(slope, beyond, tmp_path):
    """Two seeds choose the rate: seed 1 outvotes seed 0. A sweep that stopped goes on with the same rates."""
    setting = replace(recall.SMOKE, methods=("ssd",), rates=(1e-3, 4e-3, 1e-2), seeds=3)
    out, cell = tmp_path / "rows.jsonl", Cell("ssd", 16)

    def train(setting, cell, runs, device):
        return [
            {"setting": setting.name, "method": cell.method, "width": cell.width, "rate": r, "seed": s,
             "loss": 5 + slope * r * (-0.5 if s == 0 else 1.0) if slope else abs(r - 4e-3)}
            for r, s in runs
        ]  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.papers.experiments.sweep.PHASES", ("rates",))
        run_sweep(setting, train, out, "cpu", stack=lambda cell: 4, say=lambda text: None)
    rows = read_rows(out)
    assert len(rows) == 6 and rates_beyond(rows, setting, cell) == ([] if beyond is None else [beyond])
    assert at_edge(rows, setting, cell) == (beyond is not None) and not is_complete(rows, setting)
    assert rates_beyond(rows[:-1], setting, cell) == []  # seed 1 has not tried all rates
    assert run_sweep(setting, train, out, "cpu", stack=lambda cell: 1, say=lambda text: None)
    rows = read_rows(out)
    best = best_rows(rows, setting)
    assert len(rows) == 7 + 2 * bool(beyond) and not missing_runs(rows, setting) and is_complete(rows, setting)
    assert {(row["rate"], row["edge"], row["chosen_on"]) for row in best.values()} == {
        (beyond or 4e-3, beyond is not None, 2)
    }
    assert edge_words(best, ["ssd"]) == ("the best rate of ssd 16 lies at an end of the grid" if beyond else "")


@pytest.mark.parametrize("line", ["{}", "[1]", '{"setting": 1}', "x" * 200_000, "[" * 50_000])
def test_damaged_rows_are_refused(line, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(SurgeryError, match="line 1 is not a result row"):
        read_rows(path)


def test_paired_differences():
    found = difference([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.low == pytest.approx(2 - 4.303 / 3**0.5, abs=1e-2) and found.pairs == 3
    assert difference([1.0]).low == -float("inf")
    rows = [{"setting": "gpu_256", "method": m, "width": 32, "rate": r, "seed": s, "loss": r, "accuracy": a + s}
            for m, a in (("ssd", 0.1), ("gdn", 0.4)) for r, s in ((1e-2, 0), (3e-4, 0), (3e-4, 1))]  # fmt: skip
    best = best_rows(rows, recall.EXPERIMENT.setting("gpu_256"))
    assert {row["rate"] for row in best.values()} == {3e-4}
    assert paired_difference(best, "gdn", "ssd", "accuracy").mean == pytest.approx(0.3)


def test_rows_are_appended_whole(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    append_rows(path, [{"a": 1}])
    append_rows(path, [{"b": 2}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"b": 2}]


def test_the_tables_of_the_docs_are_what_the_rows_say():
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("docs/papers.md", "docs/measurements/papers.md")]
    for text in texts:
        assert page.replace_sections(text) == text, "run python -m recipes.papers.experiments.page --write with both"
    assert all("".join(texts).count(f"<!-- {name} -->") == 1 for name in page.sections())
    with pytest.raises(SurgeryError, match="has no markers"):
        page.replace_sections("no markers")
    with pytest.raises(SurgeryError, match="once each"):
        page.replace_sections("<!-- rows -->")


def test_verdicts_of_results_are_counted():
    """The count is of the words in the table of results; each experiment has a row."""
    table = page.sections()["results"].split("\n\n")[1].splitlines()[2:]
    words = [re.split(r" \(|:", line.split(" | ")[3])[0] for line in table]
    counted = dict(re.findall(r"([a-z ]+?) (\d+)(?:,|\.)", page.counts().split(": ", 1)[1].split(" Of ")[0]))
    assert {word.strip(): int(number) for word, number in counted.items()} == {w: words.count(w) for w in WORDS}
    assert len(words) == len(page.results()) == len(page.EXPERIMENTS) + 4


def test_results_name_their_settings_and_what_is_not_run():
    found = {result.source: result for result in page.results()}
    scale = found["Compute Better Spent, Figures 1b, 1c, 4 to 6"]
    assert scale.word == "in part" and scale.why.startswith("`cpu` in part; `gpu_short` reproduced: ")
    assert scale.found.startswith("`gpu_short`, 4 seeds of ") and "`cpu`" not in scale.found
    assert found["Customizing, Figures 2, 3, 6 to 12"].found == "not run to the end"
    assert "; `rate_transfer` 2, 31; " in page.rows_section()


def test_power_laws_and_the_verdict_of_scaling():
    setting = scaling.EXPERIMENT.setting("cpu")
    exact = scaling.fit_power_law([(10.0, 1.0), (100.0, 0.1), (1000.0, 0.01)])
    assert exact.alpha == pytest.approx(1.0) and exact.error == pytest.approx(0, abs=1e-9)

    def rows(alphas, best=4e-3, seeds=3):
        macs = {cell: scaling.make_mlp(setting, cell, 0).macs() for cell in setting.cells}
        return [
            {"setting": "cpu", "method": c.method, "width": c.width, "rate": rate, "seed": seed, "loss": abs(rate - best), "macs": macs[c],
             "error": (macs[c] / 1000) ** -alphas[c.method] * (1 + 0.001 * seed)}
            for c in setting.cells for rate in setting.rates for seed in range(setting.seeds)
            if rate == best or seed < seeds
        ]  # fmt: skip

    assert scaling.EXPERIMENT.judge(rows({"dense": 0.1, "btt": 0.3}), setting).word == "reproduced"
    assert scaling.EXPERIMENT.judge(rows({"dense": 0.3, "btt": 0.1}), setting).word == "not seen at this size"
    one_seed = scaling.EXPERIMENT.judge(rows({"dense": 0.1, "btt": 0.3}, seeds=1), setting)
    assert one_seed.word == "undecided" and one_seed.why == "rates chosen on 1 of 2 seeds"
    assert scaling.EXPERIMENT.judge(rows({"dense": 0.2, "btt": 0.2}), setting).word == "undecided"
    at_edge = scaling.EXPERIMENT.judge(rows({"dense": 0.1, "btt": 0.3}, best=1e-3), setting)
    assert at_edge.word == "undecided" and at_edge.why.endswith("dense 64 lies at an end of the grid")
    assert scaling.interpolate([(1.0, 1.0), (100.0, 0.01)], 10.0) == pytest.approx(0.1)
    assert scaling.interpolate([(1.0, 1.0), (100.0, 0.01)], 101.0) is None


def test_rates_of_mlps():
    model = scaling.make_mlp(scaling.EXPERIMENT.setting("cpu"), Cell("btt", 64), 0)
    aware, naive = (scaling.rate_factors(model, naive) for naive in (False, True))
    assert aware["up.0.right"] == 64 / 8 and naive["up.0.right"] == 1.0 == aware["classifier.weight"]
    assert aware["input.right"] == pytest.approx(0.1 * 64 / 8) and aware["norms.0.weight"] == 1.0


# -- longer runs, and lambda = 1 at first -----------------------------------------------------------
def leaves_of(stack):
    """Return name -> parameter of the only run, with the names of gates as in a mask without a tree."""
    return {name.replace(".mask.gates.", ".mask."): leaf.detach()[0] for name, leaf in zip(stack.names, stack.leaves)}


@pytest.mark.parametrize("log_linear, plain", recall.FAMILIES)
def test_with_lambda_held_a_log_linear_form_is_its_linear_mask(log_linear, plain):
    """Lambda starts at 1: while it is held, all other parameters are trained to those of the linear mask. After a
    warm-up it is trained."""
    task, device = recall.make_task(recall.SMOKE), torch.device("cpu")
    start = dict(recall.make_recall_model(recall.SMOKE, Cell(plain, 16), 0).named_parameters())

    def trained(method, share):
        setting = replace(recall.SMOKE, steps=4, options=recall.SMOKE.options | {"warm_up": share})
        model = recall.make_recall_model(setting, Cell(method, 16), 0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".mask.level." not in name:
                    parameter.copy_(start[name.replace(".mask.gates.", ".mask.")])
        return leaves_of(recall.train_recall(setting, [(1e-2, 0)], {0: model}, task, device))

    linear, held, warm = trained(plain, 0), trained(log_linear, 1), trained(log_linear, 0.5)
    lambdas = {name for name in held if ".mask.level." in name}
    assert held.keys() - lambdas == linear.keys() and len(lambdas) == 4
    for name, leaf in linear.items():
        torch.testing.assert_close(held[name], leaf, rtol=1e-3, atol=1e-5)
    for name in lambdas:
        at_start = 0.0 if name.endswith("weight") else math.log(math.e - 1)
        torch.testing.assert_close(held[name], torch.full_like(held[name], at_start), rtol=0, atol=1e-7)
    assert any(bool((warm[name] != held[name]).any()) for name in lambdas)


def test_lengthening_ends_when_the_baselines_reach_their_figures(tmp_path, capsys):
    """Baselines alone are trained at each number of steps; every row stays, and the same command trains nothing more."""
    trained, out = [], tmp_path / "rows.jsonl"

    def train(setting, cell, runs, device):
        trained.append((setting.name, cell.method))
        return [
            {"setting": setting.name, "method": cell.method, "width": cell.width, "rate": r, "seed": s, "loss": 1.0,
             "accuracy": setting.steps / 12, "macs": 1, "state": 1}
            for r, s in runs
        ]  # fmt: skip

    experiment = replace(recall.EXPERIMENT, smoke=replace(recall.SMOKE, rate_seeds=2), train=train)
    command = ["run", "--setting", "smoke", "--out", str(out), "--device", "cpu"]
    main(experiment, [*command, "--lengthen", "8"])
    assert [name for name, method in trained if method == "ssd"] == ["smoke", "smoke@6"]
    assert [name for name, method in trained if method == "log_linear_ssd"] == ["smoke@6"]
    assert "ssd 16 answers 25.0% (paper: 46.9%). Twice as many steps follow" in capsys.readouterr().out
    main(experiment, [*command, "--lengthen", "8"])
    assert len(trained) == 3
    main(experiment, [*command, "--steps", "6"])
    assert len(trained) == 3
    main(experiment, [*command, "--steps", "9"])
    assert trained[3:] == [("smoke@9", "ssd"), ("smoke@9", "log_linear_ssd")]
    text = show(experiment, [out], None)
    assert "Setting `smoke@6`" in text and "Setting `smoke@9`" in text
    for options in (["--part", "1/2"], ["--methods", "ssd"], ["--steps", "4"]):
        with pytest.raises(SurgeryError, match="Leave out --part, --methods and --steps"):
            main(experiment, [*command, "--lengthen", "2", *options])
    main(experiment, [*command, "--steps", "12", "--methods", "ssd"])
    assert trained[5:] == [("smoke@12", "ssd")]
    longer = experiment.settings[0].lengthened(9)
    assert longer.name == "cpu@9" and experiment.setting("cpu@9") == longer
    assert experiment.run_command(longer) == f"{experiment.command} run --setting cpu --steps 9"
    rows = [{"setting": name} for name in ("cpu@90", "cpu@9", "cpu")]
    assert [s.name for s in experiment.settings_of(rows)][:4] == ["cpu", "cpu@9", "cpu@90", "gpu_64"]
