"""How close block mixing is to Toeplitz, and the conversion of MHLA to TBM."""

from __future__ import annotations

import pytest
import torch
from conversion.test_mixer_convert import calibrated_recipe, convert_model
from helpers.small import model_outputs, tiny_inputs

from surgery.conversion.toeplitz import convert_to_toeplitz
from surgery.core.errors import SurgeryError
from surgery.mixers.masks.toeplitz_fit import fit_heads, fit_toeplitz, nonnegative_lstsq
from surgery.publish.summary import inspect


def mixture(size, *terms):
    at = torch.arange(size)
    apart = (at[:, None] - at).abs()
    return sum(a * torch.exp(-rate * apart) for a, rate in terms)


@pytest.mark.parametrize("causal", [True, False])
def test_a_sum_of_exponentials_is_found(causal):
    whole = mixture(20, (0.7, 0.4), (0.2, 0.03))
    w = whole.tril() if causal else whole
    w = w / w.sum(-1, keepdim=True)  # rows of their own scale
    fit = fit_toeplitz(w, 8, causal)
    assert float(fit.r2) > 0.999
    kernel = fit.kernel(torch.arange(20.0))
    truth = 0.7 * torch.exp(-0.4 * torch.arange(20.0)) + 0.2 * torch.exp(-0.03 * torch.arange(20.0))
    assert torch.allclose(kernel / kernel[0], (truth / truth[0]).double(), atol=0.02)


def test_noise_is_not_toeplitz():
    noise = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0)).tril()
    assert (fit_toeplitz(noise, 8).r2 < 0.5).all()


def test_heads_of_a_group_share_rates():
    w = torch.stack([mixture(12, (1.0, 0.1), (a, 0.8)) for a in (0.2, 2.0)])[None]
    fit = fit_heads(w.tril() / w.tril().sum(-1, keepdim=True), 6)
    assert torch.equal(fit.rate[:, 0], fit.rate[:, 1]) and (fit.r2 > 0.99).all()


def test_nonnegative_least_squares_against_every_support():
    generator = torch.Generator().manual_seed(1)
    a, y = torch.randn(9, 4, generator=generator, dtype=torch.float64), torch.randn(9, generator=generator).double()
    best = None
    for mask in range(16):
        keep = [i for i in range(4) if mask >> i & 1]
        x = torch.zeros(4, dtype=torch.float64)
        if keep:
            x[keep] = torch.linalg.lstsq(a[:, keep], y[:, None]).solution[:, 0]
        if (x >= 0).all():
            value = float((a @ x - y).square().sum())
            best = value if best is None else min(best, value)
    found = nonnegative_lstsq((a.mT @ a)[None], (a.mT @ y)[None], rounds=500)[0]
    assert float((a @ found - y).square().sum()) == pytest.approx(best, rel=1e-4)


def test_mhla_becomes_tbm(tmp_path):
    original, model, _ = convert_model(tmp_path, "llama", calibrated_recipe(tmp_path, "mhla"))
    told = inspect(str(tmp_path / "out"))["toeplitzness"]
    assert set(told) == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    result = convert_to_toeplitz(str(tmp_path / "out"), tmp_path / "tbm")
    after = type(original).from_pretrained(tmp_path / "tbm").eval()
    assert after.model.layers[0].self_attn.mixer.config.mask.name == "toeplitz_blocks"
    inputs = tiny_inputs("llama", 2, 40, seed=3)
    before = model_outputs(model, inputs)
    gap = float((model_outputs(after, inputs) - before).norm() / before.norm())
    assert gap < 0.05 and min(result["r2"].values()) > 0.5
    assert model_outputs(after, tiny_inputs("llama", 1, 64 * 8, seed=3)).isfinite().all()  # beyond MHLA's blocks
    with pytest.raises(SurgeryError, match="no attention with block mixing"):
        convert_to_toeplitz(str(tmp_path / "tbm"), tmp_path / "again")
    with pytest.raises(SurgeryError, match="exists"):
        convert_to_toeplitz(str(tmp_path / "out"), tmp_path / "tbm")
