"""Estimates: counts on the meta device equal counts on real tensors, follow the recipe, and agree with the memory of a
conversion.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from helpers import random_llama
from helpers.small import matrix_structures, run_python

import surgery
from surgery.architectures.linears import LinearInfo
from surgery.conversion.estimation.counting import OperationCounter, Work, counted_as
from surgery.conversion.estimation.fits import FitTask, StageTask, bare_target, count_projection, count_stage
from surgery.conversion.estimation.shape import TextRows
from surgery.core.errors import NumericalError, SurgeryError
from surgery.planning.targets import LinearTarget
from surgery.structures import STRUCTURES, StructureConfig
from surgery.structures.base import config_from_dict
from surgery.structures.btt import BTT, SWEEP_ELEMENTS
from surgery.structures.low_rank import LowRank, LowRankLinear

OPTIONS = {"btt": {"blocks": [2, 2]}, "kronecker": {"blocks": [2, 2]}}
INFO = LinearInfo("w", ("mlp.gate",), "layer", 0, 1, 64, 32, False, False)


def make_plan(tmp_path, recipe="btt-half", **options):
    config = random_llama.make_config("tiny")
    if not (tmp_path / "source").exists():
        (tmp_path / "source").mkdir()
        (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    return surgery.plan(str(tmp_path / "source"), recipe, **{"tune": False, **options})["estimate"]


def test_products_and_memory_are_counted_by_their_shapes():
    with counted_as("cpu") as counter:
        x, w = torch.zeros(8, 4, device="meta"), torch.zeros(4, 16, device="meta")
        before, held = counter.mark(), counter.held
        y = x @ w
        assert counter.work.minus(before) == Work(products=2 * 8 * 4 * 16)
        assert counter.held - held == 4 * y.numel()
        del y
        assert counter.held == held and counter.peak == held + 4 * 8 * 16
        torch.linalg.eigh(torch.zeros(3, 16, 16, device="meta"))
        assert counter.work.roots == 3 * 16**3 and counter.work.small_roots == 3
    assert "meta" not in SWEEP_ELEMENTS


def test_placeholders_on_meta_take_no_memory_until_they_are_written():
    with OperationCounter() as counter:
        empty = torch.empty(100, device="meta")
        assert counter.held == 0
        empty.zero_()
        assert counter.held == 400


@pytest.mark.parametrize("config", [BTT((4, 4)), LowRank()])
def test_sweeps_and_tokens_add_work(config):
    target = bare_target(LinearTarget(INFO, 64, 0.5, (config,)))
    tasks = (FitTask(target, True, False),)
    stage = StageTask(tasks, "cpu", 256, 64, 64, 1, 0, True, 1, 0.01, 0)
    one = count_stage(stage)
    six = count_stage(StageTask(tasks, "cpu", 512, 64, 64, 1, 0, True, 6, 0.01, 0))
    assert (six.fits[0].products > one.fits[0].products) == isinstance(config, BTT)  # low rank needs no sweeps
    assert six.moments[0].products == 2 * one.moments[0].products
    assert six.dense == one.dense == 4 * 64 * 32
    assert count_projection(target, "cpu")[0].roots > 0


def test_the_second_sweep_stands_for_the_later_ones():
    """Work of the fit is linear in the number of sweeps from the second one on."""
    task = FitTask(bare_target(LinearTarget(INFO, 64, 0.5, (BTT((4, 8)),))), True, False)
    two, three, six = (
        count_stage(StageTask((task,), "cpu", 256, 64, 64, 1, 0, True, sweeps, 0.01, 0)) for sweeps in (2, 3, 6)
    )
    step = three.fits[0].minus(two.fits[0])
    assert step.products > 0 and six.peak == three.peak == two.peak
    assert astuple(six.fits[0]) == pytest.approx(astuple(two.fits[0] + step.times(4)), rel=1e-12)


@pytest.mark.parametrize("full_gram", [True, False])
def test_two_steps_of_a_sweep_stand_for_its_loop_over_column_blocks(full_gram, monkeypatch):
    from surgery.conversion.estimation import fits
    from surgery.structures import btt

    task = FitTask(bare_target(LinearTarget(INFO, 64, 0.5, (BTT((4, 8)),))), full_gram, False)
    stage, steps = StageTask((task,), "cpu", 256, 64, 64, 1, 0, True, 2, 0.01, 0), []
    sampled = fits.count_stage.__wrapped__(stage)
    monkeypatch.setattr(btt, "sampled_steps", lambda count, is_meta: steps.append(count) or range(count))
    whole = fits.count_stage.__wrapped__(stage)
    assert 8 in steps and whole.peak == sampled.peak
    assert astuple(sampled.fits[0]) == pytest.approx(astuple(whole.fits[0]), rel=1e-12)


def test_rows_are_divided_as_in_a_conversion():
    from surgery.calibration.data import CalibrationSet

    for tokens, length, share in ((2048, 64, 0.125), (256, 64, 0.125), (4096, 1024, 0.5)):
        samples = CalibrationSet.from_inputs(
            {"input_ids": torch.zeros(tokens // length, length, dtype=torch.long)}, share
        )
        rows = TextRows.of(tokens, length, share)
        assert (rows.fit, rows.held) == (samples.n_fit, samples.rows - samples.n_fit)


def test_the_estimate_follows_the_recipe_and_the_processes(tmp_path):
    plain = make_plan(tmp_path, "low-rank-half", device="cpu")
    names = [step["name"] for step in plain["steps"]]
    assert names == ["budgets", "trial", "layers", "write"]
    tuned = make_plan(tmp_path, "low-rank-half", device="cpu", tune={"layers": 2, "model": 1})
    assert [step["name"] for step in tuned["steps"]][3:5] == ["tune layers", "tune model"]
    assert tuned["seconds"][1] > plain["seconds"][1]
    longer = make_plan(tmp_path, "low-rank-half", device="cpu", tokens=65536)
    assert longer["seconds"][0] > plain["seconds"][0] and longer["peak_host"] > plain["peak_host"]
    shared = make_plan(tmp_path, "low-rank-half", device="h200", processes=4)
    alone = make_plan(tmp_path, "low-rank-half", device="h200")
    assert shared["seconds"][1] < alone["seconds"][1] and alone["peak_device"] > 0
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)  # of the machine that plans, not of the GPU
        assert make_plan(tmp_path, "low-rank-half", device="h200")["seconds"] == alone["seconds"]
    finally:
        torch.set_num_threads(threads)
    free = make_plan(tmp_path, "low-rank-half", device="cpu", calibrated=False)
    assert [step["name"] for step in free["steps"]] == ["layers", "write"]


def test_the_estimate_has_the_trials_that_run(tmp_path):
    names = {
        allocate: [
            step["name"] for step in make_plan(tmp_path, "low-rank-half", device="cpu", allocate=allocate)["steps"]
        ]
        for allocate in ("measured", "uniform")
    }
    assert "trial" in names["measured"] and "trial" not in names["uniform"]


@pytest.mark.parametrize("unit", ["layers", "heads"])
def test_hybrids_are_estimated(tmp_path, unit):
    attention = {"mixer": "linear", "mask": "decay", "hybrid": {"softmax": 0.5, "unit": unit}}
    found = make_plan(tmp_path, {"structure": "dense", "attention": attention}, device="cpu")
    assert [step["name"] for step in found["steps"]] == ["hybrid", "mixers", "layers", "write"]
    assert all(step["seconds"][1] > 0 for step in found["steps"])


def test_unknown_devices_are_refused(tmp_path):
    with pytest.raises(SurgeryError, match="speeds are known of cpu, h200"):
        make_plan(tmp_path, device="h201")
    with pytest.raises(SurgeryError, match="--processes must be at least 1"):
        make_plan(tmp_path, processes=0)


class UncountedLinear(LowRankLinear):
    """Low rank by a least-squares solver, for which PyTorch has no kernel on the meta device."""

    error = None  # raised instead, if there is one

    @classmethod
    def project(cls, weight_OI, config, metric=None):
        if cls.error is not None:
            raise cls.error
        right_RI = torch.randn(config.rank, weight_OI.shape[1], generator=torch.Generator().manual_seed(0))
        left_OR = torch.linalg.lstsq(right_RI.mT.to(weight_OI.device), weight_OI.mT).solution.mT
        return cls.from_cores(config, weight_OI.shape, {"weight": left_OR[None], "right": right_RI})


@dataclass(frozen=True)
class UncountedConfig(StructureConfig):
    name: ClassVar[str] = "uncounted"
    rank: int | None = None


@pytest.fixture
def uncounted(monkeypatch):
    """Register a structure of the user whose fit does not run on the meta device."""
    list(STRUCTURES)  # fill the registry first
    for table in ("_by_config", "_by_name"):
        monkeypatch.setattr(STRUCTURES, table, dict(getattr(STRUCTURES, table)))
    return STRUCTURES.register(UncountedConfig)(UncountedLinear)


def test_a_structure_that_cannot_be_counted_is_planned_and_converted_without_an_estimate(
    checkpoints, calibration, tmp_path, uncounted
):
    recipe = {"structure": "uncounted", "keep": 0.5, "allocate": "uniform"}
    plan = surgery.plan(checkpoints("llama"), recipe, device="cpu")
    assert "the fit of uncounted" in plan["estimate"]["unknown"] and "linalg_lstsq" in plan["estimate"]["unknown"]
    assert "seconds" not in plan["estimate"] and plan["tune"] is None
    assert "time and memory cannot be estimated: the fit of uncounted" in plan._repr_html_()
    surgery.convert(checkpoints("llama"), recipe, tmp_path / "out", calibration=calibration("llama"))
    given = surgery.plan(checkpoints("llama"), {**recipe, "tune": {"layers": 2, "model": 1}}, device="cpu")
    assert (given["tune"]["layers"], given["tune"]["model"]) == (2, 1) and given["tune"]["seconds"] >= 0


@pytest.mark.parametrize("error", [ValueError("shapes"), RecursionError(), NumericalError("singular")])
def test_any_error_of_a_count_is_a_sentence(checkpoints, uncounted, monkeypatch, error):
    monkeypatch.setattr(uncounted, "error", error)
    plan = surgery.plan(checkpoints("llama"), {"structure": "uncounted", "keep": 0.5, "allocate": "uniform"})
    assert type(error).__name__ in plan["estimate"]["unknown"] or "singular" in plan["estimate"]["unknown"]


def test_a_count_raises_the_errors_that_the_conversion_would_raise(checkpoints, uncounted, monkeypatch):
    monkeypatch.setattr(uncounted, "error", SurgeryError("rank 3 does not suit this matrix"))
    with pytest.raises(SurgeryError, match="rank 3 does not suit"):
        surgery.plan(checkpoints("llama"), {"structure": "uncounted", "keep": 0.5, "allocate": "uniform"})


@pytest.mark.parametrize("name", matrix_structures())
def test_every_structure_of_the_package_is_counted(name):
    """A fit that stops running on the meta device raises here; in a plan it would only lose the estimate."""
    linear = replace(INFO, out=16, in_=16)
    target = bare_target(
        LinearTarget(linear, 16, 0.75, (config_from_dict({"structure": name, **OPTIONS.get(name, {})}),))
    )
    assert count_projection(target, "cpu")[1] > 0
    stage = StageTask((FitTask(target, True, False),), "cpu", 64, 16, 16, 1, 0, False, 1, 0.01, 0)
    assert count_stage(stage).fits[0] != Work()


MEASURE = """
import json, sys
sys.path.insert(0, "{helpers}")
import check_estimate
print(json.dumps(check_estimate.convert("{source}", "btt-half", {overrides}, False)))
"""


@pytest.mark.slow
def test_memory_of_a_conversion_is_as_estimated(tmp_path, monkeypatch):
    """Tensors held at the peak of a calibrated conversion, as the profiler records them, and the size of the result."""
    monkeypatch.setitem(random_llama.SHAPES, "small", (4, 512, 2048, 8, 4, 8000, True))
    random_llama.write_checkpoint(tmp_path / "small", "small", tokens=4096, length=256)
    keys = {"tokens": 4096, "length": 256, "tune": False}
    estimate = surgery.plan(str(tmp_path / "small"), "btt-half", device="cpu", **keys)["estimate"]
    overrides = [*(f"{k}={v}" for k, v in keys.items()), f"calibration={tmp_path / 'small-calibration.safetensors'}"]
    code = MEASURE.format(
        helpers=random_llama.__file__.rpartition("/")[0], source=tmp_path / "small", overrides=overrides
    )
    done = run_python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert abs(estimate["peak_tensors"] / measured["peak"] - 1) < 0.3
    assert abs(estimate["disk"]["result"] / measured["result"] - 1) < 0.02


def test_no_conversion_depends_on_an_estimate():
    """Estimates serve plans; what a conversion does follows from its recipe and its text."""
    folder = Path(surgery.__file__).parent / "conversion"
    modules = [file for file in folder.rglob("*.py") if "estimation" not in file.parts]
    assert len(modules) > 20
    assert not [file.name for file in modules if "conversion.estimation" in file.read_text(encoding="utf-8")]
