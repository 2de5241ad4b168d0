"""MLR attention as it was arranged (surgery/conversion/mixer_init/mlr_allocation.py). Near scores, which are to make up for what far ones lose, are
kept where held-out windows agree."""

from __future__ import annotations

from dataclasses import replace

from surgery.calibration.attention_samples import AttentionSamples
from surgery.conversion.mixer_init.base import MIXER_INITS, InitializedMixer, MixerInit, build_mixer, relative_error
from surgery.mixers.mlr import MLR
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.attention_recipe import AttentionRecipe


@MIXER_INITS.register(MLR)
class MLRInit(MixerInit):
    def init(
        self, target: AttentionTarget, settings: AttentionRecipe, fit: AttentionSamples, held: AttentionSamples
    ) -> InitializedMixer:
        device = fit[0].inputs.q_BHTK.device
        without = {name: value for name, value in target.fixed.items() if name != "near"}
        plain = build_mixer(replace(target, fixed=without), device)
        errors = {"arranged": relative_error(plain, held)}
        if "near" not in target.fixed:
            return InitializedMixer(plain, errors)
        mixer = build_mixer(target, device)
        errors["near"] = relative_error(mixer, held)
        return InitializedMixer(mixer if errors["near"] < errors["arranged"] else plain, errors)
