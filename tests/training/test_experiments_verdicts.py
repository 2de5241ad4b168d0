"""Verdicts of recipes/papers/experiments follow from the rows; parts of a sweep; rows of text; how matrices are
compared.
"""

from __future__ import annotations

import argparse
import math
import threading

import pytest
import torch

from recipes.papers.experiments import block_mixing, characters, language, needles, recall, updates, weight_norm
from recipes.papers.experiments.driver import main, parse_part
from recipes.papers.experiments.sweep import Cell, Turns, is_complete, key_of, read_rows, run_sweep, split_cells
from recipes.papers.experiments.text import CodeRows, code_tokens, octaves, token_table
from surgery.core.errors import SurgeryError

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def rows_of(setting, values):
    """Rows of a complete sweep whose best rate is inside the grid. values(method, width, seed): what a run measured."""
    best = setting.rates[len(setting.rates) // 2]
    choosing = setting.choosing_seeds
    runs = [(rate, s) for rate in setting.rates for s in range(choosing)]
    runs += [(best, s) for s in range(choosing, setting.seeds)]
    rows = [
        {"setting": setting.name, "method": cell.method, "width": cell.width, "rate": rate, "seed": seed,
         **({"loss": 0.0, **values(*cell, seed)} if rate == best else {"loss": 99.0})}
        for cell in setting.cells for rate, seed in runs
    ]  # fmt: skip
    assert is_complete(rows, setting)
    return rows


@pytest.mark.parametrize(
    "dense, toeplitz, word",
    [(0.4, 0.6, "reproduced"), (0.6, 0.4, "not seen at this size"), (0.5, 0.5, "in part"), (0.01, 0.02, "undecided")],
)
def test_block_mixing(dense, toeplitz, word):
    setting = block_mixing.EXPERIMENT.setting("gpu_128")

    def values(method, width, seed):
        base = toeplitz if method.startswith("tbm") else dense if method == "mhla" else 0.005
        noise = 0.01 * (-1) ** seed if dense == toeplitz and method == "mhla" else 0.0
        accuracy = base + 1e-5 * seed + noise
        return {"accuracy": accuracy, "by_length": {"8": accuracy}, "floors": [0.1, 0.2]}

    verdict = block_mixing.EXPERIMENT.judge(rows_of(setting, values), setting)
    assert verdict.word == word and "tbm_1 - tbm_8: +0" in verdict.besides
    learns = "5 of 5 seeds, which answer" if toeplitz > 0.25 else "0 of 5 seeds;"
    assert f"tbm_8 learns in {learns}" in verdict.besides


def test_runs_that_learn():
    setting = block_mixing.EXPERIMENT.setting("gpu_128")

    def values(method, width, seed):
        return {"accuracy": 0.9 if seed < 2 else 0.05, "by_length": {}, "floors": [0.1, 0.2]}

    line = next(line for line in block_mixing.table(rows_of(setting, values), setting) if line[0] == "mhla")
    assert line[1] == "39.0 ± 20.8" and line[2:4] == ["2 of 5", "90.0"]


@pytest.mark.parametrize("gain, word", [(-0.01, "reproduced"), (0.01, "not seen at this size"), (0.0, "undecided")])
def test_characters(gain, word):
    """At equal compute: MLR takes 10% fewer MACs than softmax, and its loss is on softmax's line plus the gain."""
    setting = characters.EXPERIMENT.setting("gpu_256")

    def values(method, width, seed):
        macs = round(width**2 * {"softmax": 1.0, "mlr": 0.9}.get(method, 0.8))
        noise = 0.003 * (-1) ** seed if method == "mlr" and not gain else 0.0
        return {"macs": macs, "loss": -math.log(macs) / 10 + gain * (method == "mlr") + noise}

    verdict = characters.EXPERIMENT.judge(rows_of(setting, values), setting)
    assert verdict.word == word and "mlr - softmax" in verdict.found
    assert characters.loss_at([(10, 1.0), (1000, 3.0)], 100) == pytest.approx(2.0)
    assert characters.loss_at([(10, 1.0), (1000, 3.0)], 1001) is None


@pytest.mark.parametrize(
    "early, late, word",
    [
        (-0.01, -0.02, "reproduced"),
        (-0.02, -0.01, "in part"),  # better everywhere, but less so at late positions
        (0.01, 0.02, "not seen at this size"),
        (0.01, -0.01, "in part"),
    ],
)
def test_language(early, late, word):
    setting = language.EXPERIMENT.setting("gpu_512")

    def values(method, width, seed):
        ours = method.startswith("log_linear")
        loss = 1.0 + 0.001 * seed * (1 + ours)
        return {
            "loss": loss - 1,
            "by_position": {"64": 9.0 * ours, "256": loss + early * ours, "512": loss + late * ours},
        }

    assert language.EXPERIMENT.judge(rows_of(setting, values), setting).word == word


@pytest.mark.parametrize(
    "gain, softmax, word",
    [(0.1, 1.0, "reproduced"), (0.1, 0.5, "undecided"), (-0.1, 1.0, "refuted"), (-0.1, 0.5, "not seen at this size"),
     (0.0, 1.0, "undecided")],
)  # fmt: skip
def test_needles(gain, softmax, word):
    setting = needles.EXPERIMENT.setting("gpu_128")

    def values(method, width, seed):
        base = 0.5 + gain * method.startswith("log") + 0.001 * seed + (0.01 * (-1) ** seed) * (method == "ssd")
        accuracy = softmax if method == "softmax" else base
        return {"accuracy": accuracy, "by_length": {str(t): accuracy for t in needles.TIMES}}

    assert needles.EXPERIMENT.judge(rows_of(setting, values), setting).word == word


@pytest.mark.parametrize(
    "aware, naive, word",
    [(0.0, -0.5, "reproduced"), (0.0, -0.2, "in part"), (0.0, 0.0, "refuted"), (-0.5, -0.5, "refuted")],
)
def test_updates(aware, naive, word):
    setting = updates.EXPERIMENT.setting("cpu")

    def values(method, width, seed):
        slope = (naive if method.endswith("_naive") else aware) + 0.001 * seed * method.endswith("_naive")
        return {"update": width ** (dense if method == "dense" else slope)}

    dense = 0.0
    rows = rows_of(setting, values)
    assert updates.EXPERIMENT.judge(rows, setting).word == word
    dense = -0.3
    verdict = updates.EXPERIMENT.judge(rows_of(setting, values), setting)
    assert verdict.word == word if word != "refuted" else "dense layers are not constant" in verdict.why
    assert updates.slopes(rows, setting, "btt") == pytest.approx([aware] * 3)


@pytest.mark.parametrize(
    "none, cores, loss, word",
    [
        (0.5, 0.0, 0.0, "reproduced"),
        (0.5, 0.4, 0.0, "in part"),
        (0.5, 0.0, 0.1, "not seen at this size"),
        (-0.5, 0.0, 0.0, "not seen at this size"),
    ],
)
def test_weight_norm(none, cores, loss, word):
    setting = weight_norm.EXPERIMENT.setting("gpu_128")

    def values(method, width, seed):
        grows = (none if method == "none" else cores) + 0.01 * (-1) ** seed
        rms = {str(step): math.exp(grows * step / 50) for step in range(5, 101, 5)}
        return {"rms": rms, "loss": loss * (method == "cores") + 1e-5 * seed}

    rows = rows_of(setting, values)
    measured = next(row for row in rows if "rms" in row)
    assert weight_norm.growth(measured) == pytest.approx(none + 0.01)
    assert weight_norm.growth({"rms": {"50": 1.0, "75": None, "100": 1.0}}) == math.inf
    assert weight_norm.EXPERIMENT.judge(rows, setting).word == word


# -- parts of a sweep -----------------------------------------------------------------------------------
def test_parts_are_disjoint_and_of_similar_size(tmp_path):
    setting = recall.EXPERIMENT.setting("gpu")
    parts = split_cells(setting, 4, lambda cell: cell.width)
    assert sorted(cell for part in parts for cell in part) == sorted(setting.cells)
    times = [sum(cell.width for cell in part) for part in parts]
    assert max(times) - min(times) <= max(setting.widths)
    assert parse_part("2/8") == (2, 8)
    for text in ("0/2", "3/2", "1", "a/b", "-1/2", "1/" + "9" * 20):
        with pytest.raises(argparse.ArgumentTypeError, match="part"):
            parse_part(text)


def test_parts_together_are_the_sweep(tmp_path, capsys):
    """In a file each, or in one."""
    for files in ([tmp_path / "1.jsonl", tmp_path / "2.jsonl"], [tmp_path / "both.jsonl"] * 2):
        for part, file in enumerate(files, 1):
            main(
                needles.EXPERIMENT,
                ["run", "--setting", "smoke", "--part", f"{part}/2", "--out", str(file), "--device", "cpu"],
            )
        main(needles.EXPERIMENT, ["show", *map(str, sorted(set(files)))])
        assert "does not have both families" in capsys.readouterr().out  # the verdict of complete rows


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_cells_side_by_side_have_the_rows_of_one_at_a_time(tmp_path, device):
    """Threads take turns by the step, also where one process has more threads than methods, and name their origin."""
    rows = {}
    for count in (1, 3):
        out = tmp_path / f"{count}.jsonl"
        command = ["run", "--setting", "smoke", "--out", str(out), "--device", device, "--commit", "abc"]
        main(recall.EXPERIMENT, [*command, "--side-by-side", str(count)])
        rows[count] = sorted(read_rows(out), key=key_of)
    timed = ("seconds", "side_by_side")
    alone, together = ([{k: v for k, v in row.items() if k not in timed} for row in found] for found in rows.values())
    assert alone == together and len(alone) == 4 and alone[0]["commit"] == "abc" and alone[0]["machine"]
    assert all(row["side_by_side"] == 3 for row in rows[3])


def test_a_model_is_made_once_for_each_seed(monkeypatch):
    made, original = [], recall.make_recall_model
    monkeypatch.setattr(recall, "make_recall_model", lambda *given: made.append(given[-1]) or original(*given))
    rows = recall.train(recall.SMOKE, Cell("ssd", 16), [(1e-2, 0), (1e-3, 0), (1e-2, 1)], torch.device("cpu"))
    assert made == [0, 1] and [(row["rate"], row["seed"]) for row in rows] == [(1e-2, 0), (1e-3, 0), (1e-2, 1)]


def test_turns_go_round():
    """Every thread has its turn before one has two."""
    turns, order = Turns(), []

    def work(name):
        with turns:
            for _ in range(3):
                order.append(name)
                turns.pass_on()

    with turns:  # all threads wait before the first has its turn
        threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        while len(turns.waiting) < 3:
            threading.Event().wait(0.01)
    for thread in threads:
        thread.join()
    assert sorted(order[:3]) == ["a", "b", "c"] and order == 3 * order[:3]


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path):
    setting, out = recall.SMOKE, tmp_path / "rows.jsonl"

    def train(setting, cell, runs, device):
        if cell.method == "ssd":
            raise RuntimeError("out of memory")
        keys = {"setting": setting.name, "method": cell.method, "width": cell.width, "loss": 1.0}
        return [{**keys, "rate": rate, "seed": seed} for rate, seed in runs]

    for count in (1, 2):
        with pytest.raises(RuntimeError, match="out of memory"):
            run_sweep(setting, train, out, "cpu", stack=lambda cell: 4, say=lambda text: None, side_by_side=count)
        assert {row["method"] for row in read_rows(out)} == {"log_linear_ssd"}


# -- data and measures ----------------------------------------------------------------------------------
def test_rows_of_text():
    rows = CodeRows("surgery", 20_000, torch.device("cpu"))
    one, again, other = (rows.batch(seed, 3, 4, 32)["ids"] for seed in (0, 0, 1))
    assert one.shape == (4, 33) and torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(rows.batch(0, 4, 1, 32)["ids"][0], one[1])
    assert rows.held_out(32, 1000).shape == (1000 // 32, 33) and len(rows.training_N) == 19_000
    assert torch.equal(rows.held_out(32, 1000).flatten()[:32], rows.held_out_N[:32].long())
    table = token_table()
    assert table[ord("a")] == 66 and table[ord("\n")] == 96 and table[7] == table[200] == 0
    assert octaves(512) == [16, 32, 64, 128, 256, 512] and octaves(24) == [24]
    with pytest.raises(SurgeryError, match="are needed"):
        code_tokens("surgery", 10**9)


def test_toeplitz_share():
    toeplitz = torch.tensor([[1.0, 0.0, 0.0], [2.0, 1.0, 0.0], [3.0, 2.0, 1.0]])
    other = torch.diag(torch.tensor([1.0, -1.0, 0.0]))
    assert block_mixing.toeplitz_share(torch.stack([toeplitz, other])).tolist() == pytest.approx([1.0, 0.0])


def test_toeplitz_mixing_starts_near_the_dense_matrix():
    setting, cell = block_mixing.EXPERIMENT.setting("gpu_128"), Cell("tbm_8_near", 128)
    model = block_mixing.make_block_model(setting, cell, 0)
    mask = block_mixing.masks_of(model, block_mixing.ToeplitzBlocksMask)[0]
    apart_MM = torch.arange(32)[:, None] - torch.arange(32)
    w_MM = mask.kernel(apart_MM.clamp_min(0).float())[:, :, 0, 0].detach().tril()
    dense_MM = (1 - apart_MM / 32).tril()
    w_MM, dense_MM = (x / x.sum(1, keepdim=True) for x in (w_MM, dense_MM))
    assert float(mask.kernel(torch.zeros(1)).detach().mean()) == pytest.approx(1.0, abs=0.05)
    assert float((w_MM - dense_MM).square().sum() / dense_MM.square().sum()) < 0.01


def test_frozen_exponentials_stay():
    setting, trained = block_mixing.SMOKE, []
    original = block_mixing.train_recall

    def keep(*args):
        trained.append(original(*args))
        return trained[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_mixing, "train_recall", keep)
        block_mixing.train(setting, Cell("tbm_8_frozen", 16), [(1e-2, 0)], torch.device("cpu"))
    start = dict(block_mixing.make_block_model(setting, Cell("tbm_8_frozen", 16), 0).named_parameters())
    pairs = [(n, leaf[0], start[n]) for n, leaf in zip(trained[0].names, trained[0].leaves)]
    assert all(torch.equal(a, b) for n, a, b in pairs if ".mixer.mask." in n)
    assert any(not torch.equal(a, b) for _, a, b in pairs)


def test_core_norms_bound_the_cores():
    setting = weight_norm.SMOKE
    model = weight_norm.make_deep_model(setting, Cell("cores", 16), 0)
    factors = {name: 2.0 for name, _ in model.named_parameters()}
    found = weight_norm.norm_cores(model, factors)
    assert set(found) == {name for name, _ in model.named_parameters()}
    sizes = [rate for name, rate in found.items() if name.endswith(".0.size")]
    assert sizes and set(sizes) == {0.0} and all(r == 2.0 for n, r in found.items() if n.endswith("original"))
