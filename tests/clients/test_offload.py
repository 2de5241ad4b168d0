"""Accelerate's offloading of every shipped recipe: weights come from the CPU or the disk as modules run, and no bit of
the output differs.
"""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from helpers.slow import slow_where
from helpers.small import model_outputs, tiny_config, tiny_inputs
from transformers import AutoModelForCausalLM

import surgery
from surgery.core.progress import Progress
from surgery.planning.recipe import load_recipe, shipped_recipes

PLACES = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
PLACES |= {"model.layers.0": "cpu", "model.layers.1": "disk"}


def tiny(recipe: str):
    """A random Llama of two layers, converted without calibration text.

    A measured hybrid keeps every n-th layer instead.
    """
    torch.manual_seed(0)
    cls, config = tiny_config("llama")
    attention = load_recipe(recipe, ["calibration=null"]).attention
    by = {"attention.hybrid.choose_by": "every"} if attention and attention.hybrid else {}
    if recipe == "pruned-half":  # its MLPs of 48 neurons are narrower than a multiple of 64
        by["rules"] = [{"match": "mlp.*", "structure": "pruned", "multiple": 8}]
    if recipe == "mlr-nested":  # its ranks are for heads of 64 dims
        by |= {"attention.ranks": [4, 2, 2], "attention.extents": [16, 8]}
    return surgery.apply(cls(config).eval(), recipe, calibration=None, overrides=by, progress=Progress())


# Of the same structures and mixers as other recipes.
LIKE_OTHERS = {"bilinear-mlbtc", "bilinear-mlr", "btt-3-cores", "low-rank-btt-half", "mhla-elu", "mhla-frozen"}
LIKE_OTHERS |= {"mlr-cache-60", "mlr-monarch-half", "retnet", "ssd-equal-state", "tbm-elu", "window-equal-state"}
LIKE_OTHERS |= {f"{mask}-mask" for mask in ("banded", "block-diagonal", "dilated", "fourier", "input-toeplitz")}


@pytest.mark.parametrize(
    "recipe",
    slow_where(
        lambda name: name in LIKE_OTHERS,
        [name for name in shipped_recipes() if not (load_recipe(name).native or load_recipe(name).stock)],
    ),
)
def test_offloaded_weights_give_the_same_bits(recipe, tmp_path):
    model, inputs = tiny(recipe), tiny_inputs("llama", 2)
    expected, options = model_outputs(model, inputs), {"max_new_tokens": 3, "do_sample": False}
    tokens = model.generate(**inputs, **options)
    model.save_pretrained(tmp_path / "saved")
    offloaded = [
        cpu_offload(copy.deepcopy(model), torch.device("cpu")),
        disk_offload(copy.deepcopy(model), str(tmp_path / "disk"), torch.device("cpu")),
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "saved", device_map=PLACES, offload_folder=tmp_path / "map"
        ).eval(),
    ]
    for each in offloaded:
        assert any(p.is_meta for p in each.model.layers[1].parameters())
        assert float((model_outputs(each, inputs) - expected).abs().max()) == 0.0
        assert torch.equal(each.generate(**inputs, **options), tokens)
