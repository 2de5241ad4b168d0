"""What runs its PyTorch reference on a GPU is said: by finetune while it trains, and by inspect before."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.small_training import TINY_CHECKPOINT, convert_tiny, healing_recipe

from surgery.core.dispatch import DispatchedOp, load_kernels
from surgery.core.progress import Progress
from surgery.mixers import AttentionShape
from surgery.mixers.linear_config import LinearAttention
from surgery.publish.summary import inspect
from surgery.publish.tables import inspect_table
from surgery.publish.training_kernels import training_kernels
from surgery.training.finetune import finetune

STAGE = {"kind": "distill", "trains": ["mixers"], "length": 32, "tokens": 256, "batch": 4, "rows": 2, "rate": 1e-3}


class Lines(Progress):
    def __init__(self):
        super().__init__()
        self.lines = []

    def say(self, line):
        self.lines.append(line)


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return convert_tiny(tmp_path_factory.mktemp("student"), "log-linear-gdn", "attention.steps=2", "attention.window=8")


@pytest.fixture
def refusing(monkeypatch):
    """Let calls of the CPU be calls on a GPU, where no kernel takes that of the log-linear mask."""
    accepted = DispatchedOp._is_accepted
    monkeypatch.setattr("surgery.core.dispatch._on_gpu", lambda *_: True)
    monkeypatch.setattr(DispatchedOp, "select_kernel", lambda op, *args, **kwargs: None)
    monkeypatch.setattr(
        DispatchedOp,
        "_is_accepted",
        lambda op, args, kwargs: op.__name__ != "log_linear" and accepted(op, args, kwargs),
    )


@pytest.mark.usefixtures("refusing", "without_curves")
def test_finetune_says_once_what_runs_its_reference(student, texts, tmp_path):
    said = Lines()
    finetune(
        str(student), healing_recipe(texts, STAGE), tmp_path / "out", teacher=str(TINY_CHECKPOINT), device="cpu",
        track="none", progress=said,
    )  # fmt: skip
    (line,) = [line for line in said.lines if "reference" in line]
    assert line.startswith("warning: log_linear runs its PyTorch reference on the GPU: ")
    assert "no kernel takes q float32 (" in line if load_kernels() else "Triton" in line


def test_inspect_lists_the_kernels_of_a_training_step(student, monkeypatch):
    if not load_kernels():
        pytest.skip("needs Triton")
    (row,) = inspect(str(student))["training_kernels"]
    assert set(row["kernels"]) == {"linear_features", "local_attention", "log_linear", "join_and_gate"}
    assert row["references"] == {}
    monkeypatch.setattr(DispatchedOp, "_is_accepted", lambda op, args, kwargs: op.__name__ != "local_attention")
    shown = "\n".join(line for line in inspect_table(inspect(str(student))) if isinstance(line, str))
    assert re.search(
        r"kernels compute [\w, ]*log_linear[\w, ]*; the PyTorch reference computes local_attention, because no kernel",
        shown,
    )


def test_too_many_features_are_listed():
    """Signed features cannot be cut into slices in the delta rule, and 2,048 of them fit no kernel."""
    if not load_kernels():
        pytest.skip("needs Triton")
    config = LinearAttention(mask="hierarchical", scores="delta", features="hedgehog", rope="both", window=64, sinks=4)
    shape = AttentionShape(64, 2, 1, 512, 64, 0.05, rotary=512)
    before = torch.random.get_rng_state()
    (row,) = training_kernels([("a", config, shape), ("b", config, shape)])
    assert torch.equal(before, torch.random.get_rng_state())
    assert row["layers"] == 2 and "log_linear" in row["references"]
