"""Initialize MLR attention from the ranks and the order of dimensions that `mlr_allocation` chose.

Near scores, which compensate on average for the dimensions that distant pairs lose, are kept only if the held-out error
falls.
"""

from __future__ import annotations

from dataclasses import replace

from surgery.calibration.attention_samples import AttentionSamples
from surgery.conversion.mixer_init.base import MIXER_INITS, InitializedMixer, MixerInit, build_mixer, relative_error
from surgery.mixers.mlr import MLR
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.attention_recipe import AttentionRecipe


@MIXER_INITS.register(MLR)
class MLRInit(MixerInit):
    """Initialization of MLR attention (see the module)."""

    def init(
        self, target: AttentionTarget, settings: AttentionRecipe, fit: AttentionSamples, held: AttentionSamples
    ) -> InitializedMixer:
        """Return the mixer with near scores if they lower the held-out error, otherwise the one without."""
        device = fit[0].inputs.q_BHTK.device
        without = {name: value for name, value in target.fixed.items() if name != "near"}
        plain = build_mixer(replace(target, fixed=without), device)
        errors = {"arranged": relative_error(plain, held)}
        if "near" not in target.fixed:
            return InitializedMixer(plain, errors)
        mixer = build_mixer(target, device)
        errors["near"] = relative_error(mixer, held)
        return InitializedMixer(mixer if errors["near"] < errors["arranged"] else plain, errors)
