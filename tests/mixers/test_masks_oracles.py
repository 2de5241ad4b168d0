"""Masks against the equations of their papers, evaluated token by token in float64."""

from __future__ import annotations

import cmath
import functools
import math
from dataclasses import replace

import pytest
import torch
from helpers.mask_rows import SHAPE, dense_output, make_mask, random_rows, relative_error, run_in_pieces

from surgery.mixers.masks.base import MASKS
from surgery.mixers.masks.delta_rule import dense_scores
from surgery.mixers.masks.strong_levels import bucket_starts, strong_level

LENGTH = 41
EITHER = pytest.mark.parametrize("scores", ["kernel", "delta"])


def mask_of(name: str, **options):
    return make_mask(MASKS.config_type(name)(**options))


def both_forms(mask, rows, expected):
    """The mask's chunks and steps give what the equations do."""
    for chunk in (8, 64):
        assert relative_error(mask.chunked(rows, None, chunk)[0], expected, rows) < 1e-13
    assert (
        relative_error(run_in_pieces(mask, rows, list(range(rows.v_BGTV.shape[2] + 1)), 0)[0], expected, rows) < 1e-13
    )
    assert relative_error(dense_output(mask, rows), expected, rows) < 1e-13


def heads(rows):
    """(b, g, j) of every query head, with its q, k, v and beta by tokens."""
    for b, g, j in torch.cartesian_prod(*(torch.arange(n) for n in rows.q_BGJTF.shape[:3])).tolist():
        beta = None if rows.beta_BGT is None else rows.beta_BGT[b, g]
        yield (b, g, j), rows.q_BGJTF[b, g, j], rows.k_BGTF[b, g], rows.v_BGTV[b, g], beta


def next_state(state_FV, k_F, v_V, beta, alpha):
    """One token of gated delta (Yang et al. 2025, eq. 10) or, without beta, of SSD: the state after it."""
    if beta is None:
        return alpha * state_FV + torch.outer(k_F, v_V)
    eye = torch.eye(len(k_F), dtype=k_F.dtype)
    return alpha * (eye - beta * torch.outer(k_F, k_F)) @ state_FV + beta * torch.outer(k_F, v_V)


@torch.no_grad()
@EITHER
def test_gates_are_the_recurrences_of_ssd_and_gated_delta(scores):
    mask = mask_of("gates")
    rows = random_rows(mask, scores, LENGTH, [0, 0], [LENGTH, 30])
    expected = torch.zeros(*rows.q_BGJTF.shape[:4], 3, dtype=torch.float64)
    for at, q, k, v, beta in heads(rows):
        alpha = rows.signals["gate"][at[0], :, at[1]].exp()
        state = torch.zeros(5, 3, dtype=torch.float64)
        for t in range(LENGTH):
            state = next_state(state, k[t], v[t], None if beta is None else beta[t], alpha[t])
            expected[(*at, t)] = q[t] @ state
    both_forms(mask, rows, expected)


@torch.no_grad()
def test_gates_are_ssd_s_quadratic_form():
    """Dao and Gu 2024, eq. 6: L_ts = a_t .. a_s+1, Y = (L . C B^T) X; products taken one by one."""
    mask = mask_of("gates")
    rows = random_rows(mask, "kernel", 17, [0], [17])
    alpha = rows.signals["gate"].exp()[0]
    mask_BGJTT = mask.dense(rows.start_B, 17, rows.signals)
    for g in range(SHAPE.groups):
        for t in range(17):
            for s in range(17):
                product = math.prod(float(a) for a in alpha[s + 1 : t + 1, g]) if s <= t else 0.0
                assert abs(float(mask_BGJTT[0, g, 0, t, s]) - product) < 1e-14


@torch.no_grad()
def test_decay_is_retention():
    """Sun et al. 2023, eq. 5: D_nm = gamma^(n - m); heads start at gamma = 1 - 2^(-5 - head)."""
    mask = MASKS[MASKS.config_type("decay")](MASKS.config_type("decay")(), SHAPE)
    at = torch.arange(9)
    for g, gamma in enumerate([1 - 2**-5, 1 - 2**-6]):
        expected = (gamma ** (at[:, None] - at)).tril()
        torch.testing.assert_close(mask.dense(torch.tensor([0]), 9, {})[0, g, 0], expected)


@torch.no_grad()
def test_delta_scores_are_products_of_reflections():
    """A_ts = q_t (I - b_t k_t k_t^T) .. (I - b_s+1 k_s+1 k_s+1^T) b_s k_s."""
    rows = random_rows(mask_of("ones"), "delta", 12, [0], [12])
    scores = dense_scores(rows.q_BGJTF, rows.k_BGTF, rows.beta_BGT)
    for at, q, k, _, beta in heads(rows):
        for t in range(12):
            for s in range(12):
                key = beta[s] * k[s] if s <= t else torch.zeros(5, dtype=torch.float64)
                for r in range(s + 1, t + 1):
                    key = key - beta[r] * k[r] * (k[r] @ key)
                assert abs(float(scores[(*at, t, s)] - q[t] @ key)) < 1e-13


def lssb(t: int) -> int:
    """The place of the least significant bit that is set."""
    return (t & -t).bit_length() - 1


def buckets(t: int) -> dict[int, range]:
    """Guo et al. 2025, section 3.1: t itself, then what each step t -> t - 2^lssb(t) leaves behind."""
    found = {0: range(t, t + 1)}
    while t:
        place = lssb(t)
        found[place + 1] = range(t - (1 << place), t)
        t -= 1 << place
    return found


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"levels": 3}, {"gates": "decay"}, {"gates": "ones"}])
def test_hierarchical_entries_are_lambdas_of_fenwick_buckets(options):
    mask = mask_of("hierarchical", **options)
    start, length = 21, 50
    rows = random_rows(mask, "kernel", length, [start], [length])
    gates = mask.gates.dense(rows.start_B, length, rows.signals).expand(1, 2, 1, -1, -1)
    given = mask.dense(rows.start_B, length, rows.signals)
    expected = torch.zeros_like(given)
    for t in range(length):
        for level, bucket in buckets(start + t).items():
            for s in (s - start for s in bucket if s >= start):
                weight_GJ = rows.signals["level"][0, t, :, :, min(level, mask.config.levels - 1)]
                expected[0, :, :, t, s] = weight_GJ * gates[0, :, 0, t, s].unsqueeze(1)
    torch.testing.assert_close(given, expected, rtol=1e-13, atol=0)


@torch.no_grad()
@EITHER
def test_hierarchical_is_log_linear_attention_s_recurrence(scores):
    """Section 3.2 and the appendix's `hattention`: at token t the states up to lssb(t) merge into level lssb(t) + 1,
    all pass the token, and the token is level 0; o_t = sum_l lambda_t^(l) q_t S_t^(l)."""
    mask = mask_of("hierarchical", levels=5)
    rows = random_rows(mask, scores, LENGTH, [0, 0], [LENGTH, 30])
    expected = torch.zeros(*rows.q_BGJTF.shape[:4], 3, dtype=torch.float64)
    for at, q, k, v, beta in heads(rows):
        b, g, j = at
        states: dict[int, torch.Tensor] = {}
        nothing = torch.zeros(5, dtype=torch.float64)
        for t in range(LENGTH):
            if t:
                low = [states.pop(level) for level in range(lssb(t) + 1) if level in states]
                states[lssb(t) + 1] = sum(low)
            alpha, strength = rows.signals["gate"][b, t, g].exp(), None if beta is None else beta[t]
            states = {
                n: next_state(s, nothing if beta is None else k[t], 0 * v[t], strength, alpha)
                for n, s in states.items()
            }
            states[0] = (1 if beta is None else beta[t]) * torch.outer(k[t], v[t])
            lambdas = rows.signals["level"][b, t, g, j]
            expected[(*at, t)] = sum(lambdas[min(level, 4)] * (q[t] @ state) for level, state in states.items())
    both_forms(mask, rows, expected)


@functools.cache
def level_by_recursion(t: int, s: int) -> int:
    """Strong admissibility of the paper's appendix B.4 as a recursion over the lower triangle: its first half is cut in
    blocks of half the size, which are admissible unless they touch the diagonal."""
    if s == t:
        return 0
    top = t.bit_length() - 1
    half, rest = 2 ** max(top - 1, 0), t - 2**top
    if s < half or (s < 2 * half and rest >= half):
        return top + 1
    return level_by_recursion(t - half, s - half) if s < 2 * half else level_by_recursion(t - 2 * half, s - 2 * half)


def test_strong_levels_are_the_recursion_s():
    at_T = torch.arange(300)
    level_TT = strong_level(at_T[:, None], at_T)
    for t in range(300):
        expected = [level_by_recursion(t, s) for s in range(t + 1)]
        assert level_TT[t, : t + 1].tolist() == expected
        assert (
            sorted(set(expected), reverse=True) == list(range(t.bit_length(), -1, -1)) == list(dict.fromkeys(expected))
        )
        sizes = [expected.count(level) for level in range(2, t.bit_length() + 1)]
        assert all(size in (2 ** (i), 2 ** (i + 1)) for i, size in enumerate(sizes))
        starts = bucket_starts(torch.tensor([t]), t.bit_length())[0].tolist()
        assert starts == [expected.index(level) for level in range(1, t.bit_length() + 1)]


@pytest.mark.parametrize("chunk", [4, 8, 16])
def test_strong_levels_of_distant_chunks_are_those_of_the_chunks(chunk):
    at_T = torch.arange(256)
    level_TT, number_T = strong_level(at_T[:, None], at_T), at_T // chunk
    far_TT = number_T[:, None] >= number_T + 2
    of_chunks_TT = strong_level(number_T[:, None], number_T) + chunk.bit_length() - 1
    assert torch.equal(level_TT[far_TT], of_chunks_TT[far_TT])


@torch.no_grad()
@EITHER
def test_strong_log_linear_is_a_recurrence_over_buckets(scores):
    """At token t the states of t - 1 pass into the level of their tokens, all pass the gate and the transition, and the
    token is level 0; o_t = sum_l lambda_t^(l) q_t S_t^(l)."""
    mask = mask_of("hierarchical", levels=5, admissibility="strong")
    rows = random_rows(mask, scores, LENGTH, [0, 0], [LENGTH, 30])
    expected = torch.zeros(*rows.q_BGJTF.shape[:4], 3, dtype=torch.float64)
    for at, q, k, v, beta in heads(rows):
        b, g, j = at
        states: dict[int, tuple[int, torch.Tensor]] = {}  # of each level: its first token, and its sum
        nothing = torch.zeros(5, dtype=torch.float64)
        for t in range(LENGTH):
            moved: dict[int, tuple[int, torch.Tensor]] = {}
            for first, state in sorted(states.values(), key=lambda pair: pair[0]):
                level = level_by_recursion(t, first)
                moved[level] = (moved[level][0], moved[level][1] + state) if level in moved else (first, state)
            alpha, strength = rows.signals["gate"][b, t, g].exp(), None if beta is None else beta[t]
            key = nothing if beta is None else k[t]
            states = {n: (first, next_state(s, key, 0 * v[t], strength, alpha)) for n, (first, s) in moved.items()}
            states[0] = (t, (1 if beta is None else beta[t]) * torch.outer(k[t], v[t]))
            assert len(states) == t.bit_length() + 1
            lambdas = rows.signals["level"][b, t, g, j]
            expected[(*at, t)] = sum(lambdas[min(level, 4)] * (q[t] @ s) for level, (_, s) in states.items())
    both_forms(mask, rows, expected)


@torch.no_grad()
def test_strong_levels_with_equal_lambdas_are_the_gates():
    mask = mask_of("hierarchical", levels="strong")
    rows = random_rows(mask, "delta", LENGTH, [7], [LENGTH])
    rows.signals["level"] = torch.ones_like(rows.signals["level"])
    torch.testing.assert_close(
        mask.dense(rows.start_B, LENGTH, rows.signals)[:, :, :1], mask.gates.dense(rows.start_B, LENGTH, rows.signals)
    )


@torch.no_grad()
@pytest.mark.parametrize("normalise", ["softmax", "sum"])
def test_blocks_are_explicit_sums_of_blocks(normalise):
    """MHLA: query t of block i reads sum_j<=i W_ij S_j, S_j = sum of k v^T in block j, up to t in its own."""
    mask = mask_of("blocks", block=7, count=6, normalise=normalise)
    rows = random_rows(mask, "kernel", LENGTH, [0, 0], [LENGTH, 30])
    w = mask.weight_GJMM
    w = w.exp() if normalise == "softmax" else torch.log1p(w.exp())
    expected = torch.zeros(*rows.q_BGJTF.shape[:4], 3, dtype=torch.float64)
    for at, q, k, v, _ in heads(rows):
        for t in range(LENGTH):
            i, total = t // 7, 0.0
            for j in range(i + 1):
                tokens = slice(7 * j, min(7 * j + 7, t + 1))
                total += w[at[1], at[2], i, j] / w[at[1], at[2], i, : i + 1].sum() * (k[tokens].T @ v[tokens])
            expected[(*at, t)] = q[t] @ total
    both_forms(mask, rows, expected)


@torch.no_grad()
def test_blocks_both_ways_mix_all_sums():
    config = MASKS.config_type("blocks")(block=7, count=6)
    mask = make_mask(config, replace(SHAPE, causal=False))
    rows = random_rows(mask, "kernel", LENGTH, [0], [LENGTH])
    out, _ = mask.chunked(rows, None, 16)
    for at, q, k, v, _ in heads(rows):
        w = mask.weight_GJMM[at[1], at[2]].softmax(-1)
        sums = [k[7 * j : 7 * j + 7].T @ v[7 * j : 7 * j + 7] for j in range(6)]
        for t in range(LENGTH):
            mixed = sum(w[t // 7, j] * sums[j] for j in range(6))
            torch.testing.assert_close(out[(*at, t)], q[t] @ mixed, rtol=1e-12, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("components", [1, 3, 16])
def test_toeplitz_blocks_are_sums_of_exponentials(components):
    """TBM: K(delta) = sum_r a_r exp(-lambda_r delta); eq. 4's quotient by a column of ones, any number of blocks."""
    mask = mask_of("toeplitz_blocks", block=7, components=components)
    softplus = torch.nn.functional.softplus
    a_RGJ, rate_RG = softplus(mask.amplitude_RGJ), softplus(mask.rate_RG)
    rows = random_rows(mask, "kernel", LENGTH, [0, 0], [LENGTH, 30])
    rows.q_BGJTF, rows.k_BGTF = rows.q_BGJTF.abs(), rows.k_BGTF.abs()
    ones = torch.nn.functional.pad(rows.v_BGTV, (0, 1), value=1.0)
    out = mask.chunked(replace(rows, v_BGTV=ones), None, 16)[0]
    quotient = out[..., :-1] / out[..., -1:]
    expected = torch.zeros_like(quotient)
    for at, q, k, v, _ in heads(rows):
        for t in range(int(rows.count_B[at[0]])):
            distance = t // 7 - torch.arange(t + 1) // 7
            kernel = (a_RGJ[:, at[1], at[2], None] * torch.exp(-rate_RG[:, at[1], None] * distance)).sum(0)
            weights = kernel * (k[: t + 1] @ q[t])
            expected[(*at, t)] = weights @ v[: t + 1] / weights.sum()
    assert relative_error(quotient, expected, rows) < 1e-13


@torch.no_grad()
def test_fourier_entries_are_powers_of_omega():
    mask = mask_of("fourier", period=37)
    given = mask.dense(torch.tensor([1000]), 20, {})[0, 0, 0]
    omega = cmath.exp(2j * math.pi / 37)
    for t in range(20):
        for s in range(20):
            expected = (omega ** ((1000 + t) * (1000 + s) % 37)).real if s <= t else 0.0
            assert abs(float(given[t, s]) - expected) < 1e-12


@torch.no_grad()
def test_toeplitz_entries_are_coefficients_of_distance():
    mask = mask_of("toeplitz", length=6)
    given = mask.dense(torch.tensor([3]), 20, {})[0]
    for t in range(20):
        for s in range(20):
            expected = mask.coefficient_GJL[:, :, t - s] if 0 <= t - s < 6 else torch.zeros(2, 2)
            assert torch.equal(given[:, :, t, s], expected.to(given.dtype))


@torch.no_grad()
def test_input_toeplitz_entries_are_coefficients_of_early_tokens():
    """Dao and Gu 2024, section 4.3: a Toeplitz matrix of each sequence, alpha[d] = c[d] (w x_d + b), up to `length`."""
    mask, x_BTD = mask_of("input_toeplitz", length=6), torch.randn(2, 20, SHAPE.dim).double()
    given = mask.dense(torch.zeros(2, dtype=torch.int64), 20, mask.signals(x_BTD))
    alpha_BTGJ = (x_BTD @ mask.factor.weight.T + mask.factor.bias).unflatten(2, (2, 2))
    for t in range(20):
        for s in range(20):
            d = t - s
            expected = mask.coefficient_GJL[:, :, d] * alpha_BTGJ[:, d] if 0 <= d < 6 else torch.zeros(2, 2, 2)
            torch.testing.assert_close(given[..., t, s], expected.double(), rtol=1e-13, atol=1e-13)


@torch.no_grad()
def test_a_new_input_toeplitz_mask_is_the_toeplitz_mask():
    fresh = [MASKS.config_type(name)(length=9) for name in ("input_toeplitz", "toeplitz")]
    one, other = (MASKS[config](config, SHAPE).double() for config in fresh)
    rows = random_rows(one, "kernel", 30, [0, 0], [30, 21])
    torch.testing.assert_close(one.chunked(rows, None, 8)[0], other.chunked(rows, None, 8)[0], rtol=1e-12, atol=1e-12)


SPARSE = [("banded", {"width": w, "dilation": r}) for w, r in ((1, 1), (1, 4), (5, 1), (5, 3), (99, 2), (1, 99))]


@torch.no_grad()
@pytest.mark.parametrize("name, options", [*SPARSE, ("block_diagonal", {"block": 1}), ("block_diagonal", {"block": 6})])
def test_sparse_masks_token_by_token(name, options):
    """Dao and Gu 2024, section 4.1.4, eq. 10: sums over the tokens of a band, of every r-th token of it, or of a block."""
    mask = mask_of(name, **options)
    rows = random_rows(mask, "kernel", 40, [0, 0], [40, 31])
    expected = torch.zeros(2, 2, 2, 40, 3, dtype=torch.float64)
    for t in range(40):
        if name == "banded":
            seen = range(t, max(-1, t - options["width"] * options["dilation"]), -options["dilation"])
        else:
            seen = range(t // options["block"] * options["block"], t + 1)
        for s in seen:
            score_BGJ = torch.einsum("bgjf,bgf->bgj", rows.q_BGJTF[:, :, :, t], rows.k_BGTF[:, :, s])
            expected[:, :, :, t] += score_BGJ[..., None] * rows.v_BGTV[:, :, None, s]
    both_forms(mask, rows, expected)


@torch.no_grad()
def test_a_start_is_what_was_asked_for():
    mask = mask_of("toeplitz_blocks", components=2)
    a_RGJ, rate_RG = torch.rand(2, 2, 2).double() + 0.1, torch.tensor([[0.5, 0.1], [0.02, 0.0]]).double()
    mask.initialize(a_RGJ, rate_RG)
    distance = torch.arange(5.0).double()
    expected = torch.einsum("rgj,drg->dgj", a_RGJ, torch.exp(-distance[:, None, None] * rate_RG))
    torch.testing.assert_close(mask.kernel(distance), expected, rtol=1e-9, atol=1e-9)
