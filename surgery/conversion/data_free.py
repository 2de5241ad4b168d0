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
from surgery.conversion.replacement import LayerReplacement, add_linear, add_mixer, fold_output, stored_dtype
from surgery.core.device import side_stream
from surgery.planning.plan import Plan
from surgery.planning.weights import target_weight


def convert_layers_data_free(
    meta_model: MetaModel, plan: Plan, target_budgets: dict[str, float], layers: list[str], device: torch.device
) -> Iterator[tuple[str, LayerReplacement, float]]:
    """(layer, its replacement, the seconds they took), in order. A GPU waits for files and for its own eigensolver: there
    three layers are under way at a time."""
    ahead = 3 if device.type == "cuda" else 1
    with ThreadPoolExecutor(ahead) as pool:
        waiting = deque(
            pool.submit(_convert_layer, meta_model, plan, target_budgets, path, device) for path in layers[:ahead]
        )
        for i, path in enumerate(layers):
            yield path, *waiting.popleft().result()
            if i + ahead < len(layers):
                waiting.append(pool.submit(_convert_layer, meta_model, plan, target_budgets, layers[i + ahead], device))


def _convert_layer(
    meta_model: MetaModel, plan: Plan, target_budgets: dict[str, float], path: str, device: torch.device
) -> tuple[LayerReplacement, float]:
    began, replacement = time.perf_counter(), LayerReplacement()
    with side_stream(device):
        for targets in plan.targets_in_layer(path).values():
            fitted = []
            for target in targets:
                fit_context = FitContext(stored_dtype=stored_dtype(meta_model, target))
                fitted.append(
                    fit_linear(
                        target, target_budgets[target.name], target_weight(meta_model, target, device), fit_context
                    )
                )
            add_linear(meta_model, list(targets), fitted, device, replacement)
        if attention_target := plan.attention_targets.get(path):
            add_mixer(
                meta_model, attention_target, InitializedMixer(build_mixer(attention_target, device), {}), replacement
            )
            fold_output(meta_model, plan, attention_target, device, replacement)
    return replacement, time.perf_counter() - began
