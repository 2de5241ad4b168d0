"""Attention over a window and sinks: the kernels against the reference in float64, outputs and every gradient."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("triton")

from helpers.kernel_rows import CUDA, DEVICE, gpu, patch_bfloat16_products

from surgery.core.dispatch import record_dispatch, use_kernels
from surgery.mixers.base import AttentionShape, MixerInputs
from surgery.mixers.common.window_hybrid import RecentAndSinks, local_attention
from surgery.mixers.linear import LinearMixer
from surgery.mixers.linear_config import LinearAttention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LEAVES = ("q", "k", "v", "sink_k", "sink_v")

pytestmark = pytest.mark.usefixtures("loops_of_tensors")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Under the interpreter, several tiles of a short sequence, and several spans of queries for the sinks."""
    from surgery.kernels import local_attention as kernels
    from surgery.kernels.local_attention import plan

    if not CUDA:
        tiles = plan.LocalTiles(16, 16, 4, 1)
        monkeypatch.setattr(kernels, "forward_tiles", lambda inputs: tiles)
        monkeypatch.setattr(kernels, "backward_tiles", lambda inputs: tiles)
        monkeypatch.setattr(kernels, "SPLIT_TILES", 2)
        monkeypatch.setattr(plan, "MIN_SPAN", 16)


class Case:
    """Random q, k, v and sinks of one call. seen: tokens of each row before it; slots before the first token hold
    noise.
    """

    def __init__(self, G, J, T, window, sinks, K=16, V=16, seen=(0,), softcap=None, largest=True):
        torch.manual_seed(0)
        B, self.largest, self.window = len(seen), largest, window
        self.seen = torch.tensor(seen, device=DEVICE)
        self.shape = AttentionShape(8, G * J, G, K, V, 0.4, softcap=softcap)
        sizes = {"q": (T, G, J, K), "k": (window + T, G, K), "v": (window + T, G, V), "sink_k": (sinks, G, K)}
        sizes["sink_v"] = (sinks, G, V)
        self.leaves = {name: torch.randn(B, *size, device=DEVICE) for name, size in sizes.items()}
        self.count = 2 + largest

    def call(self, leaves):
        """Return out, lse and, if asked for, the largest scores; tokens come before heads, as mixers hold them."""
        q = leaves["q"].permute(0, 2, 3, 1, 4)
        k, v, sink_k, sink_v = (leaves[name].transpose(1, 2) for name in LEAVES[1:])
        out = local_attention(
            q,
            RecentAndSinks(k, sink_k),
            RecentAndSinks(v, sink_v),
            self.seen,
            self.shape,
            16,
            with_largest=self.largest,
        )
        assert out.out.dtype == out.lse.dtype and (out.largest is not None) == self.largest
        return [x for x in out if x is not None]

    def gradients(self, dtype, choice, weights):
        """Return the outputs and the gradients of all leaves, the outputs weighted by `weights`."""
        given = {
            name: x.to(dtype).to(torch.float64 if choice == "reference" else dtype) for name, x in self.leaves.items()
        }
        given = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
        with use_kernels(choice), record_dispatch() as taken:
            outs = self.call(given)
        assert choice == "reference" or taken == {"local_attention"}
        total = sum((x.double() * w).sum() for x, w in zip(outs, weights))
        grads = torch.autograd.grad(total, [given[name] for name in LEAVES])
        return dict(zip(("out", "lse", "largest"), outs)) | {f"d{name}": x for name, x in zip(LEAVES, grads)}

    def weights(self):
        """Return a random direction for each output."""
        with use_kernels("reference"), torch.no_grad():
            return [torch.randn_like(x.double()) for x in self.call(self.leaves)]


def check(case, dtype=torch.float32, weights=None):
    weights = weights or case.weights()
    exact = case.gradients(dtype, "reference", weights)
    ours = case.gradients(dtype, "kernel", weights)
    errors = {
        name: ((ours[name].double() - x).norm() / x.norm().clamp_min(0.1)).item() if x.numel() else 0.0
        for name, x in exact.items()
    }
    print({name: float(f"{e:.2g}") for name, e in errors.items()})  # pytest -rP shows it
    assert all(e < TOLERANCE[dtype] for e in errors.values()), errors


@pytest.mark.parametrize(
    "case",
    [
        {"G": 1, "J": 1, "T": 1, "window": 1, "sinks": 0},
        {"G": 2, "J": 1, "T": 37, "window": 5, "sinks": 0},
        {"G": 1, "J": 2, "T": 37, "window": 20, "sinks": 3, "K": 24, "V": 17},
        {"G": 1, "J": 3, "T": 21, "window": 7, "sinks": 4, "seen": (0, 2, 30)},
        {"G": 1, "J": 7, "T": 9, "window": 4, "sinks": 17, "seen": (1, 15)},
        {"G": 1, "J": 20, "T": 3, "window": 9, "sinks": 2},
        {"G": 1, "J": 1, "T": 50, "window": 70, "sinks": 2, "seen": (0, 100)},
        {"G": 1, "J": 1, "T": 40, "window": 6, "sinks": 8, "softcap": 2.0},
        {"G": 1, "J": 2, "T": 40, "window": 33, "sinks": 1, "softcap": 2.0, "seen": (3,)},
        {"G": 1, "J": 1, "T": 20, "window": 0, "sinks": 5},
        {"G": 1, "J": 2, "T": 25, "window": 12, "sinks": 3, "largest": False},
    ],
    ids=str,
)
def test_local_attention(case):
    """Groups, sinks within the window, rows that go on, soft caps, odd sizes, windows of many tiles and of none."""
    check(Case(**case))


@pytest.mark.parametrize("seen", [(0,), (3, 40), (7, 6)])
def test_one_token(seen):
    """A decoding step: one query per head, the rings before it partly filled."""
    check(Case(2, 3, 1, 8, 3, seen=seen))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, monkeypatch):
    if not CUDA:
        patch_bfloat16_products(monkeypatch)
    check(Case(1, 2, 30, 11, 3, seen=(0, 12)), dtype)


@pytest.mark.parametrize("only", range(3))
def test_gradient_of_each_output(only):
    """out, lse and the largest score one by one: none hides an error in another."""
    case = Case(1, 2, 26, 9, 3, seen=(4,))
    weights = case.weights()
    check(case, weights=[w * (at == only) for at, w in enumerate(weights)])


def test_slots_before_a_row_are_not_read():
    """Ring slots before a row's first token and those of its sinks have no gradient, whatever they hold."""
    case = Case(1, 1, 5, 8, 3, seen=(4,))
    case.leaves["k"][:, :7] = 100.0  # slot s holds position s - 4: slots 0 to 6 are before the row or hold a sink
    case.leaves["v"][:, :7] = 1e4
    grads = case.gradients(torch.float32, "kernel", case.weights())
    assert grads["out"].abs().max() < 10
    assert grads["dk"][:, :7].eq(0).all() and grads["dv"][:, :7].eq(0).all() and grads["dk"][:, 7:].ne(0).any()


def test_gradients_are_the_same_in_every_run():
    case = Case(1, 4, 40, 20, 3)
    weights = case.weights()
    first, second = (case.gradients(torch.float32, "kernel", weights) for _ in range(2))
    assert all(torch.equal(x, second[name]) for name, x in first.items())


def test_more_heads_than_a_grid_axis_holds():
    """B * G programs beyond 65,535 lie on the grid's first axis, which has 2^31."""
    from surgery.kernels import local_attention as kernels

    grids = []

    class Watched:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **options: None

    with pytest.MonkeyPatch.context() as patch, use_kernels("kernel"):
        patch.setattr(kernels, "local_forward", Watched())
        q, k = (torch.empty(40_000, 2, *size, device=DEVICE) for size in ((1, 2, 1), (4, 1)))
        none = torch.empty(40_000, 2, 0, 1, device=DEVICE)
        seen = torch.zeros(40_000, dtype=torch.int64, device=DEVICE)
        keys = RecentAndSinks(k, none)
        local_attention(q, keys, keys, seen, AttentionShape(8, 2, 2, 1, 1, 1.0), 1)
    assert grids == [(80_000,)]


@pytest.mark.parametrize("options", [{"normalise": True}, {"normalise": False}], ids=str)
def test_in_a_mixer(options):
    """Prefill with padding, a piece and a step through a linear mixer with a window, against itself in float64."""
    torch.manual_seed(0)
    shape = AttentionShape(dim=32, heads=4, groups=2, key=16, value=16, scaling=0.25)
    mixer = LinearMixer(LinearAttention(mask="gates", features="elu", window=6, sinks=2, **options), shape).to(DEVICE)
    total = 24
    sizes = ((4, total, 16), (2, total, 16), (2, total, 16), (total, 32))
    parts = [torch.randn(2, *size, device=DEVICE) for size in sizes]
    valid_BT = torch.arange(total, device=DEVICE) >= torch.tensor([[5], [0]], device=DEVICE)

    def run(mixer, parts):
        state, outs = mixer.empty_state(2, DEVICE), []
        for a, b in [(0, 13), (13, total - 1), (total - 1, total)]:
            inputs = MixerInputs(*(x[:, :, a:b] for x in parts[:3]), parts[3][:, a:b], valid_BT[:, a:b])
            out_BHTV, state = mixer.mix(inputs, state)
            outs.append(out_BHTV)
        return torch.cat(outs, 2) * valid_BT[:, None, :, None]

    with torch.no_grad():
        with use_kernels("kernel"), record_dispatch() as taken:
            ours = run(mixer, parts)
        with use_kernels("reference"):
            exact = run(copy.deepcopy(mixer).double(), [x.double() for x in parts])
    assert "local_attention" in taken
    assert (ours.double() - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.parametrize("largest", [False, True])
def test_compiled(largest):
    """One graph, with a node whose shapes and gradients are what it says."""
    from surgery.kernels.local_attention import LOCAL_ATTENTION_OP

    case = Case(1, 2, 20, 5, 2, seen=(0, 9), largest=largest)
    leaves = [case.leaves[name].requires_grad_() for name in LEAVES]
    run = lambda *given: case.call(dict(zip(LEAVES, given)))  # noqa: E731
    torch.compiler.reset()
    results = []
    with use_kernels("kernel"):
        for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
            outs = call(*leaves)
            results.append([*outs, *torch.autograd.grad(sum(x.square().sum() for x in outs), leaves)])
    for a, b in zip(*results):
        assert a.shape == b.shape and (a - b).norm() <= 1e-5 * b.norm()
    q = case.leaves["q"].detach().permute(0, 2, 3, 1, 4).requires_grad_()
    keys = [case.leaves[name].detach().transpose(1, 2).requires_grad_() for name in LEAVES[1:]]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(LOCAL_ATTENTION_OP.node, (q, *keys, case.seen, 5, 0.4, None, largest), test_utils=tests)


@pytest.mark.parametrize(
    "options", [{"dtype": torch.float64}, {"K": 300}, {"sinks": 200}, {"scaling": -1.0}, {"mixed": True}], ids=str
)
def test_what_is_left_to_the_reference(options):
    case = Case(1, 1, 3, 2, options.get("sinks", 1), K=options.get("K", 16))
    dtype = options.get("dtype", torch.float32)
    q = case.leaves["q"].permute(0, 2, 3, 1, 4).to(torch.bfloat16 if "mixed" in options else dtype)
    k, v, sink_k, sink_v = (case.leaves[name].transpose(1, 2).to(dtype) for name in LEAVES[1:])
    shape = AttentionShape(8, 1, 1, 16, 16, options.get("scaling", 0.4))
    with use_kernels("kernel"):
        assert (
            local_attention.select_kernel(q, RecentAndSinks(k, sink_k), RecentAndSinks(v, sink_v), case.seen, shape, 4)
            is None
        )


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        {"G": 2, "J": 1, "T": 1000, "window": 64, "sinks": 4, "K": 64, "V": 64, "seen": (0, 3)},
        {"G": 1, "J": 7, "T": 517, "window": 100, "sinks": 17, "K": 80, "V": 64, "seen": (500,)},
        {"G": 2, "J": 4, "T": 3000, "window": 1024, "sinks": 64, "K": 128, "V": 128},
        {"G": 1, "J": 2, "T": 600, "window": 256, "sinks": 4, "K": 256, "V": 256, "softcap": 5.0},
        {"G": 8, "J": 4, "T": 1, "window": 1024, "sinks": 4, "K": 128, "V": 128, "seen": (5000, 7)},
    ],
    ids=str,
)
def test_local_attention_at_size(case, dtype):
    check(Case(**case), dtype)
