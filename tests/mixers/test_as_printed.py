"""Equations of the papers as printed, in float64, against the implementation, and the differences that docs/papers.md
lists.

Oracles are written from the formula of the paper and call no function of this project.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from recipes.papers.mup.models import SweepSizes, make_gpt2
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.core.errors import SurgeryError
from surgery.mixers import AttentionShape, MixerInputs
from surgery.mixers.features.favor import Favor, FavorMap
from surgery.mixers.features.lara import Lara, LaraMap
from surgery.mixers.linear import LinearMixer
from surgery.mixers.linear_config import LinearAttention
from surgery.mixers.masks.base import MASKS
from surgery.planning.attention_recipe import HybridRecipe
from surgery.planning.plan import make_plan
from surgery.planning.recipe import load_recipe
from surgery.structures import STRUCTURES, Metric
from surgery.structures.base import MuP, config_from_dict
from surgery.structures.btt import BTT
from surgery.structures.kronecker import Kronecker
from surgery.structures.low_rank import LowRank
from surgery.structures.monarch import Monarch
from surgery.structures.tensor_train import BlockTensorTrain, TensorTrain
from surgery.training.optim import RATE_RULES, Fans
from surgery.training.pretrain.initialize import init_unit_low_rank
from surgery.training.pretrain.recipe import load_pretrain_recipe

ROOT = Path(__file__).resolve().parents[2]
SHAPE = AttentionShape(dim=6, heads=4, groups=2, key=5, value=3, scaling=5**-0.5)


def random(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- Compute Better Spent --------------------------------------------------------------------------------
def test_btt_is_eq_2():
    """y_ab = sum_gs L[a, b, g, s] sum_d R[s, b, g, d] x_gd; only the order of the rows differs."""
    side, rank = 4, 2
    left, right, x = random(side, side, side, rank, seed=1), random(rank, side, side, side, seed=2), random(side, side)
    printed = torch.einsum("abgs,sbgd,gd->ab", left, right, x)
    linear = STRUCTURES[BTT](side**2, side**2, BTT(blocks=(side, side), rank=rank), bias=False).double()
    linear.weight.data = left.permute(1, 2, 3, 0).contiguous()
    linear.right.data = right.permute(2, 3, 1, 0).contiguous()
    torch.testing.assert_close(linear(x.flatten()).view(side, side).T, printed)


@pytest.mark.parametrize("d, b", [(32, 4), (36, 3), (16, 4)])
def test_published_monarch_is_btt(d, b):
    """P L P^T R, L and R of b blocks of d / b x d / b each: block rank d / b^2, 2 d^2 / b numbers, rates times b /
    2.
    """
    left, right, x = random(b, d // b, d // b, seed=1), random(b, d // b, d // b, seed=2), random(d)
    swap = torch.arange(d).view(b, d // b).T.flatten()  # rows to columns
    printed = torch.block_diag(*left) @ (torch.block_diag(*right) @ x)[swap]
    config = STRUCTURES[Monarch].fit(Monarch(blocks=b), d, d, budget=0.0)
    assert (config.blocks, config.rank) == ((b, b), d // b**2)
    linear = STRUCTURES[config](d, d, config, bias=False).double()
    assert linear.cost().params == 2 * d**2 // b
    # After the swap entry (i, g) is i-th of what block g of R wrote: b neighbours are one i of every g.
    rank = d // b**2
    linear.right.data = right.view(b, b, rank, d // b).permute(0, 3, 1, 2).contiguous()  # g, (block of L, i), d
    linear.weight.data = left.view(b, d // b, rank, b).permute(0, 3, 2, 1).contiguous()  # block, a, (i, g)
    torch.testing.assert_close(linear(x), printed)
    assert {name: mup.fan_in for name, mup in linear.mup().items()} == {"right": d // b, "weight": d // b}


def test_published_monarch_is_kept_in_checkpoints_and_recipes(checkpoints):
    for out, in_ in ((48, 32), (32, 48), (30, 50)):
        config = STRUCTURES[Monarch].fit(Monarch(blocks=4), out, in_, 0.0)
        assert STRUCTURES[Monarch].resolve(config_from_dict(config.to_dict()), out, in_) == config
        exact = STRUCTURES[config].project(random(out, in_).float(), config)
        assert exact.dense().shape == (out, in_)
    plan = make_plan(MetaModel(open_checkpoint(str(checkpoints("llama")))), load_recipe("monarch-half", ["blocks=4"]))
    assert {cut.preview.blocks for cut in plan.replaced_targets()} == {(4, 4)}
    assert all(cut.preview.rank == -(-min(cut.out, cut.in_) // 16) for cut in plan.replaced_targets())
    with pytest.raises(SurgeryError, match="blocks"):
        make_plan(MetaModel(open_checkpoint(str(checkpoints("llama")))), load_recipe("btt-half", ["blocks=4"]))
    with pytest.raises(SurgeryError, match="must be 2 to 8"):
        STRUCTURES[Monarch].resolve(Monarch(blocks=9), 8, 8)
    with pytest.raises(SurgeryError, match="rank must be 1 or full"):
        STRUCTURES[Monarch].resolve(Monarch(blocks=(4, 4), rank=3), 32, 32)


def test_rates_are_table_2_without_its_half():
    """Low rank d / 2r and 1 / 2; Kronecker sqrt(d) / 2; Monarch b / 2; BTT sqrt(d) / 2r and sqrt(d) / 2."""
    d, r, b, root = 64, 4, 4, 8
    printed = [
        (LowRank(rank=r), {"weight": d / (2 * r), "right": 1 / 2}),
        (Kronecker(rank=1), {"weight": root / 2, "right": root / 2}),
        (Monarch(blocks=b), {"weight": b / 2, "right": b / 2}),
        (BTT(rank=r), {"weight": root / (2 * r), "right": root / 2}),
    ]
    for config, rates in printed:
        config = STRUCTURES[config].fit(config, d, d, d * d)
        fans = STRUCTURES[config](d, d, config, bias=False).mup()
        ours = {name: RATE_RULES["adamw"](Fans(mup.fan_in, mup.fan_out, d, d), d) for name, mup in fans.items()}
        assert {name: rate / 2 for name, rate in ours.items()} == rates


def test_costs_are_table_1_of_compute_better_spent():
    """Multiplications and numbers of d x d matrices; BTT and TT of two cores. Convolutions are no structure here."""
    d, r, b = 64, 2, 4
    table = [
        (LowRank(rank=r), 2 * r * d, 2 * r * d),
        (Kronecker(rank=1), 2 * d**1.5, 2 * d),
        (Monarch(blocks=b), 2 * d**2 / b, 2 * d**2 / b),
        (TensorTrain(cores=2, rank=r), 2 * r * d**1.5, 2 * r * d),
        (BlockTensorTrain(cores=2, rank=r), 2 * r * d**1.5, 2 * r * d**1.5),
        (BTT(rank=r), 2 * r * d**1.5, 2 * r * d**1.5),
    ]
    for config, macs, params in table:
        config = STRUCTURES[config].fit(config, d, d, 0.0)
        assert STRUCTURES[config](d, d, config, bias=False).cost() == (params, macs)


@torch.no_grad()
@pytest.mark.parametrize("config", [LowRank(rank=3), BTT(rank=2), BlockTensorTrain(cores=3, rank=2)], ids=str)
def test_updates_add_up_to_first_order(config):
    """Eq. 3: the change of the output is the sum over cores of the product with that core's change in its place, up to
    squares.
    """
    config = STRUCTURES[config].fit(config, 24, 36, 0.0)
    linear, x = STRUCTURES[config](36, 24, config, bias=False).double(), random(5, 36)
    cores = {name: random(*core.shape, seed=i) for i, (name, core) in enumerate(linear.named_parameters())}
    steps = {name: random(*core.shape, seed=9 + i) for i, (name, core) in enumerate(cores.items())}

    def run(cores):
        return torch.func.functional_call(linear, cores, (x,))

    first_order, gaps = sum(run({**cores, name: step}) for name, step in steps.items()), []
    for size in (1e-3, 1e-4):
        moved = run({name: core + size * steps[name] for name, core in cores.items()})
        gaps.append(float((moved - run(cores) - size * first_order).norm()))
    assert gaps[0] < 0.1 * float(first_order.norm()) * 1e-3 and 0.5 < gaps[0] / gaps[1] / 100 < 2


def test_kronecker_fans():
    """Section 3.2 on TT (eq. 1), a sum of r products: R is (r a) x d, L is b x (c r)."""
    d, r = 64, 4
    linear = STRUCTURES[Kronecker](d, d, Kronecker(blocks=(8, 8), rank=r), bias=False)
    printed = {"right": MuP(8, 8 * r), "weight": MuP(8 * r, 8)}
    ours = linear.mup()
    assert ours == {"right": MuP(8, 8), "weight": MuP(8 * r, 8 * r)}
    assert {n: m.fan_in for n, m in ours.items()} == {n: m.fan_in for n, m in printed.items()}
    one = STRUCTURES[Kronecker](d, d, Kronecker(blocks=(8, 8), rank=1), bias=False)
    assert set(one.mup().values()) == {MuP(8, 8)}
    # The terms share the scale: outputs of unit inputs have unit size, whatever r.
    torch.manual_seed(0)
    wide = STRUCTURES[Kronecker](1024, 1024, Kronecker(blocks=(32, 32), rank=8), bias=False)
    assert 0.9 < float(wide(torch.randn(64, 1024)).std()) < 1.1


def test_kronecker_starts_from_the_plain_svd():
    """Not from a whitened one: the best sum of products in the Frobenius norm, whatever the metric."""
    weight, root = random(12, 20).float(), random(20, 20, seed=1).float()
    config = Kronecker(blocks=(3, 4), rank=2)
    plain = STRUCTURES[config].project(weight, config)
    blocks = torch.stack([weight[4 * i : 4 * i + 4, 5 * j : 5 * j + 5].flatten() for i in range(3) for j in range(4)])
    left = torch.linalg.svdvals(blocks.double())[2:].square().sum()
    assert float((weight - plain.dense()).square().sum()) == pytest.approx(float(left), rel=1e-5)
    assert torch.equal(STRUCTURES[config].project(weight, config, Metric(root @ root.T)).dense(), plain.dense())


def test_low_rank_starts():
    """E.2: V has variance 1 / in; section 3.2, for a rank below in: rank / in^2."""
    assert load_pretrain_recipe("gpt2").new.low_rank_start == "spectral"
    assert load_pretrain_recipe("gpt2", ["low_rank_start=unit"]).new.low_rank_start == "unit"
    before = make_gpt2("low_rank", 64, 50, SweepSizes(head=16, length=16), seed=0)
    after = copy.deepcopy(before)
    torch.manual_seed(0)
    init_unit_low_rank(after)
    for name, module in before.named_modules():
        if hasattr(module, "right"):
            rank, in_ = module.right.shape
            assert float(module.right.std()) == pytest.approx(rank**0.5 / in_, rel=0.1)
            assert float(after.get_submodule(name).right.std()) == pytest.approx(in_**-0.5, rel=0.1)
            assert torch.equal(module.weight, after.get_submodule(name).weight)


def test_queries_do_not_start_at_zero():
    model = make_gpt2("dense", 64, 50, SweepSizes(head=16, length=16), seed=0)
    layer = model.transformer.h[0]
    assert (
        layer.attn.c_attn.weight[:, :64].any() and not layer.attn.c_proj.weight.any() and not model.lm_head.weight.any()
    )


# -- Customizing the Inductive Biases of Softmax Attention -----------------------------------------------
def test_global_and_window_layers_in_turn(checkpoints):
    seats = [SimpleNamespace(index=i) for i in range(6)]
    assert HybridRecipe(softmax=0.5, choose_by="every").fixed_layers(seats) == {1, 3, 5}
    turns = ["attention.hybrid={softmax: 0.5, choose_by: every}"]
    plan = make_plan(MetaModel(open_checkpoint(str(checkpoints("llama")))), load_recipe("sliding-window", turns))
    assert [(seat.index, seat.config.name) for seat in plan.attention_targets.values()] == [(0, "window")]


# -- Toeplitz Block Mixing -------------------------------------------------------------------------------
def tbm(components=3, block=4, blocks=5):
    mask = MASKS.config_type("toeplitz_blocks")(block=block, components=components)
    mask = MASKS[mask](mask, SHAPE).double()
    amplitude, rate = F.softplus(mask.amplitude_RGJ[:, 0, 0]), F.softplus(mask.rate_RG[:, 0])
    return mask, amplitude.detach(), rate.detach(), random(blocks, 5, 3, seed=1)


@torch.no_grad()
def test_tbm_eq_6_against_its_text():
    """Eqs. 5 and 6 as printed give sum_(b < i) K(i - 1 - b) S_b; the text, and eq. 4, say K(i - b)."""
    mask, amplitude, rate, sums = tbm()
    kernel = lambda delta: float((amplitude * torch.exp(-rate * delta)).sum())  # noqa: E731
    states, printed = torch.zeros(len(rate), 5, 3, dtype=torch.float64), []
    for block in sums:
        printed.append(torch.einsum("r,rfv->fv", amplitude, states))  # H_(i-1)
        states = torch.exp(-rate)[:, None, None] * states + block
    ours = mask.dense(torch.tensor([0]), 4 * len(sums), {})[0, 0, 0]
    for i in range(len(sums)):
        late = sum((kernel(i - 1 - b) * sums[b] for b in range(i)), torch.zeros(5, 3, dtype=torch.float64))
        torch.testing.assert_close(printed[i], late)
        for b in range(i):
            assert float(ours[4 * i, 4 * b]) == pytest.approx(kernel(i - b), rel=1e-12)
        assert float(ours[4 * i + 1, 4 * i]) == pytest.approx(kernel(0), rel=1e-12) and not ours[4 * i, 4 * i + 1]
    # A factor exp(-lambda_r) in a_r is all that is between them.
    faded = amplitude * torch.exp(-rate)
    text = sum(kernel(4 - b) * sums[b] for b in range(4))
    states = sum(torch.exp(-rate * (3 - b))[:, None, None] * sums[b] for b in range(4))
    torch.testing.assert_close(torch.einsum("r,rfv->fv", faded, states), text)


@torch.no_grad()
def test_tbm_eq_4_cancels():
    """Eq. 1's quotient with eq. 4's W, whose rows sum to one over blocks, and with K as it is."""
    mask = {"name": "toeplitz_blocks", "block": 4, "components": 2}
    mixer = LinearMixer(LinearAttention(mask=mask, features="elu", normalise=True), SHAPE)
    q, k, v = (random(1, n, 20, w, seed=n + w).float() for n, w in ((4, 5), (2, 5), (2, 3)))
    out = mixer.mix(MixerInputs(q, k, v, random(1, 20, 6).float()))[0]
    root, h = SHAPE.scaling**0.5, 3
    phi_q, phi_k = (F.elu(x.double() * root) + 1 for x in (q[0, h], k[0, 1]))
    kernel = (
        F.softplus(mixer.mask.amplitude_RGJ[:, 1, 1])
        @ torch.exp(-F.softplus(mixer.mask.rate_RG[:, 1:]) * torch.arange(5))
    ).double()
    for t in range(20):
        w = kernel[[t // 4 - b for b in range(t // 4 + 1)]]
        w = (w / w.sum())[torch.arange(t + 1) // 4]
        weights = w * (phi_k[: t + 1] @ phi_q[t])
        torch.testing.assert_close(
            out[0, h, t].double(), weights @ v[0, 1, : t + 1].double() / weights.sum(), rtol=1e-4, atol=1e-5
        )


# -- Log-Linear Attention, Transformers are SSMs ---------------------------------------------------------
@torch.no_grad()
def test_lambda_is_softplus_of_a_linear_function():
    config = MASKS.config_type("hierarchical")(levels=4)
    mask = MASKS[config](config, SHAPE).double()
    mask.level.weight.copy_(random(*mask.level.weight.shape))
    x = random(1, 6, SHAPE.dim, seed=5)
    levels = F.softplus(x[0] @ mask.level.weight.T + mask.level.bias).view(6, SHAPE.heads, -1)
    dense = mask.dense(torch.tensor([0]), 6, mask.signals(x))[0].flatten(0, 1)
    gates = mask.gates.dense(torch.tensor([0]), 6, mask.gates.signals(x))[0].expand(-1, 2, -1, -1).flatten(0, 1)
    for t in range(6):
        for s in range(t + 1):
            level = min((t ^ s).bit_length(), levels.shape[-1] - 1)
            torch.testing.assert_close(dense[:, t, s], levels[t, :, level] * gates[:, t, s])


@torch.no_grad()
def test_gates_leave_what_is_written():
    """S_t = alpha_t S_(t-1) + v_t k_t^T (Log-Linear Attention, eq. 2): a token reads itself with weight one."""
    config = MASKS.config_type("gates")()
    mask = MASKS[config](config, SHAPE).double()
    mask.rate.weight.copy_(random(*mask.rate.weight.shape))
    diagonal = mask.dense(torch.tensor([0]), 8, mask.signals(random(1, 8, SHAPE.dim))).diagonal(dim1=-2, dim2=-1)
    assert torch.equal(diagonal, torch.ones_like(diagonal))


# -- Random features -------------------------------------------------------------------------------------
def products(phi, q, k):
    at = torch.arange(q.shape[2])[None]
    return phi.queries(q, at) @ phi.keys(k, at).repeat_interleave(q.shape[1] // k.shape[1], 1).mT


@torch.no_grad()
def test_favor_two_sided():
    """exp(-(|q|^2 + |k|^2) / 2) times the mean over the draws of cosh(w . (q + k))."""
    phi = FavorMap(Favor(16, "exact", sides=2), SHAPE).double()
    assert phi.w_GFK.shape == (2, 8, 5)
    q, k = 0.5 * random(1, 4, 6, 5), 0.5 * random(1, 2, 6, 5, seed=1)
    got = products(phi, q, k)
    for h in range(4):
        both = q[0, h][:, None] + k[0, h // 2]
        size = q[0, h].square().sum(-1)[:, None] + k[0, h // 2].square().sum(-1)
        printed = torch.exp(-size / 2) * torch.cosh(both @ phi.w_GFK[h // 2].T).mean(-1)
        torch.testing.assert_close(got[0, h], printed)
    with pytest.raises(SurgeryError, match="even"):
        Favor(15, sides=2)
    assert torch.equal(FavorMap(Favor(16), SHAPE).w_GFK, FavorMap(Favor(16, sides=1), SHAPE).w_GFK)


@torch.no_grad()
@pytest.mark.parametrize("sides", [1, 2])
def test_favor_is_unbiased(sides):
    q, k = 0.3 * random(1, 4, 3, 5), 0.3 * random(1, 2, 3, 5, seed=1)
    truth = (q @ k.repeat_interleave(2, 1).mT).exp()
    maps = (FavorMap(Favor(64, "exact", seed, sides), SHAPE).double() for seed in range(100))
    stack = torch.stack([products(phi, q, k) for phi in maps])
    assert ((stack.mean(0) - truth).abs() / (stack.std(0) / 10)).max() < 5


@torch.no_grad()
def test_lara_weights_sum_to_one():
    """The weights alpha_c(q, w), c any proposal, at any one w: what makes multiple importance sampling unbiased."""
    phi = LaraMap(Lara(8, queries="exact"), SHAPE).double()
    mu, q, w = phi.mu_GCK[0], random(5), random(5, seed=1)
    density = torch.exp(-(w - mu).square().sum(-1) / 2)
    ours = (density / density.sum() + (mu @ q).softmax(0)) / 2
    assert float(ours.sum()) == pytest.approx(1.0) and ours.min() > 0
    pooled = density / density.sum() + (mu @ q).softmax(0) - 1 / 8
    assert float(pooled.sum()) == pytest.approx(1.0) and pooled.min() < 0
    # phi(q)_c is that weight at w_c, over the density of w_c's own proposal.
    at = torch.zeros(1, 1, dtype=torch.int64)
    got = phi.queries(q.view(1, 1, 1, 5).expand(1, 4, 1, 5), at)[0, 0, 0]
    for c, w in enumerate(mu + phi.draw_GCK[0]):
        density = torch.exp(-(w - mu).square().sum(-1) / 2)
        alpha = (density[c] / density.sum() + (mu @ q).softmax(0)[c]) / 2
        ratio = torch.exp(-w.square().sum() / 2) / density[c]
        assert float(got[c]) == pytest.approx(float(alpha * ratio * torch.exp(w @ q - q.square().sum() / 2)), rel=1e-9)


# -- What is cited ---------------------------------------------------------------------------------------
# Of the papers that were read: author -> place -> a word that stands beside every mention of it.
PLACES = {
    "Qiu": {
        "section 2": "BTT", "eq 2": "BTT", "figure 1": "MLP|scaling", "section 3.2": "fan|initial", "table 2": "rate|initial", "section 5.1": "norm",
        "section e.2": "low rank|monarch", "figure 2": "rate", "table 1": "monarch", "figure 7": "norm", "figure 3": "rate", "figure 4": "scaling|transformer", "figure 9": "head",
        "figure 11": "core", "figure 12": "core",
    },
    "Kuang": {
        "figure 2": "regression", "figure 3": "regression", "section 4": "regression", "eq 4": "multi-level low rank|MLR",
        "section 3.2": "bilinear", "section 3.3": "MLBTC", "eq 3": "W_V W_O", "section 3.4": "MLR attention", "eq 9": "MLR attention", "eq 8": "MLBTC|levels",
        "section 5": "window", "figure 13": "window", "figure 14": "ETTh1", "figure 15": "series", "figure 4": "character", "figure 5": "rate", "section f.1": "bilinear", **{f"eq {n}": "bilinear" for n in (32, 35, 36, 37, 38, 39, 40)},
    },
    "Guo": {
        "section 2": "mask", "section 3.1": "level", "section 3.2": "level", "section 3.3": "chunk|segment|tree",
        "section 3.4": "gate|delta|mamba", "eq 2": "gate|weight one", "eq 3": "mask", "eq 4": "mask", "eq 5": "chunk",
        "section 4.1": "mqar", "section b.4": "admissib", "table 1": "toeplitz", "table 2": "mqar", "figure 9": "mqar", "table 6": "task", "figure 5": "position",
        "table 3": "language model", "table 4": "needle", "figure 4": "runtime|time|naive",
    },
    "FARS": {**{f"eq {n}": "block" for n in range(1, 7)}, "figure 2": "toeplitz", "table 2": "mqar", "table 3": "mqar", "figure 3": "time|MHLA"},
}  # fmt: skip
WORDS = r"(sections?|eqs?\.|tables?|figures?|appendix) (\w[\d.]*\d|\d+)\w?(?:(-| to | and |, )(\d[\d.]*\d|\d+))?"


def cited_places(text):
    """Places named in a text: section 3.4, eq 9."""
    for kind, first, joint, last in re.findall(WORDS, text, re.IGNORECASE):
        kind = {"e": "eq", "a": "section"}.get(kind[0].lower(), kind.lower().rstrip("s"))
        ends = [first.lower(), *([last.lower()] if last and (kind != "section" or joint == " and ") else [])]
        if len(ends) == 2 and joint in ("-", " to "):
            ends = [str(n) for n in range(int(first), int(last) + 1)]
        yield from (f"{kind} {end}" for end in ends)


def mentions():
    """(where, author, the sentence after the author's name, the text around it)."""
    files = [p for room in ("surgery", "kernels", "eval", "recipes") for p in (ROOT / room).rglob("*.py")]
    for path in files:
        text = " ".join(path.read_text(encoding="utf-8").split())
        for found in re.finditer(r"(Qiu|Kuang|Guo|FARS)(?: et al\.)? 20\d\d", text):
            after = re.split(r"\)|et al\.|\.\s[A-Z]|\. \"\"\"", text[found.end() : found.end() + 200])[0]
            yield path.name, found[1], after, text
    author = ""
    for line in (ROOT / "docs/papers.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3:
            author = author if cells[0].startswith("the same") else cells[0].split()[0]
            yield "papers.md", author, cells[0] + "; " + cells[1], line


def test_item_4_7_places_cited_exist_and_say_that():
    wrong, seen = [], 0
    for where, author, after, around in mentions():
        for place in cited_places(after) if author in PLACES else ():
            seen += 1
            word = PLACES[author].get(place)
            if word is None or not re.search(word, around, re.IGNORECASE):
                wrong.append(f"{where}: {author}, {place}")
    assert seen > 25 and not wrong


def test_item_4_7_each_difference_names_its_test():
    text = (ROOT / "docs/papers.md").read_text(encoding="utf-8").split("## Differences from print")[1]
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| paper", "| ---"))]
    here = Path(__file__).read_text(encoding="utf-8")
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py|test_\w+)`", row.rstrip("|").rsplit("|", 1)[1])
        assert named, row
        for name in named:
            assert (ROOT / name).is_file() if "/" in name else f"def {name}(" in here, name
    assert len(rows) > 12
