"""The shared suite: every family of TINY_FAMILIES is planned, converted, loaded, saved and run as docs/models.md says.

CI runs the families marked in_ci; `pytest -m slow tests/architectures` runs the others.
"""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small import make_recipe, model_outputs
from helpers.small_mixers import ExactConfig, register_test_mixers
from helpers.tiny_families import TINY_FAMILIES, models_table
from safetensors.torch import save_file

import surgery
from surgery.architectures.attention import attention_paths, attention_shape
from surgery.checkpoint.load_model import load_model
from surgery.checkpoint.model_classes import model_class
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError
from surgery.modeling.attention import install
from surgery.modeling.padding_positions import mask_positions

ROWS, LENGTH, NEW_TOKENS = 3, 24, 8
SLOW_OR_CI = [
    pytest.param(name, marks=() if family.in_ci else pytest.mark.slow) for name, family in TINY_FAMILIES.items()
]
MIXABLE = [pytest.param(name) for name, family in TINY_FAMILIES.items() if not family.mixers]
REFUSED = [name for name, family in TINY_FAMILIES.items() if family.mixers]


def load(folder: Path) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    if not config.architectures:
        return load_model(open_checkpoint(str(folder)), torch.float32).eval()
    return model_class(config).from_pretrained(folder, dtype=torch.float32).eval()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference, relative to the largest value of b."""
    return float((a - b).abs().max() / b.abs().max())


class Workshop:
    """A saved tiny model of a family, its calibration file, and what the model returns."""

    def __init__(self, name: str, folder: Path, mixers: bool = False):
        self.family, self.folder, self.source = TINY_FAMILIES[name], folder, folder / "source"
        self.model = self.family.build()
        self.model.save_pretrained(self.source)
        if not self.family.named:
            config = json.loads((self.source / "config.json").read_text())
            del config["architectures"]
            (self.source / "config.json").write_text(json.dumps(config))
        make_inputs = (self.family.mixer_inputs if mixers else None) or self.family.inputs
        self.inputs = make_inputs(ROWS, LENGTH, 2)
        self.calibration = folder / "calibration.safetensors"
        save_file(make_inputs(16, LENGTH, 5), self.calibration)
        self.outputs = model_outputs(load(self.source), self.inputs)  # reloaded: resized and tied weights are as stored

    def convert(self, name: str, **recipe: Any) -> Path:
        convert(str(self.source), make_recipe(**recipe), self.folder / name)
        return self.folder / name

    def generate(self, model: Any) -> torch.Tensor:
        """Greedy tokens, where the family generates; nothing otherwise."""
        if not self.family.generates:
            return torch.zeros(0)
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return model.generate(**self.inputs, **options)

    def check_equal(self, folder: Path, tolerance: float) -> None:
        """The checkpoint computes what the original computes, before and after it is saved again, and generates the
        same tokens.
        """
        model = load(folder)
        outputs = model_outputs(model, self.inputs)
        assert distance(outputs, self.outputs) < tolerance
        assert torch.equal(self.generate(model), self.generate(load(self.source)))
        model.save_pretrained(folder / "again")
        assert torch.equal(model_outputs(load(folder / "again"), self.inputs), outputs)


@pytest.mark.parametrize("name", SLOW_OR_CI)
def test_linears(name, tmp_path):
    """Plan; exact at full rank, data-free and calibrated; half of the parameters, calibrated."""
    shop = Workshop(name, tmp_path)
    if shop.family.linears:
        with pytest.raises(SurgeryError) as caught:
            surgery.plan(shop.source, {"structure": "low_rank", "keep": 0.6})
        assert shop.family.linears in str(caught.value)
        return
    plan = surgery.plan(shop.source, {"structure": "low_rank", "keep": 0.6})
    assert plan["totals"]["modules"] > 0
    shop.check_equal(shop.convert("full", structure="btt", rank="full"), 1e-5)
    shop.check_equal(shop.convert("fitted", structure="low_rank", rank="full", calibration=shop.calibration), 1e-4)
    report = convert(
        str(shop.source), make_recipe(structure="low_rank", keep=0.6, calibration=shop.calibration), tmp_path / "half"
    )
    assert 0.4 < report["totals"]["kept"] < 0.61 and len(report["modules"]) == plan["totals"]["modules"]
    half = model_outputs(load(tmp_path / "half"), shop.inputs)
    assert half.shape == shop.outputs.shape and bool(half.isfinite().all())


@pytest.mark.parametrize("name", SLOW_OR_CI)
def test_a_mixer(name, tmp_path):
    """Softmax over a window that no sequence fills is the original attention, after conversion and while generating."""
    shop = Workshop(name, tmp_path, mixers=True)
    recipe = {"structure": "dense", "attention": {"mixer": "window", "window": 4 * LENGTH, "sinks": 0}}
    if shop.family.mixers:
        with pytest.raises(SurgeryError) as caught:
            surgery.plan(shop.source, recipe)
        assert shop.family.mixers in str(caught.value)
        return
    shop.check_equal(shop.convert("mixed", **recipe, calibration=shop.calibration), 1e-4)
    linear = shop.convert("linear", structure="dense", attention={"mixer": "linear", "mask": "gates"})
    model = load(linear)
    assert bool(model_outputs(model, shop.inputs).isfinite().all())
    shop.generate(model)


@pytest.mark.parametrize("name", MIXABLE)
def test_what_mixers_are_told(name):
    """Exact softmax attention with the shape that was found changes nothing: scaling, windows, soft caps, rotation,
    padding.
    """
    family = TINY_FAMILIES[name]
    model = family.build()
    model.set_attn_implementation("eager" if getattr(model.config, "attn_logit_softcapping", None) else "sdpa")
    inputs = (family.mixer_inputs or family.inputs)(ROWS, LENGTH, 2)
    real = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    if set(inputs) == {"input_ids"}:
        real[1, :7] = False
        inputs["attention_mask"] = real.long()
        if (
            "position_ids" in inspect.signature(model.forward).parameters
        ):  # HunYuan's scores depend on positions, not only on distances
            inputs["position_ids"] = mask_positions(inputs["attention_mask"], LENGTH)
    with register_test_mixers():
        mixed = copy.deepcopy(model)
        install(mixed, dict.fromkeys(attention_paths(mixed), ExactConfig()))
        found, expected = model_outputs(mixed, inputs), model_outputs(model, inputs)
    if "attention_mask" in inputs:
        found, expected = found[real], expected[real]
    assert distance(found, expected) < 2e-6


@pytest.mark.parametrize("name", REFUSED)
def test_what_forbids_mixers_is_named(name):
    model = TINY_FAMILIES[name].build()
    with pytest.raises(SurgeryError) as caught:
        for path in attention_paths(model):
            attention_shape(model, path)
    assert TINY_FAMILIES[name].mixers in str(caught.value)


def test_the_page_has_the_table():
    """To write it: python tests/helpers/tiny_families.py --write."""
    page = Path(__file__).resolve().parents[2] / "docs" / "models.md"
    assert models_table() in page.read_text(encoding="utf-8")
