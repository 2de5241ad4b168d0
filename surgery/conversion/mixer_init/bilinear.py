"""Initialize bilinear scores from softmax attention.

With base "kept" the bilinear term is added to the original score and starts at zero, which is exact. With base "own",
possible in attention without RoPE, it replaces the score: W_Q W_K^T is projected in the metric of the calibration
inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.calibration.attention_samples import AttentionSamples
from surgery.conversion.mixer_init.base import MIXER_INITS, InitializedMixer, MixerInit, build_mixer, relative_error
from surgery.mixers.bilinear import Bilinear, fit_bilinear
from surgery.mixers.bilinear_btt import BilinearBTT
from surgery.mixers.bilinear_mlbtc import BilinearMLBTC
from surgery.mixers.bilinear_mlr import BilinearMLR
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.attention_recipe import AttentionRecipe
from surgery.planning.weights import role_weight


@MIXER_INITS.register(BilinearBTT)
@MIXER_INITS.register(BilinearMLBTC)
@MIXER_INITS.register(BilinearMLR)
class BilinearInit(MixerInit):
    """Initialization of bilinear mixers (see the module)."""

    def init(
        self, target: AttentionTarget, settings: AttentionRecipe, fit: AttentionSamples, held: AttentionSamples
    ) -> InitializedMixer:
        """Return the mixer with projected scores if they lower the held-out error, otherwise the untrained one."""
        device = fit[0].inputs.x_BTD.device
        mixer = build_mixer(target, device)
        assert isinstance(mixer, Bilinear)
        errors = {"copied": relative_error(mixer, held)}
        if mixer.config.base == "own" and mixer.config.norm == "none" and not target.shape.rotary:
            projected = build_mixer(target, device)
            assert isinstance(projected, Bilinear)
            query, key = (role_weight(fit.meta_model, target.layer, f"attention.{role}") for role in ("query", "key"))
            moment_DD, mean_D = input_moments(fit)
            bias = None if query[1] is None else query[1].unflatten(0, (target.shape.heads, -1))
            per_head = (split_heads(query[0], target.shape.heads), split_heads(key[0], target.shape.groups))
            fit_bilinear(projected, *per_head, moment_DD, mean_D, bias)
            errors["projected"] = relative_error(projected, held)
            mixer = projected if errors["projected"] < errors["copied"] else mixer
        return InitializedMixer(mixer, errors)


def split_heads(weight_OI: Tensor, heads: int) -> Tensor:
    """Return a projection's weight (H K, D) as (H, D, K)."""
    per_head_HKD: Tensor = weight_OI.unflatten(0, (heads, -1))
    return per_head_HKD.mT


@torch.no_grad()
def input_moments(samples: AttentionSamples) -> tuple[Tensor, Tensor]:
    """Return E[x x^T] (D, D) and E[x] (D,) of the input of the projections, over real tokens."""
    moment_DD, sum_D, count = torch.zeros(()), torch.zeros(()), 0
    for sample in samples:
        x_BTD, valid_BT = sample.inputs.x_BTD.float(), sample.inputs.valid_BT
        x_ND = x_BTD.flatten(0, 1) if valid_BT is None else x_BTD[valid_BT]
        moment_DD, sum_D, count = moment_DD + x_ND.mT @ x_ND, sum_D + x_ND.sum(0), count + len(x_ND)
    return moment_DD / count, sum_D / count
