"""A server's decoding step by the kernels, in place and by page, against gather, step and scatter in float64."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from helpers.kernel_rows import DEVICE
from helpers.slow import slow_where
from kernels.test_kernel_window_step import miss, mixer_of, tokens, widen

from surgery.core.dispatch import load_kernels, use_kernels
from surgery.mixers.linear import one_token, step_in_pool
from surgery.mixers.linear_config import LinearAttention
from surgery.vllm.mixer_state import Batch, StateLayout, Tokens, mix_batch, steps_in_place

TREE = {"name": "hierarchical", "levels": 3}
BLOCKS = {"name": "hierarchical", "levels": 3, "block": 4}
CONFIGS = [
    {},
    {"mask": "decay", "scores": "delta", "norm": "rms"},
    {"mask": "ones", "features": "hedgehog", "normalise": True},
    {"mask": "hierarchical", "states": "per_head"},
    {"mask": TREE, "scores": "delta"},
    {"mask": BLOCKS, "scores": "delta", "features": "hedgehog"},
    {"window": 5, "sinks": 2},
    {"window": 5, "scores": "delta", "negative_eigenvalues": True},
    {"window": 5, "sinks": 2, "mask": "gates", "scores": "delta", "features": "hedgehog", "rope": "both"},
    {"window": 3, "mask": "hierarchical", "rope": "window", "states": "per_head"},
    {"window": 18, "sinks": 1, "mask": TREE, "scores": "delta"},
    {"window": 1, "sinks": 3, "mask": "ones", "rope": "drop"},
    {"window": 3, "sinks": 2, "mask": "ones", "features": "hedgehog", "normalise": True},
    {"window": 3, "sinks": 1, "features": "hedgehog", "normalise": True, "mask": BLOCKS},
    {"window": 4, "sinks": 1, "mask": BLOCKS, "scores": "delta", "features": "hedgehog", "rope": "both",
     "output_gate": "value"},
]  # fmt: skip
LONGEST = 40
SEEN = (0, 22, 1, -1, 7, 11)  # of the rows; -1: padding
STEPS = 4

pytestmark = pytest.mark.usefixtures("loops_of_tensors")


def filled_pages(mixer, layout: StateLayout, seen: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cache of more pages than rows, page of each row): NaN where the rows' sequences have not written."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.randperm(len(seen) + 3, generator=generator)[: len(seen)].int()
    cache = torch.full((len(seen) + 3, layout.size + 5), torch.nan, dtype=torch.float64, device=DEVICE)
    for row, count in enumerate(seen):
        if count > 0:
            state = mixer.mix(tokens(count, seed=50 + row, batch=1), mixer.empty_state(1, DEVICE))[1]
            seen_1 = torch.tensor([count], device=DEVICE)
            for name, page in layout.views(cache[pages[row] : pages[row] + 1]).items():
                t = state.tensors[name]
                page[:, : t.shape[1]] = t
                page.masked_fill_(~layout.is_written(name, page, seen_1), torch.nan)
    pages[[i for i, count in enumerate(seen) if count < 0]] = -1
    return cache.float(), pages.to(DEVICE)


def check_pages(mixer, seen: tuple[int, ...], steps: int, dtype: torch.dtype, tolerance: float, **sizes) -> None:
    """Compare steps of the kernels with the reference in float64, from the same rounded numbers."""
    layout, narrow = StateLayout(mixer, LONGEST), copy.deepcopy(mixer).float()
    cache, page_B = filled_pages(mixer, layout, seen)
    exact, real = cache.double(), torch.tensor([count >= 0 for count in seen])
    rows = page_B.long()[real]
    for step in range(steps):
        now = [count + step if count >= 0 else -1 for count in seen]
        seen_B = torch.tensor(now, dtype=torch.int32, device=DEVICE)
        given = tokens(1, dtype=dtype, seed=step, batch=len(seen), **sizes)
        for t in (given.q_BHTK, given.k_BGTK, given.v_BGTV, given.x_BTD):
            t[~real] = torch.nan
        wide = widen(given)
        wide = type(wide)(*(t[real] for t in (wide.q_BHTK, wide.k_BGTK, wide.v_BGTV, wide.x_BTD)),
                          rope=tuple(t[real] for t in wide.rope))  # fmt: skip
        state = layout.read(exact[rows], [count for count in now if count >= 0], seen_B[real].long())
        right, after = one_token.reference(wide.q_BHTK, mixer, wide, state)
        exact[rows, : layout.size] = layout.write(after, torch.float64)
        call = given.q_BHTK, narrow, given, seen_B, layout.views(cache), page_B
        before = cache.clone()
        with use_kernels("kernel"):
            assert step_in_pool.select_kernel(*call)
            out = step_in_pool(*call)
        assert out.dtype == dtype and not out[~real].any()
        assert miss(out[real], right) < tolerance
        seen_after = seen_B[real].long() + 1
        ours, exacts = layout.views(cache[rows]), layout.views(exact[rows])
        for name, t in ours.items():
            written = layout.is_written(name, t, seen_after)
            got, wanted = (x.masked_fill(~written, 0) for x in (t, exacts[name]))
            assert miss(got, wanted) < tolerance, name
        untouched = [i for i in range(len(cache)) if i not in rows.tolist()]
        same = torch.equal(cache[untouched].nan_to_num(7.0), before[untouched].nan_to_num(7.0))
        assert same and torch.equal(cache[:, layout.size :].isnan(), before[:, layout.size :].isnan())


# Each part of these is in one of the others.
LIKE_OTHERS = [CONFIGS[i] for i in (2, 3, 5, 6, 10, 13)]
QUICK = [(options, 2) for options in CONFIGS if options not in LIKE_OTHERS]  # two steps end buckets, blocks and windows


@pytest.mark.parametrize(
    ("options", "steps"),
    slow_where(lambda _, steps: steps == STEPS, QUICK + [(options, STEPS) for options in CONFIGS]),
    ids=str,
)
@torch.no_grad()
def test_steps_in_pages(options, steps):
    """Pages out of order; rows of several lengths, fresh ones and padding; NaN in all that no token has written."""
    check_pages(mixer_of(LinearAttention(**options)), SEEN, steps, torch.float32, 5e-6)


@pytest.mark.parametrize("options", [CONFIGS[4], CONFIGS[7], CONFIGS[11]], ids=str)
@torch.no_grad()
def test_half_precision(options):
    """Tokens in float16, pages in float32."""
    check_pages(mixer_of(LinearAttention(**options)), (0, 22, -1), 2, torch.float16, 1e-2)


@torch.no_grad()
def test_from_nothing():
    """Through the ends of blocks and of the window, with every other row of padding."""
    mixer = mixer_of(LinearAttention(mask={**TREE, "block": 2}, scores="delta", window=2, sinks=1))
    check_pages(mixer, (-1, 0), 14, torch.float32, 5e-6)


class WithoutWaiting(TorchDispatchMode):
    """Raises for operations that wait for a GPU: those that bring numbers to the CPU, or have outputs of a size that
    depends on them."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "pin_memory")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).split(".")[1]
        assert not any(name.startswith(word) for word in self.WAITS), name
        moves = name in ("_to_copy", "copy_") and (kwargs or {}).get("device") is not None
        assert not moves, f"{name} between devices"
        by_mask = name.startswith("index") and any(
            isinstance(t, torch.Tensor) and t.dtype == torch.bool
            for part in args
            if isinstance(part, list)
            for t in part
        )
        assert not by_mask, f"{name} by a mask"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [CONFIGS[0], CONFIGS[4], CONFIGS[11], CONFIGS[13], CONFIGS[14]], ids=str)
@torch.no_grad()
def test_a_step_waits_for_nothing_and_is_the_same_for_all_lengths(options, monkeypatch):
    """What a CUDA graph needs: no operation that reads numbers of the GPU, one plan of launches, one set of tensors."""
    load_kernels()
    from surgery.kernels import window_step
    from surgery.kernels.ssd import fused_token
    from surgery.kernels.window_step import prepare

    plans: list[list] = []

    class AnyGrid(SimpleNamespace):
        def __getitem__(self, grid):
            integers = lambda args: [x for x in args if isinstance(x, int)]  # noqa: E731
            return lambda *args, **options: plans[-1].append((self.name, grid, integers(args), options))

    monkeypatch.setattr(fused_token, "signals", AnyGrid(name="signals"))
    for module in (window_step, prepare):
        monkeypatch.setattr(module, "_launch", lambda *plan: lambda *_: plans[-1].append(("step", *plan)))
    mixer = mixer_of(LinearAttention(**options)).float()
    layout = StateLayout(mixer, LONGEST)
    cache, page_B = torch.zeros(9, layout.size + 5, device=DEVICE), torch.arange(3, 9, dtype=torch.int32, device=DEVICE)
    given = tokens(1, dtype=torch.float32, batch=6)
    rope = tuple(t.squeeze(1) for t in given.rope)
    call = Tokens(*(t.squeeze(2) for t in (given.q_BHTK, given.k_BGTK, given.v_BGTV)), given.x_BTD.squeeze(1), rope)
    for lengths in ([1, 23, 2, 0, 8, 12], [39, 3, 1, 30, 0, 0]):
        plans.append([])
        seen_B = torch.tensor(lengths, dtype=torch.int32, device=DEVICE) - 1
        with use_kernels("kernel"), WithoutWaiting():
            mix_batch(mixer, layout, cache, Batch(6, list(range(7)), lengths, page_B, seen_B), call)
    assert len(plans[0]) >= 2 and plans[0] == plans[1]


@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_a_server_may_capture_these_steps(options):
    """What vLLM asks before it captures whole steps in CUDA graphs."""
    mixer = mixer_of(LinearAttention(**options)).float()
    with use_kernels("kernel"):
        assert steps_in_place(mixer, StateLayout(mixer, LONGEST), torch.float32, DEVICE)
    with use_kernels("reference"):
        assert not steps_in_place(mixer, StateLayout(mixer, LONGEST), torch.float32, DEVICE)
