"""Counted bytes of a cache are the bytes of the live cache, for every mixer, mask and feature map, and for whole
models.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers.small import make_recipe, tiny_config
from helpers.small_mixers import MIXER_SPECS
from helpers.small_training import TINY_CHECKPOINT
from transformers import DynamicCache

from surgery.checkpoint.outline import describe_checkpoint
from surgery.checkpoint.source import open_checkpoint, open_converted_checkpoint
from surgery.conversion.convert import convert
from surgery.conversion.estimation.estimate import estimate_conversion
from surgery.core.files import size_text
from surgery.mixers import MIXERS, AttentionShape, MixerInputs, mixer_config
from surgery.mixers.cache_size import cache_bytes
from surgery.mixers.features.base import FEATURES
from surgery.mixers.masks.base import MASKS
from surgery.modeling.cache import MixerCacheLayer
from surgery.planning.plan import make_plan
from surgery.publish.figures import CACHE_TOKENS
from surgery.publish.html.data import load_page_data
from surgery.publish.hub.model_card import _replacement_section
from surgery.publish.summary import attention_costs, inspect, model_sizes, plan_dict

SHAPE = AttentionShape(dim=12, heads=4, groups=2, key=8, value=6, scaling=8**-0.5, rotary=8)
LENGTHS = (3, 40)  # before and after windows and blocks are full
SIZES = {
    "banded": {"width": 4, "dilation": 2}, "block_diagonal": {"block": 5}, "input_toeplitz": {"length": 18},
    "toeplitz": {"length": 18}, "fourier": {"period": 50}, "toeplitz_blocks": {"block": 3, "components": 2},
    "blocks": {"block": 3, "count": 14}, "cosformer": {"length": 40}, "favor": {"features": 16}, "lara": {"features": 7}, "rfa": {"features": 9},
}  # fmt: skip


def sized(name: str) -> dict:
    return {"name": name, **SIZES.get(name, {})}


SPECS = {
    **MIXER_SPECS,
    **{f"mlr {form}": {"mixer": "mlr", "ranks": [4, 2, 2], "extents": [16, 5], "form": form} for form in ("nested", "sliding")},
    **{f"bilinear {norm}": {"mixer": "bilinear_mlr", "ranks": [0, 4, 2], "norm": norm} for norm in ("none", "qk")},
    **{f"mask {name}": {"mixer": "linear", "mask": sized(name), "chunk": 8} for name in MASKS.names()},
    **{
        f"features {name}": {"mixer": "linear", "features": {**sized(name), **({"queries": "exact"} if name in ("favor", "lara") else {})}, "chunk": 8, "window": 4, "sinks": 1}
        for name in FEATURES.names()
    },
}  # fmt: skip


def test_every_mixer_is_counted_below():
    assert {spec["mixer"] for spec in SPECS.values()} >= set(MIXERS.names()) - {"native"}  # native: see test_native.py


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_counted_bytes_are_those_of_the_live_state(spec, dtype):
    config = mixer_config(spec)
    mixer = MIXERS[config](config, SHAPE).to(dtype).eval()
    state, seen = mixer.empty_state(2, "cpu"), 0
    for length in LENGTHS:
        tokens = length - seen
        draw = lambda *size: torch.randn(2, *size).to(dtype)  # noqa: E731
        angle = torch.randn(1, tokens, SHAPE.rotary).to(dtype)
        inputs = MixerInputs(
            draw(SHAPE.heads, tokens, SHAPE.key), draw(SHAPE.groups, tokens, SHAPE.key), draw(SHAPE.groups, tokens, SHAPE.value),
            draw(tokens, SHAPE.dim), rope=(angle.cos(), angle.sin()),
        )  # fmt: skip
        with torch.inference_mode():
            state, seen = mixer.mix(inputs, state)[1], length
        assert state.nbytes() == 2 * cache_bytes(config, SHAPE, length, dtype), length


def live_bytes(model, length: int) -> int:
    """Return the bytes of the cache of one sequence that the model has read."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.arange(length)[None] % 60, past_key_values=cache)
    layers = [
        layer.nbytes() if isinstance(layer, MixerCacheLayer) else layer.keys.nbytes + layer.values.nbytes
        for layer in cache.layers
    ]
    assert 0 < sum(isinstance(layer, MixerCacheLayer) for layer in cache.layers) < len(layers)
    return sum(layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_plan_inspect_page_card_and_estimate_count_the_live_cache(family, dtype, tmp_path, monkeypatch):
    """Of a hybrid with softmax layers, sliding ones in Gemma 2: before the conversion from the config, after it from
    the checkpoint.
    """
    from surgery.publish import summary
    from surgery.publish.html import data as page

    torch.manual_seed(0)
    cls, config = tiny_config(family)
    config.num_hidden_layers, config.dtype = 4, dtype
    if family == "gemma2":
        config.layer_types = ["sliding_attention", "full_attention"] * 2
    cls(config).to(dtype).save_pretrained(tmp_path / "source")
    attention = {"mixer": "linear", "window": 6, "sinks": 2, "layers": "2:"}
    recipe = make_recipe(structure="dense", attention=attention)
    described = describe_checkpoint(open_checkpoint(str(tmp_path / "source")))
    convert(str(tmp_path / "source"), recipe, tmp_path / "out")
    model = cls.from_pretrained(tmp_path / "out").eval()
    assert model.dtype == dtype
    plan, usual = make_plan(described, recipe), plan_dict(make_plan(described, recipe))
    inspected = inspect(str(tmp_path / "out"))
    assert inspected["attention_totals"] == usual["attention_totals"]
    assert inspected["cache_dtype"] == usual["cache_dtype"] == str(dtype).removeprefix("torch.")
    monkeypatch.setattr(summary, "CONTEXTS", LENGTHS)
    monkeypatch.setattr(page, "CONTEXTS", LENGTHS)
    planned, shown = plan_dict(plan), load_page_data(str(tmp_path / "out")).costs
    for length in LENGTHS:
        live = live_bytes(model, length)
        assert shown[length]["cache_bytes"][1] == planned["attention_totals"]["cache_bytes"][str(length)][1] == live
        estimate = estimate_conversion(described, plan, calibrated=False, context=length)
        assert estimate["result_memory"] - estimate["disk"]["result"] == live
    source = open_converted_checkpoint(str(tmp_path / "out"))
    (row,) = (line for line in _replacement_section(source, inspected).split("\n") if "cache of one sequence" in line)
    assert f"| {size_text(inspected['attention_totals']['cache_bytes'][str(CACHE_TOKENS)][1])} |" in row


def test_sizes_of_an_original_that_was_trained(tmp_path):
    """Its report tells of no conversion; a damaged one does not stop an evaluation either."""
    folder = Path(shutil.copytree(TINY_CHECKPOINT, tmp_path / "CONTROL"))
    plain = model_sizes(open_converted_checkpoint(str(folder)))
    assert plain["kept"] is None and plain["cache_bytes"] > 0
    for text in ('{"training": []}', "{"):
        (folder / "surgery_report.json").write_text(text, encoding="utf-8")
        assert model_sizes(open_converted_checkpoint(str(folder))) == plain


def test_equal_layers_are_counted_once(monkeypatch):
    """To count a mixer may build a module, and a plan has dozens of equal layers."""
    config, counted = mixer_config({"mixer": "linear", "mask": {"name": "hierarchical", "block": 8}, "window": 11}), []
    count = MIXERS[config].cost
    monkeypatch.setattr(MIXERS[config], "cost", lambda *given: counted.append(given) or count(*given))
    layers = [(f"layers.{n}", config, SHAPE) for n in range(5)]
    found = attention_costs(layers, [], "rows", torch.float32, lengths=LENGTHS)
    assert len(counted) == len(set(counted)) == len(LENGTHS)
    (row,) = found["rows"]
    assert row["macs"]["40"][1] == 5 * count(config, SHAPE, 40).macs
