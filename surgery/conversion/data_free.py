"""Layers converted without a calibration text: weights projected in the Frobenius norm, mixers as an untrained one
starts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from surgery.checkpoint.meta_model import MetaModel
from surgery.conversion.fit import FitContext, fit_linear
from surgery.conversion.mixer_init.base import InitializedMixer, build_mixer
from surgery.conversion.replacement import LayerReplacement, fold_output, add_linear, add_mixer, stored_dtype
from surgery.core.device import side_stream
from surgery.planning.plan import Plan
from surgery.planning.weights import target_weight


def convert_layers_data_free(
    skeleton: MetaModel, plan: Plan, given: dict[str, float], layers: list[str], device: torch.device
) -> Iterator[tuple[str, LayerReplacement, float]]:
    """(layer, its grafts, the seconds they took), in order. A GPU waits for files and for its own eigensolver: there
    three layers are under way at a time."""
    ahead = 3 if device.type == "cuda" else 1
    with ThreadPoolExecutor(ahead) as pool:
        waiting = deque(pool.submit(_convert_layer, skeleton, plan, given, path, device) for path in layers[:ahead])
        for i, path in enumerate(layers):
            yield path, *waiting.popleft().result()
            if i + ahead < len(layers):
                waiting.append(pool.submit(_convert_layer, skeleton, plan, given, layers[i + ahead], device))


def _convert_layer(
    skeleton: MetaModel, plan: Plan, given: dict[str, float], path: str, device: torch.device
) -> tuple[LayerReplacement, float]:
    began, grafts = time.perf_counter(), LayerReplacement()
    with side_stream(device):
        for cuts in plan.of_layer(path).values():
            fitted = []
            for cut in cuts:
                judge = FitContext(stored=stored_dtype(skeleton, cut))
                fitted.append(fit_linear(cut, given[cut.name], target_weight(skeleton, cut, device), judge))
            add_linear(skeleton, list(cuts), fitted, device, grafts)
        if seat := plan.seats.get(path):
            add_mixer(skeleton, seat, InitializedMixer(build_mixer(seat, device), {}), grafts)
            fold_output(skeleton, plan, seat, device, grafts)
    return grafts, time.perf_counter() - began
