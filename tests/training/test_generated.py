"""Generated training rows, stages on continuous values, counted compute."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from recipes.papers.experiments.models import RecallModel, ValuesModel, make_decoder, make_stage
from recipes.papers.mup.models import rate_factors
from recipes.papers.training.compute import count_compute, state_size
from recipes.papers.training.stacked import StackedTraining, causal_mask
from recipes.papers.training.values import RegressionTask, TeacherTask, squared_error
from surgery.core.errors import SurgeryError
from surgery.training.data.generated import (
    IGNORE_INDEX,
    GeneratedData,
    MQARTask,
    normal,
    uniform,
)
from surgery.training.data.recipe import DataConfig
from surgery.training.pretrain.pretrain import pretrain
from surgery.training.pretrain.recipe import parse_pretrain_recipe

pytestmark = pytest.mark.usefixtures("without_curves")
LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2}
TASKS = [
    MQARTask(vocabulary=32, pairs=(2, 3)),
    MQARTask(vocabulary=64, pairs=(2, 4), layout="scattered"),
    RegressionTask(dims=3, grow=20),
    TeacherTask(dims=4, classes=5, width=8, noise=0.5),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda t: f"{t.task}-{getattr(t, 'layout', '')}")
def test_rows_depend_on_seed_and_number_alone(task):
    whole = task.batch(3, 0, 12, 24)
    part = task.batch(3, 5, 4, 24)
    for name, tensor in whole.items():
        torch.testing.assert_close(part[name], tensor[5:9], rtol=1e-6, atol=1e-6)
    first = next(iter(whole.values()))
    assert len({str(row.tolist()) for row in first}) == 12
    assert not torch.equal(first, next(iter(task.batch(4, 0, 12, 24).values())))


def test_random_numbers_are_uniform_and_normal():
    row = torch.arange(400)
    u, x = uniform(0, row, 0, 400), normal(2**62, row, 0, 400)
    assert abs(u.mean() - 0.5) < 0.003 and abs(u.var() - 1 / 12) < 0.001
    assert abs((u[:, 1:] * u[:, :-1]).mean() - 0.25) < 0.003 and abs((u[1:] * u[:-1]).mean() - 0.25) < 0.003
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01 and not torch.equal(u, uniform(0, row, 1, 400))


@pytest.mark.parametrize("layout", ["pairs_first", "scattered"])
def test_every_query_has_the_value_that_followed_its_key(layout):
    batch = MQARTask(vocabulary=64, pairs=(2, 5), layout=layout).batch(0, 0, 64, 32)
    assert set(batch["pairs"].tolist()) == {2, 5}
    for i in range(64):
        ids, labels = batch["input_ids"][i].tolist(), batch["labels"][i].tolist()
        asked = [p for p in range(5) if batch["target"][i, p] != IGNORE_INDEX]
        assert len(asked) == batch["pairs"][i] == sum(label != IGNORE_INDEX for label in labels)
        for p in asked:
            query, target, gap = (int(batch[n][i, p]) for n in ("query", "target", "gap"))
            assert ids[query] == ids[query - gap] and ids[query - gap + 1] == target == labels[query + 1]
            assert 0 < ids[query] < target < (64 if layout == "pairs_first" else 32)
            assert layout == "pairs_first" or (ids[query + 1] == target and query >= 32 - 2 * len(asked))


def test_regression_is_solved_by_least_squares_after_as_many_points_as_dimensions():
    batch = RegressionTask(dims=4).batch(0, 0, 8, 16)
    x, y = batch["values"][:, ::2].double(), batch["targets"][:, ::2].double()
    w = torch.linalg.lstsq(x[:, :4], y[:, :4].unsqueeze(-1)).solution
    torch.testing.assert_close((x @ w)[..., 0], y, rtol=1e-3, atol=1e-3)
    assert torch.equal(batch["values"][:, 1::2, 0].double(), y) and not batch["values"][:, 1::2, 1:].any()
    small = RegressionTask(dims=4, grow=100).batch(0, 0, 1, 16)
    assert not small["values"][0, ::2, 2:].any() and (small["labels"] == 0).sum() == 4


def test_generated_data_resumes_by_its_row():
    config = DataConfig.model_validate(
        {"generated": {"task": "mqar", "vocabulary": 32, "pairs": [2]}, "validation": 0.1}
    )
    data, later = GeneratedData(config, 16, 0), GeneratedData(config, 16, 0)
    rows = [row for row, _ in zip(data.examples(), range(70))]
    later.restore(json.loads(json.dumps({"taken": 66})))
    assert torch.equal(next(iter(later.examples()))["input_ids"], rows[66]["input_ids"]) and later.state() == {
        "taken": 67
    }
    assert len(data.validation()) == 64
    with pytest.raises(SurgeryError, match="Resume with the original recipe"):
        later.restore({"readers": []})


@pytest.mark.parametrize(
    "data, stage, said",
    [
        ({"generated": {"task": "mqar"}, "sources": "x.txt"}, {"kind": "lm"}, "Keep one of them"),
        ({"generated": {"task": "mqar", "vocabulary": 16, "pairs": [9]}}, {"kind": "lm"}, "below 8"),
        ({"generated": {"task": "mqar"}}, {"kind": "lm", "length": 64}, "128 tokens or more"),
        ({"generated": {"task": "regression"}}, {"kind": "lm"}, "Use a stage of kind classify or regress"),
        ({"generated": {"task": "mqar"}}, {"kind": "regress", "inputs": 4}, "Use a stage of kind lm"),
        ({"generated": {"task": "poems"}}, {"kind": "lm"}, r"task must be one of mqar.* \(got 'poems'\)"),
        ({"generated": {"pairs": [4]}}, {"kind": "lm"}, r"task must be one of mqar.* \(got None\)"),
        ({"generated": {"task": "mqar", "pair": [4]}}, {"kind": "lm"}, "unknown key 'pair'; did you mean 'pairs'"),
    ],
)
def test_refusals(data, stage, said):
    stage = {"length": 256, "tokens": 64, "rate": 1e-2, **stage}
    with pytest.raises(SurgeryError, match=said):
        parse_pretrain_recipe({"model": LLAMA, "data": data, "stages": [stage]})


@pytest.mark.parametrize(
    "data, stage, part",
    [
        ({"task": "regression", "dims": 3}, {"kind": "regress", "inputs": 3}, "squared_error"),
        (
            {"task": "teacher", "dims": 3, "classes": 4, "width": 8},
            {"kind": "classify", "inputs": 3, "classes": 4},
            "wrong",
        ),
        ({"task": "mqar", "vocabulary": 16, "pairs": [2]}, {"kind": "lm"}, "ce"),
    ],
)
def test_pretrain_on_generated_rows(data, stage, part, tmp_path):
    from safetensors.torch import load_file

    stage = {
        "length": 8,
        "batch": 8,
        "rows": 8,
        "tokens": 8 * 8 * 40,
        "rate": 2e-2,
        "optimiser": {"base_width": 16},
        **stage,
    }
    keys = {"model": LLAMA, "data": {"generated": data}, "precision": "float32", "log": 10, "stages": [stage]}
    record = pretrain(parse_pretrain_recipe(keys), tmp_path / "out", device="cpu")
    if stage["kind"] != "regress":  # in-context regression stays on a plateau for thousands of steps
        assert record["stages"][0]["last_loss"] < record["stages"][0]["first_loss"]
    log = [json.loads(line) for line in (tmp_path / "out/training/log.jsonl").read_text().splitlines()]
    assert all(part in line for line in log)
    if stage["kind"] != "lm":
        tensors = load_file(tmp_path / "out/readout/readout.safetensors")
        assert tensors["read_in.weight"].shape == (16, 3) and tensors["read_out.weight"].any()


def test_a_stack_of_any_loss_with_weight_decay_equals_single_runs():
    """AdamW of torch on one model, and the second of two stacked ones; with a mixer by its definition."""
    stage, task = make_stage(3, base_width=16, weight_decay=0.1), RegressionTask(dims=3)

    def make(seed):
        shape = {"width": 16, "layers": 1, "heads": 2, "length": 8, "vocabulary": 2, "mlp": 16}
        return ValuesModel(make_decoder({"mixer": "linear", "mask": "decay"}, seed=seed, **shape), 3, 1, seed)

    def loss(call, batch):
        return (
            squared_error(call(batch["values"], causal_mask(8, batch["values"].device)), batch)
            / batch["values"].shape[0]
        )

    models = [make(0), make(1)]
    rates = [{n: r * f for n, f in rate_factors(models[0], stage).items()} for r in (1e-2, 2e-2)]
    stack = StackedTraining(models, rates, stage.optimiser, None, torch.device("cpu"), loss=loss)
    alone = make(1)
    groups = [
        {"params": [p], "lr": rates[1][n], "weight_decay": 0.1 if p.dim() > 1 else 0.0}
        for n, p in alone.named_parameters()
    ]
    optimiser = torch.optim.AdamW(groups, betas=stage.optimiser.betas, eps=stage.optimiser.eps)
    for step in range(3):
        batch = task.batch(0, 4 * step, 4, 8)
        losses = stack.step({n: t.expand(2, *t.shape) for n, t in batch.items()}, 1.0)
        single = loss(alone, batch)
        torch.testing.assert_close(losses[1], single.detach(), rtol=1e-4, atol=1e-5)
        optimiser.zero_grad()
        single.backward()
        optimiser.step()


def test_counted_compute():
    shape = {"width": 16, "layers": 2, "heads": 2, "length": 32, "vocabulary": 10, "seed": 0}
    softmax = make_decoder(None, mlp=24, **shape)
    found = count_compute(softmax, 32)
    assert found.linears == 2 * (4 * 16 * 16 + 3 * 16 * 24) and found.head == 160
    assert found.mixers == 2 * 16 * 2 * 16 and found.total == found.body + 160  # 16 pairs a token, keys and values
    assert state_size(softmax, 32) == 2 * 32 * 2 * 16
    linear = make_decoder({"mixer": "linear", "mask": "ones"}, **shape)
    assert state_size(linear, 32) == state_size(linear, 8) == 2 * 2 * 8 * 8
    bilinear = make_decoder({"mixer": "bilinear_btt", "base": "own"}, **shape)
    assert count_compute(bilinear, 32).linears == 2 * (2 * 16 * 16 + 3 * 16 * 1) - 2 * 3 * 16  # no W_Q, W_K, MLP


def test_logits_at_labelled_positions():
    model = make_decoder(None, width=16, layers=1, heads=2, length=8, vocabulary=10, seed=0, convolution=3)
    nn.init.normal_(model.lm_head.weight)
    ids, at = torch.arange(8)[None], torch.tensor([[2, 5]])
    mask = causal_mask(8, torch.device("cpu"))
    torch.testing.assert_close(RecallModel(model)(ids, at, mask), model(ids, attention_mask=mask).logits[:, [2, 5]])


def test_pretrain_in_the_lab_knows_its_stages(tmp_path):
    """They are registered as its command is imported: the error is that of the lab's task, not of an unknown name."""
    recipe = tmp_path / "values.yaml"
    stages = [{"kind": "regress", "inputs": 8, "tokens": 64, "length": 9, "rate": 1e-2}]
    recipe.write_text(json.dumps({"model": LLAMA, "data": {"generated": {"task": "regression"}}, "stages": stages}))
    command = [sys.executable, "-m", "recipes.papers.training.pretrain", "--recipe", str(recipe), "--out", "OUT"]
    done = subprocess.run(command, cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True)
    assert done.returncode == 2 and "an even length (got 9)" in " ".join(done.stderr.split()), done.stderr
