"""Laws that every mask obeys with either score rule, over the whole registry: dense = chunked = step, pieces = whole
for rows of any length that start anywhere, gradients of everything. float64 is the judge."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS, Mask, Rows
from surgery.mixers.scores import dense_scores

SHAPE = AttentionShape(dim=6, heads=4, groups=2, key=5, value=3, scaling=1.0)
OPTIONS = {"blocks": {"block": 12, "count": 100}, "toeplitz_blocks": {"block": 12}, "toeplitz": {"length": 50}}
# Levels shared early, gates of every kind.
MORE = {"hierarchical": [{"levels": 4, "gates": "decay"}, {"gates": "ones"}], "blocks": [{"block": 5, "count": 220}]}
CONFIGS = [
    MASKS.config_type(name)(**options)
    for name in MASKS.names()
    for options in [OPTIONS.get(name, {}), *MORE.get(name, [])]
]
EITHER = pytest.mark.parametrize("scores", ["kernel", "delta"])
EVERY = pytest.mark.parametrize("config", CONFIGS, ids=str)


def masked(config, shape: AttentionShape = SHAPE, dtype: torch.dtype = torch.float64) -> Mask:
    """With parameters that are no longer where they started."""
    torch.manual_seed(3)
    mask = MASKS[config](config, shape).to(dtype)
    with torch.no_grad():
        for parameter in mask.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return mask


def some_rows(mask: Mask, scores: str, length: int, start: list[int], count: list[int], features=5, values=3) -> Rows:
    """Packed rows: what is written behind their `count` tokens is zero."""
    torch.manual_seed(length)
    shape, batch, dtype = mask.shape, len(start), torch.float64
    groups = shape.groups
    q = torch.randn(batch, groups, shape.heads // groups, length, features, dtype=dtype)
    k, v = (torch.randn(batch, groups, length, n, dtype=dtype) for n in (features, values))
    beta = torch.rand(batch, groups, length, dtype=dtype) if scores == "delta" else None
    k = F.normalize(k, dim=-1) if beta is not None else k
    real_BT = torch.arange(length) < torch.tensor(count).unsqueeze(1)
    signals = mask.signals(torch.randn(batch, length, shape.dim, dtype=dtype))
    for name in mask.written:
        signals[name] = signals[name] * real_BT.view(batch, length, *[1] * (signals[name].dim() - 2))
    k, v = (x * real_BT[:, None, :, None] for x in (k, v))
    beta = None if beta is None else beta * real_BT[:, None]
    return Rows(q, k, v, beta, torch.tensor(start), torch.tensor(count), signals)


def to(rows: Rows, dtype: torch.dtype) -> Rows:
    parts = {
        name: None if x is None else x.to(dtype) for name, x in vars(rows).items() if name.endswith(("F", "V", "BGT"))
    }
    return replace(rows, **parts, signals={name: x.to(dtype) for name, x in rows.signals.items()})


def piece(rows: Rows, a: int, b: int) -> Rows:
    """Tokens a .. b of every row."""
    return Rows(
        rows.q_BGJTF[:, :, :, a:b],
        rows.k_BGTF[:, :, a:b],
        rows.v_BGTV[:, :, a:b],
        None if rows.beta_BGT is None else rows.beta_BGT[:, :, a:b],
        rows.start_B + rows.count_B.clamp_max(a),
        (rows.count_B - a).clamp(0, b - a),
        {name: x[:, a:b] for name, x in rows.signals.items()},
    )


def definition(mask: Mask, rows: Rows) -> torch.Tensor:
    """(A . M) V."""
    scores = dense_scores(rows.q_BGJTF, rows.k_BGTF, rows.beta_BGT)
    return (scores * mask.dense(rows.start_B, rows.v_BGTV.shape[2], rows.signals)) @ rows.v_BGTV.unsqueeze(2)


def in_pieces(mask: Mask, rows: Rows, cuts: list[int], chunk: int, state=None) -> tuple[torch.Tensor, dict]:
    """chunk 0: by single steps."""
    batch, features, values = len(rows.start_B), rows.k_BGTF.shape[-1], rows.v_BGTV.shape[-1]
    state, outs = state or mask.empty(batch, features, values, "cpu"), []
    for a, b in itertools.pairwise(cuts):
        out, state = mask.chunked(piece(rows, a, b), state, chunk) if chunk else mask.step(piece(rows, a, b), state)
        outs.append(out)
    return torch.cat(outs, 3), state


def miss(out: torch.Tensor, expected: torch.Tensor, rows: Rows) -> float:
    """Relative distance over real tokens."""
    real = (torch.arange(out.shape[3]) < rows.count_B.unsqueeze(1))[:, None, None, :, None]
    return float(((out - expected) * real).norm() / (expected * real).norm().clamp_min(1e-30))


@pytest.fixture(autouse=True)
def _without_gradients(request):
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


@EVERY
@EITHER
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65])
def test_chunked_is_the_definition(config, scores, length):
    mask = masked(config)
    for start in ([0, 0, 0], [3, 64, 131]):
        rows = some_rows(mask, scores, length, start, [length, length - 1, length // 2])
        expected = definition(mask, rows)
        for chunk in (1, 7, 16, 64):
            assert miss(mask.chunked(rows, None, chunk)[0], expected, rows) < 1e-13, (start, chunk)


@EVERY
@EITHER
def test_float32_agrees_at_a_thousand_tokens(config, scores):
    mask = masked(config)
    rows = some_rows(mask, scores, 1000, [0, 0], [1000, 777])
    expected, single = definition(mask, rows), to(rows, torch.float32)
    mask.float()
    assert miss(definition(mask, single), expected, rows) < 1e-5
    for chunk in (50, 64, 128):
        assert miss(mask.chunked(single, None, chunk)[0], expected, rows) < 1e-5, chunk
    steady, state = in_pieces(mask, single, [0, 500, 937], 64)
    steps, _ = in_pieces(mask, single, list(range(937, 1001)), 0, state)
    out = torch.cat([steady, steps], 3)
    assert out.dtype == torch.float32 and miss(out, expected, rows) < 1e-5


@EVERY
@EITHER
def test_pieces_are_the_whole(config, scores):
    """Rows of different lengths go on from where each one is; chunks and single steps leave the same state."""
    mask = masked(config)
    rows = some_rows(mask, scores, 70, [0, 0, 0, 0], [70, 50, 31, 0])
    expected = definition(mask, rows)
    out, state = in_pieces(mask, rows, list(range(71)), 0)
    assert miss(out, expected, rows) < 1e-13
    for chunk, cuts in [
        (1, [0, 20, 70]),
        (5, [0, 13, 14, 33, 34, 64, 70]),
        (16, [0, 1, 31, 70]),
        (64, [0, 64, 65, 70]),
    ]:
        out, after = in_pieces(mask, rows, cuts, chunk)
        assert miss(out, expected, rows) < 1e-13, chunk
        assert {name: x.shape for name, x in after.items()} == {name: x.shape for name, x in state.items()}
        for name, x in after.items():
            torch.testing.assert_close(x, state[name], rtol=1e-11, atol=1e-11)


@EVERY
@EITHER
def test_later_tokens_change_nothing(config, scores):
    mask = masked(config)
    rows = some_rows(mask, scores, 40, [0, 9], [40, 40])
    changed = some_rows(mask, scores, 41, [0, 9], [41, 41])
    for name in ("q_BGJTF", "k_BGTF", "v_BGTV", "beta_BGT"):
        old, new = getattr(rows, name), getattr(changed, name)
        if old is not None:
            new.narrow(3 if name == "q_BGJTF" else 2, 0, 23).copy_(old.narrow(3 if name == "q_BGJTF" else 2, 0, 23))
    for name, signal in changed.signals.items():
        signal[:, :23] = rows.signals[name][:, :23]
    a, b = (mask.chunked(r, None, 16)[0][:, :, :, :23] for r in (rows, changed))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@EVERY
@EITHER
def test_gradients_are_finite_differences(config, scores):
    """Of queries, keys, values, betas, signals, parameters and the state that a row brings along."""
    shape = replace(SHAPE, heads=2, groups=1, dim=3)
    mask = masked(config, shape)
    with torch.no_grad():
        rows = some_rows(mask, scores, 13, [0, 0], [13, 8], features=2, values=2)
        _, state = in_pieces(mask, rows, [0, 6], 4)
    rest, names = piece(rows, 6, 13), list(state)
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    parameters = list(mask.parameters())
    beta = [] if rest.beta_BGT is None else [rest.beta_BGT]
    leaves = [x.detach().clone().requires_grad_() for x in [rest.q_BGJTF, rest.k_BGTF, rest.v_BGTV, x, *beta]]
    states = [state[name].double().requires_grad_() for name in names]

    def through(*inputs):
        q, k, v, x, *betas = inputs[: len(leaves)]
        signals = mask.signals(x)
        real = (torch.arange(7) < rest.count_B.unsqueeze(1)).unsqueeze(2)
        signals.update({name: signals[name] * real for name in mask.written})
        here = replace(rest, q_BGJTF=q, k_BGTF=k, v_BGTV=v, beta_BGT=betas[0] if betas else None, signals=signals)
        out, after = mask.chunked(here, dict(zip(names, inputs[len(leaves) : len(leaves) + len(names)])), 4)
        one, last = mask.step(piece(here, 6, 7), after)
        return out, one, *last.values()

    assert torch.autograd.gradcheck(through, (*leaves, *states, *parameters), atol=1e-6, rtol=1e-4, fast_mode=True)


@EVERY
@EITHER
def test_half_precision_comes_in_and_float32_is_kept(config, scores):
    mask = masked(config, dtype=torch.float32)
    rows = to(some_rows(mask.double(), scores, 33, [0, 0], [33, 20]), torch.bfloat16)
    mask.float()
    out, state = in_pieces(mask, rows, [0, 17, 33], 16)
    assert out.dtype == torch.float32 and all(x.dtype == torch.float32 for x in state.values())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_what_is_kept_is_counted(config):
    mask = masked(config)
    rows = some_rows(mask, "kernel", 70, [0, 0], [70, 70])
    _, state = in_pieces(mask, rows, [0, 70], 16)
    numbers = sum(x.numel() for x in state.values())
    assert numbers == 2 * SHAPE.groups * type(mask).kept(config, SHAPE, 5, 3, 70)
