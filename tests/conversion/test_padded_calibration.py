"""Calibration rows padded on the left, on the right or not at all give the same conversion, for every mixer."""

from __future__ import annotations

import pytest
import torch
from helpers.slow import slow_where
from helpers.small import make_recipe, tiny_config
from helpers.small_mixers import MIXER_SPECS

import surgery
from surgery.calibration.attention_samples import AttentionSamples
from surgery.calibration.data import CalibrationSet, align_left
from surgery.calibration.layer_runner import LayerRunner
from surgery.conversion.live_source import LiveSource
from surgery.core.progress import Progress
from surgery.mixers import MIXERS
from surgery.mixers.features.base import FEATURES
from surgery.mixers.masks.base import MASKS

ROWS, LENGTH, PADS = 4, 16, 7
DENSE = {"structure": "dense", "curvature": "none"}
LINEAR = {"mixer": "linear", "chunk": 8}
SPECS = {
    **MIXER_SPECS,
    "bilinear mlr": {"mixer": "bilinear_mlr", "ranks": [0, 4]},
    "mlr, allocated": {"mixer": "mlr", "cache": 0.6},
    "fourier": {**LINEAR, "mask": {"name": "fourier", "period": 50}, "window": 3},
    "banded": {**LINEAR, "mask": {"name": "banded", "width": 4, "dilation": 2}},
    "block diagonal": {**LINEAR, "mask": {"name": "block_diagonal", "block": 5}},
    "input toeplitz": {**LINEAR, "mask": {"name": "input_toeplitz", "length": 32}},
    **{
        f"features {name}": {**LINEAR, "mask": "decay", "features": name, "window": 3, "normalise": name != "identity"}
        for name in FEATURES.names()
    },
}


def tiny(family="llama"):
    """Return a random model of one layer, whose scores differ so much that positions matter."""
    cls, config = tiny_config(family)
    config.num_hidden_layers, config.initializer_range = 1, 0.3
    torch.manual_seed(0)
    return cls(config).eval()


def token_ids(*shape):
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(1))


def padded(rows, side, length):
    """Return a batch of rows of several lengths, padded to `length` tokens."""
    found = {name: torch.zeros(len(rows), length).long() for name in ("input_ids", "attention_mask")}
    for i, ids_T in enumerate(rows):
        at = slice(length - len(ids_T), None) if side == "left" else slice(0, len(ids_T))
        found["input_ids"][i, at], found["attention_mask"][i, at] = ids_T, 1
    return found


def fitted(model, recipe, batch):
    return surgery.apply(model, recipe, calibration=[batch], tokens=ROWS * LENGTH, length=LENGTH, progress=Progress())


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_specs_have_every_mixer_mask_and_feature_map():
    linear = [spec.get("others", spec) for spec in SPECS.values() if spec.get("others", spec)["mixer"] == "linear"]
    names = lambda key, default: {n if isinstance(n := s.get(key, default), str) else n["name"] for s in linear}  # noqa: E731
    shipped = {name for name in MIXERS.names() if not name.startswith("test-")} - {"native"}  # without calibration
    assert {spec["mixer"] for spec in SPECS.values()} == shipped
    assert names("mask", "gates") == set(MASKS.names()) and names("features", "identity") == set(FEATURES.names())


LIKE_OTHERS = ("log-linear behind chunks", "mhla behind chunks", "tbm behind chunks", "toeplitz behind chunks")


@pytest.mark.parametrize("name", slow_where(lambda name: name in LIKE_OTHERS, SPECS))
def test_padding_does_not_change_what_is_fitted(name):
    """Right padding is left padding by the next test, once the rows are aligned."""
    recipe, ids_BT = {**DENSE, "attention": {**SPECS[name], "steps": 1}}, token_ids(ROWS, LENGTH)
    expected = fitted(tiny(), recipe, {"input_ids": ids_BT}).state_dict()
    assert_same(fitted(tiny(), recipe, padded(ids_BT, "left", LENGTH + PADS)).state_dict(), expected)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_linears_behind_learned_positions_are_fitted_at_the_positions_of_unpadded_rows(family):
    recipe, ids_BT = {"structure": "low_rank", "keep": 0.5, "allocate": "uniform"}, token_ids(ROWS, LENGTH)
    expected = fitted(tiny(family), recipe, {"input_ids": ids_BT}).state_dict()
    for side in ("left", "right"):
        found = fitted(tiny(family), recipe, padded(ids_BT, side, LENGTH + PADS)).state_dict()
        assert_same(found, expected)


def test_rows_of_several_lengths_are_the_same_inputs_on_either_side():
    rows = [token_ids(n) for n in (9, 20, 1, 14)]
    left, right = (align_left(padded(rows, side, 26)) for side in ("left", "right"))
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    assert left["input_ids"].shape == (4, 20)
    assert all(torch.equal(left["input_ids"][i, : len(row)], row) for i, row in enumerate(rows))
    whole = {"input_ids": token_ids(4, 20), "attention_mask": torch.ones(4, 20).long()}
    assert all(align_left(whole)[name] is whole[name] for name in whole)


def test_aligned_inputs_keep_gaps_companions_and_the_two_masks_of_an_encoder_decoder():
    mask = torch.tensor([[0, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]])
    x = torch.arange(18).view(3, 6)
    given = {
        "input_ids": x,
        "attention_mask": mask,
        "position_ids": x,
        "inputs_embeds": x[..., None],
        "pixel_values": x[..., None],
    }
    found = align_left(given)
    assert found["attention_mask"].tolist() == [[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]]
    for name in ("input_ids", "position_ids"):
        assert found[name].tolist() == [[2, 3, 4, 5], [6, 7, 8, 9], [12, 13, 14, 15]]
    assert torch.equal(found["inputs_embeds"][..., 0], found["input_ids"])
    assert found["pixel_values"] is given["pixel_values"]
    both = {**given, "decoder_input_ids": x, "decoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]] * 3)}
    found = align_left(both)
    assert found["input_ids"].shape == (3, 6) and torch.equal(found["decoder_input_ids"], x)
    assert found["attention_mask"][0].tolist() == [1, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("rotated", [True, False])
def test_samples_of_attention_hold_no_padding(rotated):
    """Each row of a padded batch gives the sample of that row alone, also with padding on both sides."""
    model, rows = tiny(), [token_ids(n) for n in (9, 20, 14)]
    source = LiveSource(model)
    live, plan = source.open(), source.plan(make_recipe(**DENSE, attention={"mixer": "linear", "mask": "gates"}))

    def samples(inputs):
        runner, found = LayerRunner(live, plan.layout.layers, plan.layout.head, torch.device("cpu")), []

        def visit(call):
            target, every = plan.attention_targets[call.path], range(len(call.hidden_BTD))
            found.extend(AttentionSamples(live, call, target, every, converted_offset=0, rotated=rotated))
            return call.apply(0, len(every))

        runner.run(inputs, visit)
        return found

    right = padded(rows, "right", 24)
    shifted = {name: torch.nn.functional.pad(x, (0, 3)) for name, x in padded(rows, "left", 24).items()}
    alone = [samples({"input_ids": ids_T[None]})[0] for ids_T in rows]
    assert alone[0].inputs.valid_BT is None
    for batch in (right, {**right, "position_ids": torch.arange(24).expand(3, 24)}, align_left(shifted)):
        for found, expected in zip(samples(batch), alone, strict=True):
            assert found.inputs.valid_BT is None and found.teacher.valid_BT is None
            torch.testing.assert_close(found.target_BHTV, expected.target_BHTV, rtol=1e-4, atol=1e-5)
            for name in ("q_BHTK", "k_BGTK", "v_BGTV", "x_BTD"):
                for mine, wanted in ((found.inputs, expected.inputs), (found.teacher, expected.teacher)):
                    torch.testing.assert_close(getattr(mine, name), getattr(wanted, name), rtol=1e-4, atol=1e-5)
            if found.inputs.mask_BHTS is not None:
                assert found.inputs.mask_BHTS.shape[-2:] == found.target_BHTV.shape[2:3] * 2


def test_padding_is_not_counted_as_text():
    rows = [token_ids(n) for n in (9, 20, 14, 20)]
    data = CalibrationSet.from_inputs(padded(rows, "right", 20), 0.25)
    assert (data.n_fit, data.fit_tokens()) == (2, 29)
    assert CalibrationSet.from_inputs({"input_ids": token_ids(4, 20)}, 0.25).fit_tokens() == 40
