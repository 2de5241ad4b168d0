"""A packed row gives the outputs and gradients of its documents alone, for every mixer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers.small_mixers import DecayedConfig, ExactConfig, random_model_with_mixers, register_test_mixers

from surgery.architectures.attention import attention_paths
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, mixer_config
from surgery.mixers.common.packed_documents import (
    DocumentMemo,
    PackedDocuments,
    document_borders,
    shows_later_tokens,
)
from surgery.modeling.attention import install

LENGTHS = [(9, 1, 14, 8), (20, 12), (32,)]  # of the documents of each row; with 32 tokens a row
LINEAR = {"mixer": "linear", "chunk": 8}
CONFIGS = {
    "linear": LINEAR | {"mask": {"name": "ones"}, "features": {"name": "hedgehog"}, "normalise": True},
    "retnet": LINEAR | {"mask": {"name": "decay"}},
    "ssd": LINEAR | {"mask": {"name": "gates"}, "convolution": 4, "output_gate": "head", "norm": "rms"},
    "delta": LINEAR | {"mask": {"name": "gates"}, "scores": "delta", "convolution": 3},
    "log-linear": LINEAR | {"mask": {"name": "hierarchical", "levels": 7}},
    "log-linear delta": LINEAR | {"mask": {"name": "hierarchical", "levels": 7}, "scores": "delta"},
    "tbm": LINEAR | {"mask": {"name": "toeplitz_blocks", "block": 4, "components": 2}},
    "mhla": LINEAR | {"mask": {"name": "blocks", "block": 4, "count": 10}},
    "toeplitz": LINEAR | {"mask": {"name": "toeplitz", "length": 40}},
    "input toeplitz": LINEAR | {"mask": {"name": "input_toeplitz", "length": 10}},
    "banded": LINEAR | {"mask": {"name": "banded", "width": 4, "dilation": 3}},
    "block diagonal": LINEAR | {"mask": {"name": "block_diagonal", "block": 6}},
    "fourier": LINEAR | {"mask": {"name": "fourier", "period": 80}},
    "with a window": LINEAR | {"mask": {"name": "gates"}, "window": 5, "sinks": 2, "features": {"name": "hedgehog"}},
    "behind chunks": LINEAR
    | {"mask": {"name": "gates"}, "scores": "delta", "window": 3, "sinks": 1, "near_tokens": "chunks"},
    "log-linear behind chunks": LINEAR
    | {"mask": {"name": "hierarchical", "block": 2}, "window": 4, "near_tokens": "chunks"},
    "with a window after RoPE": LINEAR | {"mask": {"name": "gates"}, "scores": "delta", "window": 5, "rope": "window"},
    "both forms, per head": LINEAR
    | {
        "mask": {"name": "hierarchical", "block": 4},
        "scores": "delta",
        "window": 5,
        "rope": "both",
        "states": "per_head",
    },
    "softmax": {"mixer": "softmax", "scale": "length", "trained_length": 4},
    "heads": {
        "mixer": "head_hybrid",
        "softmax_heads": [1],
        "others": LINEAR | {"mask": {"name": "gates"}, "window": 5, "rope": "window"},
    },
    "mlr": {"mixer": "mlr", "ranks": [4, 4], "extents": [6]},
    "mlr, nested": {"mixer": "mlr", "ranks": [4, 2, 2], "extents": [8, 4], "form": "nested"},
    "mlr, plain": {"mixer": "mlr", "ranks": [8]},
    "window": {"mixer": "window", "window": 6, "sinks": 2},
    "global window": {"mixer": "global_window", "ranks": [4, 4], "window": 6},
    "bilinear btt": {"mixer": "bilinear_btt"},
    "bilinear mlbtc": {"mixer": "bilinear_mlbtc"},
    "bilinear mlr": {"mixer": "bilinear_mlr", "ranks": [8, 4, 2]},
    "bilinear btt qk": {"mixer": "bilinear_btt", "base": "own", "norm": "qk"},
    "exact": {"mixer": "test-exact"},
    "recurrence": {"mixer": "test-decayed"},
}


@pytest.fixture(scope="module", autouse=True)
def register_mixers():
    with register_test_mixers():
        yield


def model_of(config, family="llama", layers=None, **changes):
    return random_model_with_mixers(family, mixer_config(dict(config)), layers, **changes).double()


def packed_ids(lengths=LENGTHS, seed=3):
    """(ids_BT, position_BT)"""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(3, 96, (len(lengths), sum(lengths[0])), generator=generator)
    return ids_BT, torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def one_by_one(model, ids_BT, lengths, restart=True):
    """The logits of every document in a call of its own, side by side again; at positions from 0, or at those of the
    row.
    """
    rows, places_T = [], torch.arange(ids_BT.shape[1])
    for ids_T, row in zip(ids_BT, lengths):
        parts = zip(ids_T.split(list(row)), places_T.split(list(row)))
        calls = [(ids[None], None if restart else places[None]) for ids, places in parts]
        rows.append(torch.cat([model(ids, position_ids=places, use_cache=False).logits[0] for ids, places in calls]))
    return torch.stack(rows)


def far(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()


def test_every_mixer_is_among_them():
    # native: see test_native.py. none: no token sees another.
    assert {config["mixer"] for config in CONFIGS.values()} == set(MIXERS.names()) - {"native", "none"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_row_is_each_document_alone(name):
    model, (ids, positions) = model_of(CONFIGS[name]), packed_ids()
    got, wanted = model(ids, position_ids=positions, use_cache=False).logits, one_by_one(model, ids, LENGTHS)
    assert far(got, wanted) < 1e-9
    leaking = model(ids, use_cache=False).logits
    assert far(leaking, wanted) > 1e-3  # so that the test sees what it looks for


@pytest.mark.parametrize("name", ["ssd", "log-linear delta", "mlr, nested", "bilinear btt", "with a window"])
def test_gradients_are_those_of_each_document(name):
    model, (ids, positions) = model_of(CONFIGS[name]), packed_ids()
    weights = torch.randn(*ids.shape, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grads = []
    for logits in (model(ids, position_ids=positions, use_cache=False).logits, one_by_one(model, ids, LENGTHS)):
        model.zero_grad()
        (logits * weights).sum().backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and any(".mixer." in n for n in grads[0])
    for n in grads[0]:
        assert far(grads[0][n], grads[1][n]) < 1e-7 or grads[1][n].norm() < 1e-9, n


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "qwen3", "gemma2", "gemma3", "phi3", "mistral", "olmo2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_families(family, attention):
    """Softmax in the first layer, where transformers keeps documents apart, a mixer in the second."""
    model, (ids, positions) = model_of(CONFIGS["ssd"], family, [1]), packed_ids()
    if attention == "sdpa" and family == "gemma2":
        pytest.skip("its scores have a cap, which transformers computes in eager attention")
    model.set_attn_implementation(attention)
    got = model(ids, position_ids=positions, use_cache=False).logits
    assert far(got, one_by_one(model, ids, LENGTHS)) < (1e-9 if attention == "sdpa" else 1e-5)  # a float32 softmax


def test_borders_in_a_mask_of_flex_attention():
    """Which says for any two tokens whether one sees the other."""
    (_, positions), x_BTD = packed_ids(), torch.zeros(3, 32, 2)
    number = (positions == 0).cumsum(1)
    apart = SimpleNamespace(mask_mod=lambda b, h, q, k: (q >= k) & (number[b, q] == number[b, k]))
    plain = SimpleNamespace(mask_mod=lambda b, h, q, k: (q >= k) & (b >= 0))
    wanted = (positions == 0) & (torch.arange(32) > 0)
    assert torch.equal(document_borders(positions, apart, None, x_BTD), wanted)
    assert not document_borders(positions, plain, None, x_BTD).any()


@pytest.mark.parametrize("name", ["ssd", "log-linear", "mlr, nested"])
def test_checkpointed_training(name):
    model, (ids, positions) = model_of(CONFIGS[name]), packed_ids()
    grads = []
    for again in (False, True):
        model.train().zero_grad()
        if again:
            model.gradient_checkpointing_enable()
        model(ids, position_ids=positions, use_cache=False).logits.square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1]) and all(torch.equal(a, b) for a, b in zip(*grads))


def test_bfloat16_is_as_near_as_alone():
    model, (ids, positions) = model_of(CONFIGS["delta"]), packed_ids()
    exact = one_by_one(model, ids, LENGTHS)
    model.bfloat16()
    alone = far(one_by_one(model, ids, LENGTHS).double(), exact)
    together = far(model(ids, position_ids=positions, use_cache=False).logits.double(), exact)
    assert together < 1.5 * alone


def test_very_unequal_documents_are_laid_out_in_groups():
    """Never more than twice the tokens, and a few calls."""
    lengths = [(100, *[1] * 60, *[2] * 20), (3, 150, 40, 7)]
    model, (ids, positions) = model_of(CONFIGS["delta"], max_position_embeddings=256), packed_ids(lengths)
    documents = PackedDocuments.from_borders(torch.nn.functional.pad(positions[:, 1:] == 0, (1, 0)))
    assert sum(group.index_DU.numel() for group in documents.groups) <= 2 * ids.numel()
    assert 1 < len(documents.groups) <= 8
    got = model(ids, position_ids=positions, use_cache=False).logits
    assert far(got, one_by_one(model, ids, lengths)) < 1e-9


# -- where positions begin anew and nothing is packed ------------------------------------------------
def test_padded_batches_stay_as_they_are():
    """Their positions begin anew where padding ends; the mask says that this is no border."""
    model, ids = model_of(CONFIGS["ssd"]), packed_ids()[0]
    mask = torch.ones_like(ids)
    mask[0, :7], mask[1, 25:] = 0, 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad():
        got = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        assert far(got[0, 7:], model(ids[:1, 7:], use_cache=False).logits[0]) < 1e-9
        assert far(got[1, :25], model(ids[1:2, :25], use_cache=False).logits[0]) < 1e-9


@pytest.mark.parametrize("name", ["ssd", "mlr"])
def test_positions_that_jump_under_a_mask_that_does_not(name):
    """Skipped positions (PoSE) with a mask of ones: one document, as transformers has it."""
    model, (ids, _) = model_of(CONFIGS[name]), packed_ids()
    positions = torch.cat([torch.arange(16), torch.arange(30, 46)])[None]
    mask = torch.ones(3, 1, 32, 32).tril().bool()
    with torch.no_grad():
        got = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        changed = ids.clone()
        changed[:, 3] = (changed[:, 3] + 1) % 96
        moved = model(changed, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert far(got[:, 16:], moved[:, 16:]) > 1e-6


@pytest.mark.parametrize("name", ["delta", "mlr"])
def test_masks_that_say_more_than_documents(name):
    """Documents, and inside one a token that is hidden: read by mixers that read masks, refused by the others."""
    model, (ids, positions) = model_of(CONFIGS[name], num_hidden_layers=1), packed_ids(LENGTHS[1:2])
    mask = torch.ones(32, 32).tril().bool()
    mask[20:, :20], mask[23:, 22] = False, False
    ask = lambda ids: model(ids, attention_mask=mask[None, None], position_ids=positions, use_cache=False).logits  # noqa: E731
    if name == "delta":
        with pytest.raises(SurgeryError, match="not causal over the real tokens"):
            ask(ids)
        return
    changed = ids.clone()
    changed[:, 22] = (changed[:, 22] + 1) % 96
    moved = (ask(ids) - ask(changed)).abs().amax((0, 2)) > 1e-9
    assert moved.nonzero().flatten().tolist() == [22]


COUNTING = ("window", "mlr, nested", "softmax")  # read masks, and count tokens from the first of a document
NOT_COUNTING = ("mlr", "mlr, plain", "global window", "bilinear btt")


def block_diagonal(lengths, padding=0) -> torch.Tensor:
    """The mask (B, 1, T, T) of documents, with padding tokens before the first row's."""
    number = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    mask = (number.unsqueeze(1) == number.unsqueeze(2)).tril()
    mask[0, :, :padding], mask[0, :padding] = False, False
    return mask[:, None]


@torch.no_grad()
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("name", COUNTING + NOT_COUNTING)
def test_documents_of_a_mask_without_positions_are_each_alone(name, additive):
    """Sinks, blocks and counts of tokens begin with the document, although position_ids do not begin anew."""
    model, (ids, _) = model_of(CONFIGS[name], num_hidden_layers=1), packed_ids()
    mask = block_diagonal(LENGTHS)
    mask = torch.zeros(mask.shape).double().masked_fill(~mask, torch.finfo(torch.float64).min) if additive else mask
    got = model(ids, attention_mask=mask, use_cache=False).logits
    assert far(got, one_by_one(model, ids, LENGTHS, restart=False)) < 1e-9
    with pytest.raises(SurgeryError, match=r"not causal over the real tokens .* with a cache"):
        model(ids, attention_mask=mask)


@torch.no_grad()
@pytest.mark.parametrize("name", ["window", "mlr, nested"])
def test_documents_of_a_mask_behind_padding_are_each_alone(name):
    model, (ids, _) = model_of(CONFIGS[name], num_hidden_layers=1), packed_ids(LENGTHS[:2])
    got = model(ids, attention_mask=block_diagonal(LENGTHS[:2], padding=4), use_cache=False).logits
    wanted = one_by_one(model, ids, [(4, 5, *LENGTHS[0][1:]), LENGTHS[1]], restart=False)
    assert far(got[0, 4:], wanted[0, 4:]) < 1e-9 and far(got[1], wanted[1]) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize("name", COUNTING)
def test_masks_under_which_tokens_cannot_be_counted_are_refused(name):
    model, (ids, positions) = model_of(CONFIGS[name], num_hidden_layers=1), packed_ids(LENGTHS[1:2])
    hidden, crossing = block_diagonal(LENGTHS[1:2]), block_diagonal(LENGTHS[1:2])
    hidden[..., 23:, 22], crossing[..., 31, 3] = False, True
    for mask in (hidden, crossing):
        for places in (None, positions):
            with pytest.raises(SurgeryError, match="not causal over the real tokens"):
                model(ids, attention_mask=mask, position_ids=places, use_cache=False)


def test_what_is_remembered_is_of_this_call():
    """Positions changed in place, and other positions under the same mask."""
    mask, x = torch.ones(1, 1, 6, 6).tril().bool(), torch.zeros(1, 6, 2)
    mask[..., 3:, :3] = False
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    known = DocumentMemo(PackedDocuments.from_borders(document_borders(positions, mask, None, x))).remember(
        mask, positions
    )
    assert known.documents is not None and DocumentMemo.recall(mask, positions) is known
    assert DocumentMemo.recall(mask, positions.clone()) is None and DocumentMemo.recall(None, positions) is None
    positions += 1
    assert DocumentMemo.recall(mask, positions) is None
    alone = torch.arange(6)[None]
    DocumentMemo(None).remember(None, alone)
    assert DocumentMemo.recall(None, alone).documents is None
    alone += 1
    assert DocumentMemo.recall(None, alone) is None
    with torch.inference_mode():
        untracked = torch.arange(6)[None]
        DocumentMemo(None).remember(None, untracked)
        assert DocumentMemo.recall(None, untracked) is None


def test_inference_mode_and_calls_one_after_the_other():
    model, (ids, positions) = model_of(CONFIGS["retnet"]), packed_ids()
    wanted = one_by_one(model, ids, LENGTHS)
    with torch.inference_mode():
        for _ in range(2):
            assert far(model(ids, position_ids=positions, use_cache=False).logits, wanted) < 1e-9
        whole = model(ids, use_cache=False).logits
        assert far(model(ids, position_ids=torch.arange(32)[None], use_cache=False).logits, whole) < 1e-12


@pytest.mark.slow
def test_compiled_models_say_what_they_cannot():
    model, (ids, positions) = model_of(CONFIGS["retnet"]), packed_ids()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        whole = torch.arange(32).expand(3, 32)
        assert far(compiled(ids, position_ids=whole, use_cache=False).logits, model(ids, use_cache=False).logits) < 1e-9
        with pytest.raises(RuntimeError, match="one document a row"):
            compiled(ids, position_ids=positions, use_cache=False)


def test_a_mask_that_is_kept_from_call_to_call():
    """What is known of it without a cache is nothing for a call with one, which has no packed rows, and the other
    way.
    """
    model, (ids, positions) = model_of(CONFIGS["ssd"]), packed_ids(LENGTHS[1:2])
    mask = torch.ones(1, 1, 32, 32).tril().bool()
    mask[..., 20:, :20] = False
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        for _ in range(2):
            assert far(model(**inputs, use_cache=False).logits, one_by_one(model, ids, LENGTHS[1:2])) < 1e-9
            with pytest.raises(SurgeryError, match="not causal over the real tokens"):
                model(**inputs, use_cache=True)


def test_one_mask_for_all_rows():
    model, (ids, _) = model_of(CONFIGS["ssd"]), packed_ids()
    mask = torch.ones(1, 1, 32, 32).tril().bool()
    ask = lambda: model(ids, attention_mask=mask, use_cache=False).logits  # noqa: E731
    with torch.no_grad():
        assert far(ask(), model(ids, use_cache=False).logits) < 1e-9
        mask[..., 9, 3] = False
        with pytest.raises(SurgeryError, match="not causal"):
            ask()


def test_two_kinds_of_mixers_in_one_model():
    """One that reads masks and one that does not share what is found out about a mask."""
    for kinds in (["mlr", "ssd"], ["ssd", "mlr"]):
        model, (ids, positions) = model_of({"mixer": ExactConfig.name}), packed_ids()
        paths = attention_paths(model)
        install(model, {path: mixer_config(dict(CONFIGS[kind])) for path, kind in zip(paths, kinds)})
        model.double()
        got = model(ids, position_ids=positions, use_cache=False).logits
        assert far(got, one_by_one(model, ids, LENGTHS)) < 1e-9
    assert DecayedConfig().name == "test-decayed"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype, within", [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_on_a_gpu_whatever_kernels_are_taken(name, dtype, within):
    lengths = [(100, 300, 1, 111), (512,), (37, 256, 219)]
    longer = {"count": 128, "levels": 11, "period": 2000} | ({"length": 600} if name == "toeplitz" else {})
    config = dict(CONFIGS[name])
    if "mask" in config:
        config["mask"] = {key: longer.get(key, value) for key, value in config["mask"].items()}
    model, (ids, positions) = model_of(config, max_position_embeddings=512), packed_ids(lengths)
    model = model.to("cuda", dtype)
    ids, positions = ids.cuda(), positions.cuda()
    with torch.no_grad():
        got = model(ids, position_ids=positions, use_cache=False).logits.double()
        assert far(got, one_by_one(model, ids, lengths).double()) < within


@pytest.mark.parametrize("additive", [False, True])
def test_masks_that_show_later_tokens_are_told_from_causal_ones(additive):
    """Whatever padding sees counts for nothing."""
    valid_BT = torch.ones(2, 6, dtype=torch.bool)
    valid_BT[1, :2] = False
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None] & valid_BT[:, None, None]
    padding, image = causal.clone(), causal.clone()
    padding[1, 0, :2] = True
    image[0, 0, 2:5, 2:5] = True
    for mask, expected in ((causal, False), (padding, False), (image, True)):
        if additive:
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        assert shows_later_tokens(mask, valid_BT) is expected
