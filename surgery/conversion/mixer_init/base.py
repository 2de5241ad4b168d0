"""Interface of mixer initializations: samples of the original attention in, an initialized mixer and its errors out.

    initialized = MIXER_INITS[config]().init(target, settings, fit, held)

`fit` and `held` are AttentionSamples. A fitted mixer is accepted only if the error on the held-out samples falls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.calibration.attention_samples import AttentionSample, AttentionSamples
from surgery.core.registry import Registry
from surgery.mixers import MIXERS, Mixer, MixerConfig
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.attention_recipe import AttentionRecipe


@dataclass
class InitializedMixer:
    """A mixer and the error after each stage of its initialization.

    errors: name of the stage -> relative error of the heads' outputs on held-out samples, |o - o*| / |o*|.
    """

    mixer: Mixer
    errors: dict[str, float]


class MixerInit:
    """The plain initialization: an untrained mixer behind the model's own projections. Base class of all others."""

    def init(
        self, target: AttentionTarget, settings: AttentionRecipe, fit: AttentionSamples, held: AttentionSamples
    ) -> InitializedMixer:
        """Return the initialized mixer. fit: samples to fit to; held: held-out samples, for the errors."""
        mixer = build_mixer(target, fit[0].inputs.q_BHTK.device)
        return InitializedMixer(mixer, {"copied": relative_error(mixer, held)})


SEED_STEP = 1_000_003  # between the seeds of two layers


MIXER_INITS: Registry[MixerInit] = Registry("mixer initialization", "surgery.conversion.mixer_init")


def build_mixer(target: AttentionTarget, device: torch.device) -> Mixer:
    """Return the target's mixer, untrained, in float32, with the tensors of `target.fixed` set.

    Random tensors depend on the seed of the conversion and on the layer alone, not on what was drawn before: processes
    share the layers, and a resumed conversion begins in the middle.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed((torch.initial_seed() + SEED_STEP * (1 + target.index)) % 2**63)
        mixer = MIXERS[target.config](target.config, target.shape).float()
        for name, value in target.fixed.items():
            mixer.state_dict()[name].copy_(torch.tensor(value))
    return mixer


def unpadded_tokens(x_BHTV: Tensor, sample: AttentionSample) -> Tensor:
    """Return the N real tokens of a sample, without padding, as (H, N, V)."""
    valid_BT = sample.inputs.valid_BT
    x_HXV = x_BHTV.transpose(0, 1).flatten(1, 2)
    return x_HXV if valid_BT is None else x_HXV[:, valid_BT.flatten()]


ERROR_CAP = 1e30  # largest error in a report


@torch.no_grad()
def relative_error(mixer: Mixer, samples: Iterable[AttentionSample]) -> float:
    """Return |o - o*| / |o*| of the heads' outputs over all real tokens, at most ERROR_CAP."""
    difference = norm = 0.0
    for sample in samples:
        out_BHTV, _ = mixer.mix(sample.inputs)
        error_HNV = unpadded_tokens(out_BHTV.float() - sample.target_BHTV, sample)
        difference += float(error_HNV.square().sum(dtype=torch.float64))
        norm += float(unpadded_tokens(sample.target_BHTV, sample).square().sum(dtype=torch.float64))
    error = (difference / max(norm, 1e-30)) ** 0.5
    return error if error < ERROR_CAP else ERROR_CAP  # NaN compares false, so it becomes ERROR_CAP: JSON has no NaN


def select_init(config: MixerConfig, settings: AttentionRecipe) -> MixerInit:
    """Return the initialization of the mixer's family; the plain one with start: copied, or if the family has none."""
    if settings.start == "copied" or config not in MIXER_INITS:
        return MixerInit()
    return MIXER_INITS[config]()
