"""References of recipes/papers/attention: dynamic blocks, cross-attention, Linformer and Nystroemformer, in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from recipes.papers.attention.cross import CausalDecay, LowRankMask, linear_attention, quadratic_attention
from recipes.papers.attention.dynamic_blocks import (
    DynamicBlocks,
    DynamicCache,
    dense_attention,
    mean_macs,
    separators_of,
)
from recipes.papers.attention.linformer import Linformer
from recipes.papers.attention.nystrom import nystrom_attention, pseudo_inverse
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, AttentionShape, MixerInputs
from surgery.mixers.masks.base import MASKS
from surgery.mixers.mlr import MLR

SCALING, LENGTH = 8**-0.5, 25
PARAGRAPH, LINE = 7, 8
NESTED = DynamicBlocks((3, 2, 2), ({PARAGRAPH}, {LINE}))


def heads(length: int = LENGTH, seed: int = 0):
    torch.manual_seed(seed)
    return [torch.randn(2, 3, length, n, dtype=torch.float64) for n in (8, 8, 5)]


def random_ids(length: int = LENGTH):
    torch.manual_seed(5)
    return torch.randint(0, 12, (2, length))


def softmax_attention(q, k, v, causal=True):
    scores = SCALING * q @ k.mT
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1) @ v


# -- dynamic blocks ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("extents", [(), (6, 2)])
def test_scores_count_separators_between_two_tokens(extents):
    """Token by token: a level counts unless a separator of it, or of a coarser level, stands in s .. t - 1."""
    config, (q, k, v), ids = replace(NESTED, extents=extents), heads(), random_ids()
    expected = torch.zeros_like(v)
    pairs = 0
    for b in range(2):
        for t in range(LENGTH):
            scores = torch.zeros(3, t + 1, dtype=torch.float64)
            for s in range(t + 1):
                between = set(ids[b, s:t].tolist())
                near = [not between & {PARAGRAPH}, not between & {PARAGRAPH, LINE}]
                near = [same and (not extents or t - s < extents[i]) for i, same in enumerate(near)]
                dims = [*range(3), *(range(3, 5) if near[0] else ()), *(range(5, 7) if near[1] else ())]
                pairs += 3 + 2 * sum(near)
                scores[:, s] = SCALING * (q[b, :, t, dims] * k[b, :, s, dims]).sum(-1)
            expected[b, :, t] = torch.einsum("hs,hsv->hv", scores.softmax(-1), v[b, :, : t + 1])
    torch.testing.assert_close(dense_attention(config, q, k, v, ids, SCALING), expected, rtol=1e-12, atol=1e-12)
    assert mean_macs(config, ids) == pytest.approx(pairs / ids.numel())


def test_separators_at_multiples_are_the_nested_form():
    q, k, v = heads(24)
    ids = torch.zeros(2, 24, dtype=torch.long)
    ids[:, 3::4], ids[:, 11::12] = LINE, PARAGRAPH
    shape = AttentionShape(dim=4, heads=3, groups=3, key=8, value=5, scaling=SCALING)
    mixer = MIXERS[MLR](MLR(ranks=(3, 2, 2), extents=(12, 4), form="nested"), shape).double()
    inputs = MixerInputs(q, k, v, torch.zeros(2, 24, 4, dtype=torch.float64))
    torch.testing.assert_close(dense_attention(NESTED, q, k, v, ids, SCALING), mixer.dense(inputs))


def test_no_separator_is_plain_attention_and_every_token_one_switches_the_level_off():
    q, k, v = heads()
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    full = DynamicBlocks((3, 2, 3), ({PARAGRAPH}, {LINE}))
    torch.testing.assert_close(dense_attention(full, q, k, v, ids, SCALING), softmax_attention(q, k, v))
    closed = dense_attention(DynamicBlocks((3, 5), ({0},)), q, k, v, ids, SCALING)
    eye = torch.eye(LENGTH, dtype=torch.float64)
    scores = SCALING * (q[..., :3] @ k[..., :3].mT + eye * (q[..., 3:] @ k[..., 3:].mT))
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    torch.testing.assert_close(closed, scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v)


@pytest.mark.parametrize("extents", [(), (6, 2), (30, 1)])
@pytest.mark.parametrize(
    "cuts",
    [[0, 25], list(range(26)), [0, 9, 10, 18, 25], [0, 1, 3, 6, 25]],
    ids=["prefill", "steps", "pieces", "short pieces"],
)
def test_pieces_are_the_whole_and_keys_end_at_separators(cuts, extents):
    config, (q, k, v), ids = replace(NESTED, extents=extents), heads(), random_ids()
    whole = dense_attention(config, q, k, v, ids, SCALING)
    for b in range(2):
        cache, outs = DynamicCache(), []
        for i, j in itertools.pairwise(cuts):
            part = (x[b, :, i:j] for x in (q, k, v))
            before = cache
            out, cache = before.extend(config, *part, ids[b, i:j], SCALING)
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs, 1), whole[b], rtol=1e-12, atol=1e-12)
        last = [max([t for t in range(LENGTH) if int(ids[b, t]) in ends], default=-1) for ends in ({7}, {7, 8})]
        live = [LENGTH, *(LENGTH - 1 - t for t in last)]
        live[1:] = [min(n, e - 1) for n, e in zip(live[1:], extents)] if extents else live[1:]
        assert [keys.shape[1] for keys in cache.keys] == live
        assert cache.elements() == 3 * (LENGTH * 5 + sum(n * r for n, r in zip(live, config.ranks)))


def test_separators_are_found_in_a_vocabulary():
    assert separators_of(["\n\n", "."], ["a", "b.", "\n", "\n\n", ".\n\n"]) == [1, 3, 4]
    with pytest.raises(SurgeryError, match=r"no token contains the separator ';'"):
        separators_of([";"], ["a"])
    with pytest.raises(SurgeryError, match="2 sets of separators need 3 ranks"):
        DynamicBlocks((4, 4), ({1}, {2}))


# -- cross-attention --------------------------------------------------------------------------------------
def cross_masks():
    torch.manual_seed(2)
    query_T, key_S = torch.tensor([0, 3, 3, 7, 20, 1]), torch.tensor([2, 2, 5, 9])
    yield LowRankMask(*(torch.randn(n, 2, dtype=torch.float64) for n in (6, 4)))
    yield from (CausalDecay(query_T, key_S, decay) for decay in (1.0, 0.7))


@pytest.mark.parametrize("mask", list(cross_masks()), ids=["low rank", "causal", "decay"])
def test_both_orders_are_the_contraction(mask):
    torch.manual_seed(1)
    q, k, v = (torch.randn(*size, dtype=torch.float64) for size in ((6, 3), (4, 3), (4, 5)))
    expected = torch.einsum("tn,sn,sp,ts->tp", q, k, v, mask.dense())
    for attention in (quadratic_attention, linear_attention):
        torch.testing.assert_close(attention(q, k, v, mask), expected, rtol=1e-12, atol=1e-12)


def test_equal_sequences_are_self_attention():
    """The decay mask of the mixers, and its recurrence."""
    shape = AttentionShape(dim=4, heads=1, groups=1, key=3, value=5, scaling=1.0)
    config = MASKS.config_type("decay")()
    mask = MASKS[config](config, shape).double()
    dense = mask.dense(torch.tensor([0]), 9, {})[0, 0, 0].detach()
    at = torch.arange(9)
    ours = CausalDecay(at, at, float(dense[1, 0]))
    torch.testing.assert_close(ours.dense(), dense, rtol=1e-9, atol=0)
    q, k, v = (torch.randn(9, n, dtype=torch.float64) for n in (3, 3, 5))
    torch.testing.assert_close(linear_attention(q, k, v, ours), (q @ k.mT * dense) @ v, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "change, said", [({"decay": 0.0}, "in (0, 1]"), ({"key_S": torch.tensor([3, 1])}, "positions of the keys fall")]
)
def test_masks_that_are_none_are_refused(change, said):
    options = {"query_T": torch.arange(2), "key_S": torch.arange(2), "decay": 0.5} | change
    with pytest.raises(SurgeryError) as refused:
        CausalDecay(**options)
    assert said in str(refused.value)


# -- Linformer and Nystroemformer ----------------------------------------------------------------------------
def test_linformer_with_all_keys_is_softmax():
    q, k, v = heads()
    mixer = Linformer(LENGTH, LENGTH).double()
    for projection in (mixer.key_projection, mixer.value_projection):
        projection.data.copy_(torch.eye(LENGTH))
    torch.testing.assert_close(mixer(q, k, v, SCALING), softmax_attention(q, k, v, causal=False))


def test_linformer_is_softmax_over_projected_tokens():
    q, k, v = heads()
    mixer = Linformer(LENGTH, 4).double()
    e, f = mixer.key_projection, mixer.value_projection
    weights = torch.einsum("bhtn,ks,bhsn->bhtk", q, e, k).mul(SCALING).softmax(-1)
    torch.testing.assert_close(mixer(q, k, v, SCALING), torch.einsum("bhtk,ks,bhsv->bhtv", weights, f, v))
    with pytest.raises(SurgeryError, match=r"must have 25 tokens \(got 9\)"):
        mixer(*heads(9), SCALING)
    with pytest.raises(SurgeryError, match="cannot be causal"):
        Linformer(LENGTH, 4, causal=True)
    with pytest.raises(SurgeryError, match=r"1 to 25, the length \(got 26\)"):
        Linformer(LENGTH, 26)
    start = Linformer(64, 64 * 16 // 16).key_projection
    assert start.var().item() == pytest.approx(1 / 64, rel=0.1)


def test_nystroem_with_all_landmarks_is_softmax():
    """Where A is invertible and the iteration has converged."""
    q, k, v = heads()
    k = q + 0.1 * k  # near tokens score highest, so that A is far from singular
    out = nystrom_attention(4 * q, k, v, LENGTH, SCALING, steps=40)
    torch.testing.assert_close(out, softmax_attention(4 * q, k, v, causal=False), rtol=1e-8, atol=1e-8)


def test_nystroem_has_the_rank_of_its_landmarks():
    q, k, _ = heads()
    eye = torch.eye(LENGTH, dtype=torch.float64).expand(2, 3, -1, -1)
    weights = nystrom_attention(q, k, eye, 4, SCALING)
    assert (torch.linalg.matrix_rank(weights, rtol=1e-10) <= 4).all()
    middle_q, middle_k = (
        torch.stack([x[..., i, :].mean(-2) for i in torch.arange(LENGTH).tensor_split(4)], -2) for x in (q, k)
    )
    a = (SCALING * middle_q @ middle_k.mT).softmax(-1)
    exact = (SCALING * q @ middle_k.mT).softmax(-1) @ torch.linalg.pinv(a) @ (SCALING * middle_q @ k.mT).softmax(-1)
    torch.testing.assert_close(nystrom_attention(q, k, eye, 4, SCALING, steps=60), exact, rtol=1e-6, atol=1e-6)
    with pytest.raises(SurgeryError, match="cannot be causal"):
        nystrom_attention(q, k, eye, 4, SCALING, causal=True)
    with pytest.raises(SurgeryError, match=r"1 to 25, the number of tokens \(got 26\)"):
        nystrom_attention(q, k, eye, 26, SCALING)


def test_the_iteration_approaches_the_inverse():
    torch.manual_seed(0)
    a = (torch.randn(5, 6, 6, dtype=torch.float64) + 4 * torch.eye(6)).softmax(-1)
    misses = [float((pseudo_inverse(a, steps) @ a - torch.eye(6)).norm()) for steps in (0, 2, 4, 12)]
    assert misses[0] > misses[1] > misses[2] > misses[3] and misses[3] < 1e-10
