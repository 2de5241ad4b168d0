"""Lines on what a conversion chose name the result last."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pytest
from helpers.small import make_recipe

from surgery.conversion.choices import accepted_stages, hybrid_lines, initialization_lines, score_rank_lines
from surgery.conversion.convert import convert
from surgery.core.journal import Journal
from surgery.core.progress import Progress
from surgery.publish.summary import inspect_rows
from surgery.publish.tables import attention_output_lines, structure_lines, tune_lines


@pytest.mark.parametrize(
    "errors, accepted",
    [
        ({"copied": 0.5, "features": 0.3, "profile": 0.4, "window": 0.2}, ["features", "window"]),
        ({"copied": 0.5, "features": 0.6}, ["copied"]),
        ({"copied": 0.5}, ["copied"]),
    ],
)
def test_stages_that_lowered_the_error_were_kept(errors, accepted):
    assert accepted_stages(errors) == accepted


def test_the_start_of_mixers_names_what_was_kept():
    layers = [{"errors": {"copied": 0.5, "window": 0.3, "profile": 0.19}}] * 2
    (line,) = initialization_lines(layers)
    assert line.endswith("; kept: window + profile, error 0.190")
    other = {"errors": {"copied": 0.5, "window": 0.6, "profile": 0.7, "softmax heads, copied": 0.1}}
    several, softmax = initialization_lines([*layers, other])
    assert several.endswith("; kept: window + profile in 2 layers, copied in 1 layer, error 0.190")
    assert (
        softmax
        == "start of the softmax heads, relative error of the heads' outputs on held-out text, median layer: copied 0.100"
    )
    assert initialization_lines([]) == [] == hybrid_lines(None)


def test_the_ranks_of_a_cache_are_counted():
    chosen = {str(i): {"config": {"ranks": [8, 4] if i else [12]}, "rise": 0.02 * i} for i in range(3)}
    assert score_rank_lines(chosen)[0].endswith("loss 0.06 nats per token; kept: 8|4 in 2 layers, 12 in 1 layer")


def record(role, structure, error, name="model.layers.0.self_attn.o_proj"):
    counts = {"params_before": 4, "params_after": 4, "macs_before": 4, "macs_after": 4}
    return {"name": name, "roles": [role], "structure": {"structure": structure}, "error": error, **counts}


def test_a_matrix_that_was_not_replaced_shows_no_error():
    modules = [
        record("attention.output", "dense", 0.265),
        record("mlp.up", "low_rank", 0.1),
        record("mlp.up", "dense", 0.9),
    ]
    report = {"modules": modules, "mixers": [{"errors": {}}]}
    output, up = inspect_rows(report)
    assert output["is_dense"] and output["structures"] == {"not replaced": 1} and output["worst_error"] is None
    assert not up["is_dense"] and up["structures"] == {"low_rank": 1, "not replaced": 1} and up["worst_error"] == 0.1
    (line,) = attention_output_lines(report)
    assert "is not replaced" in line and "outputs of attention on held-out text: median 0.265" in line
    assert attention_output_lines({**report, "mixers": []}) == []


def test_structures_of_auto_are_counted():
    report = {
        "recipe": {"structure": "auto", "candidates": ["btt", "low_rank"]},
        "modules": [record("mlp.up", "btt", 0.1), record("mlp.up", "btt", 0.1), record("mlp.up", "low_rank", 0.1)],
    }
    assert structure_lines(report) == [
        "structure: auto, tried for each matrix: btt, low_rank; kept: btt for 2, low_rank for 1 of 3 matrices"
    ]
    assert structure_lines({**report, "recipe": {"structure": "btt"}}) == []


def test_tuning_names_the_epoch_that_was_kept():
    whole = {"start": 0.2, "end": 0.1, "unit": "nats of KL divergence per token", "epoch": 3}
    (line,) = tune_lines({"layers": 0, "model": 20, "whole": whole})
    assert line.endswith("before 0.2000; kept: epoch 3, 0.1000")
    (line,) = tune_lines({"layers": 0, "model": 20, "whole": {**whole, "epoch": 0}})
    assert line.endswith("; kept: the values before tuning, which no epoch improved")


class Counting(Progress):
    """Counts the ticks of each step by its title."""

    def __init__(self):
        self.counts = Counter()

    @contextmanager
    def bar(self, title, total):
        yield lambda steps=1: self.counts.update({title: steps})


def test_a_resumed_conversion_counts_its_finished_layers(checkpoints, calibration, tmp_path, monkeypatch):
    """Its rate and time left are those of the layers that remain."""
    recipe = make_recipe(structure="low_rank", keep=0.5, allocate="uniform", curvature="none", sweeps=0)
    recipe = recipe.model_copy(update={"calibration": str(calibration("llama"))})
    add = Journal.add

    def stop(self, step, **what):
        add(self, step, **what)
        if step == "piece":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(str(checkpoints("llama")), recipe, tmp_path / "out")
    shown = Counting()
    convert(str(checkpoints("llama")), recipe, tmp_path / "out", resume=True, progress=shown)
    assert shown.counts["converting layers"] == 2
