"""MLR attention's kernels against the definition in float64: outputs, gradients, and steps on a pruned cache."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("triton")

import itertools

from surgery.core.dispatch import record_dispatch, use_kernels
from surgery.kernels.mlr_attention.plan import MLRPlan
from surgery.mixers import MIXERS, AttentionShape, MixerInputs
from surgery.mixers.common import kv_layout as slots
from surgery.mixers.common.kv_layout import KVBuffer, KVLayout, append_slots, last_slots
from surgery.mixers.common.softmax import ScoreTerm, attend
from surgery.mixers.mlr import MLR
from surgery.mixers.sliding_window import Window

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="slow under the interpreter")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
PAPER = (32, 8, 6, 4, 4, 4, 4, 2)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """The interpreter walks several tiles of a small sequence; and it reads bounds that numpy 2.4 no longer turns into
    numbers. Far scores are measured against a fixed top however short the sequence."""
    from triton.runtime import interpreter

    from surgery.kernels import mlr_attention
    from surgery.kernels.mlr_attention import decode as mlr_attention_decode

    monkeypatch.setattr(mlr_attention, "FIXED_MAX_SLOTS", 0)
    if DEVICE == "cuda":
        return

    def bounds(*args):
        return range(*(int(a.handle.data.item()) if hasattr(a, "handle") else int(a) for a in args))

    monkeypatch.setattr(interpreter, "range", bounds, raising=False)
    tiles = mlr_attention.AttentionTiles(16, 16, 4, 1, run=2, hold=True)
    monkeypatch.setattr(mlr_attention, "forward_tiles", lambda *_: tiles)
    monkeypatch.setattr(mlr_attention, "backward_tiles", lambda *_: (tiles, tiles))
    monkeypatch.setattr(mlr_attention_decode, "TILE_SLOTS", 16)
    monkeypatch.setattr(mlr_attention_decode, "TARGET_PROGRAMS", 6)


def error(got, want):
    return ((got.double() - want).norm() / want.norm().clamp_min(0.1)).item()  # one token has no gradients


class Case:
    """Random q, k, v and biases of one attention, and what goes with them."""

    def __init__(
        self, B, G, J, T, ranks, extents, V, form="sliding", window=None, cap=None, bias=True, ends=None, S=None
    ):
        torch.manual_seed(0)
        S, R = S or T, sum(ranks)
        self.ranks, self.extents, self.form, self.G = ranks, extents, form, G
        self.frame = KVLayout(torch.tensor(ends or [S], device=DEVICE), T, S, ends is not None)
        self.shape = AttentionShape(8, G * J, G, R, V, 0.3, True, window, cap)
        self.q, self.k, self.v = (torch.randn(B, *size, device=DEVICE) for size in ((G, J, T, R), (G, S, R), (G, S, V)))
        self.bias = torch.randn(G, J, len(ranks) - 1, device=DEVICE) if bias and extents else None
        real = (self.frame.positions(S - T, S) >= 0)[:, None, :, None]
        self.weight = torch.randn(B, G * J, T, V, device=DEVICE) * real
        self.real = real

    def terms(self, q, k, bias):
        biases = (None, *([None] * len(self.extents) if bias is None else bias.unbind(-1)))
        parts = zip(q.split(self.ranks, -1), k.split(self.ranks, -1), (None, *self.extents), biases)
        return [ScoreTerm(a, b, e, self.form, bias) for a, b, e, bias in parts]

    def gradients(self, dtype, choice):
        """[out, dq, dk, dv, dbias]."""
        given = [self.q.to(dtype), self.k.to(dtype), self.v.to(dtype), self.bias]
        leaves = [x.double() if choice == "reference" and x is not None else x for x in given]
        leaves = [None if x is None else x.detach().clone().requires_grad_() for x in leaves]
        q, k, v, bias = leaves
        with use_kernels(choice):
            assert choice == "reference" or attend.select_kernel(self.terms(q, k, bias), v, self.frame, self.shape)
            out = attend(self.terms(q, k, bias), v, self.frame, self.shape)
        grads = torch.autograd.grad(out, [x for x in leaves if x is not None], self.weight.to(dtype).to(out.dtype))
        return [out * self.real, *grads]


def check(case, dtype=torch.float32):
    for got, want in zip(case.gradients(dtype, "kernel"), case.gradients(dtype, "reference"), strict=True):
        assert error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "case",
    [
        {"B": 1, "G": 1, "J": 1, "T": 1, "ranks": (16, 16), "extents": (4,), "V": 16},
        {"B": 1, "G": 1, "J": 1, "T": 37, "ranks": (32,), "extents": (), "V": 16},
        {"B": 1, "G": 1, "J": 2, "T": 41, "ranks": (16, 8, 6, 4), "extents": (30, 12, 5), "V": 16},
        {"B": 1, "G": 1, "J": 1, "T": 66, "ranks": (16, 16, 6, 26), "extents": (32, 16, 8), "V": 24, "form": "nested"},
        {
            "B": 1,
            "G": 1,
            "J": 1,
            "T": 40,
            "ranks": (16, 5, 8),
            "extents": (20, 20),
            "V": 13,
            "window": 25,
            "bias": False,
        },
        {
            "B": 2,
            "G": 1,
            "J": 1,
            "T": 33,
            "ranks": (16, 16),
            "extents": (8,),
            "V": 16,
            "form": "nested",
            "ends": [33, 18],
            "cap": 3.0,
        },
        {
            "B": 2,
            "G": 1,
            "J": 1,
            "T": 20,
            "S": 40,
            "ranks": (16, 16),
            "extents": (10,),
            "V": 16,
            "ends": [60, 33],
            "window": 25,
        },
        {"B": 1, "G": 1, "J": 2, "T": 30, "ranks": (16, 8, 6, 4), "extents": (64, 30, 12), "V": 16},
        {"B": 1, "G": 1, "J": 1, "T": 20, "ranks": (16, 16), "extents": (32,), "V": 16, "form": "nested", "cap": 3.0},
    ],
    ids=str,
)
def test_attend(case):
    """Levels, groups, windows, caps, odd sizes, padding, pieces behind a cache, levels that all pairs have."""
    check(Case(**case))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")  # of the interpreter; the tiles are computed anew
def test_far_scores_of_any_size():
    """Far keys that outweigh every near one by more than float32 holds; their tiles are computed anew."""
    case = Case(1, 1, 1, 80, (16, 16), (24,), 16)
    size = (50 / 0.3 / 32) ** 0.5  # scores of -50 and 50: e^100 is too large
    case.q[:] = size + 0.1 * case.q
    case.k[:, :, :40] = size + 0.1 * case.k[:, :, :40]
    case.k[:, :, 40:] = -size + 0.1 * case.k[:, :, 40:]
    out, expected = (case.gradients(torch.float32, choice)[0] for choice in ("kernel", "reference"))
    assert error(out, expected) < 1e-4  # float32 holds an exponent of 100 to 1e-5


def test_levels_that_all_pairs_have_are_one():
    plan = MLRPlan((32, 8, 6, 2), (64, 30, 12), False, None, None, 1.0, False)
    assert plan.merge_levels(30)[0][:2] == ((46, 2), (12,)) and plan.merge_levels(65) == (plan, 0)
    windowed = plan._replace(window=12)
    assert windowed.merge_levels(1000) == (windowed._replace(ranks=(48,), extents=()), 3)
    nested = plan._replace(nested=True)
    assert nested.merge_levels(64)[1] == 1 and nested._replace(holes=True).merge_levels(64)[1] == 0


def test_more_heads_than_a_grid_holds(monkeypatch):
    """Issue 17, 1: rows times heads lie on an axis of the grid, which holds 65,535; more go by several launches."""
    from surgery.kernels import mlr_attention

    case = Case(2, 1, 2, 3, (16, 16), (2,), 16, ends=[3, 2])
    grids = []

    def watching(kernel):
        class Watched:
            def __getitem__(self, grid):
                grids.append(grid)
                return kernel[grid]

        return Watched()

    for name in ("mlr_forward", "mlr_queries", "mlr_keys"):
        monkeypatch.setattr(mlr_attention, name, watching(getattr(mlr_attention, name)))
    monkeypatch.setattr(mlr_attention, "LANES", 2)
    check(case)
    assert grids and max(grid[1] for grid in grids) == 2
    monkeypatch.setattr(mlr_attention, "LANES", 1)  # one row alone has more
    with use_kernels("kernel"):
        assert attend.select_kernel(case.terms(case.q, case.k, case.bias), case.v, case.frame, case.shape) is None


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "case",
    [
        {"B": 1, "G": 2, "J": 2, "T": 1000, "ranks": PAPER, "extents": (500, 250, 125, 60, 30, 15, 7), "V": 64},
        {
            "B": 2,
            "G": 4,
            "J": 1,
            "T": 1024,
            "ranks": PAPER,
            "extents": tuple(1024 >> i for i in range(1, 8)),
            "V": 64,
            "form": "nested",
        },
        {
            "B": 1,
            "G": 1,
            "J": 1,
            "T": 3000,
            "ranks": PAPER,
            "extents": tuple(3000 >> i for i in range(1, 8)),
            "V": 64,
            "bias": False,
        },
        {"B": 1, "G": 1, "J": 1, "T": 1500, "ranks": (64,), "extents": (), "V": 64, "window": 300},
        {
            "B": 2,
            "G": 2,
            "J": 2,
            "T": 700,
            "S": 900,
            "ranks": (32, 16, 16),
            "extents": (256, 64),
            "V": 64,
            "window": 300,
            "ends": [1000, 650],
        },
        {"B": 1, "G": 2, "J": 1, "T": 600, "ranks": (64, 32, 32), "extents": (200, 100), "V": 128},
        {"B": 1, "G": 2, "J": 2, "T": 600, "ranks": PAPER, "extents": (1000, 800, 600, 400, 100, 64, 7), "V": 64},
        {"B": 1, "G": 2, "J": 1, "T": 512, "ranks": (128, 64, 64), "extents": (200, 100), "V": 256},
        {"B": 1, "G": 2, "J": 1, "T": 500, "ranks": (48, 32, 16), "extents": (256, 99), "V": 80, "cap": 20.0},
    ],
    ids=str,
)
def test_attend_at_size(case, dtype):
    check(Case(**case), dtype)


MODELS = [
    (MLR(ranks=(16, 8, 6, 2), extents=(20, 10, 3)), {}),
    (MLR(ranks=(16, 8, 6, 2), extents=(16, 8, 2), form="nested"), {}),
    (MLR(ranks=(16, 8), extents=(9,)), {"window": 12, "softcap": 5.0}),
    (Window(window=7), {}),
]


@pytest.mark.parametrize("config, options", MODELS, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_steps(config, options, padded):
    """Prefill, a piece and steps through a mixer, with kernels, are what the definition in float64 says."""
    torch.manual_seed(1)
    B, G, J, K, T = 2, 1, 2, 32, 25
    shape = AttentionShape(8, G * J, G, K, 16, 0.3, **options)
    mixer = MIXERS[config](config, shape).to(DEVICE)
    if getattr(mixer, "near", None) is not None:
        mixer.near.data.normal_()
    q, k, v, x = (torch.randn(B, n, T, d, device=DEVICE) for n, d in ((G * J, K), (G, K), (G, 16), (1, 8)))
    valid = torch.ones(B, T, dtype=torch.bool, device=DEVICE)
    if padded:
        valid[1, :5] = False
    outs, state, cuts = [], mixer.empty_state(B, DEVICE), [0, 17, 22, *range(23, T + 1)]
    with torch.no_grad():
        for a, b in itertools.pairwise(cuts):
            piece = MixerInputs(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], x[:, 0, a:b], valid[:, a:b])
            with use_kernels("kernel"):
                out, state = mixer(piece, state)
            outs.append(out)
        wide = copy.deepcopy(mixer).double()
        want = wide.dense(MixerInputs(q.double(), k.double(), v.double(), x[:, 0].double(), valid))
    real = valid[:, None, :, None]
    assert error(torch.cat(outs, 2) * real, want * real) < 1e-5


def test_steps_into_rooms(monkeypatch):
    """What is new to long caches is written in one launch; shorter ones are copied."""
    monkeypatch.setattr(slots, "MIN_BUFFER_SLOTS", 3)
    with record_dispatch() as taken:
        test_steps(*MODELS[0], False)
    assert "write_slots" in taken


COMPILED = [
    {"B": 1, "G": 1, "J": 2, "T": 9, "ranks": (16, 8, 6), "extents": (6, 3), "V": 13},
    {"B": 2, "G": 1, "J": 1, "T": 7, "ranks": (16, 16), "extents": (4,), "V": 16, "form": "nested", "ends": [7, 4]},
    {"B": 1, "G": 1, "J": 1, "T": 9, "ranks": (16, 8), "extents": (64,), "V": 16, "window": 5},  # one level is left
]


@pytest.mark.parametrize("options", COMPILED, ids=str)
def test_compiled_in_one_graph(options):
    """Under torch.compile the kernels are an operator with the same outputs and gradients."""
    case = Case(**options)
    given = [case.q, case.k, case.v, *([] if case.bias is None else [case.bias])]
    leaves = [x.detach().clone().requires_grad_() for x in given]
    run = lambda q, k, v, bias=None: attend(case.terms(q, k, bias), v, case.frame, case.shape)  # noqa: E731
    torch.compiler.reset()
    results = []
    with use_kernels("kernel"):
        for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
            out = call(*leaves)
            results.append([out * case.real, *torch.autograd.grad((out * case.weight).sum(), leaves)])
    for got, want in zip(*reversed(results)):
        assert got.shape == want.shape and error(got, want.double()) < 1e-5


def test_compiled_steps():
    """A decoding step on a cache is one operator too."""
    case = Case(B=2, G=1, J=2, T=1, S=40, ranks=(16, 8), extents=(10,), V=16)
    run = lambda q, k, v, bias: attend(case.terms(q, k, bias), v, case.frame, case.shape)  # noqa: E731
    torch.compiler.reset()
    with torch.no_grad(), use_kernels("kernel"), record_dispatch() as taken:
        want = run(case.q, case.k, case.v, case.bias)
        got = torch.compile(run, fullgraph=True, backend="aot_eager")(case.q, case.k, case.v, case.bias)
    assert "attend" in taken and error(got, want.double()) < 1e-6


@GPU
@pytest.mark.parametrize("form", ["sliding", "nested"])
@pytest.mark.parametrize("heads, groups", [(8, 2), (4, 4)])
def test_steps_at_size(form, heads, groups):
    """bfloat16 and a long cache, whose buffer is filled and then replaced by a larger one."""
    torch.manual_seed(0)
    length, steps = 3000, 120
    config = MLR(ranks=PAPER, extents=tuple(2048 >> i for i in range(7)), form=form)
    mixer = MIXERS[config](config, AttentionShape(8, heads, groups, 64, 64, 0.125)).to(DEVICE)
    mixer.near.data.normal_()
    total = length + steps
    q, k, v = (torch.randn(2, n, total, 64, device=DEVICE, dtype=torch.bfloat16) for n in (heads, groups, groups))
    x = torch.zeros(2, total, 8, device=DEVICE)
    outs, state = [], mixer.empty_state(2, DEVICE)
    with torch.no_grad(), use_kernels("kernel"):
        for a, b in [(0, length), *((t, t + 1) for t in range(length, total))]:
            out, state = mixer(MixerInputs(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], x[:, a:b]), state)
            outs.append(out)
    with torch.no_grad(), use_kernels("reference"):
        want, _ = mixer(MixerInputs(q.double(), k.double(), v.double(), x.double()))
    assert error(torch.cat(outs, 2)[:, :, length:], want[:, :, length:]) < 1e-2
    assert error(torch.cat(outs, 2), want) < 1e-2


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"scaling": -1.0},
        {"extents": (20, 40)},
        {"form": "nested", "extents": (40, 15)},
        {"mask": True},
        {"p": 0.1},
        {"dtype": torch.float64},
    ],
    ids=str,
)
def test_what_is_left_to_the_reference(options):
    options = dict(options)
    mask, p, dtype = options.pop("mask", False), options.pop("p", 0.0), options.pop("dtype", torch.float32)
    shape = AttentionShape(8, 1, 1, 48, 16, options.pop("scaling", 0.3), options.pop("causal", True))
    case = Case(**{"B": 1, "G": 1, "J": 1, "T": 9, "ranks": (16, 16, 16), "extents": (40, 20), "V": 16, **options})
    terms = case.terms(case.q.to(dtype), case.k.to(dtype), None)
    cut = torch.zeros(1, 1, 9, 9, device=DEVICE) if mask else None
    with use_kernels("kernel"):
        assert attend.select_kernel(terms, case.v.to(dtype), case.frame, shape, cut, p) is None


# -- rooms -----------------------------------------------------------------------------------------
def grow_cache(slots, tokens, keep):
    """A cache of that many slots, and its states after each of the tokens."""
    state = torch.randn(1, 2, slots, 3)
    states, all_tokens = [state], state
    for _ in range(tokens):
        new = torch.randn(1, 2, 1, 3)
        all_tokens = torch.cat([all_tokens, new], 2)
        states.append(last_slots(append_slots(states[-1], new, None), keep))
    return states, all_tokens


@pytest.mark.parametrize("keep", [1100, 5000])
def test_a_room_holds_what_a_copy_would(keep):
    states, tokens = grow_cache(1100, 80, keep)
    for n, state in enumerate(states):
        assert torch.equal(state, tokens[:, :, : 1100 + n][:, :, -keep:])
    assert len({state.data_ptr() // 4096 for state in states[1:30]}) < 5  # and is not copied at every token


def test_old_states_stay_as_they_were():
    """A second future of one state is written elsewhere; so are those of rows and of deep copies."""
    states, _ = grow_cache(1100, 5, 2000)
    before = [state.clone() for state in states]
    twin = copy.deepcopy(states[3])
    other = append_slots(states[3], torch.full((1, 2, 1, 3), 7.0), None)
    append_slots(twin, torch.full((1, 2, 1, 3), 8.0), None)
    append_slots(states[3].index_select(0, torch.tensor([0, 0])), torch.zeros(2, 2, 1, 3), None)
    assert all(torch.equal(a, b) for a, b in zip(before, states))
    assert other[0, 0, -1, 0] == 7 and torch.equal(other[:, :, :-1], before[3])


def test_a_buffer_is_little_larger_than_its_contents():
    states, _ = grow_cache(3200, 1, 5000)
    assert isinstance(states[-1].kv_buffer[0], KVBuffer)
    assert states[-1].untyped_storage().nbytes() <= 1.04 * states[-1].numel() * 4
