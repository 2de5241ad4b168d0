"""The protocol of a start: windows of the teacher's attention in, a mixer out, with the errors before and after.

    initialized = STARTS[config]().init(target, settings, fit, held)

`fit` and `held` are surgery.calibration.attention_samples.AttentionSamples; what is fitted is accepted only if the error on held-out windows falls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.attention_samples import AttentionSample, AttentionSamples
from surgery.core.registry import Registry
from surgery.mixers import MIXERS, Mixer
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.attention_recipe import AttentionRecipe


@dataclass
class InitializedMixer:
    """errors: name of the stage -> relative error of the heads' outputs on held-out windows, |o - o*| / |o*|."""

    mixer: Mixer
    errors: dict[str, float]


class MixerInit:
    """As an untrained mixer starts, with the model's own projections."""

    def init(
        self, target: AttentionTarget, settings: AttentionRecipe, fit: AttentionSamples, held: AttentionSamples
    ) -> InitializedMixer:
        mixer = build_mixer(target, fit[0].inputs.q_BHTK.device)
        return InitializedMixer(mixer, {"copied": relative_error(mixer, held)})


MIXER_INITS: Registry[MixerInit] = Registry("start", "surgery.conversion.mixer_init")


def build_mixer(target: AttentionTarget, device: torch.device) -> Mixer:
    with torch.device(device):
        mixer = MIXERS[target.config](target.config, target.shape).float()
        for name, value in target.fixed.items():
            mixer.state_dict()[name].copy_(torch.tensor(value))
    return mixer


def unpadded_tokens(x_BHTV: Tensor, window: AttentionSample) -> Tensor:
    """(H, N, V): tokens that are not padding."""
    valid_BT = window.inputs.valid_BT
    x_HXV = x_BHTV.transpose(0, 1).flatten(1, 2)
    return x_HXV if valid_BT is None else x_HXV[:, valid_BT.flatten()]


ERROR_CAP = 1e30


@torch.no_grad()
def relative_error(mixer: Mixer, windows: Iterable[AttentionSample]) -> float:
    wrong = whole = 0.0
    for window in windows:
        out_BHTV, _ = mixer.mix(window.inputs)
        wrong += float(unpadded_tokens(out_BHTV.float() - window.target_BHTV, window).square().sum(dtype=torch.float64))
        whole += float(unpadded_tokens(window.target_BHTV, window).square().sum(dtype=torch.float64))
    error = (wrong / max(whole, 1e-30)) ** 0.5
    return error if error < ERROR_CAP else ERROR_CAP  # not a number neither, which JSON has no word for


def select_init(config: Any, settings: AttentionRecipe) -> MixerInit:
    """The family's own, or the plain one where the recipe says so or there is no other."""
    if settings.start == "copied" or type(config) not in list(MIXER_INITS):
        return MixerInit()
    return MIXER_INITS[config]()
