"""MLR attention as it was arranged (surgery/conversion/mixer_init/mlr_allocation.py). Near scores, which are to make up for what far ones lose, are
kept where held-out windows agree."""

from __future__ import annotations

from dataclasses import replace

from surgery.calibration.attention_samples import Windows
from surgery.conversion.mixer_init.base import STARTS, Start, Started, blank, relative_error
from surgery.mixers.mlr import MLR
from surgery.planning.attention_plan import Seat
from surgery.planning.attention_recipe import Attention


@STARTS.register(MLR)
class MLRStart(Start):
    def start(self, seat: Seat, settings: Attention, fit: Windows, held: Windows) -> Started:
        device = fit[0].inputs.q_BHTK.device
        without = {name: value for name, value in seat.fixed.items() if name != "near"}
        plain = blank(replace(seat, fixed=without), device)
        errors = {"arranged": relative_error(plain, held)}
        if "near" not in seat.fixed:
            return Started(plain, errors)
        mixer = blank(seat, device)
        errors["near"] = relative_error(mixer, held)
        return Started(mixer if errors["near"] < errors["arranged"] else plain, errors)
