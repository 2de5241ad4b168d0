"""Initialize softmax attention without RoPE: the sharpness of each query head, by a grid search on calibration samples.

Without positions, scores that RoPE made decay with distance spread over all tokens. One factor on the scores of a head
is what can be fitted without training; the output projection is refitted afterwards, as for every mixer.
"""

from __future__ import annotations

import copy

import torch

from surgery.calibration.attention_samples import AttentionSamples
from surgery.conversion.mixer_init.base import (
    MIXER_INITS,
    InitializedMixer,
    MixerInit,
    build_mixer,
    relative_error,
    unpadded_tokens,
)
from surgery.mixers.softmax import Softmax, SoftmaxAttention
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.attention_recipe import AttentionRecipe

SHARPNESS = tuple(2.0 ** (n / 2) for n in range(-6, 7))  # candidates of h, 1/8 to 8
SAMPLES = 4  # samples that the search reads


@MIXER_INITS.register(Softmax)
class SoftmaxInit(MixerInit):
    """Initialization of softmax attention; with RoPE there is nothing to fit."""

    def init(
        self, target: AttentionTarget, settings: AttentionRecipe, fit: AttentionSamples, held: AttentionSamples
    ) -> InitializedMixer:
        """Return the mixer with the best sharpness of each head, unless the error on the held-out samples does not
        fall.
        """
        mixer = build_mixer(target, fit[0].inputs.q_BHTK.device)
        assert isinstance(mixer, SoftmaxAttention)
        errors = {"copied": relative_error(mixer, held)}
        if mixer.sharpness_H is None:
            return InitializedMixer(mixer, errors)
        candidate = sharpen(copy.deepcopy(mixer), fit)
        errors["sharpness"] = relative_error(candidate, held)
        return InitializedMixer(candidate if errors["sharpness"] < errors["copied"] else mixer, errors)


@torch.no_grad()
def sharpen(mixer: SoftmaxAttention, fit: AttentionSamples) -> SoftmaxAttention:
    """Set each head's sharpness to the candidate with the lowest squared error of its output, in place; return the
    mixer.
    """
    assert mixer.sharpness_H is not None
    error_SH = torch.zeros(len(SHARPNESS), mixer.shape.heads, dtype=torch.float64)
    for i in range(min(len(fit), SAMPLES)):
        sample = fit[i]
        target_HNV = unpadded_tokens(sample.target_BHTV.float(), sample)
        for s, sharpness in enumerate(SHARPNESS):
            mixer.sharpness_H.fill_(sharpness)
            out_HNV = unpadded_tokens(mixer(sample.inputs)[0].float(), sample)
            error_SH[s] += (out_HNV - target_HNV).square().sum((1, 2), dtype=torch.float64).cpu()
    best_H = error_SH.nan_to_num(nan=torch.inf).argmin(0)
    mixer.sharpness_H.copy_(torch.tensor(SHARPNESS)[best_H])
    return mixer
