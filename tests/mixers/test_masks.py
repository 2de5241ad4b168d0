"""Laws of every mask with either score rule, over the whole registry, in float64.

dense = chunked = step and pieces = whole, for rows of any length and start position, with all gradients.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.mask_rows import (
    SHAPE,
    dense_output,
    make_mask,
    random_rows,
    relative_error,
    run_in_pieces,
    slice_rows,
    to_dtype,
)
from helpers.slow import slow_where

from surgery.core.errors import SurgeryError
from surgery.mixers.base import from_options
from surgery.mixers.linear_config import BIDIRECTIONAL_MASKS
from surgery.mixers.masks.base import MASKS, MaskInputs

OPTIONS = {
    "banded": {"width": 9, "dilation": 3},
    "block_diagonal": {"block": 12},
    "blocks": {"block": 12, "count": 100},
    "input_toeplitz": {"length": 50},
    "toeplitz": {"length": 50},
    "toeplitz_blocks": {"block": 12},
}
# Levels shared early, gates of every kind.
MORE = {
    "hierarchical": [
        {"levels": 4, "gates": "decay"},
        {"gates": "ones"},
        {"levels": "strong"},
        {"levels": 4, "gates": "decay", "admissibility": "strong"},
        {"levels": 3, "form": "bounded"},
    ],
    "banded": [{"width": 2}, {"width": 20}, {"width": 400}],
    "blocks": [{"block": 5, "count": 220, "normalise": "sum"}],
    "input_toeplitz": [{"length": 2}, {"length": 2000}],
}
CONFIGS = [
    MASKS.config_type(name)(**options)
    for name in MASKS.names()
    for options in [OPTIONS.get(name, {}), *MORE.get(name, [])]
]
EITHER = pytest.mark.parametrize("scores", ["kernel", "delta"])
EVERY = pytest.mark.parametrize("config", CONFIGS, ids=str)


@pytest.fixture(autouse=True)
def _without_gradients(request):
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


@EVERY
@EITHER
@pytest.mark.parametrize("length", slow_where(lambda length: length in (2, 63), [1, 2, 63, 64, 65]))
def test_chunked_is_the_definition(config, scores, length):
    mask = make_mask(config)
    for start in ([0, 0, 0], [3, 64, 131]):
        rows = random_rows(mask, scores, length, start, [length, length - 1, length // 2])
        expected = dense_output(mask, rows)
        for chunk in (1, 7, 16, 64):
            assert relative_error(mask.chunked(rows, None, chunk)[0], expected, rows) < 1e-13, (start, chunk)


def is_like_another(config, scores):
    """Return whether the mask is beside those that the delta rule is run with over a thousand tokens in `make test`."""
    return scores == "delta" and config not in [
        MASKS.config_type(name)(**OPTIONS.get(name, {})) for name in ("gates", "hierarchical", "toeplitz_blocks")
    ]


@pytest.mark.parametrize(
    ("config", "scores"),
    slow_where(is_like_another, [(config, scores) for config in CONFIGS for scores in ("kernel", "delta")]),
    ids=str,
)
def test_float32_agrees_at_a_thousand_tokens(config, scores):
    mask = make_mask(config)
    rows = random_rows(mask, scores, 1000, [0, 0], [1000, 777])
    expected, single = dense_output(mask, rows), to_dtype(rows, torch.float32)
    mask.float()
    assert relative_error(dense_output(mask, single), expected, rows) < 1e-5
    for chunk in (50, 64, 128):
        assert relative_error(mask.chunked(single, None, chunk)[0], expected, rows) < 1e-5, chunk
    steady, state = run_in_pieces(mask, single, [0, 500, 937], 64)
    steps, _ = run_in_pieces(mask, single, list(range(937, 1001)), 0, state)
    out = torch.cat([steady, steps], 3)
    assert out.dtype == torch.float32 and relative_error(out, expected, rows) < 1e-5


@EVERY
@EITHER
def test_pieces_are_the_whole(config, scores):
    """Rows of different lengths go on from where each one is; chunks and single steps leave the same state."""
    mask = make_mask(config)
    rows = random_rows(mask, scores, 70, [0, 0, 0, 0], [70, 50, 31, 0])
    expected = dense_output(mask, rows)
    out, state = run_in_pieces(mask, rows, list(range(71)), 0)
    assert relative_error(out, expected, rows) < 1e-13
    for chunk, cuts in [
        (1, [0, 20, 70]),
        (5, [0, 13, 14, 33, 34, 64, 70]),
        (16, [0, 1, 3, 6, 31, 70]),
        (16, [0, 2, 70]),
        (16, [0, 3, 70]),
        (64, [0, 64, 65, 70]),
    ]:
        out, after = run_in_pieces(mask, rows, cuts, chunk)
        assert relative_error(out, expected, rows) < 1e-13, chunk
        assert {name: x.shape for name, x in after.items()} == {name: x.shape for name, x in state.items()}
        for name, x in after.items():
            torch.testing.assert_close(x, state[name], rtol=1e-11, atol=1e-11)


@EVERY
@EITHER
def test_rows_of_a_state_go_on_alone(config, scores):
    """Shorter rows, repeated and reordered (beams), by pieces and by steps; the old state is as it was."""
    mask = make_mask(config)
    rows = random_rows(mask, scores, 45, [0, 0, 0], [45, 38, 34])
    expected = dense_output(mask, rows)
    _, state = run_in_pieces(mask, rows, [0, 33], 16)
    copies, index = {name: x.clone() for name, x in state.items()}, torch.tensor([2, 1, 2])
    chosen = MaskInputs(**{name: x[index] if isinstance(x, torch.Tensor) else x for name, x in vars(rows).items()})
    chosen.signals = {name: signal[index] for name, signal in rows.signals.items()}
    for cuts, chunk in (([33, 40, 45], 4), (list(range(33, 46)), 0)):
        out, _ = run_in_pieces(mask, chosen, cuts, chunk, {name: x[index] for name, x in state.items()})
        assert relative_error(out, expected[index, :, :, 33:], slice_rows(chosen, 33, 45)) < 1e-13
    assert all(torch.equal(x, copies[name]) for name, x in state.items())


@EITHER
@pytest.mark.parametrize("name", ["gates", "toeplitz_blocks", "toeplitz", "input_toeplitz", "fourier"])
def test_spans_are_the_whole(name, scores, monkeypatch):
    """Long sequences are worked on some chunks at a time, convolutions some features at a time."""
    monkeypatch.setattr("surgery.mixers.masks.chunking.SPAN_ELEMENTS", {"cpu": 6000, "cuda": 1})
    monkeypatch.setattr("surgery.mixers.masks.fft_convolution.FFT_ELEMENTS", {"cpu": 50000, "cuda": 1})
    config = MASKS.config_type(name)()
    mask = make_mask(config)
    rows = random_rows(mask, scores, 333, [5, 0], [333, 100])
    assert relative_error(mask.chunked(rows, None, 16)[0], dense_output(mask, rows), rows) < 1e-13


@EVERY
@EITHER
def test_later_tokens_change_nothing(config, scores):
    mask = make_mask(config)
    rows = random_rows(mask, scores, 40, [0, 9], [40, 40])
    changed = random_rows(mask, scores, 41, [0, 9], [41, 41])
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
    mask = make_mask(config, shape)
    with torch.no_grad():
        rows = random_rows(mask, scores, 13, [0, 0], [13, 8], features=2, values=2)
        _, state = run_in_pieces(mask, rows, [0, 6], 4)
    rest, names = slice_rows(rows, 6, 13), list(state)
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    parameters = list(mask.parameters())
    beta = [] if rest.beta_BGT is None else [rest.beta_BGT]
    leaves = [x.detach().clone().requires_grad_() for x in [rest.q_BGJTF, rest.k_BGTF, rest.v_BGTV, x, *beta]]
    states = [state[name].double().requires_grad_() for name in names]

    def through(*inputs):
        q, k, v, x, *betas = inputs[: len(leaves)]
        signals = mask.signals(x)
        real = (torch.arange(7) < rest.count_B.unsqueeze(1)).unsqueeze(2)
        signals.update({name: signals[name] * real for name in mask.written_signals})
        here = replace(rest, q_BGJTF=q, k_BGTF=k, v_BGTV=v, beta_BGT=betas[0] if betas else None, signals=signals)
        out, after = mask.chunked(here, dict(zip(names, inputs[len(leaves) : len(leaves) + len(names)])), 4)
        one, last = mask.step(slice_rows(here, 6, 7), after)
        return out, one, *last.values()

    assert torch.autograd.gradcheck(through, (*leaves, *states, *parameters), atol=1e-6, rtol=1e-4, fast_mode=True)


@EVERY
@EITHER
def test_half_precision_comes_in_and_float32_is_kept(config, scores):
    """Of inputs and of a checkpoint's parameters; what float32 makes of the same numbers is the judge."""
    mask = make_mask(config).bfloat16()
    rows = random_rows(make_mask(config), scores, 33, [0, 0], [33, 20])
    half = to_dtype(rows, torch.bfloat16)
    x = torch.randn(2, 33, SHAPE.dim, dtype=torch.bfloat16)
    assert all(signal.dtype == torch.float32 for signal in mask.signals(x).values())
    out, state = run_in_pieces(mask, half, [0, 17, 33], 16)
    last, after = mask.step(slice_rows(half, 32, 33), state)
    assert all(t.dtype == torch.float32 for t in (out, last, *state.values(), *after.values()))
    exact, _ = run_in_pieces(mask.double(), to_dtype(half, torch.float64), [0, 33], 16)
    assert relative_error(out, exact, rows) < 1e-5


@EVERY
def test_masks_are_made_without_memory_and_loaded(config):
    """On the meta device, then from a state dict: the same mask."""
    mask = make_mask(config, dtype=torch.float32)
    with torch.device("meta"):
        empty = MASKS[config](config, SHAPE)
    empty.load_state_dict(mask.state_dict(), assign=True)
    rows = to_dtype(random_rows(make_mask(config), "kernel", 20, [0], [20]), torch.float32)
    assert torch.equal(empty.chunked(rows, None, 8)[0], mask.chunked(rows, None, 8)[0])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_what_is_kept_is_counted(config):
    mask = make_mask(config)
    rows = random_rows(mask, "kernel", 70, [0, 0], [70, 70])
    _, state = run_in_pieces(mask, rows, [0, 70], 16)
    numbers = sum(x.numel() for x in state.values())
    assert numbers == 2 * SHAPE.groups * type(mask).state_size(config, SHAPE, 5, 3, 70)


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.name in BIDIRECTIONAL_MASKS], ids=str)
def test_block_masks_both_ways(config):
    """Every block sees every block; a call without a state is the definition."""
    mask = make_mask(config, replace(SHAPE, causal=False))
    for length in (1, 11, 12, 65):
        rows = random_rows(mask, "kernel", length, [0, 0], [length, length // 2])
        assert relative_error(mask.chunked(rows, None, 64)[0], dense_output(mask, rows), rows) < 1e-13
    assert not torch.equal(mask.dense(rows.start_B, 65, {}), mask.dense(rows.start_B, 65, {}).tril())
    with pytest.raises(SurgeryError, match="scores: kernel"):
        type(mask).check_config(config, mask.shape, True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("normalise", ["softmax", "sum"])
def test_block_mixing_rows_sum_to_one_and_start_near(normalise, causal):
    config = MASKS.config_type("blocks")(block=4, count=9, normalise=normalise, weights="frozen")
    mask = MASKS[config](config, replace(SHAPE, causal=causal)).double()
    w_GJMM = mask.matrix()
    assert not list(mask.parameters()) and "weight_GJMM" in mask.state_dict()
    torch.testing.assert_close(w_GJMM.sum(-1), torch.ones_like(w_GJMM.sum(-1)))
    assert (w_GJMM.diagonal(dim1=-2, dim2=-1) == w_GJMM.amax(-1)).all() and (w_GJMM >= 0).all()
    wanted = torch.rand_like(w_GJMM).tril() if causal else torch.rand_like(w_GJMM)
    mask.initialize(wanted)
    torch.testing.assert_close(mask.matrix(), wanted / wanted.sum(-1, keepdim=True), rtol=1e-6, atol=1e-9)


def test_tokens_beyond_the_last_block_are_refused():
    config = MASKS.config_type("blocks")(block=4, count=3)
    mask = make_mask(config)
    rows = random_rows(mask, "kernel", 12, [0], [12])
    _, state = run_in_pieces(mask, rows, [0, 12], 4)
    with pytest.raises(SurgeryError, match=r"13 tokens, .* 3 blocks of 4 tokens .* count=4 .* toeplitz_blocks"):
        mask.step(random_rows(mask, "kernel", 1, [12], [1]), state)


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("toeplitz_blocks", {"components": 17}, "1 to 16"),
        ("hierarchical", {"gates": "blocks"}, "gates, decay"),
        ("hierarchical", {"gates": "decy"}, "did you mean 'decay'"),
        ("hierarchical", {"levels": 1}, "2 or more"),
        ("hierarchical", {"levels": "weak"}, "a number or strong"),
        ("hierarchical", {"admissibility": "medium"}, "one of weak, strong"),
        ("hierarchical", {"form": "cubic"}, "one of softplus, linear, positive, bounded"),
        ("hierarchical", {"matrix": "dense"}, "one of scalar, diagonal, static, low_rank"),
        ("hierarchical", {"matrix": "low_rank", "rank": 0}, r"rank must be 1 or more \(got 0\)"),
        ("hierarchical", {"levels": "strong", "block": 4}, r"block must be 1 with strong admissibility \(got 4\)"),
        ("blocks", {"weights": "fixed"}, "frozen"),
        ("blocks", {"count": 0}, "count=32"),
        ("toeplitz", {"length": 0}, "1 or more"),
        ("input_toeplitz", {"length": 0}, "1 or more"),
        ("banded", {"width": 0}, r"width must be 1 or more tokens \(got 0\)"),
        ("banded", {"dilation": 0}, r"dilation must be 1 or more tokens \(got 0\)"),
        ("block_diagonal", {"block": 0}, "1 or more"),
        ("fourier", {"period": 0}, "1 or more"),
    ],
)
def test_options_without_meaning_are_refused(name, options, said):
    with pytest.raises(SurgeryError, match=said):
        from_options(MASKS.config_type(name), options)


def test_far_gates_are_not_lost_behind_a_strong_one():
    """Differences of one cumulative sum would be off by 1e-3 here."""
    mask = make_mask(MASKS.config_type("gates")())
    rows = random_rows(mask, "kernel", 64, [0], [64])
    rows.signals["gate"][:, 2] = -9000.0
    expected, single = dense_output(mask, rows), to_dtype(rows, torch.float32)
    assert relative_error(mask.float().chunked(single, None, 64)[0], expected, rows) < 1e-6


@pytest.mark.parametrize("scores", ["kernel", "delta"])
def test_strong_states_are_all_in_use(scores):
    """One bucket for each level from 1 to bit_length(n) after n tokens, and none of them is empty."""
    mask = make_mask(MASKS.config_type("hierarchical")(levels="strong"))
    for length in (1, 2, 3, 255, 256, 300):
        _, state = run_in_pieces(mask, random_rows(mask, scores, length, [0], [length]), [0, length], 64)
        assert state["buckets"].shape[1] == length.bit_length()
        assert (state["buckets"].flatten(2).norm(dim=-1) > 0).all()


@pytest.mark.parametrize("scores", ["kernel", "delta"])
def test_log_linear_states_grow_like_the_logarithm(scores):
    """One bucket for each bit of the longest row, at any position."""
    mask = make_mask(MASKS.config_type("hierarchical")())
    for length in (1, 2, 255, 256, 300):
        _, state = run_in_pieces(mask, random_rows(mask, scores, length, [0], [length]), [0, length], 64)
        assert state["buckets"].shape[1] == length.bit_length()
        full = state["buckets"].flatten(2).norm(dim=-1)[0] > 0
        assert full.tolist() == [bool(length >> bit & 1) for bit in range(length.bit_length())]
