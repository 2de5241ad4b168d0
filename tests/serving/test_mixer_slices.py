"""Mixers cut by heads: the slices' outputs side by side are the whole output.

Needs no vLLM.
"""

from __future__ import annotations

import pytest
import torch
from serving.test_mixer_state import OTHERS, RECIPES, SHAPE, random_tokens, recipe_mixer

from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, MixerInputs, mixer_config
from surgery.mixers.features.base import FEATURES
from surgery.vllm.mixer_slices import MixerSlices, slice_shape


def sliced(whole, rank: int, count: int):
    """Return the mixer of one process's heads with its part of the tensors."""
    slices = MixerSlices(whole.config, SHAPE, rank, count)
    mixer = MIXERS[whole.config](whole.config, slice_shape(SHAPE, count, "layer")).eval()
    for name, tensor in mixer.state_dict().items():
        slices.copy(name, tensor, whole.state_dict()[name])
    return mixer


def heads_of(inputs: MixerInputs, rank: int, count: int) -> MixerInputs:
    q, k, v = (t.chunk(count, 1)[rank] for t in (inputs.q_BHTK, inputs.k_BGTK, inputs.v_BGTV))
    return MixerInputs(q, k, v, inputs.x_BTD, rope=inputs.rope)


def check(whole) -> None:
    torch.manual_seed(1)
    inputs = random_tokens(37).as_rows(1)
    wanted, _ = whole.mix(inputs, whole.empty_state(1, "cpu"))
    found = []
    for rank in range(2):
        mixer = sliced(whole, rank, 2)
        out, _ = mixer.mix(heads_of(inputs, rank, 2), mixer.empty_state(1, "cpu"))
        found.append(out)
    largest = max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("name", (*RECIPES, *OTHERS))
@torch.no_grad()
def test_heads_of_two_processes_are_the_whole_output(name):
    check(recipe_mixer(name))


@pytest.mark.parametrize("features", FEATURES.names())
@torch.no_grad()
def test_every_feature_map(features):
    options = {"features": features, "normalise": features in ("favor", "lara"), "window": 6}
    config = mixer_config({"mixer": "linear", "mask": "gates", **options})
    torch.manual_seed(0)
    mixer = MIXERS[config](config, SHAPE).eval()
    for tensor in mixer.state_dict().values():
        tensor.add_(0.2 * torch.randn_like(tensor))
    check(mixer)


def test_heads_that_do_not_divide_and_tensors_of_other_shapes_are_refused():
    with pytest.raises(SurgeryError, match="4 processes must divide the 2 key/value heads and the 4 query heads"):
        slice_shape(SHAPE, 4, "layer")
    whole = recipe_mixer("ssd")
    slices = MixerSlices(whole.config, SHAPE, 0, 2)
    name, tensor = next(iter(whole.state_dict().items()))
    with pytest.raises(SurgeryError, match="of a mixer has shape"):
        slices.cut(name, torch.cat([tensor, tensor]))
