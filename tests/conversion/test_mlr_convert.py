"""`convert` with MLR attention: keys in a few directions of the dims that RoPE does not rotate lose nothing."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.small import model_outputs, tiny_config, tiny_inputs
from safetensors.torch import save_file

from surgery.conversion.convert import convert
from surgery.mixers.mlr import MLR
from surgery.modeling.cache import mixer_modules
from surgery.planning.recipe import load_recipe

HEAD = 8
ROTARY = {"gpt_neox": 2, "phi3": 4, "gpt2": 0}


def key_rows(model, family):
    """Weights (G, K, D) and biases (G, K), or None, of the keys of each layer, as views."""
    if family == "gpt_neox":
        for layer in model.gpt_neox.layers:
            fused = layer.attention.query_key_value
            yield fused.weight.view(-1, 3, HEAD, 32)[:, 1], fused.bias.view(-1, 3, HEAD)[:, 1]
    elif family == "phi3":
        for layer in model.model.layers:
            yield layer.self_attn.qkv_proj.weight[32:48].view(2, HEAD, 32), None
    else:
        for block in model.transformer.h:
            fused = block.attn.c_attn
            yield fused.weight.mT[32:64].view(4, HEAD, 32), fused.bias[32:64].view(4, HEAD)


@torch.no_grad()
def model_with_narrow_keys(family):
    """A tiny model whose keys, of the dims that RoPE does not rotate, have one direction besides their bias."""
    torch.manual_seed(0)
    cls, config = tiny_config(family)
    config.rope_parameters = {**(getattr(config, "rope_parameters", None) or {}), "partial_rotary_factor": 0.5}
    if family == "gpt_neox":
        config.rope_parameters["partial_rotary_factor"] = 0.25
    model = cls(config).eval()
    for weight_GKD, bias_GK in key_rows(model, family):
        free_GFD = weight_GKD[:, ROTARY[family] :]
        free_GFD.copy_(torch.randn(*free_GFD.shape[:2], 1) * torch.randn(len(free_GFD), 1, 32))
        if bias_GK is not None:
            bias_GK.copy_(torch.randn(bias_GK.shape))
    return model


@pytest.mark.parametrize("family", ROTARY)
def test_narrow_keys_lose_nothing(family, tmp_path):
    original = model_with_narrow_keys(family)
    original.save_pretrained(tmp_path / "source")
    save_file(tiny_inputs(family, 4, 48), tmp_path / "inputs.safetensors")
    inputs = f"calibration={json.dumps(str(tmp_path / 'inputs.safetensors'))}"
    share = (ROTARY[family] + 1) / HEAD
    recipe = load_recipe("mlr-cache-60", [inputs, "tokens=64", "length=32", f"attention.cache={share}"])
    report = convert(str(tmp_path / "source"), recipe, tmp_path / "out")
    model = type(original).from_pretrained(tmp_path / "out").eval()
    prompt = tiny_inputs(family, 2, 20, seed=3)
    before, after = model_outputs(original, prompt), model_outputs(model, prompt)
    assert (after - before).norm() < 1e-4 * before.norm()
    modules = [module for _, module in mixer_modules(model)]
    assert len(modules) == len(report["mixers"]) == 2
    for module in modules:
        assert module.mixer.config == MLR((ROTARY[family] + 1,), basis="centered")
