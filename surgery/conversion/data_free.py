"""Layers converted without a calibration text: weights projected in the Frobenius norm, mixers as an untrained one
starts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from surgery.checkpoint.meta_model import Skeleton
from surgery.conversion.fit import Judge, fit_cut
from surgery.conversion.mixer_init.base import Started, blank
from surgery.conversion.replacement import Grafts, fold_output, graft, seat_mixer, stored_dtype
from surgery.core.device import own_stream
from surgery.planning.plan import Plan
from surgery.planning.weights import matrix_of


def layers_without_text(
    skeleton: Skeleton, plan: Plan, given: dict[str, float], layers: list[str], device: torch.device
) -> Iterator[tuple[str, Grafts, float]]:
    """(layer, its grafts, the seconds they took), in order. A GPU waits for files and for its own eigensolver: there
    three layers are under way at a time."""
    ahead = 3 if device.type == "cuda" else 1
    with ThreadPoolExecutor(ahead) as pool:
        waiting = deque(pool.submit(_layer, skeleton, plan, given, path, device) for path in layers[:ahead])
        for i, path in enumerate(layers):
            yield path, *waiting.popleft().result()
            if i + ahead < len(layers):
                waiting.append(pool.submit(_layer, skeleton, plan, given, layers[i + ahead], device))


def _layer(
    skeleton: Skeleton, plan: Plan, given: dict[str, float], path: str, device: torch.device
) -> tuple[Grafts, float]:
    began, grafts = time.perf_counter(), Grafts()
    with own_stream(device):
        for cuts in plan.of_layer(path).values():
            fitted = []
            for cut in cuts:
                judge = Judge(stored=stored_dtype(skeleton, cut))
                fitted.append(fit_cut(cut, given[cut.name], matrix_of(skeleton, cut, device), judge))
            graft(skeleton, list(cuts), fitted, device, grafts)
        if seat := plan.seats.get(path):
            seat_mixer(skeleton, seat, Started(blank(seat, device), {}), grafts)
            fold_output(skeleton, plan, seat, device, grafts)
    return grafts, time.perf_counter() - began
