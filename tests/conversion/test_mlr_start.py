"""Initialization of MLR attention: the cost of omitting score dimensions, and the dimensions that a budget keeps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from surgery.conversion.mixer_init.mlr_allocation import QueryKeyMoments
from surgery.conversion.mixer_init.mlr_ranks import (
    PATH_POINTS,
    UNLIMITED,
    ScoreSensitivity,
    allocate_ranks,
    balanced_basis,
    cache_costs,
    candidate_extents,
    choose_extents,
    loss_rise,
)
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, AttentionShape, MixerInputs
from surgery.mixers.mlr import MLR, rotary_units, slowest_first, unrotated_dims

SHAPE = AttentionShape(dim=8, heads=4, groups=2, key=8, value=6, scaling=8**-0.5, rotary=4)
EXTENTS = (0, 2, 5, UNLIMITED)


def random_inputs(batch=2, length=13, shape=SHAPE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    inputs = MixerInputs(
        draw(batch, shape.heads, length, shape.key),
        draw(batch, shape.groups, length, shape.key),
        draw(batch, shape.groups, length, shape.value),
        draw(batch, length, 1),
    )
    return inputs, draw(batch, shape.heads, length, shape.value)


def by_autograd(inputs, grad, shape, extents):
    """(heads, queries, unit x bin): d loss / d (how much of a cell each query leaves out), one query's at a time,
    averaged over shares of the scores.
    """
    return sum(weight * by_autograd_at(inputs, grad, shape, extents, share) for share, weight in PATH_POINTS)


def by_autograd_at(inputs, grad, shape, extents, share):
    together, length = rotary_units(shape), inputs.q_BHTK.shape[2]
    k = inputs.k_BGTK.repeat_interleave(shape.heads // shape.groups, 1)
    v = inputs.v_BGTV.repeat_interleave(shape.heads // shape.groups, 1)
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    cells = [
        shape.scaling * (inputs.q_BHTK[..., dims] @ k[..., dims].mT) * ((distance >= low) & (distance < high))
        for dims in together
        for low, high in itertools.pairwise(extents)
    ]
    kept = torch.ones(len(cells), *inputs.q_BHTK.shape[:3], 1, dtype=torch.float64, requires_grad=True)
    score = (torch.stack(cells) * (kept - 1 + share)).sum(0)
    score = score if shape.softcap is None else shape.softcap * torch.tanh(score / shape.softcap)
    allowed = distance < (shape.window or length)
    allowed = allowed & torch.ones(length, length, dtype=torch.bool).tril() if shape.causal else allowed
    out = score.masked_fill(~allowed, -torch.inf).softmax(-1) @ v
    (out * grad).sum().backward()
    return kept.grad[..., 0].permute(1, 2, 3, 0)


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        replace(SHAPE, causal=False, groups=4),
        replace(SHAPE, window=6, softcap=2.0),
        replace(SHAPE, rotary=8, interleaved=True),
    ],
    ids=["causal", "both ways", "window and cap", "interleaved"],
)
def test_damage_is_the_derivative_of_the_loss(shape):
    inputs, grad = random_inputs(shape=shape)
    damage = ScoreSensitivity(shape, EXTENTS)
    damage.member_KU = damage.member_KU.double()
    damage.add(inputs, grad, queries=5)
    u = by_autograd(inputs, grad, shape, EXTENTS).unflatten(1, (shape.groups, -1))
    wanted = torch.einsum("bgjtx,bgjty->gxy", u, u) / 26
    assert (damage.gram_GXX - wanted).norm() < 1e-12 * wanted.norm()


def test_damage_ignores_padding_and_adds_up():
    inputs, grad = random_inputs()
    valid = torch.tensor([[False] * 4 + [True] * 9, [True] * 11 + [False] * 2])
    together, apart = ScoreSensitivity(SHAPE, EXTENTS), ScoreSensitivity(SHAPE, EXTENTS)
    for damage in (together, apart):
        damage.member_KU = damage.member_KU.double()
    together.add(replace(inputs, valid_BT=valid), grad)
    for row in range(2):
        keep = valid[row]
        parts = {n: getattr(inputs, n)[row : row + 1, :, keep] for n in ("q_BHTK", "k_BGTK", "v_BGTV")}
        apart.add(replace(inputs, **parts), grad[row : row + 1, :, keep])
    assert together.tokens == apart.tokens == 20
    assert (together.sum_GXX - apart.sum_GXX).norm() < 1e-12 * apart.sum_GXX.norm()


def test_units_keep_rotary_pairs():
    assert rotary_units(SHAPE) == [[0, 2], [1, 3], [4], [5], [6], [7]]
    assert rotary_units(replace(SHAPE, interleaved=True)) == [[0, 1], [2, 3], [4], [5], [6], [7]]
    assert candidate_extents(100) == (0, 8, 16, 32, 64, UNLIMITED)


def test_settling_is_the_optimum_of_small_forms():
    """Against every choice there is, where units do not interact; never above all or nothing where they do."""
    torch.manual_seed(0)
    size, price = torch.tensor([2.0, 1.0, 2.0]), cache_costs((0, 3, UNLIMITED), 10)[None]
    choices = torch.tensor(list(itertools.product(range(3), repeat=3)))
    for weight in (1e-2, 0.3, 3.0):
        rows = torch.randn(3, 2, 40, dtype=torch.float64)
        apart = torch.block_diag(*(r @ r.mT for r in rows))[None]
        whole = torch.randn(4, 6, 3, dtype=torch.float64)
        for gram, exact in ((apart, True), (whole @ whole.mT, False)):
            place = choose_extents(gram, size, price.expand(len(gram), -1), weight)
            value = lambda p, g: loss_rise(g, p, 2) + weight * (price[0][p] * size).sum(-1)  # noqa: E731, B023
            for form, found in zip(gram, place):
                values = value(choices, form.expand(27, -1, -1))
                mine = value(found[None], form[None])
                assert mine <= values[0] + 1e-9 and mine <= values[-1] + 1e-9
                assert not exact or mine <= values.min() + 1e-9


def gather_sensitivities(layers=2, shape=SHAPE):
    damages = []
    for layer in range(layers):
        inputs, grad = random_inputs(3, 24, shape, seed=layer)
        inputs.k_BGTK[..., [0, 2]] *= 0.1  # a pair that carries little
        damages.append(ScoreSensitivity(shape, EXTENTS))
        damages[-1].add(
            replace(inputs, **{n: getattr(inputs, n).float() for n in ("q_BHTK", "k_BGTK", "v_BGTV")}), grad.float()
        )
    return damages


def key_share(arrangement, shape, length):
    mixer = MIXERS[MLR](arrangement.config, shape)
    arrangement.apply_to(mixer)
    inputs = random_inputs(1, length, shape)[0]
    tensors = mixer.mix(inputs, mixer.empty_state(1, "cpu"))[1].tensors
    return sum(t.numel() for n, t in tensors.items() if n.startswith("keys")) / (shape.groups * shape.key * length)


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, groups=4), replace(SHAPE, rotary=0)], ids=str)
def test_budgets_are_kept_on_live_caches(shape):
    damages, length, before = gather_sensitivities(shape=shape), 24, float("inf")
    for budget in (0.25, 0.6, 1.0):
        layers = allocate_ranks(damages, budget, length)
        shares = [key_share(layer, shape, length) for layer in layers]
        assert sum(shares) / 2 <= budget + 1e-6
        loss = sum(layer.rise for layer in layers)
        assert loss <= before + 1e-9
        before = loss
        for layer in layers:
            assert [sorted(order) for order in layer.order_GK.tolist()] == [list(range(8))] * shape.groups
            MIXERS[MLR].check_config(layer.config, shape)
    assert before < 1e-12 and layers[0].config == MLR((8,))
    assert (
        all(torch.tensor(0) in order[-2:] for order in allocate_ranks(damages, 0.8, length)[0].order_GK)
        or shape.rotary == 0
    )


def test_windows_of_layers_may_differ():
    """A layer with a window of its own has a smaller cache to begin with."""
    shapes = SHAPE, replace(SHAPE, window=6)
    damages = [gather_sensitivities(1, shape)[0] for shape in shapes]
    layers = allocate_ranks(damages, 0.5, 24)
    live = sum(key_share(layer, shape, 24) for layer, shape in zip(layers, shapes))
    assert live <= 0.5 * (1 + 5 / 24) + 1e-6
    assert [layer.config for layer in allocate_ranks(damages, 1.0, 24)] == [MLR((8,))] * 2


def test_the_expected_rise_is_of_the_arrangement():
    """By the derivatives of the loss: 1/2 E (what the orders and ranks leave out - near biases)^2, at the best
    biases.
    """
    inputs, grad = random_inputs(3, 24)
    damage = ScoreSensitivity(SHAPE, EXTENTS)
    damage.member_KU = damage.member_KU.double()
    damage.add(inputs, grad)
    layer = allocate_ranks([damage], 0.4, 24)[0]
    reach = [e for rank, e in zip(layer.config.ranks, (UNLIMITED, *layer.config.extents)) for _ in range(rank)]
    reach += [0] * (8 - len(reach))
    u_HNX = by_autograd(inputs, grad, SHAPE, EXTENTS).permute(1, 0, 2, 3).flatten(1, 2)
    near = by_autograd_near(inputs, grad, layer.config.extents)
    total, worse = 0.0, 0.0
    for head in range(4):
        extent = dict(zip(layer.order_GK[head // 2].tolist(), reach))
        assert all(len({extent[dim] for dim in dims}) == 1 for dims in rotary_units(SHAPE))
        out = torch.tensor([low >= extent[dims[0]] for dims in rotary_units(SHAPE) for low in EXTENTS[:-1]]).double()
        left = u_HNX[head] @ out - near[head] @ layer.near_HL[head].double()
        total += 0.5 * left.square().sum().item() / 72
        worse += 0.5 * (u_HNX[head] @ out).square().sum().item() / 72
        assert (near[head].mT @ left).norm() < 1e-2 * (near[head].mT @ (u_HNX[head] @ out)).norm()
    assert layer.rise == pytest.approx(total, rel=1e-4) and total < worse


def by_autograd_near(inputs, grad, extents):
    """(heads, queries, levels): d loss / d (what a query adds to q . k inside each extent)."""
    return sum(weight * by_autograd_near_at(inputs, grad, extents, share) for share, weight in PATH_POINTS)


def by_autograd_near_at(inputs, grad, extents, share):
    shape, length = SHAPE, inputs.q_BHTK.shape[2]
    k, v = (x.repeat_interleave(2, 1) for x in (inputs.k_BGTK, inputs.v_BGTV))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    added = torch.zeros(len(extents), *inputs.q_BHTK.shape[:3], 1, dtype=torch.float64, requires_grad=True)
    inside = torch.stack([(distance < e) for e in extents])[:, None, None]
    score = shape.scaling * (share * inputs.q_BHTK @ k.mT + (added * inside).sum(0))
    (score.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v * grad).sum().backward()
    return added.grad[..., 0].permute(2, 1, 3, 0).flatten(1, 2)


def test_budgets_that_cannot_be_are_refused():
    for budget in (0.0, 1.2):
        with pytest.raises(SurgeryError, match="share of the full key cache"):
            allocate_ranks(gather_sensitivities(1), budget, 24)


def test_a_balanced_basis_keeps_products_and_orders_them():
    torch.manual_seed(0)
    q_GNK, k_GNK = torch.randn(2, 300, 8).double() @ torch.randn(2, 8, 8).double(), torch.randn(2, 300, 8).double()
    k_GNK = k_GNK @ torch.randn(2, 8, 8).double()
    to_q, to_k = balanced_basis(q_GNK.mT @ q_GNK / 300, k_GNK.mT @ k_GNK / 300)
    ours_q, ours_k = q_GNK @ to_q, k_GNK @ to_k
    product = q_GNK @ k_GNK.mT
    assert (ours_q @ ours_k.mT - product).norm() < 1e-10 * product.norm()
    for first in (2, 5):
        left = (product - ours_q[..., :first] @ ours_k[..., :first].mT).square().sum((1, 2))
        best = torch.linalg.svdvals(product)[:, first:].square().sum(1)
        assert torch.allclose(left, best, rtol=1e-8)  # no factors of that rank leave less
    assert torch.allclose(ours_q.square().sum(1), ours_k.square().sum(1), rtol=1e-8)


def test_slow_pairs_come_first_for_want_of_a_text():
    halves = AttentionShape(dim=8, heads=1, groups=1, key=8, value=8, scaling=1.0, rotary=6)
    assert slowest_first(halves) == [6, 7, 2, 5, 1, 4, 0, 3]
    pairs = replace(halves, rotary=8, interleaved=True)
    assert slowest_first(pairs) == [6, 7, 4, 5, 2, 3, 0, 1]


PARTIAL = AttentionShape(dim=8, heads=4, groups=2, key=12, value=8, scaling=12**-0.5, rotary=4)


def hidden_directions(shape, seed=3, length=24):
    """Inputs whose queries and keys live in a few directions, none of them along a dim, with keys off zero."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    scales = torch.logspace(0.5, -1.5, shape.key, dtype=torch.float64).diag()
    q, k = (draw(2, n, length, shape.key) @ scales @ torch.linalg.qr(draw(shape.key, shape.key))[0] for n in (4, 2))
    k = k + 3 * draw(shape.groups, 1, shape.key)
    return MixerInputs(q, k, draw(2, 2, length, shape.value), draw(2, length, 1))


def moments_of(inputs, shape):
    moments = QueryKeyMoments(shape, torch.device("cpu"))
    moments.add(inputs)
    return moments


def mixer_in(basis, config, shape):
    config, tensors = (config, {}) if basis is None else basis.apply_to(config)
    MIXERS[config].check_config(config, shape)
    mixer = MIXERS[config](config, shape)
    for name, value in tensors.items():
        mixer.state_dict()[name].copy_(torch.tensor(value))
    return mixer


@pytest.mark.parametrize("shape", [PARTIAL, replace(PARTIAL, interleaved=True), replace(PARTIAL, rotary=0)], ids=str)
def test_a_basis_changes_no_output_and_fewer_dims_of_it_lose_less(shape):
    inputs = hidden_directions(shape)
    basis = moments_of(inputs, shape).basis()
    assert basis.query_GFF.shape == (2, unrotated_dims(shape), unrotated_dims(shape))
    whole = mixer_in(None, MLR((12,)), shape).mix(inputs)[0]
    # All pairs are within 100 tokens, so these scores have all dims.
    every = mixer_in(basis, MLR((5, 7), (100,)), shape)
    assert (every.mix(inputs)[0] - whole).norm() < 1e-5 * whole.norm()
    assert (every.dense(inputs) - whole).norm() < 1e-5 * whole.norm()
    errors = {name: (mixer_in(b, MLR((8,)), shape).mix(inputs)[0] - whole).norm() for name, b in bases(basis)}
    assert errors["centered"] < errors["turned"] and errors["centered"] < 0.5 * errors["own"]


def bases(basis):
    return [("own", None), ("turned", basis._replace(center_GF=None)), ("centered", basis)]


@pytest.mark.parametrize("rotary", [0, 4])
def test_the_first_dims_of_the_basis_are_the_optimum_of_the_squared_scores(rotary):
    """The singular values of Cq^(1/2) Ck Cq^(1/2), and no random basis with that product, nor the own dims, is better."""
    shape, count = replace(PARTIAL, rotary=rotary), 12 - rotary
    inputs = hidden_directions(shape)
    q_GNF = inputs.q_BHTK[..., rotary:].unflatten(1, (2, 2)).transpose(0, 1).flatten(1, 3)
    k_GNF = inputs.k_BGTK[..., rotary:].transpose(0, 1).flatten(1, 2)
    k_GNF = k_GNF - k_GNF.mean(1, keepdim=True)
    basis = moments_of(inputs, shape).basis()
    cq_GFF, ck_GFF = q_GNF.mT @ q_GNF / q_GNF.shape[1], k_GNF.mT @ k_GNF / k_GNF.shape[1]
    values, vectors = torch.linalg.eigh(cq_GFF)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2) @ vectors.mT
    best = torch.linalg.eigvalsh(root @ ck_GFF @ root).flip(-1)

    def error(query_GFF, key_GFF, kept):
        omitted_GFF = torch.eye(count).double() - query_GFF[..., :kept].double() @ key_GFF[..., :kept].double().mT
        return (q_GNF @ omitted_GFF @ k_GNF.mT).square().mean((1, 2))

    for kept in (1, 3, count - 1):
        ours = error(basis.query_GFF, basis.key_GFF, kept)
        assert torch.allclose(ours, best[:, kept:].sum(-1), rtol=1e-3, atol=1e-8 * float(best.sum()))
        eye = torch.eye(count).double().expand(2, -1, -1)
        assert (ours <= error(eye, eye, kept)).all()
        for _ in range(20):
            turn = torch.randn(2, count, count, dtype=torch.float64)
            assert (ours <= error(turn, torch.linalg.inv(turn).mT, kept)).all()


def test_padding_has_no_part_in_a_basis():
    inputs = hidden_directions(PARTIAL)
    valid = torch.tensor([[False] * 5 + [True] * 19, [True] * 24])
    moments = moments_of(replace(inputs, valid_BT=valid), PARTIAL)
    apart = QueryKeyMoments(PARTIAL, torch.device("cpu"))
    for row in range(2):
        parts = {n: getattr(inputs, n)[row : row + 1, :, valid[row]] for n in ("q_BHTK", "k_BGTK", "v_BGTV")}
        apart.add(replace(inputs, **parts))
    assert moments.keys == apart.keys == 43
    for mine, theirs in zip(moments.basis(), apart.basis()):
        assert torch.allclose(mine, theirs, rtol=1e-3, atol=1e-4)


def test_a_basis_needs_dims_that_rope_leaves_alone_and_a_center_no_softcap():
    assert moments_of(hidden_directions(PARTIAL), replace(PARTIAL, softcap=5.0)).basis().center_GF is None
    refused = [
        ("turned", replace(PARTIAL, rotary=12), "basis: own"),
        ("centered", replace(PARTIAL, softcap=5.0), "turned"),
    ]
    for basis, shape, message in refused:
        with pytest.raises(SurgeryError, match=message):
            MIXERS[MLR].check_config(MLR((4, 4), (8,), basis=basis), shape)


def test_the_rise_of_omitting_all_scores_counts_what_saturated_weights_hide():
    """Where one key takes all the weight, the derivative at the full scores is 0, and the change is not."""
    shape = AttentionShape(dim=8, heads=2, groups=2, key=4, value=4, scaling=1.0)
    inputs, grad = random_inputs(1, 9, shape)
    inputs = replace(inputs, q_BHTK=3 * inputs.q_BHTK, k_BGTK=3 * inputs.k_BGTK)
    sensitivity = ScoreSensitivity(shape, (0, UNLIMITED))
    sensitivity.member_KU = sensitivity.member_KU.double()
    sensitivity.add(inputs, grad)
    all_omitted = torch.zeros(2, 4, dtype=torch.long)
    out, uniform = (MIXERS[MLR](MLR((4,)), shape).mix(replace(inputs, q_BHTK=s * inputs.q_BHTK))[0] for s in (1, 0))
    exact = 0.5 * ((out - uniform) * grad).sum(-1).square().sum() / 9
    found = loss_rise(sensitivity.gram_GXX, all_omitted, 1).sum()
    local = by_autograd_at(inputs, grad, shape, (0, UNLIMITED), 1.0).sum(-1).square().sum() / 18
    assert abs(found - exact) < 0.5 * exact and local < 0.05 * exact
