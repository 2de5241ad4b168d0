"""Calibrated initialization of linear attention with a softmax window: never worse than the window alone."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from surgery.calibration.attention_samples import AttentionSample
from surgery.conversion.mixer_init.base import relative_error
from surgery.conversion.mixer_init.linear import (
    SHARPNESS,
    WEIGHTS,
    LinearInit,
    attention_map,
    copy_with_sharpness,
    copy_without_linear_part,
    fit_mask_to_profile,
    search_linear_weights,
    solve_least_squares,
    visible_terms,
)
from surgery.core.errors import SurgeryError
from surgery.mixers import AttentionShape, MixerInputs
from surgery.mixers.features.base import FEATURES
from surgery.mixers.linear import LinearMixer
from surgery.mixers.linear_config import LinearAttention
from surgery.mixers.masks.base import MASKS
from surgery.mixers.softmax import Softmax, SoftmaxAttention
from surgery.planning.attention_recipe import AttentionRecipe
from surgery.planning.recipe import load_recipe, shipped_recipes

SHAPE = AttentionShape(dim=16, heads=4, groups=2, key=8, value=8, scaling=8**-0.5)
WINDOW, SINKS = 6, 2


class Rows:
    """Windows with random inputs and given targets."""

    def __init__(self, target, seed, count=1, length=28):
        self.target = SimpleNamespace(shape=SHAPE)
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(count):
            draw = lambda *size: torch.randn(1, *size, generator=generator)  # noqa: E731
            inputs = MixerInputs(
                2 * draw(SHAPE.heads, length, SHAPE.key),
                2 * draw(SHAPE.groups, length, SHAPE.key),
                draw(SHAPE.groups, length, SHAPE.value),
                draw(length, SHAPE.dim),
            )
            self.rows.append(AttentionSample(inputs, inputs, target(inputs)))

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)

    def __getitem__(self, i):
        return self.rows[i % len(self.rows)]

    def output_OI(self):
        return torch.eye(SHAPE.heads * SHAPE.value)


def softmax(inputs, window=None, sinks=0, near="sliding"):
    """Attention by its definition in float64, over all earlier tokens or over the near ones and the first `sinks`."""
    k, v = (t.double().repeat_interleave(SHAPE.heads // SHAPE.groups, 1) for t in (inputs.k_BGTK, inputs.v_BGTV))
    t = torch.arange(k.shape[2])
    behind = t[:, None] - t
    is_near = torch.ones_like(behind, dtype=torch.bool) if window is None else behind < window
    if near == "chunks":
        block = (t - sinks) // window
        is_near = block >= block[:, None] - 1
    seen = (behind >= 0) & (is_near | (t < sinks))
    score = SHAPE.scaling * inputs.q_BHTK.double() @ k.mT
    return (score.masked_fill(~seen, -torch.inf).softmax(-1) @ v).float()


def init_mixer(config, target=softmax, steps=2):
    torch.manual_seed(0)
    seat = SimpleNamespace(config=config, shape=SHAPE, fixed={}, index=0)
    settings = AttentionRecipe(mixer="linear", steps=steps)
    held = Rows(target, seed=1)
    return LinearInit().init(seat, settings, Rows(target, seed=0), held), held


def own_window(held, config):
    """Relative error of the window by itself."""
    wrong = whole = 0.0
    for row in held:
        out = softmax(row.inputs, config.window, config.sinks, config.near_tokens)
        if config.norm:
            out = out * (out.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        wrong += float((out - row.target_BHTV).square().sum())
        whole += float(row.target_BHTV.square().sum())
    return (wrong / whole) ** 0.5


def configs():
    """Every mask and feature map with a window that may stand together, normalised or not, with a norm or without."""
    near = {"window": WINDOW, "sinks": SINKS, "chunk": 8}
    for features in FEATURES.names():
        for normalise in (True, False):
            yield {"mask": "ones", "features": features, "normalise": normalise, **near}
    for mask in MASKS.names():
        for more in ({"scores": "delta"}, {"features": "hedgehog", "normalise": True}):
            yield {"mask": mask, **more, **near}
            yield {"mask": mask, **more, **near, "near_tokens": "chunks", "window": 4}
    yield {"mask": "gates", "norm": "rms", **near}
    for name in shipped_recipes():
        attention = load_recipe(name).attention
        if attention is not None and attention.mixer == "linear" and (attention.model_extra or {}).get("window"):
            yield {**attention.model_extra, **near}


def valid_configs():
    for options in configs():
        try:
            config = LinearAttention(**options)
            LinearMixer.check_config(config, SHAPE)
        except SurgeryError:
            continue
        yield config


@pytest.mark.parametrize(
    "config",
    list(valid_configs()),
    ids=lambda c: f"{c.mask.name}-{c.features.name}-{c.scores}-{c.normalise}-{c.norm}-{c.near_tokens}",
)
def test_item_4_4_a_start_is_never_worse_than_its_own_window(config):
    found, held = init_mixer(config)
    assert relative_error(found.mixer, held) <= own_window(held, config) * (1 + 1e-5)
    assert min(found.errors.values()) == pytest.approx(relative_error(found.mixer, held), rel=1e-5)
    assert found.errors["window"] == pytest.approx(own_window(held, config), rel=1e-4)


@pytest.mark.parametrize("window, block", [(0, 1), (6, 1), (0, 4)])
def test_levels_that_the_text_does_not_reach_get_the_last_fitted_lambda(window, block):
    """A level without a pair of tokens gives a term of rounding errors, and its weight was any number (1e5 and
    more).
    """
    mask = {"name": "hierarchical", "block": block}
    config = LinearAttention(mask=mask, scores="delta", window=window, chunk=8)
    torch.manual_seed(0)
    mixer = solve_least_squares(
        LinearMixer(config, SHAPE).requires_grad_(False), Rows(softmax, seed=0, count=4, length=32), 0
    )
    reached = (31 - window).bit_length() - (block.bit_length() - 1)  # the highest level of 32 tokens
    lambda_HL = torch.nn.functional.softplus(mixer.mask.level.bias.view(SHAPE.heads, -1))
    assert torch.equal(lambda_HL[:, reached:], lambda_HL[:, reached : reached + 1].expand_as(lambda_HL[:, reached:]))
    assert lambda_HL.max() < 10
    assert relative_error(mixer, Rows(softmax, seed=3, length=120)) < 1.5


@pytest.mark.parametrize("mask", ["hierarchical", {"name": "blocks", "block": 4, "count": 8}])
def test_samples_of_several_lengths_are_each_fitted_as_far_as_they_reach(mask):
    """The order of the samples does not matter, and a short one does not hide the levels and blocks of a longer one."""
    config, long = LinearAttention(mask=mask, chunk=8), Rows(softmax, seed=0, count=2, length=32).rows
    short = Rows(softmax, seed=1, count=2, length=6).rows
    fit, found = Rows(softmax, seed=0), []
    for rows in (short + long, long + short):
        torch.manual_seed(0)
        fit.rows = rows
        mixer = fit_mask_to_profile(LinearMixer(config, SHAPE).requires_grad_(False), fit, 0)
        mixer = mixer or LinearMixer(config, SHAPE).requires_grad_(False)
        found.append(solve_least_squares(mixer, fit, 0).state_dict())
    assert all(torch.allclose(found[0][name], tensor, rtol=1e-3, atol=1e-5) for name, tensor in found[1].items())
    if mask == "hierarchical":
        lambda_HL = torch.nn.functional.softplus(found[0]["mask.level.bias"].view(SHAPE.heads, -1))
        assert not torch.equal(lambda_HL[:, 3], lambda_HL[:, 4])  # the short samples have no level above 3


def test_step_sizes_start_alike_in_both_ranges():
    """Of the delta rule, from the entropy of the original's attention: with negative eigenvalues beta = 2 sigmoid(b)."""
    fit, first = Rows(softmax, seed=0), []
    for negative in (False, True):
        config = LinearAttention(mask="gates", scores="delta", negative_eigenvalues=negative)
        mixer = fit_mask_to_profile(LinearMixer(config, SHAPE).requires_grad_(False), fit, 0)
        first.append(config.largest_step * mixer.beta_proj.bias.sigmoid())
    torch.testing.assert_close(*first)


@pytest.mark.parametrize("block", [1, 4, 8])
def test_only_levels_that_chunks_have_are_fitted(block):
    """States behind chunks of 4 tokens have no level below 3 (weights of these were fitted to rounding), which gets the
    first weight.
    """
    mask = {"name": "hierarchical", "block": block}
    config = LinearAttention(mask=mask, scores="delta", window=4, chunk=8, near_tokens="chunks")
    torch.manual_seed(0)
    blank = LinearMixer(config, SHAPE).requires_grad_(False)
    terms = visible_terms(blank, 32)
    assert terms == {1: [3, 4, 5], 4: [1, 2, 3], 8: [0, 1, 2]}[block]
    assert visible_terms(blank, 8) == [] and visible_terms(blank, 9) == terms[:1]
    mixer = solve_least_squares(blank, Rows(softmax, seed=0, count=4, length=32), 0)
    lambda_HL = torch.nn.functional.softplus(mixer.mask.level.bias.view(SHAPE.heads, -1))
    first, last = lambda_HL[:, terms[0] : terms[0] + 1], lambda_HL[:, terms[-1] : terms[-1] + 1]
    assert torch.equal(lambda_HL[:, : terms[0]], first.expand(-1, terms[0]))
    assert torch.equal(lambda_HL[:, terms[-1] :], last.expand_as(lambda_HL[:, terms[-1] :]))
    assert lambda_HL.max() < 10
    assert relative_error(mixer, Rows(softmax, seed=3, length=120)) < 1.5


def test_item_4_4_a_teacher_that_sees_only_the_window_switches_the_linear_part_off():
    config = LinearAttention(mask="ones", features="hedgehog", normalise=True, window=WINDOW, sinks=SINKS)
    found, held = init_mixer(config, lambda inputs: softmax(inputs, WINDOW, SINKS))
    assert relative_error(found.mixer, held) < 1e-5
    assert torch.equal(found.mixer.linear_weight_H, torch.zeros(SHAPE.heads))


@pytest.mark.parametrize("more", [{"normalise": True}, {"norm": "rms"}])
def test_item_4_4_weight_and_sharpness_are_found_head_by_head(more):
    """A teacher of the mixer's own kind, whose heads differ."""
    config = LinearAttention(mask="ones", features="hedgehog", window=WINDOW, sinks=SINKS, **more)
    blank = LinearMixer(config, SHAPE)
    teacher = copy_with_sharpness(blank, torch.tensor([SHARPNESS[1], SHARPNESS[3]]))
    with torch.no_grad():
        teacher.linear_weight_H.copy_(torch.tensor([WEIGHTS[0], WEIGHTS[5], WEIGHTS[9], WEIGHTS[12]]))
    with torch.no_grad():
        fit = Rows(lambda inputs: teacher.mix(inputs)[0], seed=0)
    found = search_linear_weights(copy.deepcopy(blank), fit, 0)
    torch.testing.assert_close(found.state_dict(), teacher.state_dict())


@pytest.mark.parametrize("mask", ["hierarchical", "toeplitz_blocks", "ones"])
def test_item_4_4_least_squares_does_not_depend_on_the_weight_before_it(mask):
    """What is solved for is each term with the linear part's weight at one, whatever the recipe set it to."""
    near = {"mask": mask, "window": WINDOW, "sinks": SINKS}
    fit = Rows(softmax, seed=0)
    errors = []
    for weight in (1.0, 0.25):
        torch.manual_seed(0)
        errors.append(
            relative_error(
                solve_least_squares(LinearMixer(LinearAttention(linear_weight=weight, **near), SHAPE), fit, 0), fit
            )
        )
    assert errors[0] == pytest.approx(errors[1], rel=1e-6)


@pytest.mark.parametrize("more", [{"scores": "delta", "mask": "hierarchical"}, {"mask": "gates"}])
def test_a_term_that_is_almost_zero_on_the_samples_gets_no_huge_weight(more):
    """Sharp features of the queries and of the keys overlap by 1e-6 on the samples, and fully on another text."""
    config = LinearAttention(features="hedgehog", window=WINDOW, sinks=SINKS, chunk=8, **more)

    def disjoint_features(inputs):
        with torch.no_grad():  # the largest and the smallest dim of a query are those of no key
            for x, offset in ((inputs.q_BHTK, 0), (inputs.k_BGTK, 4)):
                x.mul_(0.25)[..., offset : offset + 2] += 4
                x[..., offset + 2 : offset + 4] -= 4
        return softmax(inputs)

    blank = copy_with_sharpness(LinearMixer(config, SHAPE), torch.full((SHAPE.groups,), 10.0))
    apart, matched = Rows(disjoint_features, seed=0, count=4), Rows(softmax, seed=1)
    mixer = solve_least_squares(blank.requires_grad_(False), apart, 0)
    assert relative_error(mixer, apart) <= relative_error(copy_without_linear_part(blank), apart) * (1 + 1e-6)
    inputs = matched[0].inputs
    assert mixer.mix(inputs)[0].abs().max() < 10 * inputs.v_BGTV.abs().max()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 0.7), (5, 0.7)])
def test_the_attention_map_is_that_of_the_teacher(window, softcap, causal):
    """Values that are unit vectors give the rows of the map as outputs; windows and soft caps of the model count."""
    T, generator = 16, torch.Generator().manual_seed(0)
    shape = AttentionShape(8, 4, 2, 6, T, scaling=0.9, causal=causal, window=window, softcap=softcap)
    q, k = (torch.randn(1, heads, T, 6, generator=generator) for heads in (4, 2))
    inputs = MixerInputs(q, k, torch.eye(T).expand(1, 2, T, T), torch.zeros(1, T, 8))
    found = attention_map(AttentionSample(inputs, inputs, inputs.v_BGTV), shape)
    torch.testing.assert_close(found, SoftmaxAttention(Softmax(), shape).dense(inputs))
