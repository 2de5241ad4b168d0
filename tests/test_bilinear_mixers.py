"""Bilinear scores x^T M x': two orders of contraction, an exact start beside RoPE, a calibrated one without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pieces import error, in_pieces

from surgery.errors import SurgeryError
from surgery.mixers import MIXERS, AttentionShape, Inputs, mixer_config
from surgery.mixers import softmax as engine
from surgery.mixers.bilinear_btt import BilinearBTT
from surgery.mixers.bilinear_mlr import BilinearMLR
from surgery.mixers.bilinear_start import from_bilinear
from surgery.mixers.mlr import MLR

SHAPE = AttentionShape(dim=24, heads=4, groups=2, key=8, value=6, scaling=8**-0.5, rotary=8)
STILL = replace(SHAPE, rotary=0)
CONFIGS = {
    "mlr": BilinearMLR((8, 3, 2, 1)),
    "mlr on queries": BilinearMLR((8, 3, 2), contraction="query"),
    "mlr own": BilinearMLR((5, 2), base="own", contraction="split"),
    "mlr norm": BilinearMLR((8, 3, 2), norm="layer"),
    "mlr own norm": BilinearMLR((4, 2), base="own", norm="layer"),
    "btt": BilinearBTT(),
    "btt split": BilinearBTT((4, 3), 2, contraction="split"),
    "btt own": BilinearBTT((4, 6), 2, base="own"),
    "btt norm": BilinearBTT((3, 4), 1, norm="layer"),
}
RAGGED = ["00000111111111111111111", "11111111111111110000000", "00110110001111110101110"]


def made(config, shape=SHAPE):
    """Every factor random, so that M is not zero."""
    torch.manual_seed(0)
    mixer = MIXERS[config](config, shape).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter)
    return mixer


def drawn(batch=3, length=23, shape=SHAPE, valid=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    return Inputs(
        draw(batch, shape.heads, length, shape.key),
        draw(batch, shape.groups, length, shape.key),
        draw(batch, shape.groups, length, shape.value),
        draw(batch, length, shape.dim),
        None if valid is None else torch.tensor([[c == "1" for c in row] for row in valid]),
    )


def by_matrix(mixer, inputs):
    """softmax(scaling q . k + x^T M x') V, with M multiplied out."""
    shape, x_BTD = mixer.shape, inputs.x_BTD
    score = torch.einsum("btd,hde,bse->bhts", x_BTD, mixer.matrix_HDD(), x_BTD)
    if mixer.config.base == "own":
        dims = mixer.bias.shape[1]
        bias = mixer.bias[None, :, None] / dims
        score = score + torch.einsum("bhtd,bsd->bhts", mixer.product(bias), x_BTD)
    else:
        keys = inputs.k_BGTK.repeat_interleave(shape.heads // shape.groups, 1)
        score = score + shape.scaling * inputs.q_BHTK @ keys.mT
    length = score.shape[-1]
    score = score.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
    return score.softmax(-1) @ inputs.v_BGTV.repeat_interleave(shape.heads // shape.groups, 1)


@pytest.mark.parametrize("config", [c for c in CONFIGS.values() if c.norm == "none"], ids=str)
def test_a_score_is_x_m_x(config):
    mixer, inputs = made(config), drawn()
    assert error(mixer.mix(inputs)[0], by_matrix(mixer, inputs)) < 1e-12


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("valid", [None, RAGGED])
def test_pieces_and_steps_are_the_whole(config, valid, monkeypatch):
    monkeypatch.setattr(engine, "QUERIES", 9)
    mixer, inputs = made(config), drawn(valid=valid)
    whole = mixer.dense(inputs)
    assert error(mixer.mix(inputs)[0], whole, inputs.valid_BT) < 1e-12
    for lengths in ([23], [1] * 23, [10, 1, 1, 11]):
        out, state = in_pieces(mixer, inputs, lengths)
        assert error(out, whole, inputs.valid_BT) < 1e-12
    if valid is None:
        live = sum(t[0].numel() for t in state.tensors.values())
        assert mixer.cost(config, SHAPE, 23).cache == live
    assert mixer.cost(config, SHAPE, 23).params == sum(p.numel() for p in mixer.parameters())


@pytest.mark.parametrize("config", [BilinearMLR((8, 3, 2, 1)), BilinearBTT((4, 3), 2)], ids=["mlr", "btt"])
def test_both_orders_of_contraction_agree(config):
    split, query = (made(replace(config, contraction=order)) for order in ("split", "query"))
    inputs = drawn()
    assert error(split.mix(inputs)[0], query.mix(inputs)[0]) < 1e-12
    kept = [m.empty_state(1, "cpu").tensors["keys1"].shape for m in (split, query)]
    assert kept[0][1:] == (2, 0, split.dims(split.config, SHAPE)) and kept[1][1:] == (1, 0, 24)
    auto = MIXERS[config](config, SHAPE)
    assert auto.cost(config, SHAPE, 99).cache == min(
        auto.cost(replace(config, contraction=order), SHAPE, 99).cache for order in ("split", "query")
    )


@pytest.mark.parametrize("config", [c for c in CONFIGS.values() if c.base == "kept"], ids=str)
def test_beside_rope_the_start_is_exact_and_learns(config):
    torch.manual_seed(0)
    mixer, inputs = MIXERS[config](config, SHAPE).double(), drawn()
    before = MIXERS[MLR](MLR((8,)), SHAPE).mix(inputs)[0]
    out = mixer.mix(inputs)[0]
    assert error(out, before) < 1e-14
    rate = 1e-2
    for _ in range(2):  # the zero factor moves first, then what it multiplies
        mixer.zero_grad()
        (mixer.mix(inputs)[0] * torch.linspace(-1, 1, 6)).square().sum().backward()
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter -= rate * parameter.grad
    assert all(p.grad.abs().max() > 0 for p in mixer.parameters())
    assert error(mixer.mix(inputs)[0], before) > 1e-6


@pytest.mark.parametrize("config", [BilinearMLR((8, 3, 2)), BilinearBTT(rank=2)], ids=["mlr", "btt"])
def test_factors_start_at_mup_s_scale(config):
    shape = replace(SHAPE, dim=384, heads=8, groups=8)
    mixer = MIXERS[config](config, shape)
    for name, scale in mixer.mup().items():
        factor = getattr(mixer, name)
        assert factor.std().item() == pytest.approx(0.0 if name.startswith("right") else scale.std, rel=0.05)


def test_gradients():
    for config in (CONFIGS["mlr norm"], CONFIGS["btt split"]):
        mixer, inputs = made(config), drawn(2, 7)
        leaves = [x.requires_grad_() for x in (inputs.x_BTD, inputs.q_BHTK, *mixer.parameters())]

        def through(x, q, *_, mixer=mixer, inputs=inputs):
            return in_pieces(mixer, replace(inputs, x_BTD=x, q_BHTK=q), [4, 1, 2])[0].sum((0, 1))

        assert torch.autograd.gradcheck(through, leaves, fast_mode=True)


# -- from W_Q W_K^T ------------------------------------------------------------------------------------------------
def pretrained(seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    x_ND = draw(400, 24) * torch.logspace(0, -2, 24, dtype=torch.float64) @ draw(24, 24) + draw(24)
    return draw(4, 24, 8), draw(2, 24, 8), draw(4, 8), x_ND


def attention_of(weight_q, weight_k, bias_q, x_BTD, inputs):
    q = torch.einsum("btd,hdk->bhtk", x_BTD, weight_q) + bias_q[:, None]
    k = torch.einsum("btd,gdk->bgtk", x_BTD, weight_k)
    return MIXERS[MLR](MLR((8,)), STILL).mix(replace(inputs, q_BHTK=q, k_BGTK=k, x_BTD=x_BTD))[0]


@pytest.mark.parametrize(
    "config", [BilinearMLR((8,), base="own"), BilinearBTT((1, 1), 8, base="own")], ids=["mlr", "btt"]
)
def test_enough_rank_is_exact(config):
    weight_q, weight_k, bias_q, x_ND = pretrained()
    mixer = MIXERS[config](config, STILL).double()
    left = from_bilinear(mixer, weight_q, weight_k, x_ND.mT @ x_ND / 400, x_ND.mean(0), bias_q)
    inputs = drawn(3, shape=STILL)
    x_BTD = x_ND[:69].view(3, 23, 24) / 8
    if config.name == "bilinear_btt":  # J = 2 heads share right factors of rank 8 = K: exact too
        assert left < 1e-12
    assert (
        error(mixer.mix(replace(inputs, x_BTD=x_BTD))[0], attention_of(weight_q, weight_k, bias_q, x_BTD, inputs))
        < 1e-4
    )


@pytest.mark.parametrize(
    "small, large",
    [
        (BilinearMLR((3,), base="own"), BilinearMLR((3, 2), base="own")),
        (BilinearMLR((3, 1), base="own"), BilinearMLR((5, 1), base="own")),
        (BilinearBTT((4, 4), 1, base="own"), BilinearBTT((4, 4), 2, base="own")),
    ],
)
def test_more_structure_never_fits_worse_and_descent_helps(small, large):
    weight_q, weight_k, _, x_ND = pretrained()
    moment = x_ND.mT @ x_ND / 400
    fits = [
        from_bilinear(MIXERS[c](c, STILL).double(), weight_q, weight_k, moment, x_ND.mean(0)) for c in (small, large)
    ]
    still = from_bilinear(MIXERS[large](large, STILL).double(), weight_q, weight_k, moment, x_ND.mean(0), steps=0)
    assert fits[1] < fits[0] < 1 and fits[1] <= still


def test_the_metric_is_calibrated():
    """Under the data's own moments the error of scores is less than under none."""
    weight_q, weight_k, _, x_ND = pretrained()
    target = STILL.scaling * weight_q @ weight_k.repeat_interleave(2, 0).mT
    centred = x_ND - x_ND.mean(0)
    found = []
    for moment, mean in ((x_ND.mT @ x_ND / 400, x_ND.mean(0)), (torch.eye(24).double(), None)):
        mixer = MIXERS[BilinearMLR](BilinearMLR((3, 1), base="own"), STILL).double()
        from_bilinear(mixer, weight_q, weight_k, moment, mean)
        found.append((x_ND @ (target - mixer.matrix_HDD()) @ centred.mT).square().sum().item())
    assert found[0] < 0.5 * found[1]


# -- refusals ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options, words",
    [
        ({"mixer": "bilinear_mlr", "ranks": [8]}, "two levels or more"),
        ({"mixer": "bilinear_mlr", "ranks": [8, 2], "norm": "batch"}, "none of none, layer"),
        ({"mixer": "bilinear_mlr", "ranks": [8, 2], "norm": "layer", "contraction": "query"}, "use 'split'"),
        ({"mixer": "bilinear_btt", "norm": "layer", "contraction": "split"}, "use 'query'"),
        ({"mixer": "bilinear_btt", "rank": 0}, "1 or more"),
    ],
)
def test_configs_are_refused_with_the_reason(options, words):
    with pytest.raises(SurgeryError, match=words):
        mixer_config(options)


def test_shapes_are_refused_with_the_reason():
    for config, words in (
        (BilinearMLR((4, 2)), "own 8 dims as level 1, not 4"),
        (BilinearMLR((8, 2, 1, 1, 1)), "5 levels cut 24 features into 16 blocks"),
        (BilinearBTT((5, 4)), r"blocks \(5, 4\) cannot tile 24 x 24"),
    ):
        with pytest.raises(SurgeryError, match=words):
            MIXERS[config].refuse(config, SHAPE)
    mixer = MIXERS[BilinearMLR](BilinearMLR((8, 2)), SHAPE)
    with pytest.raises(SurgeryError, match="use base 'kept', which starts exact"):
        from_bilinear(mixer, *(torch.zeros(1),) * 3)
    for config in CONFIGS.values():
        assert mixer_config(config.to_dict()) == config
