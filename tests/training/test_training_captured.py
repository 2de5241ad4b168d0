"""Micro-batches captured in a CUDA graph train as ordinary ones.

Without a GPU the graph is the captured function itself.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from helpers.small_training import TINY_CHECKPOINT, convert_tiny, healing_recipe, read_losses, tensors
from torch.utils._python_dispatch import TorchDispatchMode

from surgery.core.progress import Progress
from surgery.training import cuda_graph
from surgery.training.finetune import finetune

SEPARATOR = "<|endoftext|>"
CUDA = torch.cuda.is_available()
STAGES = [
    {"kind": "align", "modules": ["attention"], "trains": ["attention", "mixers"], "length": 32, "tokens": 512, "batch": 4, "rows": 2, "rate": 1e-3},
    {"kind": "distill", "trains": ["all"], "length": 32, "tokens": 1024, "batch": 2, "rows": 2, "rate": 1e-3},
]  # fmt: skip


@pytest.fixture
def replays(monkeypatch):
    """Return a list that gets one entry per replay."""
    entries, record = [], cuda_graph.record_graph

    def counted(step, **options):
        replay = record(step, **options) if CUDA else step

        def run():
            entries.append(1)
            replay()

        return run

    monkeypatch.setattr(cuda_graph, "record_graph", counted)
    if not CUDA:
        monkeypatch.setattr(cuda_graph, "is_on_one_gpu", lambda model: True)
    return entries


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return convert_tiny(
        tmp_path_factory.mktemp("captured"), "log-linear-gdn", "attention.steps=2", "attention.window=8"
    )


@pytest.fixture(scope="module")
def texts(texts, tmp_path_factory):
    """The documents as a text file, which is read without the datasets library: a machine with a GPU may lack it."""
    path = tmp_path_factory.mktemp("captured-texts") / "stories.txt"
    lines = texts.read_text(encoding="utf-8").splitlines()
    path.write_text(SEPARATOR.join(json.loads(line)["text"] for line in lines), encoding="utf-8")
    return path


def separated(recipe, **data):
    """Return the recipe with documents of a text file as its data, and further keys of `data`."""
    sources = [{**source, "separator": SEPARATOR} for source in recipe.data["sources"]]
    return recipe.model_copy(update={"data": {**recipe.data, "sources": sources, **data}})


def train(student, texts, out, **keys):
    """Return (losses by stage and step, tensors) of a run of both stages on rows of one document."""
    recipe = separated(healing_recipe(texts, *STAGES, **keys), packing="stream")
    device = "cuda" if CUDA else "cpu"
    finetune(str(student), recipe, out, teacher=str(TINY_CHECKPOINT), device=device, track="none")
    return read_losses(out / "training"), tensors(out)


@pytest.mark.slow
def test_the_same_training(student, texts, tmp_path, replays, without_curves):
    """Two stages, one with two micro-batches a step: the same losses and weights, bit for bit without a GPU.

    On a GPU transformers gives captured softmax layers a mask, so that they run another bfloat16 kernel.
    """
    plain, weights = train(student, texts, tmp_path / "plain")
    assert not replays
    captured, ours = train(student, texts, tmp_path / "captured", cuda_graph=True)
    assert len(replays) == 16 - cuda_graph.WARMUP_BATCHES  # align stages are not captured
    assert [row[:2] for row in captured] == [row[:2] for row in plain]
    assert [loss for *_, loss in captured] == pytest.approx([loss for *_, loss in plain], rel=5e-3 if CUDA else 1e-5)
    for name, tensor in weights.items():
        assert torch.allclose(ours[name].float(), tensor.float(), atol=5e-3 if CUDA else 1e-6), name


@pytest.mark.parametrize("shortest", [None, 8])
def test_language_model_stages(student, texts, tmp_path, replays, without_curves, shortest):
    """Cross-entropy without a teacher is captured too, unless the lengths of the texts differ from step to step."""
    stage = {**STAGES[1], "kind": "lm"} | ({} if shortest is None else {"shortest": shortest})
    recipe = separated(healing_recipe(texts, stage), packing="stream")
    found = []
    for name, keys in (("plain", {}), ("captured", {"cuda_graph": True})):
        device = "cuda" if CUDA else "cpu"
        finetune(str(student), recipe.model_copy(update=keys), tmp_path / name, device=device, track="none")
        found.append([loss for *_, loss in read_losses(tmp_path / name / "training")])
    assert found[1] == pytest.approx(found[0], rel=5e-3 if CUDA else 1e-5)
    assert len(replays) == (0 if shortest else 16 - cuda_graph.WARMUP_BATCHES)


class Said(Progress):
    """Keeps the lines."""

    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


def test_a_cpu_needs_no_line_about_graphs(student, texts, tmp_path, without_curves):
    """Shipped recipes ask for a graph; a stage on a CPU runs without."""
    recipe = separated(healing_recipe(texts, {**STAGES[1], "kind": "lm"}, cuda_graph=True))
    said = Said()
    finetune(str(student), recipe, tmp_path / "out", device="cpu", track="none", progress=said)
    assert said.lines and not any("cuda_graph" in line for line in said.lines)


def test_packed_documents_run_without_a_graph(student, texts, tmp_path, replays, without_curves):
    recipe = separated(healing_recipe(texts, STAGES[1], cuda_graph=True))
    finetune(
        str(student),
        recipe,
        tmp_path / "out",
        teacher=str(TINY_CHECKPOINT),
        device="cuda" if CUDA else "cpu",
        track="none",
    )
    assert len(replays) < 16 - cuda_graph.WARMUP_BATCHES


@pytest.mark.slow
def test_a_step_that_cannot_be_captured_runs_as_always(student, texts, tmp_path, replays, monkeypatch, without_curves):
    def refuse(step, **options):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graph, "record_graph", refuse)
    with pytest.warns(UserWarning, match="stage distill cannot be captured in a CUDA graph, so they run one by one"):
        captured, _ = train(student, texts, tmp_path / "captured", cuda_graph=True)
    assert captured == train(student, texts, tmp_path / "plain")[0]


def test_gradients_of_micro_batches_are_added_in_two_launches():
    parameters = {str(i): torch.nn.Parameter(torch.zeros(3)) for i in range(40)}
    gradients = {name: torch.full((3,), float(name)) for name in list(parameters)[1:]}
    optimizer_step = SimpleNamespace(parameters=parameters, layout=SimpleNamespace(accumulation_steps=2))
    captured = cuda_graph.CapturedMicroBatch(SimpleNamespace(device=torch.device("cpu")), None, None, optimizer_step)
    captured.gradients = gradients
    launches = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if "empty" not in op.name():
                launches.append(op.name())
            return op(*args, **(kwargs or {}))

    with Record(), torch.no_grad():
        captured._accumulate()
        captured._accumulate()
    assert launches == ["aten::_foreach_copy_", "aten::_foreach_add_.List"]
    assert parameters["0"].grad is None
    assert all(torch.equal(parameters[name].grad, 2 * torch.full((3,), float(name))) for name in gradients)
    assert all(torch.equal(gradient, torch.full((3,), float(name))) for name, gradient in gradients.items())
