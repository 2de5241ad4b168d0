"""Bilinear scores initialized from softmax attention. Beside a kept score they begin at zero, which is exact. One that
stands alone, which attention without RoPE allows, is W_Q W_K^T projected in the metric of the calibration inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.calibration.attention_samples import AttentionSamples
from surgery.conversion.mixer_init.base import MIXER_INITS, InitializedMixer, MixerInit, build_mixer, relative_error
from surgery.mixers.bilinear import Bilinear, fit_bilinear
from surgery.mixers.bilinear_btt import BilinearBTT
from surgery.mixers.bilinear_mlr import BilinearMLR
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.attention_recipe import AttentionRecipe
from surgery.planning.weights import role_weight


@MIXER_INITS.register(BilinearBTT)
@MIXER_INITS.register(BilinearMLR)
class BilinearInit(MixerInit):
    def init(
        self, target: AttentionTarget, settings: AttentionRecipe, fit: AttentionSamples, held: AttentionSamples
    ) -> InitializedMixer:
        device = fit[0].inputs.x_BTD.device
        mixer = build_mixer(target, device)
        assert isinstance(mixer, Bilinear)
        errors = {"copied": relative_error(mixer, held)}
        if mixer.config.base == "own" and mixer.config.norm == "none" and not target.shape.rotary:
            better = build_mixer(target, device)
            assert isinstance(better, Bilinear)
            query, key = (role_weight(fit.meta_model, target.layer, f"attention.{role}") for role in ("query", "key"))
            moment_DD, mean_D = input_moments(fit)
            bias = None if query[1] is None else query[1].unflatten(0, (target.shape.heads, -1))
            per_head = (split_heads(query[0], target.shape.heads), split_heads(key[0], target.shape.groups))
            fit_bilinear(better, *per_head, moment_DD, mean_D, bias)
            errors["projected"] = relative_error(better, held)
            mixer = better if errors["projected"] < errors["copied"] else mixer
        return InitializedMixer(mixer, errors)


def split_heads(weight_OI: Tensor, heads: int) -> Tensor:
    """(H, D, K)"""
    return weight_OI.unflatten(0, (heads, -1)).mT


@torch.no_grad()
def input_moments(windows: AttentionSamples) -> tuple[Tensor, Tensor]:
    """E[x x^T] and E[x] of what the projections read, over real tokens."""
    moment_DD, sum_D, count = torch.zeros(()), torch.zeros(()), 0
    for window in windows:
        x_BTD, valid_BT = window.inputs.x_BTD.float(), window.inputs.valid_BT
        x_ND = x_BTD.flatten(0, 1) if valid_BT is None else x_BTD[valid_BT]
        moment_DD, sum_D, count = moment_DD + x_ND.mT @ x_ND, sum_D + x_ND.sum(0), count + len(x_ND)
    return moment_DD / count, sum_D / count
