"""Feature maps: laws over the registry, and the kernel that each computes or estimates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers.base import AttentionShape, to_plain
from surgery.mixers.features.base import FEATURES, FeatureMap
from surgery.mixers.features.cosformer import CosFormer
from surgery.mixers.features.favor import MAX_EXPONENT, Favor
from surgery.mixers.features.hedgehog import Hedgehog
from surgery.mixers.features.lara import Lara
from surgery.mixers.features.random_draws import draw_orthogonal
from surgery.mixers.features.rfa import RFA
from surgery.mixers.linear_config import parse_nested_config

SHAPE = AttentionShape(dim=24, heads=6, groups=2, key=5, value=7, scaling=5**-0.5)
NAMES = ["cosformer", "elu", "favor", "hedgehog", "identity", "lara", "relu", "rfa"]


def make_map(name: str, shape: AttentionShape = SHAPE, **options) -> FeatureMap:
    config = parse_nested_config(FEATURES, {"name": name, **options})
    return FEATURES[config](config, shape).double()


def tokens(length: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q_BHTK = torch.randn(2, SHAPE.heads, length, SHAPE.key, dtype=torch.float64)
    k_BGTK = torch.randn(2, SHAPE.groups, length, SHAPE.key, dtype=torch.float64)
    return q_BHTK, k_BGTK, torch.arange(length).expand(2, -1)


def products(phi: FeatureMap, q_BHTK: Tensor, k_BGTK: Tensor, position_BT: Tensor) -> Tensor:
    """phi(q) . phi(k), (B, H, T, T)."""
    keys = phi.keys(k_BGTK, position_BT).repeat_interleave(q_BHTK.shape[1] // k_BGTK.shape[1], 1)
    return phi.queries(q_BHTK, position_BT) @ keys.mT


def test_the_registry_has_every_map():
    assert FEATURES.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_laws(name):
    """F features each; a token's do not depend on other tokens; products are nonnegative where that is promised;
    configs round-trip; a map made on the meta device has the same tensors."""
    phi, (q, k, at) = make_map(name), tokens()
    width = phi.features(phi.config, SHAPE)
    assert phi.queries(q, at).shape == (2, 6, 9, width) and phi.keys(k, at).shape == (2, 2, 9, width)
    for t in (0, 4, 8):
        for of, x in ((phi.queries, q), (phi.keys, k)):
            alone = of(x[:, :, t : t + 1], at[:, t : t + 1])
            torch.testing.assert_close(alone, of(x, at)[:, :, t : t + 1], rtol=1e-12, atol=1e-12)
    assert not phi.positive or bool((products(phi, q, k, at) >= 0).all())
    assert parse_nested_config(FEATURES, to_plain(phi.config)) == phi.config
    with torch.device("meta"):
        skeleton = FEATURES[phi.config](phi.config, SHAPE)
    assert {n: t.shape for n, t in skeleton.state_dict().items()} == {n: t.shape for n, t in phi.state_dict().items()}
    assert all(t.is_meta for t in skeleton.state_dict().values())


@pytest.mark.parametrize("name", NAMES)
def test_a_group_shares_its_map_at_the_start(name):
    """A query equal to a key of its group has the key's features (LARA weighs queries on top; a factor apart)."""
    options = {"queries": "exact"} if name == "favor" else {}
    phi, (_, k, at) = make_map(name, **options), tokens()
    q = k.repeat_interleave(3, 1)
    if name != "lara":
        torch.testing.assert_close(phi.queries(q, at), phi.keys(k, at).repeat_interleave(3, 1))
    torch.testing.assert_close(phi.queries(q, at)[:, 0], phi.queries(q, at)[:, 2])


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name):
    phi, (q, k, at) = make_map(name), tokens(3)
    inputs = [t[:1].requires_grad_() for t in (q, k)]
    parameters = list(phi.parameters())
    call = lambda q, k, *_: products(phi, q, k, at[:1])  # noqa: E731
    assert torch.autograd.gradcheck(call, (*inputs, *parameters))


@pytest.mark.parametrize(
    "config, sharp",
    [(Favor(64, "exact"), False), (Lara(64, 0.5, "exact"), False), (Lara(64, 0.0, "exact"), False), (RFA(64), True)],
    ids=lambda c: getattr(c, "name", ""),
)
def test_estimates_are_unbiased(config, sharp):
    """The mean over 400 seeds is exp(q . k) within five standard errors (RFA: of unit q and k)."""
    q, k, at = tokens(4)
    q, k = 0.3 * q[:1], 0.3 * k[:1]
    estimates = []
    for seed in range(400):
        phi = make_map(**{**to_plain(config), "seed": 2 * seed})
        estimates.append(products(phi, q, k, at[:1]))
    if sharp:
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    truth = (q @ k.repeat_interleave(3, 1).mT).exp()
    stack = torch.stack(estimates).detach()
    error = (stack.mean(0) - truth).abs() / (stack.std(0) / 400**0.5)
    assert error.max() < 5.0
    assert ((stack.mean(0) - truth).norm() / truth.norm()) < 0.05


def test_many_features_are_the_exponential():
    q, k, at = tokens(4)
    truth = (0.09 * q @ k.repeat_interleave(3, 1).mT).exp()
    for name, seeds in (("favor", 1), ("lara", 10)):  # 20,000 draws; LARA weighs each by every other of its seed
        maps = [make_map(name, features=20000 // seeds, queries="exact", seed=2 * seed) for seed in range(seeds)]
        estimate = torch.stack([products(phi, 0.3 * q, 0.3 * k, at) for phi in maps]).mean(0).detach()
        assert ((estimate - truth).norm() / truth.norm()) < 0.03, name


@pytest.mark.parametrize("name", ["favor", "lara"])
def test_scaled_queries_differ_by_a_factor_a_query(name):
    """Which a normaliser takes out; and they do not underflow where the exact ones do."""
    exact, scaled, (q, _, at) = make_map(name, queries="exact"), make_map(name), tokens()
    ratio = exact.queries(q, at) / scaled.queries(q, at)
    torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))
    assert scaled.float().queries(60 * q.float(), at).amax(-1).min() > 0
    assert exact.float().queries(60 * q.float(), at).amax(-1).min() == 0


def test_favor_keys_stay_inside_float32():
    phi = make_map("favor", features=8).float()
    phi.w_GFK.fill_(30.0)
    key = phi.keys(torch.full((1, 2, 1, 5), 30.0), torch.zeros(1, 1, dtype=torch.long))
    assert torch.isfinite(key @ key.mT).all() and key.max() <= math.exp(MAX_EXPONENT)


def test_orthogonal_draws():
    """Orthogonal within runs of K, lengths of Gaussian rows, and less variance than independent ones."""
    w_GFK = draw_orthogonal(0, 2, 8, 5).double()
    unit = w_GFK / w_GFK.norm(dim=-1, keepdim=True)
    gram = unit[:, :5] @ unit[:, :5].mT
    torch.testing.assert_close(gram, torch.eye(5).double().expand(2, -1, -1), rtol=0, atol=1e-6)
    many = draw_orthogonal(1, 1, 5000, 5)[0]
    torch.testing.assert_close(many.square().mean(0), torch.ones(5), rtol=0, atol=0.1)
    assert torch.equal(draw_orthogonal(3, 2, 8, 5), draw_orthogonal(3, 2, 8, 5))


def test_cosformer_is_the_paper_s():
    """Eq. 9: relu(q) . relu(k) cos(pi/2 (i - j) / M); farther than M it stays nonnegative."""
    phi, (q, k, at) = make_map("cosformer", length=16), tokens()
    distance = at[0].unsqueeze(1) - at[0]
    truth = (q.relu() @ k.relu().repeat_interleave(3, 1).mT) * torch.cos(0.5 * math.pi * distance / 16)
    torch.testing.assert_close(products(phi, q, k, at), truth)
    assert (products(phi, q, k, 5 * at) >= 0).all()


def test_hedgehog_starts_as_softmax_of_both_signs():
    phi, (_, k, at) = make_map("hedgehog"), tokens()
    torch.testing.assert_close(phi.keys(k, at), torch.cat([k.softmax(-1), (-k).softmax(-1)], -1))
    assert [p.shape[0] for p in phi.parameters()] == [6, 2]
    assert Hedgehog() == parse_nested_config(FEATURES, "hedgehog")


def test_refusals():
    with pytest.raises(SurgeryError, match="did you mean 'favor'"):
        parse_nested_config(FEATURES, "favour")
    with pytest.raises(SurgeryError, match="no option 'feature'; did you mean 'features'"):
        parse_nested_config(FEATURES, {"name": "favor", "feature": 3})
    with pytest.raises(SurgeryError, match="got 'both'"):
        Favor(queries="both")  # type: ignore[arg-type]
    with pytest.raises(SurgeryError, match=r"length must be 1 or more tokens \(got 0\)"):
        CosFormer(0)
