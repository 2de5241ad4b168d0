"""Models with recurrent layers of their own: Mamba, Mamba-2, gated delta networks."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.tiny_families import TINY_FAMILIES

import surgery
from surgery.architectures.linears import find_linears
from surgery.checkpoint.meta_model import config_object
from surgery.core.errors import SurgeryError
from surgery.modeling.cache import MixedCacheLayer
from surgery.modeling.cache_io import save_cache

MAMBA2 = ["mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"]


@pytest.mark.parametrize("name", MAMBA2)
def test_models_in_memory_are_planned_and_converted(name):
    """Their configs have infinite limits of the time step, which config.json holds as an object."""
    model = TINY_FAMILIES[name].build()
    ids_BT = TINY_FAMILIES[name].inputs(1, 8, 0)["input_ids"]
    before = model(ids_BT).logits.detach()
    surgery.plan(model, {"structure": "low_rank", "rank": "full"})
    surgery.apply(model, {"structure": "low_rank", "rank": "full"})
    assert torch.allclose(model(ids_BT).logits, before, atol=1e-4 * float(before.abs().max()))


def test_special_floats_are_read_and_other_objects_kept():
    class Kept(dict):
        from_dict = classmethod(lambda cls, config: cls(config))

    config = {"a": [0.0, {"__float__": "Infinity"}], "b": {"__float__": ["Infinity"]}, "c": {"__float__": "x"}}
    assert config_object(Kept, config) == {**config, "a": [0.0, float("inf")]}
    assert config["a"][1] == {"__float__": "Infinity"}


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_gates_of_delta_networks_are_not_replaced(name):
    roles = {
        linear.path.rpartition(".")[2]: linear.roles for linear in find_linears(TINY_FAMILIES[name].build()).linears
    }
    projections = {role for leaf, role in roles.items() if leaf.startswith("in_proj")}
    assert projections <= {(), ("linear.qkv",), ("linear.gate",)} and ("linear.qkv",) in projections
    assert {roles[leaf] for leaf in ("in_proj_a", "in_proj_b", "in_proj_ba") if leaf in roles} == {()}
    assert roles["out_proj"] == ("linear.output",)


@pytest.mark.parametrize(
    ("name", "leaf", "reason"),
    [
        ("mamba", "dt_proj", "MambaMixer reads their weights without calling them"),
        ("zamba2", "gate_up_proj", "layers share them"),
    ],
)
def test_linears_that_must_keep_their_weight_stay_dense(name, leaf, reason):
    model = TINY_FAMILIES[name].build()
    plan = surgery.plan(model, {"structure": "low_rank", "keep": 0.6})
    assert any(reason in note and leaf in note for note in plan["notes"]), plan["notes"]
    assert not any(leaf in linear.path for linear in find_linears(model).linears)


# -- a mixer beside a recurrent state ----------------------------------------------------------------
@pytest.fixture(scope="module")
def mixed():
    model = TINY_FAMILIES["falcon_h1"].build()
    surgery.apply(model, {"structure": "dense", "attention": {"mixer": "linear", "mask": "hierarchical"}})
    return model.eval()


@torch.no_grad()
def test_both_states_go_on_from_call_to_call(mixed):
    ids_BT = TINY_FAMILIES["falcon_h1"].inputs(2, 24, 1)["input_ids"]
    whole, parts, cache = mixed(ids_BT).logits, [], None
    for start, stop in ((0, 7), (7, 8), (8, 9), (9, 20), (20, 24)):
        out = mixed(ids_BT[:, start:stop], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5 * float(whole.abs().max()))
    assert all(isinstance(layer, MixedCacheLayer) for layer in cache.layers)
    assert cache.layers[0].nbytes() > cache.layers[0].recurrent_states[0].nbytes

    swapped, rows = copy.deepcopy(cache), torch.tensor([1, 0])
    swapped.reorder_cache(rows)
    token_B1 = ids_BT[:, -1:]
    straight = mixed(token_B1, past_key_values=cache).logits
    assert torch.equal(mixed(token_B1[rows], past_key_values=swapped).logits, straight[rows])


def test_both_states_are_not_saved_to_a_file(mixed, tmp_path):
    cache = mixed(torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
    with pytest.raises(SurgeryError, match="layer 0 of the cache is a MixedCacheLayer"):
        save_cache(cache, tmp_path / "cache.safetensors")
    assert not list(tmp_path.iterdir())


def test_tokens_cannot_be_removed_from_both(mixed):
    cache = mixed(torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
    layer = cache.layers[0]
    assert not layer.is_croppable
    for refused in (layer.activate_past_recording, layer.hold, lambda: layer.crop(-1)):
        with pytest.raises(SurgeryError, match="tokens cannot be removed"):
            refused()
    layer.reset()
    assert layer.get_seq_length() == 0 and not layer.has_previous_state[0]
