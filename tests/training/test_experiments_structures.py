"""Experiments of recipes/papers/experiments on structures in ViTs, MLPs and GPT-2, and on the best rate by width:
models, counts, verdicts.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recipes.papers.experiments import (
    cores,
    rate_transfer,
    recall,
    regression,
    scaling,
    structured_head,
    tuned_rates,
    vision,
)
from recipes.papers.experiments.characters import at_equal_macs
from recipes.papers.experiments.driver import show
from recipes.papers.experiments.sweep import (
    Cell,
    append_rows,
    gpu_minutes,
    is_complete,
    read_rows,
    run_sweep,
    stack_size,
)
from surgery.structures.tensor_train import BlockTensorTrainLinear, TensorTrainLinear

MODULES = (cores, vision, tuned_rates, structured_head, rate_transfer)


def rows_of(setting, values):
    """Rows of a complete sweep whose best rate is inside the grid. values(method, width, seed): what a run measured."""
    best = setting.rates[len(setting.rates) // 2]
    choosing = setting.choosing_seeds
    runs = [(rate, s) for rate in setting.rates for s in range(choosing)]
    runs += [(best, s) for s in range(choosing, setting.seeds)]
    rows = [
        {"setting": setting.name, "method": cell.method, "width": cell.width, "rate": rate, "seed": seed,
         **(values(*cell, seed) if rate == best else {"loss": 99.0, "macs": 1})}
        for cell in setting.cells for rate, seed in runs
    ]  # fmt: skip
    assert is_complete(rows, setting)
    return rows


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.EXPERIMENT.name)
def test_settings(module):
    """A GPU setting without rows has a forecast below an hour, and the sources are figures of the paper."""
    experiment = module.EXPERIMENT
    for setting in experiment.settings:
        if setting.where == "gpu":
            verdict = experiment.judge([], setting)
            assert verdict.word == "undecided: GPU time" and "forecast" in verdict.why
            assert 0 < gpu_minutes(setting, experiment.heads, lambda cell: 4) < 60
        else:
            assert experiment.judge([], setting).word == "undecided"


SHORT = [
    *((module, "gpu_short") for module in (scaling, cores, vision, tuned_rates, structured_head)),
    (rate_transfer, "gpu_128"),
    (regression, "gpu_4"),
    (recall, "gpu_32_warm"),
]


@pytest.mark.parametrize("module, name", SHORT, ids=lambda value: getattr(value, "__name__", value))
def test_short_settings_can_decide(module, name):
    """A few minutes, rates chosen on two seeds, and more seeds for the intervals."""
    experiment = module.EXPERIMENT
    setting = experiment.setting(name)
    assert gpu_minutes(setting, experiment.heads, stack_size(setting, experiment.heads, 60.0)) <= 8
    assert setting.choosing_seeds >= 2 and setting.seeds >= 4 and not setting.as_printed


@pytest.mark.parametrize("module", [scaling, vision])
def test_short_settings_have_dense_widths_within_the_compute_of_btt(module):
    setting = module.EXPERIMENT.setting("gpu_short")
    make = scaling.make_mlp if module is scaling else vision.make_vit
    macs = {cell: make(setting, cell, 0).macs() for cell in setting.cells}
    btt = [count for cell, count in macs.items() if cell.method == "btt"]
    compared = sorted(setting.widths)[scaling.MATCHED :]
    assert any(min(btt) <= macs[Cell("dense", width)] <= max(btt) for width in compared)


@pytest.mark.parametrize("a, b", cores.PAIRS)
def test_the_short_setting_of_cores_compares_every_pair_at_two_widths(a, b):
    setting = cores.EXPERIMENT.setting("gpu_short")
    macs = {cell: scaling.make_mlp(setting, cell, 0).macs() for cell in setting.cells}
    rival = [count for cell, count in macs.items() if cell.method == b]
    assert sum(min(rival) <= count <= max(rival) for cell, count in macs.items() if cell.method == a) >= 2


# -- models ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["dense", "btt"])
def test_the_vit_starts_at_zero_and_pays_its_macs(method):
    setting = replace(vision.EXPERIMENT.setting("cpu"), layers=2)
    model, width = vision.make_vit(setting, Cell(method, 32), 0), 32
    images = torch.randn(2, setting.options["dims"])
    assert float(model(images).detach().abs().max()) == 0.0
    if method == "dense":
        with FlopCounterMode(display=False) as counter:
            model(images[:1])
        assert counter.get_total_flops() == 2 * model.macs()
    else:
        dense = vision.make_vit(setting, Cell("btt", width), 0, attention="dense")
        assert isinstance(dense.attention[0].query, torch.nn.Linear) and dense.macs() > model.macs()


def test_patches_share_the_large_values():
    """Value k of an image is in patch k mod 8."""
    model = vision.make_vit(replace(vision.EXPERIMENT.setting("cpu"), layers=0), Cell("dense", 16), 0)
    torch.nn.init.ones_(model.classifier.weight)
    seen = []
    model.input.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    model(torch.arange(64.0)[None])
    assert (seen[0] / 8**0.5).allclose((torch.arange(8)[:, None] + 8.0 * torch.arange(8))[None])


def test_only_the_cores_have_other_rates():
    model = tuned_rates.make_model(tuned_rates.EXPERIMENT.setting("cpu"), Cell("aware", 128), 0)
    aware, naive = (scaling.rate_factors(model, naive) for naive in (False, True))
    changed = {name for name in aware if aware[name] != naive[name]}
    assert changed == {
        f"{part}.{i}.{core}" for part in ("up", "down") for i in range(3) for core in ("weight", "right")
    }
    assert naive["up.0.right"] == 0.5 == aware["attention.0.query.weight"] < aware["up.0.right"]


def test_names_of_cores():
    linear = scaling.make_linear("btt_c3_r2", 64, 64)
    assert isinstance(linear, BlockTensorTrainLinear) and linear.config.cores == 3
    assert isinstance(scaling.make_linear("tt_c2_r4", 64, 64), TensorTrainLinear)
    two, btt = scaling.make_linear("btt_c2_r1", 64, 64), scaling.make_linear("btt", 64, 64)
    assert two.macs() == btt.macs() == 2 * 64**1.5 and scaling.make_linear("btt_c3_r1", 64, 64).macs() == 3 * 64 * 4
    with pytest.raises(KeyError):
        scaling.make_linear("btt_c3", 64, 64)


def test_ranks_are_those_of_the_paper():
    """Appendix E.2: sqrt(min(in, out)) for low rank in MLPs and 0.1 min(in, out) in ViTs, and TT of two cores with 16
    and 8.
    """
    assert scaling.make_linear("low_rank", 256, 64).config.rank == 8
    assert scaling.make_linear("low_rank_tenth", 256, 64).config.rank == 6
    methods = {m for module in (scaling, vision) for s in module.SETTINGS for m in s.methods}
    assert {"tt_c2_r16", "tt_c2_r8", "low_rank", "low_rank_tenth", "kronecker", "btt_4", "btt_naive"} <= methods


def test_naive_rates_of_a_vit_are_those_of_dense_layers():
    setting = replace(vision.SMOKE, methods=("btt_naive",))
    model = vision.make_vit(setting, Cell("btt_naive", 64), 0)
    naive, aware = (scaling.rate_factors(model, naive)["attention.0.query.right"] for naive in (True, False))
    assert naive == 1.0 < aware
    setting = replace(setting, steps=12)
    losses = {
        m: vision.train(setting, Cell(m, 16), [(1e-2, 0)], torch.device("cpu"))[0]["loss"] for m in ("btt_naive", "btt")
    }
    assert losses["btt_naive"] != losses["btt"]


def test_words_are_pairs_of_characters():
    ids = torch.tensor([[1, 2, 96, 96]])
    assert structured_head.words(ids, 97).tolist() == [[99, 97**2 - 1]]
    assert structured_head.words(ids, 32).tolist() == [[34, 0]]
    model = structured_head.make_model(structured_head.SMOKE, Cell("btt", 16), 0)
    head = model.get_output_embeddings()
    assert head.out_features == 16**2 and head.config.rank == 2 and head.config.name == "btt"


# -- the sweep ------------------------------------------------------------------------------------------
def test_every_rate_trains_every_seed(tmp_path):
    setting, out = (
        replace(rate_transfer.SMOKE, rates=(1e-3, 1e-2, 1e-1), seeds=3, methods=("mlr",)),
        tmp_path / "rows.jsonl",
    )

    def train(setting, cell, runs, device):
        return [
            {"setting": setting.name, "method": cell.method, "width": cell.width, "rate": r, "seed": s,
             "loss": abs(r - 1e-2)}
            for r, s in runs
        ]  # fmt: skip

    assert run_sweep(setting, train, out, "cpu", stack=lambda cell: 4, say=lambda text: None)
    rows = read_rows(out)
    assert len(rows) == setting.runs == 2 * 3 * 3 and is_complete(rows, setting)
    assert not is_complete(rows[:-1], setting) and is_complete(rows[:-1], replace(setting, every_rate=False))
    append_rows(out, [])


# -- verdicts -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "three, rank, word",
    [(0.05, 0.05, "reproduced"), (0.0, 0.0, "reproduced"), (-0.1, 0.0, "not seen at this size"),
     (0.0, -0.1, "not seen at this size")],
)  # fmt: skip
def test_cores(three, rank, word):
    setting = cores.EXPERIMENT.setting("gpu")
    gains = {cores.THREE: three, cores.FOUR: three, cores.RANK: three + rank}

    def values(method, width, seed):
        return {"macs": width**2, "loss": (2 - math.log(width) / 10) * (1 + gains.get(method, 0) + 1e-4 * seed)}

    rows = rows_of(setting, values)
    verdict = cores.EXPERIMENT.judge(rows, setting)
    assert verdict.word == word and "btt_c3_r1 - btt_c2_r1" in verdict.found
    assert cores.EXPERIMENT.judge([{**r, "loss": None} for r in rows], setting).word == "undecided"


@pytest.mark.parametrize(
    "gap, noise, word", [(0.1, 0.0, "reproduced"), (-0.1, 0.0, "not seen at this size"), (0.0, 0.1, "undecided")]
)
def test_tuned_rates(gap, noise, word):
    setting = tuned_rates.EXPERIMENT.setting("cpu")

    def values(method, width, seed):
        return {"loss": 1.0 + 0.01 * seed + (method == "naive") * (gap + noise * (-1) ** seed)}

    rows = rows_of(setting, values)
    assert tuned_rates.EXPERIMENT.judge(rows, setting).word == word
    best = setting.rates[len(setting.rates) // 2]
    moved = [{**r, "rate": {best: setting.rates[-1], setting.rates[-1]: best}.get(r["rate"], r["rate"])} for r in rows]
    assert "end of the grid" in tuned_rates.EXPERIMENT.judge(moved, setting).why


def test_heads_have_64_dimensions_at_every_width():
    """Compute Better Spent, G.2, and the ViTs: wider models have more heads, not wider ones."""
    setting = structured_head.EXPERIMENT.setting("gpu")
    setting = replace(setting, layers=1, options=setting.options | {"classes": 8})
    for cell in setting.cells:
        config = structured_head.make_model(setting, cell, 0).config
        assert config.n_embd == cell.width and config.n_head == cell.width // 64 == structured_head.heads(cell)
    for cell in vision.EXPERIMENT.setting("gpu").cells:
        small = replace(vision.EXPERIMENT.setting("gpu"), layers=1)
        with torch.device("meta"):
            attention = vision.PatchAttention(vision.make_vit(replace(small, layers=0), cell, 0).shape)
        assert attention.head == 64 and attention.query.out_features == cell.width


@pytest.mark.parametrize(
    "whole, body, word",
    [(-0.2, 0.0, "reproduced"), (-0.2, -0.2, "in part"), (0.2, 0.0, "not seen at this size")],
)
def test_structured_head(whole, body, word):
    """Losses on one line in log MACs with a slope of -1; the shares of the head are such that the gaps are as given."""
    setting = replace(structured_head.EXPERIMENT.setting("gpu"), options={})

    def values(method, width, seed):
        ours = method == "btt"
        loss = 20 - math.log(width) + 0.001 * seed
        return {
            "loss": loss + 0.0005 * ours * (-1) ** seed,
            "macs": round(1e9 * width * math.exp(body * ours)),
            "macs_with_head": round(1e9 * width * math.exp(whole * ours)),
        }

    rows = rows_of(setting, values)
    verdict = structured_head.EXPERIMENT.judge(rows, setting)
    found = at_equal_macs(structured_head.best_rows(rows, setting), "btt", "dense", "macs_with_head")
    assert verdict.word == word and found.mean == pytest.approx(whole, abs=1e-3)


def test_rate_transfer_shows_a_part_of_a_sweep(tmp_path):
    """Cells without rows have no line; the verdict and the plot say how many runs there are."""
    setting, path = rate_transfer.EXPERIMENT.setting("gpu_128"), tmp_path / "rows.jsonl"
    cell = Cell("mlr", 256)
    shared = {"setting": setting.name, "method": cell.method, "width": cell.width, "macs": 1}
    append_rows(path, [{**shared, "rate": rate, "seed": 0, "loss": (rate - 4e-3) ** 2} for rate in setting.rates])
    text = show(rate_transfer.EXPERIMENT, [path], tmp_path / "plot.png")
    assert "| mlr | 256 |" in text and "| mlr | 64 |" not in text and "softmax" not in text.split("Setting")[1]
    assert "`gpu_128`: undecided: GPU time (7 of 140 runs;" in text and (tmp_path / "plot.png").is_file()
    rows = read_rows(path)
    assert rate_transfer.losses_by_seed(rows, setting, Cell("mlr", 64)) == {}
    assert rate_transfer.best_rate(rows, setting, cell) == 4e-3 and not is_complete(rows, setting)


@pytest.mark.parametrize("moved, word", [(0.0, "reproduced"), (3.0, "refuted"), (1.5, "undecided")])
def test_rate_transfer(moved, word):
    """The shift is that of MLR attention; bilinear scores decide nothing, and softmax only what is refuted."""
    setting = rate_transfer.EXPERIMENT.setting("gpu")
    widest, moving = max(setting.widths), {"mlr", "bilinear_btt"}

    def loss(method, width, rate, seed):
        center = math.log2(setting.rates[1]) + 0.2 * seed + moved * (width == widest and method in moving)
        return (math.log2(rate) - center - 0.1 * (-1) ** seed * (width == widest)) ** 2

    def rows_at():
        return [
            {"setting": setting.name, "method": c.method, "width": c.width, "rate": rate, "seed": seed, "loss": loss(*c, rate, seed)}
            for c in setting.cells for rate in setting.rates for seed in range(setting.seeds)
        ]  # fmt: skip

    rows = rows_at()
    verdict = rate_transfer.EXPERIMENT.judge(rows, setting)
    assert verdict.word == word
    assert rate_transfer.shift(rows, setting, "mlr").mean == pytest.approx(
        moved / 3, abs=0.05
    )  # three doublings of the width
    moving = {"softmax", "mlr"}
    assert rate_transfer.EXPERIMENT.judge(rows_at(), setting).word == word.replace("refuted", "not seen at this size")
