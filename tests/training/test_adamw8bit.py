"""AdamW with states of 8 bits, from torchao: trained, stopped and resumed."""

from __future__ import annotations

import pytest
import torch
from helpers.small_training import healing_recipe, interrupt_at_step, read_losses

from surgery.core.errors import SurgeryError
from surgery.training.checkpoints import TorchOptimizerState, dequantized, quantized_like
from surgery.training.finetune import finetune
from surgery.training.optim import OptimizerConfig, make_optimizer


def test_without_torchao_an_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)
    with pytest.raises(SurgeryError, match=r"adamw8bit needs the package torchao\. Run "):
        make_optimizer([], OptimizerConfig(name="adamw8bit"))


def test_stored_states_are_quantized_again():
    optim = pytest.importorskip("torchao.optim")
    p = torch.nn.Parameter(torch.randn(64, 128))
    optimiser = optim.AdamW8bit([p], lr=1e-3)
    for key in ("exp_avg", "exp_avg_sq"):
        state = optimiser._new_buffer(p, key == "exp_avg")
        values = torch.randn(64, 128) * torch.logspace(-6, 0, 64).unsqueeze(1)
        state.copy_(values if key == "exp_avg" else values.square())
        again = quantized_like(optimiser, p, key, dequantized(state))
        assert type(again) is type(state) and again.codes.dtype == torch.uint8
        change = (dequantized(again) - dequantized(state)).view(-1, 256).abs().amax(1)
        assert (change <= 0.03 * dequantized(state).view(-1, 256).abs().amax(1)).all()
    assert TorchOptimizerState(optimiser, [["p"]]).states() == {}


def test_a_resumed_run_takes_nearly_the_same_steps(btt, texts, tmp_path, monkeypatch):
    pytest.importorskip("torchao.optim")
    stage = {"kind": "lm", "trains": ["new"], "tokens": 1024, "optimiser": {"name": "adamw8bit"}}
    finetune(str(btt), healing_recipe(texts, stage), tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_at_step(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            finetune(str(btt), healing_recipe(texts, stage), tmp_path / "parts")
    finetune(str(btt), healing_recipe(texts, stage), tmp_path / "parts", resume=True)
    losses = [torch.tensor(read_losses(tmp_path / name / "training")) for name in ("whole", "parts")]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
