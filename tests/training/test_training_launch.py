"""`--gpus N`: a command starts its own processes; strategies of several devices; sums of gradients without a wrapper."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers.forked import run_processes
from helpers.small_training import TINY_CHECKPOINT, healing_recipe, read_losses, tensors

from surgery.core.errors import SurgeryError, WorkerError
from surgery.training import cuda_graph
from surgery.training.batches import BatchLayout
from surgery.training.checkpoints import CheckpointManager
from surgery.training.distributed import accelerator, launch, step
from surgery.training.distributed.step import GradientReducer
from surgery.training.finetune import finetune

ROOT = Path(__file__).resolve().parents[2]
STAGE = {"kind": "distill", "trains": ["all"], "length": 48, "tokens": 768}


def recipe_for(texts, **keys):
    return healing_recipe(texts, {**STAGE, **keys.pop("stage", {})}, checkpoint=2, **keys)


@pytest.fixture(scope="module")
def alone(btt, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "out"
    told = recipe_for(texts)
    run = lambda _: finetune(str(btt), told, out, teacher=str(TINY_CHECKPOINT), device="cpu", track="none")  # noqa: E731
    assert run_processes(1, run) == [0]
    return out


def command(btt, texts, folder, *words, **keys):
    (folder / "recipe.yaml").write_text(recipe_for(texts, **keys).model_dump_json())
    return [
        *(sys.executable, "-m", "surgery", "finetune", str(btt), "--teacher", str(TINY_CHECKPOINT)),
        *("--recipe", str(folder / "recipe.yaml"), "--out", str(folder / "out"), "--device", "cpu", "--gpus", "2"),
        *("--track", "none", *words),
    ]


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def assert_equal_losses(out, whole):
    ours, theirs = (torch.tensor(read_losses(f / "training"), dtype=torch.float64) for f in (out, whole))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


# -- the command ----------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_command_starts_its_workers(alone, btt, texts, tmp_path):
    """Two replicas that no wrapper holds train as one process; --json prints one document."""
    words = command(btt, texts, tmp_path, "--json", cuda_graph=True)
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(done.stdout)
    assert (record["processes"], record["spread"]) == (2, "MULTI_CPU")
    assert "warning" not in done.stderr.lower()
    assert_equal_losses(tmp_path / "out", alone)


@pytest.mark.slow
def test_an_error_of_the_workers_is_printed_once(btt, texts, tmp_path):
    words = command(btt, texts, tmp_path, stage={"batch": 3, "rows": 3, "tokens": 144})
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    said = " ".join(done.stderr.split())
    assert done.returncode == 2 and said.count("error:") == 1 and "Traceback" not in said, said
    assert "batch must be a multiple of 2" in said and "Train on 1 or 3 devices" in said


@pytest.mark.slow
def test_ctrl_c_stops_all_workers_and_keeps_the_checkpoint(btt, texts, tmp_path):
    words = command(btt, texts, tmp_path, stage={"tokens": 192_000})
    with open(tmp_path / "said", "w") as file:
        process = subprocess.Popen(words, env=environment(), stdout=file, stderr=file)
        checkpoints = CheckpointManager(tmp_path / "out.partial" / "checkpoints", 1)
        while checkpoints.latest() is None and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    said = " ".join((tmp_path / "said").read_text().split())
    assert code == 130 and "--resume" in said and "--gpus 2" in said, said
    assert checkpoints.latest() is not None


def test_the_python_function_returns_the_record_of_the_workers(btt, texts, tmp_path, monkeypatch):
    asked = []

    def run(words, count, capture=False):
        asked.append((words, count))
        path = words[words.index("--recipe") + 1]
        from surgery.training.recipe import load_healing_recipe

        assert load_healing_recipe(path) == recipe_for(texts)
        return '{"out": "there"}'

    monkeypatch.setattr("surgery.training.finetune.run_workers", run)
    options = {"teacher": str(TINY_CHECKPOINT), "device": "cpu", "gpus": 2, "sharding": "fsdp2", "resume": False}
    assert finetune(str(btt), recipe_for(texts), tmp_path / "out", **options) == {"out": "there"}
    ((words, count),) = asked
    assert count == 2 and "--sharding=fsdp2" in words and "--json" in words and "--resume" not in words


# -- what can be asked for ------------------------------------------------------------------------
def test_more_gpus_than_the_machine_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SurgeryError, match=r"--gpus 4: this machine has 2 GPUs\. Use --gpus 2"):
        launch.check_gpus(4, None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SurgeryError, match=r"has 0 GPUs.*--device cpu"):
        launch.check_gpus(2, None)
    assert launch.check_gpus(2, "cpu") == 2 and launch.check_gpus(1, "cpu") == 0 and launch.check_gpus(None, None) == 0


def test_gpus_that_contradict_other_settings(monkeypatch):
    with pytest.raises(SurgeryError, match="--device names cuda:1"):
        launch.check_gpus(2, "cuda:1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SurgeryError, match="one of 2 of accelerate launch"):
        launch.check_gpus(2, "cpu")
    monkeypatch.setenv(launch.WORKER, "1")
    assert launch.check_gpus(2, "cpu") == 0


def failure(code, message=None, time=5):
    data = {"message": {"message": message, "extraInfo": {}}} if message else {"message": "<NONE>"}
    return SimpleNamespace(exitcode=code, error_file_data=data, timestamp=time, signal_name=lambda: "SIGKILL")


def test_the_error_that_is_reported():
    """The first that a user can correct; a process that lost its peer says less."""
    error = launch.worker_error({0: failure(1, "connection closed", 4), 1: failure(2, "the disk is full")})
    assert isinstance(error, SurgeryError) and str(error) == "the disk is full"
    error = launch.worker_error({1: failure(1, "internal error", 4), 0: failure(1, "connection closed")})
    assert isinstance(error, WorkerError) and (error.code, str(error)) == (1, "internal error")
    assert "process 1 was ended by SIGKILL" in str(launch.worker_error({1: failure(-9)}))
    assert "exit code 1" in str(launch.worker_error({1: failure(1)}))


def test_how_weights_are_stored(monkeypatch):
    assert accelerator.needs_sharding(8_000_000_000, "cpu") and not accelerator.needs_sharding(1_240_000_000, "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for size, is_sharded in ((80e9, False), (16e9, True)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, n=size: SimpleNamespace(total_memory=n))
        assert accelerator.needs_sharding(1_240_000_000, None) == is_sharded


def test_settings_of_sharding(monkeypatch):
    for name in (*accelerator.FSDP_SETTINGS, "WORLD_SIZE", launch.WORKER):
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    configure = accelerator.configure_sharding
    configure("auto", 8_000_000_000, "cpu")
    assert "ACCELERATE_USE_FSDP" not in os.environ
    with pytest.raises(SurgeryError, match="one of auto, ddp, fsdp2"):
        configure("fsdp", 1, "cpu")
    with pytest.raises(SurgeryError, match="several processes"):
        configure("ddp", 1, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    configure("auto", 8_000_000_000, "cpu")
    assert "ACCELERATE_USE_FSDP" not in os.environ, "accelerate launch decides"
    monkeypatch.setenv(launch.WORKER, "1")
    configure("auto", 8_000_000_000, "cpu")
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    with pytest.raises(SurgeryError, match="configured for fsdp2"):
        configure("ddp", 1, "cpu")


def test_settings_are_those_of_the_shipped_configuration():
    shipped = yaml.safe_load((ROOT / "recipes/accelerate/fsdp2.yaml").read_text())["fsdp_config"]
    ours = {name.lower(): value for name, value in accelerator.FSDP_SETTINGS.items()}
    assert ours.pop("accelerate_use_fsdp") == "true"
    assert {name: str(value).lower() for name, value in shipped.items() if name in ours} == {
        name: value.lower() for name, value in ours.items()
    }


def test_rows_of_another_number_of_devices():
    assert BatchLayout.create(12, 4, 0, 2).rows == 3 and BatchLayout.create(12, 4, 0, 1).rows == 4
    with pytest.raises(SurgeryError, match="Train on 1, 2, 3, 4, 6 or 12 devices, or set batch to 10 or 15"):
        BatchLayout.create(12, 4, 0, 5)


# -- several processes ----------------------------------------------------------------------------
def test_sums_of_gradients():
    def run(rank):
        torch.distributed.init_process_group("gloo")
        parameters = {name: torch.nn.Parameter(torch.zeros(3, 2)) for name in "abcd"}
        parameters["half"] = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        parameters["a"].grad = torch.full((3, 2), 1.0 + rank)
        parameters["half"].grad = torch.full((5,), 2.0, dtype=torch.bfloat16)
        parameters["b"].grad = torch.arange(6.0).view(2, 3).mT  # not contiguous
        if rank:
            parameters["c"].grad = torch.ones(3, 2)
        reducer = GradientReducer(parameters)
        reducer.reduce_()
        assert torch.equal(parameters["a"].grad, torch.full((3, 2), 3.0))
        assert torch.equal(parameters["b"].grad, 2 * torch.arange(6.0).view(2, 3).mT)
        assert torch.equal(parameters["c"].grad, torch.ones(3, 2)), "no gradient on one process counts as zero"
        assert parameters["d"].grad is None and parameters["half"].grad.tolist() == [4.0] * 5
        parameters["d"].grad = torch.ones(3, 2)
        with pytest.raises(SurgeryError, match="d has a gradient"):
            reducer.reduce_()

    assert run_processes(2, run) == [0, 0]


def test_gradients_in_several_buckets(monkeypatch):
    monkeypatch.setattr("surgery.training.distributed.step.BUCKET_BYTES", 20)
    parameters = {str(n): torch.nn.Parameter(torch.zeros(n)) for n in (3, 2, 9, 1, 1)}
    for p in parameters.values():
        p.grad = torch.zeros_like(p)
    assert [[len(g) for g in bucket] for bucket in GradientReducer(parameters)._buckets()] == [[3, 2], [9], [1]]


def test_replicas_in_a_graph(alone, btt, texts, tmp_path, monkeypatch):
    """Each process captures the bare model; gradients are summed after the replay. The graph here is the function."""
    replays = []

    def record(step, **options):
        return lambda: (replays.append(1), step())

    monkeypatch.setattr(cuda_graph, "record_graph", record)
    monkeypatch.setattr(cuda_graph, "is_on_one_gpu", lambda model: True)
    monkeypatch.setattr(cuda_graph, "WARMUP_BATCHES", 1)
    told, out = recipe_for(texts, cuda_graph=True), tmp_path / "out"

    def run(rank):
        finetune(str(btt), told, out, teacher=str(TINY_CHECKPOINT), device="cpu", track="none")
        assert replays, "a batch whose rows are one document each"

    assert run_processes(2, run) == [0, 0]
    assert_equal_losses(out, alone)


@pytest.mark.slow
def test_a_divided_teacher(alone, btt, texts, tmp_path):
    from surgery.training import models

    told, out = recipe_for(texts, stage={"rows": 1}), tmp_path / "out"

    def run(rank):
        load, seen = models.load_teacher, []
        models.load_teacher = lambda *a, **k: seen.append(load(*a, **k)) or seen[0]
        backward, micro_batches = step.OptimizerStep.backward, []

        def divided_backward(self, loss):
            backward(self, loss)
            micro_batches.append([p.grad.placements[0].is_shard() for p in self.parameters.values()])

        step.OptimizerStep.backward = divided_backward
        options = {"teacher": str(TINY_CHECKPOINT), "device": "cpu", "track": "none", "sharding": "fsdp2"}
        assert finetune(str(btt), told, out, **options)["spread"] == "FSDP2"
        (teacher,) = seen
        here = sum(p.to_local().numel() for p in teacher.parameters())
        assert here < 0.6 * sum(p.numel() for p in teacher.parameters())
        assert len(micro_batches) > told.stages[0].steps and all(map(all, micro_batches)), (
            "gradients are divided in each"
        )

    assert run_processes(2, run) == [0, 0]
    assert_equal_losses(out, alone)


@pytest.mark.slow
@pytest.mark.parametrize("deliver", ["last", pytest.param("best", marks=pytest.mark.slow)])
def test_the_first_process_alone_reads_the_weights(btt, texts, tmp_path, deliver):
    """The others build student and teacher on meta and get their shards of each stage, new parameters included. Nothing
    holds a whole parameter while a stage trains."""
    from surgery.training import models, runner

    averaged = {**STAGE, "tokens": 512, "ema": 0.5}
    lora = {**STAGE, "tokens": 512, "kind": "lora", "loss": "distill", "targets": ["mlp"], "rank": 2, "trains": ["new"]}
    told = healing_recipe(texts, averaged, lora, evaluate=1, deliver=deliver)
    places = [tmp_path / "one", tmp_path / "two"]
    options = {"teacher": str(TINY_CHECKPOINT), "device": "cpu", "track": "none"}

    def run(rank):
        loaded, whole, alive = [], [], []
        load, group, train = models.load_causal_lm, runner.make_groups, runner.TrainingLoop.run

        def load_causal_lm(*args, **keys):
            model = load(*args, **keys)
            loaded.append({p.device.type for p in model.parameters()})
            return model

        def make_groups(*args):
            groups = group(*args)
            whole[:] = [weakref.ref(p) for g in groups for p in g.parameters]
            return groups

        def train_stage(loop):
            gc.collect()
            alive.extend(p() is not None for p in whole)
            return train(loop)

        models.load_causal_lm, runner.make_groups, runner.TrainingLoop.run = load_causal_lm, make_groups, train_stage
        finetune(str(btt), told, places[1], sharding="fsdp2", **options)
        assert len(loaded) >= 3 and loaded == [{"cpu" if rank == 0 else "meta"}] * len(loaded)
        assert alive and not any(alive)

    assert run_processes(1, lambda _: finetune(str(btt), told, places[0], **options)) == [0]
    assert run_processes(2, run) == [0, 0]
    assert_equal_losses(places[1], places[0])
    ours, theirs = (tensors(place) for place in places)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-2, atol=1e-4)
