"""Bilinear scores x^T M x': both orders of contraction, exact initialization with RoPE, calibrated initialization
without.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.pieces import relative_error, run_in_pieces
from torch.utils.flop_counter import FlopCounterMode

from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, AttentionShape, MixerInputs, mixer_config
from surgery.mixers.bilinear import fit_bilinear
from surgery.mixers.bilinear_btt import BilinearBTT
from surgery.mixers.bilinear_mlbtc import BilinearMLBTC
from surgery.mixers.bilinear_mlr import BilinearMLR
from surgery.mixers.common import softmax as engine
from surgery.mixers.common.kv_layout import KVLayout
from surgery.mixers.mlr import MLR

SHAPE = AttentionShape(dim=24, heads=4, groups=2, key=8, value=6, scaling=8**-0.5, rotary=8)
STILL = replace(SHAPE, rotary=0)
CONFIGS = {
    "mlr": BilinearMLR((8, 3, 2, 1)),
    "mlr on queries": BilinearMLR((8, 3, 2), contraction="query"),
    "mlr own": BilinearMLR((5, 2), base="own", contraction="split"),
    "mlr norm": BilinearMLR((8, 3, 2), norm="layer"),
    "mlr own norm": BilinearMLR((4, 2), base="own", norm="layer"),
    "mlbtc": BilinearMLBTC((2, "sqrt", 3), (2, 1, 1)),
    "mlbtc on queries": BilinearMLBTC((1, (4, 3)), (2, 1), contraction="query"),
    "mlbtc own": BilinearMLBTC(((4, 6), 2, 1), (1, 2, 3), base="own", contraction="split"),
    "btt": BilinearBTT(),
    "btt split": BilinearBTT((4, 3), 2, contraction="split"),
    "btt own": BilinearBTT((4, 6), 2, base="own"),
    "btt norm": BilinearBTT((3, 4), 1, norm="layer"),
    "mlr qk": BilinearMLR((8, 3, 2), norm="qk"),
    "mlr own qk": BilinearMLR((4, 2, 1), base="own", norm="qk", scale=3.0),
    "btt qk": BilinearBTT((3, 4), 2, norm="qk"),
    "btt own qk": BilinearBTT((4, 6), 1, base="own", norm="qk", scale=3.0),
}
RAGGED = ["00000111111111111111111", "11111111111111110000000", "00110110001111110101110"]


def make_mixer(config, shape=SHAPE):
    """Every factor random, so that M is not zero."""
    torch.manual_seed(0)
    mixer = MIXERS[config](config, shape).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter)
    return mixer


def random_inputs(batch=3, length=23, shape=SHAPE, valid=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    return MixerInputs(
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
    mixer, inputs = make_mixer(config), random_inputs()
    assert relative_error(mixer.mix(inputs)[0], by_matrix(mixer, inputs)) < 1e-12


# -- eqs. 39 and 40, written from the paper ------------------------------------------------------------------------------
def layer_norm(rows):
    """Of each row; no gain."""
    centred = rows - rows.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()


def order(first, second, inside=1):
    """The permutation (first, second, inside) -> (second, first, inside): row i of P z is z[order[i]]."""
    return torch.arange(first * second * inside).view(first, second, inside).transpose(0, 1).flatten()


def equation_39(mixer, x_TD, head, group):
    """sum_l LN(X (+) W_Q) LN((+) W_K^T X^T) C / (r_l p_l)"""
    first, ranks, at, total = mixer.config.base == "kept", mixer.config.ranks, 0, 0.0
    for level in range(2 if first else 1, len(ranks) + 1):
        p, r = 2 ** (level - 1), ranks[level - 1]
        queries = x_TD @ torch.block_diag(*getattr(mixer, f"left{level}")[head])
        keys = (torch.block_diag(*getattr(mixer, f"right{level}")[group]).mT @ x_TD.mT).mT
        gain, at = mixer.key_gain[at : at + r * p], at + r * p
        total = total + layer_norm(queries) @ (gain * layer_norm(keys)).mT * mixer.config.scale / (r * p)
    return total


def equation_40(mixer, x_TD, head, group):
    """LN(X) LN(P_L (+) W_Q P_R (+) W_K^T X^T) C / (a b)"""
    b, c, a, s = mixer.left.shape[1:]
    w_k = [mixer.right[group, :, i].permute(1, 0, 2).flatten(1) for i in range(c)]  # d x b s
    w_q = [mixer.left[head, i].permute(1, 0, 2).flatten(1) for i in range(b)]  # a x c s
    y = torch.block_diag(*(w.mT for w in w_k)) @ x_TD.mT  # (c, b, s)
    y = (torch.block_diag(*w_q) @ y[order(c, b, s)])[order(b, a)]
    return layer_norm(x_TD) @ (mixer.key_gain * layer_norm(y.mT)).mT * mixer.config.scale / (a * b)


RAGGED_SHAPE = AttentionShape(dim=40, heads=6, groups=2, key=4, value=3, scaling=0.3, rotary=4)
PAPER = [
    (BilinearMLR((8, 3, 2), norm="qk"), SHAPE),
    (BilinearMLR((3, 2, 1), base="own", norm="qk", scale=5.0), SHAPE),
    (BilinearMLR((2, 5, 1, 3), base="own", norm="qk"), RAGGED_SHAPE),
    (BilinearBTT((4, 4), 1, base="own", norm="qk", scale=5.0), replace(SHAPE, dim=16)),
    (BilinearBTT((4, 4), 3, norm="qk"), replace(SHAPE, dim=16, groups=4)),
    (BilinearBTT((5, 8), 2, base="own", norm="qk"), RAGGED_SHAPE),
    (BilinearBTT((10, 4), 1, norm="qk"), RAGGED_SHAPE),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "config, shape", PAPER, ids=lambda value: f"D = {value.dim}" if hasattr(value, "dim") else str(value)
)
def test_norm_qk_is_equations_39_and_40(config, shape, causal):
    """Square and ragged grids, several heads a group, causal or not."""
    shape = replace(shape, causal=causal)
    mixer, inputs = make_mixer(config, shape), random_inputs(2, 11, shape)
    equation = equation_39 if config.name == "bilinear_mlr" else equation_40
    outs = []
    for row in range(2):
        for head in range(shape.heads):
            group = head // (shape.heads // shape.groups)
            score = equation(mixer, inputs.x_BTD[row], head, group)
            if config.base == "kept":
                score = score + shape.scaling * inputs.q_BHTK[row, head] @ inputs.k_BGTK[row, group].mT
            if causal:
                score = score.masked_fill(torch.ones(11, 11).triu(1) > 0, -torch.inf)
            outs.append(score.softmax(-1) @ inputs.v_BGTV[row, group])
    wanted = torch.stack(outs).view(2, shape.heads, 11, shape.value)
    assert relative_error(mixer.mix(inputs)[0], wanted) < 1e-12
    assert relative_error(mixer.dense(inputs), wanted) < 1e-12


def scores(mixer, inputs):
    """(B, H, T, T) before the softmax: the mixer's own terms, without those of a kept score."""
    term = mixer.terms(inputs, mixer.cache_entries(inputs))[-1]
    product = term.q_BGJTR @ term.k_BGSR.unsqueeze(2).mT
    product = product if term.scale_BGJS is None else product * term.scale_BGJS.unsqueeze(-2)
    return product.flatten(1, 2) * mixer.shape.scaling


def test_every_level_of_norm_qk_is_normalised_on_its_own():
    """One level is what norm `layer` makes of it, but for the constant; a level's score is at most C; twice the weights
    of one level change nothing. Under `layer` they change the others' share."""
    shape, inputs = replace(SHAPE, groups=4), random_inputs(shape=replace(SHAPE, groups=4))
    alone = {norm: make_mixer(BilinearMLR((4,), base="own", norm=norm), shape) for norm in ("layer", "qk")}
    for mixer in alone.values():
        for name, value in (("left1", 0.7), ("right1", 0.3), ("key_gain", 1.0), ("bias", 0.0)):
            if hasattr(mixer, name):
                torch.nn.init.constant_(getattr(mixer, name), value)
        torch.manual_seed(1)
        mixer.left1.data += torch.randn_like(mixer.left1)
        mixer.right1.data += torch.randn_like(mixer.right1)
    assert relative_error(scores(alone["qk"], inputs), 8 * scores(alone["layer"], inputs)) < 1e-12
    assert scores(alone["qk"], inputs).abs().max() <= 8
    for norm in ("qk", "layer"):
        mixer = make_mixer(BilinearMLR((4, 2), base="own", norm=norm), shape)
        before = scores(mixer, inputs)
        mixer.left2.data *= 2
        changed = relative_error(scores(mixer, inputs), before)
        assert changed < 1e-4 if norm == "qk" else changed > 0.05


def test_the_score_of_eq_39_is_a_sum_over_levels_of_at_most_c_each():
    """A level whose factors are zero has the score 0, as LN(0) = 0; the others do not change."""
    shape, inputs = replace(SHAPE, groups=4), random_inputs(shape=replace(SHAPE, groups=4))
    mixer = make_mixer(BilinearMLR((4, 2, 3), base="own", norm="qk", scale=5.0), shape)
    torch.nn.init.ones_(mixer.key_gain)
    kept, alone = {n: p.detach().clone() for n, p in mixer.named_parameters()}, []
    for level in (1, 2, 3):
        mixer.load_state_dict(kept, strict=False)
        for other in {1, 2, 3} - {level}:
            torch.nn.init.zeros_(getattr(mixer, f"left{other}"))
        alone.append(scores(mixer, inputs))
        assert 0.5 < alone[-1].abs().max() <= 5.0
    mixer.load_state_dict(kept, strict=False)
    assert relative_error(scores(mixer, inputs), sum(alone)) < 1e-12


def test_eq_40_is_bounded_by_c_and_ignores_the_size_of_factors():
    """Both sides are normalised: scores are at most C, and twice the factors of W_Q or W_K change nothing, up to the
    norm's epsilon.
    """
    shape, inputs = replace(SHAPE, groups=4), random_inputs(shape=replace(SHAPE, groups=4))
    mixer = make_mixer(BilinearBTT((4, 6), 2, base="own", norm="qk", scale=5.0), shape)
    torch.nn.init.ones_(mixer.key_gain)
    before = scores(mixer, inputs)
    assert 0.5 < before.abs().max() <= 5.0
    for name in ("left", "right"):
        getattr(mixer, name).data *= 2
        assert relative_error(scores(mixer, inputs), before) < 1e-3


OLDER = {  # of what version 0.1.0 computes: configs as its checkpoints hold them
    "bilinear_mlr layer": ({"mixer": "bilinear_mlr", "ranks": [8, 3, 2], "base": "kept", "norm": "layer", "contraction": "auto"}, -20.044598110205527),
    "bilinear_mlr own layer": ({"mixer": "bilinear_mlr", "ranks": [4, 2], "base": "own", "norm": "layer", "contraction": "auto"}, -9.44446192207682),
    "bilinear_mlr": ({"mixer": "bilinear_mlr", "ranks": [8, 3, 2]}, -16.56729947874836),
    "bilinear_btt layer": ({"mixer": "bilinear_btt", "blocks": [3, 4], "rank": 2, "norm": "layer"}, -19.517034692149284),
    "bilinear_btt": ({"mixer": "bilinear_btt", "blocks": [4, 6], "rank": 2, "base": "own"}, -3.304013127779646),
}  # fmt: skip


@pytest.mark.parametrize("name", OLDER)
def test_configs_of_older_checkpoints_mean_what_they_did(name):
    """Without `norm` no layer norm, with norm `layer` the joint one; `scale` is in none of them."""
    options, wanted = OLDER[name]
    mixer, inputs = make_mixer(mixer_config(options)), random_inputs()
    out = mixer.mix(inputs)[0]
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    assert (out * weights).sum().item() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("valid", [None, RAGGED])
def test_pieces_and_steps_are_the_whole(config, valid, monkeypatch):
    monkeypatch.setattr(engine, "QUERIES_PER_PASS", 9)
    mixer, inputs = make_mixer(config), random_inputs(valid=valid)
    whole = mixer.dense(inputs)
    assert relative_error(mixer.mix(inputs)[0], whole, inputs.valid_BT) < 1e-12
    for lengths in ([23], [1] * 23, [10, 1, 1, 11], [1, 2, 3, 17], [2, 21], [3, 20]):
        out, state = run_in_pieces(mixer, inputs, lengths)
        assert relative_error(out, whole, inputs.valid_BT) < 1e-12
    if valid is None:
        live = sum(t[0].numel() for t in state.tensors.values())
        assert mixer.cost(config, SHAPE, 23).cache == live
    assert mixer.cost(config, SHAPE, 23).params == sum(p.numel() for p in mixer.parameters())


@pytest.mark.parametrize(
    "config", [BilinearMLR((8, 3, 2, 1)), BilinearBTT((4, 3), 2), BilinearMLBTC((2, (4, 3)), (2, 1))], ids=str
)
def test_both_orders_of_contraction_agree(config):
    split, query = (make_mixer(replace(config, contraction=order)) for order in ("split", "query"))
    inputs = random_inputs()
    assert relative_error(split.mix(inputs)[0], query.mix(inputs)[0]) < 1e-12
    kept = [m.empty_state(1, "cpu").tensors["keys1"].shape for m in (split, query)]
    assert kept[0][1:] == (2, 0, split.dims(split.config, SHAPE)) and kept[1][1:] == (1, 0, 24)
    auto = MIXERS[config](config, SHAPE)
    assert auto.cost(config, SHAPE, 99).cache == min(
        auto.cost(replace(config, contraction=order), SHAPE, 99).cache for order in ("split", "query")
    )


def counted_macs(contraction):
    """Return the multiply-accumulates of the matrix products of a contraction."""
    with FlopCounterMode(display=False) as counter:
        result = contraction()
    return result, counter.get_total_flops() // 2


def test_costs_are_those_of_tables_2_and_3():
    """One head, T tokens, values left out: every row of Table 2, and both orders of Table 3. Products are counted from
    the contractions themselves; Table 2 counts an addition to the sum of dense blocks as half a multiplication.
    """
    tokens, dims, ranks, s = 48, 64, (4, 2, 3), 2
    shape = AttentionShape(dim=dims, heads=1, groups=1, key=8, value=6, scaling=1.0)
    x, total, levels = torch.randn(tokens, dims, dtype=torch.float64), sum(ranks), range(len(ranks))
    factors = [[torch.randn(2**i, dims // 2**i, r, dtype=torch.float64) for _ in range(2)] for i, r in enumerate(ranks)]

    def apart(m, level):  # (T, D) -> (p, T, D / p)
        return m.unflatten(1, (2**level, -1)).movedim(1, 0)

    def read(level, side):  # X (+)_k W_k, (p, T, r)
        return apart(x, level) @ factors[level][side]

    def key_product(level):  # (+)_k W_Q W_K^T X^T, (D, T)
        return (factors[level][0] @ read(level, 1).mT).flatten(0, 1)

    def dense_blocks(level):
        return factors[level][0] @ factors[level][1].mT

    def through_dense():
        return x @ sum(torch.block_diag(*dense_blocks(level)) for level in levels) @ x.mT

    def level_by_level():
        return sum((apart(x, n) @ dense_blocks(n)).movedim(0, 1).flatten(1) @ x.mT for n in levels)

    def split():
        return sum((read(n, 0) @ read(n, 1).mT).sum(0) for n in levels)

    t2, tdr = tokens**2, 2 * tokens * dims * total
    blocks = sum(dims**2 * r // 2**i for i, r in enumerate(ranks))
    additions = dims**2 * sum(0.5 ** (i + 1) for i in levels) - dims**2 / 2
    table = {
        "eq. 28, summed first": (through_dense, t2 * dims + tokens * dims**2 + blocks),
        "eq. 28": (level_by_level, t2 * len(ranks) * dims + blocks + sum(tokens * dims**2 // 2**i for i in levels)),
        "eq. 29": (split, tdr + t2 * sum(2**i * r for i, r in enumerate(ranks))),
        "eq. 30": (lambda: sum(x @ key_product(n) for n in levels), len(ranks) * t2 * dims + tdr),
        "eq. 31": (lambda: x @ sum(key_product(n) for n in levels), t2 * dims + tdr),
    }
    expected = split()
    for name, (contraction, printed) in table.items():
        result, count = counted_macs(contraction)
        assert torch.allclose(result, expected) and count == printed, name
    assert additions == sum(dims**2 / 2**i for i in levels[1:]) / 2  # elements that each further level adds, halved
    left, right = torch.randn(2, dims, total, dtype=torch.float64)
    assert counted_macs(lambda: (x @ left) @ (x @ right).mT)[1] == t2 * total + tdr  # low rank

    def macs(config):
        return tokens * (MIXERS[config].cost(config, shape, tokens).macs - tokens * shape.value)

    assert macs(BilinearMLR(ranks, base="own", contraction="split")) == table["eq. 29"][1]
    assert macs(BilinearMLR(ranks, base="own", contraction="query")) == table["eq. 31"][1]
    products = 2 * s * tokens * round(dims**1.5)
    assert macs(BilinearBTT((8, 8), s, base="own", contraction="split")) == s * t2 * dims + products  # eq. 33
    assert macs(BilinearBTT((8, 8), s, base="own", contraction="query")) == t2 * dims + products  # eqs. 34, 35


@pytest.mark.parametrize("config", [c for c in CONFIGS.values() if c.base == "kept"], ids=str)
def test_beside_rope_the_start_is_exact_and_learns(config):
    torch.manual_seed(0)
    mixer, inputs = MIXERS[config](config, SHAPE).double(), random_inputs()
    before = MIXERS[MLR](MLR((8,)), SHAPE).mix(inputs)[0]
    out = mixer.mix(inputs)[0]
    assert relative_error(out, before) < 1e-14
    rate = 1e-2
    for _ in range(2):  # the zero factor moves first, then what it multiplies
        mixer.zero_grad()
        (mixer.mix(inputs)[0] * torch.linspace(-1, 1, 6)).square().sum().backward()
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter -= rate * parameter.grad
    assert all(p.grad.abs().max() > 0 for p in mixer.parameters())
    assert relative_error(mixer.mix(inputs)[0], before) > 1e-6


@pytest.mark.parametrize(
    "config", [BilinearMLR((8, 3, 2)), BilinearBTT(rank=2), BilinearMLBTC((4, "sqrt"), (3, 2))], ids=str
)
def test_factors_start_at_mup_s_scale(config):
    shape = replace(SHAPE, dim=384, heads=8, groups=8)
    mixer = MIXERS[config](config, shape)
    for name, scale in mixer.mup().items():
        factor = getattr(mixer, name)
        assert factor.std().item() == pytest.approx(0.0 if name.startswith("right") else scale.std, rel=0.05)


def initial_mixer(kind, norm, width, rank):
    """A mixer with a score of its own, as it starts; heads of 4, two a group."""
    shape = AttentionShape(dim=width, heads=width // 4, groups=width // 8, key=4, value=4, scaling=0.5)
    config = BilinearBTT(rank=rank, base="own", norm=norm)
    if kind == "mlr":
        config = BilinearMLR((8 * rank, 4 * rank, 2 * rank), base="own", norm=norm)
    torch.manual_seed(0)
    return MIXERS[config](config, shape).double(), random_inputs(1, 32, shape)


SIZES = [(64, 1), (64, 4), (256, 1), (256, 4)]  # width, rank
# Not BTT's `layer`: there x^T M is divided by F before its layer norm, whose epsilon is no longer small then.
FORMS = [("mlr", "none"), ("mlr", "layer"), ("mlr", "qk"), ("btt", "none"), ("btt", "qk")]


def deviation(mixer):
    """Of a score of independent tokens: the sum of n products, divided by n, and times C; normalised vectors have n - 1
    dims of their own, for their mean is 0."""
    config, D = mixer.config, mixer.shape.dim
    dims = mixer.dims(config, mixer.shape)
    if config.norm == "none":
        return dims**-0.5
    if config.norm == "layer":
        return (dims - 1) ** -0.5
    each = [D] if config.name == "bilinear_btt" else [2**level * rank for level, rank in enumerate(config.ranks)]
    return config.scale * sum(1 / (n - 1) for n in each) ** 0.5


@pytest.mark.parametrize("kind, norm", FORMS)
def test_item_4_6_initial_weights_follow_equations_36_to_38(kind, norm):
    """Features begin with one size at every width and rank: a score's deviation is what its 1 / n alone makes of it."""
    for width, rank in SIZES:
        mixer, inputs = initial_mixer(kind, norm, width, rank)
        for side in ("left", "right") if kind == "mlr" or norm == "none" else ("right",):
            assert mixer.features(inputs.x_BTD, side).std().item() == pytest.approx(1, rel=0.1)
        for name, mup in mixer.mup().items():
            assert getattr(mixer, name).std().item() == pytest.approx(mup.fan_in**-0.5, rel=0.1)
        score = scores(mixer, inputs)[0][:, ~torch.eye(32, dtype=torch.bool)]
        assert score.std().item() == pytest.approx(deviation(mixer), rel=0.1), (width, rank)


def test_item_4_6_fans_are_those_of_the_paper():
    """D / p_l of eq. 36; c s and d of eqs. 37 and 38, in the order of X (P_L L P_R R^T X^T). x^T M, which norm `layer`
    takes the layer norm of, has a and b s."""
    shape = replace(SHAPE, dim=40, heads=10, groups=5)
    fans = lambda config: {n: m.fan_in for n, m in MIXERS[config](config, shape).mup().items()}  # noqa: E731
    assert fans(BilinearMLR((3, 2, 1), base="own")) == {"left1": 40, "right1": 40, "left2": 20, "right2": 20, "left3": 10, "right3": 10}  # fmt: skip
    b, c, a, d, s = 5, 4, 8, 10, 3
    assert fans(BilinearBTT((b, c), s, base="own", norm="qk")) == {"left": c * s, "right": d}
    assert fans(BilinearBTT((b, c), s, base="own", norm="layer")) == {"left": a, "right": b * s}
    assert fans(BilinearBTT((b, c), s, base="own")) == {"left": a, "right": d}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind, norm", FORMS)
def test_item_4_6_one_step_of_adam_moves_scores_alike_at_every_width_and_rank(kind, norm, side):
    """The factors of one side train, at the rates that a recipe with base_width gives them. At eq. 38's rate the keys'
    features are moved by 1 each, and W_Q with its c s of them has a norm of sqrt(s) against LN(M x')."""
    from surgery.training.optim import make_groups, make_optimizer
    from surgery.training.recipe import parse_healing_recipe

    told = {"kind": "lm", "tokens": 64, "length": 32, "batch": 1, "rate": 1e-4, "optimiser": {"base_width": 64}}
    stage = parse_healing_recipe({"stages": [told]}).stages[0]
    moved = {}
    for width, rank in SIZES:
        mixer, inputs = initial_mixer(kind, norm, width, rank)
        model = torch.nn.ModuleDict({"attention": torch.nn.ModuleDict({"mixer": mixer})})
        names = {n for n, _ in model.named_parameters() if n.rpartition(".")[2].startswith(side)}
        steps = make_optimizer(make_groups(model, names, stage), stage.optimiser)
        before = scores(mixer, inputs)[0, :, 20, 7]
        before.sum().neg().backward()
        steps.step()
        moved[width, rank] = (scores(mixer, inputs)[0, :, 20, 7] - before).mean().item()
        if (kind, norm, side) == ("btt", "qk", "right"):
            moved[width, rank] /= rank**0.5
    assert min(moved.values()) > 0 and max(moved.values()) / min(moved.values()) < 1.4, moved


def test_item_4_6_models_from_scratch_begin_and_are_normalised_by_the_fans_of_factors():
    """`pretrain` makes them with fresh_model; weight_norm cores holds the factors' size, as it does that of cores."""
    from recipes.papers.mup.bilinear_norms import FORMS, make_bilinear_gpt2
    from surgery.training.weight_norm import add_core_norms, fold_core_norms, rms

    for form, fans in (
        ("MLR 8|4|2, qk, C = 8", {"left1": 64, "right2": 32}),
        ("BTT rank 1, qk, C = 8", {"left": 8, "right": 8}),
    ):
        model = make_bilinear_gpt2(FORMS[form], 20, seed=0)
        path = "transformer.h.1.attn.mixer"
        mixer, names = model.get_submodule(path), {f"{path}.{name}" for name in fans}
        sizes = {name: rms(getattr(mixer, name)).item() for name in fans}
        assert sizes == pytest.approx({name: fan_in**-0.5 for name, fan_in in fans.items()}, rel=0.1)
        trained = add_core_norms(model, names)
        assert all(f"{path}.parametrizations.{name}.original" in trained for name in fans) and not names & trained
        with torch.no_grad():
            for name in fans:
                mixer.parametrizations[name].original.mul_(5)
        held = {name: rms(getattr(mixer, name)).item() for name in fans}
        assert held == pytest.approx(sizes)
        fold_core_norms(model)
        assert names <= {name for name, _ in model.named_parameters()}


def test_norms_are_compared_from_scratch():
    from recipes.papers.mup.bilinear_norms import result_rows

    text = "Mia went to the harbour and saw the boats. " * 20
    options = {"seeds": 1, "steps": 2, "log2_rates": [-6.0], "only": "qk, C = 8", "flat": False}
    for row in result_rows(text, text, **options):
        assert row["losses"][0] < 4 and row["log2 rate"] == -6


def test_kernels_of_mlr_attention_leave_shared_and_scaled_keys_alone():
    """Keys that all groups share have one group in memory: a kernel that steps through groups would read behind
    them.
    """
    pytest.importorskip("triton")
    from surgery.kernels import mlr_attention
    from surgery.kernels.mlr_attention import sdpa as attend_library

    shape = replace(SHAPE, value=24)
    values = random_inputs(1, shape=shape).v_BGTV.bfloat16()
    for config in (BilinearBTT((4, 6), base="own"), BilinearBTT((4, 6), base="own", norm="qk")):
        mixer, inputs = make_mixer(config, shape), random_inputs(1, shape=shape)
        (term,) = mixer.terms(inputs, mixer.cache_entries(inputs))
        term = term._replace(q_BGJTR=term.q_BGJTR.bfloat16(), k_BGSR=term.k_BGSR.bfloat16())
        each = term._replace(k_BGSR=term.k_BGSR.expand(-1, shape.groups, -1, -1))
        for accepts in (mlr_attention.accepts, attend_library.accepts):
            frame = KVLayout(torch.tensor([23]), 23, 23, holes=False)
            assert accepts([each._replace(scale_BGJS=None)], values, frame, shape)
            assert not accepts([term._replace(scale_BGJS=None)], values, frame, shape)
            assert accepts([each], values, frame, shape) == (config.norm == "none")


def test_gradients():
    for config in (CONFIGS["mlr norm"], CONFIGS["btt split"], CONFIGS["mlr qk"], CONFIGS["btt qk"]):
        mixer, inputs = make_mixer(config), random_inputs(2, 7)
        leaves = [x.requires_grad_() for x in (inputs.x_BTD, inputs.q_BHTK, *mixer.parameters())]

        def through(x, q, *_, mixer=mixer, inputs=inputs):
            return run_in_pieces(mixer, replace(inputs, x_BTD=x, q_BHTK=q), [4, 1, 2])[0].sum((0, 1))

        assert torch.autograd.gradcheck(through, leaves, fast_mode=True)


# -- from W_Q W_K^T ------------------------------------------------------------------------------------------------
def pretrained_weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    x_ND = draw(400, 24) * torch.logspace(0, -2, 24, dtype=torch.float64) @ draw(24, 24) + draw(24)
    return draw(4, 24, 8), draw(2, 24, 8), draw(4, 8), x_ND


def attention_of(weight_q, weight_k, bias_q, x_BTD, inputs):
    q = torch.einsum("btd,hdk->bhtk", x_BTD, weight_q) + bias_q[:, None]
    k = torch.einsum("btd,gdk->bgtk", x_BTD, weight_k)
    return MIXERS[MLR](MLR((8,)), STILL).mix(replace(inputs, q_BHTK=q, k_BGTK=k, x_BTD=x_BTD))[0]


@pytest.mark.parametrize(
    "config",
    [BilinearMLR((8,), base="own"), BilinearBTT((1, 1), 8, base="own"), BilinearMLBTC((1, 4), (8, 1), base="own")],
    ids=str,
)
def test_enough_rank_is_exact(config):
    weight_q, weight_k, bias_q, x_ND = pretrained_weights()
    mixer = MIXERS[config](config, STILL).double()
    left = fit_bilinear(mixer, weight_q, weight_k, x_ND.mT @ x_ND / 400, x_ND.mean(0), bias_q)
    inputs = random_inputs(3, shape=STILL)
    x_BTD = x_ND[:69].view(3, 23, 24) / 8
    if config.name != "bilinear_mlr":  # J = 2 heads share right factors of rank 8 = K: exact too
        assert left < 1e-12
    assert (
        relative_error(
            mixer.mix(replace(inputs, x_BTD=x_BTD))[0], attention_of(weight_q, weight_k, bias_q, x_BTD, inputs)
        )
        < 1e-4
    )


@pytest.mark.parametrize(
    "small, large",
    [
        (BilinearMLR((3,), base="own"), BilinearMLR((3, 2), base="own")),
        (BilinearMLR((3, 1), base="own"), BilinearMLR((5, 1), base="own")),
        (BilinearBTT((4, 4), 1, base="own"), BilinearBTT((4, 4), 2, base="own")),
        (BilinearMLBTC((1, 2), (3, 1), base="own"), BilinearMLBTC((1, 2, (4, 4)), (3, 1, 1), base="own")),
    ],
)
def test_more_structure_never_fits_worse_and_descent_helps(small, large):
    weight_q, weight_k, _, x_ND = pretrained_weights()
    moment = x_ND.mT @ x_ND / 400
    fits = [
        fit_bilinear(MIXERS[c](c, STILL).double(), weight_q, weight_k, moment, x_ND.mean(0)) for c in (small, large)
    ]
    still = fit_bilinear(MIXERS[large](large, STILL).double(), weight_q, weight_k, moment, x_ND.mean(0), steps=0)
    assert fits[1] < fits[0] < 1 and fits[1] <= still


def test_the_metric_is_calibrated():
    """Under the data's own moments the error of scores is less than under none."""
    weight_q, weight_k, _, x_ND = pretrained_weights()
    target = STILL.scaling * weight_q @ weight_k.repeat_interleave(2, 0).mT
    centred = x_ND - x_ND.mean(0)
    found = []
    for moment, mean in ((x_ND.mT @ x_ND / 400, x_ND.mean(0)), (torch.eye(24).double(), None)):
        mixer = MIXERS[BilinearMLR](BilinearMLR((3, 1), base="own"), STILL).double()
        fit_bilinear(mixer, weight_q, weight_k, moment, mean)
        found.append((x_ND @ (target - mixer.matrix_HDD()) @ centred.mT).square().sum().item())
    assert found[0] < 0.5 * found[1]


# -- refusals ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options, words",
    [
        ({"mixer": "bilinear_mlr", "ranks": [8]}, "two levels or more"),
        ({"mixer": "bilinear_mlr", "ranks": [8, 2], "norm": "batch"}, "norm must be one of none, layer, qk"),
        ({"mixer": "bilinear_mlr", "ranks": [8, 2], "norm": "qk", "contraction": "query"}, "use 'split'"),
        ({"mixer": "bilinear_mlr", "ranks": [1, 2], "base": "own", "norm": "qk"}, "single feature"),
        ({"mixer": "bilinear_mlr", "ranks": [8, 2], "norm": "qk", "scale": 0.0}, "positive number"),
        ({"mixer": "bilinear_mlr", "ranks": [8, 2], "norm": "layer", "scale": 4.0}, "constant C of norm 'qk'"),
        ({"mixer": "bilinear_btt", "norm": "qk", "scale": float("nan")}, "scale"),
        ({"mixer": "bilinear_btt", "norm": "qk", "contraction": "split"}, "use 'query'"),
        ({"mixer": "bilinear_mlr", "ranks": [8, 2], "norm": "layer", "contraction": "query"}, "use 'split'"),
        ({"mixer": "bilinear_btt", "norm": "layer", "contraction": "split"}, "use 'query'"),
        ({"mixer": "bilinear_btt", "rank": 0}, "1 or more"),
        ({"mixer": "bilinear_mlbtc", "norm": "qk"}, "norm must be none"),
        ({"mixer": "bilinear_mlbtc", "levels": [1, 2], "ranks": [1]}, "a number of 1 or more for each level"),
    ],
)
def test_configs_are_refused_with_the_reason(options, words):
    with pytest.raises(SurgeryError, match=words):
        mixer_config(options)


def test_shapes_are_refused_with_the_reason():
    for config, words in (
        (BilinearMLR((4, 2)), r"ranks\[0\] must be 8 or 0 \(got 4\)"),
        (BilinearMLR((8, 2, 1, 1, 1)), "5 levels split 24 features into 16 blocks"),
        (BilinearMLBTC((1, (5, 4)), (1, 1)), r"level \(5, 4\) cannot divide 24 features"),
        (BilinearBTT((5, 4)), r"blocks \(5, 4\) cannot tile 24 x 24"),
    ):
        with pytest.raises(SurgeryError, match=words):
            MIXERS[config].check_config(config, SHAPE)
    mixer = MIXERS[BilinearMLR](BilinearMLR((8, 2)), SHAPE)
    with pytest.raises(SurgeryError, match="use base 'kept', which starts exact"):
        fit_bilinear(mixer, *(torch.zeros(1),) * 3)
    for config in CONFIGS.values():
        assert mixer_config(config.to_dict()) == config
