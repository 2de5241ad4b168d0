"""Experiments on time series, on both orders of masked attention, and on measured times: data, models, verdicts."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
import torch

from recipes.papers.experiments import forecasting, series, series_tokens, speed, two_orders
from recipes.papers.experiments.driver import main
from recipes.papers.experiments.sweep import Cell, is_complete, read_rows
from recipes.papers.experiments.times import faster_from, slope, words
from surgery.core.errors import SurgeryError


def write_csv(path, rows=400, header=("date", *series.COLUMNS), change=None):
    """A file as ETTh1.csv, of waves. change: (row, column) -> cell in its place."""
    values = series.made_series(rows).tolist()
    with open(path, "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(header)
        for n, line in enumerate(values):
            cells = [f"2016-07-01 {n:02}:00:00", *line]
            for (row, column), cell in (change or {}).items():
                if row == n:
                    cells[column] = cell
            lines.writerow(cells)
    return path


# -- data -------------------------------------------------------------------------------------------------
def test_a_file_of_series_is_read(tmp_path):
    path = write_csv(tmp_path / "a.csv")
    torch.testing.assert_close(series.read_csv(path, 400), series.made_series(400))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"header": ("date", "a", "b")}, "first line must be date,HUFL"),
        ({"rows": 100}, "has 100 rows, and 400 are needed"),
        ({"change": {(7, 3): "nan"}}, "line 9 must have a date and 7 finite numbers"),
        ({"change": {(7, 3): "1e7"}}, "line 9 must have"),
        ({"change": {(7, 3): "rain"}}, "line 9 must have"),
    ],
)
def test_another_file_is_refused(options, message, tmp_path):
    with pytest.raises(SurgeryError, match=message):
        series.read_csv(write_csv(tmp_path / "a.csv", **options), 400)


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(SurgeryError, match="must be a file"):
        series.read_csv(tmp_path / "none.csv", 1)
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SurgeryError, match="not a CSV file in UTF-8"):
        series.read_csv(tmp_path / "b.csv", 1)


def test_kernels_are_covariances_and_series_repeat():
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        covariance = series.random_covariance(24, generator)
        assert torch.equal(covariance, covariance.mT) and covariance.diagonal().max() == pytest.approx(1.0)
        assert torch.linalg.eigvalsh(covariance).min() > -1e-9
    bank = series.kernel_bank(70, 16, 3)
    series.kernel_bank.cache_clear()
    assert bank.shape == (70, 16) and torch.equal(series.kernel_bank(70, 16, 3), bank)


def test_tokens_are_bins_of_the_scaled_values():
    values = torch.tensor([[1.0, -3.0, 2.0, 100.0, -100.0]])  # the mean |x| of the first three is 2
    assert series.tokens(values, 3, 30).tolist() == [[15, 13, 16, 29, 0]]


def test_ranks_are_scaled_to_the_head():
    assert series.mlr_keys((48, 16), 64, 96)["ranks"] == [48, 16]
    assert series.mlr_keys((40, 16, 4, 4), 16, 96) == {
        "mixer": "mlr", "form": "nested", "ranks": [10, 4, 1, 1], "extents": [48, 24, 12],
    }  # fmt: skip
    assert sum(series.mlr_keys((32, 10, 8, 8, 4, 2), 8, 16)["ranks"]) == 8


# -- forecasts --------------------------------------------------------------------------------------------
def test_forecasting_needs_and_reads_a_file(tmp_path):
    out, path = tmp_path / "rows.jsonl", write_csv(tmp_path / "a.csv")
    with pytest.raises(SurgeryError, match="needs --data"):
        main(forecasting.EXPERIMENT, ["run", "--setting", "cpu", "--out", str(out), "--device", "cpu"])
    main(
        forecasting.EXPERIMENT,
        ["run", "--setting", "smoke", "--out", str(out), "--device", "cpu", "--data", str(path), "--minutes", "-1"],
    )
    task = forecasting.load_series(str(path), False, (200, 100, 100))
    torch.testing.assert_close(task[:200].mean(0), torch.zeros(7), atol=1e-5, rtol=0)
    torch.testing.assert_close(task[:200].std(0), torch.ones(7))
    assert not read_rows(out)


def test_windows_follow_each_other():
    hours = torch.arange(200.0)[:, None].expand(-1, 7)
    batch = forecasting.windows(hours, torch.tensor([3, 10]), 48)
    level = 3 + 48 - 24 + 11.5  # the mean of the last input day
    assert batch["values"][0, :, 0].tolist() == [n - level for n in range(3, 51)]
    assert batch["targets"][0, :, 6].tolist() == [n - level for n in range(51, 99)]


@pytest.mark.parametrize("method", ["softmax_24", "mlr_2_24", "mlr_4_24"])
def test_encoders_read_all_hours(method):
    model, macs = forecasting.make_encoder(forecasting.SMOKE, Cell(method, 16), 0)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter)
    x_BTC = torch.randn(1, 24, 7)
    other = x_BTC.clone()
    other[:, -1] += 3.0
    mask = torch.zeros(1, 1, 24, 24)
    assert (model(other, mask) - model(x_BTC, mask))[0, 0].abs().max() > 1e-4
    linears = 16 * 16 * 4 + 3 * 16 * 16
    scores = {"softmax_24": 24 * 8, "mlr_2_24": 24 * 6 + 12 * 2, "mlr_4_24": 24 * 4 + 12 * 2 + 6 + 3}[method]
    assert macs == linears + 2 * (scores + 24 * 8)


def rows_of(setting, values):
    """Rows of a complete sweep whose best rate is inside the grid. values(method, width, seed): what a run measured."""
    best = setting.rates[len(setting.rates) // 2]
    choosing = setting.choosing_seeds
    runs = [(rate, s) for rate in setting.rates for s in range(choosing)]
    runs += [(best, s) for s in range(choosing, setting.seeds)]
    rows = [
        {"setting": setting.name, "method": cell.method, "width": cell.width, "rate": rate, "seed": seed, "loss": 9.0,
         **(values(*cell, seed) if rate == best else {})}
        for cell in setting.cells for rate, seed in runs
    ]  # fmt: skip
    assert is_complete(rows, setting)
    return rows


@pytest.mark.parametrize("gain, word", [(-0.01, "reproduced"), (0.01, "refuted"), (0.0, "undecided")])
def test_verdict_of_forecasting(gain, word):
    setting = forecasting.EXPERIMENT.setting("gpu")

    def values(method, width, seed):
        name, horizon = forecasting.split_name(method)
        share = 0.0 if name == "softmax" else gain * horizon / 336 + 1e-3 * (-1) ** seed
        return {"loss": 1.0, "mae_oil": (1 + 0.1 * seed) * (1 + share)}

    verdict = forecasting.EXPERIMENT.judge(rows_of(setting, values), setting)
    assert verdict.word == word and "mlr_4 / softmax - 1 at 336 hours" in verdict.found


@pytest.mark.parametrize(
    "gain, share, word",
    [(0.0, 0.9, "reproduced"), (0.0, 1.1, "in part"), (0.01, 0.9, "not seen at this size"), (0.005, 0.9, "undecided")],
)
def test_verdict_of_series_tokens(gain, share, word):
    setting = series_tokens.EXPERIMENT.setting("gpu")

    def values(method, width, seed):
        mlr = method == "mlr"
        noise = 1e-4 * (-1) ** seed if mlr else 0.0
        return {"loss": (3 + 0.1 * seed) * (1 + gain * mlr + noise), "macs": width * (share if mlr else 1)}

    assert series_tokens.EXPERIMENT.judge(rows_of(setting, values), setting).word == word


def test_rows_of_series_are_scored_on_a_file(tmp_path):
    setting = series_tokens.SMOKE
    path = write_csv(tmp_path / "a.csv")
    setting = replace(setting, options={**setting.options, "data": str(path)})
    rows = series_tokens.SeriesRows(setting, torch.device("cpu"))
    both = rows.batch(1, 0, 6)["ids"]
    assert both.shape == (6, 19) and torch.equal(rows.batch(1, 4, 2)["ids"], both[4:])
    assert rows.held_out.shape == rows.real.shape == (4, 19) and int(rows.real.max()) < 30


# -- both orders ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", two_orders.MASK_NAMES)
def test_products_of_masks(method):
    torch.manual_seed(0)
    mask, z = two_orders.make_mask(method, 70), torch.randn(70, 3, dtype=torch.float64)
    torch.testing.assert_close(mask.product(z), mask.dense().double() @ z, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "error, power, word", [(1e-14, 1, "reproduced"), (1e-9, 1, "refuted"), (1e-14, 2, "undecided")]
)
def test_verdict_of_two_orders(error, power, word):
    setting = two_orders.EXPERIMENT.setting("cpu")

    def values(method, length, seed):
        return {"loss": error, "quadratic_ms": length**2 * (1 + 0.01 * seed), "linear_ms": 500 * length**power}

    assert two_orders.EXPERIMENT.judge(rows_of(setting, values), setting).word == word


# -- measured times ---------------------------------------------------------------------------------------
def test_slopes_and_crossings():
    quadratic, linear = {n: n**2 / 100 for n in (1, 10, 100, 1000)}, {n: float(n) for n in (1, 10, 100, 1000)}
    assert slope(quadratic).alpha == pytest.approx(2.0) and slope(linear, 100) is None
    assert faster_from(linear, quadratic) == 1000 and faster_from(quadratic, linear) is None
    assert words(1000, linear, quadratic) == "from 1,000" and words(None, linear, quadratic) == "nowhere up to 1,000"
    assert words(1, linear, linear) == "at every length from 1" and words(None, {}, linear) == "no common length"


def page_of(cells):
    head = "| | 4,096 | 16,384 | 32,768 | 65,536 |\n| --- | --- | --- | --- | --- |\n"
    lines = "".join(f"| {name} | {' | '.join(own)} |\n" for name, own in cells.items())
    return "".join(f"\n### attention, {kind}\n\n{head}{lines}\n" for kind in speed.PASSES)


LINEAR, QUADRATIC = ["1 x", "4.00 1.5x 3%", "8", "16"], ["2", "32", "128", "512"]


@pytest.mark.parametrize("ours, rival, words", [(LINEAR, QUADRATIC, "reproduced"), (QUADRATIC, LINEAR, "refuted")])
def test_verdicts_of_speed_follow_from_the_page(ours, rival, words, tmp_path):
    path = tmp_path / "page.md"
    cells = {speed.FLASH: rival, speed.CUDNN: ["-", *rival[1:]], speed.LOG_LINEAR_KERNEL: ours, speed.TBM_KERNEL: ours,
             speed.MHLA: rival, speed.SSD: LINEAR}  # fmt: skip
    path.write_text(page_of(cells))
    kernel, *forecast, toeplitz = (claim.verdict.word for claim in speed.claims(speed.read_tables(path)))
    assert kernel == toeplitz == words and forecast == ["undecided: GPU time"] * 2
    text = speed.section(path)
    assert "| log-linear Mamba-2 | " in text and "forecast" in text


@pytest.mark.parametrize("cell", ["fast", "0", "1e9", "1" * 30])
def test_a_damaged_page_is_refused(cell, tmp_path):
    path = tmp_path / "page.md"
    path.write_text(page_of({speed.FLASH: [cell, "1", "2", "3"]}))
    with pytest.raises(SurgeryError, match="must begin with milliseconds"):
        speed.read_tables(path)
    path.write_text("no tables")
    with pytest.raises(SurgeryError, match="must have one table"):
        speed.read_tables(path)


def test_the_committed_page_has_the_tables(capsys):
    speed.main(["show"])
    shown = capsys.readouterr().out
    assert "| TBM, R = 8 | 0.97" in shown and "right: log-linear Mamba-2" in shown
